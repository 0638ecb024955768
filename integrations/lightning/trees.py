"""Convert between Lightning checkpoints and trees of arrays and plain values, without pickle.

The tree has the same keys as the Lightning dictionary: ``state_dict``, ``optimizer_states``, ``lr_schedulers``,
``loops``, ``callbacks``, ``hyper_parameters``, and any that modules and plugins add. Arrays are loaded as tensors. The
entry ``value_types`` records the types of all other values, such as numpy arrays, paths, and namespaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...engine.errors import FormatVersionError, UnsupportedLeafError
from ...engine.pytree import (
    PLAIN,
    STRIDES,
    class_name,
    import_path,
    instance_of,
    is_permuted,
    loaded_object,
    tensor_of,
    with_strides,
)

POSITION = "holdfast"
"""The entry for state that Lightning's own checkpoints lack, such as the data position and random generators."""

VERSION = 1
"""The format version of these trees. It is incremented if earlier versions of holdfast cannot read new trees."""

_VERSION = "tree_version"  # absent in trees from version 0.1.0
_VERSIONS = "state_dict_versions"
_NUMPY = "numpy.ndarray"
_TYPES = "value_types"  # entry that lists the path and original type of each value saved as plain data
_FIRST = ("state_dict", "optimizer_states", "lr_schedulers")  # entries that come first in the tree
_REQUIRED = ("state_dict", "optimizer_states", "loops", POSITION)
_Keys = tuple[str | int, ...]


class _LeftError(Exception):
    """Raised for a value that cannot be saved; the message names its type."""


def to_tree(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a Lightning checkpoint to a tree that the engine can save; return it and a list of omitted entries."""
    plain = _Plain()
    tree = plain.entries({name: checkpoint[name] for name in (*_FIRST, *checkpoint) if name in checkpoint}, ())
    if lost := [line for line in plain.left if line.partition("/")[0].partition(" ")[0] in _REQUIRED]:
        raise UnsupportedLeafError(
            "the run could not be resumed without these parts of its state, which are neither arrays nor plain data: "
            f"{', '.join(lost)}. Change what the module, the optimizer or the data loader returns as its state"
        )
    if versions := getattr(checkpoint.get("state_dict"), "_metadata", None):
        # Modules may need these versions to load older states. There may be many, so a single leaf holds all versions.
        tree[_VERSIONS] = json.dumps({name: facts.get("version") for name, facts in versions.items()})
    if plain.types:
        tree[_TYPES] = json.dumps(plain.types)
    tree[_VERSION] = VERSION
    return tree, plain.left


def from_tree(tree: dict[str, Any], source: object = "this checkpoint") -> dict[str, Any]:
    """Convert a tree loaded without a template to a Lightning checkpoint whose tensors share the tree's memory."""
    version = tree.get(_VERSION, 0)
    if not isinstance(version, int) or version > VERSION:
        raise FormatVersionError(
            f"{source}: its Lightning state has version {version!r:.20}, but this version of holdfast reads "
            f"versions up to {VERSION}; install the one that wrote it, or a newer one"
        )
    types = {tuple(keys): type_name for keys, type_name in json.loads(tree.get(_TYPES, "[]"))}
    checkpoint: dict[str, Any] = {
        name: _value(value, (name,), types) for name, value in tree.items() if name not in (_VERSION, _VERSIONS, _TYPES)
    }
    if (versions := tree.get(_VERSIONS)) is not None:
        state = OrderedDict(checkpoint["state_dict"])
        state._metadata = {  # type: ignore[attr-defined] # torch reads it
            name: {} if version is None else {"version": version} for name, version in json.loads(versions).items()
        }
        checkpoint["state_dict"] = state
    return checkpoint


def is_plain_tree(value: Any) -> bool:
    """Return whether a value can be saved completely."""
    plain = _Plain()
    plain.entries({"": value}, ())
    return not plain.left


class _Plain:
    """Converts values to plain data and arrays, and records converted types and omitted entries."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.types: list[tuple[_Keys, str]] = []

    def entries(self, value: dict[Any, Any], keys: _Keys) -> dict[Any, Any]:
        kept: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            inner = "/".join(map(str, (*keys, key)))
            if type(key) not in (str, int):
                self.left.append(f"{inner} (its key is a {type(key).__qualname__})")
                continue
            if type(key) is int and not -(2**63) <= key < 2**63:
                self.left.append(f"{inner} (its key is a number of more than 64 bits)")
                continue
            count = len(self.types)
            try:
                kept[key] = self.value(item, (*keys, key))
            except _LeftError as left:
                del self.types[count:]
                self.left.append(f"{inner} ({left})")
        return kept

    def value(self, value: Any, keys: _Keys) -> Any:
        """Convert a value to plain data and arrays; raise _LeftError for unsupported types."""
        value_type = type(value)
        if value_type in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise _LeftError(class_name(value))
            if not hasattr(value, "placements") and not value.is_contiguous():
                strides = list(value.stride())
                if is_permuted(value.shape, strides):  # strides may affect the rounding of later steps
                    self.types.append((keys, f"{STRIDES} {json.dumps(strides)}"))
            return value.detach()
        if isinstance(value, dict):
            return self.entries(value, keys)
        if value_type in (set, frozenset) and not all(type(item) in PLAIN for item in value):
            raise _LeftError(class_name(value))
        if value_type in (list, tuple, set, frozenset):
            # If an element fails, omit the whole entry, because omitting only the element would shift the others.
            return value_type([self.value(item, (*keys, index)) for index, item in enumerate(value)])
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject or value.dtype.names:
                raise _LeftError(class_name(value))
            if isinstance(value, np.ndarray):
                self.types.append((keys, _NUMPY))
            return value
        if isinstance(value, str) and not isinstance(value, Enum):
            return str(value)
        if (converted := as_plain(value)) is None:
            raise _LeftError(class_name(value))
        data = self.value(converted[0], keys)
        self.types.append((keys, converted[1]))
        return data


def _value(value: Any, keys: _Keys, types: Mapping[_Keys, str]) -> Any:
    type_name = types.get(keys)
    if type_name == _NUMPY and isinstance(value, np.ndarray):
        return value
    if type_name is not None and type_name.startswith(f"{STRIDES} "):
        strides = json.loads(type_name.removeprefix(STRIDES))
        return with_strides(tensor_of(value, copy=False), strides) if isinstance(value, np.ndarray) else value
    if isinstance(value, np.ndarray):
        value = tensor_of(value, copy=False)
    elif isinstance(value, dict) and value.keys() == {_NUMPY} and isinstance(value[_NUMPY], np.ndarray):
        value = value[_NUMPY]  # format of version 0.1.0
    elif isinstance(value, dict):
        entries = {key: _value(item, (*keys, key), types) for key, item in value.items()}
        value = OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    elif isinstance(value, list | tuple):
        value = type(value)(_value(item, (*keys, index), types) for index, item in enumerate(value))
    return value if type_name is None else from_plain(value, type_name)


# ---- values of other types, such as those in hyper-parameters
#
# Paths are saved as strings, namespaces as dictionaries, and dtypes by name, so that every reader can use them. The
# type names are also saved, to restore the original types. Restoring calls only the constructors in this table and
# constructors of classes that the program has already loaded.


logger = logging.getLogger("holdfast")

_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_LIBRARIES = ("numpy", "torch", "omegaconf", "builtins")  # packages whose classes are saved by name when used as values

# Keyed by saved type name: the type, and the functions that convert a value to plain data and back.
_CONVERTED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pathlib.Path": (pathlib.Path, str, pathlib.Path),
    "pathlib.PurePosixPath": (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    "pathlib.PureWindowsPath": (pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    "argparse.Namespace": (argparse.Namespace, vars, lambda entries: argparse.Namespace(**entries)),
    "types.SimpleNamespace": (types.SimpleNamespace, vars, lambda entries: types.SimpleNamespace(**entries)),
    "torch.Size": (torch.Size, list, torch.Size),
    "torch.device": (torch.device, str, torch.device),
    "numpy.dtype": (np.dtype, lambda dtype: dtype.str, np.dtype),
}


def as_plain(value: Any) -> tuple[Any, str] | None:
    """Return a value as plain data (which may itself need conversion) with its type name; None for unknown types."""
    path = import_path(type(value))
    if isinstance(value, np.dtype) and (value.hasobject or value.names):
        return None
    for name, (value_type, plain, _) in _CONVERTED.items():
        if isinstance(value, value_type):
            return plain(value), name
    if isinstance(value, _TORCH_NAMES):
        return str(value), "torch"
    if isinstance(value, Enum):
        return (value.name, f"enum {path}") if value.name in type(value).__members__ else None
    if isinstance(value, type):
        name = import_path(value)
        is_found = value.__module__.partition(".")[0] in _LIBRARIES and loaded_object(name) is value
        return (name.replace(":", "."), f"class {name}") if is_found else None
    if dataclasses.is_dataclass(value) and not isinstance(value, torch.nn.Module):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, f"dataclass {path}"
    if type(value).__module__.partition(".")[0] == "omegaconf":
        return sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False), "omegaconf"
    return None


def from_plain(plain: Any, type_name: str) -> Any:
    """Convert the result of :func:`as_plain` back to its type; return it unchanged if the type no longer exists."""
    try:
        if type_name in _CONVERTED:
            return _CONVERTED[type_name][2](plain)
        if type_name == "torch":
            named: Any = getattr(torch, str(plain).removeprefix("torch."), plain)
            return named if isinstance(named, _TORCH_NAMES) else plain
        if type_name == "omegaconf":
            return importlib.import_module("omegaconf").OmegaConf.create(plain)
        family, _, name = type_name.partition(" ")
        value_type = loaded_object(name)
        if not isinstance(value_type, type):
            raise LookupError(f"the program has not loaded {name}")
        if family == "class" and name.partition(".")[0].partition(":")[0] in _LIBRARIES:
            return value_type
        if family == "enum" and issubclass(value_type, Enum):
            return value_type[plain]
        made = instance_of(value_type, plain) if family == "dataclass" else None
        if made is None:
            raise LookupError(f"{name} is now something else")
        return made
    except Exception as error:
        logger.warning("left as plain data instead of %s: %s", type_name, error)
        return plain
