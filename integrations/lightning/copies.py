"""Copies of a checkpoint in memory that is kept for the next one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

_Path = tuple[Any, ...]


class Copies:
    """Copies Lightning's dictionaries, one after the other, into the same host memory: fresh memory costs more."""

    def __init__(self) -> None:
        self._memory: dict[_Path, torch.Tensor] = {}

    def of(self, checkpoint: dict[str, Any], *, without: str = "") -> dict[str, Any]:
        """Return a copy of all containers and arrays; the copy before it is overwritten.

        Args:
            checkpoint: Lightning's dictionary.
            without: An entry whose tensors are not copied.
        """
        return {name: self._copy(value, (name,), without) for name, value in checkpoint.items()}

    def _copy(self, value: Any, path: _Path, without: str) -> Any:
        if isinstance(value, torch.Tensor):
            return value if path[0] == without else self._copied(value.detach(), path)
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, dict):
            copied = copy.copy(value)  # with what a state dict knows of its modules
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
        like = torch.empty_like(tensor, device="meta")  # dense, with the tensor's order of axes
        facts = like.shape, like.dtype, like.stride()
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != facts:
            memory = self._memory[path] = torch.empty_like(tensor, device="cpu")
        return memory.copy_(tensor)
