"""One checkpoint of several processes: what all of them hold alike, and what process 0 gives to the others.

Under DDP, parameters and optimizer states are the same everywhere, and under FSDP2 each process holds its part of them:
each process saves from its own memory, without a copy between them. For all else, such as buffers, callbacks and
hyper-parameters, nobody promises that it is the same, or there at all, on every process. Lightning's own checkpoints
hold what process 0 has; so do these.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.errors import StateError
from ...engine.together import Together

_LARGE = 1 << 20  # bytes of a tensor from which on it goes from memory to memory, not through the store

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Own:
    """In the place of a tensor that every process has."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """In the place of a tensor that process 0 sends after the others know of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedState:
    """What the processes of one trainer save together.

    Args:
        strategy: The trainer's strategy.
    """

    def __init__(self, strategy: Any) -> None:
        module = strategy.lightning_module
        gloo = torch.distributed.get_backend() == "gloo"
        self._channel = torch.device("cpu") if gloo else strategy.root_device
        self._parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        # Optimizers that shard their state by themselves give all of it to process 0, and nothing to the others.
        self._optimizers = {
            index
            for index, optimizer in enumerate(strategy.optimizers)
            if not hasattr(getattr(optimizer, "_optimizer", optimizer), "consolidate_state_dict")
        }

    def tree(
        self, together: Together, checkpoint: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the tree that this process saves: the same leaves on all of them.

        Args:
            together: The processes.
            checkpoint: Lightning's dictionary, on this process.
            make: Makes a tree of it; called on process 0 only.

        Raises:
            StateError: This process does not hold what process 0 holds.
        """
        group = together.group("what process 0 saves")
        assert group is not None
        large: list[torch.Tensor] = []
        tree: dict[str, Any] = {}
        outline = None
        with contextlib.closing(group):
            if together.leads:
                try:
                    tree = make()
                    outline = pickle.dumps(self._outline(tree, (), large))
                except BaseException as error:
                    group.fail(error)
                    raise
            told = group.broadcast("outline", outline, together.timeout)
        try:
            if not together.leads:
                tree = self._filled(pickle.loads(told), checkpoint, (), large)
        except BaseException as error:
            together.fail("outline taken", error)
            raise
        together.share("outline taken", None)
        for tensor in large:
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)
        return tree

    def _is_own(self, path: Path, value: torch.Tensor) -> bool:
        if hasattr(value, "placements"):  # a DTensor: each process has its part
            return True
        if path[0] == "state_dict":
            return len(path) == 2 and path[1] in self._parameters
        return path[0] == "optimizer_states" and len(path) > 1 and path[1] in self._optimizers

    def _outline(self, value: Any, path: Path, large: list[torch.Tensor]) -> Any:
        """Returns process 0's tree without the tensors that the others have, and without large ones."""
        if isinstance(value, torch.Tensor):
            if self._is_own(path, value):
                return _Own()
            if value.nbytes < _LARGE:
                return value.cpu().clone()  # a view would bring all of its memory along
            large.append(value.detach().to(self._channel).contiguous())
            return _Sent(tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            entries = {key: self._outline(item, (*path, key), large) for key, item in value.items()}
            return type(value)(entries)
        if isinstance(value, list | tuple):
            return type(value)([self._outline(item, (*path, index), large) for index, item in enumerate(value)])
        return value

    def _filled(self, outline: Any, own: Any, path: Path, large: list[torch.Tensor]) -> Any:
        """Returns this process's tree after process 0's outline."""
        if isinstance(outline, _Own):
            if not isinstance(own, torch.Tensor):
                raise StateError(
                    f"{'/'.join(map(str, path))}: process 0 saves a tensor, and this process has "
                    f"{type(own).__qualname__} there; under this strategy all processes have to hold the same "
                    "parameters and optimizer states"
                )
            return own.detach()
        if isinstance(outline, _Sent):
            large.append(torch.empty(outline.shape, dtype=outline.dtype, device=self._channel))
            return large[-1]
        if isinstance(outline, dict):
            mine = own if isinstance(own, dict) else {}
            entries = {key: self._filled(item, mine.get(key), (*path, key), large) for key, item in outline.items()}
            return type(outline)(entries)
        if isinstance(outline, list | tuple):
            some = own if isinstance(own, list | tuple) and len(own) == len(outline) else [None] * len(outline)
            items = [self._filled(item, some[index], (*path, index), large) for index, item in enumerate(outline)]
            return type(outline)(items)
        return outline
