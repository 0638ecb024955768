"""Restore a module and its optimizers and schedulers from a checkpoint, even if the program has changed.

torch identifies the parameters of an optimizer by position. A holdfast checkpoint also stores their names, so each
parameter keeps its optimizer state even if the order of the parameters has changed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, NamedTuple

import torch

from ...engine.errors import TreeMismatchError, difference
from ...engine.pytree import class_name, unwrapped_name
from ...engine.sources import Misfits
from ..graph import is_kin
from ..loop import HYPERPARAMETERS, Hyperparameters, StateAdapter
from .private_api import LoopHooks, callbacks_of, is_search_file
from .strategies import as_saved, is_sharded

_CHANGED = (
    "A run resumes only with the model, the optimizers and the schedules that it had. partial='initialize' "
    "restores what fits and leaves the rest as initialized. To start another run with these weights, choose "
    "another directory, and pass this one as init_from="
)
# WeightAveraging adds these entries to a checkpoint. The entry ``state_dict`` then contains the averaged weights.
_WEIGHTS, _AVERAGE = "current_model_state", "averaging_state"
_COUNTERS = ("last_epoch", "_step_count")  # counters that every scheduler has
_NO_OPTIONS = ("params", "param_names")  # param group entries that are not options

_Names = list[list[str | None]]
"""The names of the parameters in each param group of an optimizer; None for parameters outside the module."""
_State = dict[str, Any]
_Options = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The options of a param group: first those in the program, then those in the checkpoint."""


class _Optimizer(NamedTuple):
    """An optimizer's class and parameter names; the names are None if the checkpoint does not store them."""

    class_name: str
    names: _Names | None

    def positions(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(chain.from_iterable(self.names or ())) if name is not None}


def _optimizers_of(trainer: Any) -> list[_Optimizer]:
    names = {id(value): unwrapped_name(name) for name, value in trainer.lightning_module.named_parameters()}
    return [
        _Optimizer(
            class_name(optimizer), [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        )
        for optimizer in trainer.strategy.optimizers
    ]


class Fitting:
    """Restores the module, optimizers, and schedulers of a ``fit``; with ``misfits``, skips state that does not fit."""

    def __init__(self, trainer: Any, misfits: Misfits | None, counting: str, hooks: LoopHooks) -> None:
        self.misfits = misfits
        self._trainer = trainer
        self._counting = counting  # source of a resumed run's hyperparameters: ``saved`` or ``program``
        self._saved: list[_Optimizer] = []  # optimizers in the checkpoint; empty for Lightning's own files
        self._saved_schedulers: list[str] | None = None  # scheduler classes at the start of the saved run's training
        self._shapes: dict[str, torch.Size] = {}  # weight shapes in the checkpoint
        # For each partially restored optimizer: the number of saved param groups, and the saved index of each group.
        self._groups: dict[int, tuple[int, list[int | None]]] = {}
        self._described: tuple[list[Any], str] | None = None
        self._schedulers: list[str] = []
        self._hyperparameters: Hyperparameters | None = None
        # Initial values of the hyperparameters that a resumed run has changed; None in a new run.
        self._began: Mapping[str, Any] | None = None
        self._loads_by_name = is_sharded(trainer.strategy)  # sharded strategies load optimizer state by name themselves
        if not self._loads_by_name:
            hooks.place(trainer.strategy, "load_model_state_dict", self._load_model)

    def note_hyperparameters(self) -> None:
        """Record the program's hyperparameters before those in the checkpoint replace them."""
        self._hyperparameters = Hyperparameters(StateAdapter(), (), self._optimizing())

    def begin(self) -> None:
        """Record the schedulers before callbacks change them, and set the hyperparameters of a resumed run."""
        if self._hyperparameters is not None and self._began is not None:
            shown = self._trainer.is_global_zero
            self._hyperparameters.settle((), self._optimizing(), self._counting, shown=shown, began=self._began)
        else:  # callbacks may have changed the values that the program set
            self.note_hyperparameters()
        self._schedulers = [class_name(config.scheduler) for config in self._trainer.strategy.lr_scheduler_configs]

    def facts(self) -> dict[str, Any] | None:
        """Return step metadata with the initial values of changed hyperparameters; None if no value has changed."""
        changed = {} if self._hyperparameters is None else self._hyperparameters.changed(())
        return {HYPERPARAMETERS: changed} if changed else None

    def description(self) -> str:
        """Return a JSON description of the optimizers and schedulers, cached until the optimizers change."""
        present = [
            (type(optimizer), [[*map(id, group["params"])] for group in optimizer.param_groups])
            for optimizer in self._trainer.strategy.optimizers
        ]
        if self._described is None or self._described[0] != present:
            described = {"optimizers": _optimizers_of(self._trainer), "schedulers": self._schedulers}
            self._described = present, json.dumps(described)
        return self._described[1]

    def take(self, description: str | None, callbacks: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Record the optimizer description (if any), callback states, and metadata of the loaded checkpoint."""
        self._began = facts.get(HYPERPARAMETERS, {})
        if description is not None:
            saved = json.loads(description)
            self._saved = [_Optimizer(*optimizer) for optimizer in saved["optimizers"]]
            self._saved_schedulers = saved["schedulers"]
        if self.misfits is not None:
            states = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
            new = [key for key, state in states.items() if state and key not in callbacks]
            self.misfits.missing(f"callbacks/{key}" for key in new)
            self.misfits.surplus(f"callbacks/{key}" for key in callbacks if key not in states)

    # ---- hooks, in the order in which a trainer loads

    def _load_model(self, original: Callable[..., Any], checkpoint: _State, *args: Any, **kwargs: Any) -> None:
        if is_search_file(self._trainer.ckpt_path):
            original(checkpoint, *args, **kwargs)
            return
        self._without_average(checkpoint)
        if self._trainer.precision_plugin.precision == "64-true":
            # Lightning converts the module to float64 only after loading, so the weights would be rounded to float32.
            self._trainer.precision_plugin.convert_module(self._trainer.lightning_module)
        weights = checkpoint[_WEIGHTS if _WEIGHTS in checkpoint else "state_dict"]
        self._shapes = {
            unwrapped_name(name): value.shape for name, value in weights.items() if isinstance(value, torch.Tensor)
        }
        if self.misfits is None:
            with _advice():
                original(checkpoint, *args, **kwargs)
            return
        module = self._trainer.lightning_module
        live, saved = module.state_dict(), checkpoint["state_dict"]
        other = {name: line for name in saved if (line := _shape_difference(name, saved[name], live.get(name)))}
        result = module.load_state_dict({name: saved[name] for name in saved if name not in other}, strict=False)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        trained |= {unwrapped_name(name) for name in trained}
        # torch reports missing keys with wrapper prefixes, but its state dicts omit these prefixes.
        missing = [name if name in live else unwrapped_name(name) for name in result.missing_keys]
        for name in missing:
            if name in other:
                self.misfits.kept[f"state_dict/{name}"] = other[name]
            elif module.strict_loading or name in trained:
                self.misfits.missing([f"state_dict/{name}"])
        if module.strict_loading:
            self.misfits.surplus(f"state_dict/{name}" for name in result.unexpected_keys)
        # The entries must be complete, because callbacks such as WeightAveraging load them again with strict=True.
        live = module.state_dict()
        for part in {"state_dict", _WEIGHTS} & checkpoint.keys():
            saved = checkpoint[part]
            fits = {name for name in live.keys() & saved.keys() if not _shape_difference(name, saved[name], live[name])}
            checkpoint[part] = {name: saved[name] if name in fits else live[name].clone() for name in live}

    def _without_average(self, checkpoint: _State) -> None:
        """If this trainer has no WeightAveraging, reject averaged weights or, with ``misfits``, drop them."""
        if not checkpoint.keys() >= {_WEIGHTS, _AVERAGE} or callbacks_of(self._trainer, "WeightAveraging"):
            return
        if self.misfits is None:
            raise _mismatch(
                f"the checkpoint {self._trainer.ckpt_path} was saved with WeightAveraging, which this trainer does not "
                "have; without it the average would be lost:",
                [f"callbacks: expected {', '.join(checkpoint.get('callbacks', ())) or 'WeightAveraging'}"],
            )
        self.misfits.surplus(["the average of WeightAveraging"])
        del checkpoint[_AVERAGE]
        checkpoint["state_dict"] = checkpoint.pop(_WEIGHTS)

    @contextlib.contextmanager
    def loading(self, checkpoint: _State) -> Iterator[None]:
        """While a checkpoint is being loaded, replace its optimizer and scheduler states with states that fit."""
        if self._loads_by_name or not checkpoint.keys() >= {"optimizer_states", "lr_schedulers"}:
            yield
            return
        checkpoint["optimizer_states"] = self._optimizer_states(checkpoint["optimizer_states"])
        if not callbacks_of(self._trainer, "StochasticWeightAveraging"):
            # With StochasticWeightAveraging, the trainer has no schedulers until the callback has restored its state.
            checkpoint["lr_schedulers"] = self._scheduler_states(checkpoint["lr_schedulers"])
        with _advice() if self.misfits is None else contextlib.nullcontext():
            yield
        for optimizer, state in zip(self._trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            _set_dtypes(optimizer, state)

    def _optimizer_states(self, states: Sequence[_State]) -> list[_State]:
        optimizers = self._trainer.strategy.optimizers
        present, described = _optimizers_of(self._trainer), len(self._saved) == len(states)
        saved = self._saved if described else [_Optimizer("", None) for _ in states]
        if self.misfits is None:
            pairs = zip(optimizers, states, strict=False)
            options = [_first_options(live.param_groups, state.get("param_groups", ())) for live, state in pairs]
            self._check("optimizer", optimizers, [optimizer.class_name for optimizer in saved], options)
            return [_ordered(index, *entry) for index, entry in enumerate(zip(states, saved, present, strict=True))]
        if not any(optimizer.param_groups for optimizer in optimizers):
            return [optimizer.state_dict() for optimizer in optimizers]
        origins, taken = _matched(present, saved), []
        for index, origin in enumerate(origins):
            if origin is not None and hasattr(optimizers[index], "consolidate_state_dict"):
                taken.append(states[origin])  # such an optimizer shards the complete state itself
            elif origin is None:
                self.misfits.missing([f"optimizer_states/{index}"])
                taken.append(optimizers[index].state_dict())
            else:
                taken.append(self._fitting(index, present[index], states[origin], saved[origin]))
        self.misfits.surplus(f"optimizer_states/{index}" for index in range(len(saved)) if index not in origins)
        return taken

    def _fitting(self, index: int, live: _Optimizer, state: _State, saved: _Optimizer) -> _State:
        """Return the state for one optimizer, combining the saved state that fits with fresh state for the rest."""
        assert self.misfits is not None
        optimizer = self._trainer.strategy.optimizers[index]
        fresh: _State = optimizer.state_dict()
        path, groups = f"optimizer_states/{index}", fresh["param_groups"]
        if not _related(optimizer, saved.class_name, _first_options(groups, state["param_groups"])):
            self.misfits.differs(path, live.class_name, saved.class_name)
            return fresh
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        flat = list(chain.from_iterable(live.names or ()))
        if saved.names is None:
            if not _suit_by_order(groups, parameters, state):
                why = "the checkpoint does not name the parameters, and not all of them fit"
                self.misfits.kept[path] = f"{path}: {why}"
                return fresh
            saved = live
        positions = saved.positions()
        entries: dict[int, Any] = dict(fresh["state"])
        exact = saved.names == live.names and all(
            name is None or self._shapes.get(name, value.shape) == value.shape
            for name, value in zip(flat, parameters, strict=True)
        )
        for number, (name, value) in enumerate(zip(flat, parameters, strict=True)):
            origin = number if exact else positions.get(name or "")
            if origin is None:
                self.misfits.missing([f"{path}/{name}"])
            elif (entry := state["state"].get(origin)) is not None:
                shape = self._shapes.get(name or "", value.shape)
                if exact or (shape == value.shape and _suits(entry, value)):
                    entries[number] = entry
                else:
                    self.misfits.differs(f"{path}/{name}", f"shape {[*value.shape]}", [*shape])
        self.misfits.surplus(f"{path}/{name}" for name in positions if name not in flat)
        others = {index: {*group} - {None} for index, group in enumerate(saved.names or ())}
        origins = [_closest(index, {*group}, others) for index, group in enumerate(live.names or ())]
        self._groups[index] = len(saved.names or ()), origins
        options = []
        for number, (group, source) in enumerate(zip(groups, origins, strict=True)):
            if source is None:
                self.misfits.missing([f"{path}/param_groups/{number}"])
            restored = {} if source is None else state["param_groups"][source]
            options.append({**group, **{name: restored[name] for name in restored if name not in _NO_OPTIONS}})
        return {"state": entries, "param_groups": options}

    def _scheduler_states(self, states: Sequence[_State]) -> list[_State]:
        schedulers = [config.scheduler for config in self._trainer.strategy.lr_scheduler_configs]
        saved = [""] * len(schedulers) if self._saved_schedulers is None else self._saved_schedulers
        if self.misfits is None:
            self._check("scheduler", schedulers, saved)
            return [*states]
        saved = [*saved, *[""] * len(states)]
        optimizers, taken = self._trainer.strategy.optimizers, []
        for index, scheduler in enumerate(schedulers):
            fresh, path = scheduler.state_dict(), f"lr_schedulers/{index}"
            if index >= len(states):
                self.misfits.missing([path])
                taken.append(fresh)
            elif not _related(scheduler, saved[index]):
                more = ", whose step count it takes over"
                self.misfits.differs(path, class_name(scheduler), saved[index], more)
                counted = {name: states[index][name] for name in _COUNTERS if name in states[index] and name in fresh}
                taken.append({**fresh, **counted})
            else:
                number = next((at for at, optimizer in enumerate(optimizers) if optimizer is scheduler.optimizer), -1)
                taken.append(_by_group(states[index], fresh, *self._groups.get(number, (0, []))))
        self.misfits.surplus(f"lr_schedulers/{index}" for index in range(len(schedulers), len(states)))
        return taken

    def _optimizing(self) -> dict[str, Any]:
        strategy = self._trainer.strategy
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        return {
            **{f"optimizer_{index}": optimizer for index, optimizer in enumerate(strategy.optimizers)},
            **{f"scheduler_{index}": scheduler for index, scheduler in enumerate(schedulers)},
        }

    def _check(self, role: str, live: Sequence[Any], saved: Sequence[str], options: Sequence[_Options] = ()) -> None:
        """Raise TreeMismatchError unless the program's objects match those in the checkpoint one to one."""
        lines = [
            difference(f"{role} {index}", class_name(present), saved_class)
            for index, (present, saved_class) in enumerate(zip(live, saved, strict=False))
            if not _related(present, saved_class, options[index] if options else None)
        ]
        if len(live) != len(saved):
            lines.append(f"expected {len(live)} {role}s (program), found {len(saved)} (checkpoint)")
        if lines:
            raise _mismatch(f"{self._trainer.ckpt_path}: the saved {role}s do not match the program's:", lines)


def _set_dtypes(optimizer: Any, state: _State) -> None:
    """Restore the saved dtypes of an optimizer's state, because torch casts it to the parameter dtypes on load."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in state.get("param_groups", ()))
    for parameter, number in zip(parameters, numbers, strict=False):
        if parameter in optimizer.state and number in state["state"]:
            optimizer.state[parameter] = as_saved(optimizer.state[parameter], state["state"][number])


def _ordered(index: int, state: _State, saved: _Optimizer, live: _Optimizer) -> _State:
    """Reorder a saved state to match the current parameter order; raise if parameters have moved between groups."""
    if saved.names is None or saved.names == live.names:
        return state
    positions, others = saved.positions(), live.positions()
    if positions.keys() != others.keys() or len(positions) != sum(map(len, saved.names)):
        return state  # The names differ, so keep the order; torch checks only the number of parameters.
    if [{*group} for group in saved.names] != [{*group} for group in live.names or ()]:
        raise _mismatch(
            "the optimizer's parameters are grouped differently than in the checkpoint:",
            [difference(f"optimizer {index}", _sizes(live.names or []), _sizes(saved.names))],
        )
    entries = state["state"]
    return {**state, "state": {others[name]: entries[at] for name, at in positions.items() if at in entries}}


def _matched(live: Sequence[_Optimizer], saved: Sequence[_Optimizer]) -> list[int | None]:
    """For each optimizer, return the index of the saved optimizer that shares the most parameters with it, or None."""
    origins: list[int | None] = []
    for index, optimizer in enumerate(live):
        free = {other: saved[other].positions().keys() for other in range(len(saved)) if other not in origins}
        unnamed = index in free and saved[index].names is None
        origins.append(index if unnamed else _closest(index, optimizer.positions().keys(), free))
    return origins


def _closest(index: int, names: AbstractSet[Any], others: Mapping[int, AbstractSet[Any]]) -> int | None:
    """Return the index of the set that shares the most names, preferring ``index`` in a tie; None if none is shared."""
    shared = {other: len(names & its_names) for other, its_names in others.items()}
    best = max(shared, key=lambda other: (shared[other], other == index), default=None)
    return best if best is not None and shared[best] else None


def _suit_by_order(groups: Sequence[_State], parameters: Sequence[Any], state: _State) -> bool:
    """Return whether unnamed parameters can be matched by position, judging by their shapes."""
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["param_groups"]]:
        return False
    return all(_suits(state["state"].get(number, {}), value) for number, value in enumerate(parameters))


def _suits(entry: Any, parameter: Any) -> bool:
    """Return whether an optimizer state entry can belong to a parameter, judging by its shape."""
    if isinstance(entry, torch.Tensor):
        shape = tuple(entry.shape)
        same = len(shape) == parameter.dim() and all(a in (1, b) for a, b in zip(shape, parameter.shape, strict=True))
        return entry.numel() == 1 or same
    if isinstance(entry, Mapping):
        return all(_suits(value, parameter) for value in entry.values())
    return not isinstance(entry, list | tuple) or all(_suits(value, parameter) for value in entry)


def _by_group(saved: Any, fresh: Any, count: int, origins: Sequence[int | None]) -> Any:
    """Reorder the per-group values in a scheduler's state to the current order of the param groups."""
    if isinstance(saved, Mapping) and isinstance(fresh, Mapping):
        return {name: _by_group(value, fresh.get(name), count, origins) for name, value in saved.items()}
    if not isinstance(saved, list) or not isinstance(fresh, list):
        return saved
    if any(isinstance(value, Mapping) for value in fresh) and len(saved) == len(fresh):  # states of nested schedulers
        return [_by_group(*pair, count, origins) for pair in zip(saved, fresh, strict=True)]
    if len(saved) == count and len(fresh) == len(origins):
        return [value if at is None else saved[at] for value, at in zip(fresh, origins, strict=True)]
    return saved


def _shape_difference(name: str, saved: Any, live: Any) -> str | None:
    """Describe the shape mismatch if torch would refuse to load a saved tensor; otherwise, return None."""
    if not isinstance(saved, torch.Tensor) or not isinstance(live, torch.Tensor):
        return None
    if torch.nn.parameter.is_lazy(live) or saved.shape == live.shape:
        return None
    return difference(f"state_dict/{name}", f"shape {[*live.shape]}", [*saved.shape])


def _related(live: Any, saved: str, options: _Options | None = None) -> bool:
    """Return whether an object can load state saved from the class ``saved``, judging by class or option names."""
    # Don't compare names exactly: the program may have moved its classes to other modules, or renamed its schedulers.
    of_torch = [name.startswith("torch.") for name in (class_name(live), saved)]
    if is_kin(type(live), saved) or (options is None and not any(of_torch)):
        return True
    return all(of_torch) and options is not None and options[0].keys() == options[1].keys()


def _first_options(*groups: Sequence[_State]) -> tuple[_State, _State]:
    omitted = (*_NO_OPTIONS, "initial_lr")  # schedulers add initial_lr
    firsts = (next(iter(of_optimizer), {}) for of_optimizer in groups)  # Lightning's mock optimizer has no groups
    first, other = ({name: group[name] for name in group if name not in omitted} for group in firsts)
    return first, other


def _sizes(groups: _Names) -> str:
    return f"groups of {', '.join(str(len(group)) for group in groups)} parameters"


def _mismatch(headline: str, lines: list[str]) -> TreeMismatchError:
    error = TreeMismatchError(headline, lines)
    error.add_note(_CHANGED)
    return error


@contextlib.contextmanager
def _advice() -> Iterator[None]:
    """Add advice to the errors that torch raises if the state does not match."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        error.add_note(_CHANGED)
        raise
