"""Index and data files made here, byte by byte: what old, foreign and hostile writers may have written."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import graph
from holdfast.engine.format import crc32c
from holdfast.engine.interop.tensorflow_messages import BundleSlice, ordered, slice_key
from holdfast.engine.interop.tensorflow_snappy import uncompress
from holdfast.engine.interop.tensorflow_table import MAGIC, masked, read_table
from holdfast.engine.interop.tensorflow_tree import BundleTree
from holdfast.engine.interop.tensorflow_wire import fields

Pairs = Sequence[tuple[bytes, bytes]]
Pack = Callable[[bytes], bytes]
FLOAT, INT32, STRING, BOOL = 1, 3, 7, 10


# ---- a writer


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*parts: tuple[int, int | bytes]) -> bytes:
    """Encodes fields: numbers as varints, bytes with their length."""
    found = b""
    for number, value in parts:
        if isinstance(value, bytes):
            found += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            found += varint(number << 3) + varint(value)
    return found


def block(pairs: Pairs, every: int = 16) -> bytes:
    out, last, restarts = b"", b"", []
    for index, (key, value) in enumerate(pairs):
        shared = 0
        if index % every == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(last), len(key)) and last[shared] == key[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return out + b"".join(struct.pack("<I", place) for place in restarts or [0]) + struct.pack("<I", len(restarts) or 1)


def table(pairs: Pairs, per_block: int = 1000, pack: Pack | None = None) -> bytes:
    out = b""

    def append(content: bytes) -> bytes:
        nonlocal out
        stored = content if pack is None else pack(content)
        stored += b"\0" if pack is None else b"\1"
        handle = varint(len(out)) + varint(len(stored) - 1)
        out += stored + struct.pack("<I", masked(crc32c(stored)))
        return handle

    groups = [pairs[first : first + per_block] for first in range(0, len(pairs), per_block)]
    handles = [(group[-1][0], append(block(group))) for group in groups]
    footer = append(block([])) + append(block(handles, 1))
    return out + footer.ljust(40, b"\0") + MAGIC


def shape(*sizes: int) -> bytes:
    return message(*[(2, message((1, size))) for size in sizes])


def entry(kind: int, sizes: Sequence[int], data: bytes, offset: int = 0, *more: tuple[int, int | bytes]) -> bytes:
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(data)))
    return message((1, kind), (2, shape(*sizes)), (4, offset), (5, len(data)), *more) + checksum


HEADER = message((1, 1), (3, message((1, 1))))


def write(folder: Path, pairs: Pairs, data: bytes = b"", header: bytes = HEADER, **options: Any) -> Path:
    content = table([(b"", header), *sorted(pairs)], **options)
    (folder / "forged.index").write_bytes(content)
    (folder / "forged.data-00000-of-00001").write_bytes(data)
    return folder / "forged"


def text_bytes(texts: Sequence[bytes], order: Any = "little") -> tuple[bytes, int]:
    """Returns text as it is stored, and its masked checksum."""
    fixed = b"".join(len(text).to_bytes(4, order) for text in texts)
    noted = masked(crc32c(fixed)).to_bytes(4, order)
    return b"".join(varint(len(text)) for text in texts) + noted + b"".join(texts), masked(
        crc32c(fixed + noted + b"".join(texts))
    )


def text_entry(sizes: Sequence[int], stored: bytes, checksum: int) -> bytes:
    return message((1, STRING), (2, shape(*sizes)), (5, len(stored))) + varint(6 << 3 | 5) + struct.pack("<I", checksum)


def literal(content: bytes) -> bytes:
    """Compresses with snappy, in the plainest way."""
    out = varint(len(content))
    for first in range(0, len(content), 60):
        part = content[first : first + 60]
        out += bytes([len(part) - 1 << 2]) + part
    return out


# ---- what is right


@pytest.mark.parametrize("per_block", [1, 7, 1000])
@pytest.mark.parametrize("pack", [None, literal], ids=["raw", "snappy"])
def test_blocks(tmp_path: Path, per_block: int, pack: Pack | None) -> None:
    arrays = {f"layer/{number:04d}/w": np.full(2, number, np.float32) for number in range(100)}
    data = b"".join(array.tobytes() for array in arrays.values())
    pairs = [
        (name.encode(), entry(FLOAT, [2], array.tobytes(), index * 8))
        for index, (name, array) in enumerate(arrays.items())
    ]

    found = hf.load(write(tmp_path, pairs, data, per_block=per_block, pack=pack))

    assert {f"layer/{key}/w": value["w"].tolist() for key, value in found["layer"].items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"\0", b""),
        (b"\x03\x08abc", b"abc"),
        (b"\x09\x00a\x1e\x01\x00", b"aaaaaaaaa"),
        (b"\x08\x0cabcd\x01\x04", b"abcdabcd"),
        (b"\x06\x08abc\x0b\x03\x00\x00\x00", b"abcabc"),
        (b"\x09\x04ab\x12\x02\x00\x04cd", b"abababacd"),
        (varint(70) + b"\xf0\x45" + b"x" * 70, b"x" * 70),
        (varint(300) + b"\xf4\x2b\x01" + b"y" * 300, b"y" * 300),
    ],
)
def test_snappy(stream: bytes, expected: bytes) -> None:
    assert uncompress(stream) == expected


@pytest.mark.parametrize(
    "stream",
    [b"", b"\x05", b"\x03\x08ab", b"\x04\x00a\x0e\x02\x00", b"\x04\x00a\x0e\x00\x00", b"\x01\x04ab", b"\xf0"]
    + [b"\xff" * 10, b"\xff\xff\xff\xff\x0f\x00a", b"\x02\xfc\xff\xff\xff\xffa"],
)
def test_snappy_that_is_damaged(stream: bytes) -> None:
    with pytest.raises(hf.DamagedCheckpointError):
        uncompress(stream)


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=200)
def test_anything_at_all(content: bytes) -> None:
    for read in (uncompress, read_table, lambda data: list(fields(data))):
        try:
            read(content)
        except hf.DamagedCheckpointError:
            continue


def test_files_of_machines_that_begin_with_the_highest_byte(tmp_path: Path) -> None:
    numbers = np.array([1, -2, 300000], ">i4").tobytes()
    texts, checksum = text_bytes([b"a", b"bcd"], "big")
    pairs = [
        (b"n", entry(INT32, [3], numbers, len(texts))),
        (b"t", text_entry([2], texts, checksum)),
    ]

    found = hf.load(write(tmp_path, pairs, texts + numbers, message((1, 1), (2, 1))))

    assert found["n"].tolist() == [1, -2, 300000]
    assert found["n"].dtype == np.int32
    assert found["t"].tolist() == [b"a", b"bcd"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "80"), (-1, "7f"), (63, "bf"), (64, "c040"), (-0x800, "3800"), (0x424242, "f0424242"), (1 << 62, "ffc0")],
)
def test_numbers_in_the_keys_of_slices(number: int, expected: str) -> None:
    assert ordered(number).hex().startswith(expected)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2, max_size=2))
def test_keys_are_in_the_order_of_their_numbers(pair: list[int]) -> None:
    assert (ordered(pair[0]) < ordered(pair[1])) == (pair[0] < pair[1])


def sliced(tmp_path: Path, boxes: Sequence[tuple[tuple[int, int] | None, ...]], stored: int | None = None) -> Path:
    """Writes a matrix of 4 times 2 in slices, of which only the first some are stored."""
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    data, pairs, slices = b"", [], []
    for index, box in enumerate(boxes):
        extents = [(0, size) if extent is None else extent for extent, size in zip(box, (4, 2), strict=True)]
        part = whole[tuple(slice(first, first + length) for first, length in extents)].tobytes()
        if stored is None or index < stored:
            key = slice_key(b"w", BundleSlice(tuple(box)))
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
    one = np.ones(1, np.float32).tobytes()
    path = write(tmp_path, [(b"odd", entry(99, [1], b"??", 4)), (b"w", entry(FLOAT, [1], one))], one + b"??")

    assert hf.load(path).keys() == {"w"}
    (done,) = hf.import_checkpoint(path, tmp_path / "ours")
    assert done.left_out == ("'odd' (elements of TensorFlow's type 99, which holdfast does not read)",)
    variables = BundleTree.open(hf.as_location(path)).variables
    assert variables.dtypes() == {"odd": None, "w": np.float32}
    with pytest.raises(hf.UnsupportedLeafError, match="type 99"):
        variables.read("odd")


@pytest.mark.parametrize("kind", [FLOAT, STRING, 21])
@pytest.mark.parametrize("sizes", [(1 << 57, 0), (0, 1 << 50), (0,) * 32])
def test_huge_shapes_of_nothing(tmp_path: Path, kind: int, sizes: tuple[int, ...]) -> None:
    path = write(tmp_path, [(b"w", entry(kind, sizes, b""))])

    assert hf.load(path)["w"].shape == sizes
    assert graph.load_checkpoint(path).get_tensor("w").shape == sizes


def test_text_that_would_be_very_many_leaves_is_left_out(tmp_path: Path) -> None:
    stored, checksum = text_bytes([b"\0"] * 70_000)
    path = write(tmp_path, [(b"t", text_entry([70_000], stored, checksum)), (b"u", text_entry([0], b"", 0))], stored)

    assert hf.load(path).keys() == {"u"}
    assert BundleTree.open(hf.as_location(path)).left_out == (
        "'t' (70000 pieces of text that no array of numpy can hold)",
    )
    assert graph.load_checkpoint(path).get_variable_to_shape_map().keys() >= {"u"}


@pytest.mark.parametrize("header", [message((3, message((2, 2)))), message((3, message((1, 3), (3, 1))))])
def test_newer_versions_are_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(hf.FormatVersionError, match=r"forged\.index: it needs version"):
        hf.load(write(tmp_path, [], header=header))


ONE = np.ones(1, np.float32).tobytes()
HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "far more elements than bytes": (b"w", entry(FLOAT, [1 << 40], ONE)),
    "a size that overflows": (b"w", entry(FLOAT, [1 << 62, 1 << 62, 4], ONE)),
    "nothing of something huge": (b"w", entry(FLOAT, [1 << 60, 0, 1 << 60], b"")),
    "a negative size": (b"w", entry(FLOAT, [-1], b"")),
    "an unknown shape": (b"w", message((1, FLOAT), (2, message((3, 1))), (5, 4))),
    "too many axes": (b"w", entry(FLOAT, [1] * 33, ONE)),
    "another data file": (b"w", entry(FLOAT, [1], ONE, 0, (3, 1))),
    "a negative data file": (b"w", entry(FLOAT, [1], ONE, 0, (3, -1))),
    "a negative offset": (b"w", entry(FLOAT, [1], ONE, -4)),
    "behind the end": (b"w", entry(FLOAT, [1], ONE, 1 << 61)),
    "another checksum": (b"w", entry(FLOAT, [1], b"\0\0\0\0")),
    "neither true nor false": (b"w", entry(BOOL, [4], ONE)),
    "a name that is no text": (b"\xff\xfe", entry(FLOAT, [1], ONE)),
    "a number for a shape": (b"w", message((1, FLOAT), (2, 7), (5, 4))),
    "a group": (b"w", b"\x0b\x0c"),
    "text without bytes": (b"w", message((1, STRING), (2, shape(3)))),
    "very long text": (b"w", message((1, STRING), (2, shape(1 << 50)), (5, 4))),
    "text in slices": (b"w", message((1, STRING), (2, shape(1)), (7, message((1, b""))))),
    "a variant without bytes": (b"w", message((1, 21), (2, shape(1 << 50)))),
}


@pytest.mark.parametrize("pair", HOSTILE.values(), ids=list(HOSTILE))
def test_entries_that_cannot_be(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(hf.DamagedCheckpointError, match="forged"):
            hf.load(write(tmp_path, [pair], np.full(1, 2.0, np.float32).tobytes()))
        assert not hf.verify(tmp_path / "forged").ok
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


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
    content = make()
    (tmp_path / "x.index").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(hf.DamagedCheckpointError, match=r"x\.index"):
            hf.load(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_the_same_text_over_and_over(tmp_path: Path) -> None:
    stored, checksum = text_bytes([b"x" * 100_000])
    pairs = [(b"%05d" % number, text_entry([1], stored, checksum)) for number in range(2000)]
    path = write(tmp_path, pairs, stored)

    tracemalloc.start()
    try:
        with pytest.raises(hf.DamagedCheckpointError, match="its text claims"):
            hf.load(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_the_same_block_over_and_over() -> None:
    content = block([(b"", HEADER)])
    stored = content + b"\0" + struct.pack("<I", masked(crc32c(content + b"\0")))
    handle = varint(0) + varint(len(content))
    index = block([(b"%05d" % number, handle) for number in range(1000)], 1)
    stored_index = index + b"\0" + struct.pack("<I", masked(crc32c(index + b"\0")))
    footer = (handle + varint(len(stored)) + varint(len(index))).ljust(40, b"\0") + MAGIC

    with pytest.raises(hf.DamagedCheckpointError, match="in another one"):
        read_table(stored + stored_index + footer)


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


def test_two_objects_of_one_value(tmp_path: Path) -> None:
    value = attribute("w/.ATTRIBUTES/VARIABLE_VALUE")
    path = with_graph(tmp_path, [node(child(1, "w"), child(2, "v")), node(value), node(value)])

    assert graph.load_checkpoint(path).graph.same("w", "v")


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
    with pytest.raises(hf.DamagedCheckpointError, match="graph of objects"):
        hf.load(with_graph(tmp_path, nodes))


def test_every_value_given_to_every_object(tmp_path: Path) -> None:
    nodes = [node(attribute("w/.ATTRIBUTES/")) for _ in range(300)]

    path = with_graph(tmp_path, nodes, [f"w/.ATTRIBUTES/{number}" for number in range(50)])

    with pytest.raises(hf.DamagedCheckpointError, match="to very many objects"):
        graph.load_checkpoint(path)


def test_objects_without_their_values(tmp_path: Path) -> None:
    path = with_graph(tmp_path, [node(child(1, "w")), node(attribute("gone/.ATTRIBUTES/VARIABLE_VALUE"))])

    assert graph.load_checkpoint(path).graph.children() == {"w": "w"}
    assert hf.load(path)["w"].tolist() == [1]


def test_a_very_deep_graph(tmp_path: Path) -> None:
    depth = 5000
    nodes = [node(child(number + 1, "x")) for number in range(depth)]
    nodes.append(node(attribute("w/.ATTRIBUTES/VARIABLE_VALUE")))

    path = with_graph(tmp_path, nodes, ["w", "/".join("x" * 1000)])

    assert len(hf.load(path)) == 2
    assert hf.verify(path).ok
    assert graph.load_checkpoint(path).has_tensor("/".join("x" * depth))
