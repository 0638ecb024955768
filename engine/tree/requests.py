"""What a caller asks for one leaf, on top of what the template says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from . import jax_leaves
from .comparison import variant_of
from .frameworks import required
from .leaves import NUMBER_KINDS, Saved
from .names import display
from .numpy_leaves import number_kind
from .targets import Target

if TYPE_CHECKING:
    import numpy as np

_VALUES = NUMBER_KINDS | {"str"}
_ARRAYS = frozenset({"jax", "numpy", "torch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """How one leaf is to be loaded, where that differs from how it was saved or from its template.

    Attributes:
        kind: What it becomes: "jax", "numpy", "torch", "int", "float", "bool", "complex", "str"; None leaves that to
            the template.
        dtype: Its elements are cast to this; None never casts.
        shape: Its shape as a whole; None is the shape that was saved.
        resize: Whether a saved shape that differs from ``shape`` is padded with zeros or truncated, at the end of each
            axis; otherwise that is an error.
        sharding: Where its parts shall lie: a `jax.sharding.Sharding`, or None.
    """

    kind: str | None = None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    resize: bool = False
    sharding: Any = None


def requested(name: str, request: LeafRequest, saved: Saved, target: Target | None) -> Target:
    """Says what is asked for one leaf, all in all.

    Args:
        name: The leaf's name.
        request: What the caller asks for.
        saved: What the checkpoint says.
        target: What the template asks for, or None where there is none.

    Returns:
        What to compare with what was saved, and to make of it.

    Raises:
        OptionError: The request contradicts itself, or asks for a framework that is not installed.
    """
    asked = _kind(name, request)
    if asked in _VALUES:
        template = target.template if target is not None and target.kind == asked else None
        return Target(name, asked, None, None, template, cast=True, origin="request")
    if target is not None and target.dtype is not None:
        return _changed(target, asked or target.kind, request)
    if target is not None and target.kind != "any" and asked is None:
        return target  # a Python value
    return _made(name, asked or "any", request, saved)


def _kind(name: str, request: LeafRequest) -> str | None:
    """Returns the kind that a request asks for, if it does, and checks the request."""
    kind, sharding = request.kind, request.sharding
    if kind is not None and kind not in _VALUES | _ARRAYS:
        known = ", ".join(sorted(_VALUES | _ARRAYS))
        raise OptionError(f"{display(name)}: kind={kind!r} is not known; expected one of {known}")
    if kind in {"jax", "torch"}:
        required(kind)
    if sharding is None:
        return kind
    if kind not in {None, "jax"}:
        raise OptionError(f"{display(name)}: sharding= says where a jax array lies, and kind={kind!r} is none")
    if not isinstance(sharding, required("jax").sharding.Sharding):
        raise OptionError(f"{display(name)}: sharding={sharding!r:.80} must be a jax.sharding.Sharding")
    return "jax"


def _made(name: str, kind: str, request: LeafRequest, saved: Saved) -> Target:
    """Says what is asked for without an array in the template: of what was saved."""
    anything = Target(name, "any", None, None, None, origin="request")
    if saved.dtype is None or saved.shape is None or saved.kind in {"str", "bytes"}:  # a value that is no number
        lenient = kind == "any" or saved.kind == "none"
        return anything if lenient else Target(name, kind, None, None, None, origin="request")
    variant = variant_of(saved)
    if kind == "any" or (kind == "numpy" and variant is not None):
        if request.dtype is None and request.shape is None:
            return anything
        number = None if request.dtype is None else number_kind(request.dtype)
        if saved.kind in NUMBER_KINDS and number is not None:
            return Target(name, number, None, None, None, cast=True, origin="request")
        kind = "numpy_scalar" if saved.kind == "numpy_scalar" and request.shape is None else "numpy"
    dtype = saved.dtype
    if kind == "jax" and saved.kind in NUMBER_KINDS:
        dtype = jax_leaves.narrowed(dtype) or dtype  # as jax makes arrays of numbers; it must hold the value exactly
    if kind == "jax" and saved.kind == "key":
        kind = "key"
    own = Target(name, kind, saved.shape, dtype, None, variant, origin="request")
    return _changed(own, kind, request)


def _changed(target: Target, kind: str, request: LeafRequest) -> Target:
    """Says what is asked for when a request is put on top of something else."""
    assert target.shape is not None
    if kind == "jax" and target.kind == "key":
        kind = "key"
    shape, dtype, cast = target.shape, target.dtype, False
    if request.shape is not None:
        own = 1 if target.kind == "key" or (target.variant or "").startswith("complex") else 0
        shape = (*request.shape, *shape[len(shape) - own :])
    if request.dtype is not None:
        # Neither a key nor what torch alone knows is a number that could be cast.
        dtype, cast = request.dtype, target.kind != "key" and target.variant is None
    return replace(
        target,
        kind=kind,
        shape=shape,
        dtype=dtype,
        template=target.template if kind == target.kind else None,
        variant=target.variant if kind in {"torch", "key"} else None,
        sharding=target.sharding if request.sharding is None else request.sharding,
        cast=cast,
        resize=request.resize and request.shape is not None and kind != "key",
        origin="request",
    )
