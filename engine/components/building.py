"""A component made anew from its directory: constructed by its recipe, and given its state."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ..errors import DamagedCheckpointError, NotAllowedError, OptionError
from ..item import SavedLeaf
from ..tree import escape_key
from ..tree.leaves import ARRAY_KINDS
from .live import live_tree
from .names import Path, written
from .permissions import Permissions, import_path
from .reading import SavedComponent
from .restoring import descend, restore_saved
from .values import ConstructorFailed, Missing, ValueDecoder, construct, on_this_machine

_logger = logging.getLogger("holdfast")


def build(
    base: type,
    saved: SavedComponent,
    *,
    permissions: Permissions,
    fallback: bool = False,
    strict: bool = False,
    overrides: Mapping[str, Any],
) -> Any:
    """Makes a component from what was saved.

    Args:
        base: What the component's class must be, or derive from.
        saved: What was saved.
        permissions: Which classes and functions the checkpoint may name.
        fallback: Use ``base`` and the overrides where the saved class is not known any more.
        strict: Whether components and values that only one side has are errors.
        overrides: Constructor arguments by name, in the place of the saved ones.

    Returns:
        The component, with its state restored.

    Raises:
        NotAllowedError: The checkpoint names a class that is not allowed; nothing was imported.
        OptionError: The saved class is no subclass of ``base``; an override is none of its arguments; or an argument
            was not kept and is not given.
        DamagedCheckpointError: It does not verify.
    """
    try:
        value = _Building(saved, base, permissions, fallback).make(saved, base, overrides)
    except ConstructorFailed as failed:
        raise failed.error from failed.error.__cause__
    # What the caller has asked for wins over plain values of that name in the state: attributes, options of optimizers.
    names = {escape_key(name) for name in overrides}
    restore_saved(
        live_tree(value), saved, strict=strict, keep=lambda at, leaf: at[-1] in names and _is_plain(leaf), fresh=True
    )
    return value


def _is_plain(leaf: SavedLeaf | None) -> bool:
    return leaf is not None and leaf.saved.kind not in ARRAY_KINDS


class _Building:
    """The components that one call makes; one that several recipes refer to is made once."""

    def __init__(self, root: SavedComponent, base: type, permissions: Permissions, fallback: bool) -> None:
        self._root = root
        self._base = base
        self._permissions = permissions
        self._fallback = fallback
        self._made: dict[Path, Any] = {}
        self._under_way: set[Path] = set()

    def make(self, saved: SavedComponent, base: type, overrides: Mapping[str, Any]) -> Any:
        """Constructs a component."""
        if saved.path in self._under_way:
            raise DamagedCheckpointError(f"{saved.location}: its recipe needs the component itself, or one that does")
        self._under_way.add(saved.path)
        description = saved.description
        kind = self._class(description.type, base, str(saved.location))
        recipe = description.recipe
        if kind is None or recipe is None:
            if kind is not None and not overrides and not self._fallback:
                raise OptionError(
                    f"{saved.location}: how to make {description.type} was not saved: {description.obstacle}. Make it "
                    "yourself and call restore_from_path, or pass its constructor arguments by name"
                )
            return construct(kind or base, (), overrides, str(saved.location))
        value = self._construct(kind, recipe, overrides, str(saved.location))
        self._under_way.discard(saved.path)
        return value

    def _class(self, path: str, base: type, where: str) -> Any | None:
        if path == import_path(base):
            return base
        try:
            kind = self._permissions.resolve(path, where, made=True)
        except (NotAllowedError, OptionError):
            if self._fallback and base is self._base:
                _logger.warning("%s: %s is not known; fallback=True makes a %s", where, path, base.__qualname__)
                return None
            raise
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise OptionError(
                f"{where} holds a {path}, which is no {import_path(base)}: call from_checkpoint on a class that it "
                "derives from, or point it at another component"
            )
        return kind

    def _construct(self, kind: Any, recipe: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Any:
        decoder = ValueDecoder(self._permissions, self._component, self._nested, where)
        signature = _signature(kind)
        arguments, unnamed = _named(signature, recipe, where, kind)
        unknown = [name for name in overrides if not _takes(signature, name)]
        if unknown:
            raise OptionError(
                f"{kind.__qualname__} takes no argument {', '.join(map(repr, unknown))}; it takes "
                f"{', '.join(signature.parameters) or 'none'}"
            )
        given = {name: decoder.decode(value) for name, value in arguments.items() if name not in overrides}
        given = {name: on_this_machine(name, value) for name, value in given.items()}
        given.update(overrides)
        rest = [decoder.decode(value) for value in unnamed]
        missing = [
            f"{name} ({value.reason})"
            for name, value in [*given.items(), *((f"*{place}", value) for place, value in enumerate(rest))]
            if isinstance(value, Missing)
        ]
        if missing:
            raise OptionError(
                f"{where}: these arguments of {kind.__qualname__} were not kept; pass them by name: "
                + ", ".join(missing)
            )
        args = []
        for name, parameter in signature.parameters.items():
            if name not in given or parameter.kind not in (
                parameter.POSITIONAL_ONLY,
                *((parameter.POSITIONAL_OR_KEYWORD,) if rest else ()),
            ):
                break
            args.append(given.pop(name))
        try:
            signature.bind(*args, *rest, **given)
        except TypeError as error:
            raise OptionError(
                f"{where}: {kind.__qualname__} cannot be made of the saved arguments: {error}; pass it by name"
            ) from error
        return construct(kind, (*args, *rest), given, where)

    def _component(self, reference: str) -> Any:
        """Returns the component that a recipe refers to by its path in the tree that was saved."""
        goal = tuple(segment for segment in reference.split("/") if segment)
        start = self._root.description.path
        saved = descend(self._root, goal[len(start) :]) if goal[: len(start)] == start else None
        if saved is None:
            return Missing(f"it is the component {written(goal) or '(root)'}, which is not part of what is loaded")
        if saved.path not in self._made:
            self._made[saved.path] = self.make(saved, object, {})
        return self._made[saved.path]

    def _nested(self, content: Any) -> Any:
        """Makes an object from a recipe that is part of another one."""
        if not isinstance(content, dict) or not isinstance(recipe := content.get("constructor"), dict):
            raise TypeError(f"expected a recipe, found {content!r:.80}")
        if not isinstance(recipe.get("args"), list) or not isinstance(recipe.get("kwargs"), dict):
            raise TypeError(f"expected a recipe, found {content!r:.80}")
        where = str(self._root.location)
        kind = self._permissions.resolve(content.get("class"), where, made=True)
        if not isinstance(kind, type):
            raise TypeError(f"{content.get('class')!r:.80} is no class")
        return self._construct(kind, recipe, {}, where)


def _signature(kind: Any) -> inspect.Signature:
    try:
        own = inspect.signature(kind.__init__)
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
    return own.replace(parameters=list(own.parameters.values())[1:])


def _named(
    signature: inspect.Signature, recipe: Mapping[str, Any], where: str, kind: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Gives positional arguments their names; returns those that have none besides."""
    try:
        bound = signature.bind_partial(*recipe["args"], **recipe["kwargs"])
    except TypeError as error:
        raise OptionError(
            f"{where}: the constructor of {kind.__qualname__} does not take the arguments any more that were saved: "
            f"{error}. Make the object yourself and call restore_from_path"
        ) from error
    arguments: dict[str, Any] = {}
    rest: list[Any] = []
    for name, value in bound.arguments.items():
        variety = signature.parameters[name].kind
        if variety is inspect.Parameter.VAR_POSITIONAL:
            rest += value
        elif variety is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments, rest


def _takes(signature: inspect.Signature, name: str) -> bool:
    found = signature.parameters.get(name)
    if found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY, found.POSITIONAL_ONLY):
        return True
    return any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
