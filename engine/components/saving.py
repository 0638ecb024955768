"""A tree of components saved to a path, as one checkpoint."""

from __future__ import annotations

import datetime
import logging
import tempfile
import uuid
from collections.abc import Mapping
from typing import Any

from ..checkpointer import Place
from ..clock import SystemClock
from ..coordination import Member
from ..errors import OptionError
from ..format import crc32c
from ..handlers import PreparedItem, PyTreeCheckpointHandler, SaveArgs
from ..metrics import plain_metrics
from ..record import CheckpointRecord, FileRecord, ItemRecord
from ..storage import Location, as_location
from ..tree import collection_paused
from .description import Description
from .layout import COMPONENT, KIND, item_name
from .live import RECIPE, LiveComponent, is_component, live_tree, method_of, unnamed
from .names import Path, written
from .pending import PendingTree
from .permissions import import_path
from .provenance import summary
from .recipes import CtorArguments, encode_recipe
from .states import own_state

_logger = logging.getLogger("holdfast")


def save(
    root: Any,
    path: Place | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    use_msgpack: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> str:
    """Saves a component and all below it: atomic, durable and checksummed when this returns.

    Args:
        root: The component.
        path: Where: a path or a URL; None makes a new temporary directory.
        state: The state to save in the place of the component's own; of its components only those that are in it.
        overwrite: Replace a tree of components that is there; a crash leaves the old one or the new one, whole.
        use_msgpack: Keep all arrays of a component in one msgpack file, rather than in a database.
        step: The number of the step, for ``holdfast ls`` on a directory of several: ``runs/x/1200`` for step 1200.
        metrics: Metrics to keep with it: numbers by name.

    Returns:
        The path or URL, which can be given to everything that restores.

    Raises:
        UnsupportedLeafError: A state cannot be saved; names what. Nothing was written.
        CheckpointExistsError: Something is there already.
        StorageError: The storage refused; what was there before is whole.
    """
    location = _temporary() if path is None else as_location(path)
    live = live_tree(root)
    numbers = plain_metrics(metrics)
    if step is not None and (type(step) is not int or step < 0):
        raise OptionError(f"step={step!r} must be a whole number, 0 or more")
    if state is not None and not isinstance(state, Mapping):
        raise OptionError(f"state= must be a dictionary as get_state() returns it, found {type(state).__name__}")
    states = _states(live) if state is None else _given(live, state)
    components = {one.path: one for one in live.walk() if one.path in states}
    with collection_paused():
        prepared = {path: _prepared(path, tree, use_msgpack) for path, tree in states.items()}
    described = {path: _described(components[path], live, set(states)) for path in states}
    pending = PendingTree(location, states, overwrite=overwrite)
    try:
        pending.begin()
        items = {
            item_name(path): _write(pending.folders[path], path, prepared[path], described[path]) for path in states
        }
        record = CheckpointRecord(items=items, time=SystemClock().now(), step=step, metrics=numbers)
        pending.commit(record, described)
    except BaseException:
        pending.abort()
        raise
    return location.url


def _temporary() -> Location:
    return as_location(tempfile.gettempdir()) / f"holdfast-{uuid.uuid4().hex}"


def _states(live: LiveComponent) -> dict[Path, Any]:
    known = {id(one.value) for one in live.walk()}
    for one in live.walk():
        for name in unnamed(one.value, known):
            _logger.warning(
                "component %s: %s is a component that get_checkpointable_components() does not name; it is not saved",
                written(one.path) or "(root)",
                name,
            )
    return {one.path: own_state(one, snapshot=False) for one in live.walk()}


def _given(live: LiveComponent, state: Mapping[str, Any]) -> dict[Path, Any]:
    """Takes a state apart that somebody else has taken, without changing it."""
    children = {child.name: child for child in live.children}
    found: dict[Path, Any] = {live.path: {key: value for key, value in state.items() if key not in children}}
    for name, child in children.items():
        if name in state:
            inner = state[name]
            found.update(_given(child, inner) if isinstance(inner, Mapping) else {child.path: inner})
    return found


def _prepared(path: Path, tree: Any, use_msgpack: bool) -> PreparedItem:
    handler = PyTreeCheckpointHandler()
    save_args = SaveArgs(aggregate=True) if use_msgpack else None
    try:
        return handler.prepare(tree, snapshot=False, save_args=save_args)
    except TypeError as error:
        error.add_note(f"in the state of the component {written(path) or '(root)'}; nothing was written")
        raise


def _described(one: LiveComponent, live: LiveComponent, saved: set[Path]) -> bytes:
    value = one.value
    recipe, obstacle = recipe_of(value, {id(other.value): other.path for other in live.walk()})
    metadata: dict[str, Any] = {
        "time": datetime.datetime.fromtimestamp(SystemClock().now(), datetime.UTC).isoformat(timespec="seconds"),
        **summary(type(value).__module__),
    }
    method = method_of(value, "get_metadata")
    if method is not None:
        metadata.update(method())
    return Description(
        type=import_path(type(value)),
        recipe=recipe,
        obstacle=obstacle,
        path=one.path,
        components=tuple(one.relative(child) for child in one.children if child.path in saved),
        same={path[len(one.path) :]: target for path, target in one.same.items()},
        metadata=metadata,
    ).encode()


def recipe_of(value: Any, paths: Mapping[int, Path]) -> tuple[dict[str, Any] | None, str]:
    """Returns how an object is made, or why that is not known.

    Args:
        value: The object.
        paths: The paths of all components of the tree by their identity.
    """
    method = method_of(value, "get_ctor_args_and_kwargs")
    if method is None:
        return None, f"{type(value).__qualname__} has no get_ctor_args_and_kwargs()"
    found = method()
    if found is None:
        return None, f"{type(value).__qualname__} was not made by its constructor; give it get_ctor_args_and_kwargs()"
    args, kwargs = found

    def reference(other: Any) -> str | None:
        return "/" + "/".join(paths[id(other)]) if id(other) in paths and other is not value else None

    open_recipes = {id(value)}

    def nested(other: Any) -> dict[str, Any] | None:
        if not is_component(other) or id(other) in open_recipes:
            return None
        open_recipes.add(id(other))
        recipe, _ = recipe_of(other, paths)
        return None if recipe is None else {"class": import_path(type(other)), "constructor": recipe}

    recipe, problems = encode_recipe(tuple(args), dict(kwargs), reference, nested)
    for problem in problems:
        _logger.warning(
            "%s: the constructor's %s; from_checkpoint() will have to be given it", type(value).__qualname__, problem
        )
    return recipe, ""


def kept_arguments(value: Any) -> CtorArguments | None:
    """Returns the arguments that an object was made with, if they were kept."""
    found = getattr(value, "__dict__", {}).get(RECIPE)
    return found if isinstance(found, CtorArguments) else None


def _write(folder: Location, path: Path, prepared: PreparedItem, description: bytes) -> ItemRecord:
    (folder / COMPONENT).write_bytes(description, atomic=False)
    files = dict(prepared.merge(folder, [prepared.write(folder, Member())]))
    folder.sync_directory()
    files[COMPONENT] = FileRecord(len(description), crc32c(description))
    return ItemRecord("/".join((*path, folder.name)), KIND, files)
