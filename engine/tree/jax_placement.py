"""Places host arrays where jax arrays are asked for.

Memory that is aligned to 64 bytes is taken over without a copy where the device is the CPU: nobody may write to it any
more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .boxes import Box, box_of
from .frameworks import required
from .numpy_leaves import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Placement(NamedTuple):
    """Where the parts of arrays of one shape lie, as far as this process has a say in it.

    Attributes:
        boxes: The boxes that this process needs; one that several of its devices share is here once.
        holders: For every one of its devices the device and the number of its box.
    """

    boxes: tuple[Box, ...]
    holders: tuple[tuple[Any, int], ...]


class Parts(NamedTuple):
    """One array that is put together from the boxes of its placement.

    Attributes:
        sharding: Where its parts shall lie.
        shape: Of the whole array.
        dtype: Of its elements.
        arrays: The elements of each box; none where this process has no part of it.
        implementation: Of typed keys, of which these are the data; None for others.
    """

    sharding: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    arrays: Sequence[NDArray[Any]]
    implementation: str | None


def sharding_of(template: Any) -> Any:
    """Returns where the array shall lie that takes the place of a template; None leaves that to jax."""
    # An array that was never put anywhere on purpose may move freely; giving it a device would tie it down.
    return template.sharding if getattr(template, "committed", True) else None


def is_spread(sharding: Any) -> bool:
    """Whether arrays with a sharding are more than one host array that is put on one device of this process."""
    return sharding is not None and not (len(sharding.device_set) == 1 and sharding.is_fully_addressable)


@lru_cache(maxsize=512)
def placement(sharding: Any, shape: tuple[int, ...]) -> Placement:
    """Says which parts of an array are to lie on devices of this process.

    Args:
        sharding: A `jax.sharding.Sharding`.
        shape: Of the whole array; for typed keys, of their data.

    Raises:
        ValueError: An array of this shape cannot be cut like that.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    numbers: dict[Box, int] = {}
    holders = [(device, numbers.setdefault(box_of(index, shape), len(numbers))) for device, index in indices.items()]
    return Placement(tuple(numbers), tuple(holders))


def put(arrays: Sequence[NDArray[Any]], shardings: Sequence[Any], implementations: Sequence[str | None]) -> list[Any]:
    """Makes jax arrays of whole host arrays, all in one call.

    Args:
        arrays: The values; of typed keys their data.
        shardings: Where each shall lie, on one device; None leaves it uncommitted on the default device.
        implementations: For typed keys their implementation, None for others.

    Returns:
        One array for each.
    """
    jax: Any = required("jax")
    same = len(set(map(id, shardings))) == 1
    results = list(jax.device_put([native(array) for array in arrays], shardings[0] if same else list(shardings)))
    return [_typed(*each) for each in zip(results, implementations, strict=True)]


def put_parts(parts: Sequence[Parts]) -> list[Any]:
    """Makes jax arrays that are spread over devices, all in one call.

    Args:
        parts: What this process has of each.

    Returns:
        One array for each. In a program of several processes every one of them makes its part of it; none waits for
        another.
    """
    jax: Any = required("jax")
    hosts: list[NDArray[Any]] = []
    places: list[Any] = []
    for sharding, shape, _, arrays, _ in parts:
        own = [native(array) for array in arrays]
        for device, number in placement(sharding, shape).holders:
            hosts.append(own[number])
            places.append(jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    shards = iter(jax.device_put(hosts, places))
    results = []
    for sharding, shape, dtype, _, implementation in parts:
        local = [next(shards) for _ in placement(sharding, shape).holders]
        array = jax.make_array_from_single_device_arrays(shape, sharding, local, dtype=dtype)
        results.append(_typed(array, implementation))
    return results


def _typed(array: Any, implementation: str | None) -> Any:
    if implementation is None:
        return array
    jax: Any = required("jax")
    return jax.random.wrap_key_data(array, impl=implementation)
