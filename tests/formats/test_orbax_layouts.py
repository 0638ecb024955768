"""Trees that orbax-checkpoint writes, in every layout that it knows, read with holdfast."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax.training.train_state import TrainState
from tests.equality import assert_same
from tests.formats import orbax_files
from tests.formats.orbax_files import DIRECTORIES, copied, edit, many_kinds, ocp, save

import holdfast as hf
from holdfast.engine.pytree import Box, whole
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.orbax import arrays as orbax_arrays
from holdfast.integrations.formats.orbax.tree import OrbaxTree

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
optax: Any = pytest.importorskip("optax")
metadata_options: Any = pytest.importorskip("orbax.checkpoint._src.metadata.pytree_metadata_options")

Moments = collections.namedtuple("Moments", "mu nu")  # noqa: PYI024 - what optax uses
Nothing = collections.namedtuple("Nothing", "")  # noqa: PYI024


def mesh(*shape: int) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def sharded(array: Any, *spec: Any) -> Any:
    return jax.device_put(array, jax.sharding.NamedSharding(mesh(2, 2), jax.sharding.PartitionSpec(*spec)))


def full_tree() -> dict[str, Any]:
    tree = many_kinds()
    matrix = sharded(np.random.default_rng(0).standard_normal((64, 32), np.float32), "x", "y")
    return {
        **tree,
        "params": {"w": matrix, "half": sharded(tree["params"]["half"], "x"), "scalar": jnp.float32(2.5)},
        "zeros": jnp.zeros((3, 2)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "optimizer": (Moments(jnp.zeros(2), jnp.ones(2)), Nothing(), [1, 2]),
        "a/b": "slash",
        "texts": ["text", {"none": None}],
        "empty_list": [],
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    **orbax_files.LAYOUTS,
    "uncompressed": {"use_compression": False},
    "uncompressed zarr3": {"use_compression": False, "use_zarr3": True},
    "rich types": {"pytree_metadata_options": metadata_options.PyTreeMetadataOptions(support_rich_types=True)},
}

LAYOUT_NAMES = [
    pytest.param(name, marks=pytest.mark.needs("orbax-checkpoint", "0.11.28")) if "use_compression" in given else name
    for name, given in LAYOUTS.items()
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("layouts")

    def path(layout: str) -> Path:
        place: Path = root / layout.replace(" ", "_")
        return place if place.exists() else save(place, full_tree(), **LAYOUTS[layout])

    return path


def on_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_tree_in_every_layout(saved: Callable[[str], Path], layout: str) -> None:
    tree = full_tree()
    found = hf.load(saved(layout))
    nothing: Any = {} if layout == "rich types" else None
    without_classes = {**tree, "optimizer": [tree["optimizer"][0]._asdict(), nothing, [1, 2]]}
    assert_same(jax.tree.map(on_host, found), jax.tree.map(on_host, without_classes))  # in the same order
    assert found["params"]["w"].flags.writeable
    report = hf.verify(saved(layout))
    assert report.ok
    assert report.checkpoints[0].bytes > 8192

    sharding = jax.sharding.NamedSharding(mesh(1, 4), jax.sharding.PartitionSpec("y", "x"))
    abstract = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    found = hf.load(saved(layout), like={**tree, "params": {**tree["params"], "w": abstract}})
    assert_same(found, tree)
    assert found["params"]["w"].sharding.mesh.shape == {"x": 1, "y": 4}


def test_leaves_are_described_without_their_data(saved: Callable[[str], Path]) -> None:
    leaves = {leaf.path: leaf for leaf in hf.describe(saved("ocdbt zarr2"))}
    weights = leaves["params/w"]
    assert (weights.kind, weights.dtype, weights.shape, weights.bytes) == ("jax", "float32", (64, 32), 8192)
    assert weights.sharding == '["x", "y"] over (x=2, y=2)'
    assert leaves["text"].value == "'hello'"
    assert (leaves["keys"].kind, leaves["keys"].shape) == ("key", (3, 4))
    assert leaves["optimizer/0/mu"].shape == (2,)


def test_a_part_reads_only_its_arrays(saved: Callable[[str], Path], tmp_path: Path) -> None:
    copy = copied(saved("directories zarr2"), tmp_path)
    for chunk in (copy / "params.w").glob("[0-9]*"):
        chunk.unlink()
    assert hf.load(copy, select="params/half")["params"]["half"].tolist() == list(range(8))
    with pytest.raises(hf.DamagedCheckpointError, match=r"params/w: .*chunk"):
        hf.load(copy, select="params/w")


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(["tree_metadata", "use_zarr3"], id="nothing but the tree and the version"),
        pytest.param(
            ["tree_metadata", "use_ocdbt", "use_zarr3", "custom_metadata"],
            id="no word on fill values",
            marks=pytest.mark.needs("orbax-checkpoint", "0.11.32"),
        ),
    ],
)
def test_metadata_may_lack_keys(saved: Callable[[str], Path], tmp_path: Path, kept: list[str]) -> None:
    def strip(document: Any) -> None:
        for entry in document["tree_metadata"].values():
            entry["value_metadata"].pop("write_shape", None)
            entry["value_metadata"].pop("skip_deserialize")
            del entry["key_metadata"]
        for key in document.keys() - set(kept):
            del document[key]

    copy = copied(saved("ocdbt zarr3"), tmp_path)
    edit(copy, strip)
    (copy / "_CHECKPOINT_METADATA").write_text("{}")
    (copy / "_sharding").unlink()
    found = hf.load(copy)
    np.testing.assert_array_equal(found["params"]["w"], full_tree()["params"]["w"])
    assert found["texts"]["0"] == "text"  # what was a list is not known any more


def test_chunks_of_zeros_that_were_not_stored(tmp_path: Path) -> None:
    """Early versions of Orbax did not store chunks that hold nothing but zeros, and said so nowhere."""
    path = save(tmp_path / "checkpoint", {"w": jnp.zeros((4, 2))}, **DIRECTORIES)
    (path / "w" / "0.0").unlink()
    with pytest.raises(hf.DamagedCheckpointError, match=r"w: .*missing"):
        hf.load(path)
    edit(path, lambda document: document.pop("store_array_data_equal_to_fill_value"))
    assert hf.load(path)["w"].tolist() == [[0, 0]] * 4


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"a.b": [jnp.ones(1)], "a": {"b": [jnp.full(1, 2.0)]}}, ("a.b/0", "a/b/0")),
        ({"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, ("a.b", "a/b")),
    ],
    ids=["in lists", "plain"],
)
def test_two_leaves_with_one_name(tmp_path: Path, tree: Any, names: tuple[str, str]) -> None:
    path = save(tmp_path / "checkpoint", {**tree, "other": jnp.zeros(2)})
    with pytest.raises(hf.DamagedCheckpointError, match="have the same name") as raised:
        hf.load(path)
    assert all(name in str(raised.value) for name in names)
    assert {problem.leaf for problem in hf.verify(path).checkpoints[0].problems} == set(names)
    assert hf.load(path, select="other")["other"].tolist() == [0, 0]


@pytest.mark.needs("orbax-checkpoint", "0.12.8")
def test_one_bare_array(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", jnp.arange(3))
    np.testing.assert_array_equal(hf.load(path), np.arange(3))


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_integer_and_empty_keys(tmp_path: Path, use_ocdbt: bool) -> None:
    tree = {0: np.ones(2), 1: {2: np.zeros(1)}, 2: {"": np.zeros(3), "b": np.arange(1)}}
    path = save(tmp_path / "checkpoint", tree, use_ocdbt=use_ocdbt)
    assert sorted(hf.load(path)) == ["0", "1", "2"]
    assert_same(hf.load(path, like=tree), tree)
    empty = {"": np.ones(2), "b": np.arange(1)}
    assert_same(hf.load(save(tmp_path / "empty", empty, use_ocdbt=use_ocdbt), like=empty), empty)


DTYPES = (
    ["bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    + ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e3m4", "float8_e4m3fn"]
    + ["float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"]
)  # all that Orbax saves


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["zarr2", "zarr3"])
def test_every_dtype(tmp_path: Path, use_zarr3: bool) -> None:
    tree = {name: np.array([0, 1, 1, 0, 1]).astype(getattr(ml_dtypes, name, name)) for name in DTYPES}
    assert_same(hf.load(save(tmp_path / "one", tree, use_zarr3=use_zarr3), like=tree), tree)


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["zarr2", "zarr3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "ocdbt"])
def test_arrays_in_many_chunks_and_files(
    tmp_path: Path, use_zarr3: bool, use_ocdbt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_arrays, "_UNDER_WAY", 1)  # one array is read after the other
    array = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    arguments: dict[str, Any] = {"ocdbt_target_data_file_size": 4096} if use_ocdbt else {}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3, use_ocdbt=use_ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        save_args = {name: ocp.SaveArgs(chunk_byte_size=2048) for name in "wv"}
        checkpointer.save(
            tmp_path / "one", args=ocp.args.PyTreeSave({"w": array, "v": array + 1}, save_args=save_args, **arguments)
        )
    assert_same(hf.load(tmp_path / "one"), {"v": array + 1, "w": array})
    assert hf.verify(tmp_path / "one").ok


# ---- parts of arrays


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """An array in four files, for the rows 0 to 4, 4 to 8 and so on."""
    placed = sharded(np.arange(48.0, dtype=np.float32).reshape(16, 3), ("x", "y"))
    return save(tmp_path / "rows", {"rows": placed, "n": np.float32(3)}, **DIRECTORIES)


def test_only_the_files_that_are_needed_are_read(rows: Path) -> None:
    (rows / "rows" / "1.0").unlink()
    tree = OrbaxTree(as_location(rows))
    (leaf,) = (leaf for leaf in tree.leaves if leaf.name == "rows")
    wanted = [
        [Box((1, 0), (3, 2)), Box((12, 1), (16, 3)), Box((2, 2), (2, 3))],  # far apart, and nothing
        [Box((8, 0), (10, 3)), Box((10, 0), (12, 3)), Box((8, 0), (10, 3))],  # side by side, and twice the same
        [],
    ]
    for boxes in wanted:
        (parts,) = tree.read_boxes([leaf], [boxes])
        expected = [np.arange(48, dtype=np.float32).reshape(16, 3)[box.within(whole((16, 3)))] for box in boxes]
        assert_same([np.ascontiguousarray(part) for part in parts], expected)
    with pytest.raises(hf.DamagedCheckpointError, match=r"rows: .*1\.0"):
        tree.read_boxes([leaf], [[Box((4, 0), (5, 1))]])


def test_boxes_that_fill_half_of_what_is_around_them_are_read_at_once() -> None:
    near, far = Box((2, 0), (4, 4)), Box((9, 9), (10, 10))
    assert orbax_arrays.gather([Box((0, 0), (2, 4)), near, near]) == [Box((0, 0), (4, 4))]
    assert orbax_arrays.gather([near, far]) == [near, far]


# ---- the state of a training


class KeyedState(TrainState):  # type: ignore[no-untyped-call]  # flax says nothing of its hook's types
    key: Any
    averages: Any = None


def on_mesh(state: Any, *shape: int) -> Any:
    """Spreads a state over the four devices, along the last axis of every array that can be cut."""

    def place(leaf: Any) -> Any:
        ends = leaf.shape[-1:] if leaf.ndim and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else ()
        cut = [None] * (leaf.ndim - 1) + ["y"] if ends and ends[0] % shape[1] == 0 else []
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh(*shape), jax.sharding.PartitionSpec(*cut)))

    return jax.tree.map(place, state)


def trained() -> Any:
    """A state after two updates: parameters of two dtypes, nested and empty optimizer states, a key, a None."""
    create: Any = KeyedState.create
    params = {
        "half": {"kernel": jax.random.normal(jax.random.key(0), (12, 16)).astype(jnp.bfloat16)},
        "whole": {"kernel": jax.random.normal(jax.random.key(1), (16, 8)), "bias": jnp.zeros(8)},
    }
    rates = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    optimizer = optax.MultiSteps(optax.adamw(rates), 2).gradient_transformation()
    state = create(apply_fn=print, params=params, tx=optimizer, key=jax.random.key(7))
    for _ in range(2):
        state = state.apply_gradients(grads=jax.tree.map(jnp.sin, state.params))
    return jax.tree.map(jnp.asarray, state)


@pytest.mark.parametrize("kind", [ocp.args.StandardSave, ocp.args.PyTreeSave], ids=["StandardSave", "PyTreeSave"])
def test_a_managed_train_state_comes_back_bit_for_bit_and_trains_on(tmp_path: Path, kind: Any) -> None:
    state = on_mesh(trained(), 2, 2)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, args=kind(state))
    like = on_mesh(jax.tree.map(jnp.zeros_like, state), 1, 4)
    found = hf.load(tmp_path / "run", like=like)
    assert_same(found, state)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert one.sharding == other.sharding

    def next_update(current: Any) -> Any:
        return current.apply_gradients(grads=jax.tree.map(jnp.ones_like, current.params))

    here = hf.load(tmp_path / "run", like=state)
    assert_same(jax.jit(next_update)(here), jax.jit(next_update)(state), "the next update")
    only = hf.load(tmp_path / "run", like={"params": state.params}, select="params/**")
    assert_same(only, {"params": state.params})
