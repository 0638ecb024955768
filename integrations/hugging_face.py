"""Restore the states of Hugging Face iterable datasets, used alone or in a torchdata loader.

Within an epoch, each new iterator of a dataset starts from the state that was loaded last. A resume must affect only
the first iterator, so a state is used once. Datasets are recognized by class name, so ``datasets`` is not imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

from ..engine.errors import OptionError
from ..engine.loaders import derives, is_torchdata_loader

logger = logging.getLogger("holdfast")

_STREAM = "examples_iterable"  # the key of a dataset state that stores the position in the data; another key is "epoch"
_DATASET, _FINISHED = "dataset_state", "_iterator_finished"  # keys in the state of a torchdata loader


class _Start(dict[str, Any]):
    """A dataset state that clears itself after the first iterator has read it, so that no later iterator uses it."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key == _STREAM:  # the last key that an iterator reads
            self.clear()
        return value


def as_start(source: Any, state: Any) -> Any:
    """Make a Hugging Face dataset's state apply only to the next iterator; return other states unchanged."""
    if (dataset := _streamed(source)) is None:
        return state
    for epoch in _epochs_of(state):
        dataset.set_epoch(epoch)  # otherwise, the dataset would ignore a position from another epoch
    if dataset is source:
        return _Start(state)
    if source.num_workers:
        return state
    is_left = state.get(_DATASET) and not state[_FINISHED]
    return {**state, _DATASET: _Start(state[_DATASET]) if is_left else None}


def check_stream(name: str, source: Any) -> None:
    """Warn if a Hugging Face dataset cannot resume exactly; raise OptionError for unsupported ``datasets`` versions."""
    if (dataset := _streamed(source)) is None:
        return
    version = getattr(sys.modules.get("datasets"), "__version__", "unknown")
    if version == "5.0.0" or "epoch" not in dataset.state_dict():
        raise OptionError(
            f"{name} reads a dataset of datasets {version}, whose state does not follow its place after a resume: "
            "install datasets 3.4 or newer, but not 5.0.0, or pass hf.skip_to(loader)"
        )
    if getattr(source, "persistent_workers", False):
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


def _streamed(source: Any) -> Any | None:
    """Return the source, or a torchdata loader's dataset, if it is a Hugging Face iterable dataset; otherwise None."""
    dataset = source.dataset if is_torchdata_loader(source) else source
    is_stream = derives(dataset, "IterableDataset", "datasets.") and hasattr(dataset, "state_dict")
    return dataset if is_stream else None


def _epochs_of(state: Any) -> Iterator[int]:
    """Yield the epoch in a dataset state or, for a loader, the epoch in each worker's state (all are equal)."""
    if isinstance(state, dict):
        if state.keys() == {_STREAM, "epoch"}:
            yield state["epoch"]
        else:
            for part in state.values():
                yield from _epochs_of(part)


def _is_buffered(dataset: Any) -> bool:
    queue = [getattr(dataset, "_ex_iterable", None)]
    for examples in queue:
        if type(examples).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
        queue += [part for part in inner if part is not None]
    return False
