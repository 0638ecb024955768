"""Leaf names, which represent each key path as a unique string, and patterns that select paths.

A leaf's name is its keys joined with ``.``: ``params.Dense_0.kernel``. Special characters in keys are percent-escaped.
A bare leaf, that is, a tree without containers, has the empty name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import OptionError, TreeMismatchError, did_you_mean, shortened

# "." joins keys, "/" separates a name from its chunk keys, and "%" begins an escape. Control characters and lone
# surrogates cannot be printed or stored everywhere.
_ESCAPED = re.compile("[./%\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SEQUENCE = re.compile("(?:%[0-9A-F]{2})+")
_LOCK = "__lock"  # suffix of the lock files that TensorStore's file driver creates


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def escape_key(key: str) -> str:
    """Escape one key of a name."""
    if key.isidentifier() and not key.endswith(_LOCK):
        return key  # the common case; this check is four times as fast as the search below
    if not key:
        return "%"
    escaped = _ESCAPED.sub(lambda match: _percent(match.group()), key)
    if escaped.endswith(_LOCK):
        escaped = escaped[: -len(_LOCK)] + "%5F" + _LOCK[1:]
    return escaped


def escape_keys(keys: Sequence[str]) -> list[str]:
    """Escape keys, with fast paths for keys that need no escaping and for keys in which only dots need it."""
    if _are_plain(keys):
        return list(keys)
    return [key.replace(".", "%2E") for key in keys] if _are_plain(keys, ".") else list(map(escape_key, keys))


def unescape_keys(texts: Sequence[str]) -> list[str]:
    if _are_plain(texts):
        return list(texts)
    return [text.replace("%2E", ".") for text in texts] if _are_plain(texts, "%2E") else list(map(unescape_key, texts))


def _are_plain(keys: Sequence[str], dot: str = "") -> bool:
    """True if all keys consist of letters, digits, underscores and ``dot``, so that only dots need escaping."""
    joined = "_".join(keys)
    joined = joined.replace(dot, "") if dot else joined
    return all(keys) and f"_{joined}".isidentifier() and _LOCK not in joined


def escape_first(key: str) -> str:
    """Escape a key including its first character, so that the result differs from ``escape_key(key)``."""
    return _percent(key[0]) + escape_key(key[1:]) if len(key) > 1 else _percent(key)


def unescape_key(text: str) -> str:
    if text.isidentifier():
        return text  # the common case
    if text == "%":
        return ""
    if not text or _ESCAPED.search(_SEQUENCE.sub("", text)):
        raise ValueError(f"{text!r} is not an escaped key")
    # Each run of escapes is decoded separately, so that a lone surrogate does not combine with its neighbor.
    return _SEQUENCE.sub(lambda match: _decode(match.group(), text), text)


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
"""Attributes in which torch wrappers (DDP, ``torch.compile``, Fabric, activation checkpointing) store the module."""

_WRAPPED_KEYS = re.compile(rf"(?:(?<=\.)|(?<=%2E)|^)(?:(?:{'|'.join(WRAPPED)})(?:\.|%2E))+")


def unwrapped_name(name: str) -> str:
    """Return a leaf name without the keys that module wrappers add to it."""
    return _WRAPPED_KEYS.sub("", name)


def joined_names(names: Sequence[str]) -> list[str]:
    """Return names with all keys joined by dots, and without wrapper keys if the names stay distinct.

    For example, ``layers.0.weight`` in a module's state dict gets the same name as the nested ``layers/0/weight``.
    """
    joined = [".".join(split(name)) for name in names]
    bare = list(map(unwrapped_name, joined))
    return bare if len(set(bare)) == len(set(joined)) else joined


def format_path(name: str) -> str:
    """Return a name as a path for messages: ``params/Dense_0/kernel``, or ``(root)`` for a bare leaf.

    Distinct names have distinct paths. Ambiguous and unprintable characters stay escaped, but dots do not.
    """
    if not name:
        return "(root)"
    return name.replace(".", "/").replace("%2E", ".")


Patterns = str | Sequence[str]
"""Patterns of paths such as ``"params/**"``: ``*``, ``?`` and ``[ab]`` match within one key, ``**`` matches any number
of whole keys. A key that contains dots, such as ``encoder.0.weight`` in a module's state dict, can be matched either as
a single key or split at its dots, so ``encoder/**`` and ``**/weight`` match it."""

_WILD = set("*?[")
_CLOSE = 2000  # maximum number of paths to search for a suggestion if a pattern matches no path


class PathFilter:
    """Selects paths by patterns. A path is the sequence of escaped keys of a leaf name."""

    def __init__(
        self, select: Patterns | None = None, exclude: Patterns | None = None, *, option: str = "exclude"
    ) -> None:
        """``option`` is the name by which error messages refer to the ``exclude`` argument."""
        self._select = None if select is None else compiled(select, "select")
        self._exclude = [] if exclude is None else compiled(exclude, option)

    def chooses(self, path: Sequence[str]) -> bool:
        """True if a path is selected and not excluded."""
        if self._select is None and not self._exclude:
            return True
        keys = _shown(path)
        if any(pattern.matches(keys) for pattern in self._exclude):
            return False
        return self._select is None or any(pattern.matches(keys) for pattern in self._select)

    def check(self, paths: Iterable[Sequence[str]], advice: str = "") -> None:
        patterns = [*(self._select or ()), *self._exclude]
        if not patterns:
            return
        shown = list(map(_shown, paths))
        for pattern in patterns:
            if not any(map(pattern.matches, shown)):
                leaves = shortened([repr("/".join(path)) for path in shown]) or "no leaves"
                near = _nearest(pattern, shown)
                raise TreeMismatchError(f"{pattern} matches no leaf; the checkpoint has {leaves}{near}{advice}")


def choose(names: Sequence[str], select: Patterns) -> list[bool]:
    """Return, for each name, whether it matches the patterns; raise TreeMismatchError if a pattern matches no name."""
    paths = [name.split(".") for name in names]
    chosen = PathFilter(select)
    chosen.check(paths)
    return [chosen.chooses(path) for path in paths]


class Pattern:
    """A pattern, matched key by key against a path. A *position* is the number of pattern keys matched so far."""

    def __init__(self, option: str, text: str) -> None:
        self.text = text
        self._label = f"{option}={text!r}"
        self._texts = text.split("/")
        self._matchers = list(map(_matcher, self._texts))
        skipped = [[position] for position in range(len(self._texts) + 1)]  # ``**`` may match zero keys
        for position, text in reversed([*enumerate(self._texts)]):
            skipped[position] += skipped[position + 1] if text == "**" else []
        self._next = [skipped[position + (text != "**")] for position, text in enumerate(self._texts)]
        self.begin: Collection[int] = skipped[0]

    def __str__(self) -> str:
        return self._label

    def after(self, positions: Collection[int], key: str) -> set[int]:
        """Return the positions reached after a path key; a key that contains dots is also matched part by part."""
        reached = self._after(positions, key)
        if "." in key:
            for part in key.split("."):
                positions = self._after(positions, part)
            reached.update(positions)
        return reached

    def _after(self, positions: Collection[int], key: str) -> set[int]:
        matching = [each for each in positions if each < len(self._matchers) and self._matchers[each](key)]
        return {following for position in matching for following in self._next[position]}

    def literal(self, positions: Collection[int]) -> Collection[str] | None:
        """Return the literal keys that can match next, ignoring keys with dots; None if a wildcard can match."""
        keys = [self._texts[position] for position in positions if position < len(self._texts)]
        return None if any(set(key) & _WILD for key in keys) else keys

    def ends(self, positions: Collection[int]) -> bool:
        """True if a path that ends at these positions matches."""
        return len(self._texts) in positions

    def takes_all(self, positions: Collection[int]) -> bool:
        """True if every path that continues from these positions matches."""
        return self._texts[-1] == "**" and len(self._texts) - 1 in positions

    def matches(self, path: Iterable[str]) -> bool:
        """True if an entire path matches. The run time is proportional to pattern length times path length."""
        positions = self.begin
        for key in path:
            positions = self.after(positions, key)
            if not positions:
                return False
        return self.ends(positions)


def _matcher(key: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(key)).fullmatch if set(key) & _WILD else key.__eq__


def _nearest(pattern: Pattern, paths: Sequence[Sequence[str]]) -> str:
    """Return a message suffix that suggests a pattern like one that matches no path, or ""."""
    for text in (f"{pattern.text}/**", f"**/{pattern.text}", f"**/{pattern.text}/**"):
        if any(map(Pattern("", text).matches, paths)):
            return f"; did you mean {text!r}?"
    containers = ("/".join([*keys[:length], "**"]) for keys in paths[:_CLOSE] for length in range(1, len(keys)))
    candidates = dict.fromkeys([*containers, *map("/".join, paths[:_CLOSE])])  # containers, which are fewer, come first
    return did_you_mean(pattern.text, list(candidates)[: 2 * _CLOSE], "{!r}")


def compiled(patterns: Patterns, option: str) -> list[Pattern]:
    if isinstance(patterns, str):
        return [Pattern(option, patterns)]
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(text, str) for text in patterns):
        raise OptionError(
            f"{option}={patterns!r} must be a pattern of paths such as 'params/**', or a list of such patterns"
        )
    return [Pattern(option, text) for text in patterns]


def _shown(path: Sequence[str]) -> list[str]:
    return format_path(".".join(path)).split("/")
