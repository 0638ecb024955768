"""Patterns of paths: what they match, and how long that takes."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.pytree import PathFilter

KEYS = st.sampled_from(["a", "b", "ab", "abc", "b2"])
PARTS = st.sampled_from(["**", "*", "?", "a", "b*", "[ab]", "[!a]*", "a?c"])


def matches(path: list[str], pattern: list[str]) -> bool:
    """The definition of a match, in exponential time."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return matches(path, pattern[1:]) or bool(path and matches(path[1:], pattern))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and matches(path[1:], pattern[1:])


@given(path=st.lists(KEYS, min_size=1, max_size=6), pattern=st.lists(PARTS, min_size=1, max_size=5))
def test_the_definition_and_the_filter_agree(path: list[str], pattern: list[str]) -> None:
    expected = matches(path, pattern)
    assert PathFilter("/".join(pattern)).chooses(path) is expected
    assert PathFilter(exclude="/".join(pattern)).chooses(path) is not expected


@given(
    path=st.lists(KEYS, min_size=1, max_size=4),
    select=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=3),
    exclude=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_path_is_selected_by_one_pattern_and_excluded_by_none(
    path: list[str], select: list[list[str]], exclude: list[list[str]]
) -> None:
    found = PathFilter(["/".join(one) for one in select], ["/".join(one) for one in exclude])
    expected = any(matches(path, one) for one in select) and not any(matches(path, one) for one in exclude)
    assert found.chooses(path) is expected


def test_many_stars_and_a_long_path_take_no_time() -> None:
    # In a process of its own with a time limit: a matcher that tries every division of the path would never end.
    program = (
        "import tempfile, holdfast as hf\n"
        "tree = 1\n"
        "for _ in range(60):\n"
        "    tree = {'a': tree}\n"
        "pattern = '/'.join(['**', 'a'] * 25 + ['**', 'b'])\n"
        "with tempfile.TemporaryDirectory() as place:\n"
        "    hf.save(place + '/x', {'tree': tree, 'b': 2})\n"
        "    assert hf.load(place + '/x', select=['b', '**/' * 60 + 'a']) == {'tree': tree, 'b': 2}\n"
        "    try:\n"
        "        hf.load(place + '/x', select=pattern)\n"
        "    except hf.TreeMismatchError as error:\n"
        "        assert 'matches no leaf' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("wrong", [3, [], [None], b"a", {"a": 1}])
@pytest.mark.parametrize("option", ["select", "exclude"])
def test_only_text_is_a_pattern(option: str, wrong: Any) -> None:
    with pytest.raises(hf.errors.OptionError, match=f"{option}=.* must be a pattern of paths such as"):
        PathFilter(**{option: wrong})


def test_a_pattern_without_a_match_is_named_with_its_option() -> None:
    paths = [("net", str(index)) for index in range(10)]
    PathFilter("net/*", "**/3").check(paths)
    PathFilter().check([])
    with pytest.raises(hf.TreeMismatchError, match=r"exclude='b/\*' matches no leaf; .* 'net/7' and 2 more"):
        PathFilter("net/*", ["net/1", "b/*"]).check(paths)
    with pytest.raises(hf.TreeMismatchError, match="select='b' matches no leaf; the checkpoint has no leaves"):
        PathFilter("b").check([])


def test_a_key_with_dots_is_one_key_and_the_keys_between_them() -> None:
    path = ("x", "a%2Eb%2Ec", "d")
    for pattern in ("x/a.b.c/d", "x/a/b/c/d", "x/*/d", "x/a/**", "**/b/**", "x/a.*/d", "x/?/?/c/d", "*/**/c/*"):
        assert PathFilter(pattern).chooses(path), pattern
        assert not PathFilter(exclude=pattern).chooses(path), pattern
    for pattern in ("x/a.b/c/d", "x/a/b.c/d", "x/*/*/d", "a/**", "x/a/b/c", "x.a/**"):
        assert not PathFilter(pattern).chooses(path), pattern


def test_the_bare_leaf_has_a_name() -> None:
    assert PathFilter("(root)").chooses(())
    assert PathFilter("(root)").chooses(("",))
