"""Detect objects that have no state, that keep state outside their attributes, or that wrap another object.

The walk reads only attributes. It would silently lose values held by an extension type, a framework's runtime or
another process, so objects with such values are rejected.
"""

from __future__ import annotations

import functools
import io
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
    "that has them (docs/outside_python.md shows how for tf.data, Keras, Ray and replay buffers); or leave it out: "
    "name the attribute in __untracked__ of its class, or mark it with Untracked"
)
_LIBRARIES = {"torch", "jax", "jaxlib", "flax", "optax", "numpy", "lightning", "pytorch_lightning"}
_ELSEWHERE = {  # location of an instance's values, keyed by the module prefix of its class or a base class
    "ray.actor.": "in another process",
    "ray._raylet.": "in Ray",
    "tensorflow.": "in TensorFlow",
    "keras.": "in the Keras backend",
    "tf_keras.": "in TensorFlow",
}
_CODE = (type, types.ModuleType, types.UnionType, classmethod, property, functools.partial, np.ufunc)
_CODE_MODULES = ("builtins", "operator", "types")  # callable instances of classes in these modules count as code
# Process-level tools, and settings that a program creates on every start. They hold no training state.
_TOOLS = (re.Pattern, PurePath, np.dtype, types.EllipsisType, types.NotImplementedType)
_TOOL_MODULES = (
    *("threading.", "logging.", "weakref.", "argparse.", "typing.", "inspect.", "concurrent.futures."),
    *("ray.remote_function.", "torch.utils.tensorboard.", "torch.profiler."),
    *("torch.distributed.device_mesh.", "torch.distributed.distributed_c10d.", "torch._C._distributed_c10d."),
)
_TOOL_NAMES = {
    *("object", "_thread.lock", "_thread.RLock", "_contextvars.ContextVar"),
    *("torch.device", "torch.dtype", "torch.layout", "torch.memory_format"),
    *("torch.cuda.streams.Stream", "torch.cuda.streams.Event"),
}


def is_code_or_tool(value: Any) -> bool:
    """True for objects that are skipped without a warning, such as code, locks, loggers, paths and output files."""
    is_code = callable(value) and (type(value).__module__ in _CODE_MODULES or hasattr(value, "__wrapped__"))
    if is_code or isinstance(value, (*_CODE, *_TOOLS)):
        return True
    name = class_name(value)  # compare exact types, because a subclass defined by the program may hold state
    if name in _TOOL_NAMES or name.startswith(_TOOL_MODULES):
        return True
    if isinstance(value, io.IOBase):
        return value.closed or not value.readable() or any(value is stream for stream in (sys.stdout, sys.stderr))
    jax: Any = loaded("jax")
    return jax is not None and isinstance(
        value, (jax.Device, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec)
    )


def is_actor_class(cls: Any) -> bool:
    """True for a class created by ``ray.remote``. Its instances are never initialized, so they hold no state."""
    return any(name_of_class(base) == "ray.actor.ActorClass" for base in cls.__mro__)


def why_refused(value: Any) -> str | None:
    """Return why an object's attributes do not hold all of its state, or None if they do."""
    cls = type(value)
    name = class_name(value)
    for prefix, where in _ELSEWHERE.items():
        if any(base.__module__.startswith(prefix) or f"{base.__module__}." == prefix for base in cls.__mro__):
            return f"is of type {name}, whose values are {where}; {_ADVICE}"
    library = cls.__module__.partition(".")[0]
    if library in _LIBRARIES or library in sys.stdlib_module_names - {"builtins"}:
        return f"is of type {name}, whose state holdfast does not know; {_ADVICE}"
    if (base := _hiding(cls)) is not None:  # type: ignore[arg-type]  # mypy takes the class for an instance
        of_base = f"of {name_of_class(base)}, from which it derives, are" if base is not cls else "are"
        return f"is of type {name}, an extension type: the values {of_base} not in its attributes; {_ADVICE}"
    return None


def why_more(container: Any, keys: Iterable[Any]) -> str | None:
    """Return a message about attributes that a container has in addition to its items, or None if there are none."""
    expected = {*keys, "_metadata"}  # torch adds this attribute to its state dicts
    attributes = getattr(container, "__dict__", {})
    more = [name for name in attributes if name not in expected and not name.startswith(("__", "_holdfast_"))]
    if not more:
        return None
    return (
        f"is a {class_name(container)} with its own attributes ({shortened(more)}) besides its contents; keep the "
        f"container and these as attributes of an object, or {_ADVICE}"
    )


@lru_cache(maxsize=1024)
def _hiding(cls: Any) -> Any | None:
    """Return the class or base class that stores data outside ``__dict__`` and ``__slots__``, or None."""
    while cls is not object:
        base, entries = cls.__base__, vars(cls)
        pointers = sum(name in entries for name in ("__dict__", "__weakref__"))
        if "__slots__" in entries:  # an extension type has no __slots__
            pointers += sum(isinstance(member, types.MemberDescriptorType) for member in entries.values())
        if cls.__itemsize__ or cls.__basicsize__ - base.__basicsize__ > pointers * struct.calcsize("P"):
            return cls
        cls = base
    return None


def derived_classes(base: type) -> list[type]:
    """Return all direct and indirect subclasses of a class; direct subclasses come first."""
    classes: list[type] = type.__subclasses__(base)
    for cls in classes:  # the list grows in the loop
        further: list[type] = type.__subclasses__(cls)
        classes += [derived for derived in further if derived not in classes]
    return classes


def is_kin(cls: type, name: str) -> bool:
    """True if a saved name may refer to a class (even if moved or wrapped), or to one of its bases or subclasses."""
    last = name.rpartition(".")[2]
    is_same = not name or last in _WRAPPERS or _WRAPPED.sub("", last) == _WRAPPED.sub("", cls.__name__)
    return is_same or name in map(name_of_class, (*cls.__mro__, *derived_classes(cls)))


_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer"}  # wrappers whose class names do not reveal what they wrap
_WRAPPED = re.compile("^(Fabric|Lightning)(?=[A-Z])")  # name prefixes of generated wrapper classes


# ---- wrappers around one module: DDP, ``torch.compile``, Fabric, activation checkpointing
#
# The graph contains the module instead of its wrapper, so that paths do not depend on the wrapper. A module saved
# without a wrapper can be restored into a wrapped one, and vice versa.

# Attribute that holds the module, keyed by the name of the wrapper class.
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
    """Return the module inside all wrappers; return any other object unchanged."""
    while (name := _attribute(type(value))) is not None:  # type: ignore[arg-type]  # mypy takes the class for an instance
        value = getattr(value, name)
    return value


@lru_cache(maxsize=1024)  # there are many objects, but few types
def _attribute(cls: Any) -> str | None:
    names = (_CLASSES.get(base.__name__) for base in cls.__mro__ if base.__module__.partition(".")[0] in _WRAPPING)
    return next((name for name in names if name is not None), None)


def wrapped_nodes(label: str, edges: Mapping[str, int]) -> list[int]:
    """Return the nodes of the modules inside a saved wrapper, or inside the saved state dict of a wrapper."""
    inside = [edges[name] for name in WRAPPED if name in edges]
    return inside if inside and (label in _DICTIONARIES or label.endswith(tuple(_CLASSES))) else []
