"""Checkpoints of several items, and directories of steps, that orbax-checkpoint writes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.orbax_files import copied, edit, ocp, save
from tests.versions import flax_flag

import holdfast as hf
from holdfast.integrations.formats.orbax.checkpoint import is_finished

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
v1: Any = pytest.importorskip("orbax.checkpoint.experimental.v1")


def options(**kwargs: Any) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **kwargs)


def reading(**changes: Any) -> hf.CheckpointManagerOptions:
    return hf.CheckpointManagerOptions(read_only=True, **changes)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(3, float(step)), "step": step}


@pytest.fixture(scope="module")
def several_items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("items") / "run"
    items = ("params", "extra", "key", "numpy_state", "array", "never_saved")
    with ocp.CheckpointManager(root, item_names=items, options=options()) as manager:
        manager.save(
            4,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave({"w": jnp.ones(3)}),
                extra=ocp.args.JsonSave({"q": [1, 2], "text": "x"}),
                key=ocp.args.JaxRandomKeySave(jax.random.key(9)),
                numpy_state=ocp.args.NumpyRandomKeySave(np.random.RandomState(1).get_state()),
                array=ocp.args.ArraySave(jnp.arange(7)),
            ),
        )
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with metrics, in steps with a prefix and zeros in front."""
    root: Path = tmp_path_factory.mktemp("run") / "run"
    settings = options(step_prefix="ckpt", step_format_fixed_length=8, best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, options=settings, metadata={"name": "run"}) as manager:
        for step in (2, 12):
            manager.save(step, args=ocp.args.StandardSave(state(step)), metrics={"loss": step / 2})
    return root


def test_a_run_is_loaded_listed_described_and_verified(run: Path) -> None:
    found = hf.load(run)
    assert (found["step"], found["w"].tolist()) == (12, [12, 12, 12])
    assert hf.load(run / "ckpt_00000002")["step"] == 2
    assert hf.load(run / "ckpt_00000002" / "default")["step"] == 2
    assert hf.load(run, item="default")["step"] == 12
    assert hf.load(run, item="metrics") == {"loss": 6.0}

    listed = hf.list_checkpoints(run)
    assert [(one.step, one.metrics, one.damage) for one in listed] == [
        (2, {"loss": 1.0}, None),
        (12, {"loss": 6.0}, None),
    ]
    committed = json.loads((run / "ckpt_00000002" / "_CHECKPOINT_METADATA").read_text())["commit_timestamp_nsecs"]
    files = [path for path in (run / "ckpt_00000002").rglob("*") if path.is_file()]
    assert listed[0].time == committed / 1e9
    assert listed[0].bytes == sum(path.stat().st_size for path in files)
    assert listed[0].reason == "written by Orbax"

    leaves = {(leaf.item, leaf.path): leaf for leaf in hf.describe(run, 2)}
    assert leaves["default", "w"].shape == (3,)
    assert leaves["metrics", ""].value == "{'loss': 1.0}"
    assert [one.step for one in hf.verify(run).checkpoints] == [2, 12]
    assert hf.verify(run, 12).ok
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 3 here; it holds the steps 2, 12"):
        hf.verify(run, 3)


def test_names_of_steps_with_two_underscores_and_zeros(tmp_path: Path) -> None:
    settings = options(step_prefix="a_b", step_format_fixed_length=5)
    with ocp.CheckpointManager(tmp_path / "run", options=settings) as manager:
        for step in (0, 5, 10):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    assert [one.step for one in hf.list_checkpoints(tmp_path / "run")] == [0, 5, 10]
    assert hf.load(tmp_path / "run")["step"] == 10


def test_every_kind_of_item(several_items: Path, tmp_path: Path) -> None:
    found = hf.load(several_items)
    assert sorted(found) == ["array", "extra", "key", "numpy_state", "params"]
    assert found["params"]["w"].tolist() == [1, 1, 1]
    assert found["extra"] == {"q": [1, 2], "text": "x"}
    assert found["array"].tolist() == list(range(7))
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(9)))
    expected: Any = np.random.RandomState(1).get_state(legacy=True)
    assert found["numpy_state"][0] == expected[0]
    np.testing.assert_array_equal(found["numpy_state"][1], expected[1])
    assert hf.load(several_items, item="key", like=jax.random.key(0)) == jax.random.key(9)
    assert hf.load(several_items, item="array", like=jnp.zeros(7, jnp.int32)).tolist() == list(range(7))
    with pytest.raises(hf.errors.OptionError, match="name one with item="):
        hf.load(several_items, like={"w": jnp.zeros(3)})
    with pytest.raises(hf.CheckpointNotFoundError, match="no item 'never_saved'"):
        hf.load(several_items, item="never_saved")
    with pytest.raises(hf.errors.OptionError, match="'extra' is JSON"):
        hf.load(several_items, item="extra", select="*")
    hf.import_checkpoint(several_items, tmp_path / "ours")
    assert hf.load(tmp_path / "ours", item="extra") == found["extra"]


def test_items_of_unknown_kinds_are_listed_and_skipped(
    several_items: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copied(several_items, tmp_path)
    handlers = {"dataset": "grain.python.PyGrainCheckpointHandler"}
    edit(copy / "4", lambda document: document["item_handlers"].update(handlers), "_CHECKPOINT_METADATA")
    (copy / "4" / "dataset").mkdir()
    (copy / "4" / "dataset" / "process_0-of-1.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert "dataset" not in hf.load(copy)
    assert "skipped items that holdfast does not read: dataset (PyGrainCheckpointHandler)" in caplog.text
    assert ("dataset", "PyGrainCheckpointHandler") in {(leaf.item, leaf.kind) for leaf in hf.describe(copy)}
    with pytest.raises(hf.errors.OptionError, match=r"only Orbax reads item 'dataset' \(PyGrainCheckpointHandler\)"):
        hf.load(copy, item="dataset")
    edit(copy / "4", lambda document: document.update(item_handlers=handlers), "_CHECKPOINT_METADATA")
    for item in several_items.glob("4/*/"):
        shutil.rmtree(copy / "4" / item.name)
    with pytest.raises(hf.errors.OptionError, match=r"none of the items .* is a tree or JSON: dataset \(PyGrain"):
        hf.load(copy)


def test_items_that_lost_files(several_items: Path, tmp_path: Path) -> None:
    copy = copied(several_items, tmp_path)
    (copy / "4" / "_CHECKPOINT_METADATA").unlink()
    found = hf.load(copy)
    assert (found["params"]["w"].tolist(), found["extra"]) == ([1, 1, 1], {"q": [1, 2], "text": "x"})
    assert found["array"] == {"checkpoint": pytest.approx(np.arange(7))}  # nothing says that it was a bare array
    shutil.copy(several_items / "4" / "_CHECKPOINT_METADATA", copy / "4")
    shutil.rmtree(copy / "4" / "params")
    (copy / "4" / "extra" / "metadata").unlink()
    for item, file in (("params", "params/_METADATA"), ("extra", "extra/metadata")):
        with pytest.raises(hf.DamagedCheckpointError, match=f"{file} is missing"):
            hf.load(copy, item=item)
    assert {problem.leaf for problem in hf.verify(copy).checkpoints[0].problems} == {"params", "extra"}


def test_unfinished_steps_are_not_listed(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path)
    (copy / "ckpt_00000012").rename(copy / "ckpt_00000012.orbax-checkpoint-tmp")
    (copy / "ckpt_00000099").mkdir()  # what a deletion that was interrupted may leave
    assert [one.step for one in hf.list_checkpoints(copy)] == [2]
    assert hf.load(copy)["step"] == 2
    with pytest.raises(hf.CheckpointNotFoundError, match="never finished"):
        hf.load(copy / "ckpt_00000012.orbax-checkpoint-tmp")
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(copy / "ckpt_00000099")


def test_a_gutted_step_is_damaged_and_passed_over_by_a_reading_manager(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path)
    step = copy / "ckpt_00000012"
    (step / "metrics" / "metrics").write_bytes(b"\xff")  # which no load needs
    assert "metrics is damaged" in str(hf.list_checkpoints(copy)[1].damage)
    assert not hf.verify(copy, 12).ok
    assert hf.load(copy)["step"] == 12
    for name in ("default", "metrics"):
        shutil.rmtree(step / name)
    with pytest.raises(hf.DamagedCheckpointError, match="default/_METADATA is missing"):
        hf.load(copy)
    for content, damage in (
        (b"\xff", "_CHECKPOINT_METADATA is damaged: it is not JSON"),
        (b"", "only its directory is left"),
    ):
        (step / "_CHECKPOINT_METADATA").write_bytes(content)
        whole, gutted = hf.list_checkpoints(copy)
        assert whole.damage is None
        assert damage in str(gutted.damage)
        assert not hf.verify(copy, 12).ok
        with pytest.raises(hf.DamagedCheckpointError, match=damage):
            hf.load(copy)
        with hf.CheckpointManager(copy, options=reading()) as manager:
            found = manager.restore_latest()
            assert found is not None
            assert (found.step, [step for step, _ in found.skipped]) == (2, [12])
            with pytest.raises(hf.DamagedCheckpointError):
                manager.restore(12)
    with hf.CheckpointManager(copy, options=reading()) as manager:
        (copy / "ckpt_00000002").rename(copy / "ckpt_00000003")
        manager.reload()
        assert manager.all_steps() == [3]


@pytest.mark.needs("orbax-checkpoint", "0.12")
def test_the_checkpointers_and_functions_of_version_one(tmp_path: Path) -> None:
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, state(3), metrics={"loss": 1.0})
    found = hf.load(tmp_path / "run", like={"w": np.zeros(3, np.float32), "step": 0})
    assert found["step"] == 3
    assert hf.list_checkpoints(tmp_path / "run")[0].metrics == {"loss": 1.0}
    tree = {"key": jax.random.key(5), "text": "x"}
    v1.save(tmp_path / "one", tree)
    assert hf.load(tmp_path / "one", like={"key": jax.random.key(0), "text": ""}) == tree
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="facts")
    items = {"facts": {"a": [1, "x"]}, "model": {"w": jnp.ones(2)}, "other": {"a": 1.5}}
    with v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry)):
        v1.save_checkpointables(tmp_path / "items", items)
    assert (tmp_path / "items" / "facts" / "data.json").exists()
    found = hf.load(tmp_path / "items")
    assert (sorted(found), found["model"]["w"].tolist()) == (["facts", "model", "other"], [1, 1])
    for item in ("facts", "other"):
        assert hf.load(tmp_path / "items", item=item) == found[item] == items[item]


def test_our_own_steps_count_before_what_lies_beside_them(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"n": 1})
    save(tmp_path / "run" / "exported", {"n": 2})
    save(tmp_path / "run" / "9", {"n": 9})
    assert hf.load(tmp_path / "run") == {"n": 1}
    listed = hf.list_checkpoints(tmp_path / "run")
    assert [(one.step, one.damage is None) for one in listed] == [(1, True), (9, False)]
    assert [one.step for one in hf.verify(tmp_path / "run").checkpoints] == [1]
    assert hf.load(tmp_path / "run" / "exported") == {"n": 2}


@pytest.mark.parametrize(
    ("handler", "arguments", "expected"),
    [
        ("ArrayCheckpointHandler", lambda: ocp.args.ArraySave(jnp.arange(3)), [0, 1, 2]),
        ("JsonCheckpointHandler", lambda: ocp.args.JsonSave({"a": 1}), {"a": 1}),
        ("JaxRandomKeyCheckpointHandler", lambda: ocp.args.JaxRandomKeySave(jax.random.key(5)), [0, 5]),
    ],
)
def test_one_object_that_is_no_tree(tmp_path: Path, handler: str, arguments: Any, expected: Any) -> None:
    with ocp.Checkpointer(getattr(ocp, handler)()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=arguments())
    found = hf.load(tmp_path / "one")
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == expected
    assert hf.verify(tmp_path / "one").ok


@pytest.mark.parametrize("facts", ["facts", "metadata"])
def test_items_without_a_manager_and_one_that_is_called_metadata(tmp_path: Path, facts: str) -> None:
    items = {"model": ocp.args.StandardSave({"w": jnp.ones(1)}), facts: ocp.args.JsonSave({"x": 1})}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "run" / "1", args=ocp.args.Composite(**items))
    place = tmp_path / "run" / "1" if facts == "facts" else tmp_path / "run"
    assert hf.load(place)[facts] == {"x": 1}
    assert hf.load(place, item="model", like={"w": np.zeros(1, np.float32)})["w"].tolist() == [1]
    (tmp_path / "run" / "1" / "_CHECKPOINT_METADATA").unlink()
    assert hf.load(place, item=facts) == {"x": 1}


@pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning")
@pytest.mark.parametrize("through_orbax", [True, False], ids=["with Orbax", "without"])
def test_what_flax_s_own_functions_save(tmp_path: Path, through_orbax: bool) -> None:
    checkpoints = pytest.importorskip("flax.training.checkpoints")
    with flax_flag("use_orbax_checkpointing", through_orbax):
        for step in (4, 10):
            checkpoints.save_checkpoint(tmp_path, state(step), step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_10", "checkpoint_4"]
    assert hf.load(tmp_path / "checkpoint_4")["step"] == 4
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [4, 10]
    assert hf.list_checkpoints(tmp_path)[0].reason == f"written by {'Orbax' if through_orbax else 'Flax'}"
    assert [one.step for one in hf.verify(tmp_path).checkpoints] == [4, 10]
    assert hf.load(tmp_path)["step"] == 10


def test_on_google_cloud_storage_only_what_is_marked_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    place = hf.storage.as_location("gs://bucket/run/12")
    marked: set[str] = set()
    monkeypatch.setattr(hf.storage.Location, "exists", lambda self: self.url in marked)
    assert not is_finished(place, frozenset({"_CHECKPOINT_METADATA"}))
    assert is_finished(place, frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"}))
    marked.add("gs://bucket/run/12/commit_success.txt")
    assert is_finished(place / "state", frozenset({"_METADATA"}))


# ---- by the calls of a program that comes from Orbax


@pytest.mark.parametrize("kind", [hf.PyTreeCheckpointer, lambda: hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())])
@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["one database", "per parameter"])
def test_a_checkpointer_restores_what_orbax_saved(tmp_path: Path, kind: Any, use_ocdbt: bool) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "layers": [jnp.ones(2, jnp.bfloat16), np.arange(3)], "step": 7}
    place = save(tmp_path / "one", tree, use_ocdbt=use_ocdbt)
    checkpointer = kind()
    found = checkpointer.restore(place)
    assert (found["w"].tolist(), found["layers"][1].tolist(), found["step"]) == ([[0, 1, 2], [3, 4, 5]], [0, 1, 2], 7)
    restored = checkpointer.restore(place, tree)
    assert isinstance(restored["w"], jax.Array)
    assert restored["layers"][0].dtype == jnp.bfloat16
    args = {"w": hf.RestoreArgs(dtype=np.float16), "layers": hf.RestoreArgs(), "step": hf.RestoreArgs()}
    assert checkpointer.restore(place, restore_args=args)["w"].dtype == np.float16
    assert list(checkpointer.restore(place, select="w")) == ["w"]
    assert checkpointer.structure(place)["w"].shape == (2, 3)
    with pytest.raises(hf.TreeMismatchError, match="w"):
        checkpointer.restore(place, tree | {"w": jnp.ones(3)})


def test_checkpointers_name_what_they_cannot_restore(several_items: Path, run: Path) -> None:
    with pytest.raises(
        hf.errors.OptionError, match="has the trees array, key, numpy_state, params: restore it with a Checkpoi"
    ):
        hf.PyTreeCheckpointer().restore(several_items / "4")
    assert hf.Checkpointer(hf.JsonCheckpointHandler()).restore(several_items / "4") == {"q": [1, 2], "text": "x"}
    assert hf.PyTreeCheckpointer().restore(run / "ckpt_00000012")["step"] == 12
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.PyTreeCheckpointer().restore(run)


@pytest.mark.parametrize("prefix", [None, "ckpt"])
def test_a_reading_manager_shows_the_steps_of_orbax(run: Path, prefix: str | None) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    given = reading(best_fn="loss", best_mode="min", step_prefix=prefix)
    with hf.CheckpointManager(run, options=given) as manager:
        assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([2, 12], 12, 2)
        assert manager.metrics(12) == {"loss": 6.0}
        assert manager.metadata() == {"name": "run"}
        assert manager.restore()["step"] == 12
        assert manager.restore(2, state(0))["w"].tolist() == [2, 2, 2]
        assert manager.restore(2, restore_kwargs={"select": "step"}) == {"step": 2}
        assert manager.structure(2)["w"].shape == (3,)
        found = manager.restore_latest()
        assert found is not None
        assert found.step == 12
        with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 3; there are 2, 12"):
            manager.restore(3)
        with pytest.raises(hf.errors.StateError, match="read_only=True"):
            manager.save(13, state(13))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with hf.CheckpointManager(run, options=reading(step_prefix="other")) as manager:
        assert manager.all_steps() == []


def test_a_reading_manager_of_several_items(several_items: Path) -> None:
    checkpointers = {
        "params": hf.PyTreeCheckpointer(),
        "array": hf.Checkpointer(hf.ArrayCheckpointHandler()),
        "extra": hf.Checkpointer(hf.JsonCheckpointHandler()),
    }
    with hf.CheckpointManager(several_items, checkpointers, reading()) as manager:
        found = manager.restore(4)
        assert sorted(found) == ["array", "extra", "params"]
        assert found["params"]["w"].tolist() == [1, 1, 1]
        assert found["array"].tolist() == list(range(7))
        assert found["extra"] == {"q": [1, 2], "text": "x"}
        assert list(manager.restore(4, {"params": {"w": jnp.zeros(3)}})) == ["params"]
        assert manager.structure(4)["params"]["w"].shape == (3,)
    with (
        hf.CheckpointManager(several_items, {"never": hf.PyTreeCheckpointer()}, reading()) as manager,
        pytest.raises(hf.CheckpointNotFoundError, match="no item never"),
    ):
        manager.restore(4)
