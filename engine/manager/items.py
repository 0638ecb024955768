"""The named items of a manager with their checkpointers, and the step that is being saved."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ..arrays import Layout, SharedReads, WrittenSteps
from ..checkpoint import AsyncCheckpointer, Checkpointer, ItemToSave, StoredItems
from ..errors import CheckpointNotFoundError, OptionError
from ..forks import Lock
from ..format import ITEM, CheckpointRecord, ItemRecord
from ..handlers import (
    CheckpointHandler,
    PreparedCheckpointHandler,
    PyTreeCheckpointHandler,
    has_structure,
)
from .directory import RunDirectory, check_json
from .metrics import plain_metrics
from .retention import newest_with


class ItemToRestore(NamedTuple):
    """An item to restore: its name in the checkpoint, its handler, its template, and arguments for the handler."""

    saved: str
    handler: CheckpointHandler
    template: Any
    kwargs: Mapping[str, Any]


class ItemSet:
    """The items of a manager with their checkpointers. Callers pass a single item without a name."""

    def __init__(
        self,
        checkpointers: Checkpointer | Mapping[str, Checkpointer] | None,
        rare: Collection[str] = (),
        *,
        reuse: bool = False,
        uploads: bool = False,
    ) -> None:
        self._several = isinstance(checkpointers, Mapping)
        if checkpointers is None:
            checkpointers = AsyncCheckpointer(PyTreeCheckpointHandler())
        if isinstance(checkpointers, Checkpointer):
            checkpointers = {ITEM: checkpointers}
        if not isinstance(checkpointers, Mapping):
            raise OptionError(
                f"checkpointers must be a Checkpointer, or a dictionary of them by item, not "
                f"{type(checkpointers).__name__}; options go by name: CheckpointManager(directory, options=...)"
            )
        if not checkpointers:
            raise OptionError("checkpointers={} saves nothing; give one for each item, or None for a single tree")
        for name, checkpointer in checkpointers.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise OptionError(f"item name {name!r}: items become folders; use letters, digits and underscores")
            if not isinstance(checkpointer, Checkpointer):
                raise OptionError(f"item {name!r}: expected a Checkpointer, found {type(checkpointer).__name__}")
        self._checkpointers = dict(checkpointers)
        if unknown := set(rare) - self._checkpointers.keys():
            raise OptionError(
                f"item_intervals names {', '.join(sorted(unknown))}; this manager has the items "
                f"{', '.join(self._checkpointers)}"
            )
        if rare and not self._checkpointers.keys() - set(rare):
            raise OptionError("item_intervals names every item; a checkpoint needs one that it always has")
        self._rare = frozenset(rare)  # items that only some checkpoints have
        handlers = {name: checkpointer.handler for name, checkpointer in self._checkpointers.items()}
        self._written = {  # for each item, data files of earlier steps that later steps may share
            name: WrittenSteps()
            for name, handler in handlers.items()
            if reuse and isinstance(handler, PreparedCheckpointHandler) and handler.reuses
        }
        self._uploads = uploads  # whether data files will be copied from disk to a remote mirror
        self._optional = self._rare | {name for name, handler in handlers.items() if handler.optional}

    def left_out(self, stored: StoredItems, wanted: Any) -> list[str]:
        """Return the items of ``item_intervals`` that a restore requests but this checkpoint lacks."""
        asked = self._rare if not isinstance(wanted, Mapping) else self._rare & wanted.keys()
        return sorted(asked.difference(stored.names))

    def to_save(self, content: StepContent, not_due: Collection[str]) -> dict[str, ItemToSave]:
        values, arguments = self._by_name(content.items, content.kwargs, "save_kwargs")
        needed = self._checkpointers.keys() - self._optional
        if not isinstance(values, Mapping) or not needed <= values.keys() <= self._checkpointers.keys():
            given = ", ".join(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise OptionError(f"this manager saves the items {', '.join(self._checkpointers)}; given: {given}")
        return {
            name: ItemToSave(
                checkpointer.handler,
                values[name],
                checkpointer.background,
                self._arguments(checkpointer.handler, arguments.get(name, {})),
                self._written.get(name),
            )
            for name, checkpointer in self._checkpointers.items()
            if name in values and name not in not_due
        }

    def _arguments(self, handler: CheckpointHandler, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the handler's save arguments; limit the size of data files if an upload may hold them in memory."""
        if not self._uploads or not isinstance(handler, PreparedCheckpointHandler) or handler.layout is None:
            return given
        layout: Layout = given.get("layout") or handler.layout
        return {**given, "layout": layout.for_uploads()}

    def save_begins(self, step: int, run: RunDirectory) -> None:
        """Let ``step`` share data files with earlier steps, except the newest step and the last one before ``step``."""
        infos = run.infos()
        for name, written in self._written.items():
            near = newest_with(name, infos), newest_with(name, infos, step)
            having = {info.step for info in infos if name in info.items}
            written.begin(step, [n for n in near if n is not None], having.__contains__)

    @contextlib.contextmanager
    def steps_deleted(self) -> Iterator[None]:
        """Track which shared files remain available while the block deletes steps."""
        with contextlib.ExitStack() as stack:
            for written in self._written.values():
                stack.enter_context(written.names_removed())
            yield

    def damage_found(self) -> None:
        """Stop sharing files with earlier steps, because any of them may contain the damaged file."""
        for written in self._written.values():
            written.forget()

    def to_restore(
        self, stored: StoredItems, items: Any, kwargs: Mapping[str, Any], shared: SharedReads | None = None
    ) -> dict[str, ItemToRestore]:
        templates, arguments = self._by_name(items, kwargs, "restore_kwargs")
        if templates is not None and not isinstance(templates, Mapping):
            raise OptionError(
                f"this manager restores the items {', '.join(self._checkpointers)}: give templates by item, as "
                f"{{{next(iter(self._checkpointers))!r}: ...}}; found {type(templates).__name__}"
            )
        wanted = {}
        for name, saved in self._names(stored, templates).items():
            handler, template = self._checkpointers[name].handler, (templates or {}).get(name)
            given = arguments.get(name, {})
            if template is None and type(handler) is PyTreeCheckpointHandler:
                given = {"torch_tensors": True, **given}  # `load_state_dict` does not accept numpy arrays
            if shared is not None and handler.shares_reads:
                given = {**given, "shared": shared}
            wanted[name] = ItemToRestore(saved, handler, template, given)
        return wanted

    def as_given(self, values: Mapping[str, Any]) -> Any:
        """Return the dictionary of values, or the value itself if the manager saves a single item."""
        return values if self._several else values.get(ITEM)

    def structure(self, stored: StoredItems) -> Any:
        """Describe the items without reading their data; return None for a single item without a description."""
        structures = {
            name: stored.structure(saved, self._checkpointers[name].handler)
            for name, saved in self._names(stored, None).items()
            if has_structure(self._checkpointers[name].handler)
        }
        return self.as_given(structures)

    def _by_name(self, items: Any, kwargs: Mapping[str, Any], option: str) -> tuple[Any, Mapping[str, Any]]:
        if not self._several:
            return {ITEM: items}, {ITEM: kwargs}
        if unknown := kwargs.keys() - self._checkpointers.keys():
            raise OptionError(
                f"{option} for unknown items: {', '.join(sorted(unknown))}; this manager has the items "
                f"{', '.join(self._checkpointers)}"
            )
        return items, kwargs

    def _names(self, stored: StoredItems, wanted: Mapping[str, Any] | None) -> dict[str, str]:
        """Map each requested item to its name in a checkpoint, omitting optional items that the checkpoint lacks."""
        names = {name: name for name in (self._checkpointers if wanted is None else wanted)}
        if not self._several:
            names = {ITEM: stored.only_name(self._checkpointers[ITEM].handler)}
        names = {name: saved for name, saved in names.items() if saved in stored.names or name not in self._optional}
        if missing := [n for n, saved in names.items() if saved not in stored.names or n not in self._checkpointers]:
            raise CheckpointNotFoundError(
                f"{stored.location}: no item {', '.join(missing)}; the checkpoint has "
                f"{', '.join(sorted(stored.names))}, and this manager has checkpointers for "
                f"{', '.join(sorted(self._checkpointers))}"
            )
        return names


class StepContent(NamedTuple):
    """The arguments of a save; ``kwargs`` are passed to the handlers."""

    step: int
    items: Any
    metrics: Any
    custom_metadata: Mapping[str, Any] | None
    kwargs: Mapping[str, Any]


class PendingSave:
    """The step that is being saved, which accepts metrics until its commit record is created."""

    def __init__(self, content: StepContent, reason: str) -> None:
        self.step = content.step
        self._reason = reason
        self._facts = check_json("custom_metadata", content.custom_metadata)
        self.metrics = None if content.metrics is None else plain_metrics(content.metrics)
        self._lock = Lock()
        self._open = True

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """Add metrics; return False if the commit record has already been created."""
        with self._lock:
            if self._open:
                self.metrics = {**(self.metrics or {}), **metrics}
            return self._open

    def close(self) -> dict[str, Any] | None:
        """Stop accepting metrics, and return all of them."""
        with self._lock:
            self._open = False
            return self.metrics

    def record(self, items: Mapping[str, ItemRecord], time: float) -> CheckpointRecord:
        return CheckpointRecord(
            items=items,
            time=time,
            step=self.step,
            reason=self._reason,
            metrics=self.close(),
            custom_metadata=self._facts,
        )
