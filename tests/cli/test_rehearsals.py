"""What is seen and changed inside of a program that is rehearsed; ``tests/cli/test_drill.py`` has whole programs."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.cli.drill.plan import DrillPlan
from holdfast.cli.drill.rehearsal import Rehearsal
from holdfast.engine import fingerprints
from holdfast.engine.fingerprints import STATELESS, Fingerprints, facts
from holdfast.engine.manager import read_events
from holdfast.engine.observer import Observer, Point


@pytest.fixture(autouse=True)
def _no_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of other tests, which are hundreds in a whole run, are no part of the program."""
    own = {name: module for name, module in sys.modules.items() if name == __name__ or not name.startswith("tests.")}
    monkeypatch.setattr(fingerprints, "sys", SimpleNamespace(modules=own))


class Batches:
    """An iterator of the program's own, with its position in an attribute."""

    __slots__ = ("__dict__", "drawn")

    def __init__(self) -> None:
        self.drawn = 0

    def __next__(self) -> int:
        self.drawn += 1
        return self.drawn


class Model:
    """An object that holds what steps depend on."""

    def __init__(self, thing: Any) -> None:
        self.parts = {"inner": [thing]}


use = importlib.import_module


@pytest.mark.parametrize(
    ("make", "advance", "kind"),
    [
        (lambda: random.Random(0), lambda it: it.random(), "generator"),
        (lambda: np.random.default_rng(0), lambda it: it.random(), "generator"),
        (lambda: np.random.Generator(np.random.MT19937(0)), lambda it: it.random(), "generator"),
        (lambda: np.random.RandomState(0), lambda it: it.rand(), "generator"),
        (lambda: np.random.RandomState(np.random.PCG64(0)), lambda it: it.rand(), "generator"),
        (lambda: use("torch").Generator(), lambda it: use("torch").rand((), generator=it), "generator"),
        (
            lambda: {"key": use("jax").random.key(0)},
            lambda it: it.update(key=use("jax").random.split(it["key"])[0]),
            "generator",
        ),
        (lambda: use("flax.nnx").Rngs(0), lambda it: it(), "generator"),
        (Batches, next, "position"),
        (lambda: (number for number in (1, 2, 3)), next, "position"),
        (lambda: iter([1, 2, 3]), next, "position"),
        (lambda: iter(range(3)), next, "position"),
        (lambda: zip([1, 2], [3, 4], strict=True), next, "position"),
        (lambda: itertools.cycle([1, 2]), next, "position"),
        (lambda: {"count": 1}, lambda it: it.update(count=2), "value"),
        (
            lambda: {"average": use("jax.numpy").asarray(0.5)},
            lambda it: it.update(average=it["average"] * 2),
            "value",
        ),
        (lambda: {"scale": np.float32(1)}, lambda it: it.update(scale=np.float32(2)), "value"),
        (lambda: np.ones(()), lambda it: it.fill(2), "value"),
        (lambda: use("torch").tensor(1.0), lambda it: it.add_(1), "value"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda it: it, Model], ids=["a variable", "in an object"])
def test_what_changes_is_seen(
    make: Callable[[], Any], advance: Callable[[Any], object], kind: str, wrap: Callable[[Any], Any]
) -> None:
    source = make()
    held = wrap(source)
    before, again = facts(), facts()
    assert before == again, "a look changes nothing"
    advance(source)
    after = facts()
    names = {name for name, fact in after.items() if before.get(name, fact)[3] != fact[3]}
    assert {after[name][0] for name in names} >= {kind}, (held, names)
    assert all(name.startswith(("source", "held")) for name in names)
    assert {after[name][2] for name in names} == {"test_rehearsals.py, in test_what_changes_is_seen"}


def test_the_generators_of_modules_and_of_the_operating_system_are_seen() -> None:
    source = random.SystemRandom()
    before = facts()
    assert before["source"][:2] + before["source"][3:] == ("generator", type(source).__name__, STATELESS)
    random.random()
    np.random.rand()
    changed = {name for name, fact in facts().items() if before.get(name) != fact}
    assert {"the random module", "numpy.random"} <= changed


def test_objects_that_cannot_be_looked_at_are_left_out() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    hostile, loop = Hostile(), []  # type: ignore[var-annotated]
    loop.append(loop)
    number = 7
    assert facts()["number"][3] == str(number)
    assert len(loop) == 1, hostile


def test_only_what_has_changed_is_reported() -> None:
    fingerprints, step = Fingerprints(), 1
    assert "step" in fingerprints.changes()
    step += 1
    changed = fingerprints.changes()
    assert [name for name in changed if name.isidentifier()] == ["step"]  # and what pytest notes of the line before
    del step
    changed = fingerprints.changes()
    assert {name: fact for name, fact in changed.items() if name.isidentifier()} == {"step": None}


# ---- the observer

Rehearse = Callable[[DrillPlan], tuple[Rehearsal, list[tuple[int, int]]]]


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Makes the observer that carries out a plan.

    The second value is the signals that it sends, each with the number of steps before.
    """

    def begin(plan: DrillPlan) -> tuple[Rehearsal, list[tuple[int, int]]]:
        plan.write(tmp_path)
        rehearsal = Rehearsal(tmp_path, Observer())
        sent: list[tuple[int, int]] = []

        def end(status: int) -> None:
            if not any(number < 0 for _, number in sent):  # once: the process ends here
                sent.append((len(rehearsal._steps), -status))

        module = "holdfast.cli.drill.rehearsal.os"
        monkeypatch.setattr(f"{module}.kill", lambda _, number: sent.append((len(rehearsal._steps), number)))
        monkeypatch.setattr(f"{module}._exit", end)
        return rehearsal, sent

    return begin


def save_all(
    directory: Path,
    steps: int,
    observer: Rehearsal,
    options: hf.CheckpointManagerOptions | None = None,
    processes: int = 1,
) -> list[int]:
    """Saves steps one by one; returns those that are left."""
    with hf.CheckpointManager(directory, options=options, observer=observer) as manager:
        observer.joins(0, processes)
        for step in range(1, steps + 1):
            manager.save(step, {"w": np.full(100, step)})
            manager.wait_until_finished()
        return manager.all_steps()


def test_a_save_is_in_progress_before_its_thread_begins(tmp_path: Path) -> None:
    """Otherwise a drill would interrupt the program, or end it, without the save of a busy machine."""

    class Noting(Observer):
        def __init__(self) -> None:
            self.points: list[tuple[str, bool]] = []

        def reached(self, point: Point, step: int | None) -> None:
            self.points.append((point, threading.current_thread() is threading.main_thread()))

    noting = Noting()
    with hf.CheckpointManager(tmp_path, observer=noting) as manager:
        manager.save(1, {"w": np.zeros(3)})
        manager.wait_until_finished()
    assert [point for point in noting.points if point[0] in ("saving", "committed")] == [
        ("saving", True),
        ("committed", False),
    ]


@pytest.mark.parametrize(
    ("plan", "saved"),
    [
        ({"save": (2, 3)}, [2, 3, 5, 10]),
        ({"save_places": (1,)}, [1, 5, 10]),
        ({"last": 9}, [5, 9, 10]),
        ({"count": 9}, [5, 9, 10]),
        ({"count": 20, "dense_bytes": 1 << 30}, list(range(1, 11))),
        ({"count": 20, "dense_bytes": 900}, [1, 5, 10]),  # one checkpoint shows that they are too large
    ],
)
@pytest.mark.parametrize(
    "limits",
    [{"max_to_keep": 1, "save_interval_steps": 5}, {"save": hf.Every(steps=5, keep=1)}],
    ids=["options", "policy"],
)
def test_more_steps_are_saved_and_all_are_kept(
    tmp_path: Path, rehearse: Rehearse, plan: dict[str, Any], saved: list[int], limits: dict[str, Any]
) -> None:
    observer, _ = rehearse(DrillPlan(name="a", **plan))
    options = hf.CheckpointManagerOptions(**limits, mirror=tmp_path / "mirror")
    assert save_all(tmp_path / "run", 10, observer, options) == saved
    assert not (tmp_path / "mirror").exists()


AT_STEP_2: dict[str, Any] = {"point": "step", "step": 2, "signal": 15}


@pytest.mark.parametrize(
    ("plan", "steps", "sent"),
    [
        ({"point": "step", "step": 3, "signal": 15}, 6, [(3, 15)]),
        ({"point": "commit", "step": 4, "signal": 15}, 6, [(4, 15)]),
        ({"point": "validation", "step": 3, "signal": 15}, 6, []),
        ({"point": "step", "step": 9, "signal": 15}, 6, []),
        (AT_STEP_2, 13, [(2, 15), (13, 9)]),  # a program that ignores the signal is killed
        ({"count": 4}, 4, []),
        ({"count": 4}, 5, [(4, -75)]),
        ({"last": 3}, 3, []),
        ({"last": 3}, 4, [(3, -75)]),
    ],
)
def test_which_signals_a_process_gets(
    tmp_path: Path, rehearse: Rehearse, plan: dict[str, Any], steps: int, sent: list[tuple[int, int]]
) -> None:
    observer, found = rehearse(DrillPlan(name="a", **plan))
    save_all(tmp_path / "run", steps, observer)
    assert found == sent


@pytest.mark.parametrize(("alone", "noted"), [(True, "ignored"), (False, "too_late")])
def test_a_program_that_ends_after_the_signal(tmp_path: Path, rehearse: Rehearse, alone: bool, noted: str) -> None:
    """Several processes may have agreed on a step that is later than the last of the drill."""
    observer, found = rehearse(DrillPlan(name="a", **AT_STEP_2, count=5))
    save_all(tmp_path / "run", 6, observer, processes=1 if alone else 2)
    assert [number for _, number in found[:2]] == [15, -75 if alone else 0]
    names = [event["event"] for event in read_events(tmp_path / "traces/a.jsonl")[0]]
    assert {"ignored", "too_late"} & set(names) == {noted}
