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


def check(mine: Any, coordinator: Coordinator) -> None:
    hf.processes.check_replicas(mine, coordinator=coordinator, timeout_secs=10)


def checked(count: int, change: Change) -> list[Any]:
    """What the check says to each process if process 1 has another tree."""

    def run(coordinator: Coordinator) -> None:
        mine = tree()
        if coordinator.process_index == 1:
            change(mine)
        check(mine, coordinator)

    return together(count, run)


def test_the_same_everywhere() -> None:
    assert checked(3, lambda mine: None) == [None] * 3
    hf.processes.check_replicas(tree())
    first, second = checked(2, lambda mine: mine.update(w=object()))
    assert isinstance(second, hf.errors.UnsupportedLeafError)
    assert isinstance(first, hf.errors.PeerFailedError)


ANOTHER_TREE = "process 1 has another tree than process 0"
DIFFERENT: dict[str, tuple[Change, str]] = {
    "an element": (lambda mine: mine["w"].__setitem__((2, 3), -1), "w"),
    "an element without numpy's name": (lambda mine: mine["bf"].__setitem__((0, 1), 0), "bf"),
    "a word": (lambda mine: mine.update(words=np.array(["a", "bd"])), "words"),
    "a number": (lambda mine: mine.update(step=8), "step"),
    "a text": (lambda mine: mine.update(note="other"), "note"),
    "another leaf": (lambda mine: mine.update(more=1), ANOTHER_TREE),
    "another shape": (lambda mine: mine.update(w=np.zeros((4, 3))), ANOTHER_TREE),
    "another kind": (lambda mine: mine.update(step="7"), ANOTHER_TREE),
}


@pytest.mark.parametrize(("change", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_named_everywhere(change: Change, said: str) -> None:
    line = said if said == ANOTHER_TREE else f"{said}: process 0 has other values than process 1"
    for result in checked(3, change):
        assert isinstance(result, hf.TreeMismatchError)
        assert result.differences == (line,)


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

    def differences(coordinator: Coordinator) -> tuple[str, ...]:
        try:
            check({"w": coordinator.process_index}, coordinator)
        except hf.TreeMismatchError as error:
            return error.differences
        return ()

    monkeypatch.setattr(replicas, "describe", describe)
    expected = () if altered is None else ("w: process 2 has other values than process 3",)
    assert together(4, differences) == [expected] * 4


def test_many_differences_are_cut_short() -> None:
    leaves = [f"leaf{number:03}" for number in range(50)]
    [first, *_] = together(12, lambda one: check(dict.fromkeys(leaves, one.process_index), one))
    assert len(first.differences) == 21
    assert (
        first.differences[0] == "leaf000: process 0 has other values than processes 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"
    )
    assert first.differences[-1] == "and 30 more"
