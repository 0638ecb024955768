"""A tree of components made ready to be written: whatever is wrong with it shows before anything is."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..clock import SystemClock
from ..coordination import current_coordinator
from ..errors import OptionError, UnsupportedLeafError
from ..format import crc32c
from ..handlers import PreparedItem, PyTreeCheckpointHandler, SaveArgs, write_alone
from ..item import Layout
from ..record import COMPONENT, FileRecord, ItemRecord
from ..storage import Location
from ..tree import collection_paused, display, flatten
from ..tree.frameworks import is_jax_array, is_torch_tensor
from .description import Description
from .layout import KIND, item_name
from .live import RECIPE, LiveComponent, is_component, live_tree, method_of, unnamed
from .names import Path, written
from .permissions import import_path
from .provenance import summary
from .recipes import CtorArguments, encode_recipe
from .states import own_state

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class PreparedComponents:
    """A tree of components that only has to be written.

    Attributes:
        states: The states by the paths of the components; the root's own, ``()``, is among them.
        descriptions: What is said of each component: the content of its file.
    """

    states: Mapping[Path, PreparedItem]
    descriptions: Mapping[Path, bytes]

    def write(self, folders: Mapping[Path, Location]) -> dict[str, ItemRecord]:
        """Writes the states, durably.

        Args:
            folders: The folder of each component's state; it is there, and empty.

        Returns:
            The items of the commit record.
        """
        return {item_name(path): self._written(path, folder) for path, folder in folders.items()}

    def _written(self, path: Path, folder: Location) -> ItemRecord:
        # First, as writing the state makes all names in the folder durable.
        described = write_file(folder / COMPONENT, self.descriptions[path])
        files = {**write_alone(self.states[path], folder), COMPONENT: described}
        return ItemRecord("/".join((*path, folder.name)), KIND, files)


def write_file(place: Location, content: bytes) -> FileRecord:
    """Writes a small file whose name is yet to be made durable, and returns what a record says of it."""
    place.write_bytes(content, atomic=False)
    return FileRecord(len(content), crc32c(content))


def prepare(
    root: Any,
    *,
    state: Mapping[str, Any] | None = None,
    use_msgpack: bool = False,
    layout: Layout | None = None,
    handlers: dict[Path, PyTreeCheckpointHandler] | None = None,
) -> PreparedComponents:
    """Takes the states of a component and of all below it, and says how they are made.

    Args:
        root: The component.
        state: The state to save in the place of the component's own; of its components only those that are in it.
        use_msgpack: Keep all arrays of a component in one msgpack file, rather than in a database.
        layout: Sizes of chunks and data files, and how chunks are compressed.
        handlers: Takes a snapshot, so that the program may go on. Holds what the snapshots are in, from one save to
            the next, by component; filled here. None takes none, for what is written at once.

    Returns:
        The tree.

    Raises:
        UnsupportedLeafError: A state cannot be saved; names what.
        OptionError: An argument makes no sense.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise OptionError(f"layout={layout!r:.80} must be a Layout, such as hf.Layout(compression=3)")
    if use_msgpack and layout is not None and layout.compression is not None:
        raise OptionError("use_msgpack=True: arrays in msgpack are not compressed; leave out one of the two")
    if state is not None and not isinstance(state, Mapping):
        raise OptionError(f"state= must be a dictionary as get_state() returns it, found {type(state).__name__}")
    live = live_tree(root)
    states = _states(live) if state is None else _given(live, state)
    snapshot = handlers is not None
    handlers = {} if handlers is None else handlers
    for gone in handlers.keys() - states.keys():
        del handlers[gone]
    save_args = SaveArgs(aggregate=True) if use_msgpack else None
    prepared: dict[Path, PreparedItem] = {}
    with collection_paused():
        for path, tree in states.items():
            handler = handlers.setdefault(path, PyTreeCheckpointHandler())
            try:
                prepared[path] = handler.prepare(tree, snapshot=snapshot, save_args=save_args, layout=layout)
            except TypeError as error:
                error.add_note(f"in the state of the component {written(path) or '(root)'}; nothing was written")
                raise
    _refuse_divided(states)
    components = {one.path: one for one in live.walk()}
    known = {id(one.value): path for path, one in components.items()}
    return PreparedComponents(prepared, {path: _described(components[path], known, states).encode() for path in states})


def _refuse_divided(states: Mapping[Path, Any]) -> None:
    """Raises an error if there are arrays of which this process has only a part."""
    if current_coordinator().process_count == 1:
        return
    divided = []
    for path, tree in states.items():
        flat = flatten(tree)
        names = [display(name) for name, value in zip(flat.names, flat.values, strict=True) if _is_divided(value)]
        divided += [f"{written(path) or '(root)'}: {name}" for name in names]
    if divided:
        raise UnsupportedLeafError(
            "these arrays are divided among processes, and components are saved by one process; nothing was written. "
            "Save them as a tree (hf.save, PyTreeCheckpointHandler), or gather them in get_state(): "
            + ", ".join(divided[:20])
        )


def _is_divided(value: Any) -> bool:
    if is_jax_array(value):
        return not (value.is_fully_addressable or value.is_fully_replicated)
    placements = getattr(value, "placements", None) if is_torch_tensor(value) else None
    return placements is not None and not all(placement.is_replicate() for placement in placements)


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


def _described(one: LiveComponent, known: Mapping[int, Path], saved: Mapping[Path, Any]) -> Description:
    value = one.value
    recipe, obstacle = _recipe_of(value, known)
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
    )


def _recipe_of(value: Any, paths: Mapping[int, Path]) -> tuple[dict[str, Any] | None, str]:
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
        recipe, _ = _recipe_of(other, paths)
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
