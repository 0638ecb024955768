"""Several processes write one tree into one folder; here one after the other, without communication."""

from __future__ import annotations

import re
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures import StoredFiles

import holdfast as hf
from holdfast.engine.arrays import ArrayDatabase, HostTree, TreeReader, TreeWriter, load_tree
from holdfast.engine.arrays.fragments import Fragment
from holdfast.engine.arrays.snapshot import StagingBuffer
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.pytree import ArrayLeaf, Part, Piece, describe, flatten
from holdfast.engine.storage import as_location

Same = Callable[[Any, Any], None]
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
        groups = [tuple(range(first, count, 2)) for first in (0, 1)]
        return (
            Part((0, 0), (shape[0], half), groups[0]),
            Part((0, half), (shape[0], shape[1] - half), groups[1]),
        )

    return divide


def nothing(name: str, shape: tuple[int, ...]) -> None:
    return None


def held(tree: Any, divide: Divide, process: int) -> HostTree:
    """The part of a tree that one process holds."""
    flat = flatten(tree)
    leaves = []
    for name, leaf in zip(flat.names, describe(flat.names, flat.values), strict=True):
        parts = divide(name, leaf.shape) if isinstance(leaf, ArrayLeaf) else None
        if isinstance(leaf, ArrayLeaf) and parts is not None:
            [whole] = leaf.pieces
            boxes = [part for part in parts if process in part.holders]
            pieces = [
                Piece(
                    part.start, whole.array[tuple(slice(i, i + n) for i, n in zip(part.start, part.shape, strict=True))]
                )
                for part in boxes
            ]
            leaf = replace(leaf, pieces=pieces, parts=parts)
        leaves.append(leaf)
    return HostTree(flat.names, leaves, flat.structure)


def write_shares(
    place: str,
    tree: Any,
    count: int,
    divide: Divide = nothing,
    layout: hf.Layout = LAYOUT,
    *,
    snapshot: bool = False,
    **options: Any,
) -> tuple[TreeWriter, list[bytes]]:
    writers = [TreeWriter(held(tree, divide, process), layout, **options) for process in range(count)]
    members = [ProcessInfo(process, count, "a token") for process in range(count)]
    if snapshot:
        for writer, member in zip(writers, members, strict=True):
            writer.take_snapshot(StagingBuffer(), member, worth=0)
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


def check(place: str, files: Any, assert_same: Same, tree: Any = TREE) -> None:
    """holdfast and TensorStore read all that was written."""
    reader = TreeReader(as_location(place), files)
    assert reader.verify() == []
    found = load_tree(reader)
    assert_same(found, load_alone(tree))
    for name, value in (("params.kernel", tree["params"]["kernel"]), ("opt.0.mu", tree["opt"][0]["mu"])):
        np.testing.assert_array_equal(read_with_tensorstore(place, name), value)


def load_alone(tree: Any) -> Any:
    """Saves the tree from one process, and loads it."""
    place = as_location("memory://tests/alone")
    hf.save(place, tree, overwrite=True)
    return hf.load(place)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("divide", [lambda count: nothing, rows, columns_in_pairs], ids=["all", "rows", "pairs"])
def test_shares_make_one_tree(divide: Any, count: int, place: str, assert_same: Same) -> None:
    if divide is columns_in_pairs and count % 2:
        pytest.skip("pairs")
    writer, fragments = write_shares(place, TREE, count, divide(count))
    files = writer.merge(as_location(place), fragments)
    check(place, files, assert_same)
    sizes = [sum(file.size for path, file in files.items() if f".{process}." in path) for process in range(count)]
    assert max(sizes) <= 1.2 * sum(sizes) / count
    here = as_location(place)
    found = {f"d/{entry.name}" for entry in (here / "d").entries()} | {"manifest.ocdbt", "tree.json"}
    assert found == set(files)


def test_each_process_writes_files_of_its_own(tmp_path: Path) -> None:
    writer, fragments = write_shares(str(tmp_path), TREE, 3, rows(3))
    files = writer.merge(as_location(tmp_path), fragments)
    names = [path for path in files if path not in ("d/index", "manifest.ocdbt", "tree.json")]
    assert all(re.fullmatch(r"d/[0-9a-f]{8}\.[012]\.\d+", name) for name in names)
    assert {name.split(".")[1] for name in names} == {"0", "1", "2"}
    assert len({name.split(".")[0] for name in names}) == 1
    for name in names:
        assert (tmp_path / name).stat().st_size == files[name].size


def test_the_grid_does_not_depend_on_the_writers(place: str) -> None:
    """The grid depends on the parts alone: parts that fall on chunks give the grid of one process."""
    values = {"w": np.arange(16 * 1024, dtype=np.float32).reshape(16, 1024)}
    for count in (1, 2, 4):
        writer, fragments = write_shares(f"{place}/{count}", values, count, rows(count))
        writer.merge(as_location(f"{place}/{count}"), fragments)
        [metadata] = ArrayDatabase(as_location(f"{place}/{count}")).metadata(["w"])
        assert metadata is not None
        assert metadata.chunk_shape == (1, 1024)


def test_a_data_file_of_another_step_is_noticed(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(100, step)})
    data = {step: next((tmp_path / str(step) / "state" / "d").glob("*.0.0")) for step in (1, 2)}
    assert data[1].name != data[2].name
    data[2].unlink()
    data[1].rename(data[2].parent / data[1].name)
    with pytest.raises(hf.DamagedCheckpointError, match=f"{data[2].name} is missing"):
        hf.load(tmp_path / "2")


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


def test_fragments_round_trip(shares: Any) -> None:
    for process, data in enumerate(shares[1]):
        fragment = Fragment.decode(data, process)
        assert (fragment.process, fragment.processes) == (process, 3)
        assert fragment.encode() == data
        assert len(data) < 12 * len(fragment.chunks) + 600


def test_altered_fragments(place: str, shares: Any) -> None:
    writer, (zero, one, two) = shares
    cuts = [one[:length] for length in (0, 3, 11, 12, 40, len(one) - 5, len(one) - 1)]
    flips = [one[:at] + bytes([one[at] ^ 4]) + one[at + 1 :] for at in range(0, len(one), 7)]
    for changed in (*cuts, *flips):
        assert "fragment of process 1 is damaged" in merge_error(place, writer, [zero, changed, two])
    assert "is damaged" in merge_error(place, writer, [zero, one + b"\0", two])


def altered(data: bytes, **changes: Any) -> bytes:
    """A fragment with other members; functions make them from the members that it has."""
    fragment = Fragment.decode(data, 0)
    made = {name: new(getattr(fragment, name)) if callable(new) else new for name, new in changes.items()}
    return fragment._replace(**made).encode()


def without_last(column: Any) -> Any:
    return column[:-1]


COLUMNS = ("chunks", "files", "offsets", "lengths", "checksums")
# What process 0 is given, made of the fragments of three processes, and what it says.
FORGERIES: dict[str, tuple[Callable[[bytes, bytes, bytes], list[bytes]], str]] = {
    "another process": (
        lambda zero, one, two: [zero, two, one],
        "fragment of process 1 of 3 was written by process 2 of 3",
    ),
    "another number of processes": (
        lambda zero, one, two: [zero, altered(one, processes=4), two],
        "fragment of process 1 of 3 was written by process 1 of 4",
    ),
    "one too few": (lambda zero, one, two: [zero, one], "was written by process 0 of 3"),
    "another save": (
        lambda zero, one, two: [zero, one, altered(two, token="00000000")],
        "fragment of process 2 belongs to another save",
    ),
    "a chunk is missing": (
        lambda zero, one, two: [zero, altered(one, **dict.fromkeys(COLUMNS, without_last)), two],
        r"chunk \d+ of the leaf narrow was not written: expected from process 1; 1 of \d+",
    ),
    "a chunk twice": (
        lambda zero, one, two: [zero, altered(one, chunks=lambda c: np.append(c[:-1], c[-2])), two],
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
        lambda zero, one, two: [zero, altered(one, lengths=lambda c: np.append(c[:-1], c[-1] - 4)), two],
        r"chunk \d+ of the leaf \S+ takes \d+ bytes in the data file of process 1; expected \d+",
    ),
    "a chunk beyond the end": (
        lambda zero, one, two: [zero, altered(one, sizes=lambda sizes: [size - 1 for size in sizes]), two],
        "beyond the end of its data files",
    ),
    "a data file that is none": (
        lambda zero, one, two: [zero, altered(one, files=lambda c: c + 100), two],
        r"it places chunks in data file \d+ of \d+",
    ),
    "files of earlier saves that are none": (
        lambda zero, one, two: [zero, altered(one, shared=["../x"]), two],
        "these cannot be files of earlier saves that it shares",
    ),
    "a chunk that is none": (
        lambda zero, one, two: [zero, altered(one, chunks=lambda c: c + 10_000_000), two],
        "a chunk that the tree does not have",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_forged_fragments(place: str, shares: Any, forge: Callable[..., list[bytes]], message: str) -> None:
    writer, fragments = shares
    assert re.search(message, merge_error(place, writer, forge(*fragments)))


def test_a_merge_holds_one_fragment_at_a_time(place: str) -> None:
    tree = {f"layer{number}": np.arange(16) for number in range(2000)}
    peaks = []
    for processes in (4, 32):
        writer, fragments = write_shares(place, tree, processes)
        tracemalloc.start()
        writer.merge(as_location(place), fragments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


OTHERS: dict[str, tuple[Any, str]] = {
    "dtype": (
        {"params": {**TREE["params"], "bias": np.arange(7)}},
        r"params/bias: process 0 has float32\[7\] .*, process 2 has int64\[7\]",
    ),
    "shape": (
        {"params": {**TREE["params"], "bias": VALUES[:9]}},
        r"params/bias: process 0 has float32\[7\] .*, process 2 has float32\[9\]",
    ),
    "missing": ({"narrow": None}, "narrow: process 0 has bool.*, process 2 has a value"),
    "more": ({"more": VALUES[:3]}, r"more: only process 2 has it, as float32\[3\]"),
    "another_kind": ({"note": VALUES[:3]}, r"note: process 0 has a value of kind str .*, process 2 has float32\[3\]"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_process_that_saves_another_tree(name: str, place: str, shares: Any) -> None:
    writer, fragments = shares
    changes, message = OTHERS[name]
    member = ProcessInfo(2, 3, "a token")
    other = TreeWriter(held(TREE | changes, rows(3), 2), LAYOUT).write(as_location(place), member)
    found = merge_error(place, writer, [*fragments[:2], other])
    assert "process 2 saves a different tree from process 0" in found
    assert re.search(message, found)
    assert len(found.splitlines()) == 2


def test_a_process_that_divides_a_leaf_differently(place: str, shares: Any) -> None:
    writer, fragments = shares
    member = ProcessInfo(1, 3, "a token")
    other = TreeWriter(held(TREE, nothing, 1), LAYOUT).write(as_location(place), member)
    found = merge_error(place, writer, [fragments[0], other, fragments[2]])
    assert "params/kernel: process 0 has float32[240, 250]" in found
    assert "divided into 3 parts" in found


@pytest.mark.parametrize("divide", [nothing, rows(3), columns_in_pairs(3)], ids=["alike", "rows", "columns"])
def test_a_snapshot_holds_what_its_process_writes(place: str, divide: Divide, assert_same: Same) -> None:
    tree = {"a": VALUES.reshape(240, 250).copy(), "b": [VALUES[:4999].astype(">f4")], "c": TREE["words"].copy()}
    kept = flatten(tree)
    before = [value.copy() for value in kept.values]
    writers, members = [], [ProcessInfo(process, 3, "a token") for process in range(3)]
    buffers = [StagingBuffer() for _ in members]
    for member, buffer in zip(members, buffers, strict=True):
        writers.append(TreeWriter(held(tree, divide, member.index), LAYOUT))
        writers[-1].take_snapshot(buffer, member, worth=0)
    for value in kept.values:
        value[...] = 0
    fragments = [writer.write(as_location(place), member) for writer, member in zip(writers, members, strict=True)]
    files = writers[0].merge(as_location(place), fragments)
    found = flatten(load_tree(TreeReader(as_location(place), files)))
    assert_same(found.values, before)
    most = tree["a"].nbytes + tree["b"][0].nbytes + 3 * tree["c"].nbytes  # texts are stored as bytes, and copied whole
    assert sum(buffer.nbytes for buffer in buffers) < most + 3 * 4096


def test_a_process_that_lacks_its_part(place: str) -> None:
    tree = held({"w": VALUES}, rows(2), 1)
    [leaf] = tree.leaves
    assert isinstance(leaf, ArrayLeaf)
    leaf.pieces.clear()
    with pytest.raises(hf.errors.StateError, match=r"w: this process must write 1000 elements .* lacks 1000 of them"):
        TreeWriter(tree, LAYOUT).write(as_location(place), ProcessInfo(1, 2, "t"))


# ---- compression and sizes of single leaves


def levels(place: str, *names: str) -> dict[str, int | None]:
    database = ArrayDatabase(as_location(place))
    return {name: found.compression for name, found in zip(names, database.metadata(names), strict=True) if found}


@pytest.mark.parametrize("count", [1, 3])
def test_compressed_leaves(count: int, place: str, assert_same: Same) -> None:
    layout = replace(LAYOUT, compression=3)
    compression = {"params.kernel": None, "words": 19, "note": 5}
    writer, fragments = write_shares(place, TREE, count, rows(count), layout, compression=compression)
    files = writer.merge(as_location(place), fragments)
    found = levels(place, "params.kernel", "opt.0.mu", "words", "params.scale")
    assert found == {"params.kernel": None, "opt.0.mu": 3, "words": 19, "params.scale": 3}
    check(place, files, assert_same)
    np.testing.assert_array_equal(read_with_tensorstore(place, "narrow"), TREE["narrow"])
    plain_writer, plain = write_shares(f"{place}/plain", TREE, count, rows(count))
    plain_files = plain_writer.merge(as_location(f"{place}/plain"), plain)
    assert sum(f.size for f in files.values()) < 0.8 * sum(f.size for f in plain_files.values())


def test_sizes_of_single_leaves(place: str, assert_same: Same) -> None:
    writer, fragments = write_shares(place, TREE, 1, chunk_bytes={"params.kernel": 1 << 20})
    files = writer.merge(as_location(place), fragments)
    kernel, narrow = ArrayDatabase(as_location(place)).metadata(["params.kernel", "narrow"])
    assert kernel is not None
    assert narrow is not None
    assert kernel.chunk_shape == kernel.shape
    assert narrow.chunk_shape < narrow.shape
    check(place, files, assert_same)


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
@given(divided_trees(), st.none() | st.integers(1, 5), st.booleans())
def test_any_division(
    drawn: tuple[dict[str, Any], dict[str, tuple[Part, ...]], int], level: int | None, snapshot: bool
) -> None:
    tree, parts, count = drawn
    here = as_location(f"memory://tests/{uuid.uuid4().hex}")
    layout = replace(LAYOUT, compression=level)
    writer, fragments = write_shares(
        here.url, tree, count, lambda name, shape: parts.get(name), layout, snapshot=snapshot
    )
    files = writer.merge(here, fragments)
    found = load_tree(TreeReader(here, files))
    for name, values in tree.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert TreeReader(here, files).verify() == []
    here.remove_tree()
