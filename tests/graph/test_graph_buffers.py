"""Replay buffers: a deque of arrays is empty in a program that starts anew, and gets the arrays that were saved."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tests.equality import assert_same

import holdfast as hf
from holdfast import graph


def filled(count: int) -> deque[Any]:
    """Transitions, each of which begins with the very array that the one before ended with."""
    buffer: deque[Any] = deque(maxlen=8)
    before = np.zeros(3, np.float32)
    for number in range(count):
        after = np.full(3, number + 1, np.float32)
        buffer.append((before, number, 0.5 * number, after, number % 2 == 0))
        before = after
    return buffer


BUFFERS: dict[str, deque[Any]] = {
    "arrays": deque([np.ones(3), np.arange(4, dtype=np.int16)], maxlen=8),
    "without a limit": deque([np.ones(3)]),
    "transitions": filled(5),
    "dictionaries": deque([{"obs": np.ones((2, 2)), "reward": 0.5}, {"obs": np.zeros((2, 2)), "reward": 1.0}], 8),
    "tensors": deque([torch.ones(2), torch.arange(3)], maxlen=8),
    "bfloat16": deque([torch.ones(2, dtype=torch.bfloat16), np.ones(2, ml_dtypes.bfloat16)], maxlen=8),
    "no dimensions": deque([np.array(1.5), np.array(True)], maxlen=8),
    "no elements": deque([np.zeros((0, 3), np.uint8)], maxlen=8),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_come_back(place: str, name: str) -> None:
    saved = BUFFERS[name]
    path = graph.Checkpoint(buffer=saved, step=1).write(f"{place}/x")
    live: deque[Any] = deque(maxlen=saved.maxlen)
    checkpoint = graph.Checkpoint(buffer=live, step=0)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.buffer is live
    assert live.maxlen == saved.maxlen
    assert_same(list(live), list(saved))
    again = graph.Checkpoint(buffer=deque(maxlen=saved.maxlen), step=0)
    again.restore(checkpoint.write(f"{place}/again")).assert_consumed()
    assert_same(list(again.buffer), list(saved))


def test_arrays_in_two_places_stay_one_object(place: str) -> None:
    path = graph.Checkpoint(buffer=filled(5)).write(f"{place}/x")
    checkpoint = graph.Checkpoint(buffer=deque(maxlen=8))
    checkpoint.restore(path).assert_consumed()
    buffer = checkpoint.buffer
    assert all(buffer[number][3] is buffer[number + 1][0] for number in range(4))
    buffer[0][3][:] = 7.0  # the program owns them
    assert buffer[1][0].tolist() == [7.0] * 3


def held_outside() -> dict[str, Any]:
    buffer = filled(2)
    return {"buffer": buffer, "last": buffer[-1][3]}


def of_an_optimizer() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    return {"buffer": deque([weight], maxlen=8), "optimizer": torch.optim.SGD([weight])}


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (held_outside, lambda: {"buffer": deque(maxlen=8), "last": np.zeros(3, np.float32)}),
        (of_an_optimizer, lambda: {"buffer": deque(maxlen=8)}),
        (lambda: {"buffer": deque([jnp.ones(2)], maxlen=8)}, lambda: {"buffer": deque(maxlen=8)}),
        (lambda: {"buffer": filled(2)}, lambda: {"buffer": deque([filled(1)[0]], maxlen=8)}),
        (lambda: {"buffer": [np.ones(2)]}, lambda: {"buffer": []}),
    ],
    ids=["held outside", "a parameter", "jax", "not empty", "a list"],
)
def test_what_is_more_than_its_values_is_missing(place: str, saved: Any, live: Any) -> None:
    path = graph.Checkpoint(**saved()).write(f"{place}/x")
    status = graph.Checkpoint(**live()).read(path).expect_partial()
    with pytest.raises(hf.errors.UnmatchedObjectsError, match=r"in the checkpoint, not in the program .*\n?.*buffer/"):
        status.assert_consumed()


def test_a_buffer_that_is_too_short(place: str) -> None:
    path = graph.Checkpoint(buffer=filled(5), step=1).write(f"{place}/x")
    checkpoint = graph.Checkpoint(buffer=deque(maxlen=3), step=0)
    with pytest.raises(hf.TreeMismatchError, match="buffer: expected at most 3 elements"):
        checkpoint.restore(path)
    assert (len(checkpoint.buffer), checkpoint.step) == (0, 0)


def test_a_buffer_that_is_left_out(place: str) -> None:
    path = graph.Checkpoint(buffer=filled(2), step=1).write(f"{place}/x")
    checkpoint = graph.Checkpoint(buffer=deque(maxlen=8), step=0)
    checkpoint.read(path, exclude="buffer/**").assert_consumed()
    assert (len(checkpoint.buffer), checkpoint.step) == (0, 1)
