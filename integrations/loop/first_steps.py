"""Check the first reports and saves of a loop for signs that a resume would not be exact.

The checks read names, sampled values, counters and classes, without changing the program or calling its code.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, compress
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ...engine.distributed import ProcessGroup
from ...engine.errors import HoldfastError, OptionError, StateError, shortened
from ...engine.generators import is_generator
from ...engine.loaders import LoaderPosition, drawing_sampler
from ...engine.pytree import (
    Sampler,
    Samples,
    Ways,
    flatten,
    is_jax_array,
    is_plain,
    is_torch_tensor,
    loaded,
    unwrapped_name,
)
from ...engine.witness import Seen, is_time
from .extras import GLOBAL_GENERATORS, changes_in_place
from .objects import is_versioned, live_objects
from .states import STATE, Start, StateAdapter, empty_dicts, located

logger = logging.getLogger("holdfast")

_spell = cache(str)  # formatting a numpy dtype is slow, and leaves use only a few dtypes
_ALL = 1 << 30  # no limit on the number of leaves
_TRAINED, _COUNTS, _SAMPLED = 4, 8, 128  # maximum numbers of leaves whose values are compared
_COUNTERS = ("step", "count")  # fields in which a TrainState or optax state counts updates
_FAR = 100  # number of reports after which any trained state must have changed
# Private attributes of torch's DataLoader iterators: batches taken, index sampler, and persistent-workers flag.
_TAKEN, _SAMPLER, _PERSISTENT = "_num_yielded", "_index_sampler", "_persistent_workers"

_OTHER_STATE = "on_step(%d) got a state other than restore_or_initialize returned: it lacks %s. Pass the whole state"
_STATE_DICT = (
    "on_step was given the state dict (%s) that restore_or_initialize was given: a resume restores it, and neither the "
    'model nor the optimizer. Pass the objects to both: {"model": model, "optimizer": optimizer}'
)
_REPEATED = (
    "on_step(%d) comes after an update, with the step that restore_or_initialize returned: a resume would repeat it. "
    "Write step += 1 before checkpoint.on_step(step, ...), or set step_offset=1 if step N is the index of an update"
)
_LEFT_OUT = (
    "the steps after %d are %d and %d, with equally many updates before each: each resume would leave one out. Begin "
    "at the step that restore_or_initialize has returned, and write step += 1 before checkpoint.on_step(step, ...)"
)
_INDEX = (
    "step %d was not saved by this callback, and its state has counted %d updates (%s): if step N is the index of an "
    "update, as in many programs for Orbax, begin with step_offset=1. Otherwise, update %d is done twice"
)
_NO_PLACE = (
    "step %d is saved after batch %d of %d of a DataLoader that shuffles, without its place: a resume begins another "
    "epoch. Write loader = hf.resumable(loader), loop over it, and pass data=loader to restore_or_initialize and "
    "on_step; or data=None, if the program finds its place itself"
)
_FORGOTTEN = (
    "step %d is saved without the %s of %s, which has a state: a resume would begin with a fresh one. Pass "
    '{"model": model, "optimizer": optimizer} to restore_or_initialize and on_step'
)
_GROWN = (
    "step %d does not fit the state that restore_or_initialize was given, so a resume would be refused: %s. Make the "
    "same parts before restore_or_initialize, such as best = copy.deepcopy(model), or as checkpoint.peek() tells the "
    "step"
)
_UNUSED = (
    "the state at step %d is the same as at step %d, and %d parameters outside of it are trained: make the model and "
    "its optimizer before restore_or_initialize, and train what it returns"
)
_ONLY_DICTS = (
    "The state has state dicts, which only load_state_dict puts back: call it with what restore_or_initialize has "
    'returned, or pass the objects to both: {"model": model, "optimizer": optimizer}'
)
_NO_SCHEDULER = (
    "The %s of the optimizer is not saved: pass it to restore_or_initialize and on_step as an extra, as in "
    "scheduler=scheduler"
)
_REDUCED = (
    "DistributedDataParallel puts the gradients in another order after its first step, so that their sums over more "
    "than two processes round in another way: give it find_unused_parameters=True, without static_graph"
)
_DIVIDED = (
    "The first step divides arrays among the devices in another way than the program does before restore_or_initialize "
    "(%s), so that it rounds in another way after each start: give jax.jit the shardings of the state as out_shardings="
)
_AS_EXTRAS = (
    "What belongs to one process, such as a stage of a pipeline, is an extra, of which each process saves its own: "
    "restore_or_initialize({}, model=model, optimizer=optimizer), and on_step(step, {}, model=model, ...). Arrays and "
    "keys of one process belong in an extra that is an object with get_state and set_state"
)
_OTHER_PARTS = f"the processes train other parameters (%s), and must have the same in the state. {_AS_EXTRAS}"
_UNEQUAL = (
    "step %d is saved although other processes hold other values of %s: a resume gives all processes the same. If they "
    f"should be equal, broadcast them before the first step, and buffers before each on_step. {_AS_EXTRAS}"
)
_OTHERWISE = (
    "Either the loop changes the state after on_step: call it last, after scheduler.step() and averages of weights. Or "
    "the steps depend on something that was not handed over: pass it to restore_or_initialize and on_step as an extra, "
    "as in scheduler=scheduler, or make it part of the state. What is not restored in place, such as arrays, lists and "
    "objects of nnx in a named tuple, is in the state that restore_or_initialize returns and in checkpoint.extras: go "
    "on with that. Extras that differ between processes have to be objects with get_state and set_state"
)


class _Look(NamedTuple):
    step: int
    samples: Samples  # samples of some leaves
    versions: list[int]  # version counter of each torch tensor


class FirstSteps:
    """Checks the restored state, the first two reports and the first saves of a run."""

    def __init__(self, adapter: StateAdapter) -> None:
        self._adapter = adapter
        self._reports = self._saves = 0
        self._sampler = Sampler()
        self._looks: list[_Look] = []  # samples of the restored state and the first reports, until they are compared
        self._saved: tuple[_Look, Ways, int, Mapping[str, Any]] | None = None  # observations at the first save

    def look_at_start(self, start: Start, *, grows: bool) -> None:
        """Sample the state before the first step. With ``grows``, its structure may differ from a fresh state's."""
        state = start.state
        self._is_compared = start.is_known and not grows
        self._read = [(weakref.ref(reader), getattr(reader, _TAKEN, 0)) for reader in _readers(start.extras, state)]
        if start.is_known:
            self._marks = {path: _mark(part) for path, part in located(state, _mark)}
            self._ways = Ways(state, _ALL)
            kinds = [*map(_kind, self._ways.follow(state))]
            arrays, counts = ([n for n, kind in enumerate(kinds) if kind is wanted] for wanted in (float, int))
            self._arrays = len(arrays[:_TRAINED])  # trained leaves come first
            self._chosen = [*arrays[:_TRAINED], *counts[:_COUNTS]]
            self._looks.append(self._look(start.step, state))

    def look_at_report(self, step: int, state: Any, extras: Mapping[str, Any]) -> None:
        """Check a report before it is processed. Raise StateError if a resume could not restore its state."""
        self._reports, self._extras = self._reports + 1, extras
        if not self._looks:
            return
        if len(self._looks) == 1:
            self._check_state(step, state)
        self._looks.append(self._look(step, state))
        start, now = self._looks[0], self._looks[-1]
        if len(self._looks) == 2 and step == start.step and start.samples.differs(now.samples, self._arrays):
            logger.warning(_REPEATED, step)
        if len(self._looks) == 3:
            if self._leaves_out():
                logger.warning(_LEFT_OUT, *(look.step for look in self._looks))
            self._looks, self._sampler = [], Sampler()  # a new sampler, because the old one still refers to tensors

    def look_at_save(self, step: int, state: Any, metrics: Mapping[str, Any], refused: Callable[[], list[str]]) -> bool:
        """Check a report before it is saved; warn if a resume would refuse it. Return True after the last check."""
        self._saves, extras = self._saves + 1, self._extras
        if self._saves == 1:
            self._check_place(step, state)
            if self._is_compared and (problems := refused()):
                logger.warning(_GROWN, step, shortened(problems, 4))
        root = {STATE: state, **{name: extra for name, extra in extras.items() if isinstance(extra, dict)}}
        ways = Ways(root if self._adapter.is_live else None, _ALL) if self._saved is None else self._saved[1]
        leaves = ways.follow(root)
        if not any(map(is_torch_tensor, leaves)):  # jax and numpy arrays have no version counters
            return not self._looks
        now = _Look(step, Sampler().take(leaves[:_SAMPLED]), [*map(_version, leaves)])
        first, _, reports, before = self._saved = self._saved or (now, ways, self._reports, metrics)
        if self._saves == 2:
            steps = zip(ways.names, leaves, first.versions, now.versions, strict=True)
            changed = {_address(leaf): name for name, leaf, old, new in steps if old != new}
            _check_optimizers(step, changed, leaves, {STATE: state, **extras})
        if self._reports - reports < _FAR:
            return False
        has_other_loss = any(before.get(name, value) != value for name, value in metrics.items() if not is_time(name))
        if has_other_loss and first.versions == now.versions and not first.samples.differs(now.samples):
            _check_use(step, first.step, leaves)
        return True

    def _look(self, step: int, state: Any) -> _Look:
        leaves = self._ways.follow(state)
        chosen = [leaves[number] for number in self._chosen]
        return _Look(step, self._sampler.take(chosen), [*map(_version, chosen)])

    def _check_state(self, step: int, state: Any) -> None:
        torch: Any = loaded("torch")
        for path, part in located(state, _mark):
            is_same = self._marks.get(path) is _mark(part)  # copied state dicts, such as averages, are allowed
            if is_same and (
                "param_groups" in part or _addresses(part.values()) & _addresses(_live(torch.nn.Parameter))
            ):
                raise StateError(_STATE_DICT % (path or "the state"))
        if missing := self._ways.ended(state):  # some leaves may only have moved to other containers or wrappers
            names = {unwrapped_name(name) for name in Ways(state, _ALL).names}
            filled = tuple(f"{path}." for path in self._adapter.empty)  # dicts that were empty in the fresh state
            left = {f"{path}." for path in empty_dicts(state)} | {name for name in names if name.startswith(filled)}
            emptied = tuple(path for path in filled if any(name.startswith(path) for name in left))
            missing = [name for name in missing if unwrapped_name(name) not in names and not name.startswith(emptied)]
            if missing:
                raise StateError(_OTHER_STATE % (step, shortened(sorted(missing), 4)))

    def _leaves_out(self) -> bool:
        """Return whether the step, unlike an update counter, rose by one more in the first report than in the next."""
        steps, samples, versions = zip(*self._looks, strict=True)
        first, second = steps[1] - steps[0], steps[2] - steps[1]
        counts = (sample.fetch(1)[1][self._arrays :, 0].tolist() for sample in samples)
        values = zip(*(now + changes for now, changes in zip(counts, versions, strict=True)), strict=True)
        rises = [(now - start, later - now) for start, now, later in values]
        return first - 1 == second > 0 and any(
            rise == next_rise > 0 and rise % second == 0 for rise, next_rise in rises
        )

    def _check_place(self, step: int, state: Any) -> None:
        before = {id(reader): taken for ref, taken in self._read if (reader := ref()) is not None}
        for reader in _readers(self._extras, state):
            order, taken = getattr(reader, _SAMPLER, None), getattr(reader, _TAKEN, 0)
            draws = drawing_sampler(SimpleNamespace(sampler=order, batch_sampler=order)) is not None
            is_within = before.get(id(reader), 0) < taken < len(reader)
            if draws and is_within and not getattr(reader, _PERSISTENT, False):
                logger.warning(_NO_PLACE, step, taken, len(reader))
                return


def cause_in_state(seen: Seen | None) -> str:
    """Return the likely reason why steps differ although the state was restored exactly."""
    torch: Any = loaded("torch")
    if seen is None or STATE not in seen.root or torch is None:  # trainers have no STATE and save all schedulers
        return _OTHERWISE
    if any(located(seen.root, _mark)):
        return _ONLY_DICTS
    shown = {id(value) for _, value in live_objects({**seen.root, **seen.objects})}
    schedulers = _live(torch.optim.lr_scheduler.LRScheduler)
    shown |= {id(part) for each in schedulers for part in vars(each).get("_schedulers", ())}  # saved by their container
    for scheduler in schedulers:
        if id(scheduler) not in shown and id(scheduler.optimizer) in shown:
            return _NO_SCHEDULER % type(scheduler).__qualname__
    return _OTHERWISE


def cause_in_sums() -> str:
    """Return why gradient sums over processes may differ at the first step after a start, or an empty string."""
    torch: Any = loaded("torch")
    is_joint = torch and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_joint or torch.distributed.get_world_size() <= 2:
        return ""
    models = _live(torch.nn.parallel.DistributedDataParallel)
    return _REDUCED if any(each.static_graph or not each.find_unused_parameters for each in models) else ""


def shardings_of(root: Any) -> dict[str, tuple[Any, int]]:
    """Return the sharding and number of axes of each jax array that the witness samples in a state, by name."""
    ways = Ways(root, _SAMPLED)
    leaves = zip(ways.names, ways.follow(root), strict=True)
    return {name: (leaf.sharding, leaf.ndim) for name, leaf in leaves if hasattr(leaf, "sharding")}


def cause_in_shardings(before: Mapping[str, tuple[Any, int]], root: Any) -> str:
    """Return why the first step after a start may round differently from later steps, or an empty string."""
    now = shardings_of(root)
    both = {name: (before[name][0], *now[name]) for name in before.keys() & now.keys()}
    moved = [
        name.removeprefix(f"{STATE}.")
        for name, (old, new, ndim) in sorted(both.items())
        # Replicated arrays are equivalent, regardless of the number of devices.
        if not (old.is_fully_replicated and new.is_fully_replicated) and not old.is_equivalent_to(new, ndim)
    ]
    return _DIVIDED % shortened(moved, 3) if moved else ""


def warn_of_index(step: int, tree: Any) -> None:
    """Given a step saved by another program, warn if the update counters are one ahead of the step number."""
    flat = flatten(tree)
    counters = {
        name: int(value)
        for name, value in zip(flat.names, flat.values, strict=True)
        if name.rpartition(".")[2] in _COUNTERS and _kind(value) is int
    }
    if {*counters.values()} == {step + 1}:
        logger.warning(_INDEX, step, step + 1, shortened([*counters], 2), step)


def compare_processes(
    processes: ProcessGroup,
    state: Any,
    extras: Mapping[str, Any] | None = None,
    step: int | None = None,
    *,
    warns: bool = True,
) -> bool:
    """Raise OptionError if processes train different parameters; return whether values differ at a ``step`` to save."""
    if processes.alone:
        return False
    parts: dict[str, int] = {}
    with contextlib.suppress(Exception):  # even after an error, answer the waiting processes
        alike = _alike(state, extras or {}, only_trained=step is None)
        parts = {f"{name} {[*leaf.shape]}": 0 for name, leaf in alike.items() if is_torch_tensor(leaf)}
        if step is not None:
            plain = {name: leaf for name, leaf in alike.items() if not hasattr(leaf, "placements")}
            parts = dict(zip(plain, Sampler().take([*plain.values()]).fetch(1)[0].tolist(), strict=True))
    # If a process does not answer, the save itself fails and reports the cause.
    with contextlib.nullcontext() if step is None else contextlib.suppress(HoldfastError, OSError):
        names = processes.agree("the trained parameters", parts, _differing)
        if names and step is None:
            raise OptionError(_OTHER_PARTS % shortened(names, 4))
        if names and warns and processes.is_primary:
            logger.warning(_UNEQUAL, step, shortened(names, 4))
        return bool(names)
    return False


def _differing(values: Iterable[Mapping[str, int]]) -> list[str]:
    first, *others = [*filter(None, values)] or [{}]  # ignore processes that failed to read their values
    return sorted({name for each in others for name, _ in first.items() ^ each.items()})


def _alike(state: Any, extras: Mapping[str, Any], *, only_trained: bool) -> dict[str, Any]:
    """Return leaves that must be equal in all processes, by name. Each process selects the same leaves."""
    torch: Any = loaded("torch")
    optimizers = [each for _, each in live_objects(state) if isinstance(each, torch.optim.Optimizer)]
    held = {*map(id, chain(*map(_moments, optimizers)))}
    replicas = [] if only_trained or torch is None else _live(torch.nn.parallel.DistributedDataParallel)
    # Before each step, DistributedDataParallel gives all processes the buffers of process 0. Averages copy buffers.
    may_differ = only_trained or any(each.broadcast_buffers and [*each.buffers()] for each in replicas)

    def is_alike(leaf: Any) -> bool:
        if is_torch_tensor(leaf):
            return leaf.requires_grad or id(leaf) in held or not may_differ
        return isinstance(leaf, np.ndarray) or (is_jax_array(leaf) and leaf.is_fully_addressable)

    both = [(Ways(root, _ALL), root) for root in (extras, state)]
    leaves = chain(*(zip(ways.names, ways.follow(root), strict=True) for ways, root in both))
    alike = [(name, leaf) for name, leaf in leaves if is_alike(leaf)]
    return dict(alike[: _SAMPLED // 2] + alike[-_SAMPLED // 2 :])  # buffers come last


def _check_optimizers(step: int, changed: dict[int, str], leaves: list[Any], root: Any) -> None:
    """Warn if an optimizer updated leaves in ``changed`` (by address), but neither it nor its state dict is saved."""
    torch: Any = loaded("torch")
    shown = [value for _, value in live_objects(root) if isinstance(value, torch.optim.Optimizer)]
    saved = [optimizer for optimizer in shown if optimizer.state]
    inner = {id(value) for optimizer in shown for value in vars(optimizer).values()}  # inside a ZeroRedundancyOptimizer
    held = _addresses(leaves)
    left = changed.keys() & held - _addresses(chain(*map(_parameters, saved), *map(_moments, saved)))
    live = [each for each in _live(torch.optim.Optimizer) if id(each) not in inner] if left else []
    others = [(each, _addresses(_moments(each))) for each in live]
    # Exclude parameters of optimizers whose state dicts are saved.
    left -= _addresses(chain(*(_parameters(each) for each, state in others if state & held)))
    for optimizer, state in others:
        if (trained := _addresses(_parameters(optimizer)) & left) and state and not state & held:
            names = sorted(changed[address].removeprefix(f"{STATE}.") for address in trained)
            logger.warning(_FORGOTTEN, step, type(optimizer).__qualname__, shortened(names, 3))
            return


def _check_use(step: int, earlier: int, leaves: list[Any]) -> None:
    """If the program trains parameters outside the state, warn that the state does not change."""
    torch: Any = loaded("torch")
    used = (parameter for parameter in _live(torch.nn.Parameter) if parameter.grad is not None)
    trained = chain(used, *map(_parameters, _live(torch.optim.Optimizer)))
    if others := _addresses(trained) - _addresses(leaves):
        logger.warning(_UNUSED, step, earlier, len(others))


def _has_place(extras: Mapping[str, Any]) -> bool:
    """Return whether an extra may hold the data position, judging by its name, its state or an integer in it."""
    extras = {name: extra for name, extra in extras.items() if not _is_unread(extra)}
    for name, extra in extras.items():
        if name in ("epoch", GLOBAL_GENERATORS) or is_generator(extra) or is_versioned(extra):
            continue
        if changes_in_place(extra) and not type(extra).__module__.startswith("torch."):  # not a torch scheduler
            return True
        if is_plain(extra) and any(type(leaf) is int for leaf in flatten(extra).values):
            return True
    return "data" in extras


def _live(*classes: type) -> list[Any]:
    """Return all live instances of the classes and their subclasses, in a single pass over all objects."""
    wanted = [*classes]
    for cls in wanted:
        wanted += cls.__subclasses__()
    objects = gc.get_objects()
    return [*compress(objects, map({*wanted}.__contains__, map(type, objects)))]


def _readers(extras: Mapping[str, Any], state: Any) -> list[Any]:
    """Return torch's live DataLoader iterators, or [] if an extra or part of the state may hold their position."""
    iterator_type: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)
    parts = state.values() if isinstance(state, dict) else ()
    has_place = _has_place(extras) or any(isinstance(part, LoaderPosition) and not _is_unread(part) for part in parts)
    return [] if iterator_type is None or has_place else _live(iterator_type)


def _is_unread(extra: Any) -> bool:
    """Return whether an extra is a holdfast loader that has yielded no batch; the loop may then read another loader."""
    return isinstance(extra, LoaderPosition) and extra.checksum is None


def _mark(value: Any) -> Any:
    """Return the part of a torch state dict that uniquely identifies the dict, or None for other values."""
    if not isinstance(value, dict):
        return None
    return value["param_groups"] if {"state", "param_groups"} <= value.keys() else getattr(value, "_metadata", None)


def _kind(leaf: Any) -> type | None:
    """Return float for an array of floats, int for a single integer, and None for other leaves and lazy parameters."""
    torch: Any = loaded("torch")
    if is_torch_tensor(leaf) and torch.nn.parameter.is_lazy(leaf):
        return None
    kind, is_array = _spell(getattr(leaf, "dtype", type(leaf).__name__)), getattr(leaf, "ndim", 0) > 0
    return float if is_array and "float" in kind else int if "int" in kind and not is_array else None


def _version(leaf: Any) -> int:
    return leaf._version if is_torch_tensor(leaf) and not leaf.is_inference() else 0


def _address(leaf: Any) -> int:
    with contextlib.suppress(RuntimeError):  # raised by tensor subclasses and tensors without storage
        return int(leaf.data_ptr()) if is_torch_tensor(leaf) else 0
    return 0


def _addresses(leaves: Iterable[Any]) -> set[int]:
    """Return the memory addresses of tensors, which are the same in a module and its state dict."""
    return {*map(_address, leaves)} - {0}


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _moments(optimizer: Any) -> Iterator[Any]:
    return (moment for state in optimizer.state.values() for moment in state.values())
