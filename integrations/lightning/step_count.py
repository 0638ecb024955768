"""The number of the step of a run, even if no optimizer of Lightning steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..loop import announce


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
