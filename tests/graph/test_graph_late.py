"""Random graphs whose objects are attached one by one, some before the restore and the others after it."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import graph
from holdfast.engine.storage import as_location

HOLDERS: dict[str, Any] = {"node": graph.Node, "dict": graph.TrackedDict, "list": graph.TrackedList}
KINDS = (*HOLDERS, "numpy", "value", "int")
KEYS = ("a", "b.c", "d/e", "slots", "3")

Edge = tuple[int, str, int]
"""A holder, a key, and the object under it; the place in a list is the number of edges before it."""


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[Edge]]:
    """The kinds of some objects, the first of which is a node, and edges in the order in which they are made."""
    kinds = ["node", *draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))]
    edges = []
    for holder, kind in enumerate(kinds):
        for key in draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True)) if kind in HOLDERS else ():
            held = draw(st.integers(1, len(kinds) - 1))
            if kind == "node" or kinds[held] != "int":  # those are restored before the program adds them
                edges.append((holder, key, held))
    return kinds, draw(st.permutations(edges))


def make(kinds: list[str], blank: bool) -> list[Any]:
    made: list[Any] = []
    for number, kind in enumerate(kinds):
        value = 0 if blank else number + 1
        leaves = {"numpy": np.full(2, value), "value": graph.Value(value), "int": value}
        made.append(HOLDERS[kind]() if kind in HOLDERS else leaves[kind])
    return made


def attach(objects: list[Any], edge: Edge) -> None:
    holder, key, held = edge
    if isinstance(objects[holder], graph.Node):
        setattr(objects[holder], key, objects[held])
    elif isinstance(objects[holder], dict):
        objects[holder][key] = objects[held]
    else:
        objects[holder].append(objects[held])


def check(objects: list[Any], edges: list[Edge]) -> None:
    """Makes sure that everything that can be reached has its value, and is the object that was attached."""
    reached = [0]
    for number in reached:
        place = 0
        for holder, key, held in edges:
            if holder != number:
                continue
            parent = objects[number]
            found = (
                getattr(parent, key)
                if isinstance(parent, graph.Node)
                else parent[key if isinstance(parent, dict) else place]
            )
            place += 1
            if isinstance(objects[held], int):
                assert found == held + 1
                continue
            assert found is objects[held]
            if isinstance(found, np.ndarray):
                assert found.tolist() == [held + 1] * 2
            elif isinstance(found, graph.Value):
                assert found.value == held + 1
            if held not in reached:
                reached.append(held)


@given(graphs(), st.integers(0, 20))
@settings(deadline=None, max_examples=50)
def test_random_graphs_attached_one_by_one(spec: tuple[list[str], list[Edge]], before: int) -> None:
    kinds, edges = spec
    place = f"memory://tests/{uuid.uuid4().hex}"
    saved, live = make(kinds, blank=False), make(kinds, blank=True)
    for edge in edges:
        attach(saved, edge)
    path = graph.Checkpoint(top=saved[0]).write(place)
    for edge in edges[:before]:
        attach(live, edge)
    checkpoint = graph.Checkpoint(top=live[0])
    status = checkpoint.read(path, partial=True)
    for edge in edges[before:]:
        attach(live, edge)
    assert status.report.complete, str(status.report)
    check(live, edges)
    status.assert_consumed()
    checkpoint.write(f"{place}/again")
    as_location(place).remove_tree()


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
