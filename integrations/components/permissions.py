"""The classes and functions that a checkpoint may name: nothing else is imported, looked up or called."""

from __future__ import annotations

import fnmatch
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ...engine.errors import NotAllowedError, OptionError
from ...engine.pytree import import_path
from ..graph import current_name, derived_classes

T = TypeVar("T")

_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<locals>))*")
_LONGEST = 500
_MAIN = "__main__:"  # prefix of the names of classes that the program itself defines, rather than a module of it
_FRAMEWORK_CLASSES = (("torch.nn.modules.", "torch.nn", "Module"), ("torch.optim.", "torch.optim", "Optimizer"))

_allowed: dict[str, Any] = {}
_patterns: list[str] = []
_renamed: dict[str, Any] = {}


def was_main(path: str, kind: type) -> bool:
    """Whether an import path names a class by its qualified name, in the program that was run."""
    return path == f"{_MAIN}{kind.__qualname__}"


def allow(thing: T) -> T:
    """Allow every checkpoint to name a class or function; also a decorator.

    Args:
        thing: A class or function; or a pattern of import paths such as ``"mygame.*"``. A module that matches is
            imported when a checkpoint names something in it.

    Returns:
        The same.

    >>> @allow
    ... class Config:
    ...     pass
    """
    _add(thing, _allowed, _patterns, "")
    return thing


def allowed_objects() -> list[Any]:
    """Return the classes and functions that every checkpoint may name."""
    return list(_allowed.values())


def _add(thing: Any, allowed: dict[str, Any], patterns: list[str], option: str) -> None:
    if isinstance(thing, str):
        patterns.append(thing)
    elif callable(thing) and hasattr(thing, "__qualname__"):
        allowed[import_path(thing)] = thing
    else:
        raise OptionError(f"{option}{thing!r:.80} is neither a class or function nor a pattern of import paths")


def rename(old: str, new: Any) -> None:
    """Declare the class or function that a name in older checkpoints stands for now.

    Args:
        old: The import path in the checkpoints, such as ``"game.policies:Net"``.
        new: The class or function itself, or its import path, which must be allowed.
    """
    _renamed[_checked(old)] = new


def _is_import_path(path: Any) -> bool:
    return isinstance(path, str) and len(path) <= _LONGEST and _NAME.fullmatch(path) is not None


def _checked(path: Any) -> str:
    if not _is_import_path(path):
        raise OptionError(f"{path!r:.120} is not an import path; write 'package.module:Name'")
    return str(path)


class Permissions:
    """The classes and functions that one call allows."""

    def __init__(
        self,
        *,
        trust: bool = False,
        allowed: Iterable[Any] | str = (),
        renamed: Mapping[str, Any] | None = None,
        base: type | None = None,
    ) -> None:
        self._trust = trust
        if not isinstance(allowed, Iterable) or isinstance(allowed, type):
            raise OptionError(
                f"allowed={allowed!r:.80} must be a list of classes, functions and patterns of import paths"
            )
        self._patterns, self._allowed = list(_patterns), dict(_allowed)
        for thing in [allowed] if isinstance(allowed, str) else allowed:
            _add(thing, self._allowed, self._patterns, "allowed=")
        self._renamed = {**_renamed, **{_checked(old): new for old, new in (renamed or {}).items()}}
        self._base = base
        self.main: str | None = None  # the name in this program of the ``__main__`` that saved

    def resolve(self, path: Any, where: str, *, made: bool = False) -> Any:
        """Return the class or function of an import path; ``made`` if the checkpoint wants an instance made."""
        if not _is_import_path(path):
            raise NotAllowedError(f"{where}: {path!r:.120} is not the import path of a class or function")
        named = path
        if path in self._renamed:
            new = self._renamed[path]
            if not isinstance(new, str):
                return new
            path = _checked(new)
            named += f", now {path}"
        elif self.main is not None and path.startswith(_MAIN):
            path = self.main + path.removeprefix("__main__")
            named += f", here {path}"
        path = current_name(path)
        if path in self._allowed:
            return self._allowed[path]
        found = self._loaded(path, made)
        if found is not None:
            return found
        if self._trust:
            return _imported(path, where)
        if self._matches(path):
            return self._defined_at(_imported(path, where), path, where)
        raise NotAllowedError(
            f"{where} names {named}, which is not allowed: nothing was imported. Import its module first if it is a "
            "class of components, or pass allowed=[...] with it, or trust=True if you know where this checkpoint comes "
            "from; renamed={'" + path + "': ...} if it has another name now"
        )

    def _matches(self, path: str) -> bool:
        """Whether a pattern matches an import path, as it is or with a dot for the colon."""
        dotted = path.replace(":", ".")
        return any(fnmatch.fnmatchcase(one, pattern) for pattern in self._patterns for one in (path, dotted))

    def _defined_at(self, found: Any, path: str, where: str) -> Any:
        """Return an object that a pattern allows, if it is defined at that path, and not only imported there."""
        home, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        own = f"{home}:{name}" if isinstance(home, str) and isinstance(name, str) else None
        if own is not None and (self._matches(own) or self._allowed.get(own) is found):
            return found
        raise NotAllowedError(
            f"{where} names {path}, which is {own or 'neither a class nor a function'} and not allowed by that name: "
            "it was not called. Pass allowed=[...] with it if it is needed"
        )

    def _loaded(self, path: str, made: bool) -> Any | None:
        """Return a loaded class that is harmless: one of components, or a layer or optimizer of torch."""
        known = () if self._base is None else (self._base, *derived_classes(self._base))
        if found := [kind for kind in known if import_path(kind) == path]:
            return found[-1]  # The newest one counts: a notebook may define a class again.
        module, name = path.split(":")
        for prefix, home, base in () if made else _FRAMEWORK_CLASSES:
            root = sys.modules.get(home)
            kind = vars(sys.modules[module]).get(name) if module.startswith(prefix) and module in sys.modules else None
            if root is not None and isinstance(kind, type) and issubclass(kind, getattr(root, base)):
                return kind
        return None


def _imported(path: str, where: str) -> Any:
    module, name = path.split(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"{where} names {path}, which cannot be imported: {error}. If it has another name now, pass "
            f"renamed={{{path!r}: ...}}"
        ) from error
    return found
