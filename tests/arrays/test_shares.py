"""Several processes write one tree into one folder; here one after the other, without communication."""

from __future__ import annotations

import re
import threading
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.damage import flipped
from tests.equality import assert_same
from tests.fixtures import StoredFiles

import holdfast as hf
from holdfast.engine.arrays import ArrayDatabase, HostTree, TreeReader, TreeWriter, encode, load_tree
from holdfast.engine.arrays.fragments import Fragment
from holdfast.engine.arrays.snapshot import StagingBuffer
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.pytree import ArrayLeaf, Part, Piece, describe, flatten
from holdfast.engine.storage import as_location
from holdfast.engine.storage.folders import MemoryBackend

Divide = Callable[[str, tuple[int, ...]], tuple[Part, ...] | None]

LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=16_384, data_file_bytes=60_000)
VALUES = np.arange(60_000, dtype=np.float32)
TREE: dict[str, Any] = {
    "params": {"kernel": VALUES.reshape(240, 250), "bias": VALUES[:7], "scale": np.float32(2)},
    "opt": [{"mu": VALUES[:5000].reshape(50, 100).T, "nu": VALUES[:4999].astype(">f4")}, np.zeros((0, 4)), 3],
    "words": np.array(["one", "two", "three"] * 900).reshape(90, 30),
    "narrow": (VALUES[:9000] > 70).reshape(60, 50, 3),
    "note": "text",
    "none": None,
}


def rows(count: int) -> Divide:
    """Divides arrays of at least as many rows as processes; every process has all others."""

    def divide(name: str, shape: tuple[int, ...]) -> tuple[Part, ...] | None:
        if not shape or shape[0] < count:
            return None
        size = -(-shape[0] // count)
        starts = range(0, shape[0], size)
        return tuple(
            Part((start, *[0] * (len(shape) - 1)), (min(size, shape[0] - start), *shape[1:]), (process,))
            for process, start in enumerate(starts)
        )

    return divide


def columns_in_pairs(count: int) -> Divide:
    """Divides arrays of two axes into two halves, each held by every second process."""

    def divide(name: str, shape: tuple[int, ...]) -> tuple[Part, ...] | None:
        if len(shape) != 2 or shape[1] < 2:
            return None
        half = shape[1] // 2
        return (
            Part((0, 0), (shape[0], half), tuple(range(0, count, 2))),
            Part((0, half), (shape[0], shape[1] - half), tuple(range(1, count, 2))),
        )

    return divide


def undivided(count: int) -> Divide:
    return lambda name, shape: None


def held(tree: Any, divide: Divide, process: int) -> HostTree:
    """The part of a tree that one process holds."""
    flat = flatten(tree)
    leaves = []
    for name, leaf in zip(flat.names, describe(flat.names, flat.values), strict=True):
        parts = divide(name, leaf.shape) if isinstance(leaf, ArrayLeaf) else None
        if isinstance(leaf, ArrayLeaf) and parts is not None:
            [whole] = leaf.pieces
            boxes = [part.box for part in parts if process in part.holders]
            pieces = [Piece(box.start, whole.array[box.within(whole.box)]) for box in boxes]
            leaf = replace(leaf, pieces=pieces, parts=parts)
        leaves.append(leaf)
    return HostTree(flat.names, leaves, flat.structure)


def write_shares(
    place: str,
    tree: Any,
    count: int,
    divide: Divide,
    layout: hf.Layout = LAYOUT,
    *,
    copied: Callable[[list[StagingBuffer]], object] | None = None,
    **options: Any,
) -> tuple[TreeWriter, list[bytes]]:
    """Writes the fragments of all processes; from snapshots if there is something to do once these are taken."""
    writers = [TreeWriter(held(tree, divide, process), layout, **options) for process in range(count)]
    members = [ProcessInfo(process, count, "a token") for process in range(count)]
    if copied is not None:
        buffers = [StagingBuffer() for _ in writers]
        for writer, member, buffer in zip(writers, members, buffers, strict=True):
            writer.take_snapshot(buffer, member, worth=0)
        copied(buffers)
    fragments = [writer.write(as_location(place), member) for writer, member in zip(writers, members, strict=True)]
    return writers[0], fragments


def read_with_tensorstore(place: str, name: str) -> Any:
    context = ts.Context()
    memory = ts.KvStore.open(f"{place}/", context=context).result()
    for path, content in StoredFiles(place).read().items():
        memory.write(path, content).result()
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"{place}/", "path": f"{name}/"},
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, context=context).result().read().result()


def check(place: str, files: Any) -> None:
    """holdfast and TensorStore read all that was written, as if one process had saved it."""
    reader = TreeReader(as_location(place), files)
    assert reader.verify() == []
    hf.save(f"{place}/alone", TREE)
    assert_same(load_tree(reader), hf.load(f"{place}/alone"))
    for name, value in (("params.kernel", TREE["params"]["kernel"]), ("opt.0.mu", TREE["opt"][0]["mu"])):
        np.testing.assert_array_equal(read_with_tensorstore(place, name), value)


@pytest.mark.parametrize(
    ("divide", "count"),
    [
        *((one, count) for one in (undivided, rows) for count in range(1, 6)),
        (columns_in_pairs, 2),
        (columns_in_pairs, 4),
    ],
)
def test_shares_make_one_tree(divide: Callable[[int], Divide], count: int, place: str) -> None:
    """Each process writes files of its own, which are about as large as those of the others."""
    writer, fragments = write_shares(place, TREE, count, divide(count))
    files = writer.merge(as_location(place), fragments)
    stored = StoredFiles(place).read()
    assert {path: len(content) for path, content in stored.items()} == {path: one.size for path, one in files.items()}
    check(place, files)
    names = [path for path in files if path not in ("d/index", "manifest.ocdbt", "tree.json")]
    assert all(re.fullmatch(rf"d/[0-9a-f]{{8}}\.[0-{count - 1}]\.\d+", name) for name in names)
    assert len({name.split(".")[0] for name in names}) == 1
    sizes = [sum(files[name].size for name in names if f".{process}." in name) for process in range(count)]
    assert 0 < max(sizes) <= 1.2 * sum(sizes) / count


def test_the_grid_does_not_depend_on_the_writers(place: str) -> None:
    """The grid depends on the parts alone: parts that fall on chunks give the grid of one process."""
    values = {"w": np.arange(16 * 1024, dtype=np.float32).reshape(16, 1024)}
    for count in (1, 2, 4):
        writer, fragments = write_shares(f"{place}/{count}", values, count, rows(count))
        writer.merge(as_location(f"{place}/{count}"), fragments)
        [metadata] = ArrayDatabase(as_location(f"{place}/{count}")).metadata(["w"])
        assert metadata is not None
        assert metadata.chunk_shape == (1, 1024)


# ---- fragments


@pytest.fixture
def shares(place: str) -> tuple[TreeWriter, list[bytes]]:
    return write_shares(place, TREE, 3, rows(3))


def merge_error(place: str, writer: TreeWriter, fragments: list[bytes]) -> str:
    with pytest.raises(hf.HoldfastError) as caught:
        writer.merge(as_location(place), fragments)
    assert not (as_location(place) / "tree.json").exists()
    assert type(caught.value) in (hf.DamagedCheckpointError, hf.TreeMismatchError)
    return str(caught.value)


def test_altered_fragments(place: str, shares: Any) -> None:
    writer, (zero, one, two) = shares
    assert len(one) < 12 * len(Fragment.decode(one, 1).chunks) + 600
    cuts = [one[:length] for length in (0, 3, 11, 12, 40, len(one) - 5, len(one) - 1)]
    for changed in (*cuts, *(flipped(one, at) for at in range(0, len(one), 7)), one + b"\0"):
        assert "fragment of process 1 is damaged" in merge_error(place, writer, [zero, changed, two])


def altered(data: bytes, **changes: Any) -> bytes:
    """A fragment with other members; functions make them from the members that it has."""
    fragment = Fragment.decode(data, 0)
    made = {name: new(getattr(fragment, name)) if callable(new) else new for name, new in changes.items()}
    return fragment._replace(**made).encode()


COLUMNS = ("chunks", "files", "offsets", "lengths", "checksums")


def one(**changes: Any) -> Callable[[bytes, bytes, bytes], list[bytes]]:
    """What process 0 is given if the fragment of process 1 has other members."""
    return lambda zero, one, two: [zero, altered(one, **changes), two]


def written(divide: Divide, process: int, **changes: Any) -> bytes:
    """The fragment of a process whose tree is another one, or which divides it differently."""
    place = as_location(f"memory://tests/{uuid.uuid4().hex}")
    return TreeWriter(held(TREE | changes, divide, process), LAYOUT).write(place, ProcessInfo(process, 3, "a token"))


def params(**changes: Any) -> Callable[[bytes, bytes, bytes], list[bytes]]:
    return other(params=TREE["params"] | changes)


def other(**changes: Any) -> Callable[[bytes, bytes, bytes], list[bytes]]:
    """What process 0 is given if process 2 saves another tree."""
    return lambda zero, one, two: [zero, one, written(rows(3), 2, **changes)]


DIFFERENT = r"process 2 saves a different tree from process 0[^\n]*\n.*"
# What process 0 is given, made of the fragments of three processes, and what it says.
FORGERIES: dict[str, tuple[Callable[[bytes, bytes, bytes], list[bytes]], str]] = {
    "another process": (
        lambda zero, one, two: [zero, two, one],
        "fragment of process 1 of 3 was written by process 2 of 3",
    ),
    "another number of processes": (one(processes=4), "fragment of process 1 of 3 was written by process 1 of 4"),
    "one too few": (lambda zero, one, two: [zero, one], "was written by process 0 of 3"),
    "another save": (one(token="00000000"), "fragment of process 1 belongs to another save"),
    "a chunk is missing": (
        one(**dict.fromkeys(COLUMNS, lambda column: column[:-1])),
        r"chunk \d+ of the leaf narrow was not written: expected from process 1; 1 of \d+",
    ),
    "a chunk twice": (
        one(chunks=lambda c: np.append(c[:-1], c[-2])),
        r"chunk \d+ of the leaf words was written twice by process 1",
    ),
    "a chunk of another process": (
        lambda zero, one, two: [
            zero,
            altered(one, chunks=lambda c: np.append(Fragment.decode(two, 2).chunks[:1], c[1:])),
            two,
        ],
        r"chunk \d+ of the leaf \S+ was written twice: by process 1 and by process 2",
    ),
    "a chunk that is too short": (
        one(lengths=lambda c: np.append(c[:-1], c[-1] - 4)),
        r"chunk \d+ of the leaf \S+ takes \d+ bytes in the data file of process 1; expected \d+",
    ),
    "a chunk beyond the end": (
        one(sizes=lambda sizes: [size - 1 for size in sizes]),
        "beyond the end of its data files",
    ),
    "a data file that is none": (one(files=lambda c: c + 100), r"it places chunks in data file \d+ of \d+"),
    "files of earlier saves that are none": (
        one(shared=["../x"]),
        "these cannot be files of earlier saves that it shares",
    ),
    "a chunk that is none": (one(chunks=lambda c: c + 10_000_000), "a chunk that the tree does not have"),
    "another dtype": (
        params(bias=np.arange(7)),
        DIFFERENT + r"params/bias: process 0 has float32\[7\] .*, process 2 has int64\[7\]",
    ),
    "another shape": (
        params(bias=VALUES[:9]),
        DIFFERENT + r"params/bias: process 0 has float32\[7\] .*, process 2 has float32\[9\]",
    ),
    "a leaf less": (other(narrow=None), DIFFERENT + "narrow: process 0 has bool.*, process 2 has a value"),
    "a leaf more": (other(more=VALUES[:3]), DIFFERENT + r"more: only process 2 has it, as float32\[3\]"),
    "another kind": (
        other(note=VALUES[:3]),
        DIFFERENT + r"note: process 0 has a value of kind str .*, process 2 has float32\[3\]",
    ),
    "divided differently": (
        lambda zero, one, two: [zero, written(undivided(3), 1), two],
        r"params/kernel: process 0 has float32\[240, 250\].* divided into 3 parts",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_forged_fragments(place: str, shares: Any, forge: Callable[..., list[bytes]], message: str) -> None:
    writer, fragments = shares
    found = merge_error(place, writer, forge(*fragments))
    assert re.search(message, found)
    assert not message.startswith(DIFFERENT) or len(found.splitlines()) == 2


def test_a_merge_holds_one_fragment_at_a_time(place: str) -> None:
    tree = {f"layer{number}": np.arange(16) for number in range(2000)}
    peaks = []
    for processes in (4, 32):
        writer, fragments = write_shares(place, tree, processes, undivided(processes))
        tracemalloc.start()
        writer.merge(as_location(place), fragments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("divide", [undivided, rows, columns_in_pairs])
def test_a_snapshot_holds_what_its_process_writes(place: str, divide: Callable[[int], Divide]) -> None:
    words, scalar = TREE["words"].copy(), np.array(7.0)
    tree = {"a": VALUES.reshape(240, 250).copy(), "b": [VALUES[:4999].astype(">f4")], "c": words, "d": scalar}
    kept = flatten(tree)
    before = [value.copy() for value in kept.values]

    def spoil(buffers: list[StagingBuffer]) -> None:
        most = tree["a"].nbytes + tree["b"][0].nbytes + 3 * words.nbytes  # texts become bytes, and are copied whole
        assert sum(buffer.nbytes for buffer in buffers) < most + 3 * 4096
        for value in kept.values:
            value[...] = 0

    writer, fragments = write_shares(place, tree, 3, divide(3), copied=spoil)
    files = writer.merge(as_location(place), fragments)
    assert_same(flatten(load_tree(TreeReader(as_location(place), files))).values, before)


@pytest.mark.parametrize("compression", [None, 3])
def test_a_process_that_cannot_write_its_part(
    place: str, compression: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks the elements, or its files cannot be written; no thread is left behind."""
    before = set(threading.enumerate())
    member, layout = ProcessInfo(1, 2, "t"), replace(LAYOUT, compression=compression)
    tree = held({"w": VALUES}, rows(2), 1)
    whole = TreeWriter(tree, layout)
    [leaf] = tree.leaves
    assert isinstance(leaf, ArrayLeaf)
    lacking = HostTree(tree.names, [replace(leaf, pieces=[])], tree.structure)
    with pytest.raises(hf.errors.StateError, match=r"w: this process must write 1000 elements .* lacks 1000 of them"):
        TreeWriter(lacking, layout).write(as_location(place), member)

    def full(*arguments: Any, **options: Any) -> None:
        raise hf.errors.StorageError("full")

    monkeypatch.setattr(MemoryBackend, "write_data", full)
    with pytest.raises(hf.errors.StorageError, match="full"):
        whole.write(as_location(place), member)
    assert not [one for one in threading.enumerate() if one.name.startswith("holdfast") and one not in before]


# ---- compression and sizes of single leaves


@pytest.mark.parametrize("count", [1, 3])
def test_compression_and_chunks_of_single_leaves(count: int, place: str) -> None:
    levels = {"params.kernel": None, "opt.0.mu": 3, "words": 19, "params.scale": 3}
    options: dict[str, Any] = {
        "compression": {"params.kernel": None, "words": 19, "note": 5},
        "chunk_bytes": {"params.kernel": 1 << 20},
    }
    writer, fragments = write_shares(place, TREE, count, rows(count), replace(LAYOUT, compression=3), **options)
    files = writer.merge(as_location(place), fragments)
    names = [*levels, "narrow"]
    found = dict(zip(names, ArrayDatabase(as_location(place)).metadata(names), strict=True))
    assert {name: found[name].compression for name in levels} == levels  # type: ignore[union-attr]  # none is missing
    chunks = {name: found[name].chunk_shape for name in ("params.kernel", "narrow")}  # type: ignore[union-attr]
    assert chunks["params.kernel"] == (240 // count, 250)
    assert chunks["narrow"] < TREE["narrow"].shape
    check(place, files)
    np.testing.assert_array_equal(read_with_tensorstore(place, "narrow"), TREE["narrow"])
    if count == 1:  # the kernel has a file of its own; files keep to their size before compression
        assert sum(path.count(".") == 2 for path in files) == 3
    plain_writer, plain = write_shares(f"{place}/plain", TREE, count, rows(count))
    plain_files = plain_writer.merge(as_location(f"{place}/plain"), plain)
    assert sum(f.size for f in files.values()) < 0.8 * sum(f.size for f in plain_files.values())


@pytest.mark.parametrize("level", [0, 23, -1, 1.5, "3", True])
def test_invalid_levels(level: Any) -> None:
    with pytest.raises(hf.errors.OptionError, match=r"compression=.* must be a level of zstd, 1 to 22, or None"):
        hf.Layout(compression=level)


# ---- anything


@st.composite
def divided_trees(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, tuple[Part, ...]], int]:
    """A tree of arrays, the parts of those divided along one axis, and the number of processes."""
    count = draw(st.integers(1, 4))
    tree: dict[str, Any] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    groups = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(lambda group: tuple(sorted(group)))
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 50), max_size=3)))
        dtype = draw(st.sampled_from(["<f4", ">f8", "?", "<U3", "<M8[ns]"]))
        values = np.arange(int(np.prod(shape))).reshape(shape)
        tree[f"leaf{number}"] = values.astype("<i8").astype(dtype)
        if not shape or not draw(st.booleans()):
            continue
        axis = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, shape[axis] - 1)), max_size=3)) - {shape[axis]})
        parts[f"leaf{number}"] = tuple(
            Part(
                tuple(low if i == axis else 0 for i in range(len(shape))),
                tuple(high - low if i == axis else n for i, n in enumerate(shape)),
                draw(groups),
            )
            for low, high in pairwise([0, *cuts, shape[axis]])
        )
    return tree, parts, count


@settings(deadline=None, max_examples=40)
@given(divided_trees(), st.none() | st.integers(1, 5), st.booleans(), st.sampled_from([1, 3, 4096]))
def test_any_division(
    drawn: tuple[dict[str, Any], dict[str, tuple[Part, ...]], int], level: int | None, snapshot: bool, group: int
) -> None:
    tree, parts, count = drawn
    here = as_location(f"memory://tests/{uuid.uuid4().hex}")
    layout = replace(LAYOUT, compression=level)
    copied = (lambda buffers: None) if snapshot else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_GROUP_CHUNKS", group)  # chunks that are compressed together
        writer, fragments = write_shares(here.url, tree, count, lambda name, _: parts.get(name), layout, copied=copied)
    files = writer.merge(here, fragments)
    for name, found in load_tree(TreeReader(here, files)).items():
        assert found.dtype == tree[name].dtype
        np.testing.assert_array_equal(found, tree[name])
    assert TreeReader(here, files).verify() == []
    here.remove_tree()
