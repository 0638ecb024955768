"""Forged records, trees and indexes: every checksum is right, and nothing they say can be trusted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.format.ocdbt_entries import encode_entries
from tests.manager.runs import commit, reading, saved

import holdfast as hf
from holdfast.engine.format import (
    Entries,
    chunk_keys,
    crc32c,
    encode_array_metadata,
    encode_document,
    metadata_keys,
)

Look = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("little_memory")

RECORD = "checkpoint.json"
TREE = {"w": np.arange(6.0), "n": {"a": 1, "b": "text"}, "s": [np.float32(2)]}

# With the frames of the test, more than Python allows; until 3.11, the JSON encoder of the test shares them.
DEPTH = 700 if sys.version_info < (3, 12) else 980
DEEP: Any = "nan"
for _ in range(DEPTH):
    DEEP = {"a": DEEP}


def state(**changes: Any) -> Callable[[Any], Any]:
    return lambda body: body["items"]["state"].update(changes)


def files(**changes: Any) -> Callable[[Any], Any]:
    return lambda body: body["items"]["state"]["files"].update(changes)


def of_the_tree(**changes: Any) -> Callable[[Any], Any]:
    return lambda body: body["items"]["state"]["files"]["tree.json"].update(changes)


def record(**changes: Any) -> Callable[[Any], Any]:
    return lambda body: body.update(changes)


PATHS = {"above": "..", "here": ".", "absolute": "/etc", "below": "a/../../b", "empty": "", "number": 5}
PATHS |= {"with_nul": "a\0b", "with_backslash": "a\\b", "with_two_slashes": "a//b"}
TIMES = {"text": "now", "text_nan": "NaN", "text_infinite": "-inf", "text_number": "12", "true": True, "none": None}
TIMES |= {"huge": 10**400, "after_all_dates": 1e300}
RECORDS: dict[str, Callable[[Any], Any]] = {
    **{f"folder_{name}": state(folder=folder) for name, folder in PATHS.items()},
    "file_above": files(**{"../../secret": {"size": 6}}),
    "file_absolute": files(**{"/etc/passwd": {"size": 6}}),
    "file_number": files(**{"d/0": 5}),
    "file_list": state(files=[1]),
    "size_negative": of_the_tree(size=-1),
    "size_fraction": of_the_tree(size=1.5),
    "size_true": of_the_tree(size=True),
    "size_huge": of_the_tree(size=10**400),
    "digest_huge": of_the_tree(crc32c="f" * 400),
    "digest_negative": of_the_tree(crc32c="-1"),
    "digest_number": of_the_tree(crc32c=5),
    "digest_text": of_the_tree(crc32c="xyz"),
    "no_items": lambda body: body.pop("items"),
    "items_list": record(items=[{}]),
    "item_text": record(items={"state": "state"}),
    "item_without_kind": lambda body: body["items"]["state"].pop("kind"),
    "kind_unknown": state(kind="os.system"),
    "kind_json": state(kind="json"),
    "step_text": record(step="1"),
    "step_negative": record(step=-1),
    "step_huge": record(step=10**400),
    "step_true": record(step=True),
    **{f"time_{name}": record(time=time) for name, time in TIMES.items()},
    "metrics_list": record(metrics=[1]),
    "metrics_text": record(metrics={"loss": "low"}),
    "metrics_deep": record(metrics=DEEP),
    "replaced_above": record(replaced=[".."]),
    "replaced_number": record(replaced=5),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, tmp_path: Path, stored: Any, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside of the checkpoint is read, and a run goes back to the step before."""
    place = str(tmp_path / "2")
    saved(tmp_path, 1, 2, items=lambda _: TREE)
    stored(place).edit(RECORDS[name])
    opened: list[str] = []
    real = os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(os.path.realpath(path))
        return real(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", watched)
        assert look(place)
        assert name.startswith("kind_") or not hf.verify(place).ok
    assert opened
    assert all(path.startswith(place) for path in opened)
    [first, second] = hf.list_checkpoints(tmp_path)
    assert (first.step, first.damage, second.step) == (1, None, 2)
    reader = reading(tmp_path)
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
    whole = stored(place).read()[RECORD]
    stored(place).write(RECORD, content)
    assert look(place)
    stored(place).write(RECORD, whole)
    stored(place).reseal("tree.json", content)
    assert look(place)


@pytest.mark.parametrize(
    "path", [RECORD, "state/tree.json", "state/manifest.ocdbt", "state/d/index", "state/d/0", "json"]
)
def test_files_that_are_gigantic(path: str, tmp_path: Path, stored: Any) -> None:
    place, size = str(tmp_path / "ckpt"), 1 << 36
    if path == "json":
        hf.Checkpointer(hf.JsonCheckpointHandler()).save(place, {"a": 1})
        path = "state/data.json"
    else:
        hf.save(place, TREE)
    name = stored(place).name(path)
    if path not in (RECORD, "state/data.json"):
        stored(place).edit(files(**{name.removeprefix("state/"): {"size": size}}))
    os.truncate(f"{place}/{name}", size)  # takes no place on the disk
    if path == "state/d/0":
        assert hf.load(place)["n"] == TREE["n"]
    else:
        with pytest.raises(hf.DamagedCheckpointError, match="has 68719476736 bytes; the limit is"):
            hf.load(place)


def test_nothing_outside_is_deleted_or_written(tmp_path: Path, stored: Any) -> None:
    place, outside = tmp_path / "run", tmp_path / "outside"
    saved(place, 1, 2, 3, items=lambda _: TREE)
    outside.mkdir()
    precious = [tmp_path / "secret", outside / "precious"]
    for file in precious:
        file.write_bytes(b"precious")
    folders = ["..", "../secret", "../../outside", str(outside), "a/../../secret", 5, ""]
    marker = json.dumps({"format": "holdfast", "folders": folders})
    (place / "7").mkdir()
    for folder, content in {"1": marker, "2": "[" * 100_000, "7": marker}.items():
        (place / folder / "checkpoint.partial").write_text(content)
    for link in ("2/state/link", "7/link"):
        (place / link).symlink_to(outside)
    stored(str(place / "3")).edit(state(folder="../../outside"))
    with hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(max_to_keep=2)) as manager:
        assert manager.all_steps() == [1, 2]
        commit(manager, 4, TREE)
        manager.save(3, TREE, force=True)
    assert [file.read_bytes() for file in precious] == [b"precious"] * 2
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
# What the document says of a leaf w, which is an array of six numbers, and of a leaf x, which the index lacks.
ARRAYS: dict[str, Any] = {
    "leaf_text": "w",
    "leaf_without_kind": {},
    "unknown_kind": {"kind": "pickle"},
    "int_of_many": {"kind": "int"},
    "scalar_of_many": {"kind": "numpy_scalar"},
    "text_of_floats": {"kind": "str"},
    "dtype_unknown": {"kind": "numpy", "dtype": "object"},
    "dtype_number": {"kind": "numpy", "dtype": 5},
    "dtype_huge": {"kind": "numpy", "dtype": "<U999999999"},
    "dtype_code": {"kind": "numpy", "dtype": "__import__('os')"},
    "dtype_of_other_bytes": {"kind": "numpy", "dtype": "datetime64[s]"},
    "unit_of_zero": {"kind": "numpy", "dtype": "datetime64[0s]"},
}
LEAVES: dict[str, Any] = {
    "missing_array": W,
    "value_of_wrong_type": {"kind": "str", "value": 5},
    "value_not_base64": {"kind": "bytes", "base64": "%"},
    "value_not_hexadecimal": {"kind": "int", "value": "10**10**10"},
    "value_list": {"kind": "int", "value": [1]},
    "value_gigantic": {"kind": "int", "value": "0x" + "f" * 3_000_000},
    "value_of_unknown_kind": {"kind": "eval", "value": "1"},
    "value_for_an_array_kind": {"kind": "numpy", "value": "1"},
    "complex_of_three": {"kind": "complex", "value": ["0x1p0"] * 3},
    "float_overflow": {"kind": "float", "value": "0x1p99999"},
    "set_of_sets": {"kind": "set", "value": [{"kind": "set", "value": []}]},
    "set_of_numbers": {"kind": "set", "value": [1]},
}
NODES: dict[str, tuple[Any, int]] = {  # with the number of leaves
    "too_few_leaves": (node("dict", ["w", "v"], None, None), 1),
    "unknown_container": (node("os.system", ["w"], None), 1),
    "class_list": (node("dict", ["w"], None, **{"class": [1]}), 1),
    "doubled_key": (node("dict", ["w", "w"], None, None), 2),
    "unescaped_key": (node("dict", ["../w"], None), 1),
    "float_key": (node("dict", [1.5], None), 1),
    "list_key": (node("dict", [["w"]], None), 1),
    "too_few_keys": (node("dict", [], None), 1),
    "children_text": ({"type": "list", "children": "w"}, 1),
    "too_deep": (nested(300), 1),
}
TREES: dict[str, bytes] = {
    "other_kind": encode_document("checkpoint", {"tree": {}}),
    "no_tree": encode_document("tree", {}),
    "tree_list": encode_document("tree", {"tree": []}),
    **{name: tree_document(tree, [W] * count) for name, (tree, count) in NODES.items()},
    **{name: tree_document(node("dict", ["w"], None), [leaf]) for name, leaf in ARRAYS.items()},
    **{name: tree_document(node("dict", ["x"], None), [leaf]) for name, leaf in LEAVES.items()},
}


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


@pytest.mark.parametrize("facts", HARMLESS.values(), ids=HARMLESS)
def test_unknown_facts(facts: Any, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    stored(place).reseal("tree.json", tree_document(node("dict", ["w"], None), [facts]))
    assert look(place, loads=True) == []
    assert hf.load(place)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    for template in ({"w": np.zeros(6)}, {"w": np.zeros(5)}):
        with contextlib.suppress(hf.TreeMismatchError):
            hf.load(place, like=template)


# ---- the index

CONTENT = np.random.default_rng(0).integers(0, 255, 8188, np.uint8).tobytes()
DATA = CONTENT + crc32c(CONTENT).to_bytes(4, "little")  # one chunk that verifies


Chunks = dict[bytes, tuple[str, int, int]]  # by key: the file, the offset and the length


def forge(place: str, stored: Any, metadata: dict[str, bytes], chunks: Chunks, data: bytes = DATA) -> None:
    """Replace the index of a checkpoint, and its only data file."""
    rows = sorted(
        [
            *((key, None, chunk) for key, chunk in chunks.items()),
            *((metadata_keys([name])[0], text, ("d/0", 0, 0)) for name, text in metadata.items()),
        ]
    )
    keys, inline, places = zip(*rows, strict=True)
    names, offsets, lengths = zip(*places, strict=True)
    paths = sorted(set(names))
    manifest, index = encode_entries(
        Entries(
            keys=list(keys),
            inline=list(inline),
            files=paths,
            file_ids=np.array([paths.index(name) for name in names], np.int64),
            offsets=np.array(offsets, np.int64),
            lengths=np.array(lengths, np.int64),
            checksums=np.full(len(rows), -1),
        ),
        node_file="d/index",
        database_id=bytes(16),
        created_ns=0,
    )
    arrays = [key[: -len(b"/zarr.json")].decode() for key, text, _ in rows if text is not None]
    tree = tree_document(node("dict", arrays, *[None] * len(arrays)), [W] * len(arrays))
    for path, content in {"d/index": index, "manifest.ocdbt": manifest, "d/0": data, "tree.json": tree}.items():
        stored(place).reseal(path, content)


def array(*shape: int, chunks: tuple[int, ...] | None = None, dtype: str = "uint8") -> bytes:
    return encode_array_metadata(shape, dtype, chunks or shape)


HUGE = 1 << 40
W_100, W_HUGE, AT_0 = {"w": array(100)}, {"w": array(HUGE)}, {b"w/c/0": ("d/0", 0, 104)}
INDEXES: dict[str, tuple[dict[str, bytes], Chunks]] = {
    "beyond_the_file": (W_100, {b"w/c/0": ("d/0", 8100, 104)}),
    "far_beyond_the_file": (W_100, {b"w/c/0": ("d/0", 1 << 62, 104)}),
    "huge_chunk": (W_HUGE, {b"w/c/0": ("d/0", 0, HUGE + 4)}),
    "huge_chunk_little_data": (W_HUGE, AT_0),
    "huge_chunks": (
        {"w": array(HUGE, chunks=(HUGE // 2,))},
        dict.fromkeys(chunk_keys("w", (2,)), ("d/0", 0, HUGE // 2 + 4)),
    ),
    "huge_chunks_behind_a_real_one": ({"w": array(8188 + HUGE, chunks=(8188,))}, {b"w/c/0": ("d/0", 0, 8192)}),
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
    "wrong_length": (W_100, {b"w/c/0": ("d/0", 0, 100)}),
    "wrong_checksum": (W_100, AT_0),
    "missing_chunk": (W_100, {}),
    "missing_file": (W_100, {b"w/c/0": ("d/9", 0, 104)}),
    "record_as_data": (W_100, {b"w/c/0": ("tree.json", 0, 104)}),
    "metadata_garbage": ({"w": b"{"}, AT_0),
    "metadata_deep": ({"w": b"[" * 100_000}, AT_0),
    "metadata_other_codec": ({"w": array(100).replace(b'"crc32c"', b'"gzip"')}, AT_0),
    "metadata_other_dtype": ({"w": array(100).replace(b"uint8", b"string")}, AT_0),
    "shape_negative": ({"w": array(100).replace(b"[100]", b"[-100]")}, AT_0),
    "shape_beyond_64_bits": ({"w": array(100).replace(b"[100]", b"[9999999999999999999999]")}, {}),
    "shape_of_many_axes": ({"w": array(100).replace(b"[100]", b"[" + b"1," * 5000 + b"1]")}, {}),
}


@pytest.mark.parametrize("local", [False, True], ids=["memory", "local"])
@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str, local: bool, place: str, tmp_path: Path, stored: Any, look: Look) -> None:
    """Nor is an index trusted more whose record lies about the size of the data, or that has no record."""
    place = str(tmp_path / "ckpt") if local else place
    hf.save(place, TREE)
    forge(place, stored, *INDEXES[name])
    assert sum(map(len, look(place))) < 10_000  # no line for every missing chunk
    problems = hf.verify(place).checkpoints[0].problems
    assert 0 < len(problems) < 5000
    stored(place).edit(files(**{stored(place).name("d/0"): {"size": 1 << 50}}))
    assert look(place)
    with pytest.raises(hf.HoldfastError):
        hf.load(f"{place}/state")


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
