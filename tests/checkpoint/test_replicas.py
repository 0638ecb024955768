"""Processes that do not hold the same of what is taken to be the same everywhere; played by threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.checkpoint import replicas
from holdfast.engine.distributed.coordinators import Coordinator
from holdfast.engine.pytree import ArrayLeaf, Part, Piece

Change = Callable[[dict[str, Any]], Any]


def tree() -> dict[str, Any]:
    return {
        "w": np.arange(12.0).reshape(3, 4),
        "bf": np.ones((2, 2), ml_dtypes.bfloat16).T,
        "words": np.array(["a", "bc"]),
        "empty": [np.zeros((0, 4))],
        "step": 7,
        "note": "text",
    }


def checked(count: int, change: Change, only: int = 1) -> list[Any]:
    def run(coordinator: Coordinator) -> None:
        mine = tree()
        if coordinator.process_index == only:
            change(mine)
        hf.processes.check_replicas(mine, coordinator=coordinator, timeout_secs=10)

    return together(count, run)


def test_the_same_everywhere() -> None:
    assert checked(3, lambda mine: None) == [None] * 3
    hf.processes.check_replicas(tree())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(lambda mine: mine["w"].__setitem__((2, 3), -1), "w", id="an element"),
        pytest.param(lambda mine: mine["bf"].__setitem__((0, 1), 0), "bf", id="an element without numpy's name"),
        pytest.param(lambda mine: mine.update(words=np.array(["a", "bd"])), "words", id="a word"),
        pytest.param(lambda mine: mine.update(step=8), "step", id="a number"),
        pytest.param(lambda mine: mine.update(note="other"), "note", id="a text"),
    ],
)
def test_what_differs_is_named_everywhere(change: Change, name: str) -> None:
    for result in checked(3, change):
        assert isinstance(result, hf.TreeMismatchError)
        assert result.differences == (f"{name}: process 0 has other values than process 1",)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda mine: mine.update(more=1), id="another leaf"),
        pytest.param(lambda mine: mine.update(w=np.zeros((4, 3))), id="another shape"),
        pytest.param(lambda mine: mine.update(step="7"), id="another kind"),
    ],
)
def test_trees_that_differ(change: Change) -> None:
    for result in checked(2, change):
        assert isinstance(result, hf.TreeMismatchError)
        assert result.differences == ("process 1 has another tree than process 0",)


def test_a_process_that_cannot_take_part() -> None:
    first, second = checked(2, lambda mine: mine.update(w=object()))
    assert isinstance(second, hf.errors.UnsupportedLeafError)
    assert isinstance(first, hf.errors.PeerFailedError)


@pytest.mark.parametrize("altered", [None, 2, 3])
def test_parts_are_compared_among_those_who_hold_them(monkeypatch: pytest.MonkeyPatch, altered: int | None) -> None:
    """Rows 0 to 3 on processes 0 and 2, in two pieces; rows 4 and 5 on process 1 alone, and 6 to 9 on 2 and 3."""
    parts = (Part((0, 0), (4, 3), (0, 2)), Part((4, 0), (2, 3), (1,)), Part((6, 0), (4, 3), (2, 3)))
    values = np.arange(30).reshape(10, 3)

    def describe(names: list[str], found: list[Any]) -> list[ArrayLeaf]:
        [process] = found
        mine = values.copy()
        if process == altered:
            mine[-1] = 0
        rows = {0: [(0, 1), (1, 4)], 1: [(4, 6)], 2: [(0, 4), (6, 10)], 3: [(6, 10)]}[process]
        pieces = [Piece((low, 0), mine[low:high]) for low, high in rows]
        return [ArrayLeaf(values.dtype, (10, 3), pieces, True, {"kind": "numpy"}, parts)]

    monkeypatch.setattr(replicas, "describe", describe)
    results = together(
        4, lambda one: hf.processes.check_replicas({"w": one.process_index}, coordinator=one, timeout_secs=10)
    )
    for result in results:
        if altered is None:
            assert result is None
        else:
            assert isinstance(result, hf.TreeMismatchError)
            assert result.differences == ("w: process 2 has other values than process 3",)


def test_many_differences_are_cut_short() -> None:
    def run(coordinator: Coordinator) -> None:
        mine = {f"leaf{number:03}": coordinator.process_index for number in range(50)}
        hf.processes.check_replicas(mine, coordinator=coordinator, timeout_secs=10)

    [first, *_] = together(12, run)
    assert len(first.differences) == 21
    assert (
        first.differences[0] == "leaf000: process 0 has other values than processes 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"
    )
    assert first.differences[-1] == "and 30 more"
