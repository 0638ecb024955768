"""Support for torch, flax nnx and Keras objects in the object graph: modules, tensors, optimizers and variables."""

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

EXTRA_STATE = "_extra_state"  # last segment of the state_dict() keys for get_extra_state() results


def is_module(value: object) -> bool:
    """True for a torch module, unless ``ray.remote`` has turned its class into an actor class."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not is_actor_class(type(value))


def is_uninitialized(tensor: Any) -> bool:
    """True for a lazy module's parameter that has no shape yet."""
    torch: Any = loaded("torch")
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def module_children(module: Any) -> list[tuple[str, Any]]:
    """Return a module's children with their names, including plain lists and dictionaries that hold modules."""
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
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        is_searched = len(parts) > 0 and name not in ("_parameters", "_buffers", "_modules")
        if isinstance(value, (Node, Value)) or (is_searched and any(isinstance(part, kinds) for part in parts)):
            children.append((name, value))
    return children


class TensorSlot:
    """A tensor that a restore updates in place. An uninitialized parameter takes the shape of the restored value."""

    def __init__(self, tensor: Any) -> None:
        self.anchor = tensor
        self.trail: Path = ()

    @property
    def problem(self) -> str | None:
        """The reason why the tensor's elements cannot be written individually, or None if they can."""
        torch: Any = loaded("torch")
        tensor = self.anchor
        if is_uninitialized(tensor) or tensor.layout != torch.strided:
            return None
        shared = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return "elements of this tensor share memory, as after expand(); make a copy of it" if shared else None

    def template(self, shape: Iterable[int]) -> Any:
        """Return the tensor itself, or a meta tensor of the given shape if it is an uninitialized parameter."""
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


# ---- modules and optimizers that customize their state with methods or hooks

OWN_STATE = "_own_state"  # name of the edge from a module to the state_dict() entries that are not in the graph
_MODULE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_MODULE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OPTIMIZER_HOOKS = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")
# Methods and hooks of these libraries only access or wrap values that the graph already contains.
_TRANSPARENT = (
    *("torch.nn.", "torch.optim", "torch.distributed."),
    *("lightning.", "lightning_fabric.", "pytorch_lightning."),
)


def has_own_protocol(target: Any) -> bool:
    """True if an overridden method or a hook customizes the state dict of a module or optimizer."""
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
    """Return the innermost function of a hook, without the wrappers that torch and ``functools.partial`` add."""
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:
        hook = inner
    return hook


class ModuleState(PartState):
    """The entries of a module's ``state_dict()``, except for parameters that the graph already contains."""

    # Buffers are included, because a module may load them with a different shape or recompute them.

    def get(self) -> Any:
        state = self.target.state_dict()
        bare = dict(zip(state, joined_names(list(state)), strict=True))
        extra = {bare[name]: state[name] for name in self._beyond(state)}
        # Each process accumulates its own metric state, so save this state only if there is a single process.
        if current_coordinator().process_count == 1 and (sums := accumulated(self.target)):
            extra[_ACCUMULATED] = sums
        return pack_tree(encode_state(extra))

    def set(self, value: Any) -> None:
        torch: Any = loaded("torch")
        state = copy.copy(self.target.state_dict())  # copy() keeps the _metadata attribute that torch adds
        wrapped = dict(zip(joined_names(list(state)), state, strict=True))
        for name in self._beyond(state):
            del state[name]
        decoded = decode_state(value)
        saved = decoded.pop(_ACCUMULATED, None)  # missing from checkpoints of earlier versions
        names = set(wrapped.values())
        extra = {key if key in names else wrapped.get(unwrapped_name(key), key): leaf for key, leaf in decoded.items()}
        state.update(extra)
        # Keep parameter values from the graph, because state_dict() may convert them, for example to half precision.
        names = set(map(unwrapped_name, extra))
        named = self.target.named_parameters()
        exact = [(parameter, parameter.detach().clone()) for name, parameter in named if unwrapped_name(name) in names]
        self.target.load_state_dict(state)
        with torch.no_grad():
            for parameter, before in exact:
                parameter.copy_(before)
        # torchmetrics adds up the metric states of all processes, so restore the saved state only on process 0.
        if saved is not None and current_coordinator().process_index == 0:
            set_accumulated(self.target, saved)

    def _beyond(self, state: Mapping[str, Any]) -> list[str]:
        in_graph = {_memory(tensor) for tensor in self.target.parameters()}
        in_graph |= {_memory(tensor) for tensor in self.target.buffers() if type(tensor).__name__ == "DTensor"}
        names = [name for name in state if not name.endswith(EXTRA_STATE)]
        return [name for name in names if not (is_torch_tensor(state[name]) and _memory(state[name]) in in_graph)]


_ACCUMULATED = "holdfast.accumulated"  # key for a torchmetrics metric's accumulated state, which state_dict() omits
_BESIDE = {"Running": ("_num_vals_seen",), "MinMaxMetric": ("min_val", "max_val")}  # unregistered metric states


def accumulated(metric: Any) -> dict[str, Any]:
    """Return a torchmetrics metric's accumulated state, which ``state_dict()`` omits; return {} for other objects."""
    torchmetrics: Any = loaded("torchmetrics")
    if torchmetrics is None or not isinstance(metric, torchmetrics.Metric):
        return {}
    names = [*metric._defaults, *(name for base in type(metric).__mro__ for name in _BESIDE.get(base.__name__, ()))]
    return {"updates": int(metric._update_count), "states": {name: getattr(metric, name) for name in names}}


def set_accumulated(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["states"].items():
        moved: Any = [item.to(metric.device) for item in value] if isinstance(value, list) else value
        setattr(metric, name, moved.to(metric.device) if is_torch_tensor(moved) else moved)
    metric._update_count, metric._computed = saved["updates"], None


def is_buffer(module: Any, name: str) -> bool:
    """True if a module's attribute is a buffer that is saved as part of the module's own state."""
    return is_module(module) and name in module._buffers and type(module._buffers[name]).__name__ != "DTensor"


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Return a key that identifies the memory, dtype, shape, strides and device of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    if is_uninitialized(local) or not is_dense(local):
        return (id(tensor),)
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device


# ---- torch optimizers keep values for each parameter ("optimizer slots") and options for each group of parameters.
# Values and options are matched by parameter, never by index, because the order of modules or groups may change.

OPTIMIZER_SLOTS = "slots"  # path segment and document key for a torch optimizer's per-parameter values
GROUPS = "groups"  # name of the edge from a torch optimizer to its group options
# These options select an implementation for the program's devices without changing what the optimizer computes.
_EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to save for a parameter group, such as the learning rate, keyed by name."""
    return {name: value for name, value in group.items() if not name.startswith("param") and name not in _EXECUTION}


class OptimizerSlot:
    """An optimizer's value for one parameter, such as a moment estimate. The value may not exist yet."""

    def __init__(self, optimizer: Any, group: dict[str, Any], parameter: Any, name: str) -> None:
        self.anchor = self.parameter = parameter
        self.trail: Path = (str(id(optimizer)), name)
        self.name = name
        self.group = group
        self._optimizer = optimizer  # read `state` on each access, because a wrapper's load_state_dict() may replace it
        self._key = slot_key(name)

    def get(self) -> Any:
        return _snapshot(self._optimizer.state.get(self.anchor, {}).get(self._key, ...))

    def set(self, value: Any) -> None:
        self._optimizer.state[self.anchor][self._key] = decode_state(value)


class OptionSlot:
    """An option of a parameter group. The option may not exist yet; if it is a tensor, it is updated in place."""

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
    """Return the name under which an optimizer value with the given key is saved."""
    return key if isinstance(key, str) else _KEY + json.dumps(key)


def slot_key(name: str) -> Any:
    return hashable(json.loads(name.removeprefix(_KEY))) if name.startswith(_KEY) else name


def is_single_leaf(value: object) -> bool:
    """True if an optimizer value is a single leaf, as opposed to a tree such as a list of tensors."""
    return is_torch_tensor(value) or is_python_value(value)


def _snapshot(value: Any) -> Any:
    return value if value is ... or is_single_leaf(value) else encode_state(value)


def divided_like(parameter: Any, shape: Any, dtype: Any) -> Any:
    """If the parameter is a DTensor of the given shape, return a template sharded like it; otherwise, ``...``."""
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
# The state of Keras objects consists of their variables. As in TensorFlow, a variable or layer is named after the
# attribute that holds it. If no attribute holds a layer, as in a Sequential model, the name chosen by the program is
# used, or else the class name and a number within the parent, as in ``save_weights`` files
# (https://keras.io/api/models/model_saving_apis/weights_saving_and_loading). The names that Keras generates
# (``dense_1``) are unsuitable, because their numbers count all layers in the process.

LAYER, OPTIMIZER, VARIABLE = "Layer", "Optimizer", "Variable"
_KINDS = {LAYER, OPTIMIZER, VARIABLE, "Metric", "SeedGenerator"}


@lru_cache(maxsize=1024)  # there are many objects, but few types
def _kind_of(cls: Any) -> str | None:
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in _KINDS and _is_of_keras(base)), None)


def _kind(value: object) -> str | None:
    return _kind_of(type(value))  # type: ignore[arg-type]  # mypy takes the class for an instance


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "keras"


def keras_kind(value: object) -> str | None:
    """Return the kind of a Keras object if all its values are torch tensors or JAX arrays; otherwise, return None."""
    if (kind := _kind(value)) is None:
        return None
    arrays = map(_value, _variables(value))
    return kind if all(is_torch_tensor(array) or is_jax_array(array) for array in arrays) else None


def bare_variable(value: Any) -> Any:
    """Return the torch parameter behind a Keras variable; return any other object unchanged."""
    return _value(value) if _kind(value) == VARIABLE and is_torch_tensor(_value(value)) else value


def keras_children(
    value: Any, order: list[int] | None = None, saved: Iterable[str] = (), *, numbered: bool = False
) -> list[tuple[str, Any]]:
    """Return a Keras object's variables, layers and optimizer by name, plus the internal lists named in ``saved``."""
    # `order` gives, for each optimizer parameter, the index of its values in the saved lists. With `numbered`, the
    # names are those of earlier versions.
    pairs = _parts(value)
    if numbered:
        return _numbered(pairs)
    wanted, named, listed = {id(part) for _, part in pairs}, list[tuple[str, Any]](), set[int]()
    for name, child in {**vars(value), **vars(value).get("_modules", {})}.items():
        part, held = _held(child, wanted)
        if not held or name == "_layers":  # the layers of a Sequential model get numbered names instead
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


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return a Keras object's variables, layers and optimizer with their names."""
    if _kind(value) == OPTIMIZER:  # use indices, because names contain layer names, which Keras numbers per process
        return [(f"variable_{index}", variable) for index, variable in enumerate(value.variables)]
    if _kind(value) != LAYER:
        return [(_name(variable), variable) for variable in _variables(value)]
    if any(base.__name__ == "TorchModuleWrapper" and _is_of_keras(base) for base in type(value).__mro__):
        return [("module", value.module)]  # the whole module, because its buffers are not Keras variables
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
    """Convert an attribute's value to plain containers; also return the ids of the variables and layers in it."""
    if id(child) in wanted:
        return child, {id(child)}
    if _kind(child) not in (None, LAYER, VARIABLE):
        return child, wanted.intersection(map(id, _variables(child)))
    # Keras wraps the program's containers in its own classes, so a plain list or dict is internal to Keras.
    if not isinstance(child, list | tuple | dict) or not (isinstance(child, tuple) or _is_of_keras(type(child))):
        return None, set()
    parts = [_held(part, wanted) for part in (child.values() if isinstance(child, dict) else child)]
    contents, held = [part for part, _ in parts], set[int]().union(*(ids for _, ids in parts))
    return dict(zip(child, contents, strict=True)) if isinstance(child, dict) else contents, held


def why_not_saved(value: Any) -> str | None:
    """Return why a Keras object cannot be saved, or None if it can."""
    if getattr(value, "built", True) is False:
        how = "build(variables)" if _kind(value) == OPTIMIZER else "build(input_shape), or call it once"
        return f"has no variables yet because it is not built: call its {how}, before a save or a restore"
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
    """Make names unique by appending a number to each repetition of a name."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        unique[next(free for free in itertools.chain([name], numbered) if free not in unique)] = value
    return list(unique.items())


def _overridden(cls: type, methods: tuple[str, ...], *, everywhere: bool = False) -> bool:
    """True if a class outside Keras overrides one of the methods; ``everywhere`` also considers Keras classes."""
    owners = [base for name in methods for base in [b for b in cls.__mro__ if name in vars(b)][:1]]
    return any(not _is_of_keras(owner) or (everywhere and owner.__name__ != LAYER) for owner in owners)
