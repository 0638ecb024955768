"""The callback's arguments, and the checkpoint store that the callback and the ``CheckpointIO`` plugin share."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import secrets
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...engine.api import load
from ...engine.checkpoint import AsyncCheckpointer
from ...engine.clock import seconds
from ...engine.distributed import ProcessGroup, current_coordinator
from ...engine.errors import CheckpointNotFoundError, HoldfastError, InvalidLocationError, OptionError, StateError
from ...engine.format import ITEM, RECORD, CheckpointRecord
from ...engine.handlers import PerProcessCheckpointHandler, PyTreeCheckpointHandler, SavedShares
from ...engine.manager import (
    CheckpointManager,
    CheckpointManagerOptions,
    has_triggers,
    limits,
    metric_name,
    metric_value,
    step_location,
)
from ...engine.observer import process_observer
from ...engine.pytree import flatten
from ...engine.steps import list_steps, newest_step, prefix_of, read_record, read_steadily, series_and_step, series_of
from ...engine.storage import TEMPORARY_PREFIX, Location, Place, as_location
from ..loop import WITHOUT_GRACE, all_steps, grace_check
from ..options import ProgramOptions
from .strategies import SharedState, StateHandler
from .trees import POSITION, from_tree, to_tree

GLOBAL_GENERATORS = "global_generators"
REPLICATED = re.compile(rf"{GLOBAL_GENERATORS}|loaders(/\d+)?")
"""The names that ``replicated`` accepts for a trainer's state."""

_EXPORTS = (".safetensors", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class CallbackArguments(ProgramOptions):
    """The arguments of :class:`~holdfast.integrations.lightning.CheckpointCallback`."""

    dirpath: Place = field(kw_only=False)
    every_n_epochs: int | None = field(default=None, metadata=limits(1))
    save_on_exception: bool = False
    export_best: Place | None = None
    links: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.replicated if not REPLICATED.fullmatch(name)]:
            raise OptionError(
                f"replicated names {unknown[0]!r}, but a Lightning trainer has 'loaders' (or one of them, such as "
                "'loaders/0') and 'global_generators'"
            )
        if self.item_intervals:
            raise OptionError(
                f"item_intervals={self.item_intervals!r}: a Lightning checkpoint has the item state and, with "
                "several processes, the item process, and a run resumes from both; leave it out"
            )
        if self.export_best is not None:
            if self.best_fn is None:
                raise OptionError("export_best= needs best_fn: the name of a metric, or a function of the metrics")
            if not self.export_place.name.endswith(_EXPORTS):
                raise OptionError(f"export_best={self.export_best!r} must end in {' or '.join(_EXPORTS)}")

    @property
    def export_place(self) -> Location:
        assert self.export_best is not None
        text = str(self.export_best)
        is_relative = "://" not in text and not text.startswith(("/", "~"))
        return as_location(self.dirpath) / text if is_relative else as_location(self.export_best)

    def manager_options(self) -> CheckpointManagerOptions:
        """Return the equivalent manager options, except for ``every_n_epochs``, which the callback implements."""
        options = super().manager_options()
        if has_triggers(self) or self.every_n_epochs is None:
            return options
        # Without any trigger, the manager would save at every step.
        return replace(options, save_interval_steps=sys.maxsize, save_interval_secs=None)


PROCESS = "process"
"""The item that stores the data position of each process in a run with several processes."""

_OF_EVERY = {"every": True}  # restores the positions of all processes if the number of processes has changed

Template = Mapping[str, Any] | None
"""Maps entries of the Lightning checkpoint dictionary to their templates."""

FINISHED: dict[Location, weakref.ref[Any]] = {}
"""Maps the directory of each run that this process has finished to the run's module. This is used to detect
cross-validation folds that share a directory by mistake."""

logger = logging.getLogger("holdfast")


class RunStore:
    """A run's checkpoint directory, which is writable during a ``fit`` and readable at any time."""

    def __init__(self, directory: Place, options: ProgramOptions) -> None:
        self.observer = process_observer()
        self.directory: Location = as_location(directory, writes=True)
        self._arguments = options
        self._options = options.manager_options()
        self._series = series_of(options.step_prefix)
        self._saves = AsyncCheckpointer(StateHandler(compression=options.compression))
        self._positions = AsyncCheckpointer(PerProcessCheckpointHandler(options.tree_handler()))
        self._manager: CheckpointManager | None = None
        self.is_open = False
        self.has_saved = False
        self._has_positions = False
        self._has_fetched = False
        self._exported: int | None = None  # the step whose weights are in the ``export_best`` file
        self._reported: set[str] = set()
        self.at_teardown = contextlib.ExitStack()  # closed when the strategy is torn down
        self._events: list[dict[str, Any]] = []  # events since the last :meth:`take_events` call

    def __reduce__(self) -> tuple[Any, ...]:
        return RunStore, (self.directory, self._arguments)

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the current or last ``fit`` in this process; a read-only manager before the first ``fit``."""
        if self._manager is None:
            return self._make(replace(self._options, read_only=True))
        return self._manager

    @property
    def processes(self) -> ProcessGroup:
        return ProcessGroup(self.directory.url, None, seconds(self._options.barrier_timeout_secs))

    def open(self) -> None:
        """Acquire the directory for writing."""
        self.close()
        manager = self._make(self._options)
        manager.acquire()
        manager.events.add_listener(self._events.append)
        if self._arguments.grace_secs is not None:
            manager.events.add_listener(grace_check(seconds(self._arguments.grace_secs)))
        self._manager, self.is_open = manager, True

    def close(self, *, orderly: bool = True) -> None:
        """Wait for the pending save and release the directory."""
        if self.is_open and self._manager is not None:
            self.is_open = False
            if not orderly:
                self._manager.finish_mirror(WITHOUT_GRACE)
            self._manager.close()

    def note_finished(self, module: Any) -> None:
        FINISHED[self.directory] = weakref.ref(module)

    def check_module(self, module: Any) -> None:
        """Raise StateError if this process has already finished this run with another module, probably by mistake."""
        finished = FINISHED.get(self.directory)
        if finished is not None and finished() is not module:
            raise StateError(
                f"{self.directory} holds a run that this process finished with another module; this one would get the "
                "weights and the score of that run. Give every fold, trial or phase its own directory; to "
                "continue that run, pass resume='must' to the callback, or ckpt_path='last' to fit"
            )

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call. Only process 0 has any."""
        events = self._events[:]
        del self._events[: len(events)]  # not clear(), because a background save may have added more
        return events

    @property
    def may_fetch(self) -> bool:
        """True if there is a mirror and :meth:`fetch` has not been called."""
        return self._options.mirror is not None and not self._has_fetched

    def fetch(self) -> None:
        """Fetch the newest step from the mirror if it is newer than all steps in the directory; a collective call."""
        if self.may_fetch:
            self._make(replace(self._options, local=None)).close()
            self._has_fetched = True

    def steps(self) -> list[int]:
        """Return the steps in the directory and, during a ``fit``, the host-local step."""
        return all_steps(self.directory, self._options.step_prefix, self._manager if self.is_open else None)

    def path_of(self, step: int | None) -> str:
        return "" if step is None else str(step_location(self.manager, step))

    def step_of(self, path: Place) -> int | None:
        """Return the number of the step at a path; None if the path is not in this directory."""
        try:
            location = as_location(path)
        except InvalidLocationError:
            return None
        named = series_and_step(location.name) if location.parent == self.directory else None
        return named[1] if named is not None and named[0] == self._series else None

    def score(self, step: int | None) -> float | None:
        """Return the value of the ranking metric for a step; None if the step lacks this metric."""
        metric = self._options.best_fn
        if metric is None or step is None:
            return None
        try:
            return metric_value(self.manager.metrics(step), metric)
        except CheckpointNotFoundError:  # the save has not been committed
            return None

    def awaited_metric(
        self, newest: int, saved: Mapping[str, float] | None, metrics: Callable[[], Mapping[str, float]]
    ) -> str | None:
        """Return the name of the ranking metric if the newest step was saved without it but ``metrics`` now has it."""
        metric = self._options.best_fn
        if metric is None or self._options.save_on_best:  # ``save_on_best`` has already considered this step.
            return None

        # Checkpoints saved at an interval rarely coincide with validation. Without this check, none might be ranked.
        def awaited() -> str | None:
            lacks = saved is not None and metric_value(saved, metric) is None and self.score(newest) is None
            return metric_name(metric) if lacks and metric_value(metrics(), metric) is not None else None

        name: str | None = self.processes.decide("a step with the metric", awaited)
        return name

    def publish(self, options: CallbackArguments) -> None:
        """Update the symlinks and exported best weights. Failures are only logged, because no run needs these files."""
        manager, links = self.manager, options.links and self.directory.is_local
        steps = manager.all_steps() if links or options.export_best is not None else []
        best = manager.best_step() if steps and options.best_fn is not None else None
        for name, step in {"last": steps[-1], "best": best}.items() if links and steps else ():
            if step is not None:
                _link(self.directory.path / name, step_location(manager, step).name)
        if options.export_best is None or best is None or best == self._exported:
            return
        target = options.export_place
        try:
            export_weights(step_location(manager, best), target)
        except (HoldfastError, OSError) as error:
            logger.warning("step %d is the best, but %s could not be written: %s", best, target, error)
        else:
            self._exported = best

    def save(
        self,
        step: int,
        dump: Callable[[], dict[str, Any]],
        strategy: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        reason: str = "trainer.save_checkpoint",
        locally: bool = False,
    ) -> None:
        """Save the result of ``dump`` in the background or, if ``locally``, as a host-local step; a collective call."""
        if strategy.world_size == 1:
            items = self._tree(dump())
        else:
            shared, processes = SharedState(strategy), self.processes
            with processes.together(f"{self.directory.url}: what step {step} saves"):  # if one process fails, all raise
                items = self._items(dump(), shared, processes)
            shared.fill()
        with self._writing() as manager:
            if strategy.world_size == 1 and self._has_positions:
                items = {ITEM: items}
            if locally:
                manager.save_locally(step, items, metrics=metrics, custom_metadata=facts)
                return
            self.has_saved |= self.is_open
            manager.save(step, items, metrics=metrics, force=True, reason=reason, custom_metadata=facts)

    def delete(self, step: int) -> None:
        """Delete a step; a collective call for all processes of the strategy."""
        with self._writing() as manager:
            manager.delete(step)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[CheckpointManager]:
        """Yield the run's manager or, outside a ``fit``, a temporary manager."""
        without_local = replace(self._options, local=None)
        with contextlib.nullcontext(self.manager) if self.is_open else self._make(without_local) as manager:
            if self._manager is not None:
                self._manager = manager
            yield manager

    def load(self, step: int | None, *, with_position: bool, template: Template = None) -> dict[str, Any]:
        """Load a step, or the newest intact step, as a Lightning checkpoint, with or without the data position."""
        manager = self.manager
        wanted: Any = template
        if self._has_positions:
            wanted = {ITEM: template, PROCESS: None} if with_position else {ITEM: template}
        of_every = {PROCESS: _OF_EVERY} if self._has_positions else {}
        if step is not None:
            return _checkpoint(manager.restore(step, wanted, restore_kwargs=of_every), self.path_of(step))
        restored = manager.restore_latest(wanted, restore_kwargs=of_every)
        if restored is None:
            raise CheckpointNotFoundError(f"{manager.directory}: there is no checkpoint to restore")
        return _checkpoint(restored.items, self.path_of(restored.step))

    def _make(self, options: CheckpointManagerOptions) -> CheckpointManager:
        """Create a manager; add a data position item if there are several processes or a saved step has this item."""
        entries = list_steps(self.directory, self._series)
        self._has_positions = not self.processes.alone or any(
            entry.record is not None and PROCESS in entry.record.items for entry in entries
        )
        items = {ITEM: self._saves, PROCESS: self._positions} if self._has_positions else self._saves
        metadata, clock = self._arguments.metadata, self._arguments.clock
        manager = CheckpointManager(
            self.directory, items, options, metadata=metadata, clock=clock, observer=self.observer
        )
        manager.events.has_callback = True
        return manager

    def _items(self, checkpoint: dict[str, Any], shared: SharedState, processes: ProcessGroup) -> dict[str, Any]:
        rest = {name: value for name, value in checkpoint.items() if name != POSITION}
        items = {ITEM: shared.tree(processes, rest, lambda: self._tree(rest))}
        if POSITION in checkpoint:
            items[PROCESS] = to_tree({POSITION: checkpoint[POSITION]})[0]
        return items

    def _tree(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        tree, left = to_tree(checkpoint)
        if new := [line for line in left if line not in self._reported]:
            self._reported.update(new)
            logger.warning(
                "left out of the checkpoints in %s because they are neither arrays nor plain data: %s. Nothing is "
                "pickled; a resumed run takes these from the program",
                self.directory,
                ", ".join(new),
            )
        return tree


def read_checkpoint(path: Place, *, with_position: bool, template: Template = None) -> dict[str, Any]:
    """Read a checkpoint, or the newest intact checkpoint in a directory, as a Lightning checkpoint dictionary."""
    location = as_location(path)
    if not (location / RECORD).exists():
        newest = newest_step(list_steps(location))
        store = RunStore(location, ProgramOptions(step_prefix=prefix_of(newest.series) if newest else None))
        return store.load(None, with_position=with_position, template=template)
    return read_steadily(location, lambda record: _read(location, record, with_position, template))


def _read(location: Location, record: CheckpointRecord, with_position: bool, template: Template) -> dict[str, Any]:
    item = record.items.get(ITEM)
    if item is None or item.kind != StateHandler.kind:
        return _checkpoint(load(location), location)
    items = {ITEM: StateHandler().restore(location / item.folder, template, files=item.files)}
    if with_position and (position := record.items.get(PROCESS)) is not None:
        folder = location / position.folder
        items[PROCESS] = PerProcessCheckpointHandler().restore(folder, files=position.files, **_OF_EVERY)
    return _checkpoint(items, location)


def is_checkpoint(path: Place) -> bool:
    try:
        location = as_location(path)
    except InvalidLocationError:
        return False
    if location.name.endswith(".ckpt") or not location.is_directory():
        return False  # Don't open Lightning's own files: they may be on a slow network file system.
    return (location / RECORD).exists() or bool(list_steps(location))


def _checkpoint(restored: Any, source: Place) -> dict[str, Any]:
    """Merge restored items into a Lightning checkpoint dictionary with this process's data position."""
    # If the number of processes has changed, ``shares`` contains the positions of all processes that saved the step. If
    # this process has no saved position, use that of process 0.
    tree, position = restored, None
    if isinstance(restored, dict) and "state_dict" not in restored and ITEM in restored:
        tree, position = restored[ITEM], restored.get(PROCESS)
    if not isinstance(tree, dict) or not {"state_dict", "pytorch-lightning_version"} <= tree.keys():
        raise StateError(
            f"{source} was not saved from a Lightning trainer; load it with hf.load, or with the callback that saved it"
        )
    checkpoint, processes = from_tree(tree, source), current_coordinator()
    if isinstance(position, SavedShares):
        shares = [from_tree(share, source)[POSITION] for share in position.trees]
    elif position is None and POSITION in checkpoint and processes.process_count > 1:
        shares = [checkpoint[POSITION]]
    else:
        return {**checkpoint, **from_tree(position or {}, source)}
    share = shares[processes.process_index if processes.process_index < len(shares) else 0]
    return {**checkpoint, POSITION: {**share, "shares": shares}}


# ---- other files in the directory of a run: links to the newest and the best step, and the best weights


def _link(link: Path, folder: str) -> None:
    if (link.exists() and not link.is_symlink()) or (link.is_symlink() and os.readlink(link) == folder):
        return
    partial = link.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        partial.symlink_to(folder, target_is_directory=True)
        partial.replace(link)
    except OSError as error:  # the file system does not support symlinks
        logger.debug("%s could not be linked: %s", link, error)
        with contextlib.suppress(OSError):
            partial.unlink()


def export_weights(step: Location, target: Location) -> None:
    """Write a step's weights to a file atomically; a ``.ckpt`` file also contains plain hyper-parameters."""
    if target.name.endswith(".safetensors"):
        from ..formats.safetensors import write_tensors

        state = _entries(step, {"state_dict"}).get("state_dict", {}).items()
        arrays = {name: np.asarray(value) for name, value in state if isinstance(value, np.ndarray | np.generic)}
        tensors = [(name, array.dtype, array.shape) for name, array in arrays.items()]
        write_tensors(target, tensors, {"step": step.name}, arrays.values)
        return
    buffer = io.BytesIO()
    torch.save(from_tree(_entries(step, _OF_THE_MODEL), step), buffer)
    target.parent.make_directory()
    target.write_bytes(buffer.getvalue())


_OF_THE_MODEL = {  # entries to export; ``value_types`` is not among them, so all values stay plain data
    *("state_dict", "state_dict_versions", "tree_version", "epoch", "global_step", "pytorch-lightning_version"),
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
}


def _entries(step: Location, names: Collection[str]) -> dict[str, Any]:
    """Read the named entries of a step's checkpoint, ignoring names that the checkpoint lacks."""
    record = read_record(step).items[ITEM]
    handler, folder = PyTreeCheckpointHandler(), step / record.folder
    outline = handler.structure(folder, files=record.files)
    chosen = [f"{name}/**" for name, value in outline.items() if name in names and flatten(value).values]
    entries: dict[str, Any] = handler.restore(folder, files=record.files, select=chosen)
    return entries
