"""Stored values made into the leaves that a template asks for, or into numpy and Python ones without a template."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DamagedCheckpointError, TreeMismatchError
from . import jax_placement, torch_placement
from .comparison import spell
from .garbage import collection_paused
from .leaves import ARRAY_KINDS, NUMBER_KINDS, Saved
from .names import display
from .numpy_leaves import exact_cast, number_kind
from .python_leaves import decode_bytes, decode_value
from .targets import Target, is_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PYTHON: dict[str, Any] = {"bool": bool, "int": int, "float": float, "complex": complex}


class _Inexact(ValueError):  # noqa: N818 - becomes one line of a TreeMismatchError
    """A number that what the template asks for cannot hold."""


def materialize(
    targets: Sequence[Target | None],
    saved: Sequence[Saved],
    arrays: Sequence[NDArray[Any] | None],
    names: Sequence[str],
) -> list[Any]:
    """Makes leaves of stored values.

    Args:
        targets: What is asked for, fitting what was saved as `compare` says; None where there is no template.
        saved: What the checkpoint says of each leaf.
        arrays: The stored values of array leaves, with the dtype and shape that `saved` says; None for value leaves.
            Their memory is given away: it may become part of the result, so nobody else may write to it.
        names: The leaves' names, for errors.

    Returns:
        The leaves. Without a template: numpy arrays, whatever library they came from (key data for typed keys), numpy
        scalars and Python values as they were saved.

    Raises:
        TreeMismatchError: A number has a value that the template's dtype cannot hold exactly.
        DamagedCheckpointError: What is said of a leaf contradicts itself.
    """
    with collection_paused():
        return _materialize(targets, saved, arrays, names)


def _materialize(
    targets: Sequence[Target | None],
    saved: Sequence[Saved],
    arrays: Sequence[NDArray[Any] | None],
    names: Sequence[str],
) -> list[Any]:
    results: list[Any] = [None] * len(targets)
    for_jax: list[int] = []
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
                fitted = _fitted(target, leaf, array, name)
                if target.kind in {"jax", "key"}:
                    results[index] = fitted
                    for_jax.append(index)
                else:
                    results[index] = _placed(target, fitted)
        except _Inexact as error:
            differences.append(str(error))
    if differences:
        raise TreeMismatchError("the checkpoint holds numbers that the template cannot hold exactly:", differences)
    if for_jax:
        wanted = [target for index in for_jax if (target := targets[index]) is not None]
        put = jax_placement.put(
            [results[index] for index in for_jax],
            [target.template for target in wanted],
            [target.variant for target in wanted],
        )
        for index, value in zip(for_jax, put, strict=True):
            results[index] = value
    return results


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
    plain = kind(value)
    wide = array is not None and array.dtype.kind in "fc" and array.dtype.itemsize > 8  # perhaps longer than Python's
    if array is not None and wide and not _same(np.asarray(plain).astype(array.dtype), array):
        raise _Inexact(f"{display(name)}: expected a Python {target.kind} (template), found {value} (checkpoint)")
    return type(target.template)(plain) if isinstance(target.template, Enum) else plain


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(one == other or (one != one and other != other))


def _fitted(target: Target, leaf: Saved, array: NDArray[Any] | None, name: str) -> NDArray[Any]:
    """An array of the target's dtype."""
    assert target.dtype is not None
    if leaf.kind in NUMBER_KINDS:
        value = _plain(leaf, array, name)
        exact = exact_cast(value, target.dtype)
        if exact is None:
            expected = spell(target.kind, target.dtype, target.shape, target.variant)
            raise _Inexact(f"{display(name)}: expected {expected} (template), found {value!r} (checkpoint)")
        return exact
    if array is None:
        raise DamagedCheckpointError(f"leaf {display(name)} is of kind {leaf.kind!r:.80}, but no array is stored")
    return array if array.dtype == target.dtype else array.astype(target.dtype)


def _placed(target: Target, array: NDArray[Any]) -> Any:
    if target.kind == "torch":
        return torch_placement.put(array, target.template)
    return array[()] if target.kind == "numpy_scalar" else array
