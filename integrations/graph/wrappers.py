"""Wrappers around one module: DDP, ``torch.compile``, Fabric, activation checkpointing. A graph has the module instead.

So a path does not depend on how a program runs its module, and a module that was saved bare restores into a wrapped
one, and vice versa.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...engine.pytree import WRAPPED

_CHECKPOINTED = "_checkpoint_wrapped_module"
STRIPPED_BY_TORCH = f"{_CHECKPOINTED}."  # state_dict() leaves this prefix out, and load_state_dict() adds it again
# The attributes that hold the module, by the names of the wrappers' classes.
_CLASSES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_original_module",
    "CheckpointWrapper": _CHECKPOINTED,
    "OffloadWrapper": _CHECKPOINTED,
}
_DICTIONARIES = {"", "dict", "ordered_dict", "OrderedDict", "collections.OrderedDict"}
_LIBRARIES = {"torch", "lightning", "lightning_fabric", "pytorch_lightning"}


def unwrapped(value: Any) -> Any:
    """Return the module inside wrappers; any other object as it is."""
    while (name := _attribute(type(value))) is not None:  # type: ignore[arg-type]  # mypy takes the class for an instance
        value = getattr(value, name)
    return value


def module_prefixes(module: Any, bare: str = "", wrapped: str = "") -> Iterator[tuple[str, str]]:
    """Generate the prefix of each module in a state dict: without the names of wrappers, and with them."""
    yield bare, wrapped
    inside = _attribute(type(module))  # type: ignore[arg-type]  # mypy takes the class for an instance
    for name, child in module._modules.items():
        if child is not None and name == inside:
            yield from module_prefixes(child, bare, wrapped if name == _CHECKPOINTED else f"{wrapped}{name}.")
        elif child is not None:
            yield from module_prefixes(child, f"{bare}{name}.", f"{wrapped}{name}.")


@lru_cache(maxsize=1024)  # many objects have few types
def _attribute(kind: Any) -> str | None:
    names = (_CLASSES.get(base.__name__) for base in kind.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES)
    return next((name for name in names if name is not None), None)


def wrapped_nodes(label: str, edges: Mapping[str, int]) -> list[int]:
    """Return the nodes of the wrapped modules in a saved wrapper, or in a dictionary of its values."""
    inside = [edges[name] for name in WRAPPED if name in edges]
    return inside if inside and (label in _DICTIONARIES or label.endswith(tuple(_CLASSES))) else []
