"""Forged records, trees and indexes: every checksum is right, and nothing they say can be trusted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.format.ocdbt_entries import encode_entries

import holdfast as hf
from holdfast.engine.format import (
    Entries,
    chunk_keys,
    crc32c,
    encode_array_metadata,
    encode_document,
    metadata_keys,
)
from holdfast.engine.format.record import VERSION

Look = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("little_memory")

RECORD = "checkpoint.json"
TREE = {"w": np.arange(6.0), "n": {"a": 1, "b": "text"}, "s": [np.float32(2)]}

# With the frames of the test, more than Python allows; until 3.11, the JSON encoder of the test shares them.
DEPTH = 700 if sys.version_info < (3, 12) else 980
DEEP: Any = "nan"
for _ in range(DEPTH):
    DEEP = {"a": DEEP}
RECORDS: dict[str, Callable[[Any], Any]] = {
    "folder_above": lambda body: body["items"]["state"].update(folder=".."),
    "folder_here": lambda body: body["items"]["state"].update(folder="."),
    "folder_absolute": lambda body: body["items"]["state"].update(folder="/etc"),
    "folder_below": lambda body: body["items"]["state"].update(folder="a/../../b"),
    "folder_with_nul": lambda body: body["items"]["state"].update(folder="a\0b"),
    "folder_empty": lambda body: body["items"]["state"].update(folder=""),
    "folder_number": lambda body: body["items"]["state"].update(folder=5),
    "file_above": lambda body: body["items"]["state"]["files"].update({"../../secret": {"size": 6}}),
    "file_absolute": lambda body: body["items"]["state"]["files"].update({"/etc/passwd": {"size": 6}}),
    "file_number": lambda body: body["items"]["state"]["files"].update({"d/0": 5}),
    "file_list": lambda body: body["items"]["state"].update(files=[1]),
    "size_negative": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=-1),
    "size_fraction": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=1.5),
    "size_true": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=True),
    "size_huge": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=10**400),
    "digest_huge": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="f" * 400),
    "digest_negative": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="-1"),
    "digest_number": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c=5),
    "digest_text": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="xyz"),
    "no_items": lambda body: body.pop("items"),
    "items_list": lambda body: body.update(items=[{}]),
    "item_text": lambda body: body["items"].update(state="state"),
    "item_without_kind": lambda body: body["items"]["state"].pop("kind"),
    "kind_unknown": lambda body: body["items"]["state"].update(kind="os.system"),
    "kind_json": lambda body: body["items"]["state"].update(kind="json"),
    "step_text": lambda body: body.update(step="1"),
    "step_negative": lambda body: body.update(step=-1),
    "step_huge": lambda body: body.update(step=10**400),
    "step_true": lambda body: body.update(step=True),
    "time_text": lambda body: body.update(time="now"),
    "time_huge": lambda body: body.update(time=10**400),
    "time_text_nan": lambda body: body.update(time="NaN"),
    "time_text_infinite": lambda body: body.update(time="-inf"),
    "time_text_number": lambda body: body.update(time="12"),
    "time_true": lambda body: body.update(time=True),
    "time_after_all_dates": lambda body: body.update(time=1e300),
    "time_none": lambda body: body.update(time=None),
    "metrics_list": lambda body: body.update(metrics=[1]),
    "metrics_text": lambda body: body.update(metrics={"loss": "low"}),
    "metrics_deep": lambda body: body.update(metrics=DEEP),
    "replaced_above": lambda body: body.update(replaced=[".."]),
    "replaced_number": lambda body: body.update(replaced=5),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    stored(place).edit(RECORDS[name])
    assert look(place)
    assert name.startswith("kind_") or not hf.verify(place).ok


@pytest.mark.parametrize("name", RECORDS)
def test_records_among_others(name: str, place: str, stored: Any) -> None:
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2):
            manager.save(step, TREE)
    stored(f"{place}/2").edit(RECORDS[name])
    [first, second] = hf.list_checkpoints(place)
    assert (first.step, first.damage) == (1, None)
    assert second.step == 2
    reader = hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(read_only=True))
    if name.startswith("kind_"):  # no damage that could be passed over
        assert second.damage is None
        with pytest.raises(hf.errors.OptionError, match="was written by a handler of kind"):
            reader.restore_latest()
    else:
        restored = reader.restore_latest()
        assert restored is not None
        assert restored.step == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{}", b"[" * 200_000, b'{"a":' * 200_000, b'"' + b"x" * 100_000, b"9" * 10_000, b"\xff\xfe"],
    ids=lambda content: repr(content[:6]),
)
def test_documents_that_are_none(content: bytes, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    files = stored(place)
    whole = files.read()
    files.write(RECORD, content)
    assert look(place)
    files.write(RECORD, whole[RECORD])
    files.reseal("tree.json", content)
    assert look(place)


def test_newer_versions_are_told_apart_from_damage(place: str, stored: Any) -> None:
    hf.save(place, TREE)
    record = json.loads(stored(place).read()[RECORD])
    del record["digest"]
    record["version"] = VERSION + 1
    digest = f"crc32c:{crc32c(json.dumps(record, separators=(',', ':')).encode()):08x}"
    stored(place).write(RECORD, json.dumps({**record, "digest": digest}).encode())
    with pytest.raises(hf.errors.FormatVersionError, match=rf"version {VERSION + 1}.*upgrade holdfast"):
        hf.load(place)


@pytest.mark.parametrize("path", [RECORD, "state/tree.json", "state/manifest.ocdbt", "state/d/index", "state/d/0"])
def test_files_that_are_gigantic(path: str, tmp_path: Path, stored: Any) -> None:
    place = str(tmp_path / "ckpt")
    hf.save(place, TREE)
    path = stored(place).name(path)
    size = 1 << 36
    if path != RECORD:
        stored(place).edit(lambda body: body["items"]["state"]["files"][path.removeprefix("state/")].update(size=size))
    os.truncate(f"{place}/{path}", size)  # takes no place on the disk
    if path in (RECORD, "state/tree.json", "state/manifest.ocdbt", "state/d/index"):
        with pytest.raises(hf.DamagedCheckpointError, match="has 68719476736 bytes; the limit is"):
            hf.load(place)
    else:
        assert hf.load(place)["n"] == TREE["n"]


def test_a_gigantic_json_item(tmp_path: Path) -> None:
    hf.Checkpointer(hf.JsonCheckpointHandler()).save(tmp_path / "ckpt", {"a": 1})
    os.truncate(tmp_path / "ckpt" / "state" / "data.json", 1 << 36)
    with pytest.raises(hf.DamagedCheckpointError, match="has 68719476736 bytes; the limit is"):
        hf.load(tmp_path / "ckpt")


def test_nothing_outside_is_read(tmp_path: Path, stored: Any, monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    place = str(tmp_path / "inside" / "ckpt")
    hf.save(place, TREE)
    (tmp_path / "secret").write_bytes(b"secret")
    opened: list[str] = []
    real = os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(os.path.realpath(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    whole = stored(place).read()[RECORD]
    for change in RECORDS.values():
        stored(place).edit(change)
        look(place)
        stored(place).write(RECORD, whole)
    assert opened
    assert all(path.startswith(place) for path in opened)


def test_nothing_outside_is_deleted_or_written(tmp_path: Path, stored: Any) -> None:
    place = tmp_path / "run"
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2, 3):
            manager.save(step, TREE)
    (tmp_path / "secret").write_bytes(b"secret")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    marker = {
        "format": "holdfast",
        "folders": ["..", "../secret", "../../outside", str(outside), "a/../../secret", 5, ""],
    }
    (place / "1" / "checkpoint.partial").write_text(json.dumps(marker))
    (place / "2" / "state" / "link").symlink_to(outside)
    (place / "2" / "checkpoint.partial").write_text("[" * 100_000)
    (place / "7").mkdir()
    (place / "7" / "checkpoint.partial").write_text(json.dumps(marker))
    (place / "7" / "link").symlink_to(outside)
    stored(str(place / "3")).edit(lambda body: body["items"]["state"].update(folder="../../outside"))
    options = hf.CheckpointManagerOptions(max_to_keep=2)
    with hf.CheckpointManager(place, options=options) as manager:
        assert manager.all_steps() == [1, 2]
        manager.save(4, TREE)
        manager.wait_until_finished()
        manager.save(3, TREE, force=True)
    assert (outside / "precious").read_bytes() == b"precious"
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not (place / "7").exists()
    assert not (place / "2").exists()
    assert hf.load(place / "3")["n"] == TREE["n"]


# ---- the tree


def tree_document(tree: Any, leaves: Any) -> bytes:
    return encode_document("tree", {"tree": {"tree": tree, "leaves": leaves}})


def node(kind: str, keys: Any, *children: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "keys": keys, "children": list(children), **more}


def nested(depth: int) -> Any:
    inner: Any = None
    for _ in range(depth):
        inner = node("dict", ["w"], inner)
    return inner


W = {"kind": "numpy"}
TREES: dict[str, bytes] = {
    "other_kind": encode_document("checkpoint", {"tree": {}}),
    "no_tree": encode_document("tree", {}),
    "tree_list": encode_document("tree", {"tree": []}),
    "too_few_leaves": tree_document(node("dict", ["w", "v"], None, None), [W]),
    "leaf_text": tree_document(node("dict", ["w"], None), ["w"]),
    "leaf_without_kind": tree_document(node("dict", ["w"], None), [{}]),
    "unknown_container": tree_document(node("os.system", ["w"], None), [W]),
    "class_list": tree_document(node("dict", ["w"], None, **{"class": [1]}), [W]),
    "doubled_key": tree_document(node("dict", ["w", "w"], None, None), [W, W]),
    "unescaped_key": tree_document(node("dict", ["../w"], None), [W]),
    "float_key": tree_document(node("dict", [1.5], None), [W]),
    "list_key": tree_document(node("dict", [["w"]], None), [W]),
    "too_few_keys": tree_document(node("dict", [], None), [W]),
    "children_text": tree_document({"type": "list", "children": "w"}, [W]),
    "too_deep": tree_document(nested(300), [W]),
    "missing_array": tree_document(node("dict", ["missing"], None), [W]),
    "unknown_kind": tree_document(node("dict", ["w"], None), [{"kind": "pickle"}]),
    "int_of_many": tree_document(node("dict", ["w"], None), [{"kind": "int"}]),
    "scalar_of_many": tree_document(node("dict", ["w"], None), [{"kind": "numpy_scalar"}]),
    "text_of_floats": tree_document(node("dict", ["w"], None), [{"kind": "str"}]),
    "dtype_unknown": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": "object"}]),
    "dtype_number": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": 5}]),
    "dtype_huge": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": "<U999999999"}]),
    "dtype_code": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": "__import__('os')"}]),
    "dtype_of_other_bytes": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": "datetime64[s]"}]),
    "unit_of_zero": tree_document(node("dict", ["w"], None), [{"kind": "numpy", "dtype": "datetime64[0s]"}]),
    "value_of_wrong_type": tree_document(node("dict", ["x"], None), [{"kind": "str", "value": 5}]),
    "value_not_base64": tree_document(node("dict", ["x"], None), [{"kind": "bytes", "base64": "%"}]),
    "value_not_hexadecimal": tree_document(node("dict", ["x"], None), [{"kind": "int", "value": "10**10**10"}]),
    "value_list": tree_document(node("dict", ["x"], None), [{"kind": "int", "value": [1]}]),
    "value_gigantic": tree_document(node("dict", ["x"], None), [{"kind": "int", "value": "0x" + "f" * 3_000_000}]),
    "value_of_unknown_kind": tree_document(node("dict", ["x"], None), [{"kind": "eval", "value": "1"}]),
    "value_for_an_array_kind": tree_document(node("dict", ["x"], None), [{"kind": "numpy", "value": "1"}]),
    "complex_of_three": tree_document(node("dict", ["x"], None), [{"kind": "complex", "value": ["0x1p0"] * 3}]),
    "float_overflow": tree_document(node("dict", ["x"], None), [{"kind": "float", "value": "0x1p99999"}]),
    "set_of_sets": tree_document(
        node("dict", ["x"], None), [{"kind": "set", "value": [{"kind": "set", "value": []}]}]
    ),
    "set_of_numbers": tree_document(node("dict", ["x"], None), [{"kind": "set", "value": [1]}]),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_trees(name: str, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    stored(place).reseal("tree.json", TREES[name])
    assert look(place)


HARMLESS: dict[str, Any] = {
    "sharding_number": {**W, "sharding": 5},
    "sharding_axes": {**W, "sharding": {"type": "NamedSharding", "mesh": {"axes": 5}}},
    "sharding_axis": {**W, "sharding": {"type": "NamedSharding", "mesh": {"axes": [5, [1], [1, 2]]}, "spec": {}}},
    "sharding_mesh": {**W, "sharding": {"type": "NamedSharding", "mesh": []}},
    "sharding_type": {**W, "sharding": {"type": [], "device": {}}},
    "torch_dtype": {"kind": "torch", "torch_dtype": ["complex32"]},
    "key_without_implementation": {"kind": "key", "impl": {"a": 1}},
    "requires_grad": {"kind": "torch", "requires_grad": "maybe"},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_unknown_facts(name: str, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    stored(place).reseal("tree.json", tree_document(node("dict", ["w"], None), [HARMLESS[name]]))
    assert look(place, loads=True) == []
    assert hf.load(place)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    for template in ({"w": np.zeros(6)}, {"w": np.zeros(5)}):
        try:
            hf.load(place, like=template)
        except hf.TreeMismatchError as error:
            assert len(error.differences) == 1  # noqa: PT017 - either is fine


# ---- the index

VALUES = np.random.default_rng(0).integers(0, 255, 8188, np.uint8).tobytes()
DATA = VALUES + crc32c(VALUES).to_bytes(4, "little")  # one chunk that verifies


def forge(
    place: str,
    stored: Any,
    metadata: dict[str, bytes],
    chunks: dict[bytes, tuple[str, int, int]],
    data: bytes = DATA,
) -> None:
    """Replace the index of a checkpoint, and its only data file."""
    rows: list[tuple[bytes, bytes | None, tuple[str, int, int]]] = [(key, None, chunk) for key, chunk in chunks.items()]
    rows += [(metadata_keys([name])[0], text, ("d/0", 0, 0)) for name, text in metadata.items()]
    rows.sort()
    paths = sorted({row[2][0] for row in rows})
    manifest, index = encode_entries(
        Entries(
            keys=[row[0] for row in rows],
            inline=[row[1] for row in rows],
            files=paths,
            file_ids=np.array([paths.index(row[2][0]) for row in rows], np.int64),
            offsets=np.array([row[2][1] for row in rows], np.int64),
            lengths=np.array([row[2][2] for row in rows], np.int64),
            checksums=np.full(len(rows), -1),
        ),
        node_file="d/index",
        database_id=bytes(16),
        created_ns=0,
    )
    names = [key[: -len(b"/zarr.json")].decode() for key, text, _ in rows if text is not None]
    files = stored(place)
    files.reseal("d/index", index)
    files.reseal("manifest.ocdbt", manifest)
    files.reseal("d/0", data)
    files.reseal("tree.json", tree_document(node("dict", names, *[None] * len(names)), [W] * len(names)))


def array(*shape: int, chunks: tuple[int, ...] | None = None, dtype: str = "uint8") -> bytes:
    return encode_array_metadata(shape, dtype, chunks or shape)


HUGE = 1 << 40
INDEXES: dict[str, tuple[dict[str, bytes], dict[bytes, tuple[str, int, int]]]] = {
    "beyond_the_file": ({"w": array(100)}, {b"w/c/0": ("d/0", 8100, 104)}),
    "far_beyond_the_file": ({"w": array(100)}, {b"w/c/0": ("d/0", 1 << 62, 104)}),
    "huge_chunk": ({"w": array(HUGE)}, {b"w/c/0": ("d/0", 0, HUGE + 4)}),
    "huge_chunk_little_data": ({"w": array(HUGE)}, {b"w/c/0": ("d/0", 0, 104)}),
    "huge_chunks": (
        {"w": array(HUGE, chunks=(HUGE // 2,))},
        dict.fromkeys(chunk_keys("w", (2,)), ("d/0", 0, HUGE // 2 + 4)),
    ),
    "huge_chunks_behind_a_real_one": (
        {"w": array(8188 + HUGE, chunks=(8188,))},
        {b"w/c/0": ("d/0", 0, 8192)},
    ),
    "most_chunks_beyond_the_file": (
        {"w": array(8188 * 50_000, 8, chunks=(8188 * 50, 8))},
        {key: ("d/0", 8192 * number, 8188 * 400 + 4) for number, key in enumerate(chunk_keys("w", (1000, 1)))},
    ),
    "countless_chunks": ({"w": array(HUGE, HUGE, chunks=(1, 1))}, {b"w/c/0/0": ("d/0", 0, 5)}),
    "countless_chunks_of_many": (
        {f"w{i}": array(1900, chunks=(1,)) for i in range(1000)},
        dict.fromkeys(chunk_keys("w0", (1000,)), ("d/0", 0, 5)),
    ),
    "overlapping": (
        {f"w{i}": array(8188) for i in range(3)},
        {f"w{i}/c/0".encode(): ("d/0", 0, 8192) for i in range(3)},
    ),
    "partly_overlapping": (
        {"a": array(200), "b": array(100)},
        {b"a/c/0": ("d/0", 0, 204), b"b/c/0": ("d/0", 64, 104)},
    ),
    "twice_the_same": ({"a": array(8188), "b": array(8188)}, {b"a/c/0": ("d/0", 0, 8192), b"b/c/0": ("d/0", 0, 8192)}),
    "wrong_length": ({"w": array(100)}, {b"w/c/0": ("d/0", 0, 100)}),
    "wrong_checksum": ({"w": array(100)}, {b"w/c/0": ("d/0", 0, 104)}),
    "missing_chunk": ({"w": array(100)}, {}),
    "missing_file": ({"w": array(100)}, {b"w/c/0": ("d/9", 0, 104)}),
    "record_as_data": ({"w": array(100)}, {b"w/c/0": ("tree.json", 0, 104)}),
    "metadata_garbage": ({"w": b"{"}, {b"w/c/0": ("d/0", 0, 104)}),
    "metadata_deep": ({"w": b"[" * 100_000}, {b"w/c/0": ("d/0", 0, 104)}),
    "metadata_other_codec": (
        {"w": array(100).replace(b'"crc32c"', b'"gzip"')},
        {b"w/c/0": ("d/0", 0, 104)},
    ),
    "metadata_other_dtype": ({"w": array(100).replace(b"uint8", b"string")}, {b"w/c/0": ("d/0", 0, 104)}),
    "shape_negative": ({"w": array(100).replace(b"[100]", b"[-100]")}, {b"w/c/0": ("d/0", 0, 104)}),
    "shape_beyond_64_bits": ({"w": array(100).replace(b"[100]", b"[9999999999999999999999]")}, {}),
    "shape_of_many_axes": ({"w": array(100).replace(b"[100]", b"[" + b"1," * 5000 + b"1]")}, {}),
}


@pytest.mark.parametrize("local", [False, True], ids=["memory", "local"])
@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str, local: bool, place: str, tmp_path: Path, stored: Any, look: Look) -> None:
    place = str(tmp_path / "ckpt") if local else place
    hf.save(place, TREE)
    forge(place, stored, *INDEXES[name])
    errors = look(place)
    assert sum(map(len, errors)) < 10_000  # no line for every missing chunk
    problems = hf.verify(place).checkpoints[0].problems
    assert 0 < len(problems) < 5000


@pytest.mark.parametrize("step", [0, 1 << 17], ids=["the_same_chunk", "beyond_the_file"])
def test_a_gigabyte_out_of_one_chunk(step: int, place: str, stored: Any, little_memory: int) -> None:
    values = bytes((1 << 17) - 4)
    count = (little_memory + (256 << 20)) // len(values)
    forged = {key: ("d/0", step * number, 1 << 17) for number, key in enumerate(chunk_keys("w", (count,)))}
    metadata = array(len(values) * count, chunks=(len(values),))
    hf.save(place, TREE)
    forge(place, stored, {"w": metadata}, forged, values + crc32c(values).to_bytes(4, "little"))
    with pytest.raises(hf.DamagedCheckpointError, match="overlaps another one" if not step else "a chunk ends at byte"):
        hf.load(place)


@pytest.mark.parametrize("local", [False, True], ids=["memory", "local"])
@pytest.mark.parametrize("name", ["huge_chunk", "huge_chunks_behind_a_real_one", "most_chunks_beyond_the_file"])
def test_sizes_in_the_record_that_are_not_true(
    name: str, local: bool, place: str, tmp_path: Path, stored: Any, look: Look
) -> None:
    place = str(tmp_path / "ckpt") if local else place
    hf.save(place, TREE)
    forge(place, stored, *INDEXES[name])
    stored(place).edit(lambda body: body["items"]["state"]["files"]["d/0"].update(size=1 << 50))
    assert look(place)


def test_a_folder_without_a_record_is_trusted_no_more(place: str, stored: Any) -> None:
    hf.save(place, TREE)
    for name in (
        "huge_chunk",
        "huge_chunks",
        "countless_chunks",
        "countless_chunks_of_many",
        "overlapping",
        "missing_file",
    ):
        forge(place, stored, *INDEXES[name])
        with pytest.raises(hf.HoldfastError):
            hf.load(f"{place}/state")
