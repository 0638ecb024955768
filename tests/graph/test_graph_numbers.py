"""Numbered saves and the manager: names, counters, retention, and resuming."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import FakeClock

import holdfast as hf
from holdfast import graph
from holdfast.engine.checkpoint import Save
from holdfast.engine.steps import read_record
from holdfast.engine.storage import as_location


def names(directory: str) -> list[str]:
    return sorted(entry.name for entry in as_location(directory).entries() if entry.is_directory and "-" in entry.name)


def numbers(paths: list[str]) -> list[int]:
    return [int(path.rpartition("-")[2]) for path in paths]


def full(_: int) -> None:
    raise OSError(28, "no space")


def test_after_going_back_the_newest_saved_counts(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """A program that saves by its step goes back from 30 to 10, is stopped, and reaches 20 again."""

    def saved(manager: graph.CheckpointManager, step: int) -> None:
        manager.checkpoint.step.assign(step)
        assert manager.save(checkpoint_number=manager.checkpoint.step) == f"{place}/ckpt-{step}"

    def started() -> graph.CheckpointManager:
        return graph.CheckpointManager(graph.Checkpoint(step=graph.Value(0)), place, max_to_keep=3)

    with started() as manager:
        for step in (10, 20, 30):
            saved(manager, step)
    with started() as manager:
        manager.checkpoint.restore(f"{place}/ckpt-10")
        saved(manager, 15)
        assert numbers(manager.checkpoints) == [20, 30, 15]
    for following in (18, 20, 25):
        before = graph.latest_checkpoint(place)
        assert hf.load(place)["step"] == int(str(before).rpartition("-")[2])
        with started() as manager:
            assert manager.restore_or_initialize() == before
            saved(manager, following)
            assert manager.latest_checkpoint == f"{place}/ckpt-{following}"
    with started() as manager:
        manager.restore_or_initialize()
        assert manager.checkpoint.step == 25
        saved(manager, 35)
    assert graph.latest_checkpoint(place) == f"{place}/ckpt-35"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_box_compares_and_counts_as_its_value() -> None:
    box, done = graph.Value(3), graph.Value(False)
    assert [box == 3, box != 3, 3 == box, box < 4, box >= 4, 2 < box, bool(box), bool(done)] == [  # noqa: SIM300
        *(True, False, True, True, False, True, True, False)
    ]
    found = [box + 1, 10 - box, box * 2, 7 // box, 7 % box, 1 / graph.Value(2), box**2, -box, abs(graph.Value(-3))]
    assert found == [4, 7, 6, 2, 1, 0.5, 9, -3, 3]
    assert {type(one) for one in found} == {int, float}
    assert (range(9)[box], float(box), repr(box)) == (3, 3.0, "Value(3)")
    assert (np.ones(2) * box).tolist() == [3, 3]
    rounds = 0
    while not done:
        box.assign_sub(1)
        rounds += 1
        done.assign(box == 0)
    assert rounds == 3


def test_boxes_are_made_by_the_program(place: str) -> None:
    saved = graph.Checkpoint(listed=[graph.Value(1.0), graph.Value(2.0)], mapped={"n": graph.Value(3), "m": 4})
    path = saved.write(f"{place}/x")
    checkpoint = graph.Checkpoint(mapped={})
    status = checkpoint.read(path)
    assert checkpoint.mapped == {"m": 4}
    checkpoint.listed = []
    assert checkpoint.listed == []
    checkpoint.listed.append(graph.Value(0.0))
    assert checkpoint.listed[0].value == 1
    assert status.report.pending == ("listed/1", "mapped/n")
    with pytest.raises(hf.errors.StateError, match="mapped/n"):
        checkpoint.write(f"{place}/y")
    status.expect_partial()
    assert graph.load_checkpoint(path).graph.type_of("mapped/n").endswith("Value")
    assert hf.load(path) == {"listed": [1, 2], "mapped": {"n": 3, "m": 4}}
    number = graph.Checkpoint(listed=[0.0, 0.0], mapped={"n": 0})
    number.read(path)
    assert (number.listed, number.mapped) == ([1, 2], {"n": 3, "m": 4})
    others = graph.Checkpoint(listed=[graph.Value(0), graph.Value(-np.inf)])
    others.read(path, select="listed/**").assert_consumed()
    assert [box.value for box in others.listed] == [1, 2]


def test_saves_are_numbered_from_one(place: str) -> None:
    checkpoint = graph.Checkpoint(w=1.5)
    paths = [checkpoint.save(f"{place}/run") for _ in range(10)]
    assert paths == [f"{place}/run-{number}" for number in range(1, 11)]
    assert names(place) == sorted(f"run-{number}" for number in range(1, 11))
    assert graph.latest_checkpoint(place) == f"{place}/run-10"
    assert checkpoint.save_counter == 10
    assert graph.load_checkpoint(place).get_tensor("save_counter") == 10
    assert [found.step for found in hf.list_checkpoints(place)] == list(range(1, 11))
    for name in ("a", "c_d", "run"):  # the newest of several names is what was committed last
        assert checkpoint.save(f"{place}/{name}") == graph.latest_checkpoint(place)
    assert graph.latest_checkpoint(f"{place}/nothing") is None


def test_write_numbers_nothing_and_leaves_the_counter_alone(place: str) -> None:
    saved, loaded = np.arange(3.0), np.zeros(3)
    checkpoint = graph.Checkpoint(w=saved)
    assert checkpoint.write(f"{place}/x") == f"{place}/x"
    assert [entry.name for entry in as_location(place).entries()] == ["x"]
    assert checkpoint.save_counter == 0
    assert graph.latest_checkpoint(place) is None
    graph.Checkpoint(w=loaded).read(f"{place}/x").assert_consumed()
    assert loaded.tolist() == [0, 1, 2]
    for background in (False, True):
        with pytest.raises(hf.CheckpointExistsError, match=r"write\(path, overwrite=True\)"):
            checkpoint.write(f"{place}/x", background=background)
    checkpoint.write(f"{place}/x", overwrite=True)


def test_a_handler_of_a_signal_may_save_while_the_program_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = graph.Checkpoint(w=np.arange(3.0))
    write = Save.write

    def interrupted(save: Save, *arguments: Any) -> Any:
        monkeypatch.setattr(Save, "write", write)
        signal.raise_signal(signal.SIGTERM)
        return write(save, *arguments)

    monkeypatch.setattr(Save, "write", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: checkpoint.write(tmp_path / "emergency"))
    try:
        checkpoint.save(tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, before)
    numbered, other = (read_record(as_location(tmp_path / name)) for name in ("run-1", "emergency"))
    assert (numbered.step, numbered.pinned, other.step, other.pinned) == (1, True, None, False)


@pytest.mark.parametrize(
    ("choice", "number"),
    [({}, 2), ({"select": "w"}, 0), ({"select": ["w", "save_*"]}, 2), ({"exclude": "save_counter"}, 0)],
    ids=str,
)
def test_the_number_is_restored_like_any_other_value(choice: dict[str, Any], number: int, place: str) -> None:
    checkpoint = graph.Checkpoint(w=np.ones(2))
    checkpoint.save(f"{place}/one")
    path = checkpoint.save(f"{place}/one")
    other = graph.Checkpoint(w=np.zeros(2))
    other.read(path).assert_consumed()
    assert other.save_counter == 0, "only a restore takes it"
    other.restore(path, **choice)
    assert other.save_counter == number
    assert other.save(f"{place}/other") == f"{place}/other-{number + 1}"


# Managers, one after the other: the limit and the hours, when each saves, what it lists then, and what there is.
Opened = tuple[tuple[Any, Any], tuple[int, ...], list[int], list[int]]
FIRST: Opened = ((2, 1), (10000, 10010, 10020), [2, 3], [1, 2, 3])
KEPT: dict[str, list[Opened]] = {
    "a lower limit deletes nothing before the next save": [
        ((None, None), (10000, 10010, 10020, 10030), [1, 2, 3, 4], [1, 2, 3, 4]),
        ((3, None), (), [1, 2, 3, 4], [1, 2, 3, 4]),
        ((3, None), (10040,), [3, 4, 5], [3, 4, 5]),
    ],
    "one in so many hours across managers": [
        ((2, None), (10000, 13610), [1, 2], [1, 2]),
        ((2, 1.5), (14330,), [2, 3], [1, 2, 3]),
        ((2, 1.5), (16130, 17930), [4, 5], [1, 4, 5]),
        ((2, 1.5), (17940,), [5, 6], [1, 4, 5, 6]),
        ((2, 1.5), (18000, 18010, 18020), [8, 9], [1, 4, 8, 9]),
    ],
    # What the hours keep for good is never listed or deleted again.
    "a higher limit": [FIRST, ((5, 1), (17000, 17010), [2, 3, 4, 5], [1, 2, 3, 4, 5])],
    "no limit": [FIRST, ((None, None), (17000, 17010), [2, 3, 4, 5], [1, 2, 3, 4, 5])],
    "no hours": [FIRST, ((2, None), (17000, 17010), [4, 5], [1, 4, 5])],
    "other hours": [FIRST, ((2, 100), (17000, 17010), [4, 5], [1, 4, 5])],
    "a clock that went backwards deletes nothing from before": [
        ((1, 1), (10000, 11000, 13600, 17200), [4], [1, 3, 4]),
        ((1, 1), (5000, 5010, 5020), [7], [1, 3, 4, 5, 7]),
        ((1, 1), (30000,), [8], [1, 3, 4, 5, 8]),
    ],
}


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("managers", KEPT.values(), ids=list(KEPT))
def test_limits_and_hours_decide_what_is_kept(managers: list[Opened], background: bool, place: str) -> None:
    checkpoint, clock = graph.Checkpoint(step=0), FakeClock(3.0)
    for limits, times, listed, kept in managers:
        in_background = background and limits == FIRST[0]  # elsewhere, the clock moves on while it saves
        with graph.CheckpointManager(checkpoint, place, *limits, clock=clock, background=in_background) as manager:
            for clock.wall in times:
                manager.save()
            manager.wait_until_finished()
            assert numbers(manager.checkpoints) == listed
        assert names(place) == [f"ckpt-{number}" for number in kept]
        assert hf.list_checkpoints(place)[-1].time == clock.wall


@pytest.mark.parametrize("name", ["odd", "ckpt"])
def test_checkpoints_that_the_manager_did_not_save_are_never_deleted(place: str, name: str) -> None:
    checkpoint, resumed = graph.Checkpoint(step=0), graph.Checkpoint(step=1)
    by_hand = [checkpoint.save(f"{place}/{name}") for _ in range(2)]
    resumed.restore(by_hand[-1]).assert_consumed()
    with graph.CheckpointManager(resumed, place, max_to_keep=2) as manager:
        assert numbers([manager.save() or "" for _ in range(3)]) == [3, 4, 5]
        assert numbers(manager.checkpoints) == [4, 5]
    assert names(place) == sorted(["ckpt-4", "ckpt-5", f"{name}-1", f"{name}-2"])


def test_a_fresh_counter_goes_on_from_the_numbers_in_the_directory(place: str) -> None:
    first, second = graph.Checkpoint(step=1), graph.Checkpoint(step=2)
    with graph.CheckpointManager(first, place, max_to_keep=None) as one:
        one.save()
        with graph.CheckpointManager(second, place, max_to_keep=None) as two:
            two.save()
            with pytest.raises(hf.errors.OwnershipError):
                one.save()
    assert first.save_counter == 1
    assert [hf.load(f"{place}/ckpt-{number}")["step"] for number in (1, 2)] == [1, 2]
    assert graph.Checkpoint(step=3).save(f"{place}/ckpt") == f"{place}/ckpt-3"


def test_the_program_may_give_the_number(place: str) -> None:
    step = graph.Value(0)
    checkpoint = graph.Checkpoint(step=step)
    with graph.CheckpointManager(checkpoint, place, max_to_keep=2) as manager:
        paths = []
        for _ in range(5):
            paths.append(manager.save(checkpoint_number=step))
            step.assign_add(2)
        paths.append(manager.save(checkpoint_number=32))
        assert numbers([path or "" for path in paths]) == [0, 2, 4, 6, 8, 32]
        assert checkpoint.save_counter == 6
        assert int(step) == 10
        assert numbers(manager.checkpoints) == [8, 32]
        with pytest.raises(hf.CheckpointExistsError, match="ckpt-32"):
            manager.save(checkpoint_number=32)
    assert checkpoint.save_counter == 6


def test_a_save_within_the_interval_is_left_out(place: str) -> None:
    checkpoint = graph.Checkpoint(step=0)

    def manager(**options: Any) -> graph.CheckpointManager:
        return graph.CheckpointManager(
            checkpoint, place, None, step_counter=lambda: checkpoint.step, checkpoint_interval=2, **options
        )

    def saved(keeper: graph.CheckpointManager, step: int, **options: Any) -> bool:
        checkpoint.step = step
        return keeper.save(**options) is not None

    with manager() as keeper:
        assert [saved(keeper, step) for step in (0, 1, 2, 2, 3)] == [True, False, True, False, False]
        # The last one is saved after a restore of an earlier step, for example.
        assert [saved(keeper, step, check_interval=False) for step in (3, 3, 2)] == [True, False, True]
    with manager(last_checkpoint_step=1) as keeper:
        assert [saved(keeper, step) for step in (1, 2, 3)] == [False, False, True]
    with manager() as keeper:
        checkpoint.step = 0
        assert keeper.restore_or_initialize() is not None
        assert checkpoint.step == 3
        assert [saved(keeper, step) for step in (3, 4, 5)] == [False, False, True]
    elsewhere = graph.Checkpoint(step=8).save(f"{place}/elsewhere/ckpt")
    for path, early in ((f"{place}/ckpt-3", True), (place, True), (elsewhere, False)):
        with manager() as keeper:
            checkpoint.restore(path)
            assert saved(keeper, checkpoint.step) is not early


def test_options_that_make_no_sense(place: str) -> None:
    step, wrong = graph.Value(), "3"
    cases: list[tuple[Any, list[Any], dict[str, Any], str]] = [
        (graph.Checkpoint(), [1], {"checkpoint_interval": 2}, "step_counter"),
        (graph.Checkpoint(), [1], {"step_counter": step, "checkpoint_interval": 0}, "checkpoint_interval"),
        (graph.Checkpoint(), [1], {"step_counter": step, "checkpoint_interval": wrong}, "checkpoint_interval"),
        (graph.Checkpoint(), [0], {}, "max_to_keep"),
        (graph.Checkpoint(), [1, 0], {}, "hours"),
        (graph.Checkpoint(), [1, wrong], {}, "hours"),
        (wrong, [1], {}, "must be a Checkpoint"),
    ]
    for checkpoint, limits, options, message in cases:
        with pytest.raises(hf.errors.OptionError, match=message):
            graph.CheckpointManager(checkpoint, place, *limits, **options)
    manager = graph.CheckpointManager(graph.Checkpoint(a=1), place, 1)
    with manager, pytest.raises(hf.errors.OptionError, match="'x' is not a whole number"):
        manager.save("x")
    local: dict[str, Any] = {"local": hf.Local("/dev/shm/none", every=2)}
    with pytest.raises(hf.errors.UnknownArgumentError, match=r"local: hf\.CheckpointManager and the callbacks take it"):
        graph.CheckpointManager(graph.Checkpoint(), place, None, **local)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_restore_or_initialize_initializes_only_without_a_checkpoint(place: str, background: bool) -> None:
    started, checkpoint = list[int](), graph.Checkpoint(w=np.ones(3))
    options: dict[str, Any] = {"init_fn": lambda: started.append(1), "background": background}
    with graph.CheckpointManager(checkpoint, place, 3, **options) as manager:
        assert manager.restore_or_initialize() is None
        assert started == [1]
        path = manager.save()
        checkpoint.w[...] = 0  # perhaps while the save is still under way
        assert manager.restore_or_initialize() == path
        assert started == [1]
        assert checkpoint.w.tolist() == [1, 1, 1]
        assert manager.status is not None
        manager.status.assert_consumed()


def test_a_moved_directory_and_its_copy_resume(tmp_path: Path) -> None:
    checkpoint = graph.Checkpoint(step=0)
    with graph.CheckpointManager(checkpoint, tmp_path / "a", 2) as manager:
        for _ in range(3):
            manager.save()
    shutil.move(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for folder in ("b", "c"):
        (tmp_path / folder / "options.json").write_text("")
        with graph.CheckpointManager(checkpoint, tmp_path / folder, 2) as manager:
            assert manager.checkpoints == [str(tmp_path / folder / f"ckpt-{number}") for number in (2, 3)]
            assert manager.restore_or_initialize() == manager.latest_checkpoint
        assert graph.latest_checkpoint(tmp_path / folder) == str(tmp_path / folder / "ckpt-3")


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_failed_does_not_count_for_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def save_and_wait(manager: graph.CheckpointManager) -> None:
        manager.save()
        manager.wait_until_finished()

    checkpoint, step = graph.Checkpoint(w=np.zeros(3)), graph.Value(0)
    options: dict[str, Any] = {"step_counter": step, "checkpoint_interval": 10, "background": background}
    with graph.CheckpointManager(checkpoint, tmp_path, None, **options) as manager:
        save_and_wait(manager)
        step.assign(10)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            with pytest.raises(hf.HoldfastError, match="no space"):
                save_and_wait(manager)
        assert background or checkpoint.save_counter == 1
        saved = []
        for at in (11, 12, 20, 21):  # the save of step 10 failed
            step.assign(at)
            saved.append(manager.save() is not None)
        assert saved == [True, False, False, True]


@pytest.mark.parametrize("hours", [None, 1.0])
def test_the_error_of_a_save_in_the_background_is_raised_by_the_next_which_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float | None
) -> None:
    once = iter([full])
    fsync = os.fsync
    with graph.CheckpointManager(graph.Checkpoint(w=np.zeros(3)), tmp_path, 2, hours, background=True) as manager:
        manager.save()
        manager.wait_until_finished()
        monkeypatch.setattr(os, "fsync", lambda descriptor: next(once, fsync)(descriptor))
        manager.save()
        with pytest.raises(hf.SaveFailedError, match="no space"):
            manager.save()
        manager.wait_until_finished()
        assert numbers(manager.checkpoints) == [1, 3]


def test_checkpoints_iterator(place: str) -> None:
    checkpoint = graph.Checkpoint(step=0)
    calls = []

    def save_twice_then_stop() -> bool:
        calls.append(1)
        if len(calls) > 2:
            return True
        checkpoint.save(f"{place}/run")
        return False

    found = graph.checkpoints_iterator(place, timeout=0, timeout_fn=save_twice_then_stop, poll_secs=0.001)
    assert list(found) == [f"{place}/run-1", f"{place}/run-2"]
    assert list(graph.checkpoints_iterator(place, timeout=0)) == [f"{place}/run-2"]
