"""Objects of torch, flax nnx and optax as parts of a graph: modules, tensors, optimizers, variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...engine.pytree import is_jax_array, is_nnx, is_python_value, is_torch_tensor, loaded, pack_tree
from ...engine.stateful import decode_state, encode_state
from .paths import Path
from .slots import StateSlot
from .tracked import Node, Value

# ---- torch modules and tensors

_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def is_module(value: object) -> bool:
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def is_uninitialized(tensor: Any) -> bool:
    """Whether a tensor is a parameter of a lazy module that has no shape yet."""
    torch: Any = loaded("torch")
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def module_children(module: Any) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Return the children of a module with their names, and notes on those that ``state_dict()`` does not see."""
    torch: Any = loaded("torch")
    transient = module._non_persistent_buffers_set
    buffers = {name: buffer for name, buffer in module._buffers.items() if name not in transient}
    tables = (module._parameters, buffers, module._modules)
    children = [(name, child) for table in tables for name, child in table.items() if child is not None]
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        children.append(("_extra_state", _ExtraState(module)))
    notes = {}
    for name, value in vars(module).items():
        if isinstance(value, Node | Value):
            children.append((name, value))
        elif name not in _MODULE_TABLES and _holds_modules(value, torch):
            children.append((name, value))
            notes[name] = f"is a plain {type(value).__name__} of modules, which state_dict() does not see"
    return children, notes


def _holds_modules(value: Any, torch: Any) -> bool:
    children = list(value.values()) if isinstance(value, dict) else value
    kinds = (torch.nn.Module, torch.nn.Parameter, Node, Value)
    return isinstance(children, list | tuple) and any(isinstance(child, kinds) for child in children)


class TensorSlot:
    """A tensor, changed in place; the parameter of a lazy module takes the shape of its first value."""

    def __init__(self, tensor: Any) -> None:
        self.anchor = tensor
        self.trail: Path = ()

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as after ``expand``, so that they cannot change one by one."""
        torch: Any = loaded("torch")
        tensor = self.anchor
        if is_uninitialized(tensor) or tensor.layout != torch.strided:
            return False
        return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))

    def template(self, shape: Iterable[int]) -> Any:
        """Return the tensor to compare with: itself, or for a lazy parameter what it would become."""
        if not is_uninitialized(self.anchor):
            return self.anchor
        torch: Any = loaded("torch")
        return torch.empty(tuple(shape), dtype=self.anchor.dtype, device="meta")

    def get(self) -> Any:
        return self.anchor

    def set(self, value: Any) -> None:
        torch: Any = loaded("torch")
        with torch.no_grad():
            if is_uninitialized(self.anchor):
                self.anchor.materialize(value.shape)
            self.anchor.copy_(value)


class _ExtraState(StateSlot):
    """The value of a module's ``get_extra_state``."""

    is_stream = False

    def __init__(self, module: Any) -> None:
        super().__init__(module, module, ("_extra_state",))

    def get(self) -> Any:
        return pack_tree(encode_state(self.thing.get_extra_state()))

    def set(self, value: Any) -> None:
        self.thing.set_extra_state(decode_state(value))


# ---- torch optimizers: values for each parameter ("optimizer slots"), and options for each group of parameters. Both
# belong to parameters, never to numbers: another order of modules or of groups does not swap them.

# Options that decide how an optimizer computes, not what; they depend on the devices of the program.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group by name, such as its learning rate, without those that the program decides."""
    return {
        name: value for name, value in group.items() if not name.startswith("param") and name not in _IMPLEMENTATION
    }


class OptimizerSlot:
    """One value that an optimizer keeps for a parameter, whether it has it yet or not."""

    def __init__(self, optimizer: Any, parameter: Any, name: str) -> None:
        self.anchor = parameter
        self.trail: Path = (str(id(optimizer)), name)
        self._optimizer = optimizer
        self._name = name

    def get(self) -> Any:
        return _snapshot(self._optimizer.state.get(self.anchor, {}).get(self._name, ...))

    def set(self, value: Any) -> None:
        self._optimizer.state[self.anchor][self._name] = decode_state(value)


class OptionSlot:
    """One option of a group, whether the group has it yet or not; a tensor stays the same object."""

    def __init__(self, optimizer: Any, group: int, name: str) -> None:
        self.anchor = optimizer
        self.trail: Path = ("groups", str(group), name)
        self._options = optimizer.param_groups[group]
        self._name = name

    def get(self) -> Any:
        return _snapshot(self._options.get(self._name, ...))

    def set(self, value: Any) -> None:
        old = self._options.get(self._name)
        if is_torch_tensor(old) and is_torch_tensor(value):
            old.detach().copy_(value)
        else:
            self._options[self._name] = decode_state(value)


def is_single_leaf(value: object) -> bool:
    """Whether a value of an optimizer is one leaf; lists of tensors and the like are trees."""
    return is_torch_tensor(value) or is_python_value(value)


def _snapshot(value: Any) -> Any:
    return value if value is ... or is_single_leaf(value) else encode_state(value)


def divided_like(parameter: Any, shape: Any, dtype: Any) -> Any:
    """Return the template for a value of a parameter that processes share, which is divided alike; ``...`` else."""
    if type(parameter).__name__ != "DTensor" or shape != tuple(parameter.shape):
        return ...
    torch: Any = loaded("torch")
    return torch.zeros_like(parameter.detach(), dtype=getattr(torch, dtype.name))


def new_optimizer_tensor(parameter: Any, name: str, array: Any, group: dict[str, Any]) -> Any:
    """Return the tensor that an optimizer would create for a parameter."""
    tensor = decode_state({"torch.Tensor": array})
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    if not on_host and parameter.device.type not in {"cpu", "meta"}:
        tensor = tensor.to(parameter.device)
    return tensor


# ---- flax nnx and optax

# Fields of optax's states that hold one value for each parameter, under the parameter's own path.
_OPTAX_MOMENTS = frozenset({"mu", "nu", "nu_max", "trace", "ema", "sum_of_squares"})


def is_nnx_variable(value: object) -> bool:
    nnx = loaded("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def nnx_children(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an nnx object that are data, not configuration."""
    data = vars(value).get("_pytree__nodes")
    children = []
    for name, child in vars(value).items():
        is_data = is_nnx_variable(child) or is_nnx(child)
        if data is not None:
            is_data = is_data or data.get(name)
        else:  # a version of flax that does not record which attributes are data
            is_data = is_data or is_jax_array(child) or isinstance(child, np.ndarray | list | dict | tuple)
        if is_data and not name.startswith(("_pytree__", "_object__")):
            children.append((name, child))
    return children


def variable_accessors(variable: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    if hasattr(variable, "get_value"):
        return variable.get_value, variable.set_value
    return lambda: variable.value, lambda value: setattr(variable, "value", value)


def is_optax_moment(holder: Any, name: str) -> bool:
    """Whether a field of an object holds one value for each parameter of another, as optax's moments do."""
    library = type(holder).__module__.partition(".")[0]
    return isinstance(holder, tuple) and library == "optax" and name in _OPTAX_MOMENTS
