"""The adapter for states that are pytrees or nnx objects, which are saved as trees of their variables.

Training loops replace pytrees instead of changing them in place. Flax is imported only if the state has nnx objects.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from ...engine.arrays import TreeReader
from ...engine.errors import TreeMismatchError
from ...engine.handlers import (
    AsyncCheckpointHandler,
    Files,
    PyTreeCheckpointHandler,
    check_savable,
    flat_template,
    fresh_types,
)
from ...engine.pytree import FreshTypes, TreeDef, collection_paused, flatten, format_path, is_nnx, loaded, split
from ...engine.sources import Misfits, Weights, load_fitting, load_weights
from ...engine.storage import Location, Place
from ..options import CallbackOptions
from .states import StateAdapter, is_deleted, located

logger = logging.getLogger("holdfast")


class TreeAdapter(StateAdapter):
    """Saves pytrees and nnx objects. An nnx object may be the whole state, or be nested in dicts, lists and tuples."""

    needs, modules = "a state with params, or one module of nnx", "modules of nnx"

    def __init__(self, misfits: Misfits | None = None, *, is_live: bool = False) -> None:
        super().__init__(misfits)
        self.is_live = is_live
        self._type: type | None = None
        self._optimizer: Callable[[Any], Any] | None = None  # returns the nnx.Optimizer in a state
        self._count: Any = None  # update counter (an array) of the nnx.Optimizer in the last state

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        return options.tree_handler() if self.misfits is None else FittingHandler(self.misfits, options.compression)

    def to_tree(self, state: Any) -> Any:
        return to_tree(state)

    def described(self, state: Any) -> FreshTypes:
        return fresh_types(to_tree(state))

    def refused(self, state: Any) -> list[str]:
        return refused_by(self._fresh, state)

    def check_savable(self, state: Any) -> None:
        check_savable(to_tree(state))

    def save_kwargs(self) -> Mapping[str, Any]:
        return {} if self._fresh is None else {"fresh": self._fresh}

    def restore_kwargs(self) -> Mapping[str, Any]:
        return {"as_saved": True}

    def from_tree(self, state: Any, restored: Any) -> Any:
        return from_tree(state, restored)

    def note_step(self, state: Any) -> None:
        if type(state) is not self._type:  # search for the optimizer again only if the type has changed
            self._type, self._optimizer = type(state), _optimizer_in(state)
        self._count = None if self._optimizer is None else self._updates_of(state)

    def why_lost(self, state: Any) -> str | None:
        if self._count is not None and _has_changed(self._count, self._updates_of(state)):
            return "its objects were updated since; call on_step after every update"
        if is_deleted(to_tree(state)):
            return "its arrays were donated to a later update; call on_step after every update"
        return None

    def _updates_of(self, state: Any) -> Any:
        """Return the update counter of the ``nnx.Optimizer``, a new array after each update; None if it is gone."""
        assert self._optimizer is not None
        try:
            step = self._optimizer(state).step
        except (AttributeError, LookupError):
            return None
        return step.get_raw_value() if hasattr(step, "get_raw_value") else step.raw_value  # flax before 0.12

    def is_module(self, value: object) -> bool:
        nnx = loaded("flax.nnx")
        return nnx is not None and isinstance(value, nnx.Module)

    def fill(self, path: str, module: Any, source: Place) -> Weights:
        from flax import nnx

        parameters = nnx.state(module, nnx.Param)
        # Checkpoints of the module may also contain other variables, such as statistics, generators and caches.
        others = {".".join(split(name)) for name in flatten(nnx.to_pure_dict(nnx.state(module))).names}
        pure: dict[Any, Any] = nnx.to_pure_dict(parameters)
        weights = load_weights(source, pure, ignored=others, containers=[path] if path else (), misfits=self.misfits)
        nnx.replace_by_pure_dict(parameters, weights.tree)
        nnx.update(module, parameters)
        return weights


def refused_by(fresh: FreshTypes, value: Any) -> list[str]:
    """Return one message for each reason why a value cannot be restored into the fresh value."""
    flat = flatten(to_tree(value))
    objects = tuple(f"{path}." if path else "" for path, _ in located(value, is_nnx))
    new = [name for name in flat.names if name.startswith(objects) and not fresh.covers(name)]
    return [f"{format_path(name)}: not in the fresh state" for name in new] or fresh.refused(flat)


def is_stream(value: object) -> bool:
    """Return whether a value is an ``nnx.Rngs``, whose snapshots are cheap because its few arrays are immutable."""
    nnx = loaded("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Rngs)


def to_tree(state: Any) -> Any:
    """Convert nnx objects in a state to nested dicts of variables. Shared variables appear only in the first object."""
    objects = _objects(state)
    if not objects:
        return state
    from flax import nnx

    values: dict[Any, Any] = nnx.to_pure_dict(nnx.state(tuple(objects)))
    variables = iter([values.get(index, {}) for index in range(len(objects))])
    return _mapped(state, lambda _: next(variables))


def from_tree(state: Any, tree: Any) -> Any:
    """Return the restored pytree, updating nnx objects in dicts, lists and tuples in place."""
    objects = _objects(state)
    if not objects:
        return tree
    from flax import nnx

    restored: dict[int, Any] = {}
    merged = _merge(state, tree, restored)
    variables = nnx.state(tuple(objects))
    pure: dict[Any, Any] = {n: restored.pop(id(part)) for n, part in enumerate(objects) if id(part) in restored}
    paths = {id(part): path.replace(".", "/") for path, part in located(state, is_nnx)}
    fresh = nnx.to_pure_dict(variables)
    if lacking := [
        f"{name}: expected a variable of this name (checkpoint), found none (the fresh state)"
        for index, values in pure.items()
        for name in _lacking(values, fresh.get(index, {}), paths[id(objects[index])])
    ]:
        raise TreeMismatchError(
            "objects of nnx lack variables that steps have made. Make them before restore_or_initialize, as by a first "
            "call of the module, or take them out before on_step, as nnx.pop(model, nnx.Intermediate) does:",
            lacking,
        )
    # Do not use replace_by_pure_dict(), which would look for variables inside values that are dictionaries.
    new: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(variables):
        value: Any = pure
        for key in path:
            value = value.get(key, value.get(str(key), ...)) if isinstance(value, dict) else ...
        if value is not ...:
            new[path] = variable.replace(value) if hasattr(variable, "replace") else value
    nnx.update(tuple(objects), nnx.from_flat_state(new))
    return merged


def _lacking(values: Any, others: Any, path: str) -> Iterator[str]:
    """Yield the paths of variables that exist only in the first of two nested dictionaries."""
    for key, value in values.items() if isinstance(values, dict) and isinstance(others, dict) else ():
        name = f"{path}/{key}" if path else str(key)
        if key in others:
            yield from _lacking(value, others[key], name)
        else:
            yield name


def _optimizer_in(state: Any) -> Callable[[Any], Any] | None:
    """Return a function that gets the ``nnx.Optimizer`` from states with this structure, or None if there is none."""
    optimizer_type = getattr(loaded("flax.nnx"), "Optimizer", ())
    if isinstance(state, optimizer_type):
        return lambda optimizer: optimizer
    items = state.items() if type(state) is dict else enumerate(state) if type(state) in (list, tuple) else ()
    return next((itemgetter(key) for key, item in items if isinstance(item, optimizer_type)), None)


def _has_changed(before: Any, now: Any) -> bool:
    if now is None or now is before:
        return False
    # Compare values, because a jitted function creates new arrays even if it does not change the optimizer.
    return is_deleted(before) or is_deleted(now) or not np.array_equal(before, now)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each nnx object in dicts, lists and tuples, in order, and return a copy with the results."""
    if is_nnx(value):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_mapped(item, change) for item in value])
    return value


def _objects(state: Any) -> list[Any]:
    objects: list[Any] = []
    if loaded("flax.nnx") is not None:
        _mapped(state, objects.append)
    return objects


def _merge(value: Any, tree: Any, restored: dict[int, Any]) -> Any:
    """Put the nnx objects of the state into the restored tree. ``restored`` collects the variables of each object."""
    if is_nnx(value):
        if tree:
            restored.setdefault(id(value), tree)
        return value
    if type(value) is dict and type(tree) is dict:
        return {key: _merge(value.get(key), item, restored) for key, item in tree.items()}
    if type(value) in (list, tuple) and type(tree) is type(value):
        return type(tree)([_merge(item, part, restored) for item, part in zip_longest(value[: len(tree)], tree)])
    return tree


# ---- partial restores, which match leaves by path, even if an optimizer chain has grown


_Node = tuple[str, TreeDef | None]  # name and definition of a container, or name and None for a leaf


class FittingHandler(PyTreeCheckpointHandler):
    """Restores only the leaves that fit a template. Other leaves keep the template's values and count as misfits."""

    def __init__(self, misfits: Misfits, compression: int | None) -> None:
        super().__init__(compression=compression)
        self._misfits = misfits

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Restore the tree or, if it differs from the template, only the leaves that fit."""
        try:
            return super().restore(directory, item, files=files, **kwargs)
        except TreeMismatchError:
            if item is None:
                raise
        with collection_paused():
            reader, flat = TreeReader(directory, files), flat_template(item, self._registry)
            pairs = _pairs(("", reader.tree.structure), ("", flat.structure))
            return load_fitting(reader, flat, pairs, self._misfits)[0]


def _pairs(saved: _Node, wanted: _Node) -> Iterator[tuple[str, str]]:
    """Yield the names of corresponding leaves in two trees, as pairs."""
    # Dictionary entries and attributes are matched by key. An optimizer chain is a tuple that may have grown or may now
    # be nested differently, so the states in it are matched by order and class name.
    if not (_is_chain(saved) or _is_chain(wanted)):
        yield from _entries(saved, wanted)
        return
    parts, others = list(_parts(saved)), list(_parts(wanted))
    classes = [_class_of(part, len(saved[0])) for part in parts]
    other_classes = [_class_of(part, len(wanted[0])) for part in others]
    for start, other_start, count in SequenceMatcher(
        None, classes, other_classes, autojunk=False
    ).get_matching_blocks():
        for index in range(count):
            yield from _entries(parts[start + index], others[other_start + index])


def _entries(saved: _Node, wanted: _Node) -> Iterator[tuple[str, str]]:
    (name, node), (other_name, other) = saved, wanted
    if node is None or other is None:
        if node is other:
            yield name, other_name
    elif _optax(node) == _optax(other):  # otherwise, the containers belong to different transformations
        children = dict(zip(node.segments, node.named_children(name), strict=True))
        for segment, child in zip(other.segments, other.named_children(other_name), strict=True):
            if segment in children:
                yield from _pairs(children[segment], child)


def _is_chain(part: _Node) -> bool:
    """Return whether a container is a tuple, or a dictionary that represents a tuple in an nnx optimizer state."""
    name, node = part
    if node is None:
        return False
    is_indexed = node.keys is not None and all(isinstance(key, int) for key in node.keys)
    return node.kind == "tuple" or (is_indexed and _OF_NNX.search(name) is not None)


_OF_NNX = re.compile(r"(^|\.)opt_state(\.\d+)*$")


def _parts(part: _Node) -> Iterator[_Node]:
    """Yield the members of an optimizer chain that have leaves, flattening nested chains."""
    name, node = part
    if node is not None and _is_chain(part):
        for child in node.named_children(name):
            yield from _parts(child)
    elif node is None or node.has_leaves:
        yield part


def _class_of(part: _Node, prefix: int) -> str:
    """Return the class name of a state in an optimizer chain, or its keys for nnx, which stores no class names."""
    name, node = part
    if node is not None and _OF_NNX.search(name):
        return ", ".join(sorted(map(str, node.keys or ())))
    return (None if node is None else _optax(node)) or name[prefix:]


def _optax(node: TreeDef) -> str | None:
    """Return the class name of an optax state, or None for other containers."""
    label = node.label or ""
    return label.rpartition(".")[2] if label.startswith("optax.") else None
