"""Names of leaves: which characters are escaped, and that different paths have different names."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.engine.pytree import escape_key, format_path, join, split, unescape_key
from holdfast.engine.pytree.names import escape_first

keys = st.text(st.characters(codec=None), max_size=6) | st.text("./%_lock12\ud83d\ude00\x00 é", max_size=8)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kernel", "kernel"),
        ("Dense_0", "Dense_0"),
        ("0", "0"),
        ("mit Leerzeichen", "mit Leerzeichen"),
        ("größe", "größe"),
        ("", "%"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("a.b", "a%2Eb"),
        ("a/b", "a%2Fb"),
        ("100%", "100%25"),
        ("%", "%25"),
        ("%2E", "%252E"),
        ("new\nline", "new%0Aline"),
        ("\x00", "%00"),
        ("\x85", "%C2%85"),
        ("\ud800", "%ED%A0%80"),
        ("\ud83d\ude00", "%ED%A0%BD%ED%B8%80"),
        ("__lock", "%5F_lock"),
        ("x__lock", "x%5F_lock"),
        ("x.__lock", "x%2E%5F_lock"),
        ("__lock_", "__lock_"),
    ],
)
def test_a_key_is_escaped_only_where_it_must_be(key: str, text: str) -> None:
    assert escape_key(key) == text
    assert unescape_key(text) == key


@pytest.mark.parametrize("text", ["", "a.b", "a/b", "%2", "%zz", "a%", "%%", "%2e", "\n", "%FF", "%ED%A0", "\ud800"])
def test_text_that_no_key_escapes_to_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an escaped key"):
        unescape_key(text)


@given(keys)
@settings(deadline=None, max_examples=300)
def test_every_key_comes_back(key: str) -> None:
    escaped = escape_key(key)
    assert unescape_key(escaped) == key
    assert escaped.isprintable() or not any(character in escaped for character in "./\x00\n\ud800")
    escaped.encode("utf-8")
    assert not escaped.endswith("__lock")


@given(st.lists(keys, max_size=4), st.lists(keys, max_size=4))
@example([], [""])
@example([""], ["%"])
@example(["a", "b"], ["a.b"])
@example(["", ""], ["."])
@settings(deadline=None, max_examples=300)
def test_different_paths_have_different_names(one: list[str], other: list[str]) -> None:
    assert split(join(one)) == one
    assert (join(one) == join(other)) == (one == other)
    assert (format_path(join(one)) == format_path(join(other))) == (one == other)


@given(st.text("0123456789-TrueFals", min_size=1), keys)
@settings(deadline=None, max_examples=100)
def test_the_forced_escape_is_one_that_is_never_made_otherwise(key: str, other: str) -> None:
    assert unescape_key(escape_first(key)) == key
    assert escape_first(key) != escape_key(other)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("params.Dense_0.kernel", "params/Dense_0/kernel"), ("", "(root)"), ("a%2Eb.c", "a.b/c"), ("a%2Fb", "a%2Fb")],
)
def test_names_are_shown_as_paths(name: str, shown: str) -> None:
    assert format_path(name) == shown
