"""Modules, parameters and optimizers of torch as parts of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..stateful import decode_state, encode_state
from ..tree.frameworks import loaded
from .cells import StateCell
from .paths import Path
from .tracked import Node, Value

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


def is_module(value: object) -> bool:
    """Whether the value is a torch module."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    """Whether the value is a torch optimizer."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def is_uninitialized(tensor: Any) -> bool:
    """Whether a tensor is a parameter of a lazy module that has no shape yet."""
    torch: Any = loaded("torch")
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def module_children(module: Any) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Returns what a module holds: parameters, persistent buffers, modules, its extra state, and modules in containers.

    Args:
        module: A torch module.

    Returns:
        The children by name, and notes on those that ``state_dict()`` would not have.
    """
    torch: Any = loaded("torch")
    passing = module._non_persistent_buffers_set
    children = [(name, child) for name, child in module._parameters.items() if child is not None]
    children += [(name, child) for name, child in module._buffers.items() if child is not None and name not in passing]
    children += [(name, child) for name, child in module._modules.items() if child is not None]
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        children.append(("_extra_state", _ExtraState(module)))
    notes = {}
    for name, value in vars(module).items():
        if name in _OWN or not _holds_modules(value, torch):
            continue
        children.append((name, value))
        if not isinstance(value, Node | Value):
            notes[name] = f"is a plain {type(value).__name__} of modules, which state_dict() does not see"
    return children, notes


def _holds_modules(value: Any, torch: Any) -> bool:
    if isinstance(value, Node | Value):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    kinds = (torch.nn.Module, torch.nn.Parameter, Node, Value)
    return isinstance(value, list | tuple) and any(isinstance(child, kinds) for child in value)


class TensorCell:
    """A tensor, changed in place; the parameter of a lazy module takes the shape of what it is given."""

    def __init__(self, tensor: Any) -> None:
        self.anchor = tensor
        self.trail: Path = ()

    def get(self) -> Any:
        """Returns the tensor."""
        return self.anchor

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as after ``expand``, so that they cannot be changed one by one."""
        torch: Any = loaded("torch")
        tensor = self.anchor
        if is_uninitialized(tensor) or tensor.layout != torch.strided:
            return False
        return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))

    def template(self, shape: Iterable[int]) -> Any:
        """Returns a tensor to compare with: itself, or for a lazy parameter what it would become.

        Args:
            shape: The saved shape.
        """
        if not is_uninitialized(self.anchor):
            return self.anchor
        torch: Any = loaded("torch")
        return torch.empty(tuple(shape), dtype=self.anchor.dtype, device="meta")

    def set(self, value: Any) -> None:
        """Copies the elements."""
        torch: Any = loaded("torch")
        with torch.no_grad():
            if is_uninitialized(self.anchor):
                self.anchor.materialize(value.shape)
            self.anchor.copy_(value)


class _ExtraState(StateCell):
    """What a module's ``get_extra_state`` returns."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module, ("_extra_state",))

    def get(self) -> Any:
        return encode_state(self.thing.get_extra_state())

    def set(self, value: Any) -> None:
        self.thing.set_extra_state(decode_state(value))


def like_state_of(parameter: Any, slot: str, array: Any, group: dict[str, Any]) -> Any:
    """Makes a tensor that an optimizer keeps for a parameter and does not have yet.

    Args:
        parameter: The parameter.
        slot: The name of what is kept, such as ``"exp_avg"``.
        array: Its value, as it was saved.
        group: The parameter's group in the optimizer.

    Returns:
        The tensor, where torch itself would put it: beside the parameter, but counters of steps on the host unless
        the group says otherwise.
    """
    tensor = decode_state({"torch.Tensor": array})
    on_host = slot == "step" and not (group.get("capturable") or group.get("fused"))
    if not on_host and parameter.device.type not in {"cpu", "meta"}:
        tensor = tensor.to(parameter.device)
    return tensor
