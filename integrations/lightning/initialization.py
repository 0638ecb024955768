"""Weights for a fresh run, out of any checkpoint: the state dict of the module, and nothing else."""

from __future__ import annotations

from typing import Any

from ...engine.checkpointer import Place
from ...engine.errors import OptionError
from ...engine.interop.weights import Weights, load_weights


def take_weights(trainer: Any, module: Any, place: Place) -> Weights:
    """Loads the weights of a checkpoint into a module, strictly: parameters and buffers, all of them and no others.

    Args:
        trainer: The trainer that is about to fit the module.
        module: The LightningModule; it is changed once everything has been read.
        place: The checkpoint.

    Returns:
        What was taken.

    Raises:
        TreeMismatchError: The state dicts differ; lists every difference.
        OptionError: The trainer's strategy has taken the module apart already.
    """
    if trainer.strategy.restore_checkpoint_after_setup:
        raise OptionError(
            f"init_from={str(place)!r} does not work with {type(trainer.strategy).__name__}, which shards the module "
            "before weights can be loaded; load them in the module's configure_model"
        )
    state = dict(module.state_dict())
    weights = load_weights(place, state)
    module.load_state_dict(weights.tree, strict=True)
    return weights
