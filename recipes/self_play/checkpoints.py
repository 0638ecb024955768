"""What the checkpoints of a trainer hold, and the weights that it takes from others."""

from __future__ import annotations

from typing import ClassVar

from ...engine.format import RECORD
from ...engine.sources import Misfits, find_checkpoint, load_weights
from ...engine.steps import read_record
from ...engine.storage import Location, Place, as_location
from ...integrations.loop import CheckpointCallback, ComponentAdapter, StateAdapter
from .trainer import NAMES, Trainer

ITEM = "trainer"
"""The name of the item in the checkpoints, and of its folder in the directory of a step."""
POLICIES = "learner/policies"
"""The path of the policies in the trainer."""


class TrainerAdapter(ComponentAdapter):
    """Knows trainers, which count their steps and hold several policies."""

    def why_lost(self, step: int, state: Trainer) -> str | None:
        if state.step == step:
            return None
        return f"the trainer has gone on to step {state.step}; call on_step after every update"

    def with_weights(self, state: Trainer, place: Place) -> tuple[Trainer, str]:
        return state, take_weights(state, place, self.misfits)


class TrainerCallback(CheckpointCallback):
    """The callback of a loop whose state is a trainer."""

    _item: ClassVar[str] = ITEM

    def _make_adapter(self, state: Trainer, misfits: Misfits | None) -> StateAdapter:
        return TrainerAdapter(misfits)


def take_weights(trainer: Trainer, place: Place, misfits: Misfits | None = None) -> str:
    """Give the policies of a trainer the weights of another checkpoint; everything else stays as it is.

    Args:
        trainer: The trainer.
        place: Another run's checkpoints, one of them, or the directory of its trainer or of its policies; or any
            checkpoint with the weights of one policy, which both policies then get.
        misfits: Takes what did not match; None where everything has to.

    Returns:
        What was taken.
    """
    found = find_checkpoint(as_location(place))
    saved = _policies_in(found)
    if saved is not None:
        trainer.restore_from_path(saved, component=POLICIES, strict=misfits is None)
        return str(saved)
    policies = trainer.learner.policies.values()
    loaded = [load_weights(place, dict(policy.state_dict()), misfits=misfits) for policy in policies]
    for policy, weights in zip(policies, loaded, strict=True):
        policy.load_state_dict(weights.tree)
    return f"{loaded[0]} for every policy"


def _policies_in(found: Location) -> Location | None:
    if not (found / RECORD).exists():
        return None
    items = read_record(found).items
    if ITEM in items:
        found = found / items[ITEM].folder
    if (found / POLICIES).is_directory():
        return found / POLICIES
    return found if set(NAMES) <= items.keys() else None
