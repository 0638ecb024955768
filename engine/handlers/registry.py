"""Type handlers for leaves of types that holdfast does not support, and for leaves in user-defined storage."""

from __future__ import annotations

import abc
import contextlib
import copy
import json
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arrays import check_files, fsync_and_digest
from ..errors import OptionError, UnsupportedLeafError, itemized, shortened
from ..format import FileRecord
from ..pytree import EXTERNAL, ExternalLeaf, ValueLeaf, class_name, flatten, format_path, unflatten
from ..storage import Location
from .args import RestoreArgs, SaveArgs
from .base import Files, finish, run_coroutine


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Information about a leaf, exchanged with the leaf's :class:`TypeHandler`.

    Attributes:
        name: The leaf's storage name, such as ``params.vocabulary``.
        facts: JSON values, stored in ``tree.json``, that the handler needs to read the leaf. Values that are read from
            a checkpoint must not be trusted.
        folder: A folder in the checkpoint for any number of files of the leaf. The folder exists when ``serialize`` is
            called; before that, this attribute is None.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Location | None = None


class TypeHandler(abc.ABC):
    """Saves and restores leaves of user-defined types, or leaves of any type in user-defined storage.

    Attributes:
        name: The name of this handler in ``tree.json``. A handler with this name is required to restore the leaves.
    """

    name: str

    def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> Sequence[ParamInfo]:
        """Check that leaves can be saved, and return information for saving them, before any files are written.

        Args:
            values: The leaves.
            names: The storage names of the leaves.

        Returns:
            One :class:`ParamInfo` for each leaf, without a folder.
        """
        return [ParamInfo(name=name) for name in names]

    def snapshot(self, value: Any) -> Any:
        """Return an independent copy of a leaf, because the leaf itself may change during a background save.

        Args:
            value: A leaf.
        """
        return copy.deepcopy(value)

    @abc.abstractmethod
    def serialize(self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs]) -> Any:
        """Write leaves. This method runs only on process 0, may run on another thread, and may be a coroutine.

        Args:
            values: The leaves, or snapshots of the leaves.
            infos: The results of :meth:`param_infos`, with folders. The caller makes the files in these folders
                durable and computes their digests.
            args: The arguments that were passed to ``save`` for each leaf.

        Returns:
            None, or futures whose ``result()`` completes the writing.
        """

    @abc.abstractmethod
    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs]) -> Any:
        """Read leaves. This method may be a coroutine.

        Args:
            infos: The information about each leaf, including its folder and facts. The digests have been verified.
            args: The arguments that were passed to ``restore`` for each leaf.

        Returns:
            The restored leaves.
        """


class TypeHandlerRegistry:
    """Maps each type to its :class:`TypeHandler`.

    Args:
        handlers: The handlers, keyed by type.
    """

    def __init__(self, handlers: Mapping[type, TypeHandler] | None = None) -> None:
        self._handlers: dict[type, TypeHandler] = {}
        for leaf_type, handler in (handlers or {}).items():
            self.register(leaf_type, handler)

    def register(self, leaf_type: type, handler: TypeHandler, *, override: bool = False) -> None:
        """Add a handler.

        Args:
            leaf_type: The type whose instances are leaves for this handler, even if they are containers or arrays.
            handler: The handler that saves and restores these leaves.
            override: Whether to replace an existing handler of the type.

        Raises:
            OptionError: The type already has a handler, or another handler has the same name.
        """
        name = getattr(handler, "name", None)
        if not isinstance(name, str) or not name:
            raise OptionError(f"{type(handler).__name__} needs a name, by which a checkpoint identifies it")
        if leaf_type in self._handlers and not override:
            raise OptionError(
                f"{leaf_type.__name__} has the handler {self._handlers[leaf_type].name!r} already; replace it with "
                "override=True"
            )
        others = (other for handled, other in self._handlers.items() if handled is not leaf_type)
        if any(other.name == name and other is not handler for other in others):
            raise OptionError(f"another handler has the name {name!r}; rename one of the two")
        self._handlers[leaf_type] = handler

    def unregister(self, leaf_type: type) -> None:
        """Remove the handler of a type, if it has one."""
        self._handlers.pop(leaf_type, None)

    @property
    def leaf_types(self) -> tuple[type, ...]:
        """The types that have a handler."""
        return tuple(self._handlers)

    def find(self, value: Any) -> TypeHandler | None:
        """Return the handler that is registered for a leaf's type or its nearest base class, or None."""
        if not self._handlers:
            return None
        for base in type(value).__mro__:
            if base in self._handlers:
                return self._handlers[base]
        return next((handler for handled, handler in self._handlers.items() if isinstance(value, handled)), None)

    def named(self, name: str) -> TypeHandler | None:
        """Return the handler with the given name, or None."""
        return next((handler for handler in self._handlers.values() if handler.name == name), None)


# The registry used by ``holdfast.load``, and by pytree handlers that receive no other registry.
DEFAULT_REGISTRY = TypeHandlerRegistry()


def register_type_handler(leaf_type: type, handler: TypeHandler, *, override: bool = False) -> None:
    """Add a handler to the default registry, for the rest of the program.

    Args:
        leaf_type: The type whose instances are leaves for this handler.
        handler: The handler that saves and restores these leaves.
        override: Whether to replace an existing handler of the type.

    Raises:
        OptionError: The type already has a handler, or another handler has the same name.
    """
    DEFAULT_REGISTRY.register(leaf_type, handler, override=override)


FOLDER = "leaves"  # folder with one subfolder per leaf, named after the leaf's index in the tree


# A handler with the indexes, values, infos and arguments of its leaves.
_Group = tuple[TypeHandler, list[int], list[Any], Sequence[ParamInfo], list[SaveArgs]]


class ExternalLeaves:
    """The leaves of a tree that have a type handler. Each leaf is written into a separate folder."""

    def __init__(
        self,
        registry: TypeHandlerRegistry,
        names: Sequence[str],
        values: Sequence[Any],
        args: Sequence[SaveArgs | None],
        *,
        snapshot: bool,
    ) -> None:
        self.notes: dict[int, ValueLeaf] = {}  # ``tree.json`` entries, keyed by leaf index
        self._groups: list[_Group] = []
        for handler, numbers in _by_handler(enumerate(map(registry.find, values if registry.leaf_types else ()))):
            handled = [values[number] for number in numbers]
            leaves = [(names[number], class_name(values[number])) for number in numbers]
            with _explained(handler, "param_infos", leaves):
                infos = handler.param_infos(handled, [names[number] for number in numbers])
            if len(infos) != len(handled):
                raise OptionError(
                    f"the TypeHandler {handler.name!r} gave {len(infos)} infos for {len(handled)} leaves: "
                    f"{_some(leaves)}; its param_infos must return one for each; nothing was written"
                )
            for number, (_, type_name), info in zip(numbers, leaves, infos, strict=True):
                facts = _facts(info)
                self.notes[number] = ValueLeaf(
                    {"kind": EXTERNAL, "handler": handler.name, "type": type_name, "facts": facts}
                )
            if snapshot:
                with _explained(handler, "snapshot", leaves):
                    handled = [handler.snapshot(value) for value in handled]
            self._groups.append((handler, numbers, handled, infos, [args[number] or SaveArgs() for number in numbers]))

    def write(self, folder: Location) -> Files:
        if not self._groups:
            return {}
        for handler, numbers, values, infos, args in self._groups:
            folders = [folder / FOLDER / str(number) for number in numbers]
            for leaf_folder in folders:
                leaf_folder.make_directory(sync=False)
            infos = [replace(info, folder=leaf_folder) for info, leaf_folder in zip(infos, folders, strict=True)]
            leaves = [(info.name, class_name(value)) for info, value in zip(infos, values, strict=True)]
            with _explained(handler, "serialize", leaves, folder):
                finish(_completed(handler.serialize(values, infos, args)))
        files = fsync_and_digest(folder / FOLDER, f"{FOLDER}/")
        folder.sync_directory()
        return files


def _by_handler(handlers: Iterable[tuple[int, TypeHandler | None]]) -> Iterable[tuple[TypeHandler, list[int]]]:
    """Return each handler with the indexes of its leaves, ignoring leaves without a handler."""
    groups: dict[str, tuple[TypeHandler, list[int]]] = {}
    for number, handler in handlers:
        if handler is not None:
            groups.setdefault(handler.name, (handler, []))[1].append(number)
    return groups.values()


def _facts(info: ParamInfo) -> dict[str, Any]:
    try:
        json.dumps(facts := dict(info.facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"{format_path(info.name)}: its facts are not JSON: {error}; nothing was written"
        ) from error
    return facts


def restore_external(
    tree: Any,
    folder: Location,
    files: Mapping[str, FileRecord] | None,
    numbers: Mapping[str, int],
    registry: TypeHandlerRegistry,
    args: Mapping[str, RestoreArgs],
) -> Any:
    """Read the leaves with type handlers, and add them to a loaded tree; ``numbers`` maps names to leaf indexes."""
    flat = flatten(tree, registry.leaf_types)
    values = list(flat.values)
    external = {position: value for position, value in enumerate(values) if isinstance(value, ExternalLeaf)}
    handlers = {
        position: None if "aggregate" in leaf.details else registry.named(leaf.handler)
        for position, leaf in external.items()
    }
    unknown = [_missing(leaf) for position, leaf in external.items() if handlers[position] is None]
    if unknown:
        lines = itemized(f"{folder}: some leaves need handlers that are missing:", unknown)
        raise OptionError(f"{lines}\n  or load the other leaves with select=")
    for handler, positions in _by_handler(handlers.items()):
        leaves = [external[position] for position in positions]
        infos = [_info(leaf, folder, numbers[leaf.name], files) for leaf in leaves]
        types = [(leaf.name, f"{leaf.details.get('type')!s:.80}") for leaf in leaves]
        with _explained(handler, "deserialize", types, folder):
            restored = _completed(handler.deserialize(infos, [args.get(leaf.name) or RestoreArgs() for leaf in leaves]))
            count = len(restored)
        if count != len(leaves):
            raise OptionError(
                f"{folder}: the TypeHandler {handler.name!r} gave {count} values for {len(leaves)} leaves: "
                f"{_some(types)}; its deserialize must return one for each"
            )
        for position, value in zip(positions, restored, strict=True):
            values[position] = value
    return unflatten(flat.structure, values)


@contextlib.contextmanager
def _explained(
    handler: TypeHandler, method: str, leaves: Sequence[tuple[str, str]], folder: Location | None = None
) -> Iterator[None]:
    """Annotate errors from a user-defined handler method with the leaves and the folder that the method processes."""
    try:
        yield
    except Exception as error:
        where = "" if folder is None else f" in {folder}"
        error.add_note(f"raised by {method} of the TypeHandler {handler.name!r} for {_some(leaves)}{where}")
        raise


def _completed(result: Any) -> Any:
    return run_coroutine(result) if isinstance(result, Coroutine) else result


def _some(leaves: Sequence[tuple[str, str]]) -> str:
    return shortened(f"{format_path(name)} ({type_name})" for name, type_name in leaves)


def _info(leaf: ExternalLeaf, folder: Location, number: int, files: Mapping[str, FileRecord] | None) -> ParamInfo:
    path = f"{FOLDER}/{number}"
    check_files(folder, {file: record for file, record in (files or {}).items() if file.startswith(f"{path}/")})
    facts = leaf.details.get("facts")
    return ParamInfo(name=leaf.name, facts=facts if isinstance(facts, dict) else {}, folder=folder / path)


def _missing(leaf: ExternalLeaf) -> str:
    path = format_path(leaf.name)
    if "aggregate" in leaf.details:
        return f"{path} is in a file of the AggregateHandler {leaf.handler!r:.80}; pass it to PyTreeCheckpointHandler"
    return (
        f"{path} is a {leaf.details.get('type')!s:.80} of the TypeHandler {leaf.handler!r:.80}; register it with "
        "hf.type_handlers.register_type_handler"
    )
