"""The optimizer of the Flax recipes."""

from __future__ import annotations

import optax  # type: ignore[import-untyped]  # it comes without type information

from .schema import Schedule


def adamw(section: Schedule) -> optax.GradientTransformation:
    """Return AdamW with a learning rate that is warmed up linearly and then decayed along a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=section.learning_rate,
        warmup_steps=section.warmup_steps,
        decay_steps=section.decay_steps,
        end_value=section.learning_rate / 10,
    )
    return optax.adamw(schedule, weight_decay=section.weight_decay)
