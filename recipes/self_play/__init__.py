"""Self-play: two torch policies learn a board game by playing against each other.

The state of training is one tree of components, a :class:`~.trainer.Trainer`. Its checkpoints are therefore good for
more than resuming: a policy can be taken out of them, and another put into its place.
"""

from __future__ import annotations

import logging

import torch

from ..context import Outcome, RunContext
from ..schema import SelfPlay, SelfPlaySwap
from .checkpoints import POLICIES, TrainerCallback
from .connectors import ActionPipeline, ObservationPipeline
from .game import Rules
from .policy import Policy
from .runner import take_turn
from .trainer import Trainer, win_rate

__all__ = [
    "ActionPipeline",
    "ObservationPipeline",
    "Policy",
    "Rules",
    "Trainer",
    "new_trainer",
    "run",
    "take_turn",
    "win_rate",
]

logger = logging.getLogger("holdfast.recipes")


def new_trainer(config: SelfPlay) -> Trainer:
    """Return the trainer of a configuration, before the first update."""
    game = config.game
    return Trainer(
        Rules(game.rows, game.columns, game.connect),
        config.model.hidden,
        learning_rate=config.optimizer.learning_rate,
        entropy=config.optimizer.entropy,
        games=game.batch_size,
        explore=game.explore,
        seed=config.seed,
    )


def run(config: SelfPlay, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from the beginning."""
    total, interval = config.train.steps, config.train.eval_interval_steps
    torch.set_num_threads(1)  # networks as small as these gain nothing from more
    trainer = new_trainer(config)
    stopped = False
    with TrainerCallback(context.checkpoints, **context.callback_arguments) as checkpoints:
        _, start = checkpoints.restore_or_initialize(trainer)
        if start <= config.swap.at_step:
            swap(new_trainer(config), config.swap)  # a mistake in it shows now, not in an hour
        with context.progress(start, total) as progress:
            while trainer.step < total and not stopped:
                if trainer.step == config.swap.at_step and swap(trainer, config.swap):
                    logger.info(
                        "step %d: %s is the policy of %s now", trainer.step, config.swap.policy, config.swap.path
                    )
                metrics = trainer.train_step()
                if trainer.step % interval == 0 or trainer.step == total:
                    metrics |= trainer.evaluate()
                progress.update(trainer.step, metrics)
                stopped = checkpoints.on_step(trainer.step, trainer, metrics=metrics).should_stop
    return Outcome(start=start, step=trainer.step, preempted=stopped and trainer.step < total)


def swap(trainer: Trainer, section: SelfPlaySwap) -> bool:
    """Give a policy the weights of one from another checkpoint; everything else in the trainer stays as it is.

    Returns:
        Whether there is one to swap in.
    """
    if section.path is None:
        return False
    trainer.restore_from_path(section.path, component=f"{POLICIES}/{section.policy}", strict=True)
    return True
