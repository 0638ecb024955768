"""The steps of one ``fit``: how they are counted, and what each of them shows to the witness."""

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


class StepCount:
    """Counts the batches that train a module without an optimizer of Lightning, which alone moves ``global_step``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.batches = 0  # that count as steps
        self.holds_gradients = False  # whether manual optimization has gradients that no update has used yet

    @property
    def step(self) -> int:
        """The number of the step that the run has finished."""
        return int(self._trainer.global_step) + self.batches

    def count(self, train: Callable[[Any], None], fetcher: Any) -> None:
        """Train one batch, and count it if it is a step that ``global_step`` does not show."""
        trainer = self._trainer
        if trainer.lightning_module.automatic_optimization:
            train(fetcher)
            return
        step, before, optimized = trainer.global_step, *self._versions()
        self.holds_gradients = False
        train(fetcher)
        if trainer.global_step != step:
            return
        moved = any(parameter._version != version for parameter, version in before)
        # Checkpoints hold no gradients, so that those which no update has used yet are waited for.
        holds = any(parameter.grad is not None and parameter._version == version for parameter, version in before)
        self.holds_gradients = holds and (optimized or not moved)
        if not self.holds_gradients and (moved or not optimized):
            if not self.batches:
                text = "steps are batches here, since no optimizer of Lightning steps"
                announce(text, shown=trainer.is_global_zero)
            self.batches += 1

    def _versions(self) -> tuple[list[tuple[Any, int]], bool]:
        """Return the trained parameters with torch's counts of their changes, and whether optimizers hold them."""
        own = [parameter for parameter in self._trainer.lightning_module.parameters() if parameter.requires_grad]
        groups = (group for optimizer in self._trainer.optimizers for group in optimizer.param_groups)
        given = {id(parameter) for group in groups for parameter in group["params"]}
        # Lightning itself makes an optimizer of no parameter.
        optimized = [parameter for parameter in own if id(parameter) in given]
        trained = optimized or own
        return [(one, one._version) for one in trained if not one.is_inference()], bool(optimized)


@dataclass(frozen=True)
class Fit:
    """One ``fit``: its trainer, its directory, the options of the callback, and its count of steps."""

    trainer: Any
    store: RunStore
    options: CallbackArguments
    preemption: PreemptionSignal
    steps: StepCount

    @property
    def step(self) -> int:
        """The number of the step that the run has finished."""
        return self.steps.step

    def say(self, text: str, *args: object) -> None:
        """Announce a line about the run; only process 0 shows it."""
        announce(text, *args, shown=self.trainer.is_global_zero)


class FitWitness:
    """Shows the witness of a run what each step of one ``fit`` gave."""

    def __init__(self, fit: Fit, misfits: Misfits | None) -> None:
        options = fit.options
        self.run = Witness(
            fit.store.manager,
            enabled=options.witness,
            on_inexact=options.on_inexact,
            handing_over=IN_TRAINERS,
        )
        self._fit = fit
        self._misfits = misfits
        self._batch: Any = _NOTHING  # the batch that is under way, if it is compared

    def begin(self) -> None:
        """Begin without a checkpoint."""
        self.run.begin(self._seen())

    def resume(self) -> None:
        """Compare what was restored with the record of its save."""
        path, why = self._fit.trainer.ckpt_path, why_not_comparable(self._fit.options, self._misfits)
        if not isinstance(path, ResumePath) and not os.path.abspath(path).startswith(str(self._fit.store.directory)):
            why = f"the run resumed from {path}"
        self.run.resume(self._fit.step, self._seen(), why)

    def begin_batch(self, batch: Any) -> None:
        """Note the batch of a step that begins, if it is compared."""
        self._batch = batch if self.run.watches else _NOTHING

    def end_batch(self) -> None:
        """Show the step that has ended."""
        batch, self._batch = self._batch, _NOTHING
        if batch is not _NOTHING:
            self.run.note(lambda: self._seen(batch), self._fit.trainer.current_epoch)

    def save(self, step: int, *, moved: bool) -> None:
        """Show a step that is about to be saved."""
        self.run.save(step, self._seen, moved=moved)

    def _seen(self, batch: Any = None) -> Seen:
        trainer, step = self._fit.trainer, self._fit.step
        loaders = loaders_of(trainer.fit_loop)
        generators = capture_generators(loaders)
        own = {f"loader {name}": state for name, state in generators.pop("loaders").items()}
        return Seen(
            step=step,
            root={"module": trainer.lightning_module, "optimizers": [*trainer.optimizers]},
            objects={"loaders": loaders},
            generators={**generators, **own},
            batch=batch,
            metrics=dict(trainer.callback_metrics),
            counters={"batch": trainer.fit_loop.epoch_loop.batch_idx, "epoch": trainer.current_epoch, "step": step},
        )
