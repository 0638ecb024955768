"""Index and data files that TensorFlow never writes, or wrote before 0.12: damaged, forged, too large, or refused."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.format.memory import at_most
from tests.formats.tensorflow_writer import (
    BOOL,
    FLOAT,
    HEADER,
    ONE,
    STRING,
    VARIANT,
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
from holdfast.integrations.formats.tensorflow.index import MAGIC, masked, read_table
from holdfast.integrations.formats.tensorflow.tree import BundleTree
from holdfast.integrations.graph.stored import open_graph

FIXTURES = Path(__file__).parent / "tensorflow"


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
        ("objects/objects-1", 10),
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


def test_every_byte_of_a_graph_of_objects(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "objects", tmp_path, dirs_exist_ok=True)

    def read() -> Any:
        tree = BundleTree.open(hf.storage.as_location(tmp_path / "objects-1"))
        return tree.graph_document(), tree.read_leaves(tree.leaves)

    expected = read()
    for file in sorted(tmp_path.glob("objects-1.*")):
        content = file.read_bytes()
        for wrong in flips(content, range(len(content))):
            file.write_bytes(wrong)
            with pytest.raises(hf.DamagedCheckpointError):
                read()
        file.write_bytes(content)
    assert_same(read(), expected)


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


def test_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    """An index file without its ending, a table's end on other bytes, and notes that name nothing."""
    (tmp_path / "renamed").write_bytes((FIXTURES / "guide" / "ckpt-5.index").read_bytes())
    (tmp_path / "ended").write_bytes(b"\1" * 100 + v1(tmp_path / "v1").read_bytes()[-8:])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "checkpoint").write_text('model_checkpoint_path: "../v1"\n')
    for name in ("renamed", "ended", "empty", "notes", "v2"):
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(tmp_path / name)
