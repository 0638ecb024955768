"""What every format has to do, run for each of them."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import flax.serialization
import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from tests.descriptors import open_files
from tests.formats.tensorflow_writer import BOOL, FLOAT, INT32, entry
from tests.formats.tensorflow_writer import write as write_tensorflow

import holdfast as hf
from holdfast import graph
from holdfast.engine.arrays import TreeSource
from holdfast.engine.pytree import Box, flatten, split, whole
from holdfast.engine.sources import TREE, CheckpointSource, open_checkpoint
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.tensorflow.index import MAGIC

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARRAYS: dict[str, NDArray[Any]] = {
    "net.w": np.arange(48, dtype=np.float32).reshape(8, 6),  # more bytes than OCDBT keeps in its index
    "net.b": np.array([True, False, True]),
    "steps": np.array([1, -2, 3], np.int32),
    "scale": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}
"""The arrays that every format stores, by their names joined by dots."""


def tree(make: Callable[[NDArray[Any]], Any] = np.array) -> dict[str, Any]:
    nested: dict[str, Any] = {name: make(array) for name, array in ARRAYS.items() if "." not in name}
    return {"net": {"w": make(ARRAYS["net.w"]), "b": make(ARRAYS["net.b"])}, **nested}


def write_bundle(folder: Path) -> Path:
    kinds = {"float32": FLOAT, "int32": INT32, "bool": BOOL}
    pairs, data = [], b""
    for name, array in ARRAYS.items():
        key = name.replace(".", "/").encode()
        pairs.append((key, entry(kinds[array.dtype.name], array.shape, array.tobytes(), len(data))))
        data += array.tobytes()
    folder.joinpath("tf").mkdir()
    return write_tensorflow(folder / "tf", pairs, data)


def write(kind: str, folder: Path) -> Path:
    """Writes the arrays in a format; what is to be opened."""
    match kind:
        case "native":
            hf.save(folder / "native", tree())
        case "graph":
            checkpoint = graph.Checkpoint(**{**tree(), "net": graph.Node(w=ARRAYS["net.w"], b=ARRAYS["net.b"])})
            return Path(checkpoint.write(folder / "graph"))
        case "Orbax":
            hf.export_checkpoint(write("native", folder), folder / "Orbax", "orbax")
        case "torch":
            torch.save(tree(torch.from_numpy), folder / "torch")
        case "DCP":
            cast("Any", dcp).save(tree(torch.from_numpy), checkpoint_id=folder / "DCP")
        case "safetensors":
            safetensors.numpy.save_file(ARRAYS, folder / "model.safetensors")
            return folder / "model.safetensors"
        case "Flax":
            (folder / "state.msgpack").write_bytes(flax.serialization.to_bytes(tree()))
            return folder / "state.msgpack"
        case "TensorFlow":
            return write_bundle(folder)
    return folder / kind


class Case(NamedTuple):
    """A format, and the checks that its files allow."""

    kind: str
    format: str
    has_checksums: bool = True
    reads_leaves: bool = True  # rather than the whole file when it is opened

    def write(self, folder: Path) -> Path:
        return write(self.kind, folder)


CASES = [
    Case("native", "holdfast"),
    Case("graph", "holdfast"),
    Case("Orbax", "Orbax"),  # our exports have checksums, Orbax's own files have not
    Case("torch", "torch"),
    Case("DCP", "torch.distributed.checkpoint", has_checksums=False),
    Case("safetensors", "safetensors", has_checksums=False),
    Case("Flax", "Flax", has_checksums=False, reads_leaves=False),
    Case("TensorFlow", "TensorFlow"),
]


@pytest.fixture(params=CASES, ids=[case.kind for case in CASES], scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def path(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.write(tmp_path_factory.mktemp("written"))


@pytest.fixture
def checkpoint(path: Path) -> CheckpointSource:
    return open_checkpoint(as_location(path))


@pytest.fixture
def source(checkpoint: CheckpointSource) -> TreeSource:
    return checkpoint.tree(checkpoint.only_tree())


def joined(name: str) -> str:
    return ".".join(split(name))


def same(one: NDArray[Any] | None, other: NDArray[Any]) -> bool:
    assert one is not None
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# ---- every format


def test_the_checkpoint(case: Case, checkpoint: CheckpointSource) -> None:
    assert checkpoint.format == case.format
    assert list(checkpoint.items.values()) == [TREE]
    assert checkpoint.nbytes > 0
    assert (checkpoint.step, checkpoint.metrics) == (None, None)
    assert checkpoint.items_to_load() == list(checkpoint.items)
    with pytest.raises(hf.CheckpointNotFoundError, match="no tree 'x'"):
        checkpoint.only_tree("x")


def test_leaves_are_in_the_order_of_the_containers(source: TreeSource) -> None:
    names = [leaf.name for leaf in source.leaves]
    built = flatten(source.tree.build(names))
    assert (built.values, built.names) == (names, names)
    assert {joined(leaf.name): leaf.nbytes for leaf in source.leaves} == {
        name: array.nbytes for name, array in ARRAYS.items()
    }
    assert source.left_out == ()


def test_whole_leaves_in_any_order_belong_to_the_caller(source: TreeSource) -> None:
    for leaves in (source.leaves, source.leaves[::-1], source.leaves[2:3], []):
        for leaf, array in zip(leaves, source.read_leaves(leaves), strict=True):
            assert same(array, ARRAYS[joined(leaf.name)])
            assert array is not None
            assert array.flags.writeable
            assert array.flags.aligned
            assert array.flags.c_contiguous
            array[...] = 0


def test_handles_of_an_open_checkpoint(path: Path) -> None:
    with hf.open(path) as opened:
        net = opened["net"] if "net" in opened else {name: opened[f"net.{name}"] for name in ("w", "b")}
        for index in (np.s_[2:5, ::2], np.s_[-1], np.s_[..., None, 3], np.s_[::-7]):
            assert same(net["w"][index], ARRAYS["net.w"][index])
        assert same(np.asarray(opened["scale"]), ARRAYS["scale"])
        assert same(opened["empty"][:, 1:], ARRAYS["empty"][:, 1:])
        assert [chunk.tolist() for _, chunk in net["b"].iter_chunks()] == [[True, False, True]]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_an_open_checkpoint_lets_go_of_its_files(path: Path) -> None:
    """Although the tree is kept."""
    with (opened := hf.open(path)) as tree:
        for leaf in jax.tree.leaves(tree):
            np.asarray(leaf)
        read = opened.bytes_read
    deadline = time.monotonic() + 10  # TensorStore closes the files of Orbax on a thread of its own.
    while (left := [name for name in open_files() if name.startswith(str(path))]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert (tree.keys(), opened.bytes_read) == (opened.tree.keys(), read)


def handle(path: Path) -> Any:
    opened = hf.open(path).tree
    return opened["net"]["w"] if "net" in opened else opened["net.w"]


def test_handles_of_a_checkpoint_that_is_written_anew(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    token, pickled = handle(path).__dask_tokenize__(), pickle.dumps(handle(path))
    if case.format == "holdfast":
        shutil.rmtree(path)
        case.write(tmp_path)
    else:
        os.utime(data_file(path), ns=(1, 1))  # with the same size
    assert handle(path).__dask_tokenize__() != token
    with pytest.raises(hf.CheckpointNotFoundError, match=r"has .*replaced this checkpoint") as caught:
        pickle.loads(pickled)[2:5]
    advice = "holdfast pin" if case.format == "holdfast" else f"`holdfast import` reads {case.format}"
    assert advice in str(caught.value)


def test_handles_do_not_depend_on_other_files(case: Case, tmp_path: Path) -> None:
    """Such as a log beside the arrays, or a checkpoint whose name begins in the same way."""
    path = case.write(tmp_path)
    path = tmp_path if case.format == "safetensors" else path  # the folder of a model
    token, pickled = handle(path).__dask_tokenize__(), pickle.dumps(handle(path))
    for end in (".index", ".data-00000-of-00001"):
        Path(f"{path}0{end}").write_bytes(b"x")
    if path.is_dir() and case.format != "Orbax":
        (path / "train.log").write_text("step 1")
    assert handle(path).__dask_tokenize__() == token
    assert same(pickle.loads(pickled)[2:5], ARRAYS["net.w"][2:5])


BOXES = {
    (8, 6): [Box((1, 2), (3, 5)), Box((0, 0), (8, 6)), Box((2, 2), (2, 4)), Box((7, 0), (8, 1)), Box((1, 2), (3, 5))],
    (3,): [Box((0,), (1,)), Box((1,), (3,)), Box((3,), (3,))],
    (): [Box((), ())],
    (0, 4): [Box((0, 1), (0, 3)), Box((0, 0), (0, 4))],
}


def test_boxes(source: TreeSource) -> None:
    boxes = [BOXES[leaf.saved.shape or ()] for leaf in source.leaves]
    found = source.read_boxes(source.leaves, boxes)
    for leaf, wanted, parts in zip(source.leaves, boxes, found, strict=True):
        array = ARRAYS[joined(leaf.name)]
        assert all(same(one, array[box.within(whole(array.shape))]) for box, one in zip(wanted, parts, strict=True))


def values_of(tree: Any) -> dict[str, Any]:
    found = flatten(tree)
    return {joined(name): np.asarray(value) for name, value in zip(found.names, found.values, strict=True)}


def test_loading_without_a_template_all_and_some(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the files is run."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a file was executed")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    values = values_of(hf.load(path))
    assert values.keys() == ARRAYS.keys()
    assert all(same(values[name], array) for name, array in ARRAYS.items())
    some = values_of(hf.load(path, select="net/**"))
    assert some.keys() == {"net.w", "net.b"}
    assert same(some["net.w"], ARRAYS["net.w"])
    with pytest.raises(hf.TreeMismatchError, match="matches no leaf"):
        hf.load(path, select="nothing/**")
    assert {leaf.path.replace("/", "."): (leaf.shape, leaf.dtype) for leaf in hf.describe(path)} == {
        name: (array.shape, array.dtype.name) for name, array in ARRAYS.items()
    }
    assert hf.verify(path).ok


def test_files_in_an_object_store(path: Path, place: str) -> None:
    store = as_location(place)
    for file in files_below(path):
        (store / os.path.relpath(file, path.parent)).write_bytes(file.read_bytes())
    assert same(hf.load(store / path.name, like=tree())["net"]["w"], ARRAYS["net.w"])
    assert hf.verify(store / path.name).ok


def test_a_template_decides_libraries_and_shardings(path: Path) -> None:
    partition: Any = jax.sharding.PartitionSpec
    shape_of: Any = jax.ShapeDtypeStruct
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, partition("x"))
    like = tree(lambda array: np.zeros_like(array))
    like["net"]["w"] = shape_of((8, 6), np.float32, sharding=sharding)
    like["steps"] = torch.zeros(3, dtype=torch.int32)
    found = hf.load(path, like=like)
    assert found["net"]["w"].sharding == sharding
    assert same(np.asarray(found["net"]["w"]), ARRAYS["net.w"])
    assert found["steps"].tolist() == [1, -2, 3]
    assert same(found["net"]["b"], ARRAYS["net.b"])


def test_a_template_that_differs_names_every_leaf(path: Path) -> None:
    like = tree()
    like["net"]["w"] = np.zeros((9, 6), np.float32)
    like["other"] = like.pop("scale")
    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(path, like=like)
    assert sorted(line.partition(":")[0] for line in caught.value.differences) == ["net/w", "other", "scale"]


def test_importing(case: Case, path: Path, tmp_path: Path) -> None:
    if case.format == "holdfast":
        with pytest.raises(hf.errors.OptionError, match="is already a holdfast checkpoint"):
            hf.import_checkpoint(path, tmp_path / "ours")
        return
    (done,) = hf.import_checkpoint(path, tmp_path / "ours")
    assert (done.format, done.leaves, done.left_out) == (case.format, len(ARRAYS), ())
    assert done.bytes == sum(array.nbytes for array in ARRAYS.values())
    found = hf.load(tmp_path / "ours", like=tree())
    assert same(found["net"]["w"], ARRAYS["net.w"])


# ---- damaged files


def files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else path.parent  # a prefix of TensorFlow
    return sorted(file for file in folder.rglob("*") if file.is_file())


def data_file(path: Path) -> Path:
    """Returns the file that holds the elements of the arrays."""
    content = ARRAYS["net.w"].tobytes()
    (found,) = [file for file in files_below(path) if content in file.read_bytes()]
    return found


def cut(file: Path) -> bytes:
    """Cuts a file within the elements of an array; what it held."""
    content = file.read_bytes()
    file.write_bytes(content[: content.index(ARRAYS["net.w"].tobytes()) + 50])
    return content


def test_cut_changed_and_missing_data_are_refused(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    found = open_checkpoint(as_location(path))
    source = found.tree(found.only_tree())
    file = data_file(path)
    content = cut(file)
    with pytest.raises(hf.DamagedCheckpointError, match=re.escape(file.name)):
        hf.load(path)
    assert not hf.verify(path).ok
    if case.reads_leaves:
        with pytest.raises(hf.DamagedCheckpointError, match=rf"(?s)net/w.*{file.name}|{file.name}.*net/w"):
            source.read_leaves(source.leaves)
        assert "net/w" in [problem.leaf for problem in source.verify()]
    else:
        assert source.verify() == []

    if case.has_checksums:
        flipped = bytearray(content)
        flipped[content.index(ARRAYS["net.w"].tobytes()) + 10] ^= 4
        file.write_bytes(flipped)
        with pytest.raises(hf.DamagedCheckpointError, match="net/w"):
            hf.load(path)
        assert not hf.verify(path).ok
        assert hf.load(path, select="steps")["steps"].tolist() == [1, -2, 3]

    file.unlink()
    with pytest.raises((hf.DamagedCheckpointError, hf.CheckpointNotFoundError), match=re.escape(file.name)):
        hf.load(path)


def test_any_damage_is_harmless_or_an_error_of_ours(case: Case, tmp_path: Path) -> None:
    """What is read is right, but for flipped bits of data without checksums."""
    path = case.write(tmp_path)
    data = data_file(path)
    for file in files_below(path):
        content = file.read_bytes()
        for position in range(
            0, len(content), len(content) // (30 if case.format in ("holdfast", "Orbax") else 150) + 1
        ):
            flipped = content[:position] + bytes([content[position] ^ 5]) + content[position + 1 :]
            for damaged in (flipped, content[:position]):
                file.write_bytes(damaged)
                with contextlib.suppress(hf.HoldfastError):
                    values = values_of(hf.load(path)).values()
                    if case.has_checksums or file != data or damaged is not flipped:
                        assert all(any(same(value, array) for array in ARRAYS.values()) for value in values)
        file.write_bytes(content)


ONE = safetensors.numpy.save({"x": np.ones(2)})
INDEX = Path(__file__).parent / "tensorflow" / "guide" / "ckpt-5.index"
# What is opened, and the files that are there.
NO_CHECKPOINTS: dict[str, tuple[str, dict[str, bytes]]] = {
    "nothing": ("missing.pt", {}),
    "an empty folder": ("7", {"7/empty/x": b""}),
    "text": ("x.pt", {"x.pt": b"hello"}),
    "notes of others": (".", {"metadata/metadata": b"{}", "checkpoint": b'model_checkpoint_path: "model.ckpt-1"\n'}),
    "notes that name something elsewhere": (
        "notes",
        {"notes/checkpoint": b'model_checkpoint_path: "../x"\n', "x": b""},
    ),
    "another pickle": (".", {".metadata": pickle.dumps(collections.Counter())}),
    "safetensors without numbers": (".", {"a.safetensors": ONE, "b.safetensors": ONE}),
    "safetensors of two models": (".", {f"{name}-00001-of-00001.safetensors": ONE for name in ("a", "b")}),
    "another index": (".", {"search.index": b"something else entirely" * 10}),
    "an index without its ending": ("renamed", {"renamed": INDEX.read_bytes()}),
    "the end of a table on other bytes": ("x", {"x": b"\1" * 100 + MAGIC}),
}


@pytest.mark.parametrize(("asked", "files"), NO_CHECKPOINTS.values(), ids=NO_CHECKPOINTS)
def test_nothing_else_is_taken_for_a_checkpoint(tmp_path: Path, asked: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(tmp_path / asked)
    if files and asked == ".":
        assert hf.list_checkpoints(tmp_path) == []
