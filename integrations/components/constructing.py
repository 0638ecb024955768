"""Construction of components from a checkpoint: from their constructor specs, with their states."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...engine.arrays import SavedLeaf
from ...engine.errors import DamagedCheckpointError, NotAllowedError, OptionError
from ...engine.pytree import ARRAY_KINDS, escape_key, import_path, loaded
from ..graph import Path, current_name
from .constructor_spec import ConstructorFailed, Missing, SpecDecoder, available, check_spec, construct
from .live import live_tree
from .names import format_component_path
from .permissions import Permissions, was_main
from .reading import SavedComponent, descend
from .restoring import TreeRestore

_logger = logging.getLogger("holdfast")

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build(
    base: type,
    saved: SavedComponent,
    *,
    permissions: Permissions,
    fallback: bool = False,
    strict: bool = False,
    overrides: Mapping[str, Any],
) -> Any:
    if was_main(saved.description.type, base):
        permissions.main = base.__module__
    try:
        value = _Building(saved, base, permissions, fallback).make(saved, base, overrides)
    except ConstructorFailed as failed:
        raise failed.error from failed.error.__cause__
    # The overrides win over plain values of the same name in the state: attributes, options of optimizers.
    names = {escape_key(name) for name in overrides}

    def keep(path: Path, leaf: SavedLeaf | None) -> bool:
        return path[-1] in names and leaf is not None and leaf.saved.kind not in ARRAY_KINDS

    TreeRestore(live_tree(value), saved, strict=strict, keep=keep, fresh=True).run()
    return value


@dataclass(eq=False)
class _Building:
    """Constructs the components of one call; one that several specs refer to is constructed once."""

    root: SavedComponent
    base: type
    permissions: Permissions
    fallback: bool
    made: dict[Path, Any] = field(default_factory=dict)
    under_way: set[Path] = field(default_factory=set)

    def make(self, saved: SavedComponent, base: type, overrides: Mapping[str, Any]) -> Any:
        if saved.path in self.under_way:
            raise DamagedCheckpointError(
                f"{saved.location}: its constructor spec needs the component itself, or one that does"
            )
        self.under_way.add(saved.path)
        description, where = saved.description, str(saved.location)
        kind = self._class(description.type, base, where)
        if kind is not None and description.constructor is not None:
            value = self._construct(kind, description.constructor, overrides, where)
            self.under_way.discard(saved.path)
            return value
        if kind is not None and not overrides and not self.fallback:
            raise OptionError(
                f"{where}: the constructor arguments of {description.type} were not saved: {description.obstacle}. "
                "Make it yourself and call restore_from_path, or pass them by name"
            )
        return construct(kind or base, (), overrides, where)

    def _class(self, path: str, base: type, where: str) -> Any | None:
        if current_name(path) == import_path(base) or was_main(path, base):
            return base
        try:
            kind = self.permissions.resolve(path, where, made=True)
        except (NotAllowedError, OptionError):
            if self.fallback and base is self.base:
                _logger.warning("%s: %s is unknown; fallback=True makes a %s", where, path, base.__qualname__)
                return None
            raise
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise OptionError(
                f"{where} holds a {path}, which is no {import_path(base)}: call from_checkpoint on a class that it "
                "derives from, or point it at another component"
            )
        return kind

    def _construct(self, kind: Any, spec: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Any:
        decoder = SpecDecoder(self.permissions, self._component, self._nested, where)
        signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
        with contextlib.suppress(TypeError, ValueError):
            own = inspect.signature(kind.__init__)
            signature = own.replace(parameters=list(own.parameters.values())[1:])
        try:
            bound = signature.bind_partial(*spec["args"], **spec["kwargs"])
        except TypeError as error:
            raise OptionError(
                f"{where}: the constructor of {kind.__qualname__} does not take the saved arguments any more: {error}. "
                "Make the object yourself and call restore_from_path"
            ) from error
        variable = {one.kind: name for name, one in signature.parameters.items() if one.kind in _VARIABLE}
        unnamed, others = (variable.get(kind, "") for kind in _VARIABLE)  # the names of *args and **kwargs
        names = [name for name in signature.parameters if name not in (unnamed, others)]
        unknown = [name for name in overrides if name not in names]
        if unknown and not others:
            raise OptionError(
                f"{kind.__qualname__} takes no argument {', '.join(map(repr, unknown))}; it takes "
                f"{', '.join(signature.parameters) or 'none'}"
            )
        saved = bound.arguments
        rest = tuple(decoder.decode(value) for value in saved.pop(unnamed, ()))
        saved |= saved.pop(others, {})
        decoded = {name: decoder.decode(value) for name, value in saved.items() if name not in overrides}
        for name, value in decoded.items():
            if name.endswith("device") and isinstance(value, str) and loaded("torch") is not None:
                decoded[name] = available(value)
        given = {**decoded, **overrides}
        every = given | {f"*{place}": value for place, value in enumerate(rest)}
        if missing := [f"{name} ({one.reason})" for name, one in every.items() if isinstance(one, Missing)]:
            what = f"these arguments of {kind.__qualname__} were not kept; pass them by name"
            raise OptionError(f"{where}: {what}: {', '.join(missing)}")
        bound.arguments = {name: given.pop(name) for name in names if name in given}
        bound.arguments |= {name: value for name, value in ((unnamed, rest), (others, given)) if value}
        try:
            signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise OptionError(
                f"{where}: {kind.__qualname__} cannot be made of the saved arguments: {error}; pass it by name"
            ) from error
        return construct(kind, bound.args, bound.kwargs, where)

    def _component(self, reference: str) -> Any:
        """Return the component that a spec refers to by its path in the tree that was saved."""
        goal = tuple(segment for segment in reference.split("/") if segment)
        start = self.root.description.path
        saved = descend(self.root, goal[len(start) :]) if goal[: len(start)] == start else None
        if saved is None:
            return Missing(f"it is the component {format_component_path(goal)}, which is not part of what is loaded")
        if saved.path not in self.made:
            self.made[saved.path] = self.make(saved, object, {})
        return self.made[saved.path]

    def _nested(self, content: Any) -> Any:
        """Make an object from a spec that is part of another one."""
        spec = check_spec(content.get("constructor") if isinstance(content, dict) else content)
        where = str(self.root.location)
        kind = self.permissions.resolve(content.get("class"), where, made=True)
        if not isinstance(kind, type):
            raise TypeError(f"{content.get('class')!r:.80} is not a class")
        return self._construct(kind, spec, {}, where)
