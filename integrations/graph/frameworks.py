"""Torch, flax nnx and Keras objects in the object graph: modules, tensors, optimizers, variables."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...engine.distributed import current_coordinator
from ...engine.pytree import (
    STRIDES,
    decode_state,
    encode_state,
    hashable,
    is_dense,
    is_jax_array,
    is_nnx,
    is_python_value,
    is_torch_tensor,
    joined_names,
    loaded,
    pack_tree,
    unwrapped_name,
)
from .outside import is_actor_class
from .slots import PartState, Path
from .tracked import Node, Value

EXTRA_STATE = "_extra_state"  # last key segment of a module's `get_extra_state` value in a state_dict()


def is_module(value: object) -> bool:
    """True for an initialized torch module, but not for an actor class that ``ray.remote`` made from a module class."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not is_actor_class(type(value))


def is_uninitialized(tensor: Any) -> bool:
    """True if a tensor is a lazy module's parameter that has no shape yet."""
    torch: Any = loaded("torch")
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def module_children(module: Any) -> list[tuple[str, Any]]:
    """Return a module's children with their names, including modules in plain lists and dictionaries."""
    torch: Any = loaded("torch")
    transient = module._non_persistent_buffers_set
    buffers = {name: buffer for name, buffer in module._buffers.items() if name not in transient}
    tables = (module._parameters, buffers, module._modules)
    children = [(name, child) for table in tables for name, child in table.items() if child is not None]
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        children.append((EXTRA_STATE, _ExtraState(module, module, (EXTRA_STATE,))))
    if has_own_protocol(module):
        children.append((OWN_STATE, ModuleState(module, module, (OWN_STATE,))))
    kinds = (torch.nn.Module, torch.nn.Parameter, Node, Value)
    for name, value in vars(module).items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        holds = any(isinstance(part, kinds) for part in parts) and name not in ("_parameters", "_buffers", "_modules")
        if holds or isinstance(value, Node | Value):
            children.append((name, value))
    return children


class TensorSlot:
    """A tensor that is changed in place; a lazy module's parameter takes the shape of its first value."""

    def __init__(self, tensor: Any) -> None:
        self.anchor = tensor
        self.trail: Path = ()

    @property
    def problem(self) -> str | None:
        """Why the elements cannot be written one by one; None if they can."""
        torch: Any = loaded("torch")
        tensor = self.anchor
        if is_uninitialized(tensor) or tensor.layout != torch.strided:
            return None
        shared = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return "elements of this tensor share memory, as after expand(); make a copy of it" if shared else None

    def template(self, shape: Iterable[int]) -> Any:
        """Return the tensor to compare with; for a lazy parameter, a meta tensor with the shape it would get."""
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


class _ExtraState(PartState):
    """The return value of a module's ``get_extra_state``."""

    def get(self) -> Any:
        return pack_tree(encode_state(self.target.get_extra_state()))

    def set(self, value: Any) -> None:
        self.target.set_extra_state(decode_state(value))


# ---- modules and optimizers with their own methods or hooks for their state

OWN_STATE = "_own_state"  # edge name from a module to the entries of its state_dict() that are not in the graph
_MODULE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_MODULE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OPTIMIZER_HOOKS = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")
# Methods and hooks from these libraries only look up or wrap values that are in the graph anyway.
_TRANSPARENT = (
    *("torch.nn.", "torch.optim", "torch.distributed."),
    *("lightning.", "lightning_fabric.", "pytorch_lightning."),
)


def has_own_protocol(target: Any) -> bool:
    """True if an overridden method or a hook changes the state dict of a module or optimizer."""
    methods, tables = (_MODULE_METHODS, _MODULE_HOOKS) if is_module(target) else (("state_dict",), _OPTIMIZER_HOOKS)
    hooks = (hook for table in tables for hook in vars(target).get(table, {}).values())
    return (
        _overrides(type(target), methods)  # type: ignore[arg-type]  # mypy takes the class for an instance
        or any(name in vars(target) for name in methods)
        or any(not _is_transparent(_function(hook)) for hook in hooks)
    )


@lru_cache(maxsize=1024)
def _overrides(cls: Any, methods: tuple[str, ...]) -> bool:
    bases = [base for base in cls.__mro__ if not _is_transparent(base) or base.__module__.startswith("torch.")]
    owners = (next((base for base in bases if name in vars(base)), object) for name in methods)
    return any(owner is not object and not _is_transparent(owner) for owner in owners)


def _is_transparent(owner: Any) -> bool:
    return str(getattr(owner, "__module__", "")).startswith(_TRANSPARENT)


def _function(hook: Any) -> Any:
    """Return a hook's underlying function, which torch and partial() wrap."""
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:
        hook = inner
    return hook


class ModuleState(PartState):
    """The entries of a module's ``state_dict()`` and its children's, except for the parameters in the graph."""

    # Buffers are included, because a module may accept them with another shape, or recompute them.

    def get(self) -> Any:
        state = self.target.state_dict()
        bare = dict(zip(state, joined_names(list(state)), strict=True))
        extra = {bare[name]: state[name] for name in self._beyond(state)}
        if current_coordinator().process_count == 1 and (sums := accumulated(self.target)):  # else one sum per process
            extra[_ACCUMULATED] = sums
        return pack_tree(encode_state(extra))

    def set(self, value: Any) -> None:
        torch: Any = loaded("torch")
        state = copy.copy(self.target.state_dict())  # copy() keeps torch's metadata, which is an attribute
        wrapped = dict(zip(joined_names(list(state)), state, strict=True))
        for name in self._beyond(state):
            del state[name]
        decoded = decode_state(value)
        saved = decoded.pop(_ACCUMULATED, None)  # missing in checkpoints of earlier versions
        names = set(wrapped.values())
        extra = {key if key in names else wrapped.get(unwrapped_name(key), key): leaf for key, leaf in decoded.items()}
        state.update(extra)
        # The module may return parameters in another form, such as half precision, so keep those from the graph.
        names = set(map(unwrapped_name, extra))
        named = self.target.named_parameters()
        exact = [(parameter, parameter.detach().clone()) for name, parameter in named if unwrapped_name(name) in names]
        self.target.load_state_dict(state)
        with torch.no_grad():
            for parameter, before in exact:
                parameter.copy_(before)
        # Only process 0 continues the sum; the others start from zero, because the sums of all processes are added up.
        if saved is not None and current_coordinator().process_index == 0:
            set_accumulated(self.target, saved)

    def _beyond(self, state: Mapping[str, Any]) -> list[str]:
        in_graph = {_memory(tensor) for tensor in self.target.parameters()}
        in_graph |= {_memory(tensor) for tensor in self.target.buffers() if type(tensor).__name__ == "DTensor"}
        names = [name for name in state if not name.endswith(EXTRA_STATE)]
        return [name for name in names if not (is_torch_tensor(state[name]) and _memory(state[name]) in in_graph)]


_ACCUMULATED = "holdfast.accumulated"  # key for a torchmetrics metric's accumulated state, missing in state_dict()


def accumulated(metric: Any) -> dict[str, Any]:
    """Return what a torchmetrics metric has accumulated since its last reset; its ``state_dict()`` lacks it."""
    torchmetrics: Any = loaded("torchmetrics")
    if torchmetrics is None or not isinstance(metric, torchmetrics.Metric):
        return {}
    return {"updates": int(metric._update_count), "states": {name: getattr(metric, name) for name in metric._defaults}}


def set_accumulated(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["states"].items():
        moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
    metric._update_count, metric._computed = saved["updates"], None


def is_buffer(module: Any, name: str) -> bool:
    """True if a module's attribute is a buffer, which is saved with the module's own state."""
    return is_module(module) and name in module._buffers and type(module._buffers[name]).__name__ != "DTensor"


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that view the same memory with the same shape and strides."""
    local = getattr(tensor, "_local_tensor", tensor)
    if is_uninitialized(local) or not is_dense(local):
        return (id(tensor),)
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device


# ---- torch optimizers keep values for each parameter ("optimizer slots") and options for each group of parameters.
# Both are matched by parameter, never by index: reordered modules or groups do not swap them.

OPTIMIZER_SLOTS = "slots"  # name of the node for a torch optimizer's per-parameter values, keyed by parameter path
GROUPS = "groups"  # edge name from a torch optimizer to its group options
# Options that affect how an optimizer computes, but not what it computes; they depend on the program's devices.
_EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group options that are saved, such as the learning rate, keyed by name."""
    return {name: value for name, value in group.items() if not name.startswith("param") and name not in _EXECUTION}


class OptimizerSlot:
    """One value that an optimizer keeps for a parameter; the value may not exist yet."""

    def __init__(self, optimizer: Any, group: dict[str, Any], parameter: Any, name: str) -> None:
        self.anchor = self.parameter = parameter
        self.trail: Path = (str(id(optimizer)), name)
        self.name = name
        self.group = group
        self._optimizer = optimizer  # `state` is read each time, because a wrapper's load_state_dict() may replace it
        self._key = slot_key(name)

    def get(self) -> Any:
        return _snapshot(self._optimizer.state.get(self.anchor, {}).get(self._key, ...))

    def set(self, value: Any) -> None:
        self._optimizer.state[self.anchor][self._key] = decode_state(value)


class OptionSlot:
    """One option of a parameter group; the option may not exist yet. A tensor option is changed in place."""

    def __init__(self, optimizer: Any, number: int, name: str) -> None:
        self.anchor = optimizer
        self.trail: Path = (GROUPS, str(number), name)
        self.name = name
        self._number = number

    @property
    def group(self) -> Any:
        return self.anchor.param_groups[self._number]

    @property
    def parameter(self) -> Any:
        return self.group["params"][0]

    def get(self) -> Any:
        return _snapshot(self.group.get(self.name, ...))

    def set(self, value: Any) -> None:
        old: Any = self.group.get(self.name)
        if is_torch_tensor(old) and is_torch_tensor(value):
            old.detach().copy_(value)
        else:
            self.group[self.name] = decode_state(value)


_KEY = "holdfast.key:"  # name prefix for values whose keys are numbers or tuples


def slot_name(key: Any) -> str:
    """Return the checkpoint name for the key of an optimizer value."""
    return key if isinstance(key, str) else _KEY + json.dumps(key)


def slot_key(name: str) -> Any:
    return hashable(json.loads(name.removeprefix(_KEY))) if name.startswith(_KEY) else name


def is_single_leaf(value: object) -> bool:
    """True if an optimizer value is a single leaf rather than a tree, such as a list of tensors."""
    return is_torch_tensor(value) or is_python_value(value)


def _snapshot(value: Any) -> Any:
    return value if value is ... or is_single_leaf(value) else encode_state(value)


def divided_like(parameter: Any, shape: Any, dtype: Any) -> Any:
    """Return a template sharded like the parameter if that is a DTensor with the shape of the value; else ``...``."""
    if type(parameter).__name__ != "DTensor" or shape != tuple(parameter.shape):
        return ...
    torch: Any = loaded("torch")
    return torch.zeros_like(parameter.detach(), dtype=getattr(torch, dtype.name))


def new_optimizer_tensor(slot: OptimizerSlot | OptionSlot, array: Any, strides: Any) -> Any:
    """Return a new tensor with the saved strides, on the device where the optimizer would create it."""
    tensor, device = decode_state({"torch.Tensor": array, STRIDES: strides}), slot.parameter.device
    on_host = slot.name == "step" and not (slot.group.get("capturable") or slot.group.get("fused"))
    return tensor if on_host or device.type in {"cpu", "meta"} else tensor.to(device)


def is_nnx_variable(value: object) -> bool:
    nnx = loaded("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def nnx_children(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an nnx object that are data rather than configuration."""
    data = vars(value).get("_pytree__nodes")
    children = []
    for name, child in vars(value).items():
        is_array = is_jax_array(child) or isinstance(child, np.ndarray | list | dict | tuple)
        # Early flax versions do not record which attributes are data.
        is_data = is_nnx_variable(child) or is_nnx(child) or (is_array if data is None else data.get(name))
        if is_data and not name.startswith(("_pytree__", "_object__")):
            children.append((name, child))
    return children


def variable_accessors(variable: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    if hasattr(variable, "get_value"):
        return variable.get_value, variable.set_value
    return lambda: variable.value, lambda value: setattr(variable, "value", value)


# ---- Keras 3 on torch and jax: models, layers, optimizers, metrics and variables
#
# Their variables are their state. As in TensorFlow, a variable or layer is named by the attribute that holds it.
# If there is none, as in a Sequential model, a layer has the name that the program gave it, or its class name
# numbered within the layer that holds it, as in the files of ``save_weights``
# (https://keras.io/api/models/model_saving_apis/weights_saving_and_loading). Keras counts layers in each process
# (``dense_1``), so a second model gets different names.

LAYER, OPTIMIZER, VARIABLE = "Layer", "Optimizer", "Variable"
_KINDS = {LAYER, OPTIMIZER, VARIABLE, "Metric", "SeedGenerator"}


@lru_cache(maxsize=1024)  # many objects, few types
def _kind_of(cls: Any) -> str | None:
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in _KINDS and _is_of_keras(base)), None)


def _kind(value: object) -> str | None:
    return _kind_of(type(value))  # type: ignore[arg-type]  # mypy takes the class for an instance


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "keras"


def keras_kind(value: object) -> str | None:
    """Return the kind of a Keras object whose values are torch tensors or JAX arrays; None for other objects."""
    if (kind := _kind(value)) is None:
        return None
    arrays = map(_value, _variables(value))
    return kind if all(is_torch_tensor(array) or is_jax_array(array) for array in arrays) else None


def bare_variable(value: Any) -> Any:
    """Return the torch parameter behind a Keras variable; any other object is returned as it is."""
    return _value(value) if _kind(value) == VARIABLE and is_torch_tensor(_value(value)) else value


def keras_children(value: Any, order: list[int] | None = None, saved: Iterable[str] = ()) -> list[tuple[str, Any]]:
    """Return the variables and parts of a Keras object by name, including TensorFlow's lists that ``saved`` names."""
    # `order` has the index, in the saved lists, of each optimizer parameter's values.
    pairs = _parts(value)
    wanted, named, listed = {id(part) for _, part in pairs}, list[tuple[str, Any]](), set[int]()
    for name, child in {**vars(value), **vars(value).get("_modules", {})}.items():
        part, held = _held(child, wanted)
        if not held or name == "_layers":  # a Sequential model's list of layers, which get numbered names instead
            continue
        if order is not None and isinstance(part, list) and len(part) == len(order):
            part = [part[order.index(index)] for index in range(len(order))]
        listed |= held
        public = name.lstrip("_")
        names = [public, name] if isinstance(getattr(type(value), public, None), property) else [name]
        named += [(alias, part) for alias in dict.fromkeys(names)]
    for name in {"_operations", "_functional"}.intersection(saved):
        operations = getattr(getattr(value, "_functional", None) or value, "_operations", [])
        part = [operation if id(operation) in wanted else None for operation in operations]
        named.append((name, part if name == "_operations" else {"_operations": part}))
    return _numbered([*named, *(pair for pair in pairs if id(pair[1]) not in listed)])


def numbered_children(value: Any) -> list[tuple[str, Any]]:
    """Return the variables and parts under their variable names and numbered class names, as in earlier versions."""
    return _numbered(_parts(value))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the variables and parts of a Keras object, and the optimizer of a model, under their own names."""
    if _kind(value) == OPTIMIZER:  # optimizer variable names contain layer names, which Keras numbers per process
        return [(f"variable_{index}", variable) for index, variable in enumerate(value.variables)]
    if _kind(value) != LAYER:
        return [(_name(variable), variable) for variable in _variables(value)]
    if any(base.__name__ == "TorchModuleWrapper" and _is_of_keras(base) for base in type(value).__mro__):
        return [("module", value.module)]  # its buffers are not Keras variables
    layers = value._flatten_layers(include_self=False, recursive=False)
    below = {id(variable) for layer in layers for variable in layer.variables}
    pairs = [(_name(variable), variable) for variable in value.variables if id(variable) not in below]
    if _overridden(type(value), ("save_own_variables", "load_own_variables")):
        pairs.append((OWN_STATE, _OwnVariables(value, value, (OWN_STATE,))))
    pairs += [(_layer_name(layer), layer) for layer in layers if layer.variables]
    optimizer = getattr(value, "optimizer", None)
    if optimizer is not None:
        if getattr(optimizer, "built", True) is False and value.built:
            optimizer.build(value.trainable_variables)  # as fit() does before the first step
        pairs.append(("optimizer", optimizer))
    return pairs


def _held(child: Any, wanted: set[int]) -> tuple[Any, set[int]]:
    """Return an attribute's content as plain lists and dictionaries, and the ids of the variables and layers in it."""
    if id(child) in wanted:
        return child, {id(child)}
    if _kind(child) not in (None, LAYER, VARIABLE):
        return child, wanted.intersection(map(id, _variables(child)))
    # Keras wraps the program's containers in its own classes, so plain containers are its internal records.
    if not isinstance(child, list | tuple | dict) or not (isinstance(child, tuple) or _is_of_keras(type(child))):
        return None, set()
    parts = [_held(part, wanted) for part in (child.values() if isinstance(child, dict) else child)]
    contents, held = [part for part, _ in parts], set[int]().union(*(ids for _, ids in parts))
    return dict(zip(child, contents, strict=True)) if isinstance(child, dict) else contents, held


def why_not_saved(value: Any) -> str | None:
    """Return the reason why a Keras object cannot be saved as it is; None if it can."""
    if getattr(value, "built", True) is False:
        how = "build(variables)" if _kind(value) == OPTIMIZER else "build(input_shape), or call it once"
        return f"has no variables yet, as it is not built: call its {how}, before a save or a restore"
    if _kind(value) == LAYER and _overridden(type(value), ("save_assets",), everywhere=True):
        return "keeps assets, such as a vocabulary, besides variables; save it with Keras, and mark it with Untracked"
    return None


class _OwnVariables(PartState):
    """The variables that a user-defined layer saves with ``save_own_variables``."""

    def get(self) -> Any:
        store: dict[str, Any] = {}
        self.target.save_own_variables(store)
        return encode_state({key: _value(item) if _kind(item) == VARIABLE else item for key, item in store.items()})

    def set(self, value: Any) -> None:
        self.target.load_own_variables(decode_state(value))


def _variables(value: Any) -> list[Any]:
    kind = _kind(value)
    return [value] if kind == VARIABLE else [value.state] if kind == "SeedGenerator" else list(value.variables)


def _value(variable: Any) -> Any:
    return getattr(variable, "value", None)


def _name(variable: Any) -> str:
    """Return a variable's name without the number that Keras appends."""
    return "variable" if re.fullmatch(r"variable_\d+", variable.name) else str(variable.name)


def _layer_name(layer: Any) -> str:
    """Return a layer's name without the number that Keras appends."""
    given = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", type(layer).__name__))
    given = re.sub("([a-z])([A-Z])", r"\1_\2", given).lower()  # snake_case class name, as Keras derives it
    # A Bidirectional layer adds the direction as a prefix.
    match = re.fullmatch(rf"((forward_|backward_)?{re.escape(given)})(_\d+)?", layer.name)
    return match[1] if match else str(layer.name)


def _numbered(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Make names unique: the first of equal names stays as it is, and later ones get a number appended."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        unique[next(free for free in itertools.chain([name], numbered) if free not in unique)] = value
    return list(unique.items())


def _overridden(cls: type, methods: tuple[str, ...], *, everywhere: bool = False) -> bool:
    """True if a class outside Keras overrides a method; with ``everywhere``, subclasses within Keras count, too."""
    owners = [base for name in methods for base in [b for b in cls.__mro__ if name in vars(b)][:1]]
    return any(not _is_of_keras(owner) or (everywhere and owner.__name__ != LAYER) for owner in owners)
