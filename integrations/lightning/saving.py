"""Save the steps of a ``fit``: decide when a save is due, assemble the checkpoint, and assign metrics to steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...engine.errors import SaveFailedError, shortened
from ...engine.generators import same_state
from ...engine.manager import note_resume
from ..options import epoch_reason
from . import private_api
from .fitting import Fitting
from .replay import EpochReplay, Point
from .steps import Fit, FitWitness
from .strategies import Path, mapped
from .trees import POSITION

logger = logging.getLogger("holdfast")

PREEMPTED = "preempted"
"""The reason recorded for saves that a signal triggers."""


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a run or, if nothing has been saved, the step that the run started from."""

    step: int
    metrics: Mapping[str, float] | None = None  # None if the checkpoint is not in the directory
    is_cut_off: bool = False  # whether the work that follows the batch, such as validation, was still to be done

    def is_complete(self, step: int) -> bool:
        """Return whether ``step`` was saved after all of its work, including validation, was complete."""
        return step == self.step and not self.is_cut_off

    def holds(self, step: int) -> bool:
        """Return whether a resume would skip the batch of ``step``, even if it must still do the work that follows."""
        return step == self.step and (self.metrics is not None or not self.is_cut_off)


@dataclass(frozen=True)
class Held:
    """A copy of a step's checkpoint in host memory."""

    step: int
    checkpoint: dict[str, Any]
    facts: Mapping[str, Any] | None  # step metadata


class StepWriter:
    """Decides which steps of a ``fit`` to save, and saves them."""

    def __init__(self, fit: Fit, replay: EpochReplay, fitting: Fitting, witness: FitWitness) -> None:
        self._fit = fit
        self._replay = replay
        self._fitting = fitting
        self._witness = witness
        self._ledger = MetricsLedger()
        self._has_news = False  # whether validation or an epoch has ended since a save was last considered
        self._outdated: set[int] = set()  # steps of an earlier run that this run will overwrite
        self._buffers: dict[Path, torch.Tensor] = {}  # memory for copies of checkpoints
        self.held: Held | None = None  # the checkpoint to save after an exception
        self._has_warned = False  # whether the warning about ModelPruning has been logged
        self.newest = Newest(fit.step)

    def resume(self, step: int, earlier: Mapping[str, Any], *, is_cut_off: bool) -> None:
        """Continue from a checkpoint; ``earlier`` contains the metrics that were logged before it was saved."""
        self._ledger.observe(-1, earlier)  # -1, because these metrics belong to earlier steps
        self._outdated = set(note_resume(self._fit.store.manager, step))
        self.newest = Newest(step, self.stored_metrics(step), is_cut_off)

    def stored_metrics(self, step: int) -> dict[str, float] | None:
        """Return the numeric metrics of a checkpoint; None if the step is not in the directory."""
        manager = self._fit.store.manager
        if step not in manager.all_steps():
            return None
        return {name: value for name, value in (manager.metrics(step) or {}).items() if isinstance(value, int | float)}

    def note_metrics(self, step: int) -> None:
        """Record new metrics of a step and, if the step has already been saved, add them to its checkpoint."""
        self._ledger.observe(step, self._fit.trainer.callback_metrics)
        self._has_news = True
        if self.newest.metrics is None or step != self.newest.step:
            return
        saved = self.newest.metrics
        late = {name: value for name, value in self._ledger.of(step).items() if not same_state(saved.get(name), value)}
        stored: dict[str, float] = self._fit.store.processes.decide("late metrics", dict, late)  # taken from process 0
        if stored:
            self._fit.store.manager.record_metrics(step, stored)
        self.newest = replace(self.newest, metrics={**saved, **stored})

    def consider(self, step: int, point: Point, *, ended: bool) -> None:
        """Save a step if a save is due; pass ``ended=True`` for the last step."""
        reason = self._why_due(step, point, ended=ended)
        if reason is not None:
            self.save(step, point, reason)
        elif self._fit.store.manager.local_due(step):
            dump, strategy = partial(self._dump, point), self._fit.trainer.strategy
            self._witness.save(step, moved=point != "batch")
            metrics, facts = self._ledger.of(step), self._fitting.facts()
            self._fit.store.save(step, dump, strategy, metrics=metrics, facts=facts, locally=True)
        self.hold(step, point)

    def _why_due(self, step: int, point: Point, *, ended: bool) -> str | None:
        metrics, has_news, self._has_news = None, self._has_news, False
        if has_news:
            self._ledger.observe(step, self._fit.trainer.callback_metrics)
            metrics = self._ledger.of(step) if self._fit.options.save_on_best else self._ledger.at(step)
        decision = self._fit.store.manager.decide(step, metrics=metrics)
        if decision.save:
            return decision.reason
        epochs = self._fit.trainer.fit_loop.epoch_progress.current.processed if point == "epoch" else None
        if (due := epoch_reason(self._fit.options.every_n_epochs, epochs)) is not None:
            return due
        if ended and (self._fit.options.save_at_end or self.newest.is_cut_off):
            return "at the end"
        if step in self._outdated:
            return "replaces the step of an earlier run"
        newest = self.newest
        if has_news and (
            metric := self._fit.store.awaited_metric(newest.step, newest.metrics, lambda: self._ledger.of(step))
        ):
            return f"the first with {metric} after a save without it"
        return None

    def save(self, step: int, point: Point, reason: str) -> None:
        """Save a step in the background."""
        self._ledger.observe(step, self._fit.trainer.callback_metrics)
        earlier = self.newest.metrics or {} if step == self.newest.step else {}
        metrics, strategy = {**earlier, **self._ledger.of(step)}, self._fit.trainer.strategy
        dump, facts = partial(self._dump, point, is_cut_off=reason == PREEMPTED), self._fitting.facts()
        self._witness.save(step, moved=point != "batch")
        with self._fit.trainer.profiler.profile("save_checkpoint"):
            try:
                self._fit.store.save(step, dump, strategy, metrics=metrics, facts=facts, reason=reason)
            except SaveFailedError:  # the previous save failed, but the new save is in progress
                self.newest = Newest(step, metrics)
                raise
            strategy.barrier("CheckpointCallback")
        self.newest = Newest(step, metrics)
        self._outdated.discard(step)

    def hold(self, step: int, point: Point) -> None:
        """Keep a copy of the current state, to be saved if an exception occurs before the next copy is made."""
        if not self._fit.options.save_on_exception or self.newest.is_complete(step):
            self.held = None
            return
        self._ledger.observe(step, self._fit.trainer.callback_metrics)
        self.held = Held(step, copied(self._dump(point, is_cut_off=True), self._buffers), self._fitting.facts())

    def save_after(self, exception: BaseException) -> None:
        """Save the copy held since the last complete batch, because the current state may be partially updated."""
        held, self.held = self.held, None
        if held is None or self.newest.is_complete(held.step) or self._witness.run.error is not None:
            return
        metrics, reason = self._ledger.of(held.step), f"after {type(exception).__name__}"
        strategy, facts = self._fit.trainer.strategy, held.facts
        self._fit.store.save(held.step, lambda: held.checkpoint, strategy, metrics=metrics, facts=facts, reason=reason)
        self._fit.say("saving step %d in %s %s", held.step, self._fit.store.directory, reason)

    def _dump(self, point: Point, *, is_cut_off: bool = False) -> dict[str, Any]:
        """Return a Lightning checkpoint dictionary with the data position and the random generator states."""
        checkpoint = private_api.dump_checkpoint(self._fit.trainer)
        self._warn_of_pruning(checkpoint)
        cut_off = is_cut_off and point == "batch" and self._fit.trainer.fit_loop.epoch_loop.done
        position = self._replay.capture(point, is_cut_off=cut_off)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # already in the data position
        return {**checkpoint, POSITION: {**position, "optimizers": self._fitting.description()}}

    def _warn_of_pruning(self, checkpoint: dict[str, Any]) -> None:
        """Warn once that ModelPruning makes pruning permanent in checkpoints, unlike in the module being trained."""
        if self._has_warned or not private_api.callbacks_of(self._fit.trainer, "ModelPruning"):
            return
        names = self._fit.trainer.lightning_module.state_dict().keys() - checkpoint["state_dict"].keys()
        if pruned := sorted(name.removesuffix("_orig") for name in names if name.endswith("_orig")):
            self._has_warned = True
            logger.warning(
                "ModelPruning makes its pruning permanent in every checkpoint: a run that resumes from one trains "
                "without the masks until it prunes again, and ends differently from an uninterrupted run: %s",
                shortened(pruned),
            )


# ---- metrics and their steps


class MetricsLedger:
    """Records the step at which each value appeared in ``trainer.callback_metrics``."""

    # ``trainer.callback_metrics`` keeps the last value of every metric ever logged: 50 steps after validation, it still
    # contains ``val_loss``. A later checkpoint that was ranked by this stale value would look as good as the checkpoint
    # that was validated.

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, int]] = {}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            seen = self._seen.get(name)
            if seen is None or not _same_value(seen[0], value):
                self._seen[name] = (value, step)

    def of(self, step: int) -> dict[str, float]:
        """Return the metrics of one step as Python floats, copied from their device."""
        return {name: float(value) for name, value in self.at(step).items()}

    def at(self, step: int) -> dict[str, Any]:
        """Return the metrics of one step as logged, still on their device."""
        return {name: value for name, (value, at) in self._seen.items() if at == step}


def _same_value(seen: Any, value: Any) -> bool:
    """Return whether two objects are the same logged value, based on memory addresses rather than equality."""
    if isinstance(seen, torch.Tensor) and isinstance(value, torch.Tensor):
        # Lightning returns a new view on each access. Keeping the old view prevents its memory from being reused.
        return seen.data_ptr() == value.data_ptr()
    return seen is value


# ---- copies of checkpoints in reused memory


def copied(checkpoint: dict[str, Any], buffers: dict[Path, torch.Tensor]) -> dict[str, Any]:
    """Copy all containers and arrays to the host, into the ``buffers`` of the previous copy, which saves time."""

    def copy(value: Any, path: Path, _: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.copy() if isinstance(value, np.ndarray) else value
        tensor = value.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.clone()
        buffer = buffers.get(path)
        like = torch.empty_like(tensor, device="meta")  # layout of a dense copy in the tensor's memory order
        facts = like.shape, like.dtype, like.stride()
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != facts:
            buffer = buffers[path] = torch.empty_like(tensor, device="cpu")
        return buffer.copy_(tensor)

    copies: dict[str, Any] = mapped(copy, checkpoint, None)
    return copies
