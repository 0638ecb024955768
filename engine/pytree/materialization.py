"""Creates leaves from stored values, either as a template requires or as numpy arrays and Python values.

A template may request a cast. A cast to integers or bool accepts only values that it does not change, so it refuses
NaN, infinities, fractions and values that would wrap around. A cast to floating-point or complex numbers rounds, but
finite values must stay finite, and NaN and infinities must be preserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, TreeMismatchError, difference
from . import jax_leaves, torch_leaves
from .flattening import collection_paused, unpack_numbers
from .host_leaves import decode_bytes, decode_value, number_kind
from .leaves import ARRAY_KINDS, NUMBER_KINDS, NUMBER_TYPES, NUMBERS, STATIC, Box, Part, Saved, ml_dtypes, spell, whole
from .names import format_path
from .template import LeafTemplate

_OF_JAX = ("jax", "key")
_STEP = 1 << 16  # number of elements that are cast and checked at a time, few enough to fit into the CPU cache


class CastProblem(ValueError):  # noqa: N818 - becomes one line of an error that names the leaf
    """Raised for a value or an array that cannot be made as requested; the message suggests a remedy."""


def cast_checked(array: NDArray[Any], dtype: np.dtype[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    array = np.asarray(array)  # a 0-d array may be passed as a numpy scalar
    if out is None:
        out = np.empty(array.shape, dtype)
    with np.errstate(all="ignore"):  # overflows are reported as CastProblem instead
        if np.can_cast(array.dtype, dtype, "safe"):
            out[...] = array
            return out
        blocks = np.nditer(
            [array, out], ["buffered", "external_loop", "zerosize_ok"], [["readonly"], ["writeonly"]], buffersize=_STEP
        )
        with blocks:
            for source, result in blocks:
                result[...] = source
                bad = _bad(source, result)
                if bad.any():
                    raise CastProblem(_message(source[bad][0], array.dtype, dtype))
    return out


def cast_number(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            if number_kind(dtype) in {"float", "complex"}:
                return cast_checked(np.array(float(value)), dtype)
        except OverflowError:
            pass  # the int is too large for a float
        short = value.bit_length() <= 200
        raise CastProblem(_message(value if short else f"one of {value.bit_length()} bits", np.dtype(object), dtype))
    return cast_checked(np.asarray(value), dtype)


def exact_cast(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return a 0-d array that holds a Python number exactly, including NaN and -0.0; None if that is impossible."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return None
    with np.errstate(all="ignore"):
        array = np.array(value).astype(dtype)  # np.array(value, dtype) would raise for values out of range
        return array if repr(type(value)(array)) == repr(value) else None


def _bad(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    before, after = number_kind(source.dtype), number_kind(result.dtype)
    if after == "bool":
        return np.asarray(source != result.astype(source.dtype))
    if after == "int":
        return _bad_int(source, result) if before in {"bool", "int"} else _bad_whole(source, result.dtype)
    return _bad_float(source, result)


def _bad_int(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    bad = np.asarray(result.astype(source.dtype) != source)
    for before, after in ((source, result), (result, source)):
        if before.dtype.kind == "b" or not ml_dtypes.iinfo(before.dtype).min:
            bad |= after < np.zeros((), after.dtype)  # the cast kept the bits but changed the sign
    return bad


def _bad_whole(source: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    info = ml_dtypes.iinfo(dtype)  # unlike numpy's, it supports all dtypes
    # Both bounds are exact as floats, because they are zero or powers of two.
    wide = source if source.dtype.kind == "f" and source.dtype.itemsize >= 8 else source.astype(np.float64)
    fits = (wide >= float(info.min)) & (wide < float(int(info.max) + 1)) & (np.trunc(wide) == wide)
    return np.asarray(~fits)


def _bad_float(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    # Some dtypes have neither infinities nor NaN; numbers beyond their range become the largest finite number.
    infinity = np.array([np.inf], np.float64).astype(result.dtype)
    saturates = result.dtype.kind not in "fc" and bool(np.isfinite(infinity).all())
    if not saturates and bool(np.isfinite(result).all()) and bool(np.isfinite(source).all()):
        return np.zeros(source.shape, bool)
    before, after = _wide(source), _wide(result)
    bad = (np.isnan(before) != np.isnan(after)) | (np.isinf(before) != np.isinf(after))
    if saturates:
        bad |= np.abs(before) > float(ml_dtypes.finfo(result.dtype).max)
    return np.asarray(bad)


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind in "fc" else array.astype(np.float64)


def _message(value: object, source: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    if number_kind(dtype) in {"int", "bool"}:
        need = "whole numbers in its range" if number_kind(dtype) == "int" else "0 and 1"
        advice = f"it holds only {need}; ask for a dtype that can hold the value, or round and clip the values first"
    else:
        advice = "it has no such value; ask for a dtype with a larger range, or clip the values first"
    kind = "an int" if source.hasobject else source
    return f"expected values that {dtype} can hold, found {value!s} ({kind}): {advice}"


class Partition(NamedTuple):
    """The boxes of one array that this process needs."""

    boxes: Sequence[Box]  # boxes of the array that the template describes
    # The part of each box to read from the saved array; empty if the box lies outside this array.
    stored: Sequence[Box]


def partition(template: LeafTemplate, saved: Saved) -> Partition | None:
    """Return the boxes of a saved array that a template needs; None if it needs the whole array unchanged."""
    if template.dtype is None or template.shape is None or saved.shape is None:
        return None
    boxes: Sequence[Box] | None = None
    if template.kind in _OF_JAX:
        boxes = jax_leaves.local_boxes(_on_devices(template, saved), template.shape)
    elif template.kind == "torch":
        boxes = torch_leaves.local_boxes(template.leaf, template.shape)
    if boxes is None:
        if template.shape == saved.shape:
            return None
        boxes = [whole(template.shape)]
    limits = whole(saved.shape)
    return Partition(boxes, [box.common(limits) or Box(limits.start, limits.start) for box in boxes])


def wanted_parts(template: LeafTemplate | None, saved: Saved) -> Sequence[Part] | None:
    """Return the parts of a saved array that the processes of this program need for a template.

    Return None if every process needs the whole array. Processes with the same template get the same result.
    """
    if template is None or template.dtype is None or template.shape is None or saved.shape is None:
        return None
    parts: Sequence[Part] | None = None
    if template.kind in _OF_JAX:
        sharding = _on_devices(template, saved)
        if sharding is not None and not sharding.is_fully_addressable:
            parts = jax_leaves.parts_of(sharding, template.shape)
    elif template.kind == "torch":
        parts = torch_leaves.parts_of(template.leaf, template.shape)
    if parts is None or template.shape == saved.shape:
        return parts
    limits = whole(saved.shape)
    common = [(part.box.common(limits), part.holders) for part in parts]
    return [Part(box.start, box.shape, holders) for box, holders in common if box is not None]


def _on_devices(template: LeafTemplate, saved: Saved) -> Any:
    """Return the template's sharding on concrete devices."""
    if type(template.sharding) is not jax_leaves.AbstractSharding:
        return template.sharding
    return jax_leaves.on_saved_devices(template.sharding, saved.details)


@collection_paused()
def materialize(
    templates: Sequence[LeafTemplate | None],
    saved: Sequence[Saved],
    arrays: list[NDArray[Any] | None],
    names: Sequence[str],
    parts: Mapping[int, tuple[Partition, list[NDArray[Any]]]] = MappingProxyType({}),
) -> list[Any]:
    """Create leaves from saved values; raise one error for all leaves that cannot be created exactly as requested.

    ``parts`` contains the partition and the arrays of every leaf that was read only in part, keyed by leaf index. An
    array is removed from ``arrays`` once it has been cast.
    """
    results: list[Any] = list(arrays)
    # Check each description only once, because many leaves share the same description.
    converted = {key for key, leaf in dict(zip(map(id, saved), saved, strict=True)).items() if not _is_as_read(leaf)}
    rest = [
        index
        for index, (template, array) in enumerate(zip(templates, arrays, strict=True))
        if template is not None or array is None or (converted and id(saved[index]) in converted)
    ]
    for_jax: dict[int, jax_leaves.NewArray] = {}
    differences: list[str] = []
    for index in rest:
        template, leaf, array, name = templates[index], saved[index], arrays[index], names[index]
        try:
            if template is None or template.kind == "any":
                results[index] = _plain(leaf, array, name)
            elif template.kind in NUMBER_KINDS:
                results[index] = _number(template, _plain(leaf, array, name), array, name)
            elif template.dtype is None or template.shape is None:
                results[index] = template.leaf if template.kind == STATIC else _plain(leaf, array, name)
            else:
                part = parts[index] if index in parts else _part(template, leaf, array)
                if part is None:
                    pieces = [_fitted(template, leaf, array, name)]
                else:
                    fitted = [_fitted(template, leaf, piece, name) for piece in part[1]]
                    pieces = [_sized(*piece) for piece in zip(fitted, *part[0], strict=True)]
                    if template.cast:  # free the uncast copies, so that the next leaf can use their memory
                        part[1].clear()
                if template.cast:
                    arrays[index] = None
                if template.kind in _OF_JAX:
                    facts = _on_devices(template, leaf), template.shape, template.dtype
                    is_weak = template.weak and template.kind == "jax"
                    implementation = template.variant if template.kind == "key" else None
                    if implementation is not None and template.leaf is not None:
                        implementation = jax_leaves.implementation_of(template.leaf)
                    for_jax[index] = jax_leaves.NewArray(*facts, pieces, implementation, is_weak)
                elif template.kind == "torch":
                    results[index] = _torch(template, pieces, leaf.details.get(torch_leaves.STRIDES))
                else:
                    results[index] = pieces[0][()] if template.kind == "numpy_scalar" else pieces[0]
        except CastProblem as error:
            differences.append(str(error))
    if differences:
        raise TreeMismatchError("these leaves cannot be loaded exactly as requested:", differences)
    if for_jax:
        for index, value in zip(for_jax, jax_leaves.put(list(for_jax.values())), strict=True):
            results[index] = value
    return results


def _is_as_read(leaf: Saved) -> bool:
    """True if the array that was read can be returned unchanged when there is no template."""
    return leaf.kind in ARRAY_KINDS and leaf.details.get("torch_dtype") != "complex32"


def _plain(leaf: Saved, array: NDArray[Any] | None, name: str) -> Any:
    if array is None:
        return decode_value(leaf.details, name)
    if leaf.kind in ARRAY_KINDS:
        if not _is_as_read(leaf) and array.dtype == np.float16 and array.shape[-1:] == (2,):
            return np.ascontiguousarray(array, np.float32).view(np.complex64)[..., 0]
        return array
    if leaf.kind in NUMBER_KINDS or leaf.kind == "numpy_scalar":
        if array.shape != () or leaf.kind not in ("numpy_scalar", number_kind(array.dtype)):
            stored = spell("numpy", array.dtype, array.shape)
            raise DamagedCheckpointError(f"leaf {format_path(name)} is of kind {leaf.kind}, but {stored} is stored")
        return NUMBER_TYPES[leaf.kind](array[()]) if leaf.kind in NUMBER_KINDS else array[()]
    if leaf.kind in {"str", "bytes"}:
        return decode_bytes(leaf.kind, array, name)
    if leaf.kind == NUMBERS:
        return unpack_numbers(leaf.details, array, name)
    raise DamagedCheckpointError(f"leaf {format_path(name)} is an array of unknown kind {leaf.kind!r:.80}")


def _number(template: LeafTemplate, value: Any, array: NDArray[Any] | None, name: str) -> Any:
    """Convert a number, 0-d array or numpy scalar to a Python number."""
    kind = NUMBER_TYPES[template.kind]
    try:
        plain = kind(value)
        nan = value != value and template.kind in {"float", "complex"}
        exact = not template.cast or plain == value or nan
    except (ValueError, OverflowError):  # int() of NaN or infinity
        exact = False
    if not exact:
        raise _inexact(template, value, name)
    # Wider floats may be more precise than Python numbers.
    if array is not None and array.dtype.kind in "fc" and array.dtype.itemsize > 8:
        back = np.asarray(plain).astype(array.dtype)
        if back != array and not (back != back and array != array):
            raise _inexact(template, value, name)
    return type(template.leaf)(plain) if isinstance(template.leaf, Enum) else plain


def _inexact(template: LeafTemplate, value: Any, name: str) -> CastProblem:
    expected = f"a Python {template.kind}" if template.kind in NUMBER_KINDS else str(template)
    return CastProblem(difference(format_path(name), expected, value, template.origin))


def _part(
    template: LeafTemplate, leaf: Saved, array: NDArray[Any] | None
) -> tuple[Partition, list[NDArray[Any]]] | None:
    """Return a leaf's partition and copies of its boxes; None if the whole array is needed or there is no array."""
    try:
        cut = partition(template, leaf)
    except ValueError as error:
        raise CastProblem(f"{format_path(template.name)}: {template} cannot be split as requested: {error}") from error
    if cut is None or array is None:
        return None
    return cut, [array[box.within(whole(array.shape))].copy() for box in cut.stored]


def _fitted(template: LeafTemplate, leaf: Saved, array: NDArray[Any] | None, name: str) -> NDArray[Any]:
    assert template.dtype is not None
    if leaf.kind in NUMBER_KINDS:
        value = _plain(leaf, array, name)
        if template.cast:
            return _cast(template, value, name)
        exact = exact_cast(value, template.dtype)
        if exact is None:
            raise _inexact(template, value, name)
        return exact
    if array is None:
        raise DamagedCheckpointError(f"leaf {format_path(name)} is of kind {leaf.kind!r:.80}, but no array is stored")
    return array if array.dtype == template.dtype else _cast(template, array, name)


def _cast(template: LeafTemplate, value: Any, name: str) -> NDArray[Any]:
    assert template.dtype is not None
    cast = cast_checked if isinstance(value, np.ndarray) else cast_number
    try:
        return cast(value, template.dtype)
    except CastProblem as problem:
        raise CastProblem(f"{format_path(name)}: {problem} (the {template.origin} asks for {template.dtype})") from None


def _sized(array: NDArray[Any], box: Box, stored: Box) -> NDArray[Any]:
    """Return the elements of a box, padded with zeros beyond the end of the saved array."""
    if box == stored:
        return array
    sized = np.zeros(box.shape, array.dtype)
    if array.size:
        sized[stored.within(box)] = array
    return sized


def _torch(template: LeafTemplate, pieces: Sequence[NDArray[Any]], strides: Any) -> Any:
    assert template.dtype is not None
    assert template.shape is not None
    name = None
    if template.leaf is None:
        name = template.variant or torch_leaves.torch_name(template.dtype)
    elif template.cast:
        name = torch_leaves.torch_name(template.dtype)
    return torch_leaves.put(pieces, template.shape, template.leaf, name, strides)
