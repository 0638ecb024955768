"""The encodings of TensorFlow's checkpoints, and files that it never writes: damaged, forged, too large, or refused."""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.equality import assert_same
from tests.format.memory import at_most
from tests.formats.tensorflow_writer import (
    BOOL,
    FLOAT,
    HEADER,
    INT32,
    ONE,
    STRING,
    VARIANT,
    Pack,
    block,
    entry,
    literal,
    message,
    shape,
    table,
    text_bytes,
    text_entry,
    varint,
    write,
)

import holdfast as hf
from holdfast import graph
from holdfast.cli.main import main
from holdfast.engine.format import crc32c
from holdfast.integrations.formats.tensorflow.index import (
    MAGIC,
    fields,
    masked,
    ordered,
    read_table,
    slice_key,
    uncompress,
)
from holdfast.integrations.formats.tensorflow.tree import BundleTree
from holdfast.integrations.graph.stored import open_graph

FIXTURES = Path(__file__).parent / "tensorflow"


# ---- blocks, snappy, byte orders, slices


@pytest.mark.parametrize("per_block", [1, 7, 1000])
@pytest.mark.parametrize("pack", [None, literal], ids=["raw", "snappy"])
def test_blocks(tmp_path: Path, per_block: int, pack: Pack | None) -> None:
    arrays = {f"{number:04d}": np.full(2, number, np.float32) for number in range(100)}
    data = b"".join(array.tobytes() for array in arrays.values())
    pairs = [
        (f"layer/{name}/w".encode(), entry(FLOAT, [2], array.tobytes(), 8 * int(name)))
        for name, array in arrays.items()
    ]
    found = hf.load(write(tmp_path, pairs, data, per_block=per_block, pack=pack))
    assert_same(found, {"layer": {name: {"w": array} for name, array in arrays.items()}})


SNAPPY: dict[bytes, bytes | None] = {
    b"\0": b"",
    b"\x03\x08abc": b"abc",
    b"\x09\x00a\x1e\x01\x00": b"aaaaaaaaa",
    b"\x08\x0cabcd\x01\x04": b"abcdabcd",
    b"\x06\x08abc\x0b\x03\x00\x00\x00": b"abcabc",
    b"\x09\x04ab\x12\x02\x00\x04cd": b"abababacd",
    varint(70) + b"\xf0\x45" + b"x" * 70: b"x" * 70,
    varint(300) + b"\xf4\x2b\x01" + b"y" * 300: b"y" * 300,
    # Damaged ones.
    **dict.fromkeys([b"", b"\x05", b"\x03\x08ab", b"\x04\x00a\x0e\x02\x00", b"\x04\x00a\x0e\x00\x00", b"\x01\x04ab"]),
    **dict.fromkeys([b"\xf0", b"\xff" * 10, b"\xff\xff\xff\xff\x0f\x00a", b"\x02\xfc\xff\xff\xff\xffa"]),
}


@pytest.mark.parametrize(("stream", "expected"), SNAPPY.items())
def test_snappy(stream: bytes, expected: bytes | None) -> None:
    if expected is not None:
        assert uncompress(stream) == expected
        return
    with pytest.raises(hf.DamagedCheckpointError):
        uncompress(stream)


@given(st.binary(max_size=40))
def test_anything_at_all(content: bytes) -> None:
    for read in (uncompress, read_table, lambda data: list(fields(data))):
        with contextlib.suppress(hf.DamagedCheckpointError):
            read(content)


def test_files_of_machines_that_begin_with_the_highest_byte(tmp_path: Path) -> None:
    numbers = np.array([1, -2, 300000], ">i4").tobytes()
    texts, checksum = text_bytes([b"a", b"bcd"], "big")
    pairs = [(b"n", entry(INT32, [3], numbers, len(texts))), (b"t", text_entry([2], texts, checksum))]
    found = hf.load(write(tmp_path, pairs, texts + numbers, message((1, 1), (2, 1))))
    assert_same(found, {"n": np.array([1, -2, 300000], np.int32), "t": np.array([b"a", b"bcd"])})


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "80"), (-1, "7f"), (63, "bf"), (64, "c040"), (-0x800, "3800"), (0x424242, "f0424242"), (1 << 62, "ffc0")],
)
def test_numbers_in_the_keys_of_slices(number: int, expected: str) -> None:
    assert ordered(number).hex().startswith(expected)


def sliced(tmp_path: Path, boxes: Sequence[tuple[tuple[int, int] | None, ...]], stored: int | None = None) -> Path:
    """Writes a matrix of 4 times 2 in slices, of which only the first some are stored."""
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    data, pairs, slices = b"", [], []
    for index, box in enumerate(boxes):
        extents = [(0, size) if extent is None else extent for extent, size in zip(box, (4, 2), strict=True)]
        part = whole[tuple(slice(first, first + length) for first, length in extents)].tobytes()
        if stored is None or index < stored:
            key = slice_key(b"w", tuple(box))
            pairs.append((key, entry(FLOAT, [length for _, length in extents], part, len(data))))
        data += part
        extent_messages = [b"" if e is None else message((1, e[0]), (2, e[1])) for e in box]
        slices.append((7, message(*[(1, one) for one in extent_messages])))
    pairs.append((b"w", entry(FLOAT, [4, 2], b"", 0, *slices)))
    return write(tmp_path, pairs, data)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 4), (0, 2))],
        [((0, 1), None), ((1, 3), None)],
        [(None, (0, 1)), (None, (1, 1))],
        [((0, 3), None), ((3, 1), (0, 1)), ((3, 1), (1, 1))],
        [((0, 4), None), ((4, 0), None)],
    ],
)
def test_slices(tmp_path: Path, boxes: Any) -> None:
    assert hf.load(sliced(tmp_path, boxes))["w"].ravel().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("boxes", "stored"),
    [
        ([((0, 1), None), ((1, 2), None)], None),  # a row is missing
        ([((0, 3), None), ((1, 3), None)], None),
        ([((0, 2), None), ((1, 2), None)], None),  # as many elements as there are, one row twice
        ([((0, 2), None), ((2, 2), None)], 1),
        ([((0, 4), None), ((2, 9), None)], 1),
        ([((-1, 4), None)], 0),
    ],
)
def test_slices_that_do_not_cover_their_tensor(tmp_path: Path, boxes: Any, stored: int | None) -> None:
    with pytest.raises(hf.DamagedCheckpointError, match="leaf w"):
        hf.load(sliced(tmp_path, boxes, stored))


# ---- what is refused, or left out


def test_elements_of_an_unknown_type_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, [(b"odd", entry(99, [1], b"??", 4)), (b"w", entry(FLOAT, [1], ONE))], ONE + b"??")
    assert hf.load(path).keys() == {"w"}
    (done,) = hf.import_checkpoint(path, tmp_path / "ours")
    assert done.left_out == ("'odd' (elements of TensorFlow's type 99, which holdfast does not read)",)
    variables = BundleTree.open(hf.storage.as_location(path)).variables
    assert variables.dtypes() == {"odd": None, "w": np.float32}
    with pytest.raises(hf.errors.UnsupportedLeafError, match="type 99"):
        variables.read_value("odd")


@pytest.mark.parametrize("kind", [FLOAT, STRING, VARIANT])
@pytest.mark.parametrize("sizes", [(1 << 57, 0), (0, 1 << 50), (0,) * 32])
def test_huge_shapes_of_nothing(tmp_path: Path, kind: int, sizes: tuple[int, ...]) -> None:
    path = write(tmp_path, [(b"w", entry(kind, sizes, b""))])
    assert hf.load(path)["w"].shape == sizes
    assert graph.load_checkpoint(path).get_tensor("w").shape == sizes


def test_text_that_would_be_very_many_leaves_is_left_out(tmp_path: Path) -> None:
    stored, checksum = text_bytes([b"\0"] * 70_000)
    path = write(tmp_path, [(b"t", text_entry([70_000], stored, checksum)), (b"u", text_entry([0], b"", 0))], stored)
    assert hf.load(path).keys() == {"u"}
    left_out = BundleTree.open(hf.storage.as_location(path)).left_out
    assert left_out == ("'t' (70000 pieces of text that no numpy array can hold)",)
    assert graph.load_checkpoint(path).get_variable_to_shape_map().keys() >= {"u"}


@pytest.mark.parametrize("header", [message((3, message((2, 2)))), message((3, message((1, 3), (3, 1))))])
def test_newer_versions_are_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(hf.errors.FormatVersionError, match=r"forged\.index: it needs version"):
        hf.load(write(tmp_path, [], header=header))


HOSTILE: dict[str, bytes] = {
    "far more elements than bytes": entry(FLOAT, [1 << 40], ONE),
    "a size that overflows": entry(FLOAT, [1 << 62, 1 << 62, 4], ONE),
    "nothing of something huge": entry(FLOAT, [1 << 60, 0, 1 << 60], b""),
    "a negative size": entry(FLOAT, [-1], b""),
    "an unknown shape": message((1, FLOAT), (2, message((3, 1))), (5, 4)),
    "too many axes": entry(FLOAT, [1] * 33, ONE),
    "another data file": entry(FLOAT, [1], ONE, 0, (3, 1)),
    "a negative data file": entry(FLOAT, [1], ONE, 0, (3, -1)),
    "a negative offset": entry(FLOAT, [1], ONE, -4),
    "behind the end": entry(FLOAT, [1], ONE, 1 << 61),
    "another checksum": entry(FLOAT, [1], b"\0\0\0\0"),
    "neither true nor false": entry(BOOL, [4], ONE),
    "a name that is not text": entry(FLOAT, [1], ONE),
    "a number for a shape": message((1, FLOAT), (2, 7), (5, 4)),
    "a group": b"\x0b\x0c",
    "text without bytes": message((1, STRING), (2, shape(3))),
    "very long text": message((1, STRING), (2, shape(1 << 50)), (5, 4)),
    "text in slices": message((1, STRING), (2, shape(1)), (7, message((1, b"")))),
    "a variant without bytes": message((1, VARIANT), (2, shape(1 << 50))),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_entries_that_cannot_be(tmp_path: Path, case: str) -> None:
    name = b"\xff\xfe" if case == "a name that is not text" else b"w"
    # The checksum of the data is another one.
    path = write(tmp_path, [(name, HOSTILE[case])], np.full(1, 2.0, np.float32).tobytes())
    with at_most(5 << 20):
        with pytest.raises(hf.DamagedCheckpointError, match="forged"):
            hf.load(path)
        assert not hf.verify(path).ok


def growing() -> bytes:
    """Returns a block of keys, each of which is one byte longer than the one before it."""
    header = b"\0\0" + varint(len(HEADER)) + HEADER
    return header + b"".join(varint(n) + b"\1\0k" for n in range(20000)) + struct.pack("<II", 0, 1)


TABLES: dict[str, Callable[[], bytes]] = {
    "no entry": lambda: table([]),
    "no header": lambda: table([(b"w", b"")]),
    "a key twice": lambda: table([(b"", HEADER), (b"w", b""), (b"w", b"")]),
    "keys in disorder": lambda: table([(b"", HEADER), (b"w", b""), (b"v", b"")], per_block=2),
    "keys that grow without end": lambda: table([(b"", HEADER)], pack=lambda content: literal(growing())),
    "a block that claims to be huge": lambda: table([(b"", HEADER)], pack=lambda content: varint(1 << 40) + b"\0a"),
    "only restarts": lambda: table([(b"", HEADER)], pack=lambda content: literal(b"\xff" * 8)),
    "a handle beyond the end": lambda: (varint(1 << 40) * 4).ljust(40, b"\0") + MAGIC,
    "something in the footer": lambda: table([(b"", HEADER)])[:-9] + b"\1" + MAGIC,
}


@pytest.mark.parametrize("make", TABLES.values(), ids=list(TABLES))
def test_tables_that_cannot_be(tmp_path: Path, make: Callable[[], bytes]) -> None:
    (tmp_path / "x.index").write_bytes(make())
    with at_most(20 << 20), pytest.raises(hf.DamagedCheckpointError, match=r"x\.index"):
        hf.load(tmp_path / "x")


def test_the_same_text_over_and_over(tmp_path: Path) -> None:
    stored, checksum = text_bytes([b"x" * 100_000])
    pairs = [(b"%05d" % number, text_entry([1], stored, checksum)) for number in range(2000)]
    path = write(tmp_path, pairs, stored)
    with at_most(10 << 20), pytest.raises(hf.DamagedCheckpointError, match="its text claims"):
        hf.load(path)


def test_the_same_block_over_and_over() -> None:
    content = block([(b"", HEADER)])
    handle = varint(0) + varint(len(content))
    index = block([(b"%05d" % number, handle) for number in range(1000)], 1)
    stored = [one + b"\0" + struct.pack("<I", masked(crc32c(one + b"\0"))) for one in (content, index)]
    footer = (handle + varint(len(stored[0])) + varint(len(index))).ljust(40, b"\0") + MAGIC
    with pytest.raises(hf.DamagedCheckpointError, match="overlaps another"):
        read_table(b"".join(stored) + footer)


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "a//b", "..", ".", "a/../b", "a\0b", "C:\\x", "%2F"])
def test_names_are_keys_and_never_paths(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    path = write(folder, [(name.encode(), entry(FLOAT, [1], ONE))], ONE)
    before = set(tmp_path.rglob("*"))
    hf.import_checkpoint(path, folder / "ours")
    found = hf.load(folder / "ours")
    for key in name.split("/"):
        found = found[key]
    assert found.tolist() == [1]
    assert all(folder in place.parents for place in set(tmp_path.rglob("*")) - before)


# ---- graphs of objects


def node(*parts: tuple[int, bytes]) -> tuple[int, bytes]:
    return 1, message(*parts)


def child(number: int, name: str) -> tuple[int, bytes]:
    return 1, message((1, number), (2, name.encode()))


def attribute(key: str, name: str = "VARIABLE_VALUE") -> tuple[int, bytes]:
    return 2, message((1, name.encode()), (3, key.encode()))


def with_graph(folder: Path, nodes: Sequence[tuple[int, bytes]], names: Sequence[str] = ("w",)) -> Path:
    stored, checksum = text_bytes([message(*nodes)])
    pairs = [(f"{name}/.ATTRIBUTES/VARIABLE_VALUE".encode(), entry(FLOAT, [1], ONE, len(stored))) for name in names]
    pairs.append((b"_CHECKPOINTABLE_OBJECT_GRAPH", text_entry([], stored, checksum)))
    return write(folder, pairs, stored + ONE)


def test_two_objects_of_one_value_and_one_without(tmp_path: Path) -> None:
    value, gone = attribute("w/.ATTRIBUTES/VARIABLE_VALUE"), attribute("gone/.ATTRIBUTES/VARIABLE_VALUE")
    nodes = [node(child(1, "w"), child(2, "v"), child(3, "gone")), node(value), node(value), node(gone)]
    path = with_graph(tmp_path, nodes)
    found = graph.load_checkpoint(path).graph
    assert found.same("w", "v")
    assert found.children() == {"w": "w", "v": "w", "gone": "gone"}
    assert hf.load(path)["w"].tolist() == [1]


def test_values_of_the_root_and_of_objects_with_children(tmp_path: Path) -> None:
    nodes = [
        node(child(1, "a"), attribute("/.ATTRIBUTES/VARIABLE_VALUE")),
        node(child(2, "b"), attribute("a/.ATTRIBUTES/VARIABLE_VALUE")),
        node(attribute("a/b/.ATTRIBUTES/VARIABLE_VALUE")),
    ]
    reader = graph.load_checkpoint(with_graph(tmp_path, nodes, ["", "a", "a/b"]))
    assert reader.get_tensor("a/b").tolist() == [1]
    assert reader.get_tensor("a/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [1]
    assert reader.graph.children() == {"a": "a", ".ATTRIBUTES": ".ATTRIBUTES"}


@pytest.mark.parametrize(
    "nodes",
    [
        [node(child(7, "w"))],
        [node(child(-1, "w"))],
        [node((3, message((1, 5), (3, 0))))],
        [(1, b"\x0a\xff")],
        [node((1, message((2, b"\xff"))))],
    ],
    ids=["no such object", "negative", "no such variable", "cut off", "no text"],
)
def test_graphs_that_cannot_be(tmp_path: Path, nodes: Any) -> None:
    with pytest.raises(hf.DamagedCheckpointError, match="object graph"):
        hf.load(with_graph(tmp_path, nodes))


def test_every_value_given_to_every_object(tmp_path: Path) -> None:
    nodes = [node(attribute("w/.ATTRIBUTES/")) for _ in range(300)]
    path = with_graph(tmp_path, nodes, [f"w/.ATTRIBUTES/{number}" for number in range(50)])
    with pytest.raises(hf.DamagedCheckpointError, match="too many objects"):
        graph.load_checkpoint(path)


def test_a_very_deep_graph(tmp_path: Path) -> None:
    depth = 5000
    nodes = [node(child(number + 1, "x")) for number in range(depth)]
    nodes.append(node(attribute("w/.ATTRIBUTES/VARIABLE_VALUE")))
    path = with_graph(tmp_path, nodes, ["w", "/".join("x" * 1000)])
    assert len(hf.load(path)) == 2
    assert hf.verify(path).ok
    assert graph.load_checkpoint(path).has_tensor("/".join("x" * depth))


# ---- every byte, and every length


def flips(content: bytes, places: Iterable[int]) -> Iterator[bytes]:
    for place in places:
        yield content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("prefix", "some"),
    [
        ("saved_model/variables/variables", None),
        ("objects/objects-1", None),
        ("shards/sharded-1", 10),
        ("names/model.ckpt-2", 10),
    ],
)
def test_damaged_bytes_are_found(prefix: str, some: int | None, tmp_path: Path) -> None:
    """Every byte and every length of a small checkpoint, some bytes of others."""
    shutil.copytree((FIXTURES / prefix).parent, tmp_path, dirs_exist_ok=True)
    place = tmp_path / Path(prefix).name
    random = np.random.default_rng(0)
    expected = hf.load(place)
    for file in sorted(tmp_path.glob(f"{place.name}.*")):
        content = file.read_bytes()
        wrong = list(flips(content, range(len(content)) if some is None else random.integers(len(content), size=some)))
        for damaged in [*wrong, *(content[:length] for length in range(0 if some else len(content)))]:
            file.write_bytes(damaged)
            with pytest.raises(hf.DamagedCheckpointError):
                hf.load(place)
            if some is not None:
                assert not hf.verify(place).ok
        file.write_bytes(content)
    assert_same(hf.load(place), expected)
    assert hf.verify(place).ok


def test_a_restore_from_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "guide", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "ckpt-5.data-00000-of-00001"
    bias = hf.load(tmp_path)["net"]["l1"]["bias"]
    content = file.read_bytes()
    file.write_bytes(content.replace(bias.tobytes(), bias[::-1].tobytes()))
    live, kernel = np.zeros(5, np.float32), np.zeros((1, 5), np.float32)
    with pytest.raises(hf.DamagedCheckpointError, match=r"ckpt-5\.data-00000-of-00001"):
        graph.Checkpoint(net=graph.Node(l1=graph.Node(_kernel=kernel, bias=live))).restore(tmp_path, partial=True)
    assert not live.any()
    assert not kernel.any()
    assert open_graph(hf.storage.as_location(tmp_path)).load(["step"]) == [51]  # what is whole can be read


# ---- before TensorFlow 0.12


EXTENT = message((1, message((1, b""))))
"""A slice of one axis that is all of it."""


def v1(path: Path) -> Path:
    """Writes the variable ``w`` as ``TensorSliceWriter`` does."""
    of_tensor = message((1, b"w"), (2, shape(2)), (3, FLOAT), (4, EXTENT))
    meta = message((1, message((1, of_tensor), (2, message((1, 1))))))
    data = message((2, message((1, b"w"), (2, EXTENT), (3, message((1, FLOAT), (5, np.ones(2, "<f4").tobytes()))))))
    path.write_bytes(table([(b"", meta), (b"\0\1w\0\1\1", data)]))
    return path


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        (("model.ckpt-100",), "model.ckpt-100"),
        (("model.ckpt-100-00000-of-00002", "model.ckpt-100-00001-of-00002"), "model.ckpt-100"),
        (("model.ckpt-100-00000-of-00002",), "model.ckpt-100-00000-of-00002"),
        (("model.ckpt-100", "model.ckpt-90"), "."),
        (("model.ckpt-100-00000-of-00001",), "."),
    ],
    ids=["file", "prefix of shards", "shard", "directory", "directory of shards"],
)
def test_it_is_refused_by_name(
    tmp_path: Path, files: tuple[str, ...], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        v1(tmp_path / name)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/old/model.ckpt-100"\n')
    with pytest.raises(hf.errors.FormatVersionError, match=rf"{files[0]} is a TensorFlow checkpoint .*V1.*Saver"):
        hf.load(tmp_path / asked)
    assert main(["ls", str(tmp_path / asked)]) == 1
    assert "before TensorFlow 0.12" in capsys.readouterr().err
