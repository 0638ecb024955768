"""Names of leaves: each key path as one string, different for every path; and patterns that choose paths.

A leaf's name is its keys joined with ``.``: ``params.Dense_0.kernel``. Characters with a meaning are percent-escaped in
each key. The bare leaf, a tree that has no containers, has the empty name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from ..errors import OptionError, TreeMismatchError, shortened

# "." joins keys, "/" separates a name from its chunk keys, "%" escapes; control characters and lone surrogates cannot
# be printed or stored everywhere.
_ESCAPED = re.compile("[./%\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SEQUENCE = re.compile("(?:%[0-9A-F]{2})+")
_LOCK = "__lock"  # a file name with this ending belongs to TensorStore's file driver


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def escape_key(key: str) -> str:
    """Escape one key of a name."""
    if key.isidentifier() and not key.endswith(_LOCK):
        return key  # most keys, four times faster than the search below
    if not key:
        return "%"
    escaped = _ESCAPED.sub(lambda found: _percent(found.group()), key)
    if escaped.endswith(_LOCK):
        escaped = escaped[: -len(_LOCK)] + "%5F" + _LOCK[1:]
    return escaped


def escape_keys(keys: Sequence[str]) -> list[str]:
    """Escape keys, all at once where none of them needs it."""
    return list(keys) if _are_plain(keys) else list(map(escape_key, keys))


def unescape_keys(texts: Sequence[str]) -> list[str]:
    return list(texts) if _are_plain(texts) else list(map(unescape_key, texts))


def _are_plain(keys: Sequence[str]) -> bool:
    """Whether all keys are made of letters, digits and underscores alone, and none has a part that is escaped."""
    joined = "".join(keys)
    return all(keys) and f"_{joined}".isidentifier() and _LOCK not in joined


def escape_first(key: str) -> str:
    """Escape the first character of a key in any case, which `escape_key` never does."""
    return _percent(key[0]) + escape_key(key[1:]) if len(key) > 1 else _percent(key)


def unescape_key(text: str) -> str:
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
    # Each run of escapes is decoded alone: a lone surrogate must not join with a neighbour.
    return _SEQUENCE.sub(lambda found: _decode(found.group(), text), text)


def _decode(run: str, text: str) -> str:
    try:
        return bytes.fromhex(run.replace("%", "")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text!r} is not an escaped key: {error}") from error


def join(keys: Iterable[str]) -> str:
    """Return the name of the leaf at a path of keys: ``"params.w"`` for ``["params", "w"]``, ``""`` for ``[]``."""
    return ".".join([escape_key(key) for key in keys])


def split(name: str) -> list[str]:
    return [unescape_key(text) for text in name.split(".")] if name else []


WRAPPED = ("module", "_orig_mod", "_forward_module", "_original_module", "_checkpoint_wrapped_module")
"""Names that wrappers of torch give to the module inside: DDP, ``torch.compile``, Fabric, activation checkpointing."""

_WRAPPED_KEYS = re.compile(rf"(?:(?<=\.)|(?<=%2E)|^)(?:(?:{'|'.join(WRAPPED)})(?:\.|%2E))+")


def unwrapped_name(name: str) -> str:
    """Return the name of a leaf without the names that wrappers of modules add to it."""
    return _WRAPPED_KEYS.sub("", name)


def joined_names(names: Sequence[str]) -> list[str]:
    """Return names with all keys joined by dots, and without those of wrappers if all stay different.

    So a module's ``layers.0.weight`` in a state dict has the name of the nested ``layers/0/weight``.
    """
    joined = [".".join(split(name)) for name in names]
    bare = list(map(unwrapped_name, joined))
    return bare if len(set(bare)) == len(set(joined)) else joined


def format_path(name: str) -> str:
    """Return a name as a path for messages: ``params/Dense_0/kernel``, or ``(root)`` for the bare leaf.

    Different names give different paths. Characters that are ambiguous or not printable stay escaped, dots do not.
    """
    if not name:
        return "(root)"
    return name.replace(".", "/").replace("%2E", ".")


Patterns = str | Sequence[str]
"""Patterns of paths such as ``"params/**"``: ``*``, ``?`` and ``[ab]`` match within one key, ``**`` matches any number
of whole keys. A key with dots, such as ``encoder.0.weight`` of a module's state dict, counts as one key and also as the
keys between its dots, so that ``encoder/**`` and ``**/weight`` match it."""

_CLOSE = 2000  # paths that are compared with a pattern that matches none


class PathFilter:
    """Chooses paths by patterns. A path is the escaped keys of a leaf's name."""

    def __init__(self, select: Patterns | None = None, exclude: Patterns | None = None) -> None:
        self._select = None if select is None else _compiled(select, "select")
        self._exclude = [] if exclude is None else _compiled(exclude, "exclude")

    def chooses(self, path: Sequence[str]) -> bool:
        """Return whether a path is selected and not excluded."""
        if self._select is None and not self._exclude:
            return True
        found = _Path(_shown(path))
        if any(pattern.matches(found) for pattern in self._exclude):
            return False
        return self._select is None or any(pattern.matches(found) for pattern in self._select)

    def check(self, paths: Iterable[Sequence[str]]) -> None:
        patterns = [*(self._select or ()), *self._exclude]
        if not patterns:
            return
        every = [_Path(_shown(path)) for path in paths]
        for pattern in patterns:
            if not any(map(pattern.matches, every)):
                known = shortened([repr(path.text) for path in every]) or "no leaves"
                near = _nearest(pattern, every)
                hint = "" if near is None else f"; did you mean {near!r}?"
                raise TreeMismatchError(f"{pattern} matches no leaf; the checkpoint has {known}{hint}")


def choose(names: Sequence[str], select: Patterns) -> list[bool]:
    """Return which names match patterns; one that matches none is an error."""
    paths = [name.split(".") for name in names]
    chosen = PathFilter(select)
    chosen.check(paths)
    return [chosen.chooses(path) for path in paths]


class _Path:
    """A path, and the keys that may follow each of its beginnings, each with the beginning that it leads to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: list[list[tuple[str, int]]] = []
        for key in text.split("/"):
            parts = key.split(".") if "." in key else [key]
            begin = len(self.steps)
            self.steps += [[(part, begin + number + 1)] for number, part in enumerate(parts)]
            if len(parts) > 1:
                self.steps[begin].append((key, len(self.steps)))


class _Pattern:
    def __init__(self, option: str, text: str) -> None:
        self.text = text
        self._label = f"{option}={text!r}"
        self._keys = [None if key == "**" else re.compile(fnmatch.translate(key)) for key in text.split("/")]

    def __str__(self) -> str:
        return self._label

    def matches(self, path: _Path) -> bool:
        """Return whether a whole path matches, in time proportional to the product of both lengths."""
        steps = path.steps
        found = {0}  # the beginnings of the path that match the pattern so far
        for key in self._keys:
            if key is None:
                found = set(range(min(found), len(steps) + 1))
            else:
                found = {
                    end for begin in found if begin < len(steps) for text, end in steps[begin] if key.fullmatch(text)
                }
            if not found:
                return False
        return len(steps) in found


def _nearest(pattern: _Pattern, paths: Sequence[_Path]) -> str | None:
    """Return a pattern that matches something and is close to one that matches nothing."""
    for text in (f"{pattern.text}/**", f"**/{pattern.text}", f"**/{pattern.text}/**"):
        if any(map(_Pattern("", text).matches, paths)):
            return text
    known: dict[str, None] = {}  # containers first, as there are fewer
    for path in paths[:_CLOSE]:
        keys = path.text.split("/")
        known |= {"/".join([*keys[:length], "**"]): None for length in range(1, len(keys))}
    known |= {path.text: None for path in paths[:_CLOSE]}
    import difflib  # for an error only

    close = difflib.get_close_matches(pattern.text, list(known)[: 2 * _CLOSE], n=1)
    return close[0] if close else None


def _compiled(patterns: Patterns, option: str) -> list[_Pattern]:
    if isinstance(patterns, str):
        return [_Pattern(option, patterns)]
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(text, str) for text in patterns):
        raise OptionError(
            f"{option}={patterns!r} must be a pattern of paths such as 'params/**', or a list of such patterns"
        )
    return [_Pattern(option, text) for text in patterns]


def _shown(path: Sequence[str]) -> str:
    return format_path(".".join(path))
