"""The state of a run before a validation, for a run that must end during the validation.

During a validation the state is not consistent: callbacks exchange the weights for an average, and modules count, cache
and switch their modes. So a save in a validation needs the state from before it. If hooks of the program run in the
validation, that state is copied; otherwise its tensors are watched, and a validation that changes one runs to its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# The hooks that run before a validation can be left, at the end of one of its batches.
_HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end")
_OF_MODULES = (*_HOOKS, "on_validation_model_eval", "on_save_checkpoint")

_HARMLESS = ("lightning.pytorch.", "pytorch_lightning.", f"{__name__.partition('.')[0]}.")
_EXCHANGES_WEIGHTS = ".weight_averaging"

_OPTIMIZERS = "optimizer_states"  # These are large, and a validation hardly changes them: they are only watched.

_Versions = list[tuple[torch.Tensor, int]]


class StateBeforeValidation:
    """The state of a run at the last point between two batches, during a validation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._copies = Copies()
        self._watched: _Versions = []
        self.checkpoint: dict[str, Any] | None = None
        """Lightning's dictionary from before the validation, if it was copied."""

    def take(self, dump: Callable[[], dict[str, Any]]) -> None:
        """Copy or watch the state when a validation begins; ``dump`` makes Lightning's dictionary."""
        self.checkpoint = None if _is_harmless(self._trainer) else self._copies.of(dump(), without=_OPTIMIZERS)
        self._watched = self._versions()

    def is_intact(self) -> bool:
        """Return whether everything that was not copied is unchanged."""
        now = self._versions()
        return len(now) == len(self._watched) and all(
            one[0] is other[0] and one[1] == other[1] for one, other in zip(now, self._watched, strict=True)
        )

    def drop(self) -> None:
        self.checkpoint = None
        self._watched = []

    def _versions(self) -> _Versions:
        found = list(_tensors([optimizer.state for optimizer in self._trainer.optimizers]))
        if self.checkpoint is None:
            module = self._trainer.lightning_module
            found += [*module.parameters(), *module.buffers()]
        known = [tensor for tensor in found if not isinstance(tensor, UninitializedBuffer | UninitializedParameter)]
        return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in known]


def _is_harmless(trainer: Any) -> bool:
    """Return whether the only code of the program that runs in a validation is its ``validation_step``."""
    hooks = [getattr(callback, name, None) for callback in trainer.callbacks for name in _HOOKS]
    hooks += [getattr(trainer.lightning_module, name, None) for name in _OF_MODULES]
    modules = [getattr(hook, "__module__", None) or "" for hook in hooks if hook is not None]
    return all(name.startswith(_HARMLESS) and not name.endswith(_EXCHANGES_WEIGHTS) for name in modules)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


# ---- copies of a checkpoint in memory that is reused


_Path = tuple[Any, ...]


class Copies:
    """Copies Lightning's dictionaries, one after the other, into the same host memory, as fresh memory costs more."""

    def __init__(self) -> None:
        self._memory: dict[_Path, torch.Tensor] = {}

    def of(self, checkpoint: dict[str, Any], *, without: str = "") -> dict[str, Any]:
        """Return a copy of all containers and arrays, in the memory of the last copy, except tensors in ``without``."""
        return {name: self._copy(value, (name,), without) for name, value in checkpoint.items()}

    def _copy(self, value: Any, path: _Path, without: str) -> Any:
        if isinstance(value, torch.Tensor):
            return value if path[0] == without else self._copied(value.detach(), path)
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, dict):
            copied = copy.copy(value)  # This keeps the attributes of a state dict, such as the versions of modules.
            for key, item in value.items():
                copied[key] = self._copy(item, (*path, key), without)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*path, index), without) for index, item in enumerate(value))
        return value

    def _copied(self, tensor: torch.Tensor, path: _Path) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.clone()
        memory = self._memory.get(path)
        like = torch.empty_like(tensor, device="meta")  # It is dense, with the tensor's order of axes.
        facts = like.shape, like.dtype, like.stride()
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != facts:
            memory = self._memory[path] = torch.empty_like(tensor, device="cpu")
        return memory.copy_(tensor)
