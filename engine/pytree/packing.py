"""Sequences of numbers packed into one leaf: a long list, tuple or deque of numbers is stored as an array.

A load restores its elements with their values and types. A shorter sequence stays a container with a leaf for each
element.
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
    """A list, tuple or deque of numbers as one leaf of a tree: a copy, which later changes do not touch.

    The array is made on demand, as a walk over live objects only tests whether a sequence is packed.
    """

    __slots__ = ("_array", "_details", "_items")

    def __init__(self, items: list[Any] | None, array: NDArray[Any] | None, details: Details) -> None:
        self._items = items
        self._array = array
        self._details = details

    def describe(self) -> ArrayLeaf:
        array = self._array
        if array is None:
            assert self._items is not None
            array = self._array = _array(str(self._details["elements"]), self._items)
            self._items = None
        return ArrayLeaf(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], False, self._details)

    def unpack(self) -> Any:
        """Return a new sequence with the same elements."""
        if self._items is not None:
            return _built(self._details, list(self._items))
        assert self._array is not None
        return _built(self._details, _elements(self._details, self._array))


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
    return PackedNumbers(items, array, details)


def _packed(items: list[Any], kinds: set[Any]) -> tuple[str, NDArray[Any] | None] | None:
    """Return the name of the elements if they can be packed, and the array where the test needed it."""
    try:
        if len(kinds) == 1:
            (kind,) = kinds
            if kind in _ELEMENTS:
                return _ELEMENTS[kind], _array(_ELEMENTS[kind], items) if kind is int else None
            if issubclass(kind, np.bool_ | np.number) and kind not in (np.longdouble, np.clongdouble):
                return _NUMPY, None
        elif kinds <= set(_MIXED_TYPES):
            far = int in kinds and bool((np.abs(np.fromiter(items, "<f8", len(items))) >= 1 << 63).any())
            return MIXED, _mixed(items) if far else None
    except OverflowError:  # an integer of more than 64 bits
        pass
    return None


def _array(elements: str, items: list[Any]) -> NDArray[Any]:
    if elements == MIXED:
        return _mixed(items)
    return np.array(items, _DTYPES.get(elements))


def _mixed(items: list[Any]) -> NDArray[Any]:
    codes: dict[Any, int] = {kind: code for code, kind in enumerate(_MIXED_TYPES)}
    types = np.frombuffer(bytes([codes[type(item)] for item in items]), np.uint8)
    values = np.fromiter(items, "<f8", len(items))
    bits = values.view("<i8")
    whole = types != codes[float]
    exact = whole & (np.abs(values) < 1 << 53)  # a float holds these integers exactly
    bits[exact] = values[exact].astype("<i8")
    rest = np.flatnonzero(whole & ~exact)
    bits[rest] = np.array([items[index] for index in rest.tolist()], "<i8")
    found = np.empty((len(items), _MIXED_WIDTH), np.uint8)
    found[:, 0] = types
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


def packed_again(details: Details, array: NDArray[Any], name: str) -> PackedNumbers:
    """Return the packed sequence as it was; the details and the array are not trusted."""
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
    if mixed and len(array) and (last := int(array[:, 0].max())) >= len(_MIXED_TYPES):
        raise DamagedCheckpointError(f"leaf {format_path(name)}: type {last} of an element is unknown")
    return PackedNumbers(None, array, details)


def _elements(details: Details, array: NDArray[Any]) -> list[Any]:
    if details["elements"] == _NUMPY:
        return list(array)
    return _unmixed(array) if details["elements"] == MIXED else array.tolist()


def _built(details: Details, items: list[Any]) -> Any:
    builders: dict[Any, Callable[[list[Any]], Any]] = {
        "tuple": tuple,
        "deque": lambda found: deque(found, details.get("maxlen")),
    }
    sequence = details["sequence"]
    return builders[sequence](items) if sequence in builders else items


def _unmixed(array: NDArray[Any]) -> list[Any]:
    types = array[:, 0]
    bits = np.ascontiguousarray(array[:, 1:]).view("<i8")[:, 0]
    found = np.empty(len(bits), object)
    for code, kind in enumerate(_MIXED_TYPES):
        chosen = types == code
        values = bits[chosen]
        found[chosen] = values.view("<f8") if kind is float else values.astype(kind)
    elements: list[Any] = found.tolist()
    return elements
