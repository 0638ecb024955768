"""A Lightning checkpoint as a tree of arrays and plain values, and back; nothing is pickled.

The tree has the keys of the dictionary that Lightning makes: ``state_dict``, ``optimizer_states``, ``lr_schedulers``,
``loops``, ``callbacks``, ``hyper_parameters`` and what modules and plugins add. Arrays come back as tensors, as nearly
all of them are; a numpy array lies in a dictionary with the one key ``numpy.ndarray``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...engine.errors import UnsupportedLeafError

POSITION = "holdfast"
"""Where a checkpoint keeps what Lightning's own does not have: the position in the data, and random generators."""

_NUMPY = "numpy.ndarray"
_VERSIONS = "state_dict_versions"
_FIRST = ("state_dict", "optimizer_states", "lr_schedulers")  # what people look for in a listing
_REQUIRED = ("state_dict", "optimizer_states", "loops", POSITION)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Left:
    """Stands for a value that cannot be saved, with the name of its type."""

    def __init__(self, value: object) -> None:
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def to_tree(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint of Lightning as a tree that the engine saves, and a line for each entry that was left out.

    An entry is left out when it is, or holds, an object that is neither an array nor plain data; its line is such as
    ``hyper_parameters/loss (torch.nn.modules.loss.MSELoss)``. The checkpoint is not changed.

    Raises:
        UnsupportedLeafError: There is such an object where a run could not be resumed without it.
    """
    left: list[str] = []
    first = [name for name in _FIRST if name in checkpoint]
    order = [*first, *(name for name in checkpoint if name not in first)]
    tree = _dict({name: checkpoint[name] for name in order}, "", left)
    lost = [line for line in left if line.partition("/")[0].partition(" ")[0] in _REQUIRED]
    if lost:
        raise UnsupportedLeafError(
            "the run could not be resumed without these parts of its state, which are neither arrays nor plain data: "
            f"{', '.join(lost)}. Change what the module, the optimizer or the data loader returns as its state"
        )
    versions = getattr(checkpoint.get("state_dict"), "_metadata", None)
    if versions:
        # The versions of the modules, which they may need to load older states. One leaf, not one for every module.
        tree[_VERSIONS] = json.dumps({name: facts.get("version") for name, facts in versions.items()})
    return tree, left


def from_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what was loaded without a template as a checkpoint of Lightning; tensors share the arrays' memory."""
    checkpoint: dict[str, Any] = {name: _value(value) for name, value in tree.items() if name != _VERSIONS}
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
    left: list[str] = []
    return not isinstance(_plain(value, "", left), _Left) and not left


def _dict(value: dict[Any, Any], path: str, left: list[str]) -> dict[Any, Any]:
    kept: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
    for key, item in value.items():
        inner = f"{path}{key}"
        if type(key) not in (str, int):
            left.append(f"{inner} (its key is a {type(key).__qualname__})")
            continue
        if type(key) is int and not -(2**63) <= key < 2**63:
            left.append(f"{inner} (its key is a number of more than 64 bits)")
            continue
        found = _plain(item, inner, left)
        if isinstance(found, _Left):
            left.append(f"{inner} ({found.kind})")
        else:
            kept[key] = found
    return kept


def _plain(value: Any, path: str, left: list[str]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _Left(value) if value.layout != torch.strided or value.is_quantized or value.is_meta else value.detach()
    if isinstance(value, dict):
        return _dict(value, f"{path}/", left)
    if kind in (list, tuple, set, frozenset, torch.Size):
        return _sequence(value, path, left)
    if isinstance(value, np.ndarray):
        return _Left(value) if value.dtype.hasobject or value.dtype.names else {_NUMPY: value}
    if isinstance(value, np.generic):
        return _Left(value) if value.dtype.hasobject or value.dtype.names else value
    if isinstance(value, str) and not isinstance(value, Enum):
        return str(value)
    return _Left(value)


def _sequence(value: Any, path: str, left: list[str]) -> Any:
    items = []
    for index, item in enumerate(value):
        found = _plain(item, f"{path}/{index}", left)
        if isinstance(found, _Left):
            return found  # leaving one element out would move the others: the whole entry goes
        items.append(found)
    if isinstance(value, set | frozenset):
        return type(value)(items) if all(type(item) in _PLAIN for item in items) else _Left(value)
    return items if isinstance(value, list) else tuple(items)


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, dict):
        if value.keys() == {_NUMPY} and isinstance(value[_NUMPY], np.ndarray):
            return value[_NUMPY]
        entries = {key: _value(item) for key, item in value.items()}
        return OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    if isinstance(value, list | tuple):
        return type(value)(map(_value, value))
    return value


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return torch.from_numpy(array)
    # Types that torch knows by the same names as ml_dtypes; numpy only passes their bits.
    bits = torch.from_numpy(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape))
    found: torch.dtype = getattr(torch, array.dtype.name)
    return bits.view(found)
