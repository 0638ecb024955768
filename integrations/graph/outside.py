"""Leave out objects without state, refuse those whose values are not in Python attributes, look through wrappers.

The walk reads attributes. The values that an extension type, a framework's runtime or another process holds would be
silently lost, so an object is walked only if its class is made of Python attributes alone.
"""

from __future__ import annotations

import functools
import io
import operator
import re
import struct
import sys
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np

from ...engine.errors import shortened
from ...engine.pytree import WRAPPED, class_name, loaded, name_of_class

_ADVICE = (
    "give it get_state() and set_state(state), or state_dict() and load_state_dict(state), or put it into an object "
    "that has them (docs/outside_python.md has the lines for tf.data, Keras, Ray and replay buffers); or leave it out: "
    "name the attribute in __untracked__ of its class, or mark it with Untracked"
)
_LIBRARIES = {"torch", "jax", "jaxlib", "flax", "optax", "numpy", "lightning", "pytorch_lightning"}
_ELSEWHERE = {  # the place of the values, by the prefix of the name of a class or of a base
    "ray.actor.": "in another process",
    "ray._raylet.": "in Ray",
    "tensorflow.": "in TensorFlow",
    "keras.": "in the backend of Keras",
    "tf_keras.": "in TensorFlow",
}
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GenericAlias,
    types.UnionType,
    staticmethod,
    classmethod,
    property,
    functools.partial,
    operator.attrgetter,
    operator.itemgetter,
    operator.methodcaller,
    np.ufunc,
)
# Tools of a process, and settings that its program makes at every start, hold no state of training.
_TOOLS = (re.Pattern, PurePath, np.dtype, types.EllipsisType, types.NotImplementedType)
_TOOL_MODULES = (
    "threading.",
    "logging.",
    "weakref.",
    "argparse.",
    "typing.",
    "inspect.",
    "concurrent.futures.",
    "ray.remote_function.",
    "torch.utils.tensorboard.",
    "torch.profiler.",
    "torch.distributed.device_mesh.",
    "torch.distributed.distributed_c10d.",
    "torch._C._distributed_c10d.",
)
_TOOL_NAMES = {
    "_thread.lock",
    "_thread.RLock",
    "_contextvars.ContextVar",
    "object",
    "torch.device",
    "torch.dtype",
    "torch.layout",
    "torch.memory_format",
    "torch.cuda.streams.Stream",
    "torch.cuda.streams.Event",
}


def is_code_or_tool(value: Any) -> bool:
    """Whether an object is left out without a warning: code, locks, loggers, paths, devices, files that are written."""
    if isinstance(value, (*_CODE, *_TOOLS)) or (callable(value) and hasattr(value, "__wrapped__")):
        return True
    name = class_name(value)  # instances of classes of the program that derive from these may hold state
    if name in _TOOL_NAMES or name.startswith(_TOOL_MODULES):
        return True
    if isinstance(value, io.IOBase):
        return value.closed or not value.readable() or any(value is one for one in (sys.stdout, sys.stderr))
    jax: Any = loaded("jax")
    return jax is not None and isinstance(
        value, (jax.Device, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec)
    )


def is_actor_class(kind: Any) -> bool:
    """Whether ``ray.remote`` has made a class, whose object is code and holds no state."""
    # It derives from the class of the program, but the object was never initialized as one.
    return any(name_of_class(base) == "ray.actor.ActorClass" for base in kind.__mro__)


def why_refused(value: Any) -> str | None:
    """Return why attributes do not have all of an object's state; None where they do."""
    kind = type(value)
    name = class_name(value)
    for beginning, place in _ELSEWHERE.items():
        if any(base.__module__.startswith(beginning) or f"{base.__module__}." == beginning for base in kind.__mro__):
            return f"is of type {name}, whose values are {place}; {_ADVICE}"
    library = kind.__module__.partition(".")[0]
    if library in _LIBRARIES or library in sys.stdlib_module_names - {"builtins"}:
        return f"is of type {name}, whose state holdfast does not know; {_ADVICE}"
    if (base := _hiding(kind)) is not None:  # type: ignore[arg-type]  # mypy takes the class for an instance
        what = f"of {name_of_class(base)}, from which it derives, are" if base is not kind else "are"
        return f"is of type {name}, an extension type: the values {what} not in its attributes; {_ADVICE}"
    return None


def why_more(container: Any, keys: Iterable[Any]) -> str | None:
    """Return why the contents of a container do not have all of its state; None where they do."""
    known = {*keys, "_metadata"}  # torch adds this attribute to its state dicts
    attributes = getattr(container, "__dict__", {})
    more = [name for name in attributes if name not in known and not name.startswith(("__", "_holdfast_"))]
    if not more:
        return None
    what = f"is a {class_name(container)} with attributes of its own ({shortened(more)}) beside its contents"
    return f"{what}; keep the container and them as attributes of an object, or {_ADVICE}"


@lru_cache(maxsize=1024)
def _hiding(kind: Any) -> Any | None:
    """Return the class or base whose instances hold more than ``__dict__`` and ``__slots__``; None if there is none."""
    pointer = struct.calcsize("P")
    while kind is not object:
        base, entries = kind.__base__, vars(kind)
        known = sum(name in entries for name in ("__dict__", "__weakref__"))
        if "__slots__" in entries:  # an extension type has no __slots__
            known += sum(isinstance(one, types.MemberDescriptorType) for one in entries.values())
        if kind.__itemsize__ or kind.__basicsize__ - base.__basicsize__ > known * pointer:
            return kind
        kind = base
    return None


def derived_classes(kind: type) -> list[type]:
    """Return all classes that derive from one, those that derive directly first."""
    found: list[type] = type.__subclasses__(kind)
    for one in found:
        further: list[type] = type.__subclasses__(one)
        found += [derived for derived in further if derived not in found]
    return found


def is_kin(kind: type, name: str) -> bool:
    """Whether a name may be that of a class, moved or wrapped, of a base of it, or of a class that derives from it."""
    last = name.rpartition(".")[2]
    is_same = not name or last in _WRAPPERS or _WRAPPED.sub("", last) == _WRAPPED.sub("", kind.__name__)
    return is_same or name in map(name_of_class, (*kind.__mro__, *derived_classes(kind)))


_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer"}  # classes that tell nothing about the optimizer inside
_WRAPPED = re.compile("^(Fabric|Lightning)(?=[A-Z])")  # prefixes of classes that are made for a wrapper


# ---- wrappers around one module: DDP, ``torch.compile``, Fabric, activation checkpointing
#
# A graph has the module instead. So a path does not depend on how a program runs its module, and a module that was
# saved bare restores into a wrapped one, and vice versa.

# The attributes that hold the module, by the names of the wrappers' classes.
_CLASSES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_original_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
_DICTIONARIES = {"", "dict", "ordered_dict", "OrderedDict", "collections.OrderedDict"}
_WRAPPING = {"torch", "lightning", "lightning_fabric", "pytorch_lightning"}


def unwrapped(value: Any) -> Any:
    """Return the module inside wrappers; any other object as it is."""
    while (name := _attribute(type(value))) is not None:  # type: ignore[arg-type]  # mypy takes the class for an instance
        value = getattr(value, name)
    return value


@lru_cache(maxsize=1024)  # many objects have few types
def _attribute(kind: Any) -> str | None:
    names = (_CLASSES.get(base.__name__) for base in kind.__mro__ if base.__module__.partition(".")[0] in _WRAPPING)
    return next((name for name in names if name is not None), None)


def wrapped_nodes(label: str, edges: Mapping[str, int]) -> list[int]:
    """Return the nodes of the wrapped modules in a saved wrapper, or in a dictionary of its values."""
    inside = [edges[name] for name in WRAPPED if name in edges]
    return inside if inside and (label in _DICTIONARIES or label.endswith(tuple(_CLASSES))) else []
