"""The short way of data files to stores: what it sends and accepts, and when it leaves the rest to TensorStore."""

from __future__ import annotations

import re
import socket
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.object_stores.conftest import Store
from tests.object_stores.store_server import Answer

import holdfast as hf
from holdfast.engine.arrays import extents
from holdfast.engine.arrays.assemble import Assembly
from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.storage import Location, Segment, as_location, kvstore, s3_transfer, store_spec, transfer
from holdfast.engine.storage.gcs_transfer import GcsTransfer
from holdfast.engine.storage.s3_transfer import S3Transfer
from holdfast.engine.storage.transfer import Part, Patience, Transfer

DATA = np.arange(200_000, dtype=np.uint32).view(np.uint8)
CHUNK = 64 << 10
LAYOUT = hf.Layout(chunk_bytes=CHUNK, segment_bytes=CHUNK)
PATIENT = Patience(30.0, 20.0, lambda: None)


def parts(sent: bool = True) -> Iterator[Part]:
    """Short and long parts."""
    for start, end in ((0, 4), (4, 1000), (1000, 400_000), (400_000, 400_004), (400_004, DATA.size)):
        yield DATA[start:end]


def nothing() -> None:
    pass


def write(place: Location) -> None:
    place.write_data(DATA.size, [Segment(0, DATA.size, parts)])


@pytest.fixture
def client(store: Store) -> Transfer:
    spec = store_spec(store.url[:2], store.bucket)
    found = S3Transfer.open(spec) if spec["driver"] == "s3" else GcsTransfer.open(spec)
    assert found is not None
    return found


ENDPOINT = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.mark.parametrize(
    ("bucket", "environment", "usable"),
    [
        ("runs", ENDPOINT | CREDENTIALS, True),
        ("runs", {"AWS_REGION": "eu-west-1"} | CREDENTIALS, True),
        ("runs", ENDPOINT, False),
        ("runs", CREDENTIALS, False),
        ("my.runs", {"AWS_REGION": "eu-west-1"} | CREDENTIALS, False),
        ("my.runs", ENDPOINT | CREDENTIALS, True),
        ("runs", {"AWS_REGION": "cn-north-1"} | CREDENTIALS, False),
        ("runs", ENDPOINT | CREDENTIALS | {"http_proxy": "http://127.0.0.1:8"}, False),
        ("runs", ENDPOINT | CREDENTIALS | {"http_proxy": "http://127.0.0.1:8", "no_proxy": "127.0.0.1"}, True),
        ("runs", {"AWS_ENDPOINT_URL": "ftp://127.0.0.1"} | CREDENTIALS, False),
    ],
    ids=[
        "endpoint",
        "amazon",
        "no credentials",
        "no region",
        "dot",
        "dot, endpoint",
        "china",
        "proxy",
        "no proxy",
        "ftp",
    ],
)
def test_where_only_tensorstore_can_decide(
    bucket: str, environment: dict[str, str], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(s3_transfer, "LOOKUP_URL", "http://127.0.0.1:9/{}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (S3Transfer.open(store_spec("s3", bucket)) is not None) == usable


@pytest.mark.parametrize("key", ["a/b", "a b/größe", "+&=~'()*!@,;:$%41"])
def test_there_and_back(store: Store, client: Transfer, key: str) -> None:
    assert client.put(key, DATA.size, parts, PATIENT) == "done"
    memory = np.zeros(100_000, np.uint8)
    assert client.get(key, 5, [memory[:70_000], memory[70_000:]], PATIENT, nothing)
    assert np.array_equal(memory, DATA[5:100_005])
    assert store.stored() == [key]
    assert not client.get(key, DATA.size - 10, [memory], PATIENT, nothing), "the object ends before the range"


@pytest.mark.parametrize("key", ["a/b", "a b/größe", "+&=~'()*!@,;:$%41"])
def test_a_copy_that_the_service_makes(store: Store, client: Transfer, key: str) -> None:
    assert client.put(key, DATA.size, parts, PATIENT) == "done"
    assert client.copy(key, f"copy of {key}", PATIENT)
    assert store.server.buckets[store.bucket][f"copy of {key}"].content == DATA.tobytes()
    assert store.server.log[-1].body == b""


@pytest.mark.parametrize(
    ("status", "asked"),
    [(404, 5), (412, 5), (503, 4), (200, 4), (403, 1), (501, 1), ("empty", 1)],
    ids=["gone", "changed", "busy", "an error with the status of success", "forbidden", "not there", "an upload"],
)
def test_a_copy_that_is_not_made(store: Store, client: Transfer, status: int | str, asked: int) -> None:
    """A service that cannot copy is asked once, and one in trouble is left alone for a while, as with data."""
    assert client.put("object", DATA.size, parts, PATIENT) == "done"
    if isinstance(status, int):
        answer = Answer(status, store.server.error(status, "SomethingElse").body)
    else:
        answer = Answer(200)
    store.server.fail(" copy$", answer=answer, times=10)
    for _ in range(5):
        assert not client.copy("object", "copy", PATIENT)
    assert len([what for what in store.server.sent() if what.endswith(" copy")]) == asked
    assert client.copies == (asked > 1)
    assert (client.put("object", DATA.size, parts, PATIENT) == "done") == (asked != 4)


def test_a_role_has_a_token(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of a role")
    write(as_location(f"{s3.url}/data"))
    assert [one.headers.get("x-amz-security-token") for one in s3.server.log] == ["of a role"]


def test_what_changes_while_it_is_sent_is_refused(s3: Store) -> None:
    client = S3Transfer.open(store_spec("s3", s3.bucket))
    assert client is not None
    contents = {False: np.zeros(100, np.uint8), True: np.ones(100, np.uint8)}
    assert client.put("object", 100, lambda sent: iter([contents[sent]]), PATIENT) != "done"
    assert s3.stored() == []


def test_a_connection_that_was_closed_meanwhile(client: Transfer) -> None:
    assert client.put("object", DATA.size, parts, PATIENT) == "done"
    for _, connection in client._idle:
        connection.sock.shutdown(socket.SHUT_RDWR)
    assert client.put("object", DATA.size, parts, PATIENT) == "done"
    assert len(client._idle) == 1


def test_an_error_with_the_status_of_success(store: Store, client: Transfer) -> None:
    body = store.server.error(500, "InternalError").body
    store.server.fail("PUT|POST", answer=Answer(200, body))
    assert client.put("object", DATA.size, parts, PATIENT) != "done"


def test_an_answer_that_ends_before_it_begins(store: Store, client: Transfer) -> None:
    """The beginning has arrived, with the status of success and a length."""
    assert client.put("object", DATA.size, parts, PATIENT) == "done"
    store.server.fail("object$|copy$", how="cut", answer=Answer(200, b"x"), times=2)
    assert client.put("object", DATA.size, parts, PATIENT) != "done"
    assert not client.copy("object", "copy", PATIENT)
    assert client.copy("object", "copy", PATIENT)


SECRETS = {
    "s3": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"],
    "gs": ["GOOGLE_AUTH_TOKEN_FOR_TESTING"],
}


@pytest.mark.parametrize("value", ["of nobody\n", "of nobody\u201d", "of nobody\udcff"], ids=["line", "quote", "byte"])
def test_credentials_that_no_header_can_have(
    store: Store, client: Transfer, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no error, and TensorStore does not get them: it would print them, and end the process."""
    assert client.put("object", 4, lambda sent: iter([DATA[:4]]), PATIENT) == "done"
    for name in SECRETS[store.url[:2]]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert client.put("other", 4, lambda sent: iter([DATA[:4]]), PATIENT) != "done"
            with pytest.raises(
                hf.errors.StoragePermissionError, match=f"the value of {name} holds a character"
            ) as caught:
                hf.load(f"{store.url}/ckpt")
            assert "nobody" not in "".join(traceback.format_exception(caught.value))
    assert store.stored() == ["object"]


def test_a_service_without_ranges(store: Store) -> None:
    """The first read finds that out, and the object is read once as a whole."""
    place = as_location(f"{store.url}/data")
    write(place)
    store.server.ranges = False
    with place.open_data(size=DATA.size) as reader:
        for offset in (400, 100, 0):
            assert np.array_equal(reader.read(offset, 50), DATA[offset : offset + 50])


def test_after_failures_in_a_row_tensorstore_takes_over_for_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("holdfast.engine.storage.transfer.time.monotonic", lambda: now[0])
    place = as_location(f"{store.url}/data")
    store.server.fail(
        "PUT|POST",
        times=4,
        when=lambda request: not request.is_of_tensorstore,
        answer=store.server.error(501, "NotImplemented"),
    )

    def puts() -> list[str]:
        with store.server.watch() as requests:
            write(place)
        return ["tensorstore" if one.is_of_tensorstore else "holdfast" for one in requests]

    assert [puts() for _ in range(6)] == [["holdfast", "tensorstore"]] * 4 + [["tensorstore"]] * 2
    now[0] += transfer._PAUSE + 1
    assert puts() == ["holdfast"]
    assert np.array_equal(np.frombuffer(place.read_bytes(), np.uint8), DATA)


@pytest.mark.parametrize(
    ("status", "how", "times", "requests", "in_memory"),
    [
        (503, "whole", 2, 3, False),
        (429, "whole", 2, 3, False),
        (None, "reset", 1, 2, False),
        (503, "whole", 4, 5, True),
        (403, "whole", 1, 2, True),
    ],
    ids=["busy", "too many requests", "reset", "busy for long", "refused"],
)
def test_large_files_are_sent_again_before_tensorstore_has_them_in_memory(
    store: Store,
    status: int | None,
    how: str,
    times: int,
    requests: int,
    in_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore, "LARGE_UPLOAD_BYTES", DATA.size - 1)
    monkeypatch.setattr(kvstore, "UPLOAD_PAUSES", (0.0, 0.0, 0.0))
    answer = None if status is None else store.server.error(status, "SlowDown")
    store.server.fail("PUT|POST", times=times, answer=answer, how=how)
    place = as_location(f"{store.url}/data")
    write(place)
    uploads = [one.is_of_tensorstore for one in store.server.log if one.method in ("PUT", "POST")]
    assert uploads == [False] * (requests - in_memory) + [True] * in_memory
    assert np.array_equal(np.frombuffer(place.read_bytes(), np.uint8), DATA)


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (400, "ExpiredToken"), (401, "No")],
)
def test_wrong_keys_of_the_environment_are_told_after_one_upload(
    store: Store, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay wrong, however often the data is sent."""
    if status == 400 and store.url.startswith("gs://"):
        pytest.skip("a service of S3")
    monkeypatch.setattr(kvstore, "LARGE_UPLOAD_BYTES", DATA.size - 1)
    monkeypatch.setattr(kvstore, "UPLOAD_PAUSES", (0.0, 0.0, 0.0))
    store.server.fail("", times=100, answer=store.server.error(status, code))
    with pytest.raises(hf.errors.StoragePermissionError, match=f"cannot write {store.url}/data: .*credentials"):
        write(as_location(f"{store.url}/data"))
    assert len([one for one in store.server.log if one.method in ("PUT", "POST")]) == 1


def test_parts_that_are_too_short(store: Store) -> None:
    with pytest.raises(ValueError, match="should have 500 bytes, but its parts have 100"):
        as_location(f"{store.url}/data").write_data(500, [Segment(0, 500, lambda: iter([DATA[:100]]))])
    assert store.stored() == []


def test_a_load_does_not_copy(store: Store) -> None:
    """What TensorStore receives would have to be copied."""
    hf.save(f"{store.url}/ckpt", {"w": DATA})
    with store.server.watch() as requests:
        assert np.array_equal(hf.load(f"{store.url}/ckpt")["w"], DATA)
    found = [one.is_of_tensorstore for one in requests if re.search(r"/d/\w+\.0\.0", one.what)]
    assert found == [False]


TREES: dict[str, NDArray[Any]] = {
    "in a row": np.arange(1 << 18, dtype=np.float32),
    "rows": np.arange(1 << 18, dtype=np.int64).reshape(1 << 10, -1),
    "the other byte order": np.arange(1 << 17, dtype=">f8"),
    "not even": np.arange(200_001, dtype=np.int32).reshape(-1, 3),
    "columns": np.arange(1 << 18, dtype=np.float32).reshape(2, -1),
}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks are read one after the other, each with a request of its own; returns those received in their place."""
    monkeypatch.setattr(extents, "REQUESTS", 1)
    monkeypatch.setattr(extents, "COPIED_EXTENT_BYTES", 1)
    received: list[int] = []
    accept = Assembly.accept_placed

    def note(self: Assembly, array: int, chunk: int, *rest: Any) -> str:
        received.append(chunk)
        return accept(self, array, chunk, *rest)

    monkeypatch.setattr(Assembly, "accept_placed", note)
    return received


@pytest.mark.parametrize("name", TREES)
def test_chunks_are_received_in_their_place(store: Store, name: str, one_by_one: list[int]) -> None:
    hf.save(f"{store.url}/ckpt", {"w": TREES[name]}, layout=LAYOUT)
    found = hf.load(f"{store.url}/ckpt")["w"]
    assert np.array_equal(found, TREES[name])
    whole = TREES[name].nbytes // CHUNK
    # The first one is verified before the array takes memory; the last may reach beyond the end of the array.
    assert whole - 1 - (name == "not even") <= len(one_by_one) <= whole


@pytest.mark.parametrize("position", [100, 64 << 10], ids=["values", "checksum"])
def test_damage_is_found_in_its_place(store: Store, position: int, one_by_one: list[int]) -> None:
    hf.save(f"{store.url}/ckpt", {"v": TREES["rows"], "w": TREES["in a row"]}, layout=LAYOUT)
    last = TREES["in a row"][-CHUNK // 4 :].tobytes()
    (stored,) = [one for one in store.server.buckets[store.bucket].values() if last in one.content]
    at = stored.content.index(last) + position
    stored.content = stored.content[:at] + bytes([stored.content[at] ^ 1]) + stored.content[at + 1 :]
    with pytest.raises(DamagedCheckpointError, match=r"w: .*chunk 15 has crc32c [0-9a-f]{8}, expected"):
        hf.load(f"{store.url}/ckpt")
    assert 15 in one_by_one
    assert np.array_equal(hf.load(f"{store.url}/ckpt", select="v")["v"], TREES["rows"])
