"""What a leaf is once its framework no longer matters: an array on the host, or a small value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedLeafError
from .names import display

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Details = dict[str, Any]
"""JSON facts about a leaf for ``tree.json``, with at least "kind". Leaves share them: they are not to be changed."""

ARRAY_KINDS = frozenset({"numpy", "jax", "torch", "key"})
"""Kinds of leaves that are arrays for their owners."""

NUMBER_KINDS = frozenset({"bool", "int", "float", "complex"})
"""Kinds that are Python numbers for their owners, stored as 0-d arrays."""


@dataclass(slots=True)
class Piece:
    """A part of an array that lies in one piece of host memory.

    Attributes:
        start: Index of its first element in the whole array, one number for each axis.
        array: The elements; any strides, perhaps read-only.
    """

    start: tuple[int, ...]
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of an array's elements that some processes hold.

    Attributes:
        start: Index of its first element, one number for each axis.
        shape: How many elements it has along each axis.
        holders: The processes that have all of it, in ascending order.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    holders: tuple[int, ...]


@dataclass(slots=True)
class ArrayLeaf:
    """A leaf that is stored as an array.

    Attributes:
        dtype: Of the elements, byte order included.
        shape: Of the whole array.
        pieces: Host views that cover exactly once what this process holds of the array: all of it, where `parts` is
            None.
        volatile: Whether somebody else can still change the memory of the pieces: copy them before going on.
        details: For ``tree.json``: "kind" ("numpy", "numpy_scalar", "jax", "key", "torch", "bool", "int", "float",
            "complex") and what that kind adds. Neither dtype nor shape.
        parts: Which processes hold what, as all of them see it; boxes that cover the array exactly once. None where
            every process has the whole array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: list[Piece]
    volatile: bool
    details: Details
    parts: tuple[Part, ...] | None = None


@dataclass(slots=True)
class ValueLeaf:
    """A leaf that is stored in ``tree.json`` itself.

    Attributes:
        details: "kind" ("int", "str", "bytes", "none", "set", "frozenset") and "value", as JSON.
    """

    details: Details


@dataclass(slots=True)
class Saved:
    """What a checkpoint says of one leaf.

    Attributes:
        details: As in `ArrayLeaf.details` or `ValueLeaf.details`, read from ``tree.json`` and not trusted.
        dtype: Of the stored array (logical, as in `ArrayLeaf.dtype`); None for a value leaf.
        shape: Of the stored array; None for a value leaf.
    """

    details: Details
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.kind = self.details["kind"]


class LeafProblem(TypeError):  # noqa: N818 - collected by `describe`, never seen by a user
    """Why one leaf cannot be saved, or cannot be a template."""


def report_problems(problems: list[tuple[str, str]], what: str) -> None:
    """Raises one error for all leaves that have a problem.

    Args:
        problems: Name of the leaf and what is wrong with it.
        what: What could not be done, to begin the message with.

    Raises:
        UnsupportedLeafError: There are problems.
    """
    if problems:
        lines = "\n".join(f"  {display(name)}: {problem}" for name, problem in problems)
        raise UnsupportedLeafError(f"{what}:\n{lines}")
