"""Count the steps of a ``fit``, and pass them to the witness."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...engine.sources import Misfits
from ...engine.witness import Seen
from ..loop import IN_TRAINERS, PreemptionSignal, Witness, announce, why_not_comparable
from .io import ResumePath
from .loader_states import capture_generators
from .private_api import loaders_of
from .store import CallbackArguments, RunStore

_NOTHING: Any = object()


@dataclass
class Counts:
    """What a trainer does not count itself; the callbacks of one trainer share it."""

    batches: int = 0  # number of batches counted as steps
    holds_gradients: bool = False  # whether manual optimization has gradients that it has not applied


@dataclass
class Fit:
    """One ``fit``: its trainer, checkpoint directory, callback options, and step count."""

    # ``global_step`` counts only the steps of Lightning optimizers. Batches trained without these are in ``counts``.

    trainer: Any
    store: RunStore
    options: CallbackArguments
    preemption: PreemptionSignal
    counts: Counts

    @property
    def step(self) -> int:
        """The last completed step."""
        return int(self.trainer.global_step) + self.counts.batches

    def say(self, text: str, *args: object) -> None:
        """Announce a message about the run in process 0; other processes only log the message."""
        announce(text, *args, shown=self.trainer.is_global_zero)

    def count(self, train: Callable[[Any], None], fetcher: Any) -> None:
        """Train on one batch, and count the batch as a step if ``global_step`` does not include it."""
        trainer = self.trainer
        if trainer.lightning_module.automatic_optimization:
            train(fetcher)
            return
        step, before, optimized = trainer.global_step, *self._versions()
        self.counts.holds_gradients = False
        train(fetcher)
        if trainer.global_step != step:
            return
        moved = any(parameter._version != version for parameter, version in before)
        # Checkpoints do not contain gradients, so a save must wait until they have been applied.
        holds = any(parameter.grad is not None and parameter._version == version for parameter, version in before)
        self.counts.holds_gradients = holds and (optimized or not moved)
        if not self.counts.holds_gradients and (moved or not optimized):
            if not self.counts.batches:
                self.say("batches count as steps, because no Lightning optimizer steps")
            self.counts.batches += 1

    def _versions(self) -> tuple[list[tuple[Any, int]], bool]:
        """Return the trained parameters with their version counters, and whether optimizers hold these parameters."""
        trainable = [parameter for parameter in self.trainer.lightning_module.parameters() if parameter.requires_grad]
        groups = (group for optimizer in self.trainer.optimizers for group in optimizer.param_groups)
        held = {id(parameter) for group in groups for parameter in group["params"]}
        # If no optimizer is configured, Lightning creates one without parameters, so use all trainable parameters.
        optimized = [parameter for parameter in trainable if id(parameter) in held]
        trained = [parameter for parameter in optimized or trainable if not parameter.is_inference()]
        return [(parameter, parameter._version) for parameter in trained], bool(optimized)


class FitWitness:
    """Passes the result of each step of a ``fit`` to the witness, which compares resumed steps with recorded ones."""

    def __init__(self, fit: Fit, misfits: Misfits | None) -> None:
        manager, options = fit.store.manager, fit.options
        self.run = Witness(manager, enabled=options.witness, on_inexact=options.on_inexact, handing_over=IN_TRAINERS)
        self._fit = fit
        self._misfits = misfits
        self._batch: Any = _NOTHING  # the current batch, if its step is to be compared

    def begin(self) -> None:
        self.run.begin(self._seen())

    def resume(self) -> None:
        """Compare the restored state with the witness's record of the saved state."""
        path, why = self._fit.trainer.ckpt_path, why_not_comparable(self._fit.options, self._misfits)
        if not isinstance(path, ResumePath) and not os.path.abspath(path).startswith(str(self._fit.store.directory)):
            why = f"the run resumed from {path}"
        self.run.begin(self._seen(), self._fit.step, why)

    def begin_batch(self, batch: Any) -> None:
        """Keep the batch of the next step if that step will be compared."""
        self._batch = batch if self.run.watches else _NOTHING

    def end_batch(self) -> None:
        batch, self._batch = self._batch, _NOTHING
        if batch is not _NOTHING:
            self.run.note(lambda: self._seen(batch), self._fit.trainer.current_epoch)

    def save(self, step: int, *, moved: bool) -> None:
        self.run.save(step, self._seen, moved=moved)

    def _seen(self, batch: Any = None) -> Seen:
        trainer, step = self._fit.trainer, self._fit.step
        loaders = loaders_of(trainer.fit_loop)
        generators = capture_generators(loaders)
        of_loaders = {f"loader {name}": state for name, state in generators.pop("loaders").items()}
        return Seen(
            step=step,
            root={"module": trainer.lightning_module, "optimizers": [*trainer.optimizers]},
            objects={"loaders": loaders},
            generators={**generators, **of_loaders},
            batch=batch,
            metrics=dict(trainer.callback_metrics),
            counters={"batch": trainer.fit_loop.epoch_loop.batch_idx, "epoch": trainer.current_epoch, "step": step},
        )
