"""What a template asks for, leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import jax_leaves, jax_placement, torch_leaves
from .containers import class_name
from .frameworks import is_jax_abstract, is_jax_array, is_torch_tensor
from .leaves import NUMBER_KINDS, LeafProblem, report_problems
from .metadata import LeafMetadata
from .numpy_leaves import why_not_storable
from .python_leaves import is_python_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(slots=True)
class Target:
    """What one leaf of a template asks for.

    Attributes:
        name: The leaf's name.
        kind: "jax", "key", "torch", "numpy", "numpy_scalar", "bool", "int", "float", "complex", "str", "bytes", "none",
            "set", "frozenset", or "any" for whatever was saved.
        shape: Of the array as it is stored (for keys: of the key data); None where kind says all.
        dtype: Of the array as it is stored; None where kind says all.
        template: The leaf itself; None where there is no template.
        variant: What dtype cannot say: a key's implementation, the torch dtype that numpy does not have.
        sharding: Where the parts of a jax array shall lie; None leaves that to jax.
        cast: Whether elements of another dtype are cast to this one.
        resize: Whether another shape is padded with zeros or truncated to this one, at the end of each axis.
        origin: Who asks, for messages: "template" or "request".
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    template: Any
    variant: str | None = None
    sharding: Any = None
    cast: bool = False
    resize: bool = False
    origin: str = "template"


def describe_template(names: Sequence[str], values: Sequence[Any]) -> list[Target]:
    """Says what the leaves of a template ask for.

    Args:
        names: The leaves' names.
        values: Arrays of the three libraries (deleted ones and tensors on the meta device will do),
            `jax.ShapeDtypeStruct`, typed keys, Python values, or ``...`` for "as it was saved".

    Returns:
        One target for each leaf.

    Raises:
        UnsupportedLeafError: Leaves that cannot be templates; every one of them is named.
    """
    targets: list[Target] = []
    problems: list[tuple[str, str]] = []
    makers: dict[type, Callable[[str, Any], Target]] = {}  # a tree has few types, and they take a while to tell apart
    for name, value in zip(names, values, strict=True):
        maker = makers.get(type(value))
        if maker is None:
            maker = makers[type(value)] = _maker(value)
        try:
            targets.append(maker(name, value))
        except LeafProblem as problem:
            problems.append((name, str(problem)))
    report_problems(problems, "these leaves of the template cannot be loaded")
    return targets


def _maker(value: Any) -> Callable[[str, Any], Target]:
    """Returns what makes targets of values of this type."""
    if isinstance(value, np.ndarray | np.generic):
        return _numpy_target
    if is_jax_array(value) or is_jax_abstract(value):
        return _jax_target
    if is_torch_tensor(value):
        return _torch_target
    return _python_target


def _numpy_target(name: str, value: Any) -> Target:
    problem = why_not_storable(value.dtype)
    if problem is not None:
        raise LeafProblem(problem)
    kind = "numpy" if isinstance(value, np.ndarray) else "numpy_scalar"
    return Target(name, kind, value.shape, value.dtype, value)


def _jax_target(name: str, value: Any) -> Target:
    kind, dtype, shape, variant = jax_leaves.abstract_facts(value)
    return Target(name, kind, shape, dtype, value, variant, jax_placement.sharding_of(value))


def _torch_target(name: str, value: Any) -> Target:
    kind, dtype, shape, variant = torch_leaves.abstract_facts(value)
    return Target(name, kind, shape, dtype, value, variant)


def _python_target(name: str, value: Any) -> Target:
    if value is ... or isinstance(value, LeafMetadata):
        return Target(name, "any", None, None, value)
    if is_python_value(value):
        return Target(name, _python_kind(value), None, None, value)
    raise LeafProblem(f"is of type {class_name(value)}; templates are arrays, jax.ShapeDtypeStruct and Python values")


def _python_kind(value: Any) -> str:
    if value is None:
        return "none"
    for kind in (bool, int, float, complex, str, bytes, set, frozenset):
        if isinstance(value, kind):
            return kind.__name__
    raise LeafProblem(f"is of type {type(value).__name__}")


def is_number(target: Target) -> bool:
    """Whether the target is a Python number."""
    return target.kind in NUMBER_KINDS
