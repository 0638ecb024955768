"""Paths through an object graph: how they are written, and patterns that choose some of them.

An edge is named by the escaped form of its key, as in the names of leaves (:mod:`~holdfast.engine.tree.names`); a path
is the names of the edges from the root.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from ..errors import OptionError, TreeMismatchError
from ..tree import display, unescape_key

Path = tuple[str, ...]
"""The names of the edges from the root to a node, each escaped."""

Patterns = str | Sequence[str]
"""Patterns of paths such as ``"net/**"``: ``*``, ``?`` and ``[ab]`` match within one key, ``**`` any number of keys."""


def storage_name(path: Path) -> str:
    """Returns a path as the engine names leaves: ``net.l1.weight``."""
    return ".".join(path)


def shown(path: Path) -> str:
    """Returns a path as people read it: ``net/l1/weight``; the root is ``(root)``."""
    return display(storage_name(path))


def parse_path(text: str) -> Path:
    """Reads a path that a person wrote, as it is shown (``net/l1/weight``) or as leaves are named (``net.l1.weight``).

    Args:
        text: With a slash in it, dots belong to the keys; without one, dots separate the keys.

    Raises:
        OptionError: It is not the path of anything.
    """
    if not isinstance(text, str) or not text:
        raise OptionError(f"{text!r} is not a path; write 'net/l1/weight' or 'net.l1.weight'")
    path = tuple(key.replace(".", "%2E") for key in text.split("/")) if "/" in text else tuple(text.split("."))
    try:
        for key in path:
            unescape_key(key)
    except ValueError as error:
        raise OptionError(f"{text!r} is not a path: {error}") from error
    return path


class PathFilter:
    """Chooses paths by patterns.

    Args:
        select: A path must match one of these; None is every path.
        exclude: A path must match none of these.

    Raises:
        OptionError: A pattern is no text.
    """

    def __init__(self, select: Patterns | None = None, exclude: Patterns | None = None) -> None:
        self._select = None if select is None else _compiled(select, "select")
        self._exclude = [] if exclude is None else _compiled(exclude, "exclude")

    def chooses(self, path: Path) -> bool:
        """Tells whether a path is chosen."""
        if self._select is None and not self._exclude:
            return True
        keys = shown(path).split("/")
        if any(_matches(keys, pattern) for _, pattern in self._exclude):
            return False
        return self._select is None or any(_matches(keys, pattern) for _, pattern in self._select)

    def check(self, paths: Iterable[Path]) -> None:
        """Makes sure that every pattern matches something.

        Raises:
            TreeMismatchError: One matches none of the paths.
        """
        if self._select is None and not self._exclude:
            return
        every = [shown(path) for path in paths]
        keys = [path.split("/") for path in every]
        for text, pattern in [*(self._select or ()), *self._exclude]:
            if not any(_matches(path, pattern) for path in keys):
                more = f" and {len(every) - 8} more" if len(every) > 8 else ""
                known = ", ".join(map(repr, every[:8]))
                raise TreeMismatchError(f"the pattern {text!r} matches no path; there are {known}{more}")


_Pattern = list[re.Pattern[str] | None]


def _compiled(patterns: Patterns, option: str) -> list[tuple[str, _Pattern]]:
    texts = (
        [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Sequence) else [patterns]
    )
    if not texts or not all(isinstance(text, str) for text in texts):
        raise OptionError(
            f"{option}={patterns!r} must be a pattern of paths such as 'net/**', or a list of such patterns"
        )
    return [
        (text, [None if key == "**" else re.compile(fnmatch.translate(key)) for key in text.split("/")])
        for text in texts
    ]


def _matches(keys: Sequence[str], pattern: Sequence[re.Pattern[str] | None]) -> bool:
    """Whether a path matches a pattern, in time proportional to the product of their lengths."""
    reached = {0}  # how many keys of the path the pattern so far may have taken
    for part in pattern:
        if part is None:
            reached = set(range(min(reached), len(keys) + 1))
        else:
            reached = {taken + 1 for taken in reached if taken < len(keys) and part.fullmatch(keys[taken])}
        if not reached:
            return False
    return len(keys) in reached
