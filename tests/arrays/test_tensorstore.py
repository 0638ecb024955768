"""TensorStore alone reads what holdfast saves, and holdfast reads what TensorStore alone writes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.dtypes import ZARR_BUILT_IN, ZARR_EXTENDED

import holdfast as hf
from holdfast.engine.arrays import TreeReader
from holdfast.engine.storage import as_location

Same = Callable[[Any, Any], None]

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=20_000)
STANDARD = [*ZARR_BUILT_IN, *ZARR_EXTENDED]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "place")


def spec_of(place: str, name: str = "") -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{place}/", "path": f"{name}/" if name else ""}


def read(place: str, name: str) -> Any:
    """Read an array with TensorStore, which must not fill in missing chunks."""
    spec = {"driver": "zarr3", "kvstore": spec_of(place, name), "fill_missing_data_reads": False}
    return ts.open(spec, open=True).result().read().result()


# ---- what is saved here


def test_every_array_of_a_saved_tree_by_the_path_that_the_design_gives(tmp_path: Path, assert_same: Same) -> None:
    values = np.arange(60_000, dtype=np.float32)
    tree = {
        "params": {"Dense_0": {"kernel": values.reshape(200, 300), "bias": values[:7]}, "scale": np.float32(2)},
        "opt": [{"mu": values[:59_999]}, (np.zeros((0, 4)), np.asarray(3))],
        "a.b": {"c/d %": values[::2].reshape(3, -1)},
        "fortran": np.asfortranarray(values.reshape(300, 200)),
        "big_endian": values[:999].astype(">f4"),
        "step": 7,
        "lr": 1e-3,
        "flag": True,
        "z": 1 - 2j,
    }
    hf.save(tmp_path / "ckpt", tree, layout=SMALL)
    state = str(tmp_path / "ckpt" / "state")
    for name, expected in {
        "params.Dense_0.kernel": tree["params"]["Dense_0"]["kernel"],  # type: ignore[index]  # the literal above
        "params.Dense_0.bias": values[:7],
        "params.scale": np.asarray(2, np.float32),
        "opt.0.mu": values[:59_999],
        "opt.1.0": np.zeros((0, 4)),
        "opt.1.1": np.asarray(3),
        "a%2Eb.c%2Fd %25": values[::2].reshape(3, -1),
        "fortran": values.reshape(300, 200),
        "big_endian": values[:999],
        "step": np.asarray(7),
        "lr": np.asarray(1e-3),
        "flag": np.asarray(True),
        "z": np.asarray(1 - 2j),
    }.items():
        assert_same(np.asarray(read(state, name)), expected)


@pytest.mark.parametrize("name", STANDARD)
def test_every_standard_dtype(name: str, place: str, assert_same: Same) -> None:
    dtype = dtype_of(name)
    values = (np.arange(9000) % 2).astype(dtype)
    tree = {"flat": values, "cube": values.reshape(9, 10, 100), "scalar": values[1], "empty": values[:0]}
    hf.save(place, tree, layout=SMALL)
    for key, array in tree.items():
        assert_same(np.asarray(read(f"{place}/state", key)), np.asarray(array))


def test_arrays_on_several_devices(place: str, assert_same: Same) -> None:
    jax: Any = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    values = np.arange(60_000, dtype=np.float32).reshape(60, 1000)
    specs = {"rows": ("x", None), "columns": (None, ("x", "y")), "both": ("y", "x"), "none": ()}
    tree = {
        name: jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for name, spec in specs.items()
    }
    hf.save(place, tree, layout=SMALL)
    for name in specs:
        assert_same(np.asarray(read(f"{place}/state", name)), values)


def test_the_data_of_a_bare_array_lies_at_the_root(place: str, assert_same: Same) -> None:
    hf.save(place, np.arange(5000.0), layout=SMALL)
    assert_same(np.asarray(read(f"{place}/state", "")), np.arange(5000.0))


def test_a_part_of_a_checkpoint_is_no_checkpoint(place: str) -> None:
    """Its arrays alone would lack the text."""
    hf.save(place, {"a": [np.arange(3), "text"], "b.c": np.ones((2, 2))})
    with pytest.raises(hf.CheckpointNotFoundError, match=r"part of the checkpoint .*; load that with item='state'"):
        hf.load(f"{place}/state")


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        hnp.arrays(
            hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)),
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=30),
            elements={"allow_nan": False},
            fill=st.nothing() | st.just(1),
        ),
        max_size=4,
    )
)
def test_any_arrays(arrays: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        hf.save(f"{place}/ckpt", arrays, layout=SMALL)
        for expected, leaf in zip(arrays.values(), hf.describe(f"{place}/ckpt"), strict=True):
            found = np.asarray(read(f"{place}/ckpt/state", leaf.path.replace(".", "%2E")))
            assert found.dtype == expected.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found, expected)


def test_tensorstore_finds_a_flipped_bit(place: str, stored: Callable[[str], Any]) -> None:
    hf.save(place, {"w": np.arange(3000.0)}, layout=SMALL)
    files = stored(place)
    content = files.read()["state/d/0"]
    files.write("state/d/0", content[:9] + bytes([content[9] ^ 1]) + content[10:])
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
def test_chunks_and_codecs(codecs: str, config: str, place: str, assert_same: Same) -> None:
    values = np.random.default_rng(0).random((60, 50)).astype(np.float32)
    for index, chunks in enumerate(CHUNKS):
        write(place, f"array.{index}", values, chunks, codecs, DATABASES[config])
    found = hf.load(place)
    assert list(found) == [f"array.{index}" for index in range(len(CHUNKS))]
    for array in found.values():
        assert array.flags.writeable
        assert_same(array, values)
    assert hf.verify(place).ok


def test_a_local_folder(tmp_path: Path, assert_same: Same) -> None:
    values = np.arange(100_000, dtype=np.int64).reshape(100, 1000)
    write(str(tmp_path), "w", values, (10, 300), "little_checked")
    write(str(tmp_path), "scalar", np.asarray(2.5))
    write(str(tmp_path), "empty", np.zeros((0, 3)))
    assert_same(hf.load(tmp_path), {"empty": np.zeros((0, 3)), "scalar": np.asarray(2.5), "w": values})


@pytest.mark.parametrize("name", STANDARD)
def test_every_dtype_that_tensorstore_writes(name: str, place: str, assert_same: Same) -> None:
    values = (np.arange(600) % 2).astype(dtype_of(name)).reshape(20, 30)
    scalar = values[0, 1:2].reshape(())
    write(place, "a/b", values, (7, 8), "little_checked")
    write(place, "big", values, (20, 30), "big")
    write(place, "one", scalar)
    assert_same(hf.load(place), {"a/b": values, "big": values, "one": scalar})


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
def test_chunks_that_are_not_stored_hold_the_fill_value(name: str, codecs: str, place: str, assert_same: Same) -> None:
    dtype, value = FILLS[name]
    fill = np.asarray(value).astype(dtype_of(dtype))
    some = np.full((20, 20), fill)
    some[:5, :5] = 0 if name != "zeros" else 1
    write(place, "some", some, (5, 5), codecs, fill_value=fill)
    write(place, "none", np.full((20, 20), fill), (5, 6), codecs, fill_value=fill)
    write(place, "one_chunk", np.full((20, 20), fill), (20, 20), codecs, fill_value=fill)
    found = hf.load(place)
    for key, array in found.items():
        assert array.dtype == some.dtype
        np.testing.assert_array_equal(array, some if key == "some" else np.full((20, 20), fill))


def test_the_newest_of_several_versions(place: str, assert_same: Same) -> None:
    values = np.arange(3000.0).reshape(60, 50)
    for version in range(3):
        write(place, f"a{version}", values, (20, 20))
    store = ts.open({"driver": "zarr3", "kvstore": spec_of(place, "a0")}, open=True).result()
    store[10:30].write(-1.0).result()
    values_now = values.copy()
    values_now[10:30] = -1
    assert_same(hf.load(place), {"a0": values_now, "a1": values, "a2": values})


def test_a_folder_of_arrays_is_a_checkpoint_of_another_library(place: str, assert_same: Same) -> None:
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
