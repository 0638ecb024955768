"""Parse and format the paths of components, and select components by path.

The path of a component consists of the names of the edges that lead to it, as in :mod:`~holdfast.integrations.graph`.
A dot is part of a name, because policy names often contain dots. However, if a path without slashes matches nothing,
its dots are taken as separators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...engine.errors import OptionError, TreeMismatchError, shortened
from ...engine.pytree import PathFilter, escape_first, escape_key, unescape_key
from ..graph import Path, parse_path

STATE = "state"  # name of a component's state folder, and of the root's item in the commit record

_STATE_ESCAPED = escape_first(STATE)  # the path segment for a component named ``state``

# Component paths or patterns such as ``"learner/*"``. Each match also selects all components below it.
Names = str | Collection[str]


def component_path(text: str) -> Path:
    if not isinstance(text, str) or not text:
        raise OptionError(f"{text!r} is not the path of a component; write 'learner/p0'")
    return tuple(_read_key(key, text) for key in text.split("/"))


def _read_key(key: str, text: str) -> str:
    if key == STATE:
        return _STATE_ESCAPED
    segment = key.replace(".", "%2E")
    try:
        unescape_key(segment)
    except ValueError as error:
        if "%" in key or not key:
            raise OptionError(f"{text!r} is not the path of a component: {error}") from error
        segment = escape_key(key)
    return segment


def format_component_path(path: Path) -> str:
    """Format a component path as users write it; the root is shown as ``(root)``."""
    return "/".join(STATE if segment == _STATE_ESCAPED else segment.replace("%2E", ".") for segment in path) or "(root)"


def named_path(name: object, owner: object) -> Path:
    """Return the path from a component to its child component with the given name."""
    if not isinstance(name, str) or not all(name.split("/")):
        raise OptionError(f"{type(owner).__qualname__} has a component called {name!r}; names must be non-empty text")
    return tuple(_STATE_ESCAPED if key == STATE else escape_key(key) for key in name.split("/"))


def find(text: str, components: Iterable[Path], where: str) -> Path:
    """Return the path of the component that a user has named; raise TreeMismatchError if there is none."""
    paths = [path for path in components if path]
    path = component_path(text)
    if path not in paths and "/" not in text and "." in text:
        path = parse_path(text)
    if path not in paths:
        raise TreeMismatchError(f"{where} has no component {text!r}; it has {_listed(paths)}")
    return path


class Selection:
    """The components that a call selects; ``known`` maps each path to the path under which the component is saved."""

    def __init__(
        self, components: Names | None, not_components: Names | None, known: Mapping[Path, Path], where: str
    ) -> None:
        self._in = None if components is None else _filter(components, known, where)
        self._out = frozenset() if not_components is None else _filter(not_components, known, where)

    def has(self, path: Path) -> bool:
        """True if a component or any component above it is selected, and none of them is excluded."""
        above = {path[:length] for length in range(1, len(path) + 1)}
        return not above & self._out and (self._in is None or bool(above & self._in))

    def leads_to(self, path: Path) -> bool:
        """True if a component is selected or has a selected component below it."""
        excluded = any(path[:length] in self._out for length in range(1, len(path) + 1))
        return self.has(path) or (not excluded and any(selected[: len(path)] == path for selected in self._in or ()))

    def below(self, path: Path) -> tuple[list[str] | None, list[str] | None]:
        """Return the selected components (None for all) and the excluded components below a path, as relative paths."""
        chosen = None if self._in is None or self.has(path) else _relative(self._in, path)
        return chosen, _relative(self._out, path) or None


def _relative(paths: Iterable[Path], above: Path) -> list[str]:
    size = len(above)
    return sorted(format_component_path(path[size:]) for path in paths if path[:size] == above)


def _filter(names: Names, known: Mapping[Path, Path], where: str) -> frozenset[Path]:
    selected: set[Path] = set()
    paths = [path for path in known if path]
    for name in [names] if isinstance(names, str) else names:
        if isinstance(name, str) and any(mark in name for mark in "*?["):
            chosen = PathFilter(name)
            hits = [path for path in paths if chosen.chooses(path)]
            if not hits:
                raise TreeMismatchError(f"{where} has no component that matches {name!r}; it has {_listed(paths)}")
            selected.update(hits)
        else:
            selected.add(find(name, paths, where))
    return frozenset(known[path] for path in selected)


def _listed(paths: Sequence[Path]) -> str:
    return shortened([repr(format_component_path(path)) for path in paths], 20) or "no components"
