"""The state of an epoch apart from its counters: data loaders, random generators, and running averages.

Lightning's own checkpoints lack the running averages: the mean over an epoch that was resumed is that of its remaining
batches.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from ...engine.errors import OptionError, StateError
from ...engine.generators import (
    Paths,
    as_tree,
    capture,
    differing_parts,
    listed_parts,
    restore,
    same_state,
    unsteady_parts,
)
from ...engine.loaders import generators_of, is_torchdata_loader, nodes_of, position_of, set_position
from ...engine.pytree import loaded
from ...engine.stateful import (
    is_replicated,
    restore_state,
    state_of,
    warn_of_lost_draws,
    warn_of_lost_parts,
    warn_of_samplers,
)
from .wall import (
    begin_counting,
    draws_ahead,
    logged_averages,
    place_iterator,
    restore_logged,
    set_ended,
)

logger = logging.getLogger("holdfast")

# ---- data loaders

_NOTHING = object()
_NUMBERS = {bool, int, float, str, type(None)}


def loader_states(loaders: Sequence[object]) -> list[Any]:
    """Return copies of the states of the loaders that carry one, in order."""
    return [_state(loader) for loader in _stateful(loaders)]


def replicated_states(loaders: Sequence[object], names: Collection[str] = ()) -> list[int]:
    """Return which of the states of :func:`loader_states` are declared to be those of all processes.

    Loaders declare it themselves, or ``names`` has ``loaders`` or one such as ``loaders/0``; of no loader, OptionError.
    """
    stateful = _stateful(loaders)
    named = {name: range(len(stateful)) for name in names if name == "loaders"}
    named |= {name: range(len(stateful))[int(name[8:]) :][:1] for name in names if name.startswith("loaders/")}
    if unknown := [name for name, indices in named.items() if not indices]:
        raise OptionError(
            f"replicated names {unknown[0]!r}, and the trainer has {len(stateful)} training data loaders with "
            "state_dict and load_state_dict; those without a state need no declaration, as their batches are counted"
        )
    declared = {index for indices in named.values() for index in indices}
    return [index for index, loader in enumerate(stateful) if index in declared or is_replicated(loader)]


def load_loader_states(
    loaders: Sequence[object], saved: Sequence[Any], generators: Mapping[str, Any] | None = None
) -> set[str]:
    """Restore the states that :func:`loader_states` returned in the loaders that carry a state.

    ``generators`` are the states of the loaders' generators at the save, if they are to be restored, too. Return the
    names of those that loaders have set to other states, such as to the one from which an iterator draws the order
    again.
    """
    stateful = _stateful(loaders)
    if len(stateful) != len(saved):
        raise StateError(
            f"the checkpoint holds the state of {len(saved)} training data loaders, but {len(stateful)} of this run's "
            "loaders have state_dict and load_state_dict: use the loaders that the checkpoint was saved with"
        )
    restore_loader_generators(generators or {}, loaders)
    before = loader_generators(loaders) if generators else {}
    for loader, state in zip(stateful, saved, strict=True):
        if is_torchdata_loader(loader):
            warn_of_lost_draws(loader, state)
        elif nodes_of(loader):
            warn_of_samplers(loader)
        _load(loader, state)
    after = loader_generators(loaders) if generators else {}
    return {name for name, state in before.items() if name in after and not same_state(state, after[name])}


class NotedStates:
    """The states of loaders before their last batches: ``earlier`` has of each the last two that differ, newest first.

    The states of torchdata's loaders are left out, because they tell whether an epoch has ended.
    """

    def __init__(self, loaders: Sequence[object], earlier: Sequence[Sequence[Any]] = ()) -> None:
        stateful = _stateful(loaders)
        self._loaders = [
            (index, loader, _getter(loader), _unsteady(loader))
            for index, loader in enumerate(stateful)
            if not is_torchdata_loader(loader) or is_replicated(loader)
        ]
        self.earlier = list(earlier) if len(earlier) == len(stateful) else [[] for _ in stateful]

    def note(self) -> None:
        """Take the present states, before a batch is drawn."""
        noted = list(self.earlier)  # A checkpoint may hold the list.
        for index, loader, getter, unsteady in self._loaders:
            state, before = _copied(position_of(loader, getter)), noted[index][:1]
            if not before or not _same(before[0], state, unsteady):
                noted[index] = [state, *before]
        self.earlier = noted


def _unsteady(loader: Any) -> Paths:
    return unsteady_parts(lambda: _state(loader))


def _untouched(saved: Any, before: Any, now: Any) -> Paths:
    """Return the parts of a state that loading it did not bring back, and draws have not changed since.

    Most often they do not belong to the place, such as a time in seconds or the number of a process. ``before`` is how
    the state looked when ``saved`` had been loaded.
    """
    wanted, first, last = (_parts(state, frozenset()) for state in (saved, before, now))
    return frozenset(
        path
        for path, part in last.items()
        if path in wanted and path in first and same_state(first[path], part) and not same_state(wanted[path], part)
    )


def _parts(state: Any, unsteady: Paths, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return what a state consists of by the keys that lead there, without unsteady parts."""
    if path in unsteady:
        return {}
    if not isinstance(state, dict | list | tuple) or not state:
        return {path: state}
    below = state.items() if isinstance(state, dict) else enumerate(state)
    return {name: part for key, one in below for name, part in _parts(one, unsteady, (*path, key)).items()}


def _same(one: Any, other: Any, unsteady: Paths) -> bool:
    """Return whether two states are equal in all parts that change with a batch only."""
    return same_state(_parts(one, unsteady), _parts(other, unsteady)) if unsteady else same_state(one, other)


def end_loader_epoch(
    loaders: Sequence[Any],
    saved: Sequence[Any],
    earlier: Sequence[Sequence[Any]] = (),
    length: float = math.inf,
    generators: Mapping[str, Any] | None = None,
) -> set[str]:
    """Take the loaders that carry a state to the end of an epoch, from where they begin the next one or continue.

    ``saved`` has their states at its end, ``earlier`` those before the last batch, which steps of earlier versions do
    not have; ``length`` is the number of its batches, where it was known before the end. Else as
    :func:`load_loader_states`.
    """
    own = load_loader_states(loaders, saved, generators)
    for index, (loader, end) in enumerate(zip(_stateful(loaders), saved, strict=True)):
        # The first iterator applies the state, so it must not be that of the next epoch.
        iterator = iter(loader)
        if iterator is loader:
            warn_of_lost_states([loader], [end])
            continue
        starts = earlier[index] if index < len(earlier) else ()
        if not starts or _length(loader) == length:  # The data of the loader may have ended as well.
            # A generator function runs nothing before its first value.
            is_at_end = next(iterator, _NOTHING) is _NOTHING
            if is_torchdata_loader(loader) or (is_at_end and is_at(loader, end)):
                continue
        if not starts:
            _load(loader, end)
        elif _repeated(loader, starts, end)[0] is None:
            # Such a loader does not continue where it is, but begins anew with the next iterator.
            _load(loader, end)
            next(iter(loader), None)
    return own


def repeat_batch(
    fetcher: Any,
    loaders: Sequence[Any],
    states: Sequence[Any],
    earlier: Sequence[Sequence[Any]],
    ended: Sequence[bool],
) -> list[Paths]:
    """Bring the iterators of loaders to where they had drawn the last batch before the save, or had found no more.

    ``ended`` says which loaders have come to an end in this epoch, and do not begin again: their iterators are at the
    end, unless one goes on after it. Return the parts of each state that do not tell where a loader is.
    """
    asides: list[Paths] = [frozenset() for _ in loaders]
    for index, (loader, state) in enumerate(zip(loaders, states, strict=True)):
        starts = earlier[index] if index < len(earlier) else ()
        has_ended = index < len(ended) and ended[index]
        if not starts and has_ended:
            end_loader_epoch([loader], [state])
        if not starts or iter(loader) is loader:
            warn_of_lost_states([loader], [state])
            continue
        iterator, asides[index] = _repeated(loader, starts, state)
        if iterator is None and has_ended:
            end_loader_epoch([loader], [state], [starts])
            continue
        if iterator is None:
            _load(loader, state)
            iterator = iter(loader)
        place_iterator(fetcher.combined_loader, index, iterator)
    return asides


def is_at(loader: Any, state: Any, aside: Paths = frozenset()) -> bool:
    """Return whether a loader has a state, apart from parts that change without a batch, and those set ``aside``."""
    return _same(_state(loader), state, _unsteady(loader) | aside)


def misplaced(loaders: Sequence[Any], states: Sequence[Any], declared: Collection[int]) -> Iterator[tuple[int, Any]]:
    """Generate the number and the state of each loader that is elsewhere than at its state of these.

    Loaders of torchdata whose states are not ``declared`` to be those of all processes are left out: their states also
    tell what workers have begun to load.
    """
    for index, (loader, state) in enumerate(zip(_stateful(loaders), states, strict=True)):
        if (index in declared or not is_torchdata_loader(loader)) and not is_at(loader, state):
            yield index, _state(loader)


def difference(one: Any, other: Any) -> str:
    """Return where two states differ, for messages."""
    return listed_parts(differing_parts(one, other))


def warn_of_lost_states(loaders: Sequence[object], states: Sequence[Any]) -> None:
    """Warn of loaders that have loaded their states and have others; nothing else compares these with a drawn batch."""
    for loader, state in zip(_stateful(loaders), states, strict=True):
        warn_of_lost_parts(loader, state, _getter(loader))


def _repeated(loader: Any, starts: Sequence[Any], end: Any) -> tuple[Iterator[Any] | None, Paths]:
    """Let a loader draw its last batch again, or come to its end again, and return the iterator that is there.

    The state alone does not tell whether the next iterator begins anew or continues, nor whether an epoch has ended.
    The iterator is None if the loader does not come to the state ``end``, or if nothing tells whether it does. The
    parts of the state that were not compared are returned, too.
    """
    drawn, found, unsteady = 0, None, _unsteady(loader)
    if unsteady and all(_same(start, end, unsteady) for start in starts):
        return None, unsteady
    untouched: Paths = frozenset()
    for start in starts:
        _load(loader, start)
        # A request for the state of a loader of torchdata begins its epoch.
        before = None if is_torchdata_loader(loader) else _state(loader)
        for _ in range(2):  # The batch may have been the first of an iterator that was not the first.
            iterator = iter(loader)
            drawn += next(iterator, _NOTHING) is not _NOTHING
            now = _state(loader)
            untouched = frozenset() if _same(now, end, unsteady) else _untouched(start, before, now)
            if _same(now, end, unsteady | untouched):
                found = iterator
                break
        if found is not None:
            break
    outcome = "but its state then was not the saved one, so it may continue elsewhere than in a run without a stop"
    if found is not None:
        outcome = "so that it continues as in a run without a stop"
        if untouched:
            outcome += (
                f", unless that depends on what loading its state has not brought back: {listed_parts(untouched)}"
            )
        if untouched and all(_same(start, end, unsteady | untouched) for start in starts):
            found, outcome = None, "but its state does not change with a batch, so it may continue elsewhere"
    if drawn:
        logger.warning(
            "the training data loader %s gave its last batch again (batches drawn: %d), %s. Its state and its random "
            "generators are restored. What else drawing changes has changed once more, such as a queue that it reads "
            "or a counter elsewhere: let such a loader be its own iterator (__iter__ returns self, and __next__ "
            "draws), as that is not drawn from at a resume",
            type(loader).__qualname__,
            drawn,
            outcome,
        )
    return found, unsteady | untouched


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def differ_in_length(loaders: Sequence[Any], length: float) -> bool:
    """Return whether a loader has another number of batches than the epoch, or an unknown one."""
    return any(_length(loader) != length for loader in loaders)


def all_stateful(loaders: Sequence[object]) -> bool:
    """Return whether every loader saves its own position, so that no batch need be drawn again."""
    return all(map(_state_methods, loaders))


def without_state(loaders: Sequence[Any]) -> list[Any]:
    """Return the loaders that do not save their own position."""
    return [loader for loader in loaders if not _state_methods(loader)]


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


def begin_within(fetcher: Any, ahead: Mapping[str, Any] | None, ended: Sequence[bool]) -> None:
    """Make the iterator of a fetcher within an epoch, in which some loaders had ended before the next batch.

    ``ahead`` has the batches drawn ahead, and whether the loop has had the last one; None if there are none yet.
    """
    if ahead is None and not draws_ahead(fetcher):
        iter(fetcher)
        set_ended(fetcher.combined_loader, ended)
        return
    fetcher.iterator = iter(fetcher.combined_loader)
    set_ended(fetcher.combined_loader, ended)
    fetcher.reset()
    if ahead is not None:
        fetcher.batches, fetcher.done = list(ahead["batches"]), ahead["done"]


def skip_batches(fetcher: Any, count: int, before: Callable[[int], None]) -> None:
    """Draw the batches that this epoch has trained on already, calling ``before`` with the number drawn so far."""
    ahead = draws_ahead(fetcher)
    source = fetcher if ahead else fetcher.iterator
    for drawn in range(count):
        if drawn + ahead == 1:
            begin_counting(fetcher.combined_loader)
        before(drawn + ahead)
        try:
            next(source)
        except StopIteration:
            raise StateError(
                f"the checkpoint was saved after {count} batches of its epoch, but the training data now ends after "
                f"{drawn}: use the data and the batch size that the checkpoint was saved with"
            ) from None
    if count == 1 and not ahead:
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


def _stateful(loaders: Sequence[Any]) -> list[Any]:
    return [loader for loader in loaders if _state_methods(loader)]


def _getter(loader: object) -> str:
    getter, _ = _state_methods(loader) or ("", "")
    return getter


def _state(loader: object) -> Any:
    return _copied(position_of(loader, _getter(loader)))


def _load(loader: object, state: Any) -> None:
    _, setter = _state_methods(loader) or ("", "")
    set_position(loader, _copied(state), setter)


def _copied(state: Any) -> Any:
    """Return a copy of a state, because loaders may change what they returned, and what they got."""
    if type(state) is dict and _NUMBERS.issuperset(map(type, state.values())):
        return state.copy()  # A tenth of the time: loaders without a length are asked before every batch.
    try:
        return copy.deepcopy(state)
    except Exception:  # Objects may refuse to be copied in any way. The save decides whether it can hold them.
        return state


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
    """Return how many batches have as many samples as one of the save, or 1; StateError where the loaders differ."""
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
