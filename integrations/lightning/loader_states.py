"""The state of a trainer's data loaders: their positions, batches drawn ahead, and random generators."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from ...engine.errors import OptionError, StateError
from ...engine.generators import as_tree, capture, restore
from ...engine.loaders import generators_of, is_torchdata_loader, nodes_of, samplers_of
from ...engine.stateful import is_replicated, restore_state, state_of, warn_of_lost_draws, warn_of_samplers
from ..hugging_face import as_start
from .private_api import draws_ahead, have_ended, set_ended
from .trees import is_plain_tree

logger = logging.getLogger("holdfast")

# ---- data loaders

_FINISHED = "_iterator_finished"  # key in the state of a torchdata loader: the next iterator begins an epoch
_STREAM = {"examples_iterable", "epoch"}  # the keys in the state of an iterable dataset of Hugging Face


def loader_states(loaders: Sequence[object]) -> list[Any]:
    """Return copies of the states of the stateful loaders, in order."""
    return [_copied(get()) for _, get, _ in _stateful(loaders)]


def cut_short(loaders: Sequence[Any], limit: float) -> list[str]:
    """Return the classes of stateful loaders that have more batches than an epoch takes."""
    return [
        type(loader).__qualname__
        for loader, *_ in _stateful(loaders)
        if not is_torchdata_loader(loader) and hasattr(type(loader), "__len__") and len(loader) > limit
    ]


def replicated_states(loaders: Sequence[object], names: Collection[str] = ()) -> list[int]:
    """Return which stateful loaders are replicated: they declare it, or ``names`` lists them (``loaders/0``)."""
    stateful = _stateful(loaders)
    named = {name: range(len(stateful)) for name in names if name == "loaders"}
    named |= {name: range(len(stateful))[int(name[8:]) :][:1] for name in names if name.startswith("loaders/")}
    if unknown := [name for name, indices in named.items() if not indices]:
        raise OptionError(
            f"replicated names {unknown[0]!r}, and the trainer has {len(stateful)} training data loaders with "
            "state_dict and load_state_dict; those without a state need no declaration, as their batches are counted"
        )
    declared = {index for indices in named.values() for index in indices}
    return [index for index, (loader, *_) in enumerate(stateful) if index in declared or is_replicated(loader)]


def load_loader_states(loaders: Sequence[object], saved: Sequence[Any], *, ended: bool = False) -> None:
    """Restore states: the next iterators continue after the last batch, or begin an epoch if one has ``ended``."""
    # The state of a loader shows that the epoch has ended, with two exceptions: torchdata, if no batch was requested
    # after the last one, and streams of Hugging Face.
    stateful = _stateful(loaders)
    if len(stateful) != len(saved):
        raise other_loaders(loaders, saved)
    for (loader, _, load), state in zip(stateful, saved, strict=True):
        if is_torchdata_loader(loader):
            warn_of_lost_draws(loader, state)
        elif nodes_of(loader):
            warn_of_samplers(loader)
        if ended and is_torchdata_loader(loader):
            load(as_start(loader, _copied({**state, _FINISHED: True})))
            loader.state_dict()  # This applies the state now, before the generators are restored.
        elif ended and isinstance(state, dict) and state.keys() == _STREAM:
            loader.set_epoch(state["epoch"])  # A stream restored at its end would yield no batch.
        else:
            load(as_start(loader, _copied(state)))


def other_loaders(loaders: Sequence[object], saved: Sequence[Any]) -> StateError:
    """Return the error for loaders that differ from those of the save."""
    return StateError(
        f"the checkpoint holds the state of {len(saved)} training data loaders, but {len(_stateful(loaders))} of this "
        "run's loaders have state_dict and load_state_dict: use the loaders that the checkpoint was saved with"
    )


def all_stateful(loaders: Sequence[object]) -> bool:
    """Return whether every loader saves its own position, so that no batch is drawn again."""
    return len(_stateful(loaders)) == len(loaders)


def set_sampler_epoch(loaders: Sequence[object], epoch: int) -> None:
    """Set the epoch of the samplers, as Lightning does, but before their iterators are made."""
    for sampler in {id(sampler): sampler for loader in loaders for sampler in samplers_of(loader)}.values():
        if callable(method := getattr(sampler, "set_epoch", None)):
            method(epoch)


def skip_batches(fetcher: Any, count: int, before: Callable[[int], None]) -> None:
    """Draw the batches that this epoch has trained on already; call ``before`` with the number drawn so far."""
    ahead = draws_ahead(fetcher)
    source = fetcher if ahead else fetcher.iterator
    for drawn in range(count):
        before(drawn + ahead)
        try:
            next(source)
        except StopIteration:
            raise StateError(
                f"the checkpoint was saved after {count} batches of its epoch, but the training data now ends after "
                f"{drawn}: use the data and the batch size that the checkpoint was saved with"
            ) from None


def keeps_iterator(loader: Any) -> bool:
    """Return whether a loader keeps its iterator and workers across epochs; only the first one draws their seed."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def start_workers(loaders: Sequence[Any], indices: Collection[int]) -> None:
    """Start the workers of some loaders that keep them, as earlier epochs have done."""
    for index, loader in enumerate(loaders):
        if index in indices and keeps_iterator(loader) and loader._iterator is None:
            iter(loader)


def marks(iterators: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the positions that :func:`has_restarted` compares at the next batch."""
    return [(iterator, getattr(iterator, "_num_yielded", 0)) for iterator in iterators]


def has_restarted(before: Sequence[tuple[Any, int]], after: Sequence[tuple[Any, int]]) -> bool:
    """Return whether an iterator was replaced, or was reset and counts from 0 again."""
    return any(
        new is not old or (count and count <= counted)
        for (old, counted), (new, count) in zip(before, after, strict=True)
    )


def _stateful(loaders: Sequence[Any]) -> list[tuple[Any, Callable[[], Any], Callable[[Any], object]]]:
    """Return the loaders that have a state, each with the methods that get and set it."""
    stateful = []
    for loader in loaders:
        # get_state and set_state count only if the loader is replicated; otherwise, as with Grain, batches are counted.
        protocols = [("state_dict", "load_state_dict"), *[("get_state", "set_state")] * is_replicated(loader)]
        pairs = ([getattr(loader, name, None) for name in names] for names in protocols)
        if (methods := next((pair for pair in pairs if all(map(callable, pair))), None)) is not None:
            stateful.append((loader, *methods))
    return stateful


def _copied(state: Any) -> Any:
    """Return a copy of a state, because a loader may change what it returned or was given."""
    try:
        return copy.deepcopy(state)
    except Exception:  # An object may fail to copy in any way. The save decides whether it can hold it.
        return state


class DrawnAhead:
    """The batch that Lightning draws ahead of training to detect the end of data without a length."""

    # Replicated loaders are saved as they were before this batch, because another number of processes would divide it
    # differently.

    def __init__(self) -> None:
        self._loaders: Sequence[object] = ()
        self._is_for_all = False
        self._before: tuple[list[Any], list[bool]] = [], []  # the states of loaders, and which of them had ended
        self._has_warned = False

    def begin(self, loaders: Sequence[object], replicated: Collection[str]) -> None:
        """Begin an epoch of some loaders; ``replicated`` names state that is the same in all processes."""
        self._loaders = loaders
        declared = replicated_states(loaders, replicated)
        self._is_for_all = all_stateful(loaders) and len(declared) == len(loaders)

    def note(self, fetcher: Any) -> None:
        """Note the states of the loaders before training on a batch draws the next one."""
        if self._is_for_all and fetcher.length is None:
            self._before = loader_states(self._loaders), have_ended(fetcher.combined_loader)

    def capture(self, fetcher: Any) -> dict[str, Any]:
        """Return the entries of a position for the batch drawn ahead and for loaders that have ended."""
        batches = list(getattr(fetcher, "batches", ()))
        if batches and self._is_for_all:
            return {"loaders": self._before[0], "ended": self._before[1]}
        ended = have_ended(fetcher.combined_loader)
        position: dict[str, Any] = {"ended": ended} if any(ended) else {}
        if batches and is_plain_tree(batches):
            position["ahead"] = {"batches": batches, "done": fetcher.done}
        elif batches and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the training data has no length, so Lightning draws one batch ahead. This batch cannot be saved, as "
                "it is not a tree of tensors: a resumed run leaves it out"
            )
        return position

    def begin_within(self, fetcher: Any, position: Mapping[str, Any]) -> None:
        """Make the iterator of a fetcher within an epoch, as a saved position describes it."""
        ahead, ended = position.get("ahead"), position.get("ended", [])
        if ahead is None:
            iter(fetcher)
        else:
            fetcher.iterator = iter(fetcher.combined_loader)
            fetcher.reset()
            fetcher.batches, fetcher.done = list(ahead["batches"]), ahead["done"]
        set_ended(fetcher.combined_loader, ended)
        self._before = position["loaders"], ended


# ---- random generators


def capture_generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return the states of the global generators, and of the generators of loaders and samplers."""
    return {**as_tree(capture()), "loaders": loader_generators(loaders)}


def restore_generators(state: dict[str, Any], device: torch.device, loaders: Sequence[object]) -> None:
    """Restore the states from :func:`capture_generators` for the generators that exist."""
    restore(state)
    restore_loader_generators(state.get("loaders", {}), loaders)
    saved = state.get("device")  # The first version saved the generator of one device.
    if saved is not None and saved["type"] == device.type:
        getattr(torch, device.type).set_rng_state(saved["state"])


def loader_generators(loaders: Sequence[object]) -> dict[str, Any]:
    return {name: state_of(generator) for name, generator in _generators(loaders).items()}


def restore_loader_generators(states: Mapping[str, Any], loaders: Sequence[object]) -> None:
    for name, generator in _generators(loaders).items():
        if name in states:
            restore_state(generator, states[name])


def _generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return the generator of each loader and sampler, once, by a name such as ``0.sampler.generator``."""
    # A loader with a state restores its own generator, except in torchdata, which draws the seeds of workers from it.
    by_id: dict[int, tuple[str, Any]] = {}
    for index, loader in enumerate(loaders):
        if not _stateful([loader]) or is_torchdata_loader(loader):
            for name, generator in generators_of(loader).items():
                by_id.setdefault(id(generator), (f"{index}.{name}", generator))
    return dict(by_id.values())


# ---- batch sizes, if another number of processes continues


def batch_sizes(loaders: Sequence[Any]) -> list[int | None]:
    """Return how many samples a batch of each loader has in this process; None if unknown."""
    sizes = (
        getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        for loader in loaders
    )
    return [size if isinstance(size, int) else None for size in sizes]


def batch_size_ratio(saved: Sequence[int | None] | None, loaders: Sequence[Any]) -> Fraction:
    """Return the ratio of saved to present batch size, 1 if unknown; StateError if it differs between loaders."""
    sizes = batch_sizes(loaders)
    if saved is None or len(saved) != len(sizes):
        return Fraction(1)
    ratios = {Fraction(before, now) for before, now in zip(saved, sizes, strict=True) if before and now}
    if len(ratios) > 1:
        raise StateError(
            f"the checkpoint was saved by another number of processes, with batches of {list(saved)} samples for the "
            f"training data loaders, and they have {sizes} now: no number of batches is the same position in all of "
            "them. Change the sizes of all batches by the same factor"
        )
    return ratios.pop() if ratios else Fraction(1)
