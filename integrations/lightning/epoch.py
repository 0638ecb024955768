"""The state of an epoch apart from its counters: data loaders, random generators, and running averages.

Lightning's own checkpoints lack the running averages: the mean over an epoch that was resumed is that of its remaining
batches.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from ...engine.errors import StateError
from ...engine.generators import as_tree, capture, restore, same_state
from ...engine.pytree import loaded
from ...engine.stateful import (
    generators_of,
    is_replicated,
    is_torchdata_loader,
    restore_state,
    state_of,
    warn_of_lost_draws,
)
from .wall import begin_counting, logged_averages, restore_logged, set_ended

# ---- data loaders

_NOTHING = object()


def loader_states(loaders: Sequence[object]) -> list[Any]:
    """Return the states of the loaders that carry one, in order."""
    return [getattr(loader, methods[0])() for loader in loaders if (methods := _state_methods(loader))]


def replicated_states(loaders: Sequence[object]) -> list[int]:
    """Return which of the states of :func:`loader_states` are declared to be those of all processes."""
    stateful = [loader for loader in loaders if _state_methods(loader)]
    return [index for index, loader in enumerate(stateful) if is_replicated(loader)]


def load_loader_states(loaders: Sequence[object], saved: Sequence[Any]) -> None:
    """Restore the states that :func:`loader_states` returned in the loaders that carry a state."""
    stateful = [(loader, methods) for loader in loaders if (methods := _state_methods(loader))]
    if len(stateful) != len(saved):
        raise StateError(
            f"the checkpoint holds the state of {len(saved)} training data loaders, but {len(stateful)} of this run's "
            "loaders have state_dict and load_state_dict: use the loaders that the checkpoint was saved with"
        )
    for (loader, methods), state in zip(stateful, saved, strict=True):
        _load(loader, methods[1], state)
        if is_torchdata_loader(loader):
            warn_of_lost_draws(loader, state)


def _load(loader: Any, setter: str, state: Any) -> None:
    getattr(loader, setter)(copy.deepcopy(state))  # A loader may keep what it gets, and change it.


def end_loader_epoch(loaders: Sequence[Any], saved: Sequence[Any], *, is_last: bool = False) -> None:
    """Take the loaders that carry a state to the end of an epoch, so that the next iterator begins a new one.

    Raises:
        StateError: A loader has gone to another place than in a run that was not interrupted, and the epoch is not the
            last one of the run.
    """
    load_loader_states(loaders, saved)
    stateful = [(loader, methods) for loader in loaders if (methods := _state_methods(loader))]
    for (loader, (_, setter)), state in zip(stateful, saved, strict=True):
        # The first iterator applies the state, so it must not be that of the next epoch.
        iterator = iter(loader)
        if iterator is loader:
            continue
        is_at_end = next(iterator, _NOTHING) is _NOTHING  # A generator function runs nothing before its first value.
        if is_torchdata_loader(loader):
            continue
        if is_at_end:
            if not is_last:
                _refuse_moved(loader, state)
            continue
        # The epoch has ended before the data of the loader, or the state is that of the next epoch already.
        continues = _continues(loader, iterator, setter, state)
        _load(loader, setter, state)
        if not continues:
            next(iter(loader), None)


def _continues(loader: Any, iterator: Iterator[Any], setter: str, state: Any) -> bool:
    """Return whether a new iterator continues after the last batch of the one before it, or begins anew.

    ``iterator`` has yielded one batch since the loader got the state.
    """
    next(iterator, None)
    states = copy.deepcopy(loader_states([loader]))
    _load(loader, setter, state)
    for _ in range(2):
        next(iter(loader), None)
    return same_state(states, loader_states([loader]))


def _refuse_moved(loader: Any, state: Any) -> None:
    """Raise StateError if a loader changes its state when its iterator ends, which the saved run has not let happen."""
    (found,) = loader_states([loader])
    if not same_state(found, state):
        raise StateError(
            f"the training data loader {type(loader).__qualname__} changes its state when its iterator ends, from "
            f"{state!r:.80} to {found!r:.80}. Lightning takes as many batches from a loader as it has a length, as the "
            "shortest one beside it has, or as limit_train_batches says, and does not let its iterator end, so that an "
            "epoch after a resume would have another order than one without. Begin a new epoch in __iter__, or leave "
            "out __len__ of a loader on its own, so that Lightning draws to the end; or resume from a step within an "
            "epoch"
        )


def all_stateful(loaders: Sequence[object]) -> bool:
    """Return whether every loader saves its own position, so that no batch need be drawn again."""
    return all(map(_state_methods, loaders))


def set_sampler_epoch(loaders: Sequence[object], epoch: int) -> None:
    """Set the epoch of the samplers, as Lightning does, but before their iterators are made."""
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        for part in [sampler] if inner is sampler else [sampler, inner]:
            if callable(method := getattr(part, "set_epoch", None)):
                method(epoch)


def prefetched(fetcher: Any) -> list[Any]:
    """Return the batches that were drawn ahead: one for loaders of unknown length, to detect the last batch."""
    return list(getattr(fetcher, "batches", ()))


def begin_with(fetcher: Any, batches: Sequence[Any], done: bool, ended: list[bool]) -> None:
    """Make a fetcher's iterator with batches drawn ahead; ``done`` tells whether the loop has had the last one."""
    fetcher.iterator = iter(fetcher.combined_loader)
    if ended:
        set_ended(fetcher.combined_loader, ended)
    fetcher.reset()
    fetcher.batches = list(batches)
    fetcher.done = done


def skip_batches(fetcher: Any, count: int, before: Callable[[int], None]) -> None:
    """Draw the batches that this epoch has trained on already, calling ``before`` with the number drawn so far."""
    draws_ahead = fetcher.length is None and hasattr(fetcher, "batches")
    source = fetcher if draws_ahead else fetcher.iterator
    for drawn in range(count):
        if drawn + draws_ahead == 1:
            begin_counting(fetcher.combined_loader)
        before(drawn + draws_ahead)
        try:
            next(source)
        except StopIteration:
            raise StateError(
                f"the checkpoint was saved after {count} batches of its epoch, but the training data now ends after "
                f"{drawn}: use the data and the batch size that the checkpoint was saved with"
            ) from None
    if count == 1 and not draws_ahead:
        begin_counting(fetcher.combined_loader)


def keeps_iterator(loader: Any) -> bool:
    """Return whether a loader keeps its iterator and workers across epochs; only the first one draws their seed."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def drop_iterator(loader: Any) -> None:
    """Let the next ``iter()`` of a loader that keeps its iterator start new workers."""
    if keeps_iterator(loader) and loader._iterator is not None:
        loader._iterator._shutdown_workers()
        loader._iterator = None


def marks(iterators: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return what :func:`has_restarted` compares at the next batch."""
    return [(iterator, getattr(iterator, "_num_yielded", 0)) for iterator in iterators]


def has_restarted(before: Sequence[tuple[Any, int]], after: Sequence[tuple[Any, int]]) -> bool:
    """Return whether one of the iterators was replaced, or was reset and counts from 0 again."""
    return any(
        new is not old or (count and count <= counted)
        for (old, counted), (new, count) in zip(before, after, strict=True)
    )


def _state_methods(loader: object) -> tuple[str, str] | None:
    """Return the names of the methods that save and restore the state of a loader, or None."""
    kinds = [("state_dict", "load_state_dict")]
    if is_replicated(loader):  # Others with these methods, such as iterators of Grain, count batches as before.
        kinds.append(("get_state", "set_state"))
    return next((names for names in kinds if all(callable(getattr(loader, name, None)) for name in names)), None)


# ---- random generators


def capture_generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return the states of the global generators, and of those that the loaders and their parts hold."""
    return {**as_tree(capture()), "loaders": loader_generators(loaders)}


def restore_generators(state: dict[str, Any], device: torch.device, loaders: Sequence[object]) -> None:
    """Restore the states from :func:`capture_generators` of those generators that exist."""
    restore(state)
    restore_loader_generators(state.get("loaders", {}), loaders)
    saved = state.get("device")  # the first version saved the generator of one device
    if saved is not None and saved["type"] == device.type:
        getattr(torch, device.type).set_rng_state(saved["state"])


def loader_generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return the states of the generators that loaders and their parts hold, by name."""
    return {name: state_of(generator) for name, generator in _generators(loaders).items()}


def restore_loader_generators(states: Mapping[str, Any], loaders: Sequence[object]) -> None:
    for name, generator in _generators(loaders).items():
        if name in states:
            restore_state(generator, states[name])


def _generators(loaders: Sequence[object]) -> dict[str, Any]:
    """Return every generator that a loader or one of its parts holds, once, by a name such as ``0.sampler.rng``."""
    found: dict[int, tuple[str, Any]] = {}
    for index, loader in enumerate(loaders):
        for name, generator in generators_of(loader).items():
            found.setdefault(id(generator), (f"{index}.{name}", generator))
    return dict(found.values())


# ---- averages over an epoch, of self.log(..., on_epoch=True) and of torchmetrics


def update_counts(trainer: Any) -> dict[str, int]:
    """Return the number of updates of each of the module's torchmetrics since its reset, by name."""
    return {name: int(metric._update_count) for name, metric in _metrics(trainer.lightning_module)}


def capture_averages(trainer: Any, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what has been accumulated since the epoch began, between two training batches.

    ``before`` has the update counts at the start of a validation that will be repeated; metrics that the validation has
    updated are left out.
    """
    return {
        "logged": logged_averages(trainer),
        "metrics": {
            name: {
                "updates": int(metric._update_count),
                "states": {state: getattr(metric, state) for state in metric._defaults},
            }
            for name, metric in _metrics(trainer.lightning_module)
            if metric._update_count and (before is None or metric._update_count == before.get(name))
        },
    }


def restore_averages(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_averages` returned, before the first batch after a resume."""
    modules = dict(_metrics(trainer.lightning_module))
    for name, entry in saved["metrics"].items():
        if (metric := modules.get(name)) is None:
            continue
        for state, value in entry["states"].items():
            moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, state, moved)
        metric._update_count = entry["updates"]
        metric._computed = None
    restore_logged(trainer, saved["logged"], modules)


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    torchmetrics = loaded("torchmetrics")
    if torchmetrics is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, torchmetrics.Metric):
            yield name, part


# ---- random numbers that a dataset draws in the process that trains
#
# A resumed run draws the batches of its epoch again, without the model's steps between them. A dataset that runs in the
# same process, and draws from the generators of the process, would then draw other numbers, and may fill its buffers
# with other samples. So each batch for which the dataset draws from a generator notes the state of the generator before
# it, where something else has drawn from that generator since the previous batch.


logger = logging.getLogger("holdfast")

MOST = 1000  # The limit on the states that are kept of an epoch, of about 5 KB each.

_GENERATORS = ("torch", "numpy", "python")


def batch_sizes(loaders: Sequence[Any]) -> list[int | None]:
    """Return how many samples a batch of each loader has in this process; None where that is not known."""
    found = (
        getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        for loader in loaders
    )
    return [size if isinstance(size, int) else None for size in found]


def batch_size_ratio(saved: Sequence[int | None] | None, loaders: Sequence[Any]) -> Fraction:
    """Return how many batches have as many samples as one of the save; 1 where the sizes are not known.

    Raises:
        StateError: The ratio differs between the loaders, so no number of batches is the same position in all.
    """
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


def draws_in_process(loaders: Sequence[Any]) -> bool:
    """Return whether an iterable dataset runs in this process, and not in workers."""
    return any(
        isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
        and not getattr(loader, "num_workers", 0)
        for loader in loaders
    )


class Drawing:
    """Follows the draws of one epoch, from the state of the generators at its first batch on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._before: dict[str, Any] | None = None
        self._after = dict(state)  # the state of each generator after the last batch that drew from it

    def before(self) -> None:
        """Note the generators before a batch."""
        self._before = capture()

    def after(self) -> dict[str, Any]:
        """Return the generator states that a batch was drawn from, except those that an earlier batch left."""
        before, self._before = self._before, None
        if before is None:
            return {}
        after = capture()
        moved = [name for name in _GENERATORS if not same_state(before[name], after[name])]
        new = [name for name in moved if name not in self._after or not same_state(before[name], self._after[name])]
        self._after |= {name: after[name] for name in moved}
        tree = as_tree(before) if new else {}
        return {name: tree[name] for name in new}


def warn_of_draws() -> None:
    """Warn that the dataset draws random numbers for more batches of an epoch than are noted."""
    logger.warning(
        "the dataset draws random numbers in the process that trains (num_workers=0), between those of the model, in "
        "more than %d batches of an epoch: a run that resumes within the epoch draws others, and is not exact. Let "
        "the dataset draw from a generator of its own, give the data loader a worker (num_workers=1), or use a loader "
        "with state_dict and load_state_dict",
        MOST,
    )


# ---- flags of a module that a program switches while it trains, and that no state dict holds


_Flags = dict[str, dict[str, bool]]


class ModuleSwitches:
    """Follows the switches of a module: ``requires_grad``, as finetuning callbacks set it, and the modes of its parts.

    A program sets some before it trains, and sets them again when it resumes, perhaps to other values. So only switches
    that have changed since training began, in this process or in an earlier one, are saved.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._at_start = _flags(module)
        self._earlier: _Flags = {}

    def switched(self) -> str:
        """Return the flags that have changed as one leaf of a checkpoint; empty if there are none."""
        found = {
            kind: {
                name: flag
                for name, flag in flags.items()
                if self._at_start[kind].get(name) != flag or name in self._earlier.get(kind, ())
            }
            for kind, flags in _flags(self._module).items()
        }
        return json.dumps(found) if any(found.values()) else ""

    def restore(self, switched: str) -> None:
        """Set the flags that :meth:`switched` returned, of parts that the module still has."""
        self._earlier = json.loads(switched) if switched else {}
        owners = {"requires_grad": dict(self._module.named_parameters())}
        parts = dict(self._module.named_modules())
        for kind, flags in self._earlier.items():
            for name, flag in flags.items():
                if (owner := owners.get(kind, parts).get(name)) is not None:
                    setattr(owner, kind, flag)


def _flags(module: Any) -> _Flags:
    parts = dict(module.named_modules())
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "training": {name: part.training for name, part in parts.items()},
        "track_running_stats": {
            name: part.track_running_stats for name, part in parts.items() if hasattr(part, "track_running_stats")
        },
    }
