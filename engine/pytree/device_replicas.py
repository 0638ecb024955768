"""Checks whether all devices hold equal replicas of replicated jax arrays.

Replicas may differ, for example, if ``shard_map`` runs without its replication check and each device computes its
replica from different data. A save writes only one replica, and a restore copies it to all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np

from .jax_leaves import is_key, is_tracer
from .leaves import is_jax_array, jax

_EVEN = 0x3C6EF372  # even, so that all weights in the checksum are odd, and a change to any single word is detected


def is_on_several_devices(value: Any) -> bool:
    """True for a jax array that can be read and lies on more than one device."""
    sharding = getattr(value, "sharding", None)
    if sharding is None or type(sharding) is jax.sharding.SingleDeviceSharding:
        return False
    return is_jax_array(value) and not is_tracer(value) and not value.is_deleted() and len(sharding.device_set) > 1


def differing_replicas(arrays: Mapping[str, Any]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Find the jax arrays whose replicas on the devices of this process are not bitwise equal.

    For each such array, yield its name, the devices whose replicas equal the replica that a save writes, and all other
    devices with a replica. Each device computes a checksum of its replica, and the checksums are compared.
    """
    sums: list[tuple[str, Any]] = []
    with jax.transfer_guard("allow"):
        for name, value in arrays.items():
            groups: dict[tuple[Any, ...], list[Any]] = {}
            for shard in (jax.random.key_data(value) if is_key(value) else value).addressable_shards:
                groups.setdefault(tuple(part.start or 0 for part in shard.index), []).append(shard.data)
            sums += [(name, _checksums(replicas)) for replicas in groups.values() if len(replicas) > 1]
        for name, checksums in sums:
            shards = [(shard.device, int(np.asarray(shard.data))) for shard in checksums.addressable_shards]
            written = shards[0][1]
            if others := [device for device, checksum in shards if checksum != written]:
                yield name, [device for device, checksum in shards if checksum == written], others


def _checksums(replicas: Sequence[Any]) -> Any:
    """Return a scalar array whose value on each device is the checksum of that device's replica."""
    mesh = jax.sharding.Mesh(np.array([next(iter(replica.devices())) for replica in replicas]), "replicas")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_single_device_arrays(replicas[0].shape, sharding, list(replicas))
    # Set the mesh explicitly, because the program may have set a different one.
    use_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", nullcontext)
    with use_mesh(mesh):
        return _compiled()(array)


@cache
def _compiled() -> Any:
    jnp: Any = jax.numpy

    def checksum(array: Any) -> Any:
        if jnp.iscomplexobj(array):
            array = jnp.stack((array.real, array.imag))
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array if jnp.finfo(array.dtype).bits >= 8 else array.astype(jnp.float32)
            array = jax.lax.bitcast_convert_type(array, f"uint{min(jnp.finfo(array.dtype).bits, 32)}")
        elif array.dtype.itemsize == 8:
            array = jax.lax.bitcast_convert_type(array, jnp.uint32)
        words = array.astype(jnp.uint32).ravel()
        weights = jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(_EVEN) + jnp.uint32(1)
        return (words * weights).sum(dtype=jnp.uint32)

    return jax.jit(checksum)
