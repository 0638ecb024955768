"""Transformations of trees: where each value comes from, in which containers, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze

from holdfast.engine.errors import OptionError, TreeMismatchError
from holdfast.engine.pytree import Transform, apply_transformations

ORIGINAL: dict[str, Any] = {
    "a": 1,
    "b": {"c": 5, "d": [0, 1, 2, 3]},
    "f": 2,
    "b1": {"c": 2},
    "b2": {"c": 3},
}


class Pair(NamedTuple):
    mu: Any
    nu: Any


@dataclass
class State:
    step: Any
    params: Any


T = Transform


def taken(key: str) -> Transform:
    """A transformation that takes the value at another key as it is."""
    return T(original_key=key)


def taken_by(function: Callable[[Any], Any]) -> Transform:
    """A transformation that takes what a function makes of the value at the key ``a``."""
    return T(original_key="a", value_fn=function)


def made_by(function: Callable[..., Any]) -> Transform:
    """A transformation that takes what a function makes of the tree, or of the key and the tree."""
    return T(multi_value_fn=function)


abstract: Any = jax.ShapeDtypeStruct


SOURCES: dict[str, Any] = {
    "renamed": ({"x": taken("a")}, {"x": ...}, {"x": 1}),
    "from deeper": ({"x": taken("b/c")}, {"x": 0}, {"x": 5}),
    "key in dictionaries": ({"b": {"c": taken("a")}}, {"b": {"c": 0}}, {"b": {"c": 1}}),
    "key with slashes": ({"b/c": taken("a")}, {"b": {"c": 0}}, {"b": {"c": 1}}),
    "pattern in dictionaries": ({"b": {r"(.)": taken("a")}}, {"b": {"c": 0}}, {"b": {"c": 1}}),
    "groups": ({r"x(\d.*)": taken(r"b\1")}, {"x1": {"c": 0}, "x2": {"c": 0}}, {"x1": {"c": 2}, "x2": {"c": 3}}),
    "named groups and integer keys": ({r"(?P<n>\d)": taken(r"b\g<n>/c")}, {"1": 0, 2: 0}, {"1": 2, 2: 3}),
    "transformations in a list": ({"x": [taken("a"), taken("f")]}, {"x": (0, 0)}, {"x": (1, 2)}),
    "function of the value": ({"a": T(value_fn=lambda v: v * 10)}, {"a": 0}, {"a": 10}),
    "function of another value": ({"x": T(original_key="a", value_fn=lambda v: v * 10)}, {"x": 0}, {"x": 10}),
    "function of the tree": ({"x": made_by(lambda tree: tree["a"] + tree["f"])}, {"x": 0}, {"x": 3}),
    "function of the key and the tree": (
        {r"x\d": made_by(lambda key, tree: tree[f"b{key[1:]}"]["c"])},
        {"x1": 0, "x2": 0},
        {"x1": 2, "x2": 3},
    ),
    "the same key": ({"a": T()}, {"a": 0}, {"a": 1}),
    "the whole tree from below a key": ({"": taken("b")}, {"c": 0, "d": [0, 0]}, {"c": 5, "d": [0, 1]}),
    "the whole tree moved below a key": (
        {"x": taken("")},
        {"x": {"a": 0, "b1": {"c": 0}}},
        {"x": {"a": 1, "b1": {"c": 2}}},
    ),
    "nothing": ({}, {}, {}),
}


@pytest.mark.parametrize(("transformations", "new", "expected"), SOURCES.values(), ids=SOURCES)
def test_where_values_come_from(transformations: Any, new: Any, expected: Any) -> None:
    for default_to_original in (True, False):
        assert apply_transformations(ORIGINAL, transformations, new, default_to_original) == expected


@pytest.mark.parametrize(
    ("transformations", "original_preferred", "new_preferred"),
    [
        ({}, {"a": 1, "g": 8}, {"a": 7, "g": 8}),
        ({"a": T(use_fallback=True)}, {"a": 7, "g": 8}, {"a": 1, "g": 8}),
        ({"a": T()}, {"a": 1, "g": 8}, {"a": 1, "g": 8}),
        ({"g": taken("a")}, {"a": 1, "g": 1}, {"a": 7, "g": 1}),
    ],
    ids=["no transformation", "fallback", "named", "renamed"],
)
def test_the_tree_that_is_preferred(transformations: Any, original_preferred: Any, new_preferred: Any) -> None:
    new = {"a": 7, "g": 8}
    assert apply_transformations(ORIGINAL, transformations, new) == original_preferred
    assert apply_transformations(ORIGINAL, transformations, new, default_to_original=True) == original_preferred
    assert apply_transformations(ORIGINAL, transformations, new, default_to_original=False) == new_preferred


NEW_SUBTREE = {"x": {"c": 0, "d": [0, 0, 0, 0]}}


OF_CONTAINERS: dict[str, Any] = {
    "leaf by leaf": (taken("b"), NEW_SUBTREE, {"x": {"c": 5, "d": [0, 1, 2, 3]}}),
    "a part": (taken("b"), {"x": {"d": (0, 0)}}, {"x": {"d": (0, 1)}}),
    "placeholder": (taken("b"), {"x": ...}, {"x": {"c": 5, "d": [0, 1, 2, 3]}}),
    "function": (T(original_key="b", value_fn=lambda v: v + 1), NEW_SUBTREE, {"x": {"c": 6, "d": [1, 2, 3, 4]}}),
    "function, placeholder": (T(original_key="b", value_fn=lambda v: sum(v["d"])), {"x": ...}, {"x": 6}),
    "fallback": (T(use_fallback=True), NEW_SUBTREE, NEW_SUBTREE),
    "whole": (made_by(lambda tree: {**tree["b"], "more": 1}), NEW_SUBTREE, {"x": {"c": 5, "d": [0, 1, 2, 3]}}),
    "whole, ...": (made_by(lambda tree: tree["b"]["d"][1:]), {"x": ...}, {"x": [1, 2, 3]}),
}


@pytest.mark.parametrize(("transform", "new", "expected"), OF_CONTAINERS.values(), ids=OF_CONTAINERS)
@pytest.mark.parametrize("key", ["x", "[x-z]"], ids=["key", "pattern"])
def test_a_transformation_of_a_container_applies_to_all_leaves_below(
    key: str, transform: Transform, new: Any, expected: Any
) -> None:
    assert apply_transformations(ORIGINAL, {key: transform}, new) == expected


WINNERS: list[tuple[list[str], str]] = [
    (["b/c", "b/.*"], "b/c"), (["b/.*", "b/c"], "b/c"), (["b", "b/c"], "b/c"), (["b/.*", "b"], "b"),
    (["b/.", ".*"], "b/."), ([".*", "b/."], ".*"), (["[b]", "b/."], "b/."), (["", "b"], "b"), (["", ".*"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "winner"), WINNERS, ids=str)
def test_which_transformation_applies(keys: list[str], winner: str) -> None:
    """Keys written out go before patterns, longer before shorter, first before later."""

    def named(key: str) -> Transform:
        return T(value_fn=lambda value: key)

    calls = {key: named(key) for key in keys}
    assert apply_transformations(ORIGINAL, calls, {"b": {"c": 0}}) == {"b": {"c": winner}}


def test_keys_match_paths_as_messages_show_them() -> None:
    original = {"w+b": 1, "a.b": 2, "a/b": 3, "50%": 4, 1: 5, "1": 6, "(x": 7}
    keys = {"w+b": "w+b", "a.b": "a.b", "a/b": "a%2Fb", "50%": "50%25", 1: "1", "1": "%31", "(x": "(x"}
    new = {f"new {number}": ... for number in range(len(keys))}
    renamed = {f"new {number}": taken(path) for number, path in enumerate(keys.values())}
    assert list(apply_transformations(original, renamed, new).values()) == [1, 2, 3, 4, 5, 6, 7]
    for path, value in zip(keys.values(), original.values(), strict=True):
        negative = apply_transformations(original, {path: T(value_fn=lambda v: -v)}, original)
        assert [one for one in negative.values() if one < 0] == [-value]


# The original, the new tree, and the result.
CONTAINERS: dict[str, tuple[Any, Any, Any]] = {
    "dict": ({"mu": 1, "nu": 2}, Pair(0, 0), Pair(1, 2)),
    "pair": ({"mu": 3, "nu": 4}, {"nu": 0, "mu": 0}, {"nu": 4, "mu": 3}),
    "list": ((5, 6), [0, 0], [5, 6]),
    "state": ({"step": 7, "params": {"w": 8}}, State(0, freeze({"w": 0})), State(7, freeze({"w": 8}))),
    "frozen": ({"w": 9}, freeze({"w": 0}), freeze({"w": 9})),
    "ordered": ({"y": 10, "x": 11}, OrderedDict(x=0, y=0), OrderedDict(x=11, y=10)),
}


def test_the_containers_are_those_of_the_new_tree() -> None:
    original, new, expected = ({name: case[part] for name, case in CONTAINERS.items()} for part in range(3))
    found = apply_transformations(original, {}, new)
    assert found == expected
    assert type(found["frozen"]) is FrozenDict
    assert type(found["state"]) is State
    assert list(found["pair"]) == ["nu", "mu"]


def test_none_is_no_value_and_a_bare_leaf_is_a_tree() -> None:
    assert apply_transformations({"a": None, "b": 1}, {}, {"a": 2, "b": None}) == {"a": 2, "b": None}
    assert apply_transformations({"a": None}, {}, {"a": ...}) == {"a": None}
    assert apply_transformations({"a": 1}, {".*": taken("a")}, {"b": None, "c": 0}) == {"b": None, "c": 1}
    assert apply_transformations({"a": 1}, {"b": T(use_fallback=True)}, {"b": None}) == {"b": None}
    with pytest.raises(TreeMismatchError, match="c: expected a value, found None at 'a' in the original tree"):
        apply_transformations({"a": None}, {"c": taken("a")}, {"c": 0})
    with pytest.raises(TreeMismatchError, match=r"b: expected a leaf to fill, found None.*write \.\.\. instead"):
        apply_transformations({"a": 1}, {"b": taken("a")}, {"b": None})
    assert apply_transformations(5, {}, 6) == 5
    assert apply_transformations(5, {}, 6, default_to_original=False) == 6
    assert apply_transformations({"a": 5}, taken("a"), ...) == 5
    with pytest.raises(TreeMismatchError, match=r"\(root\): expected a value, 'b' is not in the original"):
        apply_transformations({"a": 5}, {"": taken("b")}, ...)
    assert apply_transformations({"a": (), "b": 1}, {}, {"a": 3, "b": [], "c": {}}) == {"a": 3, "b": [], "c": {}}
    assert apply_transformations({"a": ()}, {}, {"a": ...}) == {"a": ()}


def test_values_and_trees_are_handed_on_as_they_are() -> None:
    original, kept, calls = {"a": np.arange(3)}, abstract((3,), np.float32), list[Any]()

    def whole(tree: Any) -> Any:
        calls.append(tree)
        return [1, 2]

    functions = {"b": taken("a"), "x": T(multi_value_fn=whole)}
    found = apply_transformations(original, functions, {"a": ..., "b": jnp.zeros(7), "x": (0, 0), "kept": kept})
    assert found["a"] is found["b"] is original["a"]
    assert found["x"] == (1, 2)
    assert found["kept"] is kept
    (tree,) = calls
    assert tree is original


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"original_key": 3}, "original_key=3 must be text"),
        ({"use_fallback": 1}, "use_fallback=1 must be True or False"),
        ({"value_fn": "x"}, "value_fn='x' must be a function"),
        ({"multi_value_fn": 1}, "multi_value_fn=1 must be a function"),
        ({"use_fallback": True, "original_key": "a"}, "use_fallback=True and original_key= contradict"),
        ({"use_fallback": True, "value_fn": abs}, "use_fallback=True and value_fn= contradict"),
        ({"use_fallback": True, "multi_value_fn": abs}, "use_fallback=True and multi_value_fn= contradict"),
        ({"original_key": "a", "multi_value_fn": abs}, "multi_value_fn= and original_key= contradict"),
        ({"value_fn": abs, "multi_value_fn": abs}, "multi_value_fn= and value_fn= contradict"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_transformations_that_contradict_themselves(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Transform(**arguments)


WRONG: dict[str, Any] = {
    "text": ({"x": "a"}, "'x' is a str; expected a Transform or a dictionary of them"),
    "None": ({"x": {"y": None}}, "'x/y' is a NoneType"),
    "nothing": (None, "the whole is a NoneType"),
    "typo": ({"typo": taken("a")}, "'typo' matches no key of the new tree, which has 'x', 'y', 'y/z'"),
    "second typo": ({"x|typo": taken("a"), "z": T()}, "'z' matches no key"),
    "no expression": ({"x(": taken("a")}, r"'x\(' is neither a key of the new tree nor a regular expression"),
    "no group": ({"x": taken(r"\1")}, r"'x' has original_key='\\\\1', which does not fit its key"),
    "no named group": ({"(x)": taken(r"\g<name>")}, "which does not fit its key: unknown group name"),
}


@pytest.mark.parametrize(("transformations", "message"), WRONG.values(), ids=WRONG)
def test_wrong_transformations(transformations: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        apply_transformations({"a": 1}, transformations, {"x": 0, "y": {"z": 0}})


# Transformations, the new tree, and what the error says of each key.
UNFILLED: dict[str, Any] = {
    "no such key": ({"x": taken("q")}, {"x": 0}, "x: expected a value, 'q' is not in the original tree (t"),
    "pattern": ({"(.*)": taken(r"q\1")}, {"x": 0, "y": 0}, "x: expected a value, 'qx'", "y: expected", "'(.*)'"),
    "same key": ({"x": T()}, {"x": 0}, "x: expected a value, not in the original tree (transformation 'x')"),
    "value_fn": ({"x": T(value_fn=abs)}, {"x": 0}, "value_fn receives the value at this key", "multi_value_fn"),
    "fallback": ({"x": T(use_fallback=True)}, {"x": ...}, "only a placeholder", "use_fallback takes it from there"),
    "placeholder": ({}, {"x": ...}, "x: expected a value, found only a placeholder in the new tree, but the original"),
    "container for a leaf": ({}, {"b": 0}, "b: expected one value, found a container of 5 leaves at 'b'", "write ..."),
    "tree for a leaf": ({"x": taken("")}, {"x": 0}, "expected one value, found a container of 9 leaves at '(root)'"),
}
NEW_PREFERRED: dict[str, Any] = {
    "new fallback": ({"x": T(use_fallback=True)}, {"x": 0}, "x: expected a value, not in the original tree"),
    "new placeholder": ({}, {"a": ...}, "a: expected a value, found only a pl", "default_to_original is False"),
}
MISFITS: dict[str, Any] = {
    "tree": ({"x": made_by(lambda tree: [1])}, {"x": 0}, "multi_value_fn of the transformation for x returned a list"),
    "value": ({"x": taken_by(lambda v: {"k": v})}, {"x": 0}, "value_fn of the transformation for x returned a dict"),
    "part": (
        {"x": made_by(lambda tree: tree["b1"])},
        {"x": {"c": 0, "d": 0}},
        "must return a tree",
        "d: not returned",
    ),
}


@pytest.mark.parametrize("name", [*UNFILLED, *NEW_PREFERRED, *MISFITS])
def test_keys_that_cannot_be_filled(name: str) -> None:
    transformations, new, *messages = (UNFILLED | NEW_PREFERRED | MISFITS)[name]
    with pytest.raises(TreeMismatchError) as caught:
        apply_transformations(ORIGINAL, transformations, new, name not in NEW_PREFERRED)
    assert all(message in str(caught.value) for message in messages), caught.value
    if name not in MISFITS:
        assert f"of {len(new)} keys of the new tree cannot be filled" in str(caught.value)
        assert len(caught.value.differences) == len(new)


@pytest.mark.parametrize("name", ["value_fn", "multi_value_fn"])
def test_errors_of_functions_name_the_key(name: str) -> None:
    failing = {"value_fn": taken_by(lambda value: value / 0), "multi_value_fn": made_by(lambda tree: 1 / 0)}
    with pytest.raises(ZeroDivisionError) as caught:
        apply_transformations(ORIGINAL, {"x": failing[name]}, {"x": 0})
    assert caught.value.__notes__ == [f"raised by {name} of the transformation for x"]
