"""Graphs with many objects, and objects that cannot take what was saved for them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import graph
from holdfast.engine.errors import OptionError, TreeMismatchError
from holdfast.engine.graph import views


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes every object that is looked at from now on."""
    seen: list[Any] = []
    look = views.look

    def noted(value: Any, position: Any) -> Any:
        seen.append(value)
        return look(value, position)

    for module in ("matching", "walk", "views"):
        monkeypatch.setattr(importlib.import_module(f"holdfast.engine.graph.{module}"), "look", noted)
    return seen


def _to_node(holder: Any, number: int, value: Any) -> None:
    setattr(holder.of, f"k{number}", value)


def _to_dict(holder: Any, number: int, value: Any) -> None:
    holder.of[f"k{number}"] = value


def _to_list(holder: Any, _: int, value: Any) -> None:
    holder.of.append(value)


@pytest.mark.parametrize(
    ("saved", "empty", "attach"),
    [
        (lambda arrays: graph.Node(**arrays), graph.Node, _to_node),
        (lambda arrays: arrays, dict, _to_dict),
        (lambda arrays: list(arrays.values()), list, _to_list),
    ],
    ids=["node", "dict", "list"],
)
def test_what_is_attached_is_all_that_is_looked_at(
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    saved: Callable[[Any], Any],
    empty: Callable[[], Any],
    attach: Callable[[Any, int, Any], None],
) -> None:
    count = 60
    path = graph.Checkpoint(of=saved({f"k{i}": np.full(2, i) for i in range(count)})).write(place)
    restored = graph.Checkpoint()
    status = restored.read(path)
    restored.of = empty()
    arrays = [np.full(2, -1) for _ in range(count)]
    seen = _looks(monkeypatch)
    for number, array in enumerate(arrays):
        attach(restored, number, array)
        assert array.tolist() == [number, number]
    assert len(seen) < 4 * count
    status.assert_consumed()


def test_keys_that_need_their_neighbours(place: str) -> None:
    path = graph.Checkpoint(of={1: np.ones(1), "1": np.full(1, 2.0), "a.b": np.full(1, 3.0)}).write(place)
    restored = graph.Checkpoint()
    status = restored.read(path)
    restored.of = {}
    restored.of[1], restored.of["1"], restored.of["a.b"] = np.zeros(1), np.zeros(1), np.zeros(1)
    status.try_complete().assert_consumed()
    assert [float(value[0]) for value in restored.of.values()] == [1.0, 2.0, 3.0]


def test_reading_a_value_reads_no_other(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = graph.Checkpoint(of={f"k{i}": np.full(2, i) for i in range(50)}).write(place)
    reader = graph.load_checkpoint(path)
    inside: list[Any] = []
    monkeypatch.setattr("holdfast.engine.graph.stored._inside", inside.append)
    assert all(reader.get_tensor(f"of/k{i}")[0] == i for i in range(50))
    assert inside == []
    assert not reader.has_tensor("")


def test_two_objects_for_one_are_warned_about(place: str, caplog: pytest.LogCaptureFixture) -> None:
    shared = np.ones(2)
    path = graph.Checkpoint(a=shared, b=shared).write(place)
    one, other = np.zeros(2), np.zeros(2)
    restored = graph.Checkpoint(a=one, b=other)
    with caplog.at_level(logging.WARNING, "holdfast"):
        status = restored.read(path)
        status.try_complete()
    assert (one[0], other[0]) == (1.0, 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "a is one object in the checkpoint, but a and b are two; only the first of them is restored"
    ]
    assert status.report.conflicts == (("a", "a", "b"),)


def test_one_object_for_two_is_warned_about(place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = graph.Checkpoint(weights=np.ones(2), averages=np.full(2, 5.0)).write(place)
    both = np.zeros(2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        graph.Checkpoint(weights=both, averages=both).read(path)
    assert both.tolist() == [1.0, 1.0]
    assert [record.getMessage() for record in caplog.records] == [
        "weights and averages are one object, and two in the checkpoint; it gets the value of the first"
    ]


def test_tensors_whose_elements_share_memory(place: str) -> None:
    path = graph.Checkpoint(a=torch.ones(3), b=torch.ones(3)).write(place)
    first = torch.zeros(3)
    with pytest.raises(TreeMismatchError, match="b: elements of this tensor share memory"):
        graph.Checkpoint(a=first, b=torch.zeros(1).expand(3)).read(path)
    assert not first.any()


def test_what_a_save_restores_is_told(place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = graph.Checkpoint(of={"a": np.ones(2), "b": np.ones(2)}).write(f"{place}-1")
    restored = graph.Checkpoint(of={"a": np.zeros(2)})
    restored.read(path)
    restored.of["b"] = np.full(2, 7.0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restored.write(f"{place}-2")
    (record,) = caplog.records
    assert "objects that were built since got their values" in record.getMessage()
    assert "restored (1): of/b" in record.getMessage()


def test_containers_that_restore_though_attached_before(place: str) -> None:
    path = graph.Checkpoint(of={"a": np.ones(2), "b": np.ones(2)}).write(place)
    restored = graph.Checkpoint(of=graph.TrackedDict({"a": np.zeros(2)}))
    restored.read(path)
    restored.of["b"] = np.zeros(2)
    assert restored.of["b"].tolist() == [1.0, 1.0]


def test_names_of_the_holder_itself_are_taken() -> None:
    with pytest.raises(OptionError, match="_holdfast_pending"):
        graph.Node(_holdfast_pending=1)
