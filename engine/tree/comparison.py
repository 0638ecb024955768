"""Whether what was saved fits what a template asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import jax_leaves, torch_placement
from .external import PLACEHOLDER
from .leaves import ARRAY_KINDS, NUMBER_KINDS, Saved
from .metadata import LeafMetadata, metadata_of
from .names import display
from .numpy_leaves import number_kind

if TYPE_CHECKING:
    import numpy as np

    from .targets import Target


def compare(target: Target, saved: Saved, path: str | None = None) -> str | None:
    """Compares one leaf of a template with the leaf that was saved. Nothing is ever cast silently.

    Arrays of the three libraries stand for each other when shape and dtype are the same. A Python number and a 0-d
    array (or numpy scalar) of the same kind stand for each other, too: whether the value fits is seen once it is read.

    Args:
        target: What the template asks for.
        saved: What the checkpoint says.
        path: Shown to people; the target's own by default.

    Returns:
        None if they fit; otherwise one line such as
        ``params/w: expected float32[10, 3] (template), found float32[10, 4] (checkpoint)``.
    """
    if target.kind == "any":
        wanted = target.template
        return compare_metadata(target.name, wanted, saved) if isinstance(wanted, LeafMetadata) else None
    reason = ""
    if target.kind == "jax" and target.dtype is not None:
        actual = jax_leaves.narrowed(target.dtype)
        if actual is not None:
            reason = f"; jax would make it {actual}: set jax_enable_x64, or ask for a numpy array"
    new = target.cast or (target.template is None and target.variant is None)
    if target.kind == "torch" and target.dtype is not None and new and not torch_placement.torch_name(target.dtype):
        reason = "; torch has no such dtype"
    if not reason and _fits(target, saved):
        return None
    where = display(target.name) if path is None else path
    expected = spell(target.kind, target.dtype, target.shape, target.variant)
    found = spell(saved.kind, saved.dtype, saved.shape, variant_of(saved))
    return f"{where}: expected {expected} ({target.origin}), found {found} (checkpoint){reason}"


def compare_metadata(name: str, wanted: LeafMetadata, saved: Saved) -> str | None:
    """Compares a leaf of a template that was made from a checkpoint with the leaf that was saved.

    Args:
        name: The leaf's name.
        wanted: The leaf of the template.
        saved: What the checkpoint says.

    Returns:
        None if they fit, otherwise a line as `compare` writes it.
    """
    found = metadata_of(saved)
    arrays = ARRAY_KINDS - {"key"}
    alike = wanted.kind == found.kind or {wanted.kind, found.kind} <= arrays
    free = wanted.kind in {"str", "bytes"} or wanted.kind in NUMBER_KINDS  # how these are stored depends on the value
    if alike and (free or (wanted.shape, wanted.dtype) == (found.shape, found.dtype)):
        return None
    expected = wanted.kind if free else str(wanted)
    actual = spell(saved.kind, saved.dtype, saved.shape, variant_of(saved))
    return f"{display(name)}: expected {expected} (template), found {actual} (checkpoint)"


def _fits(target: Target, saved: Saved) -> bool:
    wanted, kind = target.kind, saved.kind
    if wanted in NUMBER_KINDS:
        number = saved_number(saved)
        return number == wanted or (target.cast and _castable(number, wanted))
    if target.dtype is None:
        return wanted == kind
    if kind in NUMBER_KINDS:
        number = number_kind(target.dtype)
        same = number == kind or (target.cast and _castable(kind, number))
        return target.variant is None and target.shape == () and same
    if kind not in ARRAY_KINDS and kind != "numpy_scalar":
        return False
    if saved.dtype is None or target.variant != variant_of(saved) or (wanted == "key") != (kind == "key"):
        return False
    if target.shape != saved.shape and not (target.resize and _same_axes(target.shape, saved.shape)):
        return False
    cast = target.cast and _castable(number_kind(saved.dtype), number_kind(target.dtype))
    return cast or same_dtype(target.dtype, saved.dtype)


def _castable(one: str | None, other: str | None) -> bool:
    """Whether numbers of one kind can be cast to another on request; to drop imaginary parts is never what is meant."""
    return one is not None and other is not None and (one != "complex" or other == "complex")


def _same_axes(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    return one is not None and other is not None and len(one) == len(other)


def same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether two dtypes have the same values; the order of their bytes does not matter."""
    return one == other or one.newbyteorder("=") == other.newbyteorder("=")


def saved_number(saved: Saved) -> str | None:
    """Gives the kind of Python number that a saved leaf can be read as, or None."""
    if saved.kind in NUMBER_KINDS:
        return saved.kind
    is_array = saved.kind in ARRAY_KINDS or saved.kind == "numpy_scalar"
    if is_array and saved.kind != "key" and saved.shape == () and saved.dtype is not None and variant_of(saved) is None:
        return number_kind(saved.dtype)
    return None


def variant_of(saved: Saved) -> str | None:
    """Gives what the dtype cannot say of a saved leaf: a key's implementation, the torch dtype that numpy lacks."""
    found = saved.details.get("impl" if saved.kind == "key" else "torch_dtype")
    return None if found is None else str(found)


def spell(kind: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, variant: str | None = None) -> str:
    """Writes dtype and shape as people read them: ``float32[10, 3]``, ``key<threefry2x32>[4]``, ``int``, ``None``."""
    if kind == "none":
        return "None"
    if kind == PLACEHOLDER:
        return "a placeholder, saved without data"
    if dtype is None or shape is None or kind in NUMBER_KINDS or kind in {"str", "bytes"}:
        return kind
    if kind == "key":
        return f"key{'' if variant is None else f'<{variant}>'}{list(shape[:-1])}"
    if variant is not None and variant.startswith("complex"):
        return f"{variant}{list(shape[:-1])}"
    text = f"{variant or dtype}{list(shape)}"
    return f"numpy scalar {text}" if kind == "numpy_scalar" else text
