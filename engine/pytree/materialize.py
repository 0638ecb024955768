"""Leaves made of stored values: those that a template asks for, or numpy arrays and Python values without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, TreeMismatchError, difference
from . import jax_leaves, torch_leaves
from .cast import CastProblem, cast_checked, cast_number, exact_cast
from .flatten import collection_paused
from .host_leaves import decode_bytes, decode_value, number_kind
from .leaves import ARRAY_KINDS, NUMBER_KINDS, NUMBERS, STATIC, Box, Saved, spell, whole
from .names import format_path
from .packing import packed_again
from .template import LeafTemplate

_PYTHON: dict[str, Any] = {"bool": bool, "int": int, "float": float, "complex": complex}


class Partition(NamedTuple):
    """The boxes of one array that this process makes."""

    boxes: Sequence[Box]  # the boxes of the array that the template asks for
    # The box of the saved array that each is made from; it is empty for a box beyond the saved array.
    stored: Sequence[Box]


def partition(template: LeafTemplate, saved: Saved) -> Partition | None:
    """Return the boxes of a saved array that a template needs; None for the whole array as it is."""
    if template.dtype is None or template.shape is None or saved.shape is None:
        return None
    boxes: Sequence[Box] | None = None
    if template.kind in {"jax", "key"}:
        sharding = _on_devices(template, saved).sharding
        if jax_leaves.is_spread(sharding):
            boxes = jax_leaves.device_boxes(sharding, template.shape).boxes
    elif template.kind == "torch" and template.leaf is not None:
        boxes = torch_leaves.local_boxes(template.leaf, template.shape)
    if boxes is None:
        if template.shape == saved.shape:
            return None
        boxes = [whole(template.shape)]
    limits = whole(saved.shape)
    return Partition(boxes, [box.common(limits) or Box(limits.start, limits.start) for box in boxes])


def _on_devices(template: LeafTemplate, saved: Saved) -> LeafTemplate:
    """Return a template whose sharding has devices."""
    if type(template.sharding) is not jax_leaves.AbstractSharding:
        return template
    return replace(template, sharding=jax_leaves.on_saved_devices(template.sharding, saved.details))


class _Inexact(ValueError):  # noqa: N818 - becomes one line of a TreeMismatchError
    """A number that the template cannot hold, or an array that cannot be spread as asked."""


@collection_paused()
def materialize(
    templates: Sequence[LeafTemplate | None],
    saved: Sequence[Saved],
    arrays: Sequence[NDArray[Any] | None],
    names: Sequence[str],
    parts: Mapping[int, tuple[Partition, Sequence[NDArray[Any]]]] | None = None,
) -> list[Any]:
    """Make the leaves of saved values; raise one error for all that cannot be made exactly as asked.

    ``parts`` has the partition of a leaf and its arrays, by the number of the leaf. Arrays that were cast are removed
    from ``arrays``.
    """
    results: list[Any] = [None] * len(templates)
    for_jax: list[tuple[int, LeafTemplate]] = []
    spread: list[tuple[int, LeafTemplate]] = []
    differences: list[str] = []
    for index, (template, leaf, array) in enumerate(zip(templates, saved, arrays, strict=True)):
        name = names[index]
        try:
            if template is None or template.kind == "any":
                results[index] = _plain(leaf, array, name)
            elif template.kind == NUMBERS and array is not None:
                results[index] = packed_again(leaf.details, array, name)
            elif template.kind in NUMBER_KINDS:
                results[index] = _number(template, _plain(leaf, array, name), array, name)
            elif template.dtype is None:
                results[index] = template.leaf if template.kind == STATIC else _plain(leaf, array, name)
            else:
                part = _part(template, leaf, array) if parts is None else parts.get(index)
                if part is None:
                    pieces = [_fitted(template, leaf, array, name)]
                else:
                    fitted = [_fitted(template, leaf, piece, name) for piece in part[1]]
                    pieces = [_sized(*piece) for piece in zip(fitted, *part[0], strict=True)]
                if template.cast:  # a copy was made: the next one can use the memory
                    _forget(arrays, index)
                    _forget(() if part is None else part[1], slice(None))
                template = _on_devices(template, leaf)
                if template.kind not in {"jax", "key"}:
                    results[index] = _placed(template, pieces, leaf)
                elif part is not None and jax_leaves.is_spread(template.sharding):
                    results[index] = pieces
                    spread.append((index, template))
                else:
                    results[index] = pieces[0]
                    for_jax.append((index, template))
        except _Inexact as error:
            differences.append(str(error))
    if differences:
        raise TreeMismatchError("these leaves cannot be loaded exactly as asked:", differences)
    if for_jax:
        values = [results[index] for index, _ in for_jax]
        implementations = [_implementation(template) for _, template in for_jax]
        made = jax_leaves.put(values, [template.sharding for _, template in for_jax], implementations)
        for (index, _), value in zip(for_jax, made, strict=True):
            results[index] = value
    if spread:
        made = jax_leaves.put_spread([_spread_array(template, results[index]) for index, template in spread])
        for (index, _), value in zip(spread, made, strict=True):
            results[index] = value
    for index, template in enumerate(templates):
        if template is not None and template.weak and template.kind == "jax":
            results[index] = jax_leaves.weakened(results[index])
    return results


def _forget(arrays: Sequence[Any], which: Any) -> None:
    if isinstance(arrays, list):
        arrays[which] = [] if isinstance(which, slice) else None


def _spread_array(template: LeafTemplate, arrays: Sequence[NDArray[Any]]) -> jax_leaves.SpreadArray:
    assert template.shape is not None
    assert template.dtype is not None
    return jax_leaves.SpreadArray(template.sharding, template.shape, template.dtype, arrays, _implementation(template))


def _implementation(template: LeafTemplate) -> str | None:
    return template.variant if template.kind == "key" else None


def _plain(leaf: Saved, array: NDArray[Any] | None, name: str) -> Any:
    if array is None:
        return decode_value(leaf.details, name)
    if leaf.kind in NUMBER_KINDS:
        if array.shape != () or number_kind(array.dtype) != leaf.kind:
            stored = spell("numpy", array.dtype, array.shape)
            raise DamagedCheckpointError(f"leaf {format_path(name)} is of kind {leaf.kind}, but {stored} is stored")
        return _PYTHON[leaf.kind](array[()])
    if leaf.kind == "numpy_scalar":
        if array.shape != ():
            raise DamagedCheckpointError(
                f"leaf {format_path(name)} is of kind numpy_scalar, but has shape {array.shape}"
            )
        return array[()]
    if leaf.kind in {"str", "bytes"}:
        return decode_bytes(leaf.kind, array, name)
    if leaf.kind == NUMBERS:
        return packed_again(leaf.details, array, name).unpack()
    if leaf.kind not in ARRAY_KINDS:
        raise DamagedCheckpointError(f"leaf {format_path(name)} is an array of the unknown kind {leaf.kind!r:.80}")
    if leaf.details.get("torch_dtype") == "complex32" and array.dtype == np.float16 and array.shape[-1:] == (2,):
        wide = np.ascontiguousarray(array, np.float32)
        return wide.view(np.complex64)[..., 0]
    return array


def _number(template: LeafTemplate, value: Any, array: NDArray[Any] | None, name: str) -> Any:
    """Return a Python number made of a number, a 0-d array or a numpy scalar."""
    kind = _PYTHON[template.kind]
    try:
        plain = kind(value)
        nan = value != value and template.kind in {"float", "complex"}
        exact = not template.cast or plain == value or nan
    except (ValueError, OverflowError):  # int of something that is not finite
        exact = False
    if not exact:
        raise _inexact(template, value, name)
    wide = (
        array is not None and array.dtype.kind in "fc" and array.dtype.itemsize > 8
    )  # perhaps of more precision than Python's
    if array is not None and wide and not _same(np.asarray(plain).astype(array.dtype), array):
        raise _inexact(template, value, name)
    return type(template.leaf)(plain) if isinstance(template.leaf, Enum) else plain


def _inexact(template: LeafTemplate, value: Any, name: str) -> _Inexact:
    expected = f"a Python {template.kind}" if template.kind in NUMBER_KINDS else str(template)
    return _Inexact(difference(format_path(name), expected, value, template.origin))


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(one == other or (one != one and other != other))


def _part(
    template: LeafTemplate, leaf: Saved, array: NDArray[Any] | None
) -> tuple[Partition, Sequence[NDArray[Any]]] | None:
    """Return the partition of a leaf, where it has one, and its parts of a whole array."""
    try:
        cut = partition(template, leaf)
    except ValueError as error:
        raise _Inexact(f"{format_path(template.name)}: {template} cannot be spread as asked: {error}") from error
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
    """Cast an array, or a Python number, to the dtype that the template asks for."""
    assert template.dtype is not None
    try:
        return (
            cast_checked(value, template.dtype) if isinstance(value, np.ndarray) else cast_number(value, template.dtype)
        )
    except CastProblem as problem:
        raise _Inexact(f"{format_path(name)}: {problem} (the {template.origin} asks for {template.dtype})") from None


def _sized(array: NDArray[Any], box: Box, stored: Box) -> NDArray[Any]:
    """Return the elements of a box, with zeros for those that were not saved."""
    if box == stored:
        return array
    sized = np.zeros(box.shape, array.dtype)
    if array.size:
        sized[stored.within(box)] = array
    return sized


def _placed(template: LeafTemplate, pieces: Sequence[NDArray[Any]], leaf: Saved) -> Any:
    if template.kind == "torch":
        return _torch(template, pieces, leaf.details.get(torch_leaves.STRIDES))
    return pieces[0][()] if template.kind == "numpy_scalar" else pieces[0]


def _torch(template: LeafTemplate, pieces: Sequence[NDArray[Any]], strides: Any) -> Any:
    assert template.dtype is not None
    assert template.shape is not None
    name = None
    if template.leaf is None:
        name = template.variant or torch_leaves.torch_name(template.dtype)
    elif template.cast:
        name = torch_leaves.torch_name(template.dtype)
    if template.leaf is not None and torch_leaves.is_dtensor(template.leaf):
        return torch_leaves.put_distributed(pieces, template.shape, template.leaf, name)
    return torch_leaves.put(pieces[0], template.leaf, name, strides)
