"""Random graphs of objects, with aliases and cycles, come back as they were, at once or as they are attached."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.equality import assert_same

import holdfast as hf
from holdfast import graph
from holdfast.engine.storage import as_location

HOLDERS: dict[str, Any] = {
    "node": graph.Node,
    "dict": dict,
    "list": list,
    "tracked dict": graph.TrackedDict,
    "tracked list": graph.TrackedList,
}
KEYS = ("a", "b.c", "d/e", "", "1", "slots", 1, -7, True)
Edge = tuple[int, Any, int]
"""A holder, a key, and the object under it; the place in a list is the number of edges before it."""
Graph = tuple[list[str], list[Edge]]
"""The kinds of some objects, the first of which is a node, and what they hold."""


@st.composite
def graphs(draw: st.DrawFn, kinds: tuple[str, ...], names: tuple[Any, ...] = KEYS) -> Graph:
    found = ["node", *draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=11))]
    edges = []
    for holder, kind in enumerate(found):
        # An immutable object can only hold objects that are made before it; all others may hold any object.
        first = holder + 1 if kind == "tuple" else 1
        if (kind == "tuple" or kind in HOLDERS) and first < len(found):
            keys = draw(st.lists(st.sampled_from(names), max_size=4, unique_by=lambda key: (type(key), key)))
            edges += [(holder, key, draw(st.integers(first, len(found) - 1))) for key in keys]
    return found, edges


def make(spec: Graph, blank: bool) -> list[Any]:
    """Makes the objects, with values that tell them apart, or blank ones; only tuples have what they hold."""
    kinds, edges = spec
    made: list[Any] = [None] * len(kinds)
    for number, kind in reversed(list(enumerate(kinds))):
        value = 0 if blank else number + 1
        leaves = {"numpy": np.full(2, value), "jax": jnp.full(2, value), "value": graph.Value(value)}
        leaves |= {"int": value, "text": str(value), "tuple": tuple(made[held] for held in held_by(number, edges))}
        made[number] = HOLDERS[kind]() if kind in HOLDERS else leaves[kind]
    return made


def held_by(number: int, edges: list[Edge]) -> list[int]:
    return [held for holder, _, held in edges if holder == number]


def attach(objects: list[Any], edges: list[Edge]) -> None:
    for number, key, held in edges:
        holder = objects[number]
        if isinstance(holder, graph.Node):
            setattr(holder, str(key), objects[held])
        elif isinstance(holder, dict):
            holder[key] = objects[held]
        elif isinstance(holder, list):
            holder.append(objects[held])


def same(one: Any, other: Any, seen: dict[int, Any], anew: bool = False) -> bool:
    """Whether two graphs have the same values, and the same aliases of objects that can change in place."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict | list) and anew:
        if id(one) in seen:
            return seen[id(one)] is other
        seen[id(one)] = other
    elif isinstance(one, graph.Node | dict | list | np.ndarray | graph.Value):
        if id(one) in seen or id(other) in seen:
            return seen.get(id(one)) is other and seen.get(id(other)) is one
        seen[id(one)], seen[id(other)] = other, one
    if isinstance(one, graph.Node):
        return same_items(vars(one), vars(other), seen)
    if isinstance(one, dict):
        return same_items(one, other, seen, anew)
    if isinstance(one, list | tuple):
        anew = anew or isinstance(one, tuple)
        return len(one) == len(other) and all(same(a, b, seen, anew) for a, b in zip(one, other, strict=True))
    if isinstance(one, graph.Value):
        return bool(one.value == other.value)
    return bool(np.array_equal(one, other)) if hasattr(one, "dtype") else bool(one == other)


def same_items(one: dict[Any, Any], other: dict[Any, Any], seen: dict[int, Any], anew: bool = False) -> bool:
    return list(one) == list(other) and all(same(one[key], other[key], seen, anew) for key in one)


def holds_itself(spec: Graph) -> bool:
    """Whether something immutable, or a dictionary or list inside of that, is a part of itself: such things are built
    anew, which is impossible around themselves."""
    kinds, edges = spec

    def reached(start: int, passed: tuple[str, ...]) -> set[int]:
        """Returns the objects that can be reached from one through objects of some kinds."""
        seen: set[int] = set()
        queue = [start]
        for number in queue:
            for held in set(held_by(number, edges)) - seen:
                seen.add(held)
                queue += [held] if kinds[held] in passed else []
        return seen

    built_anew = ("dict", "list", "tuple")
    tuples = [number for number, kind in enumerate(kinds) if kind == "tuple"]
    inside = {held for number in tuples for held in reached(number, built_anew) if kinds[held] in built_anew}
    return any(number in reached(number, (*built_anew, "node")) for number in tuples) or any(
        number in reached(number, built_anew) for number in inside
    )


def shared_in_tuples(spec: Graph) -> bool:
    """Whether a dictionary or list is inside of something immutable and elsewhere, too: then it is no longer shared."""
    kinds, edges = spec
    within = {
        held for holder, _, held in edges if kinds[holder] == "tuple" and kinds[held] in ("dict", "list", "tuple")
    }
    return any([held for _, _, held in edges].count(number) > 1 for number in within)


@given(graphs(("node", "dict", "list", "tuple", "numpy", "jax", "value", "int", "text")))
@settings(deadline=None, max_examples=60)
def test_random_graphs(spec: Graph) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    saved, blank = make(spec, blank=False), make(spec, blank=True)
    for objects in (saved, blank):
        attach(objects, spec[1])
    path = graph.Checkpoint(top=saved[0]).write(place)
    assert hf.verify(path).ok
    status = graph.Checkpoint(top=blank[0]).read(path)
    if not holds_itself(spec):
        status.assert_consumed()
        if not shared_in_tuples(spec):
            assert same(blank[0], saved[0], {})
    paths = [leaf.path for leaf in hf.describe(path)]
    assert len(paths) == len(set(paths))
    as_location(place).remove_tree()


TRACKED = graphs(("node", "tracked dict", "tracked list", "numpy", "value", "int"), ("a", "b.c", "d/e", "slots", "3"))


@given(TRACKED, st.integers(0, 20), st.data())
@settings(deadline=None, max_examples=50)
def test_random_graphs_attached_one_by_one(spec: Graph, before: int, data: st.DataObject) -> None:
    """Some objects are attached before the restore and the others after it."""
    kinds, edges = spec
    # Numbers in containers are restored before the program adds them.
    edges = [edge for edge in edges if kinds[edge[0]] == "node" or kinds[edge[2]] != "int"]
    edges = data.draw(st.permutations(edges))
    place = f"memory://tests/{uuid.uuid4().hex}"
    saved, live = make(spec, blank=False), make(spec, blank=True)
    attach(saved, edges)
    path = graph.Checkpoint(top=saved[0]).write(place)
    attach(live, edges[:before])
    checkpoint = graph.Checkpoint(top=live[0])
    status = checkpoint.read(path, partial=True)
    attach(live, edges[before:])
    assert status.report.complete, str(status.report)
    assert same(live[0], saved[0], {})
    status.assert_consumed()
    checkpoint.write(f"{place}/again")
    as_location(place).remove_tree()


PLAIN = st.recursive(
    st.none() | st.integers(-3, 3) | st.sampled_from(["", "a", b"b"]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(KEYS), below, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
@example([None, ((), {3: ()})], [7, [8]])
@settings(deadline=None, max_examples=60)
def test_random_plain_contents(value: Any, blank: Any) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    listed, mapped, single = [copy.deepcopy(value), 1], {"a.b": copy.deepcopy(value), "c": 1}, copy.deepcopy(value)
    contents = {"listed": listed, "mapped": mapped, "single": single}
    path = graph.Checkpoint(**contents).write(place)
    assert_same(hf.load(path), contents)
    checkpoint = graph.Checkpoint(listed=[blank], mapped={}, single=None)
    checkpoint.read(path).assert_consumed()
    assert_same(vars(checkpoint), contents)
    late = graph.Checkpoint()
    late.read(path, partial=True, rename={"listed": "moved/list", "mapped/a.b": "mapped/x"})
    late.moved, late.mapped = graph.Node(list=[]), {}
    assert (list(late.moved.list), dict(late.mapped)) == (listed, {"x": value, "c": 1})
    as_location(place).remove_tree()
