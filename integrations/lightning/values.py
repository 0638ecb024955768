"""Values of other types as plain data, and back: what hyper-parameters hold beside numbers and strings.

A path is saved as a string, a namespace as a dictionary, a dtype by its name: every reader can use that. The names of
the types are saved beside them, so that Lightning gets the values back as they were. Only the constructors listed here
are called for that; a class of the program is only used if the program has loaded it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import pathlib
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...engine.stateful import instance_of

logger = logging.getLogger("holdfast")

_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_LIBRARIES = ("numpy", "torch", "omegaconf", "builtins")  # whose classes are saved by name

_MAKE: dict[str, Callable[[Any], Any]] = {
    "pathlib.Path": pathlib.Path,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    "argparse.Namespace": lambda value: argparse.Namespace(**value),
    "types.SimpleNamespace": lambda value: types.SimpleNamespace(**value),
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "numpy.dtype": np.dtype,
}


def as_plain(value: Any) -> tuple[Any, str] | None:
    """Return a value as plain data, perhaps with values inside to treat alike, and its type; None if it is unknown."""
    kind = type(value)
    if isinstance(value, pathlib.PurePath):
        return str(value), "pathlib.Path" if isinstance(value, pathlib.Path) else f"pathlib.{kind.__name__}"
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        name = "argparse.Namespace" if isinstance(value, argparse.Namespace) else "types.SimpleNamespace"
        return dict(vars(value)), name
    if isinstance(value, torch.Size):
        return list(value), "torch.Size"
    if isinstance(value, torch.device):
        return str(value), "torch.device"
    if isinstance(value, _TORCH_NAMES):
        return str(value), "torch"
    if isinstance(value, np.dtype):
        return None if value.hasobject or value.names else (value.str, "numpy.dtype")
    if isinstance(value, Enum):
        return (value.name, f"enum {_name(kind)}") if value.name in kind.__members__ else None
    if isinstance(value, type):
        known = value.__module__.partition(".")[0] in _LIBRARIES and _found(_name(value)) is value
        return (_name(value).replace(":", "."), f"class {_name(value)}") if known else None
    if dataclasses.is_dataclass(value) and not isinstance(value, torch.nn.Module):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return entries, f"dataclass {_name(kind)}"
    if kind.__module__.partition(".")[0] == "omegaconf":
        return sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False), "omegaconf"
    return None


def from_plain(plain: Any, kind: str) -> Any:
    """Return the value that :func:`as_plain` was given; the plain data where its class is not there any more."""
    try:
        if kind in _MAKE:
            return _MAKE[kind](plain)
        if kind == "torch":
            named: Any = getattr(torch, str(plain).removeprefix("torch."), plain)
            return named if isinstance(named, _TORCH_NAMES) else plain
        if kind == "omegaconf":
            return importlib.import_module("omegaconf").OmegaConf.create(plain)
        family, _, name = kind.partition(" ")
        found = _found(name)
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


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str) -> Any:
    """Return what a name such as ``torch.nn:ReLU`` stands for in the modules that are loaded, or None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
