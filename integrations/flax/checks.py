"""What a loop can get wrong when it reports a step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...engine.errors import OptionError
from ...engine.handlers import DEFAULT_REGISTRY
from ...engine.tree import flatten
from ..stateful import is_plain, is_stateful
from .states import is_nnx, is_train_state

logger = logging.getLogger("holdfast")


def check_step(step: int, state: Any, metrics: object) -> None:
    """Checks what can be seen without waiting for the device.

    Raises:
        OptionError: The metrics are not a mapping, or the state is a TrainState that counts otherwise.
    """
    if metrics is not None:
        check_metrics(metrics)
    if type(getattr(state, "step", None)) is int and state.step != step and is_train_state(state):
        raise OptionError(
            f"on_step({step}) was given a TrainState with step={state.step}: step N means that N updates are in the "
            "state, so pass step + 1 after the update"
        )


def check_metrics(metrics: object) -> None:
    """Raises OptionError if metrics are not a mapping."""
    if not isinstance(metrics, Mapping):
        raise OptionError(
            f"metrics must be a mapping of names to numbers, such as {{'loss': 0.5}}, not {type(metrics).__name__}"
        )


def warn_of_counter(step: int, state: Any) -> None:
    """Warns of a TrainState that counts otherwise, wherever its counter lives; for moments that fetch it anyway."""
    if is_train_state(state) and (counted := int(state.step)) != step:
        logger.warning(
            "on_step(%d) was given a TrainState with step=%d: step N should mean that N updates are in the state; "
            "pass step + 1 after the update",
            step,
            counted,
        )


def check_extras(extras: Mapping[str, Any]) -> None:
    """Checks that none of the extras is an iterator or a loader without a state; the first save may be an hour away.

    Raises:
        OptionError: One is.
    """
    for name, extra in extras.items():
        if isinstance(extra, Iterable) and not _is_saveable(extra):
            raise OptionError(
                f"{name}= is a {type(extra).__qualname__}, which cannot tell where it is, nor go back there: pass an "
                "object with get_state and set_state, or state_dict and load_state_dict, such as an iterator of Grain "
                f"or a StatefulDataLoader of torchdata, or leave {name}= out and begin the data anew after a resume"
            )


def _is_saveable(extra: Any) -> bool:
    if hasattr(extra, "dtype") or is_nnx(extra) or is_stateful(extra) or is_plain(extra):
        return True
    is_container = not any(leaf is extra for leaf in flatten(extra).values)
    return is_container or DEFAULT_REGISTRY.find(extra) is not None


def missing_extras(names: Collection[str]) -> str:
    """Returns what to say when extras that were restored are not passed on."""
    listed = ", ".join(f"{name}=" for name in sorted(names))
    return f"restore_or_initialize was given {listed} but on_step was not: pass it at every step, so that it is saved"
