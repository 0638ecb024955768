"""Open checkpoints: handles in the place of arrays, which read what an index selects."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import holdfast as hf
from holdfast.engine.arrays.load import Selection

TABLE = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)
SMALL_CHUNKS = hf.Layout(chunk_bytes=4096, segment_bytes=4096)  # 8 rows of LONG each
LONG = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "ckpt"
    hf.save(path, {"table": TABLE, "long": LONG, "names": ["a", "b"], "step": 7}, layout=SMALL_CHUNKS)
    return path


@given(index=basic_indices((64, 128), allow_newaxis=True))
def test_an_index_selects_what_numpy_does(saved: Path, index: Any) -> None:
    with hf.open(saved) as tree:
        found = tree["long"][index]
    expected = LONG[index]
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@given(data=st.data(), shape=st.lists(st.integers(0, 7), max_size=3), limit=st.integers(1, 64))
def test_selections_of_any_shape_and_chunks(data: st.DataObject, shape: list[int], limit: int) -> None:
    """Of small arrays in chunks of a few elements, without files."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    chunks = tuple(data.draw(st.integers(1, max(size, 1))) for size in shape)
    indices = basic_indices(tuple(shape), allow_newaxis=True, max_dims=6) if shape else st.sampled_from([(), ...])
    index: Any = data.draw(indices)
    selection = Selection(index, tuple(shape), chunks)
    parts = [array[tuple(map(slice, box.start, box.stop))].copy() for box in selection.boxes]
    found, expected = selection.combine(parts, array.dtype), array[index]
    assert type(found) is type(expected)
    assert np.array_equal(found, expected)
    for box in selection.boxes:  # none has a chunk in which nothing is selected
        for axis, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
            wanted = set(np.unravel_index(np.ravel(expected), shape)[axis] // chunks[axis]) if expected.size else set()
            assert set(range(low // chunks[axis], (high - 1) // chunks[axis] + 1)) <= wanted


def test_the_tree_has_handles_in_the_place_of_arrays(saved: Path) -> None:
    with hf.open(saved) as tree:
        assert (tree["names"], tree["step"]) == (["a", "b"], 7)
        handle, table = tree["long"], tree["table"]
        facts = (handle.path, handle.shape, handle.dtype, handle.ndim, handle.size, handle.nbytes, handle.itemsize)
        assert facts == ("long", (64, 128), np.float32, 2, 8192, 32768, 4)
        assert (handle.chunks, handle.nchunks, len(handle), handle.sharding) == ((8, 128), 8, 64, "")
        assert (handle.cdata_shape, handle.read_only) == ((8, 1), True)
        assert repr(handle) == "<ArrayHandle long: float32[64, 128] in 8 chunks>"
        copy = np.full_like(LONG, -1)
        for index, chunk in handle.iter_chunks():
            assert chunk.shape == (8, 128)
            assert (copy[index] == -1).all()
            copy[index] = chunk
        assert np.array_equal(copy, LONG), "chunks cover the array once"
        assert np.array_equal(np.asarray(table), TABLE)
        assert np.asarray(table, np.float64).dtype == np.float64
        assert np.array_equal(np.vstack(list(table)), TABLE)
        assert float(np.sum(table)) == TABLE.sum()
        with pytest.raises(ValueError, match="table cannot become an array without a copy"):
            np.asarray(table, copy=False)
        row = table[1]
    with pytest.raises(hf.errors.StateError, match="ckpt: table cannot be read: the checkpoint is closed"):
        table[1]
    assert np.array_equal(row, TABLE[1])


def test_only_the_chunks_that_an_index_needs_are_read_and_verified(saved: Path, tmp_path: Path) -> None:
    """A read that needs the last chunk finds a flipped bit in it, and no other read does."""
    hf.copy_checkpoint(saved, tmp_path / "copy")
    (data,) = (path for path in (tmp_path / "copy" / "state" / "d").iterdir() if path.name != "index")
    content = bytearray(data.read_bytes())
    place = content.rindex(LONG[-1].tobytes())
    content[place] ^= 1
    data.chmod(0o644)
    data.write_bytes(content)
    with hf.open(tmp_path / "copy") as tree:
        assert np.array_equal(tree["long"][:56, ::3], LONG[:56, ::3])
        with pytest.raises(hf.DamagedCheckpointError, match=r"long: .*chunk 7 has crc32c"):
            tree["long"][-1, 0]


def test_the_bytes_that_are_read_are_those_of_the_chunks(saved: Path) -> None:
    with (opened := hf.open(saved)) as tree:
        for index, chunks in ((3, 1), (np.s_[::32], 2)):  # the latter steps over three chunks of four
            before = opened.bytes_read
            tree["long"][index]
            assert chunks * 4096 <= opened.bytes_read - before < (chunks + 1) * 4096


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0), "long: too many indices: the array has 2 axes, but the index has 3"),
        (64, "long: index 64 is out of bounds for axis 0 with size 64"),
        ((..., ...), "long: an index can have only one ellipsis"),
        ([1, 2], "long: expected integers, slices, ... and None, found list; read a slice around the elements"),
        (True, "long: expected integers, slices, ... and None, found bool"),
        (LONG > 3, "long: expected integers, slices, ... and None, found ndarray"),
        ("w", "long: expected integers, slices, ... and None, found str"),
        ((0, slice(None, None, 0)), "slice step cannot be zero"),
    ],
)
def test_an_index_that_cannot_be_read(saved: Path, index: Any, message: str) -> None:
    with hf.open(saved) as tree, pytest.raises((IndexError, ValueError), match=message.replace(".", r"\.")):
        tree["long"][index]


# ---- handles that go to other processes, as those of dask do


PROGRAM = """
import pickle, sys
handle = pickle.load(sys.stdin.buffer)
print(handle, handle.chunks, handle.__dask_tokenize__()[-1])
try:
    print(handle[3:5, 1].tolist())
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def in_another_process(pickled: bytes) -> list[str]:
    found = subprocess.run([sys.executable, "-c", PROGRAM], input=pickled, capture_output=True, check=True)
    return found.stdout.decode().splitlines()


def test_a_handle_in_another_process(saved: Path) -> None:
    with hf.open(saved) as tree:
        handle = tree["long"]
        token = handle.__dask_tokenize__()
        copy = pickle.loads(pickle.dumps(handle))
        found = in_another_process(pickle.dumps(copy))
    assert found == [f"{handle!r} (8, 128) {token[-1]}", str(LONG[3:5, 1].tolist())]
    assert np.array_equal(copy[5], LONG[5]), "it has its own end"
    with hf.open(saved, select="long") as tree:
        assert tree["long"].__dask_tokenize__() == token


def test_a_step_stays_the_one_that_was_opened_until_its_run_deletes_it(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": LONG})
        manager.wait_until_finished()
        opened = hf.open(tmp_path)
        pickled = pickle.dumps(opened.tree["w"])
        manager.save(2, {"w": LONG + 1})
        manager.wait_until_finished()
        assert in_another_process(pickled)[1] == str(LONG[3:5, 1].tolist())
        manager.delete(1)
        with pytest.raises(hf.CheckpointNotFoundError, match="1: its run has deleted or replaced this checkpoint"):
            opened.tree["w"][0]
        with hf.open(tmp_path) as tree:
            assert np.array_equal(tree["w"][0], LONG[0] + 1)


class Unpicklable(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    def __reduce__(self) -> Any:
        raise TypeError("it holds a connection")


def test_handles_that_cannot_go_to_another_process(saved: Path) -> None:
    with hf.open(saved) as tree:
        handle = tree["table"]
    assert repr(handle) == "<ArrayHandle table: float32[40, 30], closed>"
    with pytest.raises(hf.errors.StateError, match="ckpt: table cannot be pickled: the checkpoint is closed"):
        pickle.dumps(handle)
    place = hf.storage.as_location("/ckpt", filesystem=Unpicklable(skip_instance_cache=True))
    hf.save(place, {"w": TABLE})
    with hf.open(place) as tree, pytest.raises(hf.errors.StateError, match=r"w cannot be pickled.*holds a connection"):
        pickle.dumps(tree["w"])
    hf.save("memory://of-this-process", {"w": TABLE}, overwrite=True)
    with hf.open("memory://of-this-process") as tree:
        pickled = pickle.dumps(tree["w"])
        assert np.array_equal(pickle.loads(pickled)[0], TABLE[0])
    assert "a process cannot access the memory of another one" in in_another_process(pickled)[1]


def test_several_items(tmp_path: Path) -> None:
    checkpointers = {"model": hf.PyTreeCheckpointer(), "data": hf.Checkpointer(hf.JsonCheckpointHandler())}
    with hf.CheckpointManager(tmp_path, checkpointers) as manager:
        manager.save(3, {"model": {"w": TABLE}, "data": {"epoch": 2}})
    with hf.open(tmp_path) as tree:
        assert tree["data"] == {"epoch": 2}
        assert np.array_equal(tree["model"]["w"][2:4], TABLE[2:4])
    with hf.open(tmp_path, item="model", select="w") as tree:
        assert tree["w"].shape == TABLE.shape
    with pytest.raises(hf.CheckpointNotFoundError, match="no item 'modle'; it has data, model"):
        hf.open(tmp_path, item="modle")


def test_selected_leaves_only(saved: Path) -> None:
    with hf.open(saved, select="l*") as tree:
        assert list(tree) == ["long"]
    with pytest.raises(hf.TreeMismatchError, match=r"select='lnog' matches no leaf; .* did you mean 'long'"):
        hf.open(saved, select="lnog")


ELEMENTS = {
    "big endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "bfloat16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "no axes": np.array(2.5),
    "no elements": np.zeros((0, 4)),
    "complex": np.arange(6).reshape(2, 3).astype(np.complex64),
    "text": np.array([["ab", "c"], ["d", "ef"]]),
}


@pytest.mark.parametrize("array", ELEMENTS.values(), ids=ELEMENTS.keys())
def test_elements_of_every_type(array: Any, tmp_path: Path) -> None:
    hf.save(tmp_path / "ckpt", {"x": array})
    with hf.open(tmp_path / "ckpt") as tree:
        for index in (..., (), slice(None, 1) if array.ndim else None):
            found, expected = tree["x"][index], hf.load(tmp_path / "ckpt")["x"][index]
            assert np.asarray(found).dtype == np.asarray(expected).dtype
            assert np.array_equal(found, expected)


def test_jax_and_torch(tmp_path: Path) -> None:
    key = jax.random.key(3)
    weights = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    hf.save(tmp_path / "ckpt", {"key": key, "j": jnp.arange(8.0), "t": weights})
    with hf.open(tmp_path / "ckpt") as tree:
        assert jax.random.key_data(tree["key"].to_jax()).tolist() == jax.random.key_data(key).tolist()
        devices = jax.devices()
        spec: Any = jax.sharding.PartitionSpec
        sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "x"), spec("x"))
        spread = tree["j"].to_jax(sharding)
        assert spread.sharding == sharding
        assert spread.tolist() == list(range(8))
        assert torch.equal(tree["t"].to_torch(), weights)
        assert tree["t"].to_torch().dtype == torch.bfloat16
        assert tree["t"][1].astype(np.float32).tolist() == [3, 4, 5]
        with pytest.raises(hf.errors.OptionError, match=r"sharding='x' must be a jax\.sharding"):
            tree["j"].to_jax("x")


# ---- hf.load with what to read of each array


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(60).reshape(5, 12)[1:4].t(), id="transposed"),
        pytest.param(torch.arange(60).reshape(5, 3, 4)[1:4].permute(2, 0, 1), id="permuted"),
        pytest.param(torch.arange(60).reshape(5, 12)[1:4, ::3], id="every third column"),
        pytest.param(torch.as_strided(torch.arange(8), (2, 2), (3, 0)), id="expanded"),
        pytest.param(torch.as_strided(torch.arange(9), (3, 3), (1, 3), 0), id="whole storage"),
    ],
)
@pytest.mark.parametrize("index", [np.s_[...], np.s_[1:], np.s_[..., 1:], np.s_[::-1, 0], np.s_[-1]])
def test_tensors_that_are_views(tensor: torch.Tensor, index: Any, tmp_path: Path) -> None:
    torch.save({"t": tensor}, tmp_path / "state.pt")
    with hf.open(tmp_path / "state.pt") as tree:
        assert np.array_equal(tree["t"][index], tensor.numpy()[index])


def test_load_what_an_index_selects(saved: Path) -> None:
    found = hf.load(saved, select={"long": np.s_[8:10, ..., ::2], "step": ..., "tab*": np.s_[-1]})
    assert found["step"] == 7
    assert np.array_equal(found["long"], LONG[8:10, ::2])
    assert np.array_equal(found["table"], TABLE[-1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"select": {"lnog": ...}}, hf.TreeMismatchError, "select='lnog' matches no leaf"),
        ({"select": {"step": 0}}, hf.errors.OptionError, "step, which select='step' matches, .* not an array .* index"),
        ({"select": {"long": [1, 2]}}, IndexError, "ckpt/state: long: expected integers, slices, .* found list"),
        ({"select": {"long": 99}}, IndexError, "ckpt/state: long: index 99 is out of bounds for axis 0 with size 64"),
        (
            {"select": {"long": ...}, "like": {"long": LONG}},
            hf.errors.OptionError,
            "select= with indexes returns numpy arrays, so like= cannot",
        ),
    ],
)
def test_what_cannot_be_selected(saved: Path, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf.load(saved, **arguments)
