"""Templates: what each of their leaves asks for, the caller's requests, and whether a saved leaf fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import OptionError, difference
from . import jax_leaves, torch_leaves
from .containers import class_name
from .host_leaves import check_storable, is_python_value, number_kind
from .leaves import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    NUMBERS,
    STATIC,
    LeafMetadata,
    LeafProblem,
    Saved,
    StaticLeaf,
    is_jax_abstract,
    is_jax_array,
    is_torch_tensor,
    metadata_of,
    report_problems,
    required,
    spell,
)
from .names import format_path

_VALUES = NUMBER_KINDS | {"str"}
_ARRAYS = frozenset({"jax", "numpy", "torch"})


@dataclass(slots=True)
class LeafTemplate:
    """The array or value that one leaf of a template asks for."""

    name: str
    # "jax", "key", "torch", "numpy", "numpy_scalar", "bool", "int", "float", "complex", "str", "bytes", "none", "set",
    # "frozenset", "numbers" for a packed sequence that stays packed, or "any" for the leaf as it was saved.
    kind: str
    # Shape of the stored array (of the key data for keys); None where the kind says all.
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None  # element type of the stored array; None where the kind says all
    leaf: Any  # the leaf of the template; None where there is no template
    variant: str | None = None  # see `Saved.variant`
    weak: bool = False  # whether a jax array is weakly typed
    sharding: Any = None  # sharding of a jax array; None leaves it to jax
    cast: bool = False  # whether elements of another dtype are cast to this one
    resize: bool = False  # whether another shape is padded with zeros or truncated to this one, at the end of each axis
    origin: str = "template"  # "template" or "request", for messages

    def __str__(self) -> str:
        return spell(self.kind, self.dtype, self.shape, self.variant)


def describe_template(names: Sequence[str], values: Sequence[Any]) -> list[LeafTemplate]:
    """Describe the leaves of a template, or raise one error for all leaves that cannot be loaded."""
    templates: list[LeafTemplate] = []
    problems: list[tuple[str, str]] = []
    describers: dict[type, Callable[[str, Any], LeafTemplate]] = {}  # a tree has few types
    for name, value in zip(names, values, strict=True):
        describer = describers.get(type(value))
        if describer is None:
            describer = describers[type(value)] = _describer(value)
        try:
            templates.append(describer(name, value))
        except LeafProblem as problem:
            problems.append((name, str(problem)))
    report_problems(problems, "these leaves of the template cannot be loaded")
    return templates


def _describer(value: Any) -> Callable[[str, Any], LeafTemplate]:
    if isinstance(value, np.ndarray | np.generic):
        return _describe_numpy
    if is_jax_array(value) or is_jax_abstract(value):
        return _describe_jax
    if is_torch_tensor(value):
        return _describe_torch
    if isinstance(value, StaticLeaf):
        return _describe_static
    return _describe_python


def _describe_numpy(name: str, value: Any) -> LeafTemplate:
    check_storable(value.dtype)
    kind = "numpy" if isinstance(value, np.ndarray) else "numpy_scalar"
    return LeafTemplate(name, kind, value.shape, value.dtype, value)


def _describe_jax(name: str, value: Any) -> LeafTemplate:
    kind, dtype, shape, variant = jax_leaves.template_facts(value)
    sharding = jax_leaves.template_sharding(value)
    return LeafTemplate(name, kind, shape, dtype, value, variant, jax_leaves.is_weak(value), sharding)


def _describe_torch(name: str, value: Any) -> LeafTemplate:
    kind, dtype, shape, variant = torch_leaves.template_facts(value)
    return LeafTemplate(name, kind, shape, dtype, value, variant)


def _describe_static(name: str, value: StaticLeaf) -> LeafTemplate:
    return LeafTemplate(name, STATIC, None, None, value, value.name)


def _describe_python(name: str, value: Any) -> LeafTemplate:
    if value is ... or isinstance(value, LeafMetadata):
        return LeafTemplate(name, "any", None, None, value)
    if value is None:
        return LeafTemplate(name, "none", None, None, value)
    if not is_python_value(value):
        raise LeafProblem(
            f"is of type {class_name(value)}; templates are arrays, jax.ShapeDtypeStruct and Python values"
        )
    kinds = (bool, int, float, complex, str, bytes, set, frozenset)
    return LeafTemplate(name, next(kind.__name__ for kind in kinds if isinstance(value, kind)), None, None, value)


def compare(template: LeafTemplate, saved: Saved, path: str | None = None) -> str | None:
    """Return how a leaf of a template differs from the saved leaf, or None where it fits. Nothing is cast silently.

    Arrays of the three libraries stand for each other when shape and dtype are the same. A Python number and a 0-d
    array (or numpy scalar) of the same kind stand for each other, too; whether the value fits shows when it is read.
    """
    if template.kind == "any":
        wanted = template.leaf
        return compare_metadata(template.name, wanted, saved) if isinstance(wanted, LeafMetadata) else None
    reason = ""
    if template.kind == "jax" and template.dtype is not None:
        actual = jax_leaves.narrowed(template.dtype)
        if actual is not None:
            reason = f"; jax would make it {actual}: set jax_enable_x64, or ask for a numpy array"
    new = template.cast or (template.leaf is None and template.variant is None)
    if template.kind == "torch" and template.dtype is not None and new and not torch_leaves.torch_name(template.dtype):
        reason = "; torch has no such dtype"
    if not reason and _fits(template, saved):
        return None
    where = format_path(template.name) if path is None else path
    return difference(where, template, saved, template.origin) + reason


def compare_metadata(name: str, wanted: LeafMetadata, saved: Saved) -> str | None:
    """Compare a leaf of a template that describes a checkpoint with the saved leaf, as `compare` does."""
    found = metadata_of(saved)
    arrays = ARRAY_KINDS - {"key"}
    alike = wanted.kind == found.kind or {wanted.kind, found.kind} <= arrays
    # The value decides how these kinds are stored.
    free = wanted.kind in {"str", "bytes", NUMBERS} or wanted.kind in NUMBER_KINDS
    if alike and (free or (wanted.shape, wanted.dtype) == (found.shape, found.dtype)):
        return None
    expected = wanted.kind if free else str(wanted)
    return difference(format_path(name), expected, saved, "template")


def _fits(template: LeafTemplate, saved: Saved) -> bool:
    wanted, kind = template.kind, saved.kind
    if wanted in NUMBER_KINDS:
        number = _saved_number(saved)
        return number == wanted or (template.cast and _castable(number, wanted))
    if template.dtype is None:
        return wanted == kind and (wanted != STATIC or template.variant == saved.variant)
    if kind in NUMBER_KINDS:
        number = number_kind(template.dtype)
        same = number == kind or (template.cast and _castable(kind, number))
        return template.variant is None and template.shape == () and same
    if kind not in ARRAY_KINDS and kind != "numpy_scalar" and not saved.is_number_array:
        return False
    if saved.dtype is None or template.variant != saved.variant or (wanted == "key") != (kind == "key"):
        return False
    if template.shape != saved.shape and not (template.resize and _same_axes(template.shape, saved.shape)):
        return False
    cast = template.cast and _castable(number_kind(saved.dtype), number_kind(template.dtype))
    return cast or _same_dtype(template.dtype, saved.dtype)


def _castable(one: str | None, other: str | None) -> bool:
    """Whether numbers of one kind can be cast to another on request; imaginary parts are never dropped."""
    return one is not None and other is not None and (one != "complex" or other == "complex")


def _same_axes(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    return one is not None and other is not None and len(one) == len(other)


def _same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether two dtypes have the same values, in any byte order."""
    return one == other or one.newbyteorder("=") == other.newbyteorder("=")


def _saved_number(saved: Saved) -> str | None:
    """Return the kind of Python number that a saved leaf can be read as, or None."""
    if saved.kind in NUMBER_KINDS:
        return saved.kind
    is_array = saved.kind in ARRAY_KINDS or saved.kind == "numpy_scalar"
    if is_array and saved.kind != "key" and saved.shape == () and saved.dtype is not None and saved.variant is None:
        return number_kind(saved.dtype)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """What the caller asks for one leaf, where that differs from the saved leaf or from its template."""

    # "jax", "numpy", "torch", "int", "float", "bool", "complex" or "str"; "numbers" leaves a packed sequence packed;
    # None leaves it to the template.
    kind: str | None = None
    dtype: np.dtype[Any] | None = None  # elements are cast to this; None never casts
    shape: tuple[int, ...] | None = None  # shape of the whole array; None is the saved shape
    # Whether a saved shape that differs from ``shape`` is padded with zeros or truncated, at the end of each axis;
    # otherwise that is an error.
    resize: bool = False
    sharding: Any = None  # a `jax.sharding.Sharding`, or None
    weak: bool = False  # whether an array of jax becomes weakly typed


def with_request(name: str, request: LeafRequest, saved: Saved, template: LeafTemplate | None) -> LeafTemplate:
    asked = _kind(name, request)
    if asked == NUMBERS:
        return LeafTemplate(name, NUMBERS, None, None, None, origin="request")
    if asked in _VALUES:
        leaf = template.leaf if template is not None and template.kind == asked else None
        return LeafTemplate(name, asked, None, None, leaf, cast=True, origin="request")
    if template is not None and template.dtype is not None:
        return _changed(template, asked or template.kind, request)
    if template is not None and template.kind != "any" and asked is None:
        return template  # a Python value
    return made_like(name, replace(request, kind=asked), saved)


def _kind(name: str, request: LeafRequest) -> str | None:
    kind, sharding = request.kind, request.sharding
    if kind is not None and kind != NUMBERS and kind not in _VALUES | _ARRAYS:
        known = ", ".join(sorted(_VALUES | _ARRAYS))
        raise OptionError(f"{format_path(name)}: kind={kind!r} is not known; expected one of {known}")
    if kind in {"jax", "torch"}:
        required(kind)
    if sharding is None:
        return kind
    if kind not in {None, "jax"}:
        raise OptionError(f"{format_path(name)}: sharding= is for jax arrays, and kind={kind!r} asks for another kind")
    if not isinstance(sharding, required("jax").sharding.Sharding):
        raise OptionError(f"{format_path(name)}: sharding={sharding!r:.80} must be a jax.sharding.Sharding")
    return "jax"


def made_like(name: str, request: LeafRequest, saved: Saved) -> LeafTemplate:
    """Return the template that a request makes of a saved leaf, without an array in a template."""
    kind = request.kind or "any"
    anything = LeafTemplate(name, "any", None, None, None, origin="request")
    no_array = saved.kind in {"str", "bytes"} or (saved.kind == NUMBERS and not saved.is_number_array)
    if saved.dtype is None or saved.shape is None or no_array:  # a value that is no number
        lenient = kind == "any" or saved.kind == "none"
        return anything if lenient else LeafTemplate(name, kind, None, None, None, origin="request")
    variant = saved.variant
    if kind == "any" or (kind == "numpy" and variant is not None):
        if request.dtype is None and request.shape is None:
            return anything
        number = None if request.dtype is None else number_kind(request.dtype)
        if saved.kind in NUMBER_KINDS and number is not None:
            return LeafTemplate(name, number, None, None, None, cast=True, origin="request")
        kind = "numpy_scalar" if saved.kind == "numpy_scalar" and request.shape is None else "numpy"
    dtype = saved.dtype
    if kind == "jax" and saved.kind in NUMBER_KINDS:
        # jax makes such arrays of numbers; the dtype must hold the value exactly.
        dtype = jax_leaves.narrowed(dtype) or dtype
    if kind == "jax" and saved.kind == "key":
        kind = "key"
    own = LeafTemplate(name, kind, saved.shape, dtype, None, variant, request.weak, origin="request")
    return _changed(own, kind, request)


def _changed(template: LeafTemplate, kind: str, request: LeafRequest) -> LeafTemplate:
    assert template.shape is not None
    if kind == "jax" and template.kind == "key":
        kind = "key"
    shape, dtype, cast = template.shape, template.dtype, False
    if request.shape is not None:
        own = 1 if template.kind == "key" or (template.variant or "").startswith("complex") else 0
        shape = (*request.shape, *shape[len(shape) - own :])
    if request.dtype is not None:
        # Keys, and dtypes that only torch has, are not numbers that could be cast.
        dtype, cast = request.dtype, template.kind != "key" and template.variant is None
    return replace(
        template,
        kind=kind,
        shape=shape,
        dtype=dtype,
        leaf=template.leaf if kind == template.kind else None,
        variant=template.variant if kind in {"torch", "key"} else None,
        weak=template.weak and request.dtype is None,
        sharding=template.sharding if request.sharding is None else request.sharding,
        cast=cast,
        resize=request.resize and request.shape is not None and kind != "key",
        origin="request",
    )
