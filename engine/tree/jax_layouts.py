"""Which process holds which part of a jax array that lies on devices of several processes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .boxes import box_of
from .leaves import Part

if TYPE_CHECKING:
    from collections.abc import Sequence


@lru_cache(maxsize=4096)
def parts_of(sharding: Any, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Gives the parts of an array that its sharding makes, in the order of their places in the array.

    Args:
        sharding: Of the array, with all of its devices.
        shape: Of the whole array.
    """
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = box_of(index, shape)
        holders.setdefault((box.start, box.shape), set()).add(int(device.process_index))
    return tuple(Part(start, size, tuple(sorted(processes))) for (start, size), processes in sorted(holders.items()))


def distinct_shards(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Gives what this process holds of an array, once each: where it begins, and the array of one device."""
    shards = {}
    for shard in value.addressable_shards:
        start = start_of(shard.index)
        if start not in shards:
            shards[start] = shard.data
    return list(shards.items())


def start_of(index: Sequence[Any]) -> tuple[int, ...]:
    """Gives the first element that a tuple of slices takes."""
    return tuple([part.start or 0 for part in index])
