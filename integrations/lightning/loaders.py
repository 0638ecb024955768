"""Training data loaders: whether they carry a state, and how to come back to the same batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...engine.errors import StateError


def states(loaders: Sequence[object]) -> list[Any]:
    """Returns the states of those loaders that carry one, in order."""
    return [loader.state_dict() for loader in loaders if _is_stateful(loader)]  # type: ignore[attr-defined]


def load_states(loaders: Sequence[object], saved: Sequence[Any]) -> None:
    """Gives the loaders that carry a state the states that :func:`states` returned.

    Raises:
        StateError: There are more or fewer such loaders than states.
    """
    stateful = [loader for loader in loaders if _is_stateful(loader)]
    if len(stateful) != len(saved):
        raise StateError(
            f"the checkpoint holds the state of {len(saved)} training data loaders, but {len(stateful)} of this run's "
            "loaders have state_dict and load_state_dict: use the loaders that the checkpoint was saved with"
        )
    for loader, state in zip(stateful, saved, strict=True):
        loader.load_state_dict(state)  # type: ignore[attr-defined]


def end_epoch(loaders: Sequence[Any], saved: Sequence[Any]) -> None:
    """Takes the loaders that carry a state to the end of an epoch, so that the next iterator begins a new one.

    Args:
        loaders: The loaders.
        saved: Their states at the end of an epoch.
    """
    load_states(loaders, saved)
    for loader in filter(_is_stateful, loaders):
        # Left to the next epoch, this iterator would be the one that takes the state up, and have no batches.
        iterator = iter(loader)
        if iterator is not loader:
            next(iterator, None)  # one that is written as a generator does nothing before that


def all_stateful(loaders: Sequence[object]) -> bool:
    """Returns whether every loader knows its own place, so that no batch has to be drawn again to find it."""
    return all(map(_is_stateful, loaders))


def set_epoch(loaders: Sequence[object], epoch: int) -> None:
    """Tells the samplers which epoch it is, as Lightning does, but before their iterators are made."""
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        for part in [sampler] if inner is sampler else [sampler, inner]:
            if callable(method := getattr(part, "set_epoch", None)):
                method(epoch)


def prefetched(fetcher: Any) -> list[Any]:
    """Returns the batches that were drawn ahead: one, for loaders of unknown length, to know which is the last."""
    return list(getattr(fetcher, "batches", ()))


def begin_with(fetcher: Any, batches: Sequence[Any], done: bool) -> None:
    """Makes a fetcher's iterator without drawing ahead, as these batches have been drawn already.

    Args:
        fetcher: The data fetcher of the training loop.
        batches: What had been drawn ahead.
        done: Whether the last batch had been handed out.
    """
    fetcher.iterator = iter(fetcher.combined_loader)
    fetcher.reset()
    fetcher.batches = list(batches)
    fetcher.done = done


def skip(fetcher: Any, count: int, before: Callable[[int], None]) -> None:
    """Draws batches that have been trained on already.

    Args:
        fetcher: The data fetcher of the training loop, with a new iterator.
        count: How many batches were consumed in this epoch.
        before: Called before each batch with the number of those drawn so far.

    Raises:
        StateError: There are fewer batches than that.
    """
    draws_ahead = fetcher.length is None and hasattr(fetcher, "batches")
    source = fetcher if draws_ahead else fetcher.iterator
    for drawn in range(count):
        before(drawn + draws_ahead)
        try:
            next(source)
        except StopIteration:
            raise StateError(
                f"the checkpoint was saved after {count} batches of its epoch, but the training data now ends after "
                f"{drawn}: use the data and the batch size that the checkpoint was saved with"
            ) from None


def _is_stateful(loader: object) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
