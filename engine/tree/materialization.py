"""Stored values made into the leaves that a template asks for, or into numpy and Python ones without a template."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DamagedCheckpointError, TreeMismatchError
from . import jax_placement, torch_placement
from .boxes import whole
from .casts import CastProblem, cast_checked, cast_number
from .comparison import spell
from .garbage import collection_paused
from .leaves import ARRAY_KINDS, NUMBER_KINDS, Saved
from .names import display
from .numpy_leaves import exact_cast, number_kind
from .partition import partition
from .python_leaves import decode_bytes, decode_value
from .targets import Target, is_number
from .torch_leaves import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .boxes import Box
    from .partition import Partition

_PYTHON: dict[str, Any] = {"bool": bool, "int": int, "float": float, "complex": complex}


class _Inexact(ValueError):  # noqa: N818 - becomes one line of a TreeMismatchError
    """A number that what is asked for cannot hold, or an array that cannot be spread as asked."""


def materialize(
    targets: Sequence[Target | None],
    saved: Sequence[Saved],
    arrays: Sequence[NDArray[Any] | None],
    names: Sequence[str],
    parts: Mapping[int, tuple[Partition, Sequence[NDArray[Any]]]] | None = None,
) -> list[Any]:
    """Makes leaves of stored values.

    Args:
        targets: What is asked for, fitting what was saved as `compare` says; None where there is no template.
        saved: What the checkpoint says of each leaf.
        arrays: The stored values of array leaves, with the dtype and shape that `saved` says; None for value leaves.
            Their memory is given away: it may become part of the result, so nobody else may write to it. A list loses
            those that are cast.
        names: The leaves' names, for errors.
        parts: By the target's position, for every target that has a `partition`: that, and the boxes ``stored`` of it
            in the place of an array. Without this the parts are cut out of the arrays.

    Returns:
        The leaves. Without a template: numpy arrays, whatever library they came from (key data for typed keys), numpy
        scalars and Python values as they were saved.

    Raises:
        TreeMismatchError: A number has a value that the template's dtype cannot hold exactly, or an array has one that
            the dtype to which it is to be cast cannot hold (see `casts`).
        DamagedCheckpointError: What is said of a leaf contradicts itself.
    """
    with collection_paused():
        return _materialize(targets, saved, arrays, names, parts)


def _materialize(
    targets: Sequence[Target | None],
    saved: Sequence[Saved],
    arrays: Sequence[NDArray[Any] | None],
    names: Sequence[str],
    parts: Mapping[int, tuple[Partition, Sequence[NDArray[Any]]]] | None,
) -> list[Any]:
    results: list[Any] = [None] * len(targets)
    for_jax: list[tuple[int, Target]] = []
    spread: list[tuple[int, Target]] = []
    differences: list[str] = []
    for index, (target, leaf, array) in enumerate(zip(targets, saved, arrays, strict=True)):
        name = names[index]
        try:
            if target is None or target.kind == "any":
                results[index] = _plain(leaf, array, name)
            elif is_number(target):
                results[index] = _number(target, _plain(leaf, array, name), array, name)
            elif target.dtype is None:
                results[index] = _plain(leaf, array, name)
            else:
                part = _part(target, leaf, array) if parts is None else parts.get(index)
                if part is None:
                    pieces = [_fitted(target, leaf, array, name)]
                else:
                    fitted = [_fitted(target, leaf, piece, name) for piece in part[1]]
                    pieces = [_sized(*piece) for piece in zip(fitted, *part[0], strict=True)]
                if target.cast:  # a copy was made: the next one can use the memory
                    _forget(arrays, index)
                    _forget(() if part is None else part[1], slice(None))
                if target.kind not in {"jax", "key"}:
                    results[index] = _placed(target, pieces)
                elif part is not None and jax_placement.is_spread(target.sharding):
                    results[index] = pieces
                    spread.append((index, target))
                else:
                    results[index] = pieces[0]
                    for_jax.append((index, target))
        except _Inexact as error:
            differences.append(str(error))
    if differences:
        raise TreeMismatchError("these leaves cannot be loaded exactly as asked:", differences)
    if for_jax:
        values = [results[index] for index, _ in for_jax]
        implementations = [_implementation(target) for _, target in for_jax]
        made = jax_placement.put(values, [target.sharding for _, target in for_jax], implementations)
        for (index, _), value in zip(for_jax, made, strict=True):
            results[index] = value
    if spread:
        made = jax_placement.put_parts([_jax_parts(target, results[index]) for index, target in spread])
        for (index, _), value in zip(spread, made, strict=True):
            results[index] = value
    return results


def _forget(arrays: Sequence[Any], which: Any) -> None:
    if isinstance(arrays, list):
        arrays[which] = [] if isinstance(which, slice) else None


def _jax_parts(target: Target, arrays: Sequence[NDArray[Any]]) -> jax_placement.Parts:
    assert target.shape is not None
    assert target.dtype is not None
    return jax_placement.Parts(target.sharding, target.shape, target.dtype, arrays, _implementation(target))


def _implementation(target: Target) -> str | None:
    return target.variant if target.kind == "key" else None


def _plain(leaf: Saved, array: NDArray[Any] | None, name: str) -> Any:
    """The leaf as it is without a template."""
    if array is None:
        return decode_value(leaf.details, name)
    if leaf.kind in NUMBER_KINDS:
        if array.shape != () or number_kind(array.dtype) != leaf.kind:
            stored = spell("numpy", array.dtype, array.shape)
            raise DamagedCheckpointError(
                f"leaf {display(name)} is said to be of kind {leaf.kind}, but {stored} is stored"
            )
        return _PYTHON[leaf.kind](array[()])
    if leaf.kind == "numpy_scalar":
        if array.shape != ():
            raise DamagedCheckpointError(f"leaf {display(name)} is said to be a scalar, but has shape {array.shape}")
        return array[()]
    if leaf.kind in {"str", "bytes"}:
        return decode_bytes(leaf.kind, array, name)
    if leaf.kind not in ARRAY_KINDS:
        raise DamagedCheckpointError(f"leaf {display(name)} is an array of the unknown kind {leaf.kind!r:.80}")
    if leaf.details.get("torch_dtype") == "complex32" and array.dtype == np.float16 and array.shape[-1:] == (2,):
        wide = np.ascontiguousarray(array, np.float32)
        return wide.view(np.complex64)[..., 0]
    return array


def _number(target: Target, value: Any, array: NDArray[Any] | None, name: str) -> Any:
    """A Python number; the value is one already, or a 0-d array or numpy scalar."""
    kind = _PYTHON[target.kind]
    try:
        plain = kind(value)
        nan = value != value and target.kind in {"float", "complex"}
        exact = not target.cast or plain == value or nan
    except (ValueError, OverflowError):  # int of something that is not finite
        exact = False
    if not exact:
        raise _inexact(target, value, name)
    wide = array is not None and array.dtype.kind in "fc" and array.dtype.itemsize > 8  # perhaps longer than Python's
    if array is not None and wide and not _same(np.asarray(plain).astype(array.dtype), array):
        raise _inexact(target, value, name)
    return type(target.template)(plain) if isinstance(target.template, Enum) else plain


def _inexact(target: Target, value: Any, name: str) -> _Inexact:
    expected = spell(target.kind, target.dtype, target.shape, target.variant)
    if is_number(target):
        expected = f"a Python {target.kind}"
    return _Inexact(f"{display(name)}: expected {expected} ({target.origin}), found {value} (checkpoint)")


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(one == other or (one != one and other != other))


def _part(target: Target, leaf: Saved, array: NDArray[Any] | None) -> tuple[Partition, Sequence[NDArray[Any]]] | None:
    """The partition of a target, where it has one, and its parts of a whole array."""
    try:
        cut = partition(target, leaf)
    except ValueError as error:
        expected = spell(target.kind, target.dtype, target.shape, target.variant)
        raise _Inexact(f"{display(target.name)}: {expected} cannot be spread as asked: {error}") from error
    if cut is None or array is None:
        return None
    return cut, [array[box.within(whole(array.shape))].copy() for box in cut.stored]


def _fitted(target: Target, leaf: Saved, array: NDArray[Any] | None, name: str) -> NDArray[Any]:
    """An array of the target's dtype."""
    assert target.dtype is not None
    if leaf.kind in NUMBER_KINDS:
        value = _plain(leaf, array, name)
        if target.cast:
            return _cast(target, value, name)
        exact = exact_cast(value, target.dtype)
        if exact is None:
            raise _inexact(target, value, name)
        return exact
    if array is None:
        raise DamagedCheckpointError(f"leaf {display(name)} is of kind {leaf.kind!r:.80}, but no array is stored")
    return array if array.dtype == target.dtype else _cast(target, array, name)


def _cast(target: Target, value: Any, name: str) -> NDArray[Any]:
    """An array, or a Python number, cast to the target's dtype."""
    assert target.dtype is not None
    try:
        return cast_checked(value, target.dtype) if isinstance(value, np.ndarray) else cast_number(value, target.dtype)
    except CastProblem as problem:
        raise _Inexact(f"{display(name)}: {problem} (the {target.origin} asks for {target.dtype})") from None


def _sized(array: NDArray[Any], box: Box, stored: Box) -> NDArray[Any]:
    """The elements of a box, zeros in the place of those that were not saved."""
    if box == stored:
        return array
    sized = np.zeros(box.shape, array.dtype)
    if array.size:
        sized[stored.within(box)] = array
    return sized


def _placed(target: Target, pieces: Sequence[NDArray[Any]]) -> Any:
    if target.kind == "torch":
        return _torch(target, pieces)
    return pieces[0][()] if target.kind == "numpy_scalar" else pieces[0]


def _torch(target: Target, pieces: Sequence[NDArray[Any]]) -> Any:
    assert target.dtype is not None
    assert target.shape is not None
    name = None
    if target.template is None:
        name = target.variant or torch_placement.torch_name(target.dtype)
    elif target.cast:
        name = torch_placement.torch_name(target.dtype)
    if target.template is not None and is_dtensor(target.template):
        return torch_placement.put_parts(pieces, target.shape, target.template, name)
    return torch_placement.put(pieces[0], target.template, name)
