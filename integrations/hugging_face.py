"""Iterable datasets of Hugging Face, alone or in a loader of torchdata: what a resume has to know of their states.

Such a dataset lets all iterators of an epoch begin where its last state says. So a state is passed to it as one that
only its next iterator takes. Nothing is imported: a dataset is known by the name of its class.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

from ..engine.errors import OptionError
from ..engine.loaders import derives, is_torchdata_loader

logger = logging.getLogger("holdfast")

_STREAM = "examples_iterable"  # the place in the data, beside the epoch, in a state of such a dataset
_DATASET, _FINISHED = "dataset_state", "_iterator_finished"  # of a dataset, in the state of a loader of torchdata


class _Start(dict[str, Any]):
    """A state of a dataset that its next iterator takes, and no later one."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key == _STREAM:  # An iterator asks for it last.
            self.clear()
        return value


def as_start(thing: Any, state: Any) -> Any:
    """Return the state to load: a dataset starts from it once, in the saved epoch; other objects get it unchanged."""
    if (dataset := _streamed(thing)) is None:
        return state
    for epoch in _epochs_of(state):
        dataset.set_epoch(epoch)  # It ignores a place in another epoch.
    if dataset is thing:
        return _Start(state)
    if thing.num_workers:
        return state
    is_left = state.get(_DATASET) and not state[_FINISHED]
    return {**state, _DATASET: _Start(state[_DATASET]) if is_left else None}


def check_stream(name: str, thing: Any) -> None:
    """Warn of examples that a Hugging Face dataset does not save; raise OptionError if its version loses its place."""
    if (dataset := _streamed(thing)) is None:
        return
    version = getattr(sys.modules.get("datasets"), "__version__", "unknown")
    if version == "5.0.0" or "epoch" not in dataset.state_dict():
        raise OptionError(
            f"{name} reads a dataset of datasets {version}, whose state does not follow its place after a resume: "
            "install datasets 3.4 or newer, but not 5.0.0, or pass hf.skip_to(loader)"
        )
    if getattr(thing, "persistent_workers", False):
        logger.warning(
            "%s reads a dataset of Hugging Face in workers that live across epochs: after a resume, each later epoch "
            "begins there again, unless the program calls set_epoch of the dataset at every epoch; "
            "persistent_workers=False needs no set_epoch",
            name,
        )
    if _is_buffered(dataset):
        logger.warning(
            "%s shuffles a dataset of Hugging Face in a buffer, whose examples are not in its state: a resume leaves "
            "them out of their epoch. hf.skip_to(loader) continues exactly, if shuffle has a seed: it draws the "
            "earlier batches again. So does a Dataset that is shuffled before to_iterable_dataset()",
            name,
        )


def _streamed(thing: Any) -> Any | None:
    """Return an iterable dataset of Hugging Face, or the one that a loader of torchdata reads."""
    found = thing.dataset if is_torchdata_loader(thing) else thing
    is_stream = derives(found, "IterableDataset", "datasets.") and hasattr(found, "state_dict")
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
