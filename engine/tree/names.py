"""Names of leaves: key paths as one string, in which no two paths are alike.

A leaf's name is its key path, each key percent-escaped where it holds a character that means something, joined with
``.``: ``params.Dense_0.kernel``. The bare leaf, a tree that has no containers, has the empty name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# "." joins keys, "/" separates a name from its chunk keys, "%" escapes; control characters and lone surrogates cannot
# be printed or stored everywhere.
_ESCAPED = re.compile("[./%\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SEQUENCE = re.compile("(?:%[0-9A-F]{2})+")
_LOCK = "__lock"  # a file name with this ending belongs to TensorStore's file driver


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def escape_key(key: str) -> str:
    """Escapes one key so that it can stand between the dots of a name.

    Args:
        key: Any string, empty and with lone surrogates included.

    Returns:
        The key itself if nothing in it needs escaping. Different keys never give the same text.
    """
    if key.isidentifier() and not key.endswith(_LOCK):
        return key  # most keys, four times faster than the search below
    if not key:
        return "%"
    escaped = _ESCAPED.sub(lambda found: _percent(found.group()), key)
    if escaped.endswith(_LOCK):
        escaped = escaped[: -len(_LOCK)] + "%5F" + _LOCK[1:]
    return escaped


def escape_first(key: str) -> str:
    """Escapes a key in a way that `escape_key` never does: its first character always.

    Args:
        key: A string that `escape_key` leaves as it is, such as "1" beside the integer key 1.

    Returns:
        Another text that `unescape_key` turns into the same key.
    """
    return _percent(key[0]) + escape_key(key[1:]) if len(key) > 1 else _percent(key)


def unescape_key(text: str) -> str:
    """Gives back the key that `escape_key` made the text from.

    Raises:
        ValueError: The text is not the escaped form of any key.
    """
    if text.isidentifier():
        return text  # most keys
    if "%" not in text:
        if not text or _ESCAPED.search(text):
            raise ValueError(f"{text!r} is not an escaped key")
        return text
    if text == "%":
        return ""
    rest = _SEQUENCE.sub("", text)
    if _ESCAPED.search(rest):
        raise ValueError(f"{text!r} is not an escaped key")
    # Each run of escapes is decoded alone: a lone surrogate must not join up with a neighbour.
    return _SEQUENCE.sub(lambda found: _decode(found.group(), text), text)


def _decode(run: str, text: str) -> str:
    try:
        return bytes.fromhex(run.replace("%", "")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text!r} is not an escaped key: {error}") from error


def join(keys: Iterable[str]) -> str:
    """Makes the name of the leaf at a path of keys: ``["params", "w"]`` gives ``"params.w"``, ``[]`` gives ``""``."""
    return ".".join([escape_key(key) for key in keys])


def split(name: str) -> list[str]:
    """Gives back the keys that `join` made the name from.

    Raises:
        ValueError: The text is not the name of any leaf.
    """
    return [unescape_key(text) for text in name.split(".")] if name else []


def display(name: str) -> str:
    """Shows a name to people: ``params.Dense_0.kernel`` becomes ``params/Dense_0/kernel``.

    Different names still give different texts. What could be mistaken or not be printed stays escaped, dots do not.
    The bare leaf is shown as ``(root)``.
    """
    if not name:
        return "(root)"
    return name.replace(".", "/").replace("%2E", ".")
