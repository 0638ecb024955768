"""Which classes and functions a checkpoint may name: nothing is imported, looked up or called unless it is allowed."""

from __future__ import annotations

import fnmatch
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ..errors import NotAllowedError, OptionError

T = TypeVar("T")

_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<locals>))*")
_LONGEST = 500
_FRAMEWORK_CLASSES = (("torch.nn.modules.", "torch.nn", "Module"), ("torch.optim.", "torch.optim", "Optimizer"))

_allowed: dict[str, Any] = {}
_patterns: list[str] = []
_renamed: dict[str, Any] = {}


def import_path(thing: Any) -> str:
    """Returns how recipes name a class or function: ``"module:qualified.name"``."""
    return f"{thing.__module__}:{thing.__qualname__}"


def allow(thing: T) -> T:
    """Lets every checkpoint use a class or function by its name; also a decorator.

    Args:
        thing: A class or function; or a pattern of import paths such as ``"mygame.*"``, of which modules are imported
            when a checkpoint names something in them.

    Returns:
        The same.

    >>> @allow
    ... class Config:
    ...     pass
    """
    if isinstance(thing, str):
        _patterns.append(thing)
    elif callable(thing) and hasattr(thing, "__qualname__"):
        _allowed[import_path(thing)] = thing
    else:
        raise OptionError(f"{thing!r:.80} is neither a class or function nor a pattern of import paths")
    return thing


def rename(old: str, new: Any) -> None:
    """Says what the name of a class or function in older checkpoints stands for now.

    Args:
        old: The import path in the checkpoints, such as ``"game.policies:Net"``.
        new: The class or function itself, or its import path, which has to be allowed, then.
    """
    _renamed[_checked(old)] = new


def _checked(path: Any) -> str:
    if not isinstance(path, str) or len(path) > _LONGEST or _NAME.fullmatch(path) is None:
        raise OptionError(f"{path!r:.120} is not an import path; write 'package.module:Name'")
    return path


class Permissions:
    """What one call allows.

    Args:
        trust: Whether anything may be imported.
        allowed: Classes, functions, and patterns of import paths that are allowed besides those of :func:`allow`.
        renamed: For import paths in the checkpoint what they stand for now.
        base: What classes of components derive from that need no permission as long as they are loaded.

    Raises:
        OptionError: An argument is of another kind.
    """

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
        things = [allowed] if isinstance(allowed, str) else list(allowed)
        self._patterns = [*_patterns, *(thing for thing in things if isinstance(thing, str))]
        self._allowed = dict(_allowed)
        for thing in things:
            if not isinstance(thing, str):
                if not callable(thing) or not hasattr(thing, "__qualname__"):
                    raise OptionError(
                        f"allowed=[{thing!r:.80}] must hold classes, functions, or patterns of import paths"
                    )
                self._allowed[import_path(thing)] = thing
        self._renamed = {**_renamed, **{_checked(old): new for old, new in (renamed or {}).items()}}
        self._base = base

    def resolve(self, path: Any, where: str, *, made: bool = False) -> Any:
        """Returns the class or function of an import path.

        Args:
            path: The path, not trusted in any way.
            where: Who names it, for messages.
            made: Whether an instance is to be made of it, with arguments that are not trusted either. Layers and
                optimizers of torch need a permission for that.

        Raises:
            NotAllowedError: It is not allowed.
            OptionError: It is allowed, and cannot be found.
        """
        if not isinstance(path, str) or len(path) > _LONGEST or _NAME.fullmatch(path) is None:
            raise NotAllowedError(f"{where}: {path!r:.120} is not the import path of a class or function")
        named = path
        if path in self._renamed:
            new = self._renamed[path]
            if not isinstance(new, str):
                return new
            path = _checked(new)
            named += f", now {path}"
        if path in self._allowed:
            return self._allowed[path]
        found = self._loaded(path, made)
        if found is not None:
            return found
        if self._trust:
            return _imported(path, where)
        if self._matches(path):
            return self._own(_imported(path, where), path, where)
        raise NotAllowedError(
            f"{where} names {named}, which is not allowed: nothing was imported. Import its module first if it is a "
            "class of components, or pass allowed=[...] with it, or trust=True if you know where this checkpoint comes "
            "from; renamed={'" + path + "': ...} if it is called otherwise now"
        )

    def _matches(self, path: str) -> bool:
        """Whether a pattern allows an import path; the colon in it counts as a dot, too."""
        dotted = path.replace(":", ".")
        return any(fnmatch.fnmatchcase(one, pattern) for pattern in self._patterns for one in (path, dotted))

    def _own(self, found: Any, path: str, where: str) -> Any:
        """Returns what a pattern has allowed if it is defined there, and not just imported there by its module."""
        home, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        own = f"{home}:{name}" if isinstance(home, str) and isinstance(name, str) else None
        if own is not None and (self._matches(own) or self._allowed.get(own) is found):
            return found
        raise NotAllowedError(
            f"{where} names {path}, which is {own or 'neither a class nor a function'} and not allowed by that name: "
            "it was not called. Pass allowed=[...] with it if it is needed"
        )

    def _loaded(self, path: str, made: bool) -> Any | None:
        """Returns a class that is loaded already and harmless: one of components, or a layer or optimizer of torch."""
        found = [] if self._base is None else [kind for kind in _subclasses(self._base) if import_path(kind) == path]
        if found:
            return found[-1]  # the newest: an older one of the same name was defined anew, as in a notebook
        module, name = path.split(":")
        for prefix, home, base in () if made else _FRAMEWORK_CLASSES:
            root = sys.modules.get(home)
            kind = vars(sys.modules[module]).get(name) if module.startswith(prefix) and module in sys.modules else None
            if root is not None and isinstance(kind, type) and issubclass(kind, getattr(root, base)):
                return kind
        return None


def _subclasses(base: type) -> Iterator[type]:
    yield base
    seen = {base}
    queue: list[type] = [base]
    for kind in queue:
        children: list[type] = type.__subclasses__(kind)
        for child in children:
            if child not in seen:
                seen.add(child)
                queue.append(child)
                yield child


def _imported(path: str, where: str) -> Any:
    module, name = path.split(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"{where} names {path}, which cannot be imported: {error}. If it is called otherwise now, pass "
            f"renamed={{{path!r}: ...}}"
        ) from error
    return found
