"""Paths of components: how people and programs write them, and which components a call is about.

A component's path is the names of the edges that lead to it, as in :mod:`~holdfast.engine.graph`. Here a dot belongs to
a name, as names of policies often have some; what a path without a slash does not find is tried with dots between keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import OptionError, TreeMismatchError
from ..graph import Path, PathFilter, parse_path, shown
from ..tree import escape_key, unescape_key
from ..tree.names import escape_first

OWN = "state"
"""Name of the folder that a component's own state is in, and of that item in the commit record."""

_OWN_ESCAPED = escape_first(OWN)  # what a component of that name is called on disk

Names = str | Collection[str]
"""Paths of components, or patterns of them such as ``"learner/*"``; what is below one of them is meant, too."""

__all__ = ["OWN", "Names", "Path", "Selection", "component_path", "find", "name_of", "named_path", "shown", "written"]


def component_path(text: str) -> Path:
    """Reads the path of a component that a person wrote.

    Args:
        text: Such as ``"learner/p0"``. A slash within a name is written ``%2F``.

    Raises:
        OptionError: It is not the path of anything.
    """
    if not isinstance(text, str) or not text:
        raise OptionError(f"{text!r} is not the path of a component; write 'learner/p0'")
    return tuple(_read(key, text) for key in text.split("/"))


def named_path(name: object, owner: object) -> Path:
    """Returns the path from a component to one of its own, by the name that it gives it.

    Args:
        name: The name; one with slashes in it is a path.
        owner: The component that gives it, for the message.

    Raises:
        OptionError: It is no name.
    """
    if not isinstance(name, str) or not all(name.split("/")):
        raise OptionError(f"{type(owner).__qualname__} has a component called {name!r}; names are text, none is empty")
    return tuple(_OWN_ESCAPED if key == OWN else escape_key(key) for key in name.split("/"))


def _read(key: str, text: str) -> str:
    if key == OWN:
        return _OWN_ESCAPED
    segment = key.replace(".", "%2E")
    try:
        unescape_key(segment)
    except ValueError as error:
        if "%" in key or not key:
            raise OptionError(f"{text!r} is not the path of a component: {error}") from error
        segment = escape_key(key)
    return segment


def written(path: Path) -> str:
    """Returns a path as a person writes it."""
    return "/".join(OWN if segment == _OWN_ESCAPED else segment.replace("%2E", ".") for segment in path)


def name_of(path: Path) -> str:
    """Returns the name that a component has with the one above it; :func:`named_path` reads it."""
    return "/".join(OWN if segment == _OWN_ESCAPED else str(unescape_key(segment)) for segment in path)


def find(text: str, known: Iterable[Path], where: str) -> Path:
    """Returns the one of the known components that a person means.

    Args:
        text: Its path.
        known: The paths that there are.
        where: What has them, for the message.

    Raises:
        TreeMismatchError: There is none of this path; names those that there are.
    """
    paths = [path for path in known if path]
    path = component_path(text)
    if path not in paths and "/" not in text and "." in text:
        path = parse_path(text)
    if path not in paths:
        raise TreeMismatchError(f"{where} has no component {text!r}; it has {_listed(paths)}")
    return path


class Selection:
    """Which components a call is about.

    Args:
        components: Those that are, with all that is below them; None is all.
        not_components: Those that are not; this wins.
        known: The paths of all components that there are.
        where: What has them, for messages.

    Raises:
        TreeMismatchError: One of the names matches nothing; names the components that there are.
        OptionError: A name is not the path of a component.
    """

    def __init__(
        self, components: Names | None, not_components: Names | None, known: Collection[Path], where: str
    ) -> None:
        self._in = None if components is None else _filter(components, known, where)
        self._out = None if not_components is None else _filter(not_components, known, where)

    def has(self, path: Path) -> bool:
        """Tells whether a component is meant, itself or something above it."""
        above = [path[:length] for length in range(1, len(path) + 1)]
        if self._out is not None and any(map(self._out.__contains__, above)):
            return False
        return self._in is None or any(map(self._in.__contains__, above))

    def leads_to(self, path: Path) -> bool:
        """Tells whether a component is meant, or is on the way to one that is."""
        if self.has(path):
            return True
        excluded = self._out is not None and any(path[:length] in self._out for length in range(1, len(path) + 1))
        return not excluded and self._in is not None and any(one[: len(path)] == path for one in self._in)

    def below(self, path: Path, write: Callable[[Path], str]) -> tuple[list[str] | None, list[str] | None]:
        """Says the same of what is below a component, to that component.

        Args:
            path: The component's path.
            write: How paths are written.

        Returns:
            What to pass as ``components`` and as ``not_components``.
        """
        size = len(path)
        chosen = None if self._in is None or self.has(path) else [one[size:] for one in self._in if one[:size] == path]
        excluded = [one[size:] for one in self._out or () if one[:size] == path]
        return None if chosen is None else sorted(map(write, chosen)), sorted(map(write, excluded)) or None


def _filter(names: Names, known: Collection[Path], where: str) -> frozenset[Path]:
    found: set[Path] = set()
    paths = [path for path in known if path]
    for name in [names] if isinstance(names, str) else names:
        if isinstance(name, str) and any(mark in name for mark in "*?["):
            chosen = PathFilter(name)
            hits: Sequence[Path] = [path for path in paths if chosen.chooses(path)]
            if not hits:
                raise TreeMismatchError(f"{where} has no component that matches {name!r}; it has {_listed(paths)}")
            found.update(hits)
        else:
            found.add(find(name, paths, where))
    return frozenset(found)


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(repr(written(path)) for path in paths[:20]) or "no components"
    return names + (f" and {len(paths) - 20} more" if len(paths) > 20 else "")
