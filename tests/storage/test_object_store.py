"""Object stores beyond the conformance suite: settings, prefixes, servers without ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorstore

from holdfast.engine.errors import DamagedCheckpointError, ObjectNotFoundError
from holdfast.engine.storage import Location, Segment, as_location
from holdfast.engine.storage.folders import MemoryBackend
from holdfast.integrations.formats.orbax.arrays import directory_spec


@pytest.fixture
def root(place: str) -> Location:
    return as_location(place)


DEFAULT = {
    "driver": "s3",
    "bucket": "runs",
    "path": "x/",
    "aws_credentials": {"type": "default", "profile": "default"},
}


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("memory://x", {}, {"driver": "memory", "path": "x/"}),
        ("gs://runs/x", {}, {"driver": "gcs", "bucket": "runs", "path": "x/"}),
        ("s3://runs/x", {}, DEFAULT),
        ("s3://runs/x", {"AWS_REGION": "eu-1"}, DEFAULT | {"aws_region": "eu-1"}),
        ("s3://runs/x", {"AWS_PROFILE": "lab"}, DEFAULT | {"aws_credentials": {"type": "default", "profile": "lab"}}),
        (
            "s3://runs/x",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            DEFAULT | {"endpoint": "http://127.0.0.1:9", "aws_region": "us-east-1"},
        ),
        (
            "s3://runs/x",
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b", "AWS_DEFAULT_REGION": "r"},
            DEFAULT | {"endpoint": "http://b", "aws_region": "r"},
        ),
        ("s3://runs/x", {"AWS_ACCESS_KEY_ID": "key"}, DEFAULT | {"aws_credentials": {"type": "environment"}}),
    ],
    ids=["memory", "gs", "s3", "region", "profile", "endpoint", "endpoint-s3", "credentials"],
)
def test_what_tensorstore_is_told_of_a_store(
    url: str, environment: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert directory_spec(as_location(url)) == expected
    assert tensorstore.KvStore.Spec(expected).to_json()["driver"] == expected["driver"]


def test_one_backend_for_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = as_location("s3://runs")
    assert as_location("s3://runs")._backend is first._backend
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert as_location("s3://runs") != first
    assert as_location("memory://").is_directory()
    assert as_location("memory://").exists()


def test_an_object_may_also_be_a_prefix(root: Location) -> None:
    (root / "step").write_bytes(b"object")
    (root / "step" / "below").write_bytes(b"deeper")
    assert [(entry.name, entry.is_directory) for entry in root.entries()] == [("step", True)]
    (root / "step").rename("moved")
    assert (root / "moved").read_bytes() == b"object"
    assert (root / "moved" / "below").read_bytes() == b"deeper"
    (root / "moved").remove_tree()
    assert root.entries() == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[slice | None]:
    """Records every read, and refuses ranges that do not start at 0 or end behind the object, as some servers do."""
    seen: list[slice | None] = []
    real = MemoryBackend.read_range

    def read_range(self: MemoryBackend, key: str, byte_range: slice | None) -> bytes:
        seen.append(byte_range)
        if byte_range is not None and (byte_range.start > 0 or byte_range.stop > len(self.files[key])):
            raise DamagedCheckpointError(f"cannot read {key}: OUT_OF_RANGE")
        return real(self, key, byte_range)

    monkeypatch.setattr(MemoryBackend, "read_range", read_range)
    return seen


def test_without_ranges_the_object_is_read_once(root: Location, reads: list[slice | None]) -> None:
    data = np.arange(10_000, dtype=np.uint32).view(np.uint8)
    (root / "data").write_data(data.size, [Segment(0, data.size, lambda: iter([data]))])
    with (root / "data").open_data() as reader:
        for offset in (100, 200, 0, 39_999):
            assert reader.read(offset, 1)[0] == data[offset]
        with pytest.raises(DamagedCheckpointError, match="40000 bytes"):
            reader.read(39_999, 2)
    assert reads.count(None) == 1


def test_without_ranges_long_objects_are_still_refused(root: Location, reads: list[slice | None]) -> None:
    (root / "object").write_bytes(bytes(100))
    with pytest.raises(DamagedCheckpointError, match="longer than the limit of 99 bytes"):
        (root / "object").read_bytes(99)
    assert (root / "object").read_bytes(100) == bytes(100)
    assert reads == [slice(0, 100), None, slice(0, 101), None, None], "the start, the length, the object"


def test_an_object_that_vanishes_while_it_is_open(root: Location) -> None:
    (root / "data").write_bytes(b"content")
    with (root / "data").open_data() as reader:
        (root / "data").remove()
        with pytest.raises(ObjectNotFoundError, match="data"):
            reader.read(0, 7)
