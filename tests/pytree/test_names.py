"""Names of leaves: which characters are escaped, that different paths differ; and which paths patterns match."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.pytree import PathFilter, escape_key, format_path, join, split, unescape_key
from holdfast.engine.pytree.names import escape_keys, unescape_keys

keys = st.text(st.characters(codec=None), max_size=6) | st.text("./%_lock12\ud83d\ude00\x00 é", max_size=8)


ESCAPED = {
    "kernel": "kernel", "Dense_0": "Dense_0", "0": "0", "mit Leerzeichen": "mit Leerzeichen", "größe": "größe",
    "": "%", ".": "%2E", "..": "%2E%2E", "a.b": "a%2Eb", "a/b": "a%2Fb", "100%": "100%25", "%": "%25", "%2E": "%252E",
    "new\nline": "new%0Aline", "\x00": "%00", "\x85": "%C2%85",
    "\ud800": "%ED%A0%80", "\ud83d\ude00": "%ED%A0%BD%ED%B8%80",
    "__lock": "%5F_lock", "x__lock": "x%5F_lock", "x.__lock": "x%2E%5F_lock", "__lock_": "__lock_",
}  # fmt: skip


@pytest.mark.parametrize(("key", "text"), ESCAPED.items())
def test_a_key_is_escaped_only_where_it_must_be(key: str, text: str) -> None:
    assert escape_key(key) == text
    assert unescape_key(text) == key


@pytest.mark.parametrize("text", ["", "a.b", "a/b", "%2", "%zz", "a%", "%%", "%2e", "\n", "%FF", "%ED%A0", "\ud800"])
def test_text_that_no_key_escapes_to_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an escaped key"):
        unescape_key(text)


@given(st.lists(keys | st.text("a._lock2E%", max_size=8), max_size=4))
@example(["layers.0.weight", "layers.0.bias"])
@example(["a.__lock", "b"])
@example(["a.%2", "E"])
@settings(deadline=None, max_examples=100)
def test_every_key_comes_back_alone_and_among_others(several: list[str]) -> None:
    escaped = escape_keys(several)
    assert escaped == [escape_key(key) for key in several]
    assert several == unescape_keys(escaped) == [unescape_key(one) for one in escaped]
    for one in escaped:
        assert one.isprintable() or not any(character in one for character in "./\x00\n\ud800")
        one.encode("utf-8")
        assert not one.endswith("__lock")


@given(st.lists(keys, max_size=4), st.lists(keys, max_size=4))
@example([], [""])
@example([""], ["%"])
@example(["a", "b"], ["a.b"])
@example(["", ""], ["."])
@settings(deadline=None, max_examples=100)
def test_different_paths_have_different_names(one: list[str], other: list[str]) -> None:
    assert split(join(one)) == one
    assert (join(one) == join(other)) == (one == other)
    assert (format_path(join(one)) == format_path(join(other))) == (one == other)


# ---- patterns of paths


KEYS = st.sampled_from(["a", "b", "ab", "abc", "b2"])
PARTS = st.sampled_from(["**", "*", "?", "a", "b*", "[ab]", "[!a]*", "a?c"])


def matches(path: list[str], pattern: list[str]) -> bool:
    """The definition of a match, in exponential time."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return matches(path, pattern[1:]) or bool(path and matches(path[1:], pattern))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and matches(path[1:], pattern[1:])


PATTERNS = st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=3)


@given(st.lists(KEYS, min_size=1, max_size=6), st.none() | PATTERNS, st.none() | PATTERNS)
def test_a_path_is_selected_by_one_pattern_and_excluded_by_none(
    path: list[str], select: list[list[str]] | None, exclude: list[list[str]] | None
) -> None:
    found = PathFilter(*(None if some is None else list(map("/".join, some)) for some in (select, exclude)))
    selected = select is None or any(matches(path, one) for one in select)
    assert found.chooses(path) is (selected and not any(matches(path, one) for one in exclude or ()))


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


def test_the_root_and_a_key_with_dots() -> None:
    assert PathFilter("(root)").chooses(())
    assert PathFilter("(root)").chooses(("",))
    for pattern in ("x/a.b.c/d", "x/a/b/c/d", "**/b/**"):
        assert not PathFilter(exclude=pattern).chooses(("x", "a%2Eb%2Ec", "d"))
