"""Read saved component trees, or single components from their own directories."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ...engine.arrays import PartialTree, TreeReader, leaf_values, load_tree, read_checked, tree_metadata
from ...engine.errors import CheckpointNotFoundError, DamagedCheckpointError
from ...engine.forks import cached_property
from ...engine.format import COMPONENT, COMPONENTS, DOCUMENT_LIMIT, CheckpointRecord, ItemRecord
from ...engine.pytree import (
    LeafRequest,
    TreeDef,
    collection_paused,
    expand,
    instance_of,
    is_leaf,
    loaded_object,
    name_of_class,
    unescape_key,
)
from ...engine.steps import has_record, read_record, read_steadily
from ...engine.storage import Location, Place, as_location
from ..formats.rllib import BUILDERS, CONSTRUCTOR, RLlibDirectory, looks_like_rllib
from ..formats.torch.files import without_objects
from ..formats.torch.pickles import Name, unpickle
from ..graph import Path, StoredGraph
from .constructor_spec import encode_spec
from .layout import Description, below, part_records, parts_of, record_at, whole_around
from .names import STATE, format_component_path
from .permissions import allowed_objects
from .states import GRAPH, read_document, stored_state

_logger = logging.getLogger("holdfast")

_SEARCHED = 100  # maximum number of directories searched for a tree that an error message can suggest
_SMALL = 16 << 20  # maximum size, in bytes, of a pickled class with its arguments
_FRAMEWORKS = {"jax": "jax", "torch": "torch", "key": "jax"}


class NativeComponent:
    """A component in a holdfast checkpoint; its ``path`` is relative to the component that was opened."""

    left_out: Sequence[str] = ()  # messages about values in the file that are left out of the returned state

    def __init__(self, root: Location, items: Mapping[Path, ItemRecord], path: Path = ()) -> None:
        self._root = root
        self._items = items
        self.path = path
        self.location = below(root, path)
        self._item = items[path]
        self._folder = root / self._item.folder
        file = self._folder / COMPONENT
        content = read_checked(file, self._item.files[COMPONENT], limit=DOCUMENT_LIMIT)
        self.description = Description.decode(content, source=str(file))

    @cached_property
    def children(self) -> Mapping[Path, NativeComponent]:
        """The child components, keyed by their paths relative to this one."""
        children: dict[Path, NativeComponent] = {}
        for path in self.description.components:
            if (*self.path, *path) not in self._items:
                raise DamagedCheckpointError(
                    f"{self.location}: its component {format_component_path(path)} is not in the commit record"
                )
            children[path] = NativeComponent(self._root, self._items, (*self.path, *path))
        return children

    def elsewhere(self, goal: Path) -> NativeComponent | None:
        """Return the component at a path from the saved tree's root, or None if it is outside the opened tree."""
        start = self.description.path[: len(self.description.path) - len(self.path)]
        path = goal[len(start) :]
        inside = (*start, *path) == goal and path in self._items
        return NativeComponent(self._root, self._items, path) if inside else None

    def state(self, component: Any = None) -> Any:
        """Read the component's own state; raise DamagedCheckpointError if it fails verification."""
        # Each array is loaded as an array of the library that it was saved from. Named tuples and dataclasses become
        # dictionaries, unless their classes can be found through `component`, the counterpart in the program.
        with collection_paused():
            reader = self._reader()
            libraries = [(leaf.name, _FRAMEWORKS.get(leaf.saved.kind)) for leaf in reader.leaves]
            requests = {name: LeafRequest(kind=library) for name, library in libraries if library is not None}
            tree = load_tree(reader, requests=requests)
            return tree if component is None else with_records(tree, reader.tree.structure, component, self.location)

    def graph(self) -> StoredGraph:
        """Open the component's own state as a graph; the graph document, if any, is stored among the values."""
        reader = self._reader()
        values = {leaf.name: leaf for leaf in reader.leaves if leaf.name != GRAPH}
        texts = leaf_values(reader, [leaf for leaf in reader.leaves if leaf.name == GRAPH])
        document = read_document(texts[0], reader.location) if texts else None
        return StoredGraph(PartialTree(reader, values, reader.tree), self.location, document=document)

    def _reader(self) -> TreeReader:
        return TreeReader(self._folder, self._item.files)

    def structure(self) -> Any:
        """Return the component's own state with a description in place of each leaf, without reading any data."""
        return tree_metadata(self._reader())


class RLlibComponent(RLlibDirectory):
    """A component in an RLlib checkpoint, with the interface of `NativeComponent`."""

    @cached_property
    def description(self) -> Description:
        name, spec, obstacle = self._constructor()
        return Description(
            type=name or "unknown:unknown",
            constructor=spec,
            obstacle=obstacle,
            path=self.path,
            components=tuple(self.children),
            metadata=self.metadata,
        )

    def state(self, component: Any = None) -> Any:
        return self.own_state(none=True)

    def graph(self) -> StoredGraph:
        return stored_state(self.own_state(none=False), self.location)  # a tree cannot have the key None

    def _constructor(self) -> tuple[str, dict[str, Any] | None, str]:
        """Return the class name, the constructor spec, and, if the spec is None, the reason."""
        if CONSTRUCTOR not in self.names:
            return "", None, f"{self.location} has no {CONSTRUCTOR}"
        file, name = self.location / CONSTRUCTOR, ""
        try:
            content = read_checked(file, None, limit=_SMALL)
            pickled = unpickle(content, BUILDERS)
            entries = pickled if isinstance(pickled, dict) else {}
            cls, given = entries.get("class"), entries.get("ctor_args_and_kwargs")
            name = f"{cls.module}:{cls.attribute}" if isinstance(cls, Name) else ""
            if not isinstance(given, tuple) or len(given) != 2:
                return name, None, f"{file} has no constructor arguments"
            args, kwargs = without_objects(list(given), [], len(content))
        except DamagedCheckpointError as error:  # states can be restored without the arguments
            return name, None, f"{file} cannot be read: {error}"
        named = isinstance(kwargs, dict) and all(isinstance(key, str) and key.isidentifier() for key in kwargs)
        if not isinstance(args, list | tuple) or not named:
            return name, None, f"the arguments in {file} are not plain data"
        spec, _ = encode_spec(tuple(args), kwargs, lambda _: None, lambda _: None)
        return name, spec, ""


SavedComponent = NativeComponent | RLlibComponent


def open_component(location: Location) -> SavedComponent:
    if has_record(location):
        return of_record(location, read_record(location))
    if location.is_local and location.exists() and not location.is_directory():
        raise CheckpointNotFoundError(
            f"{location}: this is a file, but a component is a directory. Read files of other libraries with hf.load, "
            "and pass the result to set_state"
        )
    return RLlibComponent(location) if looks_like_rllib(location) else _part_of_a_whole(location)


def of_record(location: Location, record: CheckpointRecord) -> NativeComponent:
    parts = parts_of(record)
    if () not in parts:
        trees = [str(location / item.folder) for item in record.items.values() if item.kind == COMPONENTS]
        hint = "read it with hf.load, or restore it with the class that saved it"
        raise CheckpointNotFoundError(
            f"{location}: this checkpoint is not a component tree, its items are {', '.join(sorted(record.items))}; "
            + (f"one of these is a tree of components: give {' or '.join(trees)}" if trees else hint)
        )
    return NativeComponent(location, parts)


def read_state(path: Place) -> Any:
    """Read the state of a saved component and all components below it, without running any code.

    Args:
        path: The directory of a component tree, or of a component in it. RLlib directories are supported as well.

    Returns:
        A dictionary with the component's own state and, under their names, the states of the components below it.

    Raises:
        CheckpointNotFoundError: There is no saved component at the path.
        DamagedCheckpointError: The component fails verification.
    """
    location = as_location(path)
    if not has_record(location):
        return full_state(open_component(location))
    return read_steadily(location, lambda record: full_state(of_record(location, record)))


def _part_of_a_whole(location: Location) -> SavedComponent:
    """Open a component whose own record is missing, using the record of the tree that contains it."""
    around = whole_around(location)
    if around is None:
        raise CheckpointNotFoundError(f"{location}: there is no tree of components here{_what_is_at(location)}")
    root, record, path = around
    parts = parts_of(record)
    if path in parts:
        return NativeComponent(location, parts_of(part_records(record)[path]))
    while around is not None:  # the path may lead to a shared component that is saved under another path
        top, whole, rest = around
        other = descend(NativeComponent(top, parts_of(whole)), rest)
        if other is not None:
            return NativeComponent(other.location, parts_of(part_records(whole)[other.path]))
        outer = whole_around(top)
        around = None if outer is None else (outer[0], outer[1], (*outer[2], *rest))
    if path[-1] == STATE and path[:-1] in parts:
        raise CheckpointNotFoundError(
            f"{location}: this folder holds a component's state; give the component's directory, one level up"
        )
    names = ", ".join(format_component_path(path) for path in parts if path) or "none but itself"
    inside = [format_component_path(other) for other in parts if other[: len(path)] == path]
    more = f"; below it are {', '.join(inside)}" if inside else ""
    raise CheckpointNotFoundError(f"{location}: {root} has no such component{more}; it has {names}")


def _what_is_at(location: Location) -> str:
    if not location.exists():
        return "; there is nothing at this path"
    for directory in [location / entry.name for entry in location.entries() if entry.is_directory][:_SEARCHED]:
        if (record := record_at(directory)) is not None:
            items = [directory / item.folder for item in record.items.values() if item.kind == COMPONENTS]
            if trees := [directory] if () in parts_of(record) else items:
                return f"; there is one at {trees[0]}"
    return ", nor in the directories directly below"


def all_components(component: SavedComponent) -> Iterator[SavedComponent]:
    """Yield a component and all components below it, parents first."""
    yield component
    for child in component.children.values():
        yield from all_components(child)


def descend(saved: SavedComponent, path: Path) -> SavedComponent | None:
    """Return the component at a path relative to ``saved``, or None. A shared component has several valid paths."""
    if not path:
        return saved
    for name, child in saved.children.items():
        if path[: len(name)] == name:
            return descend(child, path[len(name) :])
    for alias, goal in saved.description.same.items():
        if path[: len(alias)] == alias and isinstance(saved, NativeComponent):
            other = saved.elsewhere(goal)
            return None if other is None else descend(other, path[len(alias) :])
    return None


def full_state(component: SavedComponent, read: Callable[[Any], Any] = lambda part: part.state()) -> Any:
    """Return the states of a component and all components below it; ``read`` reads one component's state."""
    state = read(component)
    for path, child in component.children.items():
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{component.location}: its state is not a dictionary, but it has components")
        state["/".join(str(unescape_key(segment)) for segment in path)] = full_state(child, read)
    return state


# ---- named tuples and dataclasses in a state are restored as objects of the program's own classes

# The class names that a checkpoint gives for named tuples and dataclasses never cause an import or a call.
_KINDS = ("namedtuple", "dataclass", "node")  # "node" includes dataclasses registered with JAX


def with_records(tree: Any, structure: TreeDef | None, component: Any, where: Location) -> Any:
    """Return a loaded tree in which dictionaries of fields are replaced by named tuples and dataclasses."""
    lost: set[str] = set()

    @cache
    def shown() -> dict[str, Any]:
        classes = allowed_objects()
        with contextlib.suppress(Exception):  # a new object may not have a state yet
            classes += _kinds_within(component.get_state(), 0)
        return {name_of_class(cls): cls for cls in classes}

    def made(label: str, fields: Mapping[str, Any]) -> Any:
        for path in _import_paths(label, type(component).__module__):
            if (record := instance_of(loaded_object(path), fields)) is not None:
                return record
        return instance_of(shown().get(label), fields)

    def visit(node: TreeDef | None, value: Any) -> Any:
        if node is None:
            return value
        values = list(map(visit, node.children, list(value if node.keys is None else value.values())))
        if node.kind in _KINDS:
            record = made(str(node.label), dict(zip(map(str, node.keys or ()), values, strict=True)))
            if record is not None:
                return record
            lost.add(str(node.label))
        return node.build(values)

    tree = visit(structure, tree)
    for label in sorted(lost):
        _logger.warning(
            "%s: the state holds a %s, but the program has no such class with the same fields, so set_state of %s "
            "gets a dictionary of the fields; import the class before the restore, or allow it (components.allow)",
            *(where, label, type(component).__qualname__),
        )
    return tree


def _import_paths(label: str, module: str) -> Iterator[str]:
    """Yield the import paths that a dotted name may refer to, in case the class has moved to or from ``__main__``."""
    parts = label.split(".")
    for size in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[size:])
        yield f"{'.'.join(parts[:size])}:{name}"
        yield f"{module if parts[0] == '__main__' else '__main__'}:{name}"


def _kinds_within(value: Any, depth: int) -> Iterator[type]:
    contents = None if is_leaf(value) or depth > 20 else expand(value)
    if contents is not None:
        yield type(value)
        for child in contents.values:
            yield from _kinds_within(child, depth + 1)
