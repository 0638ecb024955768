"""Iterable datasets of Hugging Face, alone or in a loader of torchdata: their state, which needs care.

Until an iterator has begun where such a dataset was restored, the dataset tells an earlier place; and it lets all later
iterators of the epoch begin there as well. So a state is passed to it as one that only its next iterator takes.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from .errors import OptionError

_logger = logging.getLogger("holdfast")

_STREAM = "examples_iterable"  # the place in the data, beside the epoch, in a state of such a dataset
_DATASET, _FINISHED = "dataset_state", "_iterator_finished"  # of a dataset, in the state of a loader of torchdata


def is_torchdata_loader(thing: object) -> bool:
    kind: Any = type(thing)  # mypy does not take a class for hashable.
    return _derives(kind, "StatefulDataLoader", "torchdata.")


def is_accelerate_loader(thing: object) -> bool:
    """Return whether an object is a loader that ``Accelerator.prepare`` has made, which passes for the one in it."""
    kind: Any = type(thing)
    return _derives(kind, "DataLoaderAdapter", "accelerate.")


@functools.lru_cache(maxsize=256)  # Every step asks.
def _derives(kind: Any, name: str, package: str) -> bool:
    """Return whether a class is one of a package, by its name, or derived from it."""
    return any(one.__name__ == name and one.__module__.startswith(package) for one in kind.__mro__)


class _Start(dict[str, Any]):
    """A state of a dataset that its next iterator takes; the dataset lets all iterators of an epoch begin there."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key == _STREAM:  # An iterator asks for it last.
            self.clear()
        return value


def position_of(thing: Any, getter: str = "state_dict") -> Any:
    """Return what the method of an object returns as its state.

    A dataset of Hugging Face tells an earlier place until an iterator has begun where it was restored.
    """
    state, dataset = getattr(thing, getter)(), _streamed(thing)
    start = getattr(dataset, "_starting_state_dict", None)
    if dataset is None or not isinstance(start, _Start) or start.get("epoch") != dataset.epoch:
        return state
    return dict(start.items()) if dataset is thing else {**state, _DATASET: dict(start.items())}


def set_position(thing: Any, state: Any, setter: str = "load_state_dict") -> None:
    """Pass a state to the method of an object; a dataset of Hugging Face begins there once, in the saved epoch."""
    if (dataset := _streamed(thing)) is not None:
        for epoch in _epochs_of(state):
            dataset.set_epoch(epoch)
        if dataset is thing:
            state = _Start(state)
        elif not thing.num_workers:
            is_left = state.get(_DATASET) and not state[_FINISHED]
            state = {**state, _DATASET: _Start(state[_DATASET]) if is_left else None}
    getattr(thing, setter)(state)


def has_none_left(thing: Any) -> bool:
    """Return whether an object is a dataset of Hugging Face that was restored at the end of an epoch."""
    if (dataset := _streamed(thing)) is None or dataset is not thing:
        return False
    state, nothing = position_of(dataset), object()
    is_at_end = next(iter(dataset), nothing) is nothing
    set_position(dataset, state)
    return is_at_end


def check_stream(name: str, thing: Any) -> None:
    """Warn of examples that a dataset of Hugging Face does not save, and refuse versions that lose their place.

    Raises:
        OptionError: The version of datasets has a state that does not follow its iterator.
    """
    if (dataset := _streamed(thing)) is None:
        return
    version = getattr(sys.modules.get("datasets"), "__version__", "unknown")
    if version == "5.0.0" or "epoch" not in dataset.state_dict():
        raise OptionError(
            f"{name} reads a dataset of datasets {version}, whose state does not follow its place after a resume: "
            "install datasets 3.4 or newer, but not 5.0.0, or pass hf.skip_to(loader)"
        )
    if getattr(thing, "persistent_workers", False):
        _logger.warning(
            "%s reads a dataset of Hugging Face in workers that live across epochs: after a resume, each later epoch "
            "begins there again, unless the program calls set_epoch of the dataset at every epoch; "
            "persistent_workers=False needs no set_epoch",
            name,
        )
    if _is_buffered(dataset):
        _logger.warning(
            "%s shuffles a dataset of Hugging Face in a buffer, whose examples are not in its state: a resume leaves "
            "them out of their epoch. hf.skip_to(loader) continues exactly, if shuffle has a seed: it draws the "
            "earlier batches again. So does a Dataset that is shuffled before to_iterable_dataset()",
            name,
        )


def _streamed(thing: Any) -> Any | None:
    """Return an iterable dataset of Hugging Face, or the one that a loader of torchdata reads."""
    found = thing.dataset if is_torchdata_loader(thing) else thing
    is_stream = _derives(found.__class__, "IterableDataset", "datasets.") and hasattr(found, "state_dict")
    return found if is_stream else None


def _epochs_of(state: Any) -> Iterator[int]:
    """Generate the epochs in a state of a dataset, or of each worker of a loader; all are the same."""
    if isinstance(state, dict):
        if state.keys() == {_STREAM, "epoch"}:
            yield state["epoch"]
        else:
            for part in state.values():
                yield from _epochs_of(part)


def _is_buffered(dataset: Any) -> bool:
    open_ = [getattr(dataset, "_ex_iterable", None)]
    for one in open_:
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        open_ += [getattr(one, "ex_iterable", None), *getattr(one, "ex_iterables", ())] if one is not None else []
    return False
