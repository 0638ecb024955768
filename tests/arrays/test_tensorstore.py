"""TensorStore alone reads what holdfast saves, and holdfast reads what TensorStore alone writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from tests.damage import flipped
from tests.dtypes import ZARR_BUILT_IN, ZARR_EXTENDED
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.arrays import TreeReader
from holdfast.engine.storage import as_location

jax: Any = pytest.importorskip("jax")


SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=20_000)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A directory, which TensorStore can read."""
    return str(tmp_path / "place")


def spec_of(place: str, name: str = "") -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{place}/", "path": f"{name}/" if name else ""}


def read(place: str, name: str) -> Any:
    """Read an array with TensorStore, which must not fill in missing chunks."""
    spec = {"driver": "zarr3", "kvstore": spec_of(place, name), "fill_missing_data_reads": False}
    return ts.open(spec, open=True).result().read().result()


# ---- what is saved here


def test_every_array_of_a_saved_tree_by_the_path_that_the_design_gives(place: str) -> None:
    values = np.arange(60_000, dtype=np.float32)
    matrix = values.reshape(200, 300)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    specs = {"rows": ("x", None), "columns": (None, ("x", "y")), "both": ("y", "x"), "none": ()}
    shardings = {
        name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for name, spec in specs.items()
    }
    tree = {
        "params": {"Dense_0": {"kernel": matrix, "bias": values[:7]}, "scale": np.float32(2)},
        "opt": [{"mu": values[:59_999]}, (np.zeros((0, 4)), np.asarray(3))],
        "a.b": {"c/d %": values[::2].reshape(3, -1)},
        "fortran": np.asfortranarray(matrix),
        "big_endian": values[:999].astype(">f4"),
        "step": 7,
        "": 1 - 2j,
        "devices": {name: jax.device_put(matrix, sharding) for name, sharding in shardings.items()},
    }
    hf.save(place, tree, layout=SMALL)
    for name, expected in {
        "params.Dense_0.kernel": matrix,
        "params.Dense_0.bias": values[:7],
        "params.scale": np.asarray(2, np.float32),
        "opt.0.mu": values[:59_999],
        "opt.1.0": np.zeros((0, 4)),
        "opt.1.1": np.asarray(3),
        "a%2Eb.c%2Fd %25": values[::2].reshape(3, -1),
        "fortran": matrix,
        "big_endian": values[:999],
        "step": np.asarray(7),
        "%": np.asarray(1 - 2j),
        **{f"devices.{name}": matrix for name in specs},
    }.items():
        assert_same(np.asarray(read(f"{place}/state", name)), expected)
    hf.save(f"{place}/bare", values, layout=SMALL)
    assert_same(np.asarray(read(f"{place}/bare/state", "")), values)


@pytest.mark.parametrize("name", [*ZARR_BUILT_IN, *ZARR_EXTENDED])
def test_every_standard_dtype_both_ways(name: str, place: str) -> None:
    values = (np.arange(9000) % 2).astype(np.dtype(getattr(ml_dtypes, name, name)))
    tree = {"flat": values, "cube": values.reshape(9, 10, 100), "scalar": values[1], "empty": values[:0]}
    hf.save(f"{place}/ours", tree, layout=SMALL)
    for key, array in tree.items():
        assert_same(np.asarray(read(f"{place}/ours/state", key)), np.asarray(array))
    part = values[:600].reshape(20, 30)
    theirs = {"a/b": part, "big": part, "empty": values[:0].reshape(0, 3), "one": values[1:2].reshape(())}
    stored_as = {"a/b": ((7, 8), "little_checked"), "big": ((20, 30), "big")}
    for key, array in theirs.items():
        write(f"{place}/theirs", key, array, *stored_as.get(key, ()))
    assert_same(hf.load(f"{place}/theirs"), theirs)


def test_tensorstore_finds_a_flipped_bit(place: str, stored: Callable[[str], Any]) -> None:
    hf.save(place, {"w": np.arange(3000.0)}, layout=SMALL)
    files = stored(place)
    files.write("state/d/0", flipped(files.read()["state/d/0"], 9))
    with pytest.raises(ValueError, match="mismatch"):
        read(f"{place}/state", "w")


# ---- what TensorStore writes

CRC32C = {"name": "crc32c"}
CODECS: dict[str, list[dict[str, Any]]] = {
    "little": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "big": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "little_checked": [{"name": "bytes", "configuration": {"endian": "little"}}, CRC32C],
    "gzip": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip"}],
    "big_checked": [{"name": "bytes", "configuration": {"endian": "big"}}, CRC32C],
}
CHUNKS: list[tuple[int, ...]] = [(60, 50), (7, 11), (60, 1), (13, 50), (100, 64)]
DATABASES: dict[str, dict[str, Any]] = {
    "default": {},
    "nothing_inline": {"max_inline_value_bytes": 0},
    "all_inline": {"max_inline_value_bytes": 1 << 20},
    "small_nodes": {"max_decoded_node_bytes": 300, "compression": None},
    "small_compressed_nodes": {"max_decoded_node_bytes": 500, "compression": {"id": "zstd", "level": 5}},
}


def write(
    place: str, name: str, array: Any, chunks: Any = None, codecs: str = "little", config: Any = None, **options: Any
) -> None:
    """Write one array with TensorStore alone."""
    metadata: dict[str, Any] = {"codecs": CODECS[codecs]}
    if chunks is not None:
        metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}
    spec = {"driver": "zarr3", "kvstore": {**spec_of(place, name), "config": config or {}}, "metadata": metadata}
    store = ts.open(spec, create=True, dtype=ts.dtype(array.dtype), shape=array.shape, **options).result()
    store.write(array).result()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", DATABASES)
@pytest.mark.parametrize("codecs", CODECS)
def test_chunks_and_codecs(codecs: str, config: str, place: str) -> None:
    values = np.random.default_rng(0).random((60, 50)).astype(np.float32)
    for index, chunks in enumerate(CHUNKS):
        write(place, f"array.{index}", values, chunks, codecs, DATABASES[config])
    found = hf.load(place)
    assert list(found) == [f"array.{index}" for index in range(len(CHUNKS))]
    for array in found.values():
        assert array.flags.writeable
        assert_same(array, values)
    assert hf.verify(place).ok


FILLS: dict[str, tuple[str, Any]] = {
    "zeros": ("float32", 0),
    "ones": ("float32", 1),
    "nan": ("float64", float("nan")),
    "infinity": ("bfloat16", float("-inf")),
    "fraction": ("float16", 0.1),
    "large": ("uint64", (1 << 64) - 1),
    "negative": ("int4", -8),
    "true": ("bool", True),
    "complex": ("complex64", 1.5 - 2j),
}


@pytest.mark.parametrize("codecs", ["little", "big_checked"])
@pytest.mark.parametrize("name", FILLS)
def test_chunks_that_are_not_stored_hold_the_fill_value(name: str, codecs: str, place: str) -> None:
    dtype, value = FILLS[name]
    none = np.full((20, 20), value).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    some = none.copy()
    some[:5, :5] = 0 if name != "zeros" else 1
    write(place, "some", some, (5, 5), codecs, fill_value=none[0, 0])
    write(place, "none", none, (5, 6), codecs, fill_value=none[0, 0])
    write(place, "one_chunk", none, (20, 20), codecs, fill_value=none[0, 0])
    for key, array in hf.load(place).items():
        expected = some if key == "some" else none
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_the_newest_of_several_versions(place: str) -> None:
    values = np.arange(3000.0).reshape(60, 50)
    for version in range(3):
        write(place, f"a{version}", values, (20, 20))
    store = ts.open({"driver": "zarr3", "kvstore": spec_of(place, "a0")}, open=True).result()
    store[10:30].write(-1.0).result()
    values_now = values.copy()
    values_now[10:30] = -1
    assert_same(hf.load(place), {"a0": values_now, "a1": values, "a2": values})


def test_a_folder_of_arrays_is_a_checkpoint_of_another_library(place: str) -> None:
    write(place, "a", np.arange(10.0))
    write(place, "b", np.ones(3))
    assert_same(hf.load(place, select="b"), {"b": np.ones(3)})
    assert_same(hf.load(place, like={"a": np.zeros(10), "b": np.zeros(3)}), {"a": np.arange(10.0), "b": np.ones(3)})
    assert [leaf.path for leaf in hf.describe(place)] == ["a", "b"]
    (done,) = hf.import_checkpoint(place, f"{place}_imported")
    assert (done.format, done.leaves) == ("TensorStore", 2)
    assert_same(hf.load(f"{place}_imported"), {"a": np.arange(10.0), "b": np.ones(3)})


def test_a_chunk_that_is_missing_from_a_checkpoint_is_damage(place: str) -> None:
    hf.save(place, {"w": np.zeros(3000)}, layout=SMALL)
    database = ts.KvStore.open(spec_of(f"{place}/state")).result()
    database.write(b"w/c/2", None).result()
    with pytest.raises(hf.DamagedCheckpointError):
        hf.load(place)
    problems = TreeReader(as_location(place) / "state", {}).verify()
    assert [problem.what for problem in problems] == ["chunk 2 is not in the index"]
