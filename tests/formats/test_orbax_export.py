"""Checkpoints that holdfast exports, restored by orbax-checkpoint; and our own, restored by it where they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
from tests.equality import assert_same
from tests.formats.orbax_files import DIRECTORIES, many_kinds, ocp, restored, save

import holdfast as hf
from holdfast.integrations.formats.orbax.export import add_orbax_metadata

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
optax: Any = pytest.importorskip("optax")
v1: Any = pytest.importorskip("orbax.checkpoint.experimental.v1")
TrainState: Any = pytest.importorskip("flax.training.train_state").TrainState

Export = Callable[[Path, Path], Path]


export_orbax = partial(hf.export_checkpoint, to="orbax")


def copied(source: Path, destination: Path) -> Path:
    """Exports a copy; the directory that Orbax restores."""
    (one,) = export_orbax(source, destination)
    return Path(one.path)


def in_place(source: Path, _: Path) -> Path:
    """Exports in place; the directory that Orbax restores."""
    (place,) = add_orbax_metadata(source)
    return place.path / "state"


both = pytest.mark.parametrize("export", [copied, in_place])


def tree() -> dict[str, Any]:
    dtypes = ["int2", "int8", "uint64", "float16", "complex64", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"]
    return {
        "dtypes": {name: np.array([0, 1, 1]).astype(getattr(ml_dtypes, name, name)) for name in dtypes},
        **many_kinds(),
        "empty": jnp.zeros((0, 3)),
        "big_endian": np.arange(3, dtype=">i4"),
        "complex": np.array([1 + 2j]),
        "long_text": "x" * 70_000,
    }


def on_host(leaf: Any) -> Any:
    array = leaf if isinstance(leaf, str | bool | int | float) else np.asarray(leaf)
    return array.astype(array.dtype.newbyteorder("=")) if isinstance(array, np.ndarray) else array


@both
def test_orbax_restores_what_we_saved(tmp_path: Path, export: Export) -> None:
    hf.save(tmp_path / "ours", {**tree(), "list": [np.ones(1), (np.zeros(2), [])]})
    found = restored(export(tmp_path / "ours", tmp_path / "theirs"))
    assert_same(jax.tree.map(on_host, found), jax.tree.map(on_host, tree()))
    assert hf.verify(tmp_path / "ours").ok
    assert hf.load(tmp_path / "ours", select="numpy")["numpy"].dtype == np.uint16


@both
@pytest.mark.needs("orbax-checkpoint", "0.12")
def test_the_other_ways_to_restore(tmp_path: Path, export: Export) -> None:
    small = {"w": jnp.arange(8.0), "step": 3}
    hf.save(tmp_path / "ours", small)
    place = export(tmp_path / "ours", tmp_path / "theirs")
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert checkpointer.restore(place)["w"].tolist() == list(range(8))
        described = checkpointer.metadata(place).item_metadata
        assert (described["w"].shape, described["w"].dtype) == ((8,), np.float32)
    whole = place.parent if export is in_place else place
    assert v1.load(whole)["step"] == 3
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    found = v1.load(whole, {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding), "step": 0})
    assert found["w"].sharding == sharding
    assert found["w"].tolist() == list(range(8))


@both
def test_a_train_state_with_its_keys(tmp_path: Path, export: Export) -> None:
    params = {"kernel": jax.random.normal(jax.random.key(0), (8, 4)), "bias": jnp.zeros(4)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(0.1))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params)).replace(step=jnp.int32(1))
    saved = {"state": state, "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    hf.save(tmp_path / "ours", saved)
    found = restored(export(tmp_path / "ours", tmp_path / "theirs"), jax.tree.map(jnp.zeros_like, saved))
    assert_same(*(jax.tree.map(lambda leaf: leaf, one) for one in (found, saved)))  # in the same order


def test_a_run_becomes_that_of_a_manager(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path / "ours", metadata={"name": "a run"}) as manager:
        for step in (3, 10):
            manager.save(step, {"w": jnp.full(4, float(step)), "n": step}, metrics={"loss": step / 2})
    exported = export_orbax(tmp_path / "ours", tmp_path / "theirs")
    assert [(one.step, one.path) for one in exported] == [(n, str(tmp_path / "theirs" / str(n))) for n in (3, 10)]
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "theirs", options=options) as manager:
        assert manager.all_steps() == [3, 10]
        assert manager.best_step() == 3
        assert manager.metrics(10) == {"loss": 5.0}
        assert manager.metadata().custom_metadata == {"name": "a run"}
        like = {"w": jnp.zeros(4), "n": 0}
        assert manager.restore(10, args=ocp.args.StandardRestore(like))["w"].tolist() == [10] * 4
        assert manager.restore(3)["n"] == 3
        manager.save(11, args=ocp.args.StandardSave(like), metrics={"loss": 1.0})  # and it continues from there
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 10, 11]
    assert hf.load(tmp_path / "theirs")["w"].tolist() == [0] * 4
    times = [hf.list_checkpoints(tmp_path / name)[0].time for name in ("ours", "theirs")]
    assert times[0] == pytest.approx(times[1])

    export_orbax(tmp_path / "ours", tmp_path / "one", step=3)
    assert [one.step for one in hf.list_checkpoints(tmp_path / "one")] == [3]
    with pytest.raises(hf.CheckpointExistsError, match="3 exists already"):
        export_orbax(tmp_path / "ours", tmp_path / "one")
    assert not (tmp_path / "one" / "10").exists()
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 4"):
        export_orbax(tmp_path / "ours", tmp_path / "one", step=4)


def test_several_items(tmp_path: Path) -> None:
    """Also one that each process has of its own, which is not made readable in place."""
    handlers = {
        "model": hf.PyTreeCheckpointHandler(),
        "facts": hf.JsonCheckpointHandler(),
        "loader": hf.handlers.PerProcessCheckpointHandler(),
    }
    checkpointers = {name: hf.Checkpointer(handler) for name, handler in handlers.items()}
    with hf.CheckpointManager(tmp_path / "ours", checkpointers) as manager:
        manager.save(1, {"model": {"w": np.ones(3)}, "facts": {"a": [1, "b"]}, "loader": {"place": 5}})
    export_orbax(tmp_path / "ours", tmp_path / "theirs")
    export_orbax(tmp_path / "ours", tmp_path / "model", item="model")
    add_orbax_metadata(tmp_path / "ours")
    args: dict[str, Any] = {"model": ocp.args.StandardRestore(), "facts": ocp.args.JsonRestore()}
    for root, more in (("ours", {}), ("theirs", {"loader_0": ocp.args.StandardRestore()})):
        with ocp.CheckpointManager(tmp_path / root) as manager:
            found = manager.restore(1, args=ocp.args.Composite(**args, **more))
        assert found["model"]["w"].tolist() == [1, 1, 1]
        assert found["facts"] == {"a": [1, "b"]}
    assert found["loader_0"] == hf.load(tmp_path / "theirs", item="loader_0") == {"place": 5}
    with ocp.CheckpointManager(tmp_path / "model") as manager:
        assert manager.restore(1)["w"].tolist() == [1, 1, 1]
    assert hf.verify(tmp_path / "ours").ok
    assert hf.load(tmp_path / "ours", item="facts") == {"a": [1, "b"]}


def test_a_run_stays_ours_when_its_steps_are_made_readable(tmp_path: Path) -> None:
    options = hf.CheckpointManagerOptions(max_to_keep=2)
    with hf.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (1, 2):
            manager.save(step, {"n": step, "w": np.ones(2)}, metrics={"loss": 0.5})
    before = hf.list_checkpoints(tmp_path / "run")
    assert [place.name for place in add_orbax_metadata(tmp_path / "run", step=2)] == ["2"]
    assert len(add_orbax_metadata(tmp_path / "run")) == 2
    assert len(add_orbax_metadata(tmp_path / "run")) == 2  # once more changes nothing
    assert hf.list_checkpoints(tmp_path / "run") == before
    assert hf.verify(tmp_path / "run").ok
    with hf.CheckpointManager(tmp_path / "run", options=options) as manager:
        assert manager.restore()["n"] == 2
        manager.save(3, {"n": 3, "w": np.ones(2)})
    assert [one.step for one in hf.list_checkpoints(tmp_path / "run")] == [2, 3]
    assert not (tmp_path / "run" / "1").exists()


def test_checkpoints_of_others_become_orbax_s(tmp_path: Path) -> None:
    save(tmp_path / "old", {"w": np.arange(3), "key": jax.random.key(1)}, **DIRECTORIES)
    export_orbax(tmp_path / "old", tmp_path / "new")
    found = hf.load(tmp_path / "new", like={"w": np.zeros(3, np.int64), "key": jax.random.key(0)})
    assert found["w"].tolist() == [0, 1, 2]
    assert found["key"] == jax.random.key(1)
    with pytest.raises(hf.errors.OptionError, match="a checkpoint of Orbax: only holdfast checkpoints"):
        add_orbax_metadata(tmp_path / "old")


COPIES: dict[str, dict[Any, Any]] = {
    "names that only a copy can have": {7: np.ones(3), "a.b": np.ones(1), "c/d": {"50%": np.zeros(2)}, "t/u": "text"},
    "large arrays": {"v": np.ones((2, 3, 4)), "w": np.arange(9 << 20, dtype=np.float32).reshape(3, -1)},
    "many small ones": {f"{index:03}": np.full(3, index) for index in range(300)},
}


@pytest.mark.parametrize("saved", COPIES.values(), ids=COPIES)
def test_copies(tmp_path: Path, saved: dict[Any, Any]) -> None:
    hf.save(tmp_path / "ours", saved)
    found = restored(copied(tmp_path / "ours", tmp_path / "theirs"))
    assert_same({name: found[name] for name in sorted(found)}, {str(name): value for name, value in saved.items()})


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    hf.save(tmp_path / "ours", {"w": np.arange(100.0), "v": np.ones(3)})
    shutil.copytree(tmp_path / "ours", tmp_path / "damaged")
    for data in (tmp_path / "damaged" / "state" / "d").iterdir():
        if not data.name.startswith("index"):
            data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(hf.DamagedCheckpointError):
        export_orbax(tmp_path / "damaged", tmp_path / "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "ours"]
    with pytest.raises(hf.CheckpointExistsError):
        export_orbax(tmp_path / "ours", tmp_path / "damaged")


@both
def test_one_bare_array(tmp_path: Path, export: Export) -> None:
    hf.save(tmp_path / "ours", np.arange(4))
    place = export(tmp_path / "ours", tmp_path / "theirs")
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert checkpointer.restore(place).tolist() == [0, 1, 2, 3]


def test_in_an_object_store_and_in_a_file_system_of_fsspec(tmp_path: Path, place: str) -> None:
    hf.save(tmp_path / "ours", {"w": np.arange(4), "text": "x"})
    export_orbax(tmp_path / "ours", f"{place}/theirs")
    assert hf.load(f"{place}/theirs")["w"].tolist() == [0, 1, 2, 3]
    assert hf.verify(f"{place}/theirs").ok
    files = fsspec.filesystem("memory")  # Orbax does not read from it: the directory is copied to where it does.
    export_orbax(tmp_path / "ours", hf.storage.as_location("/orbax/theirs", filesystem=files))
    files.get("/orbax/theirs", str(tmp_path / "theirs"), recursive=True)
    files.rm("/orbax", recursive=True)
    assert restored(tmp_path / "theirs")["w"].tolist() == [0, 1, 2, 3]


def test_compressed_and_aggregated_leaves(tmp_path: Path) -> None:
    handler = hf.PyTreeCheckpointHandler(layout=hf.Layout(compression=3))
    hf.Checkpointer(handler).save(tmp_path / "ours", {"w": np.zeros(1000)})
    assert restored(in_place(tmp_path / "ours", tmp_path))["w"].tolist() == [0] * 1000
    aggregated = {"w": np.ones(3), "v": np.ones(2)}
    hf.Checkpointer(hf.PyTreeCheckpointHandler()).save(
        tmp_path / "aggregated", aggregated, save_args={"w": hf.SaveArgs(aggregate=True), "v": hf.SaveArgs()}
    )
    with pytest.raises(hf.errors.UnsupportedLeafError, match="w: it is aggregated with other leaves"):
        add_orbax_metadata(tmp_path / "aggregated")
    assert restored(copied(tmp_path / "aggregated", tmp_path / "theirs"))["w"].tolist() == [1, 1, 1]
