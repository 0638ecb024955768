"""Attributes of torch modules and optimizers that steps change, and that ``state_dict()`` lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...engine.pytree import is_torch_tensor, loaded
from ..graph import has_own_protocol, is_module, is_optimizer, tracked_attributes

Values = Mapping[str, tuple[Any, Any]]  # by path: the value, and the version of a tensor


def unsaved_attributes(objects: Iterable[tuple[str, Any]]) -> Values:
    """Return numbers and tensors of modules and optimizers that a checkpoint leaves out, as ``state_dict()`` does.

    ``objects`` come with paths. Objects that define their own state are left out, and so are those of torch.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for path, value in objects:
        parts = value.named_modules() if is_module(value) else [("", value)] if is_optimizer(value) else ()
        for below, part in parts:
            if not _decides_itself(part):
                name = ".".join(filter(None, (path, below)))
                found |= {f"{name}.{key}": one for key, one in _changing(part).items()}
    return found


def changed(before: Values, now: Values) -> list[str]:
    """Return the paths of the values that have changed."""
    return [path for path, one in now.items() if path in before and before[path] != one]


def _decides_itself(part: Any) -> bool:
    if type(part).__module__.startswith("torch.") or has_own_protocol(part):
        return True
    torch: Any = loaded("torch")
    return is_module(part) and type(part).get_extra_state is not torch.nn.Module.get_extra_state


def _changing(part: Any) -> dict[str, tuple[Any, Any]]:
    """Return the attributes that are numbers, tensors, tuples or lists of tensors, or None, which may become one."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in tracked_attributes(part):
        if type(value) in (int, float, type(None)):
            found[name] = value, None
        elif tensors := _tensors(value):
            found[name] = [*map(id, tensors)], [one._version for one in tensors]
    return found


def _tensors(value: Any) -> list[Any]:
    """Return a tensor, or those in a tuple or list of tensors, unless an optimizer changes them."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values if all(is_torch_tensor(one) and not _is_trained(one) for one in values) else []


def _is_trained(tensor: Any) -> bool:
    return bool(tensor.is_inference() or (tensor.is_leaf and tensor.requires_grad))
