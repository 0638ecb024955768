from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format.memory import at_most

from holdfast.engine.errors import DamagedCheckpointError, FormatVersionError
from holdfast.engine.format import (
    CheckpointRecord,
    FileRecord,
    ItemRecord,
    crc32c,
    decode_document,
    encode_document,
    record,
)

BODY: dict[str, Any] = {
    "step": 1200,
    "time": 1.75e9,
    "metrics": {"loss": 0.125, "tiny": 5e-324, "minus zero": -0.0},
    "text": 'größe "quoted" \\ \n \u2028 \ud800',
    "items": [None, True, False, [], {}, 10**30, -1],
}
KINDS = ["checkpoint", "tree"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_document(kind: str) -> None:
    data = encode_document(kind, BODY)
    assert data.endswith(b"}\n")
    assert data.isascii()
    document = json.loads(data)
    digest = document.pop("digest")
    compact = json.dumps(document, separators=(",", ":"))
    assert digest == f"crc32c:{crc32c(compact.encode()):08x}"
    assert compact.startswith(f'{{"format":"holdfast","version":1,"kind":"{kind}","step":1200,')
    if kind == "tree":
        assert data.decode() == f'{compact[:-1]},"digest":"{digest}"}}\n', "no character more than needed"
    else:
        assert data.decode().splitlines()[:3] == ["{", ' "format": "holdfast",', ' "version": 1,'], "it is readable"
    spread = json.dumps(json.loads(data), indent=4).replace("\n", "\r\n")
    for text in (data, spread.encode()):
        found = decode_document(text, kind, source="x")
        assert json.dumps(found) == json.dumps(BODY)  # also the order of members, and the sign of zero


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=())),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=20,
)
names = st.text(max_size=4).filter(lambda name: name not in {"format", "version", "kind", "digest"})


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(names, values, max_size=4), st.sampled_from(KINDS))
def test_any_body_round_trips(body: dict[str, Any], kind: str) -> None:
    found = decode_document(encode_document(kind, body), kind, source="x")
    assert json.dumps(found) == json.dumps(body)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_and_flipped_bit_is_found_or_changes_nothing(kind: str) -> None:
    data = encode_document(kind, BODY)
    harmless = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decode_document(bytes(flipped), kind, source="x")
        except DamagedCheckpointError:
            continue
        harmless += 1
        assert json.dumps(found) == json.dumps(BODY)
    assert harmless < 40  # letters of hexadecimal digits and exponents that may be of either case
    for size in range(len(data) - 1):
        with pytest.raises(DamagedCheckpointError):
            decode_document(data[:size], kind, source="x")


def _document(**changes: Any) -> bytes:
    """A document with any members and the digest that belongs to them; `digest` replaces it."""
    document: dict[str, Any] = {"format": "holdfast", "version": 1, "kind": "tree", "a": 1, **changes}
    document = {name: value for name, value in document.items() if value is not ...}
    if "digest" not in changes:
        text = json.dumps(document, separators=(",", ":"))
        document["digest"] = f"crc32c:{crc32c(text.encode()):08x}"
    return json.dumps(document).encode()


REFUSED: dict[str, tuple[bytes, str]] = {
    "newer": (_document(version=4), "has format version 4; upgrade"),
    "newer with another digest": (_document(version=4, digest="sha256:00"), "has format version 4; upgrade"),
    "newer without a digest": (_document(version=5, digest=...), "has format version 5; upgrade"),
    "nothing": (b"{}", "was not written by holdfast"),
    "another format": (b'{"format": "other"}', "was not written by holdfast"),
    "another format with a digest": (_document(format="other"), "was not written by holdfast"),
    "empty": (b"", "not JSON"),
    "cut off": (b"{", "not JSON"),
    "utf 16": (b"\xff\xfe{\0}\0", "not JSON"),
    "nan": (b'{"a": NaN}', "NaN is not"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    "list": (b"[]", "expected a JSON object, found list"),
    "deep lists": (b"[" * 1_000_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 1_000_000, "nested too deeply"),
    "kind": (_document(kind="checkpoint"), "expected a 'tree' document, found 'checkpoint'"),
    "no kind": (_document(kind=...), "found None"),
    "no digest": (_document(digest=...), "no digest"),
    "digest type": (_document(digest=7), "no digest"),
    "digest length": (_document(digest="crc32c:0"), "no digest"),
    "digest": (_document(digest="crc32c:00000000"), "expected the digest crc32c:00000000, computed"),
    "version true": (_document(version=True), "version is True"),
    "version 0": (_document(version=0), "version is 0"),
    "version text": (_document(version="1"), "version is '1'"),
    "no version": (_document(version=...), "version is None"),
    "overflow": (_document(a=1).replace(b'"a": 1', b'"a": 1e999'), "cannot be checked"),
    "value": (_document(a=1).replace(b'"a": 1', b'"a": 2'), "expected the digest"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_documents_that_are_refused(data: bytes, message: str) -> None:
    is_damaged = not message.startswith(("has format version", "was not written"))
    with pytest.raises(DamagedCheckpointError if is_damaged else FormatVersionError) as caught:
        decode_document(data, "tree", source="run/tree.json")
    assert str(caught.value).startswith(f"run/tree.json {'is damaged: ' if is_damaged else ''}")
    assert all(part in str(caught.value) for part in message.split("; "))


def test_size_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "DOCUMENT_LIMIT", 1000)
    data = b"[" + b"[]," * 100_000 + b"[]]"
    with at_most(100_000), pytest.raises(DamagedCheckpointError, match="limit is 1000"):
        decode_document(data, "tree", source="x")
    with pytest.raises(ValueError, match="limit is 1000"):
        encode_document("tree", {"a": "x" * 1000})


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = wrap(value)
    return value


_CYCLE: list[Any] = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"a": float("nan")}, ValueError),
        ({"a": [float("inf")]}, ValueError),
        ({"a": _nested(100_000, lambda value: [value])}, ValueError),
        ({"a": _CYCLE}, ValueError),
        ({"version": 2}, ValueError),
        ({"digest": ""}, ValueError),
        ({"a": 10**5000}, ValueError),
        ({"a": {1, 2}}, TypeError),
        ({"a": b"bytes"}, TypeError),
    ],
    ids=["nan", "inf", "deep", "cycle", "version", "digest", "digits", "set", "bytes"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_that_are_not_json_are_refused(body: dict[str, Any], error: type[Exception], kind: str) -> None:
    with pytest.raises(error):
        encode_document(kind, body)


def test_a_record_has_a_line_for_each_file() -> None:
    files = {"d/index": FileRecord(7, 1), "tree.json": FileRecord(8, 2)}
    metrics = {"loss": 0.5, "of each class": [1, 2]}
    found = CheckpointRecord(items={"state": ItemRecord("state", "pytree", files)}, time=1.0, metrics=metrics)
    lines = [line.strip() for line in found.encode().decode().splitlines()]
    assert '"d/index": {"size": 7, "crc32c": "00000001"},' in lines
    assert '"metrics": {"loss": 0.5, "of each class": [1, 2]},' in lines
    assert CheckpointRecord.decode(found.encode(), source="here") == found


def test_metadata_of_a_record_may_be_nested_as_deeply_as_that_of_other_documents() -> None:
    nested = _nested(600, lambda value: {"a": value})
    encoded = encode_document("checkpoint", {"custom_metadata": nested})
    assert decode_document(encoded, "checkpoint", source="here")["custom_metadata"] == nested


@pytest.mark.parametrize(("key", "name"), [(1, "1"), (1.5, "1.5"), (True, "true"), (None, "null")])
@pytest.mark.parametrize("kind", ["checkpoint", "options"])
def test_keys_that_are_no_strings_become_strings(kind: str, key: Any, name: str) -> None:
    encoded = encode_document(kind, {"metrics": {key: {"loss": 1}}})
    assert decode_document(encoded, kind, source="here")["metrics"] == {name: {"loss": 1}}
