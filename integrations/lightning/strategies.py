"""Save and load one checkpoint from several processes under the Lightning strategies that the callback supports.

Under DDP, parameters and optimizer states are identical in all processes; under FSDP2 and tensor parallelism, each
process holds its shards as DTensors. In both cases, each process saves parameters and optimizer states from its own
memory. All other state, such as buffers, callbacks, and hyper-parameters, may differ between processes. Only process 0
saves it, as in Lightning's own checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ...engine.arrays import SharedReads
from ...engine.distributed import ProcessGroup
from ...engine.errors import StateError
from ...engine.format import FileRecord
from ...engine.handlers import PyTreeCheckpointHandler
from ...engine.pytree import flatten, unwrapped_name
from ...engine.storage import Location
from .private_api import averages_models, class_names, gathers_in_one_process

_SAVE_BY_THEMSELVES = {"FSDPStrategy", "DeepSpeedStrategy"}
_OWN_PROCESSES = {"XLAStrategy"}  # strategies that derive from DDPStrategy, but do not use torch.distributed
_SHARDED = "ModelParallelStrategy"

_OPTIMIZERS = "optimizer_states"
_LARGE = 1 << 20  # minimum bytes in a tensor broadcast by torch.distributed; smaller tensors are sent through the store

Path = tuple[Any, ...]


def check_strategy(trainer: Any) -> None:
    """Raise StateError if the callback cannot save the state of the trainer's strategy."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    works = "It works with one process, and with several under strategy='ddp' or ModelParallelStrategy (FSDP2)"
    if not can_save(strategy):
        raise StateError(
            f"CheckpointCallback cannot save the state of {name} in its {strategy.world_size} process(es). {works}; "
            f"ModelCheckpoint saves {name}"
        )
    if is_sharded(strategy) and gathers_in_one_process(strategy):
        raise StateError(
            f"{name}(save_distributed_checkpoint=False) gathers everything in one process, which the callback does "
            "not need: leave it out. A checkpoint saved by several processes loads in any number of them"
        )
    if averages_models(strategy):
        raise StateError(
            f"CheckpointCallback cannot save a {name} that averages models (PostLocalSGDState), because each process "
            f"has its own parameters between two averages. {works}"
        )


def can_save(strategy: Any) -> bool:
    """Return whether the callback can save a strategy's state from all of its processes."""
    names = class_names(strategy)
    if names & _SAVE_BY_THEMSELVES:
        return False
    return strategy.world_size == 1 or bool(names & {"DDPStrategy", _SHARDED} and not names & _OWN_PROCESSES)


def is_sharded(strategy: Any) -> bool:
    """Return whether the strategy shards parameters as DTensors, and thus saves and loads them itself."""
    return _SHARDED in class_names(strategy)


def own_buffers(module: Any) -> dict[str, Any]:
    """Return this process's buffers by name, excluding DTensors."""
    return {name: value for name, value in module.named_buffers() if not hasattr(value, "placements")}


def live_names(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Map each saved name to its current name. The names differ if only one of the runs compiles a submodule."""
    before, now = list(saved), list(live)
    names = {unwrapped_name(name): name for name in now}
    if len(names) != len(now) or len({*map(unwrapped_name, before)}) != len(before):
        return {name: name for name in before}  # ambiguous, because the program's own names contain wrapper prefixes
    return {name: names.get(unwrapped_name(name), name) for name in before}


def named_as(module: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Rename the module state entries in a Lightning checkpoint dictionary to match the module's current names."""
    for entry in {"state_dict", "current_model_state"} & checkpoint.keys():
        state = checkpoint[entry]
        names = live_names(state, module.state_dict(keep_vars=True))
        if all(name == live for name, live in names.items()):
            continue
        checkpoint[entry] = renamed = type(state)((names[name], value) for name, value in state.items())
        if (versions := getattr(state, "_metadata", None)) is not None:
            by_name = {unwrapped_name(f"{name}."): version for name, version in versions.items()}
            parts = {name: unwrapped_name(f"{name}.") for name, _ in module.named_modules()}
            renamed._metadata = {name: by_name[part] for name, part in parts.items() if part in by_name}
    return checkpoint


def replicas(strategy: Any) -> int:
    """Return the number of data-parallel replicas, among which the training data is divided."""
    return 1 if strategy.world_size == 1 else int(strategy.distributed_sampler_kwargs["num_replicas"])


# ---- saving together


@dataclass(frozen=True, slots=True)
class _FromMemory:
    """A placeholder for a tensor that each process reads from its own memory."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A placeholder for a large tensor that process 0 broadcasts after the tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedState:
    """Broadcasts the tree of process 0 to the other processes, so that they all save the same leaves."""

    def __init__(self, strategy: Any) -> None:
        module = strategy.lightning_module
        self._channel = torch.device("cpu") if torch.distributed.get_backend() == "gloo" else strategy.root_device
        self._large: list[torch.Tensor] = []
        self._parameters = {unwrapped_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        # Exclude optimizers that shard their own state, because these optimizers return it only in process 0.
        self._optimizers = {
            index
            for index, optimizer in enumerate(strategy.optimizers)
            if not hasattr(getattr(optimizer, "_optimizer", optimizer), "consolidate_state_dict")
        }

    def tree(
        self, processes: ProcessGroup, checkpoint: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the tree that this process saves. Its large tensors are empty until all processes call ``fill``."""
        group = processes.rendezvous("what process 0 saves")
        assert group is not None
        with contextlib.closing(group):
            if processes.is_primary:
                tree = make()
                group.broadcast("outline", pickle.dumps(mapped(self._sent, tree, None)), processes.timeout)
                return tree
            received = group.broadcast("outline", None, processes.timeout)
        filled: dict[str, Any] = mapped(self._filled, pickle.loads(received), checkpoint)
        return filled

    def fill(self) -> None:
        """Broadcast the large tensors of process 0; a collective call."""
        for tensor in self._large:
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)

    def _is_in_every_process(self, path: Path, value: torch.Tensor) -> bool:
        if hasattr(value, "placements"):  # each process has its own shard of a DTensor
            return True
        if path[0] == "state_dict":
            return len(path) == 2 and unwrapped_name(path[1]) in self._parameters
        return path[0] == _OPTIMIZERS and len(path) > 1 and path[1] in self._optimizers

    def _sent(self, value: Any, path: Path, _: Any) -> Any:
        """Return what process 0 sends: the leaf, or a placeholder for a tensor that is large or in all processes."""
        if not isinstance(value, torch.Tensor):
            return value
        if self._is_in_every_process(path, value):
            return _FromMemory()
        if value.nbytes < _LARGE:
            return value.cpu().clone()  # clone, because pickling a view would write its whole storage
        self._large.append(value.detach().to(self._channel).contiguous())
        return _Sent(tuple(value.shape), value.dtype)

    def _filled(self, value: Any, path: Path, here: Any) -> Any:
        """Replace a placeholder from process 0 with a tensor; ``here`` is this process's value at the same path."""
        if isinstance(value, _Sent):
            self._large.append(torch.empty(value.shape, dtype=value.dtype, device=self._channel))
            return self._large[-1]
        if not isinstance(value, _FromMemory):
            return value
        if not isinstance(here, torch.Tensor):
            raise StateError(
                f"{'/'.join(map(str, path))}: process 0 saves a tensor, but this process has {type(here).__qualname__} "
                "there; under this strategy all processes must hold the same parameters and optimizer states"
            )
        return here.detach()


def mapped(function: Callable[[Any, Path, Any], Any], tree: Any, other: Any, path: Path = ()) -> Any:
    """Replace each leaf with ``function(leaf, path, value)``; ``value`` is at the same path in the tree ``other``."""
    if isinstance(tree, dict):
        others = other if isinstance(other, dict) else {}
        made = copy.copy(tree)  # a copy keeps the attributes of a state dict, such as _metadata
        made.update({key: mapped(function, child, others.get(key), (*path, key)) for key, child in tree.items()})
        return made
    if type(tree) in (list, tuple):
        parts = other if isinstance(other, list | tuple) and len(other) == len(tree) else [None] * len(tree)
        return type(tree)([mapped(function, child, parts[index], (*path, index)) for index, child in enumerate(tree)])
    return function(tree, path, other)


# ---- loading in place


class StateHandler(PyTreeCheckpointHandler):
    """Restores each entry to match its template; an entry without a template is restored as it was saved."""

    shares_reads = True

    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        files: Mapping[str, FileRecord] | None = None,
        shared: SharedReads | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read a tree. ``item`` maps entries to templates, or to None to skip the entry; ``item=None`` reads all."""
        if item is None:
            return super().restore(directory, files=files, shared=shared, **kwargs)
        outline = super().structure(directory, files=files)
        rest = {name: value for name, value in outline.items() if name not in item}
        chosen = _patterns(name for name, value in rest.items() if flatten(value).values)
        as_they_are = super().restore(directory, files=files, select=chosen, shared=shared)
        wanted = {name: template for name, template in item.items() if template is not None}
        names = _names_by_index(wanted.get(_OPTIMIZERS) or (), outline.get(_OPTIMIZERS) or ())
        if names:
            indices = [{name: index for index, name in by_index.items()} for by_index in names]
            wanted[_OPTIMIZERS] = _renamed(wanted[_OPTIMIZERS], indices)
        parts = super().restore(directory, wanted, files=files, select=_patterns(wanted), shared=shared)
        if names:
            parts[_OPTIMIZERS] = _renamed(parts[_OPTIMIZERS], names)
        # Add back containers without leaves, because a selection omits them.
        return {**mapped(lambda _leaf, _path, saved: saved, rest, as_they_are), **parts}


class ShardedState:
    """The module and optimizer state that a strategy shards across processes."""

    def __init__(self, strategy: Any) -> None:
        self._module = strategy.model
        self._optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in strategy.optimizers]

    def template(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        states = [get_optimizer_state_dict(self._module, optimizer) for optimizer in self._optimizers]
        return {"state_dict": get_model_state_dict(self._module), _OPTIMIZERS: states or None}

    def load(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Update the module and the optimizers from a checkpoint that was restored with :meth:`template`."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(strict=strict)
        set_model_state_dict(self._module, dict(checkpoint["state_dict"]), options=options)
        states = checkpoint.get(_OPTIMIZERS, []) if self._optimizers else []
        for optimizer, state in zip(self._optimizers, states, strict=True):
            set_optimizer_state_dict(self._module, optimizer, state, options=options)
            for name, parameter in self._module.named_parameters():
                if (saved := state["state"].get(unwrapped_name(name))) is not None and parameter in optimizer.state:
                    optimizer.state[parameter] = as_saved(optimizer.state[parameter], saved)


def as_saved(loaded: Any, saved: Any) -> Any:
    """Return loaded optimizer state in its saved dtypes, because torch casts it to the parameter dtypes on load."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        if loaded.dtype == saved.dtype or loaded.shape != saved.shape:
            return loaded
        moved = saved.to(loaded.device)
        return moved if bool((moved.to(loaded.dtype) == loaded).logical_or(loaded != loaded).all()) else loaded
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: as_saved(value, saved.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(as_saved(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


def _names_by_index(templates: Sequence[Any], saved: Sequence[Any]) -> list[dict[int, str]]:
    """Return a mapping from index to parameter name for each optimizer, or [] if the state was saved by name."""
    if not templates or not any(isinstance(key, int) for state in saved for key in state["state"]):
        return []
    return [
        dict(enumerate(chain.from_iterable(group["params"] for group in state["param_groups"]))) for state in templates
    ]


def _renamed(states: Sequence[Any], keys: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Return the optimizer states with each parameter key replaced by its value in ``keys``."""
    return [
        {
            "state": {key[name]: moments for name, moments in state["state"].items()},
            "param_groups": [
                {**group, "params": [key[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }
        for state, key in zip(states, keys, strict=True)
    ]


def _patterns(names: Iterable[str]) -> list[str]:
    return [f"{glob.escape(name)}/**" for name in names]
