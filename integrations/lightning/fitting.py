"""How a checkpoint restores a module, its optimizers and schedulers, also those of a program that has changed.

torch numbers the parameters of an optimizer by their order. A checkpoint of holdfast also stores their names, so that
the state of a parameter follows it even if the order of the parameters has changed.
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
from ..loop import HYPERPARAMETERS, Hyperparameters, StartValues, StateAdapter
from .private_api import LoopHooks, callbacks_of, is_search_file
from .strategies import as_saved, is_sharded

_CHANGED = (
    "A run resumes with the model, the optimizers and the schedules that it had, or not at all. partial='initialize' "
    "restores what fits, and keeps the rest as it was initialized. To begin another run with these weights, choose "
    "another directory, and name this one with init_from="
)
# Entries that WeightAveraging adds to a checkpoint, in which ``state_dict`` is the average.
_WEIGHTS, _AVERAGE = "current_model_state", "averaging_state"
_COUNTERS = ("last_epoch", "_step_count")  # Every schedule has these counters.
_NO_OPTIONS = ("params", "param_names")  # entries of a group that are no options

_Names = list[list[str | None]]
"""The names of the parameters in each group of an optimizer; None for one that the module does not have."""
_State = dict[str, Any]
_Options = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The options of a group, in the program and in the checkpoint."""


class _Optimizer(NamedTuple):
    """The class of an optimizer, and the names of its parameters; None if the checkpoint does not have them."""

    kind: str
    names: _Names | None

    def positions(self) -> dict[str, int]:
        flat = enumerate(chain.from_iterable(self.names or ()))
        return {name: index for index, name in flat if name is not None}


def _optimizers_of(trainer: Any) -> list[_Optimizer]:
    names = {id(one): unwrapped_name(name) for name, one in trainer.lightning_module.named_parameters()}
    return [
        _Optimizer(class_name(one), [[names.get(id(value)) for value in group["params"]] for group in one.param_groups])
        for one in trainer.strategy.optimizers
    ]


class Fitting:
    """Restores the objects of one ``fit`` from a checkpoint: all of it, or with ``misfits`` what fits."""

    def __init__(self, trainer: Any, misfits: Misfits | None, counting: str, hooks: LoopHooks) -> None:
        self.misfits = misfits
        self._trainer = trainer
        self._counting = counting  # whose hyperparameters count in a resumed run
        self._saved: list[_Optimizer] = []  # of the checkpoint; files of Lightning do not describe them
        self._saved_schedulers: list[str] | None = None  # their classes when training began
        self._shapes: dict[str, torch.Size] = {}  # the shapes of the weights in the checkpoint
        # By optimizer, of those that are restored in parts: how many groups were saved, and the origins of its own.
        self._groups: dict[int, tuple[int, list[int | None]]] = {}
        self._described: tuple[list[Any], str] | None = None
        self._schedulers: list[str] = []
        self._hyperparameters: Hyperparameters | None = None
        self._start: StartValues | None = None
        self._began: Mapping[str, Any] = {}  # the start values of hyperparameters that the run has changed
        self._is_resumed = False
        self._loads_by_name = is_sharded(trainer.strategy)  # Such a strategy itself does it.
        if not self._loads_by_name:
            hooks.place(trainer.strategy, "load_model_state_dict", self._load_model)

    def note_hyperparameters(self) -> None:
        """Note what the program has set, before the restore replaces it."""
        self._hyperparameters = Hyperparameters(StateAdapter(), (), self._optimizing())

    def begin(self) -> None:
        """Note the schedulers, which callbacks may change; in a resumed run, set the hyperparameters that count."""
        if self._hyperparameters is not None and self._is_resumed:
            shown = self._trainer.is_global_zero
            self._hyperparameters.settle((), self._optimizing(), self._counting, shown=shown, began=self._began)
        began = self._began if self._counting == "saved" else {}
        self._start = StartValues(StateAdapter(), (), self._optimizing(), began)
        self._schedulers = [class_name(config.scheduler) for config in self._trainer.strategy.lr_scheduler_configs]

    def facts(self) -> dict[str, Any] | None:
        """Return the metadata of a step: the start values of hyperparameters that the run has changed by itself."""
        changed = {} if self._start is None else self._start.changed(())
        return {HYPERPARAMETERS: changed} if changed else None

    def description(self) -> str:
        """Return the description of optimizers and schedulers; it is computed only when they have changed."""
        optimizers = self._trainer.strategy.optimizers
        known = [(type(one), [[*map(id, group["params"])] for group in one.param_groups]) for one in optimizers]
        if self._described is None or self._described[0] != known:
            described = {"optimizers": _optimizers_of(self._trainer), "schedulers": self._schedulers}
            self._described = known, json.dumps(described)
        return self._described[1]

    def take(self, description: str | None, callbacks: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Note what the loaded checkpoint has: its description, if any, its states of callbacks, and its metadata."""
        self._is_resumed = True
        self._began = facts.get(HYPERPARAMETERS, {})
        if description is not None:
            found = json.loads(description)
            self._saved, self._saved_schedulers = [_Optimizer(*one) for one in found["optimizers"]], found["schedulers"]
        if self.misfits is not None:
            states = {one.state_key: one.state_dict() for one in self._trainer.callbacks}
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
            # Lightning loads before it converts the module to float64, so that float32 would round the weights.
            self._trainer.precision_plugin.convert_module(self._trainer.lightning_module)
        weights = checkpoint[_WEIGHTS if _WEIGHTS in checkpoint else "state_dict"]
        self._shapes = {
            unwrapped_name(name): value.shape for name, value in weights.items() if isinstance(value, torch.Tensor)
        }
        if self.misfits is None:
            with _noted():
                original(checkpoint, *args, **kwargs)
            return
        module = self._trainer.lightning_module
        live, saved = module.state_dict(), checkpoint["state_dict"]
        other = {name: line for name in saved if (line := _differing(name, saved[name], live.get(name)))}
        result = module.load_state_dict({name: saved[name] for name in saved if name not in other}, strict=False)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        trained |= {unwrapped_name(name) for name in trained}
        # The names that torch reports include wrappers that its state dicts leave out.
        missing = [name if name in live else unwrapped_name(name) for name in result.missing_keys]
        for name in missing:
            if name in other:
                self.misfits.kept[f"state_dict/{name}"] = other[name]
            elif module.strict_loading or name in trained:
                self.misfits.missing([f"state_dict/{name}"])
        if module.strict_loading:
            self.misfits.surplus(f"state_dict/{name}" for name in result.unexpected_keys)
        # Callbacks such as WeightAveraging load these again, strictly.
        live = module.state_dict()
        for part in {"state_dict", _WEIGHTS} & checkpoint.keys():
            saved = checkpoint[part]
            fits = {name for name in live.keys() & saved.keys() if not _differing(name, saved[name], live[name])}
            checkpoint[part] = {name: saved[name] if name in fits else live[name].clone() for name in live}

    def _without_average(self, checkpoint: _State) -> None:
        """Drop an average, or refuse it, that a trainer without WeightAveraging would take for the weights."""
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
        """Give a trainer, which loads optimizers and schedulers meanwhile, what fits those of the program."""
        if self._loads_by_name or not checkpoint.keys() >= {"optimizer_states", "lr_schedulers"}:
            yield
            return
        checkpoint["optimizer_states"] = self._optimizer_states(checkpoint["optimizer_states"])
        if not callbacks_of(self._trainer, "StochasticWeightAveraging"):
            # That callback takes the schedulers away until it has found its own position.
            checkpoint["lr_schedulers"] = self._scheduler_states(checkpoint["lr_schedulers"])
        with _noted() if self.misfits is None else contextlib.nullcontext():
            yield
        for optimizer, state in zip(self._trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            _set_dtypes(optimizer, state)

    def _optimizer_states(self, states: Sequence[_State]) -> list[_State]:
        optimizers = self._trainer.strategy.optimizers
        live, described = _optimizers_of(self._trainer), len(self._saved) == len(states)
        saved = self._saved if described else [_Optimizer("", None) for _ in states]
        if self.misfits is None:
            pairs = zip(optimizers, states, strict=False)
            options = [_first_options(one.param_groups, state.get("param_groups", ())) for one, state in pairs]
            self._check("optimizer", optimizers, [one.kind for one in saved], options)
            return [_ordered(index, *one) for index, one in enumerate(zip(states, saved, live, strict=True))]
        if not any(one.param_groups for one in optimizers):
            return [one.state_dict() for one in optimizers]
        origins, taken = _matched(live, saved), []
        for index, origin in enumerate(origins):
            if origin is not None and hasattr(optimizers[index], "consolidate_state_dict"):
                taken.append(states[origin])  # This optimizer itself divides its state among processes.
            elif origin is None:
                self.misfits.missing([f"optimizer_states/{index}"])
                taken.append(optimizers[index].state_dict())
            else:
                taken.append(self._fitting(index, live[index], states[origin], saved[origin]))
        self.misfits.surplus(f"optimizer_states/{index}" for index in range(len(saved)) if index not in origins)
        return taken

    def _fitting(self, index: int, live: _Optimizer, state: _State, saved: _Optimizer) -> _State:
        """Return the state of one optimizer: the parts of the saved state that fit, otherwise the fresh state."""
        assert self.misfits is not None
        optimizer = self._trainer.strategy.optimizers[index]
        fresh: _State = optimizer.state_dict()
        place, groups = f"optimizer_states/{index}", fresh["param_groups"]
        if not _related(optimizer, saved.kind, _first_options(groups, state["param_groups"])):
            self.misfits.differs(place, live.kind, saved.kind)
            return fresh
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        flat = list(chain.from_iterable(live.names or ()))
        if saved.names is None:
            if not _suit_by_order(groups, parameters, state):
                why = "the checkpoint does not name the parameters, and they do not all fit"
                self.misfits.kept[place] = f"{place}: {why}"
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
                self.misfits.missing([f"{place}/{name}"])
            elif (entry := state["state"].get(origin)) is not None:
                shape = self._shapes.get(name or "", value.shape)
                if exact or (shape == value.shape and _suits(entry, value)):
                    entries[number] = entry
                else:
                    self.misfits.differs(f"{place}/{name}", f"shape {_shape(value.shape)}", _shape(shape))
        self.misfits.surplus(f"{place}/{name}" for name in positions if name not in flat)
        origins = _origins_of_groups(live.names or [], saved.names or [])
        self._groups[index] = len(saved.names or ()), origins
        options = []
        for number, (group, source) in enumerate(zip(groups, origins, strict=True)):
            if source is None:
                self.misfits.missing([f"{place}/param_groups/{number}"])
            found = {} if source is None else state["param_groups"][source]
            options.append({**group, **{name: found[name] for name in found if name not in _NO_OPTIONS}})
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
            fresh, place = scheduler.state_dict(), f"lr_schedulers/{index}"
            if index >= len(states):
                self.misfits.missing([place])
                taken.append(fresh)
            elif not _related(scheduler, saved[index]):
                more = ", whose count of steps it takes"
                self.misfits.differs(place, class_name(scheduler), saved[index], more)
                counted = {name: states[index][name] for name in _COUNTERS if name in states[index] and name in fresh}
                taken.append({**fresh, **counted})
            else:
                of = next((one for one, optimizer in enumerate(optimizers) if optimizer is scheduler.optimizer), -1)
                taken.append(_by_group(states[index], fresh, *self._groups.get(of, (0, []))))
        self.misfits.surplus(f"lr_schedulers/{index}" for index in range(len(schedulers), len(states)))
        return taken

    def _optimizing(self) -> dict[str, Any]:
        """Return the optimizers and their schedulers by name."""
        strategy = self._trainer.strategy
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        return {
            **{f"optimizer_{index}": one for index, one in enumerate(strategy.optimizers)},
            **{f"scheduler_{index}": one for index, one in enumerate(schedulers)},
        }

    def _check(self, what: str, live: Sequence[Any], saved: Sequence[str], options: Sequence[_Options] = ()) -> None:
        """Raise TreeMismatchError unless each object of the program matches one of the checkpoint."""
        lines = [
            difference(f"{what} {index}", class_name(one), kind)
            for index, (one, kind) in enumerate(zip(live, saved, strict=False))
            if not _related(one, kind, options[index] if options else None)
        ]
        if len(live) != len(saved):
            lines.append(f"expected {len(live)} {what}s (program), found {len(saved)} (checkpoint)")
        if lines:
            raise _mismatch(f"{self._trainer.ckpt_path}: the {what}s are not those of the program:", lines)


def _set_dtypes(optimizer: Any, state: _State) -> None:
    """Give the state of an optimizer the dtypes that it had; torch casts to those of the parameters."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in state.get("param_groups", ()))
    for parameter, number in zip(parameters, numbers, strict=False):
        if parameter in optimizer.state and number in state["state"]:
            optimizer.state[parameter] = as_saved(optimizer.state[parameter], state["state"][number])


def _ordered(index: int, state: _State, saved: _Optimizer, live: _Optimizer) -> _State:
    """Return a saved state in the order that the parameters have now; refuse the same parameters in other groups."""
    if saved.names is None or saved.names == live.names:
        return state
    positions, others = saved.positions(), live.positions()
    if positions.keys() != others.keys() or len(positions) != sum(map(len, saved.names)):
        return state  # Parameters were renamed: torch compares their number.
    if [{*group} for group in saved.names] != [{*group} for group in live.names or ()]:
        raise _mismatch(
            "the parameters are in other groups of an optimizer than in the checkpoint:",
            [difference(f"optimizer {index}", _sizes(live.names or []), _sizes(saved.names))],
        )
    entries = state["state"]
    return {**state, "state": {others[name]: entries[at] for name, at in positions.items() if at in entries}}


def _matched(live: Sequence[_Optimizer], saved: Sequence[_Optimizer]) -> list[int | None]:
    """Return for each optimizer the index of the saved one with most of its parameters, None if there is none."""
    found: list[int | None] = []
    for index, one in enumerate(live):
        free = {other: saved[other].positions().keys() for other in range(len(saved)) if other not in found}
        unnamed = index in free and saved[index].names is None
        found.append(index if unnamed else _closest(index, one.positions().keys(), free))
    return found


def _origins_of_groups(live: _Names, saved: _Names) -> list[int | None]:
    """Return for each group the index of the saved one with most of its parameters, None if there is none."""
    others = {index: {*group} - {None} for index, group in enumerate(saved)}
    return [_closest(index, {*group}, others) for index, group in enumerate(live)]


def _closest(index: int, names: AbstractSet[Any], others: Mapping[int, AbstractSet[Any]]) -> int | None:
    """Return the index of the other set that shares most names, ``index`` in a tie; None if no set shares any."""
    shared = {other: len(names & found) for other, found in others.items()}
    best = max(shared, key=lambda other: (shared[other], other == index), default=None)
    return best if best is not None and shared[best] else None


def _suit_by_order(groups: Sequence[_State], parameters: Sequence[Any], state: _State) -> bool:
    """Return whether the shapes permit to take parameters without names in their order."""
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["param_groups"]]:
        return False
    return all(_suits(state["state"].get(number, {}), value) for number, value in enumerate(parameters))


def _suits(entry: Any, parameter: Any) -> bool:
    """Return whether the shapes permit that an optimizer's state of a parameter belongs to this one."""
    if isinstance(entry, torch.Tensor):
        shape = tuple(entry.shape)
        same = len(shape) == parameter.dim() and all(a in (1, b) for a, b in zip(shape, parameter.shape, strict=True))
        return entry.numel() == 1 or same
    if isinstance(entry, Mapping):
        return all(_suits(value, parameter) for value in entry.values())
    return not isinstance(entry, list | tuple) or all(_suits(value, parameter) for value in entry)


def _by_group(saved: Any, fresh: Any, count: int, origins: Sequence[int | None]) -> Any:
    """Return the state of a schedule with its values for the groups of the optimizer in their present order."""
    if isinstance(saved, Mapping) and isinstance(fresh, Mapping):
        return {name: _by_group(value, fresh.get(name), count, origins) for name, value in saved.items()}
    if not isinstance(saved, list) or not isinstance(fresh, list):
        return saved
    if any(isinstance(one, Mapping) for one in fresh) and len(saved) == len(fresh):  # schedules within this one
        return [_by_group(one, other, count, origins) for one, other in zip(saved, fresh, strict=True)]
    if len(saved) == count and len(fresh) == len(origins):
        return [other if at is None else saved[at] for other, at in zip(fresh, origins, strict=True)]
    return saved


def _differing(name: str, saved: Any, live: Any) -> str | None:
    """Return how a value of a module differs from the saved one, as far as torch would refuse it."""
    if not isinstance(saved, torch.Tensor) or not isinstance(live, torch.Tensor):
        return None
    if torch.nn.parameter.is_lazy(live) or saved.shape == live.shape:
        return None
    return difference(f"state_dict/{name}", f"shape {_shape(live.shape)}", _shape(saved.shape))


def _related(live: Any, saved: str, options: _Options | None = None) -> bool:
    """Return whether an object may have a state of the saved class: a related one, or with groups of equal options."""
    # Classes of the program may have been moved, and its schedules renamed.
    of_torch = [name.startswith("torch.") for name in (class_name(live), saved)]
    if is_kin(type(live), saved) or (options is None and not any(of_torch)):
        return True
    return all(of_torch) and options is not None and options[0].keys() == options[1].keys()


def _first_options(*groups: Sequence[_State]) -> tuple[_State, _State]:
    left_out = (*_NO_OPTIONS, "initial_lr")  # A schedule adds the last one.
    firsts = (next(iter(found), {}) for found in groups)  # What Lightning has for no optimizer has no group.
    first, other = ({name: one[name] for name in one if name not in left_out} for one in firsts)
    return first, other


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _sizes(groups: _Names) -> str:
    return f"groups of {', '.join(str(len(group)) for group in groups)} parameters"


def _mismatch(headline: str, lines: list[str]) -> TreeMismatchError:
    error = TreeMismatchError(headline, lines)
    error.add_note(_CHANGED)
    return error


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Add advice to what torch raises for a state that does not fit."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        error.add_note(_CHANGED)
        raise
