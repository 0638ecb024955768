"""A component that the program makes later is made by the restore, if None is in its place at the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler


class Coach(Checkpointable):
    def __init__(self) -> None:
        self.advice = np.zeros(1)


class Player(Checkpointable):
    def __init__(self, size: int = 2, coach: Coach | None = None, way: Any = None) -> None:
        if size < 0:
            raise ValueError("a size is not negative")
        self.weights, self.coach = np.zeros(size), coach
        self.second: Player | None = None


class Team(Checkpointable):
    """Makes its player in the first round."""

    def __init__(self) -> None:
        self.coach, self.player, self.rounds = Coach(), None, 0
        self.named = True

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        found = [("coach", self.coach), ("player", self.player)]
        return [(name, one) for name, one in found if one is not None and self.named]

    __untracked__ = ("named",)

    def start(self, **options: Any) -> Team:
        self.player: Any = Player(**options)
        self.player.weights += 3
        self.rounds = 1
        return self


def with_a_callback(team: Team, place: str) -> Team:
    with hf.CheckpointCallback(f"{place}/run", save_interval_steps=1) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(Team())
        vars(state).update(vars(team))
        for step in (1, 2):
            checkpoint.on_step(step, state)
    with hf.CheckpointCallback(f"{place}/run") as checkpoint:
        found, step = checkpoint.restore_or_initialize(Team())
        assert step == 2
    return found


def with_a_manager(team: Team, place: str) -> Team:
    with hf.CheckpointManager(f"{place}/managed", hf.Checkpointer(ComponentCheckpointHandler())) as manager:
        manager.save(1, team)
        found: Team = manager.restore(1, Team())
    return found


def in_place(team: Team, place: str) -> Team:
    found = Team()
    assert found.restore_from_path(team.save_to_path(f"{place}/tree"), strict=True).complete
    return found


def made(team: Team, place: str) -> Team:
    return Team.from_checkpoint(team.save_to_path(f"{place}/tree"), strict=True)


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("restored", [in_place, made, with_a_manager, with_a_callback])
def test_a_component_in_the_place_of_none_is_made_of_the_saved_class(
    restored: Callable[[Team, str], Team], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = restored(Team().start(size=3), place)
    assert type(found.player) is Player
    assert found.player.weights.tolist() == [3, 3, 3]
    assert found.rounds == 1
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_it_gets_the_components_that_the_program_has(place: str) -> None:
    team = Team()
    team.start(coach=team.coach)
    team.player.second = Player(1)
    found = in_place(team, place)
    assert found.player.coach is found.coach
    assert type(found.player.second) is Player, "also a component of one that was made"


@pytest.mark.parametrize(
    ("options", "change", "why"),
    [
        ({"way": os.getcwd}, {}, "which is not allowed"),
        ({"way": open(os.devnull, "rb")}, {}, "these arguments of Player were not kept"),  # noqa: SIM115
        ({}, {"size": -1}, "a size is not negative"),
    ],
    ids=["a function that is not allowed", "an argument that was not kept", "a constructor that fails"],
)
def test_what_cannot_be_made_stays_none_with_a_warning(
    options: dict[str, Any], change: dict[str, Any], why: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    team = Team().start(**options)
    team.player.get_ctor_args_and_kwargs = lambda: ((), {**options, **change})
    team.player.__untracked__ = ("get_ctor_args_and_kwargs",)
    found = Team()
    report = found.restore_from_path(team.save_to_path(place))
    assert found.player is None
    assert (report.unused, report.missing_values) == (("player",), ("(root): player",))
    assert f"{place}: player stays None in the program: " in caplog.text
    assert why in caplog.text


def test_what_the_program_does_not_name_stays_none(place: str) -> None:
    found = Team()
    found.named = False
    assert "player" in found.restore_from_path(Team().start().save_to_path(place)).unused
    assert found.player is None


def test_a_restore_that_fails_takes_it_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = Team().start(size=3).save_to_path(place), Team()
    monkeypatch.setattr(Player, "set_state", lambda self, state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.restore_from_path(path)
    assert (found.player, found.rounds) == (None, 0)
