"""Control which classes and functions a checkpoint may name; no others are imported, looked up or called."""

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
_MAIN = "__main__:"  # import path prefix of classes in the main program
_FRAMEWORK_CLASSES = (("torch.nn.modules.", "torch.nn", "Module"), ("torch.optim.", "torch.optim", "Optimizer"))

_allowed: dict[str, Any] = {}
_patterns: list[str] = []
_renamed: dict[str, Any] = {}


def was_main(path: str, cls: type) -> bool:
    """True if an import path is ``__main__:`` followed by the qualified name of the given class."""
    return path == f"{_MAIN}{cls.__qualname__}"


def allow(thing: T) -> T:
    """Allow all checkpoints to name a class or function; also works as a decorator.

    Args:
        thing: A class or function, or an import path pattern such as ``"mygame.*"``. A matching module is
            imported when a checkpoint names something in it.

    Returns:
        The class, function or pattern itself.

    >>> @allow
    ... class Config:
    ...     pass
    """
    _add(thing, _allowed, _patterns, "")
    return thing


def allowed_objects() -> list[Any]:
    """Return the classes and functions that all checkpoints may name."""
    return list(_allowed.values())


def _add(target: Any, allowed: dict[str, Any], patterns: list[str], option: str) -> None:
    if isinstance(target, str):
        patterns.append(target)
    elif callable(target) and hasattr(target, "__qualname__"):
        allowed[import_path(target)] = target
    else:
        raise OptionError(f"{option}{target!r:.80} is not a class, a function or a pattern of import paths")


def rename(old: str, new: Any) -> None:
    """Map the import path of a class or function in older checkpoints to its current definition.

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
    """The classes and functions that a single call allows a checkpoint to name."""

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
        for target in [allowed] if isinstance(allowed, str) else allowed:
            _add(target, self._allowed, self._patterns, "allowed=")
        self._renamed = {**_renamed, **{_checked(old): new for old, new in (renamed or {}).items()}}
        self._base = base
        self.main: str | None = None  # the module that was ``__main__`` in the program that saved the checkpoint

    def resolve(self, path: Any, where: str, *, made: bool = False) -> Any:
        """Return the class or function at an import path; ``made`` is true if the checkpoint requests an instance."""
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
        harmless = self._loaded(path, made)
        if harmless is not None:
            return harmless
        if self._trust:
            return _imported(path, where)
        if self._matches(path):
            return self._defined_at(_imported(path, where), path, where)
        raise NotAllowedError(
            f"{where} names {named}, which is not allowed: nothing was imported. Import its module first if it is a "
            "component class, or list it in allowed=[...], or pass trust=True if you know where this checkpoint comes "
            "from; pass renamed={'" + path + "': ...} if its name has changed"
        )

    def _matches(self, path: str) -> bool:
        """True if a pattern matches an import path, written either as ``module:name`` or as ``module.name``."""
        dotted = path.replace(":", ".")
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self._patterns for text in (path, dotted))

    def _defined_at(self, target: Any, path: str, where: str) -> Any:
        """Return ``target`` if the import path of its definition is allowed; otherwise, raise NotAllowedError."""
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        home = f"{module}:{name}" if isinstance(module, str) and isinstance(name, str) else None
        if home is not None and (self._matches(home) or self._allowed.get(home) is target):
            return target
        raise NotAllowedError(
            f"{where} names {path}, which is {home or 'neither a class nor a function'} and not allowed by that name: "
            "it was not called. If you need it, list it in allowed=[...]"
        )

    def _loaded(self, path: str, made: bool) -> Any | None:
        """Return an imported class that is harmless (a component, torch module or torch optimizer), or None."""
        classes = () if self._base is None else (self._base, *derived_classes(self._base))
        if matching := [cls for cls in classes if import_path(cls) == path]:
            return matching[-1]  # the newest, because a notebook may redefine a class
        module, name = path.split(":")
        for prefix, home, base in () if made else _FRAMEWORK_CLASSES:
            root = sys.modules.get(home)
            cls = vars(sys.modules[module]).get(name) if module.startswith(prefix) and module in sys.modules else None
            if root is not None and isinstance(cls, type) and issubclass(cls, getattr(root, base)):
                return cls
        return None


def _imported(path: str, where: str) -> Any:
    module, name = path.split(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # importing a module runs its code, which may raise anything
        raise OptionError(
            f"{where} names {path}, which cannot be imported: {type(error).__name__}: {error}. If its name has "
            f"changed, pass renamed={{{path!r}: ...}}"
        ) from error
    return target
