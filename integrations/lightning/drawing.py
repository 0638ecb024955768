"""Random numbers that a dataset draws in the process that trains, in between those of the model.

A resumed run draws the batches of its epoch again, without the model's steps between them. A dataset that is iterated
in the same process, and draws from the generators of the process, would draw other numbers then, and may fill its
buffers with other samples. So the state of a generator is noted before each batch where the dataset draws from it, and
something else has drawn from it since the batch before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .epoch import capture_generators

logger = logging.getLogger("holdfast")

MOST = 1000  # states of an epoch that are kept, of about 5 KB each

_CPU = torch.device("cpu")
_GENERATORS = ("torch", "numpy", "python")


def draws_in_process(loaders: Sequence[Any]) -> bool:
    """Return whether a dataset that is iterated runs in this process, and not in workers."""
    return any(
        isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
        and not getattr(loader, "num_workers", 0)
        for loader in loaders
    )


class Drawing:
    """Follows the draws of one epoch, batch by batch."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] = {}  # of each generator, after the last batch that drew from it

    def begin(self, state: dict[str, Any]) -> None:
        """Note the state of the generators at the first batch of an epoch."""
        self._before, self._after = None, state

    def before(self) -> None:
        """Note the generators before a batch."""
        self._before = capture_generators(_CPU, ())

    def after(self) -> dict[str, Any]:
        """Return the states from which a batch was drawn that follow from no batch before it."""
        before, self._before = self._before, None
        if before is None:
            return {}
        after, found = capture_generators(_CPU, ()), {}
        for name in _GENERATORS:
            if same(before[name], after[name]):
                continue
            if not same(before[name], self._after.get(name)):
                found[name] = before[name]
            self._after = {**self._after, name: after[name]}
        return found


def same(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def warn_of_draws() -> None:
    """Say that an epoch has more batches with random numbers of their own than are noted."""
    logger.warning(
        "the dataset draws random numbers in the process that trains (num_workers=0), between those of the model, in "
        "more than %d batches of an epoch: a run that resumes within the epoch draws others, and is not exact. Let "
        "the dataset draw from a generator of its own, give the data loader a worker (num_workers=1), or use a loader "
        "with state_dict and load_state_dict",
        MOST,
    )
