"""Object stores beyond the conformance suite: settings, prefixes, servers without ranges."""

from __future__ import annotations

from typing import Any

import pytest
import tensorstore

from holdfast.engine.errors import ObjectNotFoundError
from holdfast.engine.storage import Location, as_location
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


def test_an_object_that_vanishes_while_it_is_open(root: Location) -> None:
    (root / "data").write_bytes(b"content")
    with (root / "data").open_data() as reader:
        (root / "data").remove()
        with pytest.raises(ObjectNotFoundError, match="data"):
            reader.read(0, 7)
