"""Which boxes of an array are needed to make what a target asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import jax_placement, torch_placement
from .boxes import Box, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .leaves import Saved
    from .targets import Target


class Partition(NamedTuple):
    """The parts of one array that this process makes.

    Attributes:
        boxes: Where each is in the array that is asked for.
        stored: Which elements of the saved array each is made from; the box has no elements where it is beyond them.
    """

    boxes: Sequence[Box]
    stored: Sequence[Box]


def partition(target: Target, saved: Saved) -> Partition | None:
    """Says which parts of a saved array a target needs.

    Args:
        target: What is asked for, fitting what was saved as `compare` says.
        saved: What the checkpoint says.

    Returns:
        The parts, or None where the whole array is read and nothing is to be done to its shape.

    Raises:
        ValueError: An array of this shape cannot be spread as it is asked for.
    """
    if target.dtype is None or target.shape is None or saved.shape is None:
        return None
    boxes: Sequence[Box] | None = None
    if target.kind in {"jax", "key"}:
        if jax_placement.is_spread(target.sharding):
            boxes = jax_placement.placement(target.sharding, target.shape).boxes
    elif target.kind == "torch" and target.template is not None:
        boxes = torch_placement.local_boxes(target.template, target.shape)
    if boxes is None:
        if target.shape == saved.shape:
            return None
        boxes = [whole(target.shape)]
    limits = whole(saved.shape)
    return Partition(boxes, [box.common(limits) or Box(limits.start, limits.start) for box in boxes])
