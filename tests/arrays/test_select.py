"""Loading a part of a checkpoint by the paths of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ids import plain_id

import holdfast as hf

Same = Callable[[Any, Any], None]

TREE = {
    "params": {
        "Dense_0": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)},
        "Dense_1": {"kernel": np.full((3, 1), 2.0), "bias": np.zeros(1)},
        "scale": np.float32(3),
    },
    "opt": [{"mu": {"kernel": 1}}, (), {"nu": (2, 3)}],
    "a.b": {"c/d": 1, "e%f": 2},
    "step": 7,
    "empty": {},
}
ALL = [
    "params/Dense_0/kernel",
    "params/Dense_0/bias",
    "params/Dense_1/kernel",
    "params/Dense_1/bias",
    "params/scale",
    "opt/0/mu/kernel",
    "opt/2/nu/0",
    "opt/2/nu/1",
    "a.b/c%2Fd",
    "a.b/e%25f",
    "step",
]


@pytest.fixture
def saved(place: str) -> str:
    hf.save(place, TREE)
    return place


def paths(tree: Any, above: str = "") -> list[str]:
    if not isinstance(tree, dict | list | tuple):
        return [above]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    escape = {"%": "%25", "/": "%2F"}
    return [
        path
        for key, value in pairs
        for path in paths(value, f"{above}/{''.join(escape.get(c, c) for c in str(key))}".lstrip("/"))
    ]


def matching(test: Callable[[str], bool]) -> list[str]:
    return [path for path in ALL if test(path)]


PATTERNS: dict[str, tuple[Any, list[str]]] = {
    "everything": ("**", ALL),
    "top_level": ("*", ["step"]),
    "below": ("params/**", matching(lambda path: path.startswith("params"))),
    "a_leaf_is_below_itself": ("step/**", ["step"]),
    "at_any_depth": ("**/kernel", matching(lambda path: path.endswith("kernel"))),
    "in_the_middle": ("params/**/bias", ["params/Dense_0/bias", "params/Dense_1/bias"]),
    "no_keys_in_the_middle": ("params/**/scale", ["params/scale"]),
    "within_a_key": ("params/Dense_*/bias", ["params/Dense_0/bias", "params/Dense_1/bias"]),
    "one_character": ("params/Dense_?/bias", ["params/Dense_0/bias", "params/Dense_1/bias"]),
    "some_characters": ("params/Dense_[1-9]/*", ["params/Dense_1/kernel", "params/Dense_1/bias"]),
    "not_some_characters": ("params/Dense_[!0]/*", ["params/Dense_1/kernel", "params/Dense_1/bias"]),
    "stars_stay_in_a_key": ("params/*", ["params/scale"]),
    "one_key_each": ("*/*/*", matching(lambda path: path.count("/") == 2)),
    "indices": ("opt/2/**", ["opt/2/nu/0", "opt/2/nu/1"]),
    "dots_are_no_separators": ("a.b/*", ["a.b/c%2Fd", "a.b/e%25f"]),
    "escaped": ("a.b/c%2Fd", ["a.b/c%2Fd"]),
    "several": (["step", "**/nu/1"], ["opt/2/nu/1", "step"]),
    "overlapping": (["params/**", "**/bias"], matching(lambda path: path.startswith("params"))),
    "a_tuple": (("step",), ["step"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, saved: str) -> None:
    pattern, expected = PATTERNS[name]
    assert paths(hf.load(saved, select=pattern)) == expected


# "?" must not stand for the "/" between keys, nor "." for anything; a path is matched as a whole.
@pytest.mark.parametrize(
    "pattern", ["nothing", "params", "para?/**", "params?scale", "a?b", "ste", "*kernel", "", "opt/[0-9]mu/*"]
)
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str, saved: str) -> None:
    with pytest.raises(hf.TreeMismatchError, match="matches no leaf; the checkpoint has 'params/Dense_0/kernel'"):
        hf.load(saved, select=["step", pattern])


@pytest.mark.parametrize("select", [5, [], ["step", 5], b"step", {"step": 1}], ids=plain_id)
def test_invalid_patterns(select: Any, saved: str) -> None:
    with pytest.raises(hf.OptionError, match="must be a pattern of paths such as"):
        hf.load(saved, select=select)


def test_containers_that_have_nothing_left_are_left_out(saved: str, assert_same: Same) -> None:
    assert_same(hf.load(saved, select="**"), TREE)
    assert_same(hf.load(saved, select="opt/**"), {"opt": TREE["opt"]})
    assert_same(
        hf.load(saved, select=["opt/2/nu/1", "params/scale"]),
        {"params": {"scale": np.float32(3)}, "opt": {2: {"nu": {1: 3}}}},
    )


def test_a_template_of_the_selected_leaves(saved: str, assert_same: Same) -> None:
    template = {"params": {"Dense_0": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}}}
    found = hf.load(saved, select="params/Dense_0/*", like=template)
    assert_same(found, {"params": {"Dense_0": TREE["params"]["Dense_0"]}})  # type: ignore[index]  # a literal above


def test_a_template_and_a_selection_that_differ(saved: str) -> None:
    template = {"params": {"Dense_0": {"kernel": np.zeros((2, 3))}}, "step": 0}
    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(saved, select="params/Dense_0/*", like=template)
    assert caught.value.differences == (
        "step: expected int (template), not selected",
        "params/Dense_0/bias: not in the template, found float64[3] (checkpoint)",
    )


def test_only_selected_leaves_are_read(place: str, assert_same: Same, stored: Callable[[str], Any]) -> None:
    tree = {"a": np.arange(3.0), "b": np.arange(100_000.0), "c": np.arange(4.0)}
    hf.save(place, tree)
    files = stored(place)
    content = bytearray(files.read()["state/d/0"])
    content[4096 : len(content) - 4096] = bytes(len(content) - 8192)
    files.write("state/d/0", bytes(content))
    with pytest.raises(hf.DamagedCheckpointError, match=r"(?s)in 1 of its leaves.*b: "):
        hf.load(place)
    assert_same(hf.load(place, select=["a", "c"]), {"a": tree["a"], "c": tree["c"]})


def test_parts_with_a_checkpointer_and_a_manager(place: str, assert_same: Same) -> None:
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(f"{place}/one", TREE)
    assert checkpointer.restore(f"{place}/one", select="step") == {"step": 7}
    with hf.CheckpointManager(f"{place}/many") as manager:
        manager.save(1, TREE)
        assert manager.restore(1, restore_kwargs={"select": "opt/0/**"}) == {"opt": {0: {"mu": {"kernel": 1}}}}
