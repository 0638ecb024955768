"""What a checkpoint manager does for a training loop: save, list, restore, with one item and with several."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.damage import flip
from tests.manager.runs import HeldHandler, commit, let_go, opened, reading, saved, tree

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.checkpoint import commit_protocol
from holdfast.engine.format import decode_document, encode_document
from holdfast.engine.format.record import VERSION


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    checkpointers = {
        "state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
        "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
    }
    facts = {"learning_rate": 0.001, "version": 1.1, "name": "first"}
    with opened(tmp_path / "run", checkpointers, max_to_keep=3, save_interval_steps=2) as manager:
        items = {step: {"state": tree(step), "facts": {**facts, "step": step}} for step in range(11)}
        found = [step for step in range(11) if manager.save(step, items[step], metrics={"loss": -step})]
        assert found == [0, 2, 4, 6, 8, 10]
        manager.wait_until_finished()
        assert manager.all_steps() == [6, 8, 10]
        assert manager.latest_step() == 10
        assert not manager.should_save(11)
        assert manager.should_save(12)
        assert manager.metrics(8) == {"loss": -8}
        for restored in (manager.restore(10), manager.restore(10, items={"state": None, "facts": None})):
            assert restored["state"]["a"] == 10
            assert restored["facts"] == {**facts, "step": 10}
        assert manager.restore(8, {"facts": None}) == {"facts": {**facts, "step": 8}}
    manager.close()
    assert manager.all_steps() == [6, 8, 10]
    assert manager.restore(10)["state"]["a"] == 10
    with pytest.raises(hf.errors.StateError, match="closed; make a new one"):
        manager.save(12, items[10])
    assert sorted(os.listdir(tmp_path / "run" / "10")) == ["checkpoint.json", "facts", "state"]
    with hf.CheckpointManager(tmp_path / "one item") as manager:
        assert commit(manager, np.int64(3), tree(3))  # type: ignore[arg-type]  # at run time any whole number will do
        assert manager.all_steps() == [3]
        assert manager.restore(np.int32(3))["a"] == manager.restore()["a"] == 3  # type: ignore[call-overload]
    assert sorted(os.listdir(tmp_path / "one item" / "3")) == ["checkpoint.json", "state"]


def test_templates(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        with pytest.raises(hf.CheckpointNotFoundError, match="there is no checkpoint"):
            manager.structure()
        commit(manager, 1, tree(1))
        leaf = manager.structure()["b"]["c"]
        assert (leaf.shape, leaf.dtype) == ((3,), np.dtype(np.int64))
        found = manager.restore(1, tree(0))
        assert found["b"]["c"].tolist() == [1, 1, 1]
        with pytest.raises(hf.TreeMismatchError, match="b/c"):
            manager.restore(1, {"a": 0, "b": {"c": np.zeros(4)}})
        with pytest.raises(hf.TreeMismatchError):
            manager.restore(items={"a": 0})
        assert manager.restore(1, restore_kwargs={"select": "b/**"})["b"]["c"].tolist() == [1, 1, 1]


def test_arguments_reach_the_handler(tmp_path: Path) -> None:
    class Handler(hf.handlers.CheckpointHandler):
        def save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> None:
            (directory.path / "arguments").write_text(json.dumps(kwargs))

        def restore(self, directory: hf.storage.Location, item: Any = None, *, files: Any = None, **kwargs: Any) -> Any:
            return json.loads((directory.path / "arguments").read_text()), kwargs

    checkpointer, blue = hf.Checkpointer(Handler()), {"colour": "blue"}
    one = hf.CheckpointManager(tmp_path / "one", checkpointer)
    one.save(1, None, save_kwargs=blue)
    assert one.restore(1, restore_kwargs={"x": 1}) == (blue, {"x": 1})
    two = hf.CheckpointManager(tmp_path / "two", {"a": checkpointer, "b": checkpointer})
    two.save(1, {"a": None, "b": None}, save_kwargs={"b": blue})
    assert two.restore(1, restore_kwargs={"a": {"x": 1}}) == {"a": ({}, {"x": 1}), "b": (blue, {})}
    with pytest.raises(hf.errors.OptionError, match="unknown items: c"):
        two.save(2, {"a": None, "b": None}, save_kwargs={"c": blue})


def test_items_that_do_not_fit(tmp_path: Path) -> None:
    more = hf.CheckpointManager(tmp_path, {"one": hf.PyTreeCheckpointer(), "two": hf.PyTreeCheckpointer()})
    given: list[Any] = [{"one": 1}, {"one": 1, "two": 2, "three": 3}, [1, 2]]
    for items in given:
        with pytest.raises(hf.errors.OptionError, match="this manager saves the items one, two"):
            more.save(1, items)
    assert not (tmp_path / "1").exists()
    with hf.CheckpointManager(tmp_path, {"one": hf.PyTreeCheckpointer()}) as manager:
        manager.save(1, {"one": 1})
        with pytest.raises(hf.CheckpointNotFoundError, match="no item two; the checkpoint has one"):
            manager.restore(1, {"two": None})
    with pytest.raises(hf.CheckpointNotFoundError, match="no item two"):
        more.restore(1)
    assert more.restore(1, {"one": None}) == {"one": 1}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"checkpointers": {}}, "saves nothing"),
        ({"checkpointers": {"../up": hf.PyTreeCheckpointer()}}, "item name '../up'"),
        ({"checkpointers": {"state": 3}}, "expected a Checkpointer, found int"),
        ({"checkpointers": 3}, "checkpointers must be a Checkpointer, or a dictionary of them by item, not int"),
        ({"options": {"a": 1}}, r"options= must be hf\.CheckpointManagerOptions\(\*\*{'a': 1}\), not"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, given: Any, what: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=what):
        hf.CheckpointManager(tmp_path, **given)


@pytest.mark.parametrize("checkpointer", [hf.PyTreeCheckpointer(), None], ids=["foreground", "background"])
def test_force(tmp_path: Path, checkpointer: hf.Checkpointer | None, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, checkpointer, save_interval_steps=100) as manager:
        assert not manager.save(7, tree(7))
        assert manager.save(7, tree(7), force=True, reason="because I say so")
        assert not caplog.records
        assert not manager.save(7, tree(8))
        assert not manager.save(7, tree(8)), "it says so once"
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
            "save(7) returned False, and what it was given is not saved: step 7 is saved already. "
            "force=True replaces it"
        ]
        assert commit(manager, 7, tree(9), force=True)
        assert manager.all_steps() == [7]
        assert manager.restore(7)["a"] == 9
        assert [path.is_dir() for path in (tmp_path / "7").iterdir()].count(True) == 1


@pytest.mark.parametrize("prefix", ["ckpt", "my_run", "9"])
def test_step_prefix(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "12").mkdir()
    assert saved(tmp_path, 3, 12, step_prefix=prefix) == [3, 12]
    assert (tmp_path / f"{prefix}_12" / "checkpoint.json").exists()
    assert saved(tmp_path, step_prefix=prefix) == [3, 12]
    assert reading(tmp_path).all_steps() == []
    assert hf.load(tmp_path)["a"] == 12


def test_metadata(tmp_path: Path) -> None:
    facts = {"name": "run", "sizes": [1, 2], "nested": {"deep": None}}
    assert hf.CheckpointManager(tmp_path).metadata() is None
    with hf.CheckpointManager(tmp_path, metadata=facts) as manager:
        assert manager.metadata() == facts
        manager.save(1, tree(1))
    with hf.CheckpointManager(tmp_path) as manager:
        assert manager.metadata() == facts
        manager.save(2, tree(2))
        assert manager.metadata() == facts
    with hf.CheckpointManager(tmp_path, metadata={"name": "other"}) as manager:
        manager.acquire()
    assert hf.CheckpointManager(tmp_path).metadata() == {"name": "other"}
    others: list[Any] = [{"array": np.ones(3)}, 3]
    for facts, what in zip(others, ["cannot be stored as JSON", "must be a dictionary, not int"], strict=True):
        with pytest.raises(hf.errors.OptionError, match=f"metadata= {what}"):
            hf.CheckpointManager(tmp_path, metadata=facts).acquire()


def test_metrics_that_come_later(tmp_path: Path) -> None:
    with opened(tmp_path, max_to_keep=1, best_fn="loss", best_mode="min") as manager:
        manager.save(1, tree(1))
        manager.record_metrics(1, {"loss": np.float32(0.5)})  # while it is being saved, or right after
        manager.wait_until_finished()
        manager.record_metrics(1, {"accuracy": 0.25, "val": {"loss": float("nan")}})
        assert manager.metrics(1) is not None
        manager.save(2, tree(2), metrics={"loss": 0.75})
        commit(manager, 3, tree(3), metrics={"loss": 0.9})
        assert manager.all_steps() == [1, 3]
        manager.record_metrics(3, {"loss": 0.1})
        manager.wait_until_finished()
        assert manager.all_steps() == [3], "a better one makes the old best go"
        with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 1; there are 3"):
            manager.record_metrics(1, {"loss": 0.0})
        with pytest.raises(hf.errors.OptionError, match="metric 'loss' is not a number but 'low'"):
            manager.record_metrics(3, {"loss": "low"})
    assert reading(tmp_path).metrics(3) == {"loss": 0.1}


class Scores(NamedTuple):
    accuracy: float
    losses: Any


@dataclasses.dataclass
class Report:
    accuracy: float
    losses: Any


SCORES = {"scores": Scores(0.5, np.array([0.25, math.inf]))}


@pytest.mark.parametrize(
    ("given", "best_fn", "stored"),
    [
        ({"loss": (0.5, np.float32(2))}, lambda metrics: sum(metrics["loss"]), {"loss": [0.5, 2.0]}),
        ({"loss": np.eye(2)}, lambda metrics: metrics["loss"][1][1], {"loss": [[1.0, 0.0], [0.0, 1.0]]}),
        ({"heads": [{"loss": 1}, {"loss": 2}]}, "heads/1/loss", {"heads": [{"loss": 1}, {"loss": 2}]}),
        ({"empty": [], "loss": 1}, "loss", {"empty": [], "loss": 1}),
        ({"nan": math.nan, "n": 3, "array": np.ones(())}, "n", {"nan": math.nan, "n": 3, "array": 1.0}),
        (np.float32(0.5), lambda metrics: metrics, 0.5),
        (np.arange(3), lambda metrics: metrics[1], [0, 1, 2]),
        (Report(0.5, [1]), lambda metrics: metrics["accuracy"], {"accuracy": 0.5, "losses": [1]}),
        (SCORES, "scores/losses/1", {"scores": {"accuracy": 0.5, "losses": [0.25, math.inf]}}),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_metrics_are_containers_of_numbers(tmp_path: Path, given: Any, best_fn: Any, stored: Any, late: bool) -> None:
    """They are the same for ``best_fn`` when the step is saved and after a restart."""
    options: Any = {"save_on_best": not late, "best_fn": best_fn, "best_mode": "max", "max_to_keep": 1}
    with opened(tmp_path, **options) as manager:
        assert manager.save(1, tree(1), metrics=None if late else given, force=late)
        if late:
            manager.record_metrics(1, given)
        manager.wait_until_finished()
        assert manager.best_step() == 1
        assert repr(manager.metrics(1)) == repr(stored)
    with opened(tmp_path, **options) as manager:
        assert manager.best_step() == 1
        assert repr(manager.metrics(1)) == repr(stored)
        assert manager.should_save(2, metrics=given) == late, "it is no better"
    assert main(["ls", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("step", "items", "metrics", "error", "said"),
    [
        (-1, 0, None, hf.errors.OptionError, "must not be negative"),
        (1.5, 0, None, hf.errors.OptionError, "must be a whole number"),
        ("3", 0, None, hf.errors.OptionError, "must be a whole number"),
        (1, {"b": {"c": object()}}, None, hf.errors.UnsupportedLeafError, "b/c"),
        (1, 0, {"names": ["a"]}, hf.errors.OptionError, "metric 'names/0' is not a number but 'a'"),
        (1, 0, "low", hf.errors.OptionError, "metric '' is not a number but 'low'"),
        (1, 0, {"x": np.zeros((80, 80))}, hf.errors.OptionError, "'x' has 6400 numbers, more than 4096: .* as an item"),
        (1, 0, {"object": object()}, hf.errors.OptionError, "metric 'object' is not a number"),
    ],
)
def test_what_is_refused_leaves_nothing(
    tmp_path: Path, step: Any, items: Any, metrics: Any, error: type[Exception], said: str
) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        with pytest.raises(error, match=said):
            manager.save(step, items, metrics=metrics)
        with pytest.raises(hf.CheckpointNotFoundError):
            manager.record_metrics(1, {"loss": 1.0})
        assert not (tmp_path / "1").exists()
        assert not manager.is_saving_in_progress()
        assert commit(manager, 1, tree(1))
        assert manager.all_steps() == [1]


def test_delete(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step))
        manager.delete(3)  # the one that is being saved
        assert manager.all_steps() == [1, 2]
        assert manager.latest_step() == 2
        manager.delete(1)
        assert not (tmp_path / "1").exists()
        with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 1; there are 2"):
            manager.delete(1)
        assert commit(manager, 3, tree(33), force=True)
        assert manager.restore(3)["a"] == 33


def test_a_step_that_another_program_has_committed_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    looking = hf.CheckpointManager(tmp_path)
    assert (looking.latest_step(), looking.best_step(), looking.all_steps()) == (None, None, [])
    saved(tmp_path, 1, 2)
    assert looking.all_steps() == []
    assert looking.restore(1)["a"] == 1
    assert looking.all_steps() == [1]
    looking.reload()
    assert looking.all_steps() == [1, 2]
    os.rename(tmp_path / "2", tmp_path / "3")
    assert hf.CheckpointManager(tmp_path).all_steps() == [1]
    with pytest.raises(hf.DamagedCheckpointError, match="written for step 2, found in the directory of step 3"):
        looking.restore(3)


def test_nothing_to_restore(tmp_path: Path) -> None:
    manager = hf.CheckpointManager(tmp_path / "none")
    assert manager.restore_latest() is None
    with pytest.raises(hf.CheckpointNotFoundError, match="there is no checkpoint to restore"):
        manager.restore()
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 3; there is none at all"):
        manager.restore(3)
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_all_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / str(step) / "state" / "manifest.ocdbt")
    with pytest.raises(hf.errors.NoWholeCheckpointError, match=r"(?s)every checkpoint is damaged.*step 2: .*step 1: "):
        hf.CheckpointManager(tmp_path).restore_latest()


def test_a_template_that_does_not_fit_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 3, items=lambda step: {"new": step})
    saved(tmp_path, 2)
    flip(tmp_path / "3" / "state" / "tree.json")
    with pytest.raises(hf.TreeMismatchError):
        hf.CheckpointManager(tmp_path).restore_latest({"new": 0})
    assert "step 3 is damaged and passed over" in caplog.text


def test_strangers_are_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    ours = {*tmp_path.rglob("*")}
    for name in ("5/default/manifest.ocdbt", "5/_CHECKPOINT_METADATA", "6", "notes.txt", "8/half"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of another program")
    (tmp_path / "07").mkdir()
    (tmp_path / "9").symlink_to(tmp_path / "5")
    before = {path: path.is_file() and path.read_bytes() for path in {*tmp_path.rglob("*")} - ours}
    with opened(tmp_path, max_to_keep=1) as manager:
        assert manager.all_steps() == [0]
        for step in range(1, 4):
            manager.save(step, tree(step))
        for step in (5, 8, 9):
            assert not manager.save(step, tree(step)), "one warning, and the run goes on"
            with pytest.raises(hf.CheckpointExistsError, match="is not a checkpoint"):
                manager.save(step, tree(step), force=True)
        with pytest.raises(hf.CheckpointExistsError, match="a file is there"):
            manager.save(6, tree(6), force=True)
        commit(manager, 10, tree(10))
        assert manager.all_steps() == [10]
    assert {path: path.is_file() and path.read_bytes() for path in before} == before


def test_empty_folders_of_steps_are_swept(tmp_path: Path) -> None:
    """A process may be killed between making the folder and marking it."""
    saved(tmp_path, 1)
    for name in ("2", "3", "07", "notes"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9, 1e9))
    ahead = time.time() + 1e4
    os.utime(tmp_path / "3", (ahead, ahead))
    (tmp_path / "4").symlink_to(tmp_path / "notes")
    assert reading(tmp_path).all_steps() == [1]
    assert (tmp_path / "2").exists(), "who only looks removes nothing"
    with hf.CheckpointManager(tmp_path) as manager:
        manager.acquire()
        left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert left == {"1", "3", "4", "07", "notes"}, "newer ones may be about to be filled"


def test_a_save_that_is_alive_is_not_swept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program saves into the directory of a run without its manager."""
    place = hf.storage.as_location(tmp_path / "5")
    pending = commit_protocol(place)(place, ["state"], overwrite=False)
    pending.begin()
    with hf.CheckpointManager(tmp_path) as manager:
        manager.acquire()
        assert (tmp_path / "5" / "checkpoint.partial").exists()
        assert "another save to the same path has begun" in caplog.text
    pending.leave()
    with hf.CheckpointManager(tmp_path) as manager:
        manager.acquire()
        assert not (tmp_path / "5").exists()


def test_the_loop_goes_on_while_saving(tmp_path: Path) -> None:
    handler = HeldHandler()
    saved(tmp_path, 0)
    with hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(handler)) as manager:
        assert manager.save(1, tree(1))
        assert handler.writing.wait(30)
        assert manager.is_saving_in_progress()
        assert manager.all_steps() == [0]
        assert manager.latest_step() == 0
        assert not manager.should_save(1)
        for step in (0, 1):
            manager.record_metrics(step, {"loss": 0.5})
        handler.written.set()
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        assert manager.all_steps() == [0, 1]
        assert manager.metrics(0) == manager.metrics(1) == {"loss": 0.5}


@pytest.mark.parametrize("change", ["pin", "delete"])
def test_a_step_is_changed_after_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    handler, editions = let_go(), [3]
    with hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(handler)) as manager:
        commit(manager, 1, tree(1))
        join = manager._background.join

        def join_and_replace() -> None:
            handler.written.set()
            join()
            while editions:  # another thread begins to save the step before it is changed
                handler.written.clear()
                with monkeypatch.context() as patch:
                    patch.setattr(manager._background, "join", join)
                    manager.save(1, tree(editions.pop()), force=True)

        handler.written.clear()
        manager.save(1, tree(2), force=True)
        monkeypatch.setattr(manager._background, "join", join_and_replace)
        getattr(manager, change)(1)
        manager.wait_until_finished()
        if change == "delete":
            assert manager.all_steps() == []
        else:
            assert "pinned" in manager.why_kept(1)
            assert manager.restore(1)["a"] == 3


def test_a_save_that_hangs_is_named(tmp_path: Path) -> None:
    handler = HeldHandler()
    items = {"one": hf.PyTreeCheckpointer(), "two": hf.AsyncCheckpointer(handler)}
    manager = opened(tmp_path, items, save_timeout_secs=0.01)
    manager.save(1, {"one": 1, "two": 2})
    with pytest.raises(hf.SaveFailedError, match=r"step 1 of .* not saved after 0\.01 s.*save_timeout_secs") as caught:
        manager.wait_until_finished()
    assert caught.value.step == 1
    handler.written.set()
    while manager.is_saving_in_progress():  # each wait is short
        with contextlib.suppress(hf.SaveFailedError):
            manager.wait_until_finished()
    manager.close()
    assert manager.all_steps() == [1]


def test_a_step_of_a_newer_version_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    record = tmp_path / "2" / "checkpoint.json"
    body = decode_document(record.read_bytes(), "checkpoint", source=str(record))
    record.write_bytes(encode_document("checkpoint", body, version=VERSION + 1))
    with hf.CheckpointManager(tmp_path, hf.PyTreeCheckpointer()) as manager:
        with pytest.raises(hf.errors.FormatVersionError, match="newer"):
            manager.restore_latest()
        assert manager.restore(1)["a"] == 1
