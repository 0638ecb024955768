"""Checkpoints of 0.1.0 name classes of holdfast by modules that have moved: they restore, and are made anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import graph
from holdfast.components import Checkpointable


class Team(Checkpointable):
    """A component whose constructor takes a class, and another component."""

    def __init__(self, kind: type, inner: Checkpointable) -> None:
        self.kind_name, self.inner = kind.__name__, inner


@contextlib.contextmanager
def names_of_then() -> Iterator[None]:
    """Names the classes as in 0.1.0."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (graph.TrackedDict, graph.TrackedList, Checkpointable):
            patch.setattr(kind, "__module__", kind.__module__.replace(".integrations.", ".engine."))
        yield


@pytest.mark.parametrize("kind", [dict, graph.TrackedDict])
def test_containers_of_a_graph(tmp_path: Path, kind: Any) -> None:
    """Containers that the program does not have yet are made of their names."""
    notes = graph.TrackedDict({"a": [1, 2], "b": graph.TrackedDict({"c": graph.TrackedList([3, "t"])})})
    with names_of_then():
        path = graph.Checkpoint(notes=notes).save(tmp_path / "x")
    assert "holdfast.engine.graph.tracked.TrackedList" in next(Path(path).rglob("graph.json")).read_text()

    again = graph.Checkpoint(notes=kind())
    again.restore(path).assert_consumed()

    assert again.notes == {"a": [1, 2], "b": {"c": [3, "t"]}}
    assert graph.load_checkpoint(path).graph.type_of("notes").endswith("graph.tracked.TrackedDict")


def test_components_of_the_base_class(tmp_path: Path) -> None:
    with names_of_then():
        path = Checkpointable().save_to_path(tmp_path / "x")
    assert (
        "holdfast.engine.components.component:Checkpointable" in (Path(path) / "state" / "component.json").read_text()
    )
    assert type(Checkpointable.from_checkpoint(path)) is Checkpointable


def test_arguments_of_constructors(tmp_path: Path) -> None:
    with names_of_then():
        path = Team(graph.TrackedDict, Checkpointable()).save_to_path(tmp_path / "x")
    assert "holdfast.engine.graph.tracked:TrackedDict" in (Path(path) / "state" / "component.json").read_text()
    again = Team.from_checkpoint(path, allowed=[graph.TrackedDict])
    assert (again.kind_name, type(again.inner)) == ("TrackedDict", Checkpointable)
