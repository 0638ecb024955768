"""Capture and restore the state of a trainer's data loaders: positions, prefetched batches, and random generators."""

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
from ...engine.stateful import is_replicated, load_unwrapped, loaded_state, restore_state, state_of, warn_of_samplers
from ..hugging_face import as_start
from .private_api import draws_ahead, have_ended, iterator_of, set_ended
from .trees import is_plain_tree

logger = logging.getLogger("holdfast")

# ---- data loaders

_FINISHED = "_iterator_finished"  # key in a torchdata loader's state; its value is True if an epoch has ended
_STREAM = {"examples_iterable", "epoch"}  # state keys of a Hugging Face iterable dataset


def loader_states(loaders: Sequence[object]) -> list[Any]:
    """Return a copy of the state of each stateful loader, in order."""
    return [_copied(get()) for _, get, _ in _stateful(loaders)]


def cut_short(loaders: Sequence[Any], limit: float) -> list[str]:
    """Return the class names of stateful loaders with more than ``limit`` batches, the maximum for an epoch."""
    return [
        type(loader).__qualname__
        for loader, *_ in _stateful(loaders)
        if not is_torchdata_loader(loader) and hasattr(type(loader), "__len__") and len(loader) > limit
    ]


def replicated_states(loaders: Sequence[object], names: Collection[str] = ()) -> list[int]:
    """Return the indices of stateful loaders that are marked as replicated or listed in ``names``."""
    stateful = _stateful(loaders)
    named = {name: range(len(stateful)) for name in names if name == "loaders"}
    named |= {name: range(len(stateful))[int(name[8:]) :][:1] for name in names if name.startswith("loaders/")}
    if unknown := [name for name, indices in named.items() if not indices]:
        raise OptionError(
            f"replicated names {unknown[0]!r}, but the trainer has {len(stateful)} training data loaders with "
            "state_dict and load_state_dict; loaders without a state need not be named; their batches are counted"
        )
    declared = {index for indices in named.values() for index in indices}
    return [index for index, (loader, *_) in enumerate(stateful) if index in declared or is_replicated(loader)]


def load_loader_states(loaders: Sequence[object], saved: Sequence[Any], *, ended: bool = False) -> None:
    """Restore loader states; iteration continues after the last batch or, if ``ended``, begins a new epoch."""
    # Most loaders record the end of an epoch in their state. Hugging Face streams do not, and torchdata loaders do so
    # only if another batch is requested after the last one.
    stateful = _stateful(loaders)
    if len(stateful) != len(saved):
        raise other_loaders(loaders, saved)
    for (loader, _, load), state in zip(stateful, saved, strict=True):
        if is_torchdata_loader(loader):
            if own := loaded_state(loader, _copied(state)):
                load_unwrapped(loader, as_start(loader, {**own, _FINISHED: True} if ended else own))
            if ended:
                loader.state_dict()  # makes the loader apply the state now, before the generators are restored
            continue
        if nodes_of(loader):
            warn_of_samplers(loader)
        if ended and isinstance(state, dict) and state.keys() == _STREAM:
            loader.set_epoch(state["epoch"])  # load() would restore the end of the stream, with no batches left
        else:
            load(as_start(loader, _copied(state)))


def other_loaders(loaders: Sequence[object], saved: Sequence[Any]) -> StateError:
    """Return the StateError to raise if a checkpoint was saved with a different number of stateful loaders."""
    return StateError(
        f"the checkpoint holds the state of {len(saved)} training data loaders, but {len(_stateful(loaders))} of this "
        "run's loaders have state_dict and load_state_dict: use the loaders that the checkpoint was saved with"
    )


def all_stateful(loaders: Sequence[object]) -> bool:
    """Return whether all loaders are stateful. If so, resuming does not need to draw batches again."""
    return len(_stateful(loaders)) == len(loaders)


def set_sampler_epoch(loaders: Sequence[object], epoch: int) -> None:
    """Set the epoch of all samplers now, because Lightning sets it only after creating the loaders' iterators."""
    for sampler in {id(sampler): sampler for loader in loaders for sampler in samplers_of(loader)}.values():
        if callable(method := getattr(sampler, "set_epoch", None)):
            method(epoch)


def skip_batches(fetcher: Any, count: int, before: Callable[[int], None]) -> None:
    """Draw and discard ``count`` batches; before each, call ``before`` with the number of batches drawn so far."""
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
    """Return whether a loader has persistent workers, and thus keeps its iterator and seeds the workers only once."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def start_workers(loaders: Sequence[Any], indices: Collection[int]) -> None:
    """Start the persistent workers of the loaders at ``indices``, as if an earlier epoch had started them."""
    for index, loader in enumerate(loaders):
        if index in indices and keeps_iterator(loader) and loader._iterator is None:
            iter(loader)


def marks(fetcher: Any) -> list[tuple[Any, int]]:
    """Return each loader's iterator and batch count, for comparison by :func:`has_restarted`."""
    iterators = iterator_of(fetcher.combined_loader).iterators
    return [(iterator, getattr(iterator, "_num_yielded", 0)) for iterator in iterators]


def has_restarted(before: Sequence[tuple[Any, int]], after: Sequence[tuple[Any, int]]) -> bool:
    """Return whether any iterator was replaced or reset between two results of :func:`marks`."""
    return any(
        new is not old or (count and count <= counted)
        for (old, counted), (new, count) in zip(before, after, strict=True)
    )


def _stateful(loaders: Sequence[Any]) -> list[tuple[Any, Callable[[], Any], Callable[[Any], object]]]:
    """Return the stateful loaders, each with its methods to get and set the state."""
    stateful = []
    for loader in loaders:
        # Use get_state and set_state only for replicated loaders. Other loaders with these methods count as stateless.
        protocols = [("state_dict", "load_state_dict"), *[("get_state", "set_state")] * is_replicated(loader)]
        pairs = ([getattr(loader, name, None) for name in names] for names in protocols)
        if (methods := next((pair for pair in pairs if all(map(callable, pair))), None)) is not None:
            stateful.append((loader, *methods))
    return stateful


def _copied(state: Any) -> Any:
    """Return a deep copy of a loader state, because the loader itself may modify the state later."""
    try:
        return copy.deepcopy(state)
    except Exception:  # Copying may raise any exception. Saving will report unsupported states.
        return state


class DrawnAhead:
    """Tracks the batch that Lightning prefetches to detect the end of a dataset without a length."""

    # If all loaders are replicated, save their states from before the prefetch instead of the batch itself, because a
    # different number of processes would divide the batch differently.

    def __init__(self) -> None:
        self._loaders: Sequence[object] = ()
        self._is_for_all = False
        self._before: tuple[list[Any], list[bool]] = [], []  # loader states and exhaustion flags before the prefetch
        self._has_warned = False

    def begin(self, loaders: Sequence[object], replicated: Collection[str]) -> None:
        """Start tracking an epoch; ``replicated`` names the loader states that are identical in all processes."""
        self._loaders = loaders
        self._is_for_all = all_stateful(loaders) and len(replicated_states(loaders, replicated)) == len(loaders)

    def note(self, fetcher: Any) -> None:
        """Record the loader states before a training step, which prefetches the next batch."""
        if self._is_for_all and fetcher.length is None:
            self._before = loader_states(self._loaders), have_ended(fetcher.combined_loader)

    def capture(self, fetcher: Any) -> dict[str, Any]:
        """Return the entries of the data position that describe the prefetched batch and exhausted loaders."""
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
                "the training data has no length, so Lightning draws one batch ahead. This batch cannot be saved "
                "because it is not a tree of tensors: a resumed run skips it"
            )
        return position

    def begin_within(self, fetcher: Any, position: Mapping[str, Any]) -> None:
        """Create a fetcher's iterator at a saved position in the middle of an epoch."""
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
    """Return the states of the global random generators and of the generators that loaders and samplers own."""
    return {**as_tree(capture()), "loaders": loader_generators(loaders)}


def restore_generators(state: dict[str, Any], device: torch.device, loaders: Sequence[object]) -> None:
    """Restore the states returned by :func:`capture_generators` for all generators that still exist."""
    restore(state)
    restore_loader_generators(state.get("loaders", {}), loaders)
    saved = state.get("device")  # legacy: the first version saved only one device's generator
    if saved is not None and saved["type"] == device.type:
        getattr(torch, device.type).set_rng_state(saved["state"])


def loader_generators(loaders: Sequence[object]) -> dict[str, Any]:
    return {name: state_of(generator) for name, generator in _generators(loaders).items()}


def restore_loader_generators(states: Mapping[str, Any], loaders: Sequence[object]) -> None:
    for name, generator in _generators(loaders).items():
        if name in states:
            restore_state(generator, states[name])


def _generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return the distinct generators of loaders and samplers, keyed by names such as ``0.sampler.generator``."""
    # Stateful loaders restore their own generators, except torchdata's loader, whose generator seeds the workers.
    by_id: dict[int, tuple[str, Any]] = {}
    for index, loader in enumerate(loaders):
        if not _stateful([loader]) or is_torchdata_loader(loader):
            for name, generator in generators_of(loader).items():
                by_id.setdefault(id(generator), (f"{index}.{name}", generator))
    return dict(by_id.values())


# ---- batch sizes, for resuming with a different number of processes


def batch_sizes(loaders: Sequence[Any]) -> list[int | None]:
    """Return the per-process batch size of each loader, in samples; None if unknown."""
    sizes = (
        getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        for loader in loaders
    )
    return [size if isinstance(size, int) else None for size in sizes]


def batch_size_ratio(saved: Sequence[int | None] | None, loaders: Sequence[Any]) -> Fraction:
    """Return the ratio of the saved to the current batch size (1 if unknown); raise StateError if loaders disagree."""
    sizes = batch_sizes(loaders)
    if saved is None or len(saved) != len(sizes):
        return Fraction(1)
    ratios = {Fraction(before, now) for before, now in zip(saved, sizes, strict=True) if before and now}
    if len(ratios) > 1:
        raise StateError(
            f"the checkpoint was saved by a different number of processes, with batch sizes of {list(saved)} for the "
            f"training data loaders, and these are now {sizes}: no number of batches is the same position in all of "
            "them. Change all batch sizes by the same factor"
        )
    return ratios.pop() if ratios else Fraction(1)
