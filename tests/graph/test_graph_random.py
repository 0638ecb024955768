"""Random graphs of objects, with aliases and cycles, come back as they were, at once or as they are attached."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast as hf
from holdfast import graph
from holdfast.engine.storage import as_location

KINDS = ("node", "dict", "list", "tuple", "numpy", "jax", "value", "int", "text")
HOLDERS = ("node", "dict", "list", "tuple")
CONTAINERS = ("dict", "list", "tuple")
KEYS = ("a", "b.c", "d/e", "", "1", "slots", 1, -7, True)

Spec = list[tuple[str, list[tuple[Any, int]]]]
"""For every object its kind, and the keys and numbers of the objects it holds."""


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    count = draw(st.integers(2, 12))
    kinds = ["node", *(draw(st.sampled_from(KINDS)) for _ in range(count - 1))]
    found: Spec = []
    for number, kind in enumerate(kinds):
        held: list[tuple[Any, int]] = []
        if kind in HOLDERS:
            keys = draw(st.lists(st.sampled_from(KEYS), max_size=4, unique_by=lambda key: (type(key), key)))
            for key in keys:
                # An immutable object can only hold earlier ones; all others may hold any object.
                targets = range(number + 1, count) if kind == "tuple" else range(1, count)
                if len(targets):
                    held.append((key, draw(st.sampled_from(targets))))
        found.append((kind, held))
    return found


def build(spec: Spec, blank: bool) -> graph.Node:
    """Makes the objects, with values that tell them apart, or blank ones."""
    made: dict[int, Any] = {}

    def make(number: int) -> Any:
        kind, held = spec[number]
        if number in made:
            return made[number]
        fill = 0 if blank else number
        if kind == "tuple":
            made[number] = tuple([make(child) for _, child in held])
        elif kind in HOLDERS:
            made[number] = {"node": graph.Node, "dict": dict, "list": list}[kind]()
        else:
            leaves = {
                "numpy": np.full(2, fill),
                "jax": jnp.full(2, fill),
                "value": graph.Value(fill),
                "int": fill,
                "text": str(fill),
            }
            made[number] = leaves[kind]
        return made[number]

    for number, (kind, held) in enumerate(spec):
        thing = make(number)
        for key, child in held:
            if kind == "node":
                setattr(thing, str(key), make(child))
            elif kind == "dict":
                thing[key] = make(child)
            elif kind == "list":
                thing.append(make(child))
    root: graph.Node = made[0]
    return root


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


def holds_itself(spec: Spec) -> bool:
    """Whether something immutable, or a dictionary or list inside of that, is a part of itself: such things are built
    anew, which is impossible around themselves."""

    def reached(start: int, kinds: tuple[str, ...]) -> set[int]:
        """Returns the objects that can be reached from one through objects of some kinds."""
        seen: set[int] = set()
        queue = [start]
        for number in queue:
            for _, child in spec[number][1]:
                if child not in seen:
                    seen.add(child)
                    queue += [child] if spec[child][0] in kinds else []
        return seen

    tuples = [number for number, (kind, _) in enumerate(spec) if kind == "tuple"]
    inside = {child for number in tuples for child in reached(number, CONTAINERS) if spec[child][0] in CONTAINERS}
    return any(number in reached(number, HOLDERS) for number in tuples) or any(
        number in reached(number, CONTAINERS) for number in inside
    )


def shared_in_tuples(spec: Spec) -> bool:
    """Whether a dictionary or list is inside of something immutable and elsewhere, too: then it is no longer shared."""
    inside: dict[int, int] = {}
    for kind, held in spec:
        for _, child in held:
            inside[child] = inside.get(child, 0) + (1 if kind != "tuple" else 100)
    return any(spec[child][0] in ("dict", "list", "tuple") and count > 100 for child, count in inside.items())


@given(specs())
@settings(deadline=None, max_examples=60)
def test_random_graphs(spec: Spec) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    live = build(spec, blank=False)
    saved = graph.Checkpoint(top=live)
    path = saved.write(place)
    assert hf.verify(path).ok
    blank = build(spec, blank=True)
    checkpoint = graph.Checkpoint(top=blank)
    status = checkpoint.read(path)
    if not holds_itself(spec):
        status.assert_consumed()
        if not shared_in_tuples(spec):
            assert same(checkpoint.top, live, {})
    paths = [leaf.path for leaf in hf.describe(path)]
    assert len(paths) == len(set(paths))
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


def typed(value: Any) -> Any:
    """A value with the types of everything in it, as True is 1 and the order of a dictionary does not count."""
    if isinstance(value, dict):
        return dict, [(key, type(key), typed(child)) for key, child in value.items()]
    return type(value), [typed(child) for child in value] if isinstance(value, list | tuple) else value


@given(PLAIN, PLAIN)
@example([None, ((), {3: ()})], [7, [8]])
@settings(deadline=None, max_examples=60)
def test_random_plain_contents(value: Any, blank: Any) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    listed, mapped, single = [copy.deepcopy(value), 1], {"a.b": copy.deepcopy(value), "c": 1}, copy.deepcopy(value)
    contents = {"listed": listed, "mapped": mapped, "single": single}
    path = graph.Checkpoint(**contents).write(place)
    assert typed(hf.load(path)) == typed(contents)
    checkpoint = graph.Checkpoint(listed=[blank], mapped={}, single=None)
    checkpoint.read(path).assert_consumed()
    assert typed(vars(checkpoint)) == typed(contents)
    late = graph.Checkpoint()
    late.read(path, partial=True, rename={"listed": "moved/list", "mapped/a.b": "mapped/x"})
    late.moved, late.mapped = graph.Node(list=[]), {}
    assert (list(late.moved.list), dict(late.mapped)) == (listed, {"x": value, "c": 1})
    as_location(place).remove_tree()


def test_shardings_are_those_of_the_program(place: str) -> None:
    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices.reshape(4), ("x",)), PartitionSpec("x"))  # type: ignore[no-untyped-call]  # jax's
    path = graph.Checkpoint(params={"w": jnp.arange(8.0)}).write(place)
    checkpoint = graph.Checkpoint(params={"w": jax.device_put(jnp.zeros(8), rows)})
    checkpoint.read(path).assert_consumed()
    assert checkpoint.params["w"].sharding == rows
    assert checkpoint.params["w"].tolist() == list(range(8))


# ---- objects that are attached one by one, some before the restore and the others after it

TRACKED: dict[str, Any] = {"node": graph.Node, "dict": graph.TrackedDict, "list": graph.TrackedList}
GROWING = (*TRACKED, "numpy", "value", "int")
NAMES = ("a", "b.c", "d/e", "slots", "3")

Edge = tuple[int, str, int]
"""A holder, a key, and the object under it; the place in a list is the number of edges before it."""


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[Edge]]:
    """The kinds of some objects, the first of which is a node, and edges in the order in which they are made."""
    kinds = ["node", *draw(st.lists(st.sampled_from(GROWING), min_size=1, max_size=8))]
    edges = []
    for holder, kind in enumerate(kinds):
        for key in draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)) if kind in TRACKED else ():
            held = draw(st.integers(1, len(kinds) - 1))
            if kind == "node" or kinds[held] != "int":  # those are restored before the program adds them
                edges.append((holder, key, held))
    return kinds, draw(st.permutations(edges))


def make(kinds: list[str], blank: bool) -> list[Any]:
    made: list[Any] = []
    for number, kind in enumerate(kinds):
        value = 0 if blank else number + 1
        leaves = {"numpy": np.full(2, value), "value": graph.Value(value), "int": value}
        made.append(TRACKED[kind]() if kind in TRACKED else leaves[kind])
    return made


def attach(objects: list[Any], edge: Edge) -> None:
    holder, key, held = edge
    if isinstance(objects[holder], graph.Node):
        setattr(objects[holder], key, objects[held])
    elif isinstance(objects[holder], dict):
        objects[holder][key] = objects[held]
    else:
        objects[holder].append(objects[held])


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
    assert same(live[0], saved[0], {})
    status.assert_consumed()
    checkpoint.write(f"{place}/again")
    as_location(place).remove_tree()
