"""Trees taken apart: their containers, the names of their leaves, and trees and leaves that are refused."""

from __future__ import annotations

import enum
import gc
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.ids import plain_id

from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import flatten, unflatten
from holdfast.engine.pytree.flattening import MAX_DEPTH, collection_paused


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Counters:
    done: Any
    best: Any = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Settings(dict):  # type: ignore[type-arg] # a plain subclass, as programs have them
    pass


class Steps(list):  # type: ignore[type-arg] # likewise
    pass


class Color(enum.StrEnum):
    RED = "red"


NAMES: list[tuple[Any, list[str]]] = [
    ({"a": 1, "b": {"c": 2, "d": [3, (4, 5)]}}, ["a", "b.c", "b.d.0", "b.d.1.0", "b.d.1.1"]),
    ({"z": 1, "a": 2}, ["z", "a"]), ([], []), ({"empty": {}, "list": [], "tuple": ()}, []),
    (7, [""]), (None, [""]), ({"n": None}, ["n"]),
    ({1: "int", 2: "int"}, ["1", "2"]), ({1: "int", "1": "str"}, ["1", "%31"]),
    ({"1": "str", 1: "int"}, ["%31", "1"]), ({"1": "str"}, ["1"]),
    ({-3: 0, "-3": 1, "%2D3": 2}, ["-3", "%2D3", "%252D3"]), ({True: 0, "True": 1}, ["True", "%54rue"]),
    ({("a", "b.c"): 0, (1,): 1, "(1,)": 2}, ["('a', 'b%2Ec')", "(1,)", "%281,)"]),
    ({np.int64(4): 0, Color.RED: 1}, ["4", "red"]), ({"a.b": 1, "a": {"b": 2}}, ["a%2Eb", "a.b"]), ({"": 1}, ["%"]),
    (Point(1, Point(2, 3)), ["x", "y.x", "y.y"]), (Counters(1), ["done", "best"]), (Frozen([1]), ["value.0"]),
    (types.MappingProxyType({"k": 1}), ["k"]), (Steps([1, 2]), ["0", "1"]),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "names"), NAMES, ids=plain_id)
def test_names_are_the_paths_of_the_leaves(tree: Any, names: list[str]) -> None:
    assert flatten(tree).names == names


def test_a_dataclass_keeps_fields_that_its_constructor_does_not_take() -> None:
    counters = Counters(Settings(x=[1, 2]))
    counters.best = 0.5
    template = Counters(Settings(x=[0, 0]))
    flat = flatten(counters)
    assert flat.names == ["done.x.0", "done.x.1", "best"]
    assert unflatten(flatten(template).structure, flat.values) == counters
    assert template == Counters({"x": [0, 0]})


def test_a_cycle_is_an_error_that_names_both_places() -> None:
    tree: dict[str, Any] = {"a": {"b": [1]}, "fine": 2}
    tree["a"]["b"].append(tree["a"])
    with pytest.raises(UnsupportedLeafError, match=r"a/b/1: dict contains itself: it is also at a$"):
        flatten(tree)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedLeafError, match=r"0: list contains itself: it is also at \(root\)"):
        flatten(loop)


def test_too_deep_a_tree_is_an_error_and_no_recursion_error() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH):
        tree = [tree]
    assert len(flatten(tree).names) == 1
    for _ in range(5000):
        tree = {"a": tree}
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 200 levels"):
        flatten(tree)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ((1, 2.5), r"the key 2.5 of type float"),
        ((((((((((1,),),),),),),),),), "of type tuple"),
        ((1 << 70,), "does not fit 64 bits"),
        (1.5, "of type float"),
        (None, "of type NoneType"),
        (b"k", "of type bytes"),
        (1 << 70, "does not fit 64 bits"),
    ],
)
def test_other_keys_are_errors_that_name_the_path(key: Any, said: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=rf"outer/inner: dict has .*{said}(.|\n)*b: dict has"):
        flatten({"outer": {"inner": {key: 1}}, "fine": 1, "b": {None: 0}})


# ---- many leaves, and leaves that cannot be saved


def test_collection_is_paused_until_the_last_block_ends() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
