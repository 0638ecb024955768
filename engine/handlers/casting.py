"""What ``SaveArgs`` make of a leaf before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..format import storage_dtype
from ..item import AGGREGATE_LIMIT, AggregateHandler, aggregate_details
from ..tree import ArrayLeaf, CastProblem, Piece, ValueLeaf, cast_checked, display
from ..tree.leaves import NUMBER_KINDS, report_problems
from ..tree.numpy_leaves import number_kind
from .args import SaveArgs

Leaf = ArrayLeaf | ValueLeaf


def cast(name: str, leaf: Leaf, dtype: np.dtype[Any]) -> Leaf:
    """Casts a leaf's elements.

    Args:
        name: The leaf's name, for errors.
        leaf: The leaf.
        dtype: Of numbers.

    Returns:
        The leaf with another dtype; or as it is, if it holds no numbers.

    Raises:
        UnsupportedLeafError: It holds complex numbers, and the dtype has no imaginary part; or a value that the dtype
            cannot hold, which in most cases shows only while it is written.
    """
    if isinstance(leaf, ValueLeaf) or leaf.details["kind"] in {"key", "str", "bytes"} or leaf.dtype == dtype:
        return leaf
    kind = number_kind(leaf.dtype)
    if kind is None or "torch_dtype" in leaf.details:
        return leaf
    if kind == "complex" and number_kind(dtype) != "complex":
        raise UnsupportedLeafError(
            f"{display(name)}: {leaf.dtype} cannot be cast to {dtype}, which has no imaginary part; nothing was written"
        )
    details = leaf.details
    if details["kind"] in NUMBER_KINDS:
        details = {**details, "kind": number_kind(dtype)}
    pieces, volatile = leaf.pieces, leaf.volatile
    if storage_dtype(dtype).extra is not None:
        # Others are cast chunk by chunk while they are written; these are written as bytes.
        pieces, volatile = [Piece(piece.start, _checked(name, piece.array, dtype)) for piece in pieces], False
    return ArrayLeaf(dtype, leaf.shape, pieces, volatile, details, leaf.parts)


def _checked(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        return cast_checked(array, dtype)
    except CastProblem as problem:
        raise UnsupportedLeafError(f"{display(name)}: {problem}; nothing was written") from None


def aggregate(
    names: Sequence[str], leaves: Sequence[Leaf], args: Sequence[SaveArgs | None], handler: AggregateHandler
) -> tuple[list[Leaf], dict[str, bytes]]:
    """Puts the leaves for which this is asked into one file.

    Args:
        names: The leaves' names.
        leaves: The leaves.
        args: What is asked for each of them.
        handler: What makes the file.

    Returns:
        The leaves, with only a note in the place of those that are in the file; and the file's content by its name,
        nothing if no leaf is in it.

    Raises:
        UnsupportedLeafError: A leaf is spread over devices, or they are too large together.
    """
    kept = list(leaves)
    arrays: dict[str, NDArray[Any]] = {}
    problems: list[tuple[str, str]] = []
    size = 0
    for index, (name, leaf, asked) in enumerate(zip(names, leaves, args, strict=True)):
        if asked is None or not asked.aggregate or isinstance(leaf, ValueLeaf):
            continue  # values stand in tree.json, which is one file already
        if leaf.parts is not None or len(leaf.pieces) != 1 or leaf.pieces[0].array.shape != leaf.shape:
            problems.append((name, "is spread over devices; leave out aggregate=True"))
            continue
        array = leaf.pieces[0].array
        size += array.size * leaf.dtype.itemsize
        if size > AGGREGATE_LIMIT:
            problems.append((name, f"makes the aggregate larger than {AGGREGATE_LIMIT} bytes; it is for small leaves"))
            break
        arrays[name] = array if array.dtype == leaf.dtype else _checked(name, array, leaf.dtype)
        kept[index] = ValueLeaf({**leaf.details, **aggregate_details(arrays[name], handler)})
    report_problems(problems, "these leaves cannot be aggregated, and nothing was written")
    return kept, {handler.filename: handler.serialize(arrays)} if arrays else {}
