"""Sequences of numbers packed into one leaf: a long list, tuple or deque of numbers is stored as an array.

Its elements come back with their values and types. A shorter sequence stays a container with a leaf for each element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from .containers import expand
from .flatten import MAX_DEPTH, is_leaf
from .leaves import MIXED, NUMBERS, ArrayLeaf, Details, Piece
from .names import format_path

PACKED_FROM = 32  # elements of the shortest sequence that is packed

_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple", deque: "deque"}
_ELEMENTS: dict[Any, str] = {bool: "bool", int: "int", float: "float", complex: "complex"}
_DTYPES = {name: np.dtype(kind) for kind, name in _ELEMENTS.items()}
_NUMPY = "numpy"  # elements that are scalars of numpy
# Mixed elements take nine bytes: the number of the type, and the value as eight bytes, the lowest first.
_MIXED_TYPES = (bool, int, float)
_MIXED_WIDTH = 9


class PackedNumbers:
    """A list, tuple or deque of numbers as one leaf of a tree: a copy, which later changes do not touch."""

    __slots__ = ("_array", "_details")

    def __init__(self, array: NDArray[Any], details: Details) -> None:
        self._array = array
        self._details = details

    def describe(self) -> ArrayLeaf:
        array = self._array
        return ArrayLeaf(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], False, self._details)

    def unpack(self) -> Any:
        """Return a new sequence with the same elements."""
        return unpacked(self._details, self._array, "")


def pack_numbers(value: object) -> PackedNumbers | None:
    """Pack a list, tuple or deque of at least `PACKED_FROM` numbers; return None for everything else."""
    sequence = _SEQUENCES.get(type(value))
    if sequence is None or len(value) < PACKED_FROM:  # type: ignore[arg-type]  # it is one of the three
        return None
    items: list[Any] = list(value)  # type: ignore[call-overload]
    packed = _packed(items, set(map(type, items)))
    if packed is None:
        return None
    elements, array = packed
    details: Details = {"kind": NUMBERS, "sequence": sequence, "elements": elements}
    if isinstance(value, deque) and value.maxlen is not None:
        details["maxlen"] = value.maxlen
    return PackedNumbers(array, details)


def _packed(items: list[Any], kinds: set[Any]) -> tuple[str, NDArray[Any]] | None:
    try:
        if len(kinds) == 1:
            (kind,) = kinds
            if kind in _ELEMENTS:
                return _ELEMENTS[kind], np.array(items, _DTYPES[_ELEMENTS[kind]])
            if issubclass(kind, np.bool_ | np.number) and kind not in (np.longdouble, np.clongdouble):
                return _NUMPY, np.array(items)
        elif kinds <= set(_MIXED_TYPES):
            return MIXED, _mixed(items)
    except OverflowError:  # an integer of more than 64 bits
        pass
    return None


def _mixed(items: list[Any]) -> NDArray[Any]:
    codes: dict[Any, int] = {kind: code for code, kind in enumerate(_MIXED_TYPES)}
    objects = np.fromiter(items, object, len(items))
    found = np.empty((len(items), _MIXED_WIDTH), np.uint8)
    found[:, 0] = types = np.fromiter(map(codes.__getitem__, map(type, items)), np.uint8, len(items))
    floats = types == codes[float]
    bits = np.empty(len(items), "<i8")
    bits[floats] = objects[floats].astype("<f8").view("<i8")
    bits[~floats] = objects[~floats].astype(np.int64)
    found[:, 1:] = bits[:, None].view(np.uint8)
    return found


def pack_tree(tree: Any, depth: int = 0) -> Any:
    """Return a tree with every long sequence of numbers in it packed; containers without one stay the same objects."""
    packed = pack_numbers(tree)
    if packed is not None:
        return packed
    contents = None if is_leaf(tree) or depth > MAX_DEPTH else expand(tree)  # `flatten` refuses deeper ones
    if contents is None:
        return tree
    values = [pack_tree(value, depth + 1) for value in contents.values]
    if all(one is other for one, other in zip(values, contents.values, strict=True)):
        return tree
    return contents.build(values)


def unpacked(details: Details, array: NDArray[Any], name: str) -> Any:
    """Return the sequence that was packed; the details and the array are not trusted."""
    sequence, elements, limit = (details.get(key) for key in ("sequence", "elements", "maxlen"))
    mixed = elements == MIXED
    expected = np.dtype(np.uint8) if mixed else _DTYPES.get(str(elements), array.dtype)
    known = str(elements) in {*_DTYPES, _NUMPY, MIXED} and sequence in _SEQUENCES.values()
    fits = array.shape[1:] == ((_MIXED_WIDTH,) if mixed else ()) and array.ndim > 0 and array.dtype == expected
    if not (known and fits and (limit is None or (type(limit) is int and len(array) <= limit < 1 << 63))):
        raise DamagedCheckpointError(
            f"leaf {format_path(name)} is of kind {NUMBERS}, but its details {details!r:.200} do not fit "
            f"{array.dtype}{list(array.shape)}"
        )
    items = list(array) if elements == _NUMPY else _unmixed(array, name) if mixed else array.tolist()
    builders: dict[Any, Callable[[list[Any]], Any]] = {"tuple": tuple, "deque": lambda found: deque(found, limit)}
    return builders[sequence](items) if sequence in builders else items


def _unmixed(array: NDArray[Any], name: str) -> list[Any]:
    types = array[:, 0]
    if types.size and int(types.max()) >= len(_MIXED_TYPES):
        raise DamagedCheckpointError(f"leaf {format_path(name)}: type {int(types.max())} of an element is unknown")
    bits = np.ascontiguousarray(array[:, 1:]).view("<i8")[:, 0]
    found = bits.astype(object)
    for kind, values in ((bool, bits != 0), (float, bits.view("<f8"))):
        chosen = types == _MIXED_TYPES.index(kind)
        found[chosen] = values[chosen].astype(object)
    elements: list[Any] = found.tolist()
    return elements
