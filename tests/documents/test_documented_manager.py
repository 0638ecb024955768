"""The document's section on the manager: its calls, on small real data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information
from tests.clocks import FakeClock

import holdfast as hf
from holdfast import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointManager,
    CheckpointManagerOptions,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
    RestoreArgs,
    SaveArgs,
)

INPUTS, LABELS = load_iris(return_X_y=True)
ACCURACIES = [0.31, 0.52, 0.94, 0.71, 0.9, 0.88, 0.97, 0.6, 0.93, 0.2]


def test_checkpoint_manager(tmp_path: Path) -> None:
    mngr = CheckpointManager(f"{tmp_path}/directory/", Checkpointer(PyTreeCheckpointHandler()))
    item = {"a": 0, "b": {"c": 1, "d": 2}}
    for step in range(10):
        mngr.save(step, item)
    restored = mngr.restore(9)

    assert restored == item
    assert mngr.all_steps() == list(range(10))
    with pytest.raises(hf.CheckpointNotFoundError, match="10"):
        mngr.restore(10)
    mngr.close()


def test_checkpoint_manager_with_best_fn(tmp_path: Path) -> None:
    def best_fn(metrics: Mapping[str, float]) -> float:
        return metrics["accuracy"]

    options = CheckpointManagerOptions(max_to_keep=5, best_fn=best_fn, best_mode="max")
    handlers = {
        "state": AsyncCheckpointer(PyTreeCheckpointHandler()),
        "metadata": Checkpointer(JsonCheckpointHandler()),
    }
    mngr = CheckpointManager(f"{tmp_path}/directory/", handlers, options=options)
    state = {"a": 0, "b": {"c": 1, "d": 2}}
    metadata = {"learning_rate": 0.001, "version": 1.1, "exp_name": "best_exp_123"}
    for step in range(10):
        mngr.save(step, {"state": state, "metadata": metadata}, metrics={"accuracy": ACCURACIES[step]})
    mngr.wait_until_finished()
    restored = mngr.restore(step, items={"state": None, "metadata": None})
    restored_state, restored_metadata = restored["state"], restored["metadata"]

    assert restored_state == state
    assert restored_metadata == metadata
    best = {2, 4, 5, 6, 8}
    assert best == set(sorted(range(10), key=ACCURACIES.__getitem__)[-5:])
    assert mngr.all_steps() == sorted(best | {9})  # the newest is never deleted
    assert mngr.best_step() == 6
    assert mngr.latest_step() == 9
    assert mngr.metrics(6) == {"accuracy": 0.97}
    mngr.close()


def test_checkpoint_manager_directory(tmp_path: Path) -> None:
    """One folder a step, in it one folder an item."""
    handlers = {"state": Checkpointer(PyTreeCheckpointHandler()), "metadata": Checkpointer(JsonCheckpointHandler())}
    with CheckpointManager(tmp_path, handlers) as mngr:
        for step in range(3):
            mngr.save(step, {"state": {"layer0": INPUTS, "layer1": LABELS}, "metadata": {"version": 1.1}})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["0", "1", "2"]
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == ["checkpoint.json", "metadata", "state"]
    assert json.loads((tmp_path / "2" / "metadata" / "data.json").read_text())["data"] == {"version": 1.1}


def test_checkpoint_manager_with_prefix(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=CheckpointManagerOptions(step_prefix="ckpt")) as mngr:
        mngr.save(7, {"a": 1})
    assert (tmp_path / "ckpt_7" / "checkpoint.json").exists()


def test_checkpoint_manager_with_save_kwargs_and_restore_kwargs(tmp_path: Path) -> None:
    pytree_state = {"w": INPUTS, "n": np.arange(3), "step": 7}
    empty_state = jax.tree.map(lambda _: object(), pytree_state)
    save_args = jax.tree.map(lambda _: SaveArgs(dtype=np.float32), pytree_state)
    restore_args = jax.tree.map(lambda _: RestoreArgs(dtype=np.float16, restore_type=np.ndarray), pytree_state)

    items = {"state": Checkpointer(PyTreeCheckpointHandler()), "other": Checkpointer(PyTreeCheckpointHandler())}
    mngr = CheckpointManager(tmp_path, items)
    mngr.save(0, items={"state": pytree_state, "other": pytree_state}, save_kwargs={"state": {"save_args": save_args}})
    # The example has save_kwargs here, too; the text below it has restore_kwargs, which is what is meant.
    restored = mngr.restore(
        0,
        items={"state": empty_state, "other": empty_state},
        restore_kwargs={"state": {"restore_args": restore_args}},
    )

    assert restored["state"]["w"].dtype == np.float16
    np.testing.assert_array_equal(restored["state"]["w"], INPUTS.astype(np.float32).astype(np.float16))
    assert restored["state"]["step"].dtype == np.float16
    assert restored["state"]["step"] == 7
    np.testing.assert_array_equal(restored["other"]["w"], INPUTS)
    assert restored["other"]["step"] == 7
    structure = mngr.structure(0)
    assert (structure["state"]["w"].dtype, structure["other"]["w"].dtype) == ("float32", "float64")
    mngr.close()


class Notes(hf.handlers.CheckpointHandler):
    """A handler that has just the two methods that it must have."""

    def save(self, directory: hf.storage.Location, item: Any) -> None:  # type: ignore[override]  # as people write them
        (directory / "notes.txt").write_bytes(item.encode())

    def restore(self, directory: hf.storage.Location, item: Any = None) -> Any:  # type: ignore[override]  # as people write them
        return (directory / "notes.txt").read_bytes().decode()


def test_checkpoint_manager_other_apis(tmp_path: Path) -> None:
    items = {
        "state": AsyncCheckpointer(PyTreeCheckpointHandler()),
        "facts": Checkpointer(JsonCheckpointHandler()),
        "notes": Checkpointer(Notes()),
    }
    facts = {"dataset": "iris"}
    options = CheckpointManagerOptions(save_interval_steps=2)
    with CheckpointManager(tmp_path, items, options=options, metadata=facts) as mngr:
        for step in range(5):
            mngr.save(step, {"state": {"w": INPUTS}, "facts": {"step": step}, "notes": f"step {step}"})
        mngr.wait_until_finished()
        assert str(mngr.directory) == str(tmp_path)
        assert sorted(mngr.all_steps()) == [0, 2, 4]
        assert mngr.latest_step() == 4
        assert mngr.best_step() == 4  # the newest, as there is no best_fn
        assert [mngr.should_save(step) for step in (5, 6)] == [False, True]
        structure = mngr.structure()
        assert sorted(structure) == ["facts", "state"]  # `Notes` does not say what it holds
        assert structure["state"]["w"].shape == INPUTS.shape
        assert mngr.metadata() == facts
        assert mngr.restore(4)["notes"] == "step 4"
    with CheckpointManager(tmp_path, items, CheckpointManagerOptions(read_only=True)) as mngr:
        assert mngr.metadata() == facts


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_interval_steps": 3}, [0, 3, 6, 9]),
        ({"max_to_keep": 2}, [8, 9]),
        ({"max_to_keep": 2, "keep_period": 4}, [0, 4, 8, 9]),
        ({"max_to_keep": 1, "keep_time_interval": 3}, [0, 3, 6, 9]),
        ({"max_to_keep": 2, "best_fn": lambda metrics: metrics["accuracy"]}, [2, 6, 9]),
        ({"max_to_keep": 2, "best_fn": lambda metrics: metrics["accuracy"], "best_mode": "min"}, [0, 9]),
        (
            {
                "max_to_keep": 1,
                "best_fn": lambda metrics: metrics["accuracy"],
                "keep_checkpoints_without_metrics": True,
            },
            [5, 6, 9],
        ),
    ],
    ids=["interval", "newest", "period", "time", "best", "least", "without metrics"],
)
def test_checkpoint_manager_options(tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    clock = FakeClock()
    made = CheckpointManagerOptions(**options)
    with CheckpointManager(tmp_path, Checkpointer(PyTreeCheckpointHandler()), made, clock=clock) as mngr:
        for step in range(10):
            metrics = None if step == 5 else {"accuracy": ACCURACIES[step]}
            mngr.save(step, {"a": step}, metrics=metrics)
            clock.sleep(1)
        assert mngr.all_steps() == kept


def test_checkpoint_manager_wants_arguments_by_item(tmp_path: Path) -> None:
    """With several items, templates and arguments are dictionaries by item; anything else is an error."""
    items = {"state": Checkpointer(PyTreeCheckpointHandler()), "facts": Checkpointer(JsonCheckpointHandler())}
    with CheckpointManager(tmp_path, items) as mngr:
        mngr.save(0, {"state": {"w": INPUTS}, "facts": {}})
        with pytest.raises(
            hf.errors.OptionError, match="restore_kwargs for unknown items: restore_args; this manager has"
        ):
            mngr.restore(0, restore_kwargs={"restore_args": RestoreArgs()})
        with pytest.raises(hf.errors.OptionError, match="save_kwargs for unknown items: save_args"):
            mngr.save(1, {"state": {"w": INPUTS}, "facts": {}}, save_kwargs={"save_args": SaveArgs()})
        with pytest.raises(hf.errors.OptionError, match=r"give templates by item, as \{'state': ...\}; found ndarray"):
            mngr.restore(0, INPUTS)
