"""Conversion of a Lightning checkpoint to a tree of arrays and plain values, and back, without pickle.

The tree has the keys of the dictionary that Lightning makes: ``state_dict``, ``optimizer_states``, ``lr_schedulers``,
``loops``, ``callbacks``, ``hyper_parameters`` and what modules and plugins add. Arrays are loaded as tensors, as nearly
all of them are. The entry ``value_types`` lists the values of other types, such as numpy arrays, paths, namespaces.
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
"""The entry for the state that Lightning's own checkpoints lack: the position in the data, and random generators."""

VERSION = 1
"""The version of these trees. It is raised where the version of holdfast before could not read what is new."""

_VERSION = "tree_version"  # trees of version 0.1.0 have none
_VERSIONS = "state_dict_versions"
_NUMPY = "numpy.ndarray"
_TYPES = "value_types"  # the types of values that are saved as plain data: pairs of the keys of a value and its type
_FIRST = ("state_dict", "optimizer_states", "lr_schedulers")  # entries that a listing shows first
_REQUIRED = ("state_dict", "optimizer_states", "loops", POSITION)
_Keys = tuple[str | int, ...]


class _LeftError(Exception):
    """A value cannot be saved, of the type that is named."""

    def __init__(self, value: object) -> None:
        super().__init__(class_name(value))


def to_tree(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint of Lightning as a tree that the engine saves, and a line for each entry that was left out."""
    plain = _Plain()
    first = [name for name in _FIRST if name in checkpoint]
    order = [*first, *(name for name in checkpoint if name not in first)]
    tree = plain.entries({name: checkpoint[name] for name in order}, ())
    lost = [line for line in plain.left if line.partition("/")[0].partition(" ")[0] in _REQUIRED]
    if lost:
        raise UnsupportedLeafError(
            "the run could not be resumed without these parts of its state, which are neither arrays nor plain data: "
            f"{', '.join(lost)}. Change what the module, the optimizer or the data loader returns as its state"
        )
    versions = getattr(checkpoint.get("state_dict"), "_metadata", None)
    if versions:
        # Modules may need their versions to load older states. All are in one leaf, as there are many modules.
        tree[_VERSIONS] = json.dumps({name: facts.get("version") for name, facts in versions.items()})
    if plain.types:
        tree[_TYPES] = json.dumps(plain.types)
    tree[_VERSION] = VERSION
    return tree, plain.left


def from_tree(tree: dict[str, Any], place: object = "this checkpoint") -> dict[str, Any]:
    """Convert a tree that was loaded without a template to a checkpoint of Lightning; tensors share its memory."""
    version = tree.get(_VERSION, 0)
    if not isinstance(version, int) or version > VERSION:
        raise FormatVersionError(
            f"{place}: the state of its Lightning run has version {version!r:.20}, and this version of holdfast reads "
            f"versions up to {VERSION}; install the one that wrote it, or a newer one"
        )
    types = {tuple(keys): kind for keys, kind in json.loads(tree.get(_TYPES, "[]"))}
    checkpoint: dict[str, Any] = {
        name: _value(value, (name,), types) for name, value in tree.items() if name not in (_VERSION, _VERSIONS, _TYPES)
    }
    versions = tree.get(_VERSIONS)
    if versions is not None:
        state = OrderedDict(checkpoint["state_dict"])
        state._metadata = {  # type: ignore[attr-defined] # where torch looks for it
            name: {} if version is None else {"version": version} for name, version in json.loads(versions).items()
        }
        checkpoint["state_dict"] = state
    return checkpoint


def is_plain_tree(value: Any) -> bool:
    """Return whether a value would be saved in full."""
    plain = _Plain()
    plain.entries({"": value}, ())
    return not plain.left


class _Plain:
    """Converts values to plain data and arrays, and notes values of other types and those that are left out."""

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
        """Return a value as plain data and arrays; _LeftError refuses others."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            unusual = value.layout != torch.strided or value.is_quantized or value.is_meta
            if unusual:
                raise _LeftError(value)
            if not hasattr(value, "placements") and not value.is_contiguous():
                strides = list(value.stride())
                if is_permuted(value.shape, strides):  # The rounding of the next steps may depend on it.
                    self.types.append((keys, f"{STRIDES} {json.dumps(strides)}"))
            return value.detach()
        if isinstance(value, dict):
            return self.entries(value, keys)
        if kind in (set, frozenset) and not all(type(item) in PLAIN for item in value):
            raise _LeftError(value)
        if kind in (list, tuple, set, frozenset):
            # Leaving out one element would move the others, so the whole entry is left out.
            return kind([self.value(item, (*keys, index)) for index, item in enumerate(value)])
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject or value.dtype.names:
                raise _LeftError(value)
            if isinstance(value, np.ndarray):
                self.types.append((keys, _NUMPY))
            return value
        if isinstance(value, str) and not isinstance(value, Enum):
            return str(value)
        if (other := as_plain(value)) is None:
            raise _LeftError(value)
        data, name = other
        found = self.value(data, keys)
        self.types.append((keys, name))
        return found


def _value(value: Any, keys: _Keys, types: Mapping[_Keys, str]) -> Any:
    kind = types.get(keys)
    if kind == _NUMPY and isinstance(value, np.ndarray):
        return value
    if kind is not None and kind.startswith(f"{STRIDES} "):
        strides = json.loads(kind.removeprefix(STRIDES))
        return with_strides(tensor_of(value, copy=False), strides) if isinstance(value, np.ndarray) else value
    if isinstance(value, np.ndarray):
        value = tensor_of(value, copy=False)
    elif isinstance(value, dict) and value.keys() == {_NUMPY} and isinstance(value[_NUMPY], np.ndarray):
        value = value[_NUMPY]  # Version 0.1.0 saved arrays so.
    elif isinstance(value, dict):
        entries = {key: _value(item, (*keys, key), types) for key, item in value.items()}
        value = OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    elif isinstance(value, list | tuple):
        value = type(value)(_value(item, (*keys, index), types) for index, item in enumerate(value))
    return value if kind is None else from_plain(value, kind)


# ---- values of other types, which hyper-parameters hold beside numbers and strings
#
# A path is saved as a string, a namespace as a dictionary, a dtype by its name: every reader can use that. The names of
# the types are saved beside them, so that Lightning gets the original values. Only the constructors in this table are
# called for that; a class of the program is only used if the program has loaded it.


logger = logging.getLogger("holdfast")

_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_LIBRARIES = ("numpy", "torch", "omegaconf", "builtins")  # libraries whose classes are saved by name

# By the name of the type that is saved: the type, what makes plain data of a value, and what makes the value of it.
_KNOWN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pathlib.Path": (pathlib.Path, str, pathlib.Path),
    "pathlib.PurePosixPath": (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    "pathlib.PureWindowsPath": (pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    "argparse.Namespace": (argparse.Namespace, vars, lambda one: argparse.Namespace(**one)),
    "types.SimpleNamespace": (types.SimpleNamespace, vars, lambda one: types.SimpleNamespace(**one)),
    "torch.Size": (torch.Size, list, torch.Size),
    "torch.device": (torch.device, str, torch.device),
    "numpy.dtype": (np.dtype, lambda one: one.str, np.dtype),
}


def as_plain(value: Any) -> tuple[Any, str] | None:
    """Return a value as plain data, which may contain further such values, and its type; None for unknown types."""
    kind = type(value)
    if isinstance(value, np.dtype) and (value.hasobject or value.names):
        return None
    for name, (its_type, plain, _) in _KNOWN.items():
        if isinstance(value, its_type):
            return plain(value), name
    if isinstance(value, _TORCH_NAMES):
        return str(value), "torch"
    if isinstance(value, Enum):
        return (value.name, f"enum {import_path(kind)}") if value.name in kind.__members__ else None
    if isinstance(value, type):
        known = value.__module__.partition(".")[0] in _LIBRARIES and loaded_object(import_path(value)) is value
        return (import_path(value).replace(":", "."), f"class {import_path(value)}") if known else None
    if dataclasses.is_dataclass(value) and not isinstance(value, torch.nn.Module):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return entries, f"dataclass {import_path(kind)}"
    if kind.__module__.partition(".")[0] == "omegaconf":
        return sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False), "omegaconf"
    return None


def from_plain(plain: Any, kind: str) -> Any:
    """Return the value that :func:`as_plain` was given; the plain data if its class does not exist any more."""
    try:
        if kind in _KNOWN:
            return _KNOWN[kind][2](plain)
        if kind == "torch":
            named: Any = getattr(torch, str(plain).removeprefix("torch."), plain)
            return named if isinstance(named, _TORCH_NAMES) else plain
        if kind == "omegaconf":
            return importlib.import_module("omegaconf").OmegaConf.create(plain)
        family, _, name = kind.partition(" ")
        found = loaded_object(name)
        if not isinstance(found, type):
            raise LookupError(f"the program has not loaded {name}")
        if family == "class" and name.partition(".")[0].partition(":")[0] in _LIBRARIES:
            return found
        if family == "enum" and issubclass(found, Enum):
            return found[plain]
        made = instance_of(found, plain) if family == "dataclass" else None
        if made is None:
            raise LookupError(f"{name} is something else now")
        return made
    except Exception as error:
        logger.warning("left as plain data instead of %s: %s", kind, error)
        return plain
