"""The leaves of a tree that its type handlers keep: on their way to disk, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..digests import check_files, seal
from ..errors import OptionError, UnsupportedLeafError
from ..record import FileRecord
from ..storage import Location
from ..tree import EXTERNAL, ExternalLeaf, ValueLeaf, display, flatten, unflatten
from ..tree.containers import class_name
from .args import RestoreArgs, SaveArgs
from .saves import Files, completed, finish
from .type_handlers import ParamInfo, TypeHandler, TypeHandlerRegistry

FOLDER = "leaves"
"""Where the leaves' own folders are, each named by the number of its leaf in the tree."""


class _Group(NamedTuple):
    """The leaves of one handler."""

    handler: TypeHandler
    numbers: list[int]
    values: list[Any]
    infos: Sequence[ParamInfo]
    args: list[SaveArgs]


class ExternalLeaves:
    """The leaves of one tree that type handlers save.

    Args:
        registry: Which handlers there are.
        names: The names of all leaves of the tree.
        values: The leaves.
        args: What is asked for each.
        snapshot: Whether they may change before they are written.

    Attributes:
        notes: What ``tree.json`` is to say of each of them, by the leaf's number in the tree.
    """

    def __init__(
        self,
        registry: TypeHandlerRegistry,
        names: Sequence[str],
        values: Sequence[Any],
        args: Sequence[SaveArgs | None],
        *,
        snapshot: bool,
    ) -> None:
        self.notes: dict[int, ValueLeaf] = {}
        self._groups: list[_Group] = []
        found: dict[str, tuple[TypeHandler, list[int]]] = {}
        for number, value in enumerate(values if registry.leaf_types else ()):
            handler = registry.find(value)
            if handler is not None:
                found.setdefault(handler.name, (handler, []))[1].append(number)
        for handler, numbers in found.values():
            mine = [values[number] for number in numbers]
            leaves = [(names[number], class_name(value)) for number, value in zip(numbers, mine, strict=True)]
            with _explained(handler, "param_infos", leaves):
                infos = handler.param_infos(mine, [names[number] for number in numbers])
            if len(infos) != len(mine):
                raise OptionError(
                    f"the TypeHandler {handler.name!r} gave {len(infos)} infos for {len(mine)} leaves: "
                    f"{_some(leaves)}; its param_infos must return one for each; nothing was written"
                )
            for number, value, info in zip(numbers, mine, infos, strict=True):
                note = {"kind": EXTERNAL, "handler": handler.name, "type": class_name(value), "facts": _facts(info)}
                self.notes[number] = ValueLeaf(note)
            if snapshot:
                with _explained(handler, "snapshot", leaves):
                    mine = [handler.snapshot(value) for value in mine]
            asked = [args[number] or SaveArgs() for number in numbers]
            self._groups.append(_Group(handler, numbers, mine, infos, asked))

    def write(self, folder: Location) -> Files:
        """Writes the leaves, durably.

        Args:
            folder: The item's folder.

        Returns:
            The files that were written by their path in it.
        """
        if not self._groups:
            return {}
        for handler, numbers, values, infos, args in self._groups:
            places = [folder / FOLDER / str(number) for number in numbers]
            for place in places:
                place.make_directory(sync=False)
            full = [dataclasses.replace(info, folder=place) for info, place in zip(infos, places, strict=True)]
            leaves = [(info.name, class_name(value)) for info, value in zip(infos, values, strict=True)]
            with _explained(handler, "serialize", leaves, folder):
                finish(completed(handler.serialize(values, full, args)))
        files = seal(folder / FOLDER, f"{FOLDER}/")
        folder.sync_directory()
        return files


def _facts(info: ParamInfo) -> dict[str, Any]:
    try:
        json.dumps(facts := dict(info.facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"{display(info.name)}: its facts are not JSON: {error}; nothing was written"
        ) from error
    return facts


def resolve(
    tree: Any,
    folder: Location,
    files: Mapping[str, FileRecord] | None,
    numbers: Mapping[str, int],
    registry: TypeHandlerRegistry,
    args: Mapping[str, RestoreArgs],
) -> Any:
    """Puts the values of leaves that handlers keep into a tree that was loaded.

    Args:
        tree: The tree, with an `ExternalLeaf` in the place of each such value.
        folder: The item's folder.
        files: What the commit record says about it.
        numbers: The number of every leaf of the saved tree by its name.
        registry: Which handlers there are.
        args: What is asked for, by leaf name.

    Returns:
        The tree with the values.

    Raises:
        OptionError: The handler of a leaf is not at hand.
        DamagedCheckpointError: A file of a leaf is not what was saved.
    """
    flat = flatten(tree, registry.leaf_types)
    values = list(flat.values)
    groups: dict[str, tuple[TypeHandler, list[int]]] = {}
    unknown: list[ExternalLeaf] = []
    for position, value in enumerate(values):
        if isinstance(value, ExternalLeaf):
            handler = registry.named(value.handler)
            if handler is None or "aggregate" in value.details:
                unknown.append(value)
            else:
                groups.setdefault(handler.name, (handler, []))[1].append(position)
    if unknown:
        raise OptionError("\n".join([f"{folder}: some leaves need handlers that are not at hand:", *_lines(unknown)]))
    for handler, positions in groups.values():
        leaves: list[ExternalLeaf] = [values[position] for position in positions]
        infos = [_info(leaf, folder, numbers[leaf.name], files) for leaf in leaves]
        kinds = [(leaf.name, f"{leaf.details.get('type')!s:.80}") for leaf in leaves]
        with _explained(handler, "deserialize", kinds, folder):
            found = completed(handler.deserialize(infos, [args.get(leaf.name) or RestoreArgs() for leaf in leaves]))
            count = len(found)
        if count != len(leaves):
            raise OptionError(
                f"{folder}: the TypeHandler {handler.name!r} gave {count} values for {len(leaves)} leaves: "
                f"{_some(kinds)}; its deserialize must return one for each"
            )
        for position, value in zip(positions, found, strict=True):
            values[position] = value
    return unflatten(flat.structure, values)


@contextlib.contextmanager
def _explained(
    handler: TypeHandler, method: str, leaves: Sequence[tuple[str, str]], folder: Location | None = None
) -> Iterator[None]:
    """Lets what a method of the user's own raises say which leaves it was called for, and where they lie."""
    try:
        yield
    except Exception as error:
        place = "" if folder is None else f" in {folder}"
        error.add_note(f"raised by {method} of the TypeHandler {handler.name!r} for {_some(leaves)}{place}")
        raise


def _some(leaves: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(leaves) - 8} more" if len(leaves) > 8 else ""
    return ", ".join(f"{display(name)} ({kind})" for name, kind in leaves[:8]) + more


def _info(leaf: ExternalLeaf, folder: Location, number: int, files: Mapping[str, FileRecord] | None) -> ParamInfo:
    below = f"{FOLDER}/{number}/"
    check_files(folder, {path: known for path, known in (files or {}).items() if path.startswith(below)})
    facts = leaf.details.get("facts")
    return ParamInfo(
        name=leaf.name, facts=facts if isinstance(facts, dict) else {}, folder=folder / FOLDER / str(number)
    )


def _lines(leaves: Sequence[ExternalLeaf]) -> list[str]:
    more = [f"  and {len(leaves) - 20} more"] if len(leaves) > 20 else []
    return [*map(_line, leaves[:20]), *more, "  or load the other leaves with select="]


def _line(leaf: ExternalLeaf) -> str:
    if "aggregate" in leaf.details:
        what = f"is in a file of the AggregateHandler {leaf.handler!r:.80}; give that one to PyTreeCheckpointHandler"
    else:
        kind = leaf.details.get("type")
        what = f"is a {kind!s:.80} of the TypeHandler {leaf.handler!r:.80}; register it with hf.register_type_handler"
    return f"  {display(leaf.name)} {what}"
