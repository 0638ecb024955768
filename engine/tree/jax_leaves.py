"""Leaves that are jax arrays or typed PRNG keys.

A host view of a jax array is a snapshot: jax arrays never change, and while such a view is alive on the CPU, a donated or
deleted array keeps its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .frameworks import loaded
from .leaves import ArrayLeaf, Details, LeafProblem, Piece
from .numpy_leaves import native, why_not_storable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ORIGINS = [(0,) * axes for axes in range(33)]


class JaxDescriber:
    """Describes jax arrays, one after the other, of one tree.

    Construct it, `prepare` every array, then `describe` every array: all copies from devices are under way before the
    first is waited for.
    """

    def __init__(self) -> None:
        jax: Any = loaded("jax")
        self._jax = jax
        self._tracer = jax.core.Tracer
        # By id of the sharding: itself, what tree.json says of it, whether one device has all, whether that is the host.
        self._placements: dict[int, tuple[Any, Details, bool, bool]] = {}

    def prepare(self, value: Any) -> None:
        """Starts the copy to the host, where there is one to make."""
        if isinstance(value, self._tracer):
            return
        _, _, whole, on_host = self._placement(value)
        if on_host or value.is_deleted():
            return
        if _is_key(self._jax, value):
            value = self._jax.random.key_data(value)
        if whole:
            value.copy_to_host_async()
        else:
            for shard in value.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()

    def describe(self, value: Any) -> ArrayLeaf:
        """Describes one array or typed key array.

        Raises:
            LeafProblem: Tracers, deleted arrays, arrays that other processes hold a part of.
        """
        if isinstance(value, self._tracer):
            raise LeafProblem("is a tracer; save outside of jax.jit, jax.grad and the like")
        _, details, whole, _ = self._placement(value)
        if not whole and not value.is_fully_addressable:
            raise LeafProblem("lies partly on devices of other processes; gather it first")
        try:
            if _is_key(self._jax, value):
                implementation = str(self._jax.random.key_impl(value))
                details = {**details, "kind": "key", "impl": implementation}
                value = self._jax.random.key_data(value)
            if not whole:
                return self._sharded(value, details)
            array: NDArray[Any] = np.asarray(value)
        except RuntimeError as error:
            if value.is_deleted():
                raise LeafProblem("was deleted or donated; save the array that took its place") from error
            raise
        return ArrayLeaf(array.dtype, array.shape, [Piece(_ORIGINS[array.ndim], array)], False, details)

    def _sharded(self, value: Any, details: Details) -> ArrayLeaf:
        pieces = []
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                start = tuple([part.start or 0 for part in shard.index])
                pieces.append(Piece(start, np.asarray(shard.data)))
        return ArrayLeaf(np.dtype(value.dtype), value.shape, pieces, False, details)

    def _placement(self, value: Any) -> tuple[Any, Details, bool, bool]:
        sharding = value.sharding
        found = self._placements.get(id(sharding))
        if found is None:
            devices = list(sharding.device_set)
            whole = len(devices) == 1 and sharding.is_fully_addressable
            on_host = all(device.platform == "cpu" for device in devices)
            details = {"kind": "jax", "sharding": describe_sharding(sharding)}
            found = self._placements[id(sharding)] = (sharding, details, whole, on_host)
        return found


def describe_sharding(sharding: Any) -> Details:
    """Gives the JSON facts about a sharding, for people and for other tools; loading never needs them."""
    kind = type(sharding).__name__
    devices = sharding.device_set
    if len(devices) == 1 and kind != "NamedSharding":
        (device,) = devices
        return {"type": kind, "device": f"{device.platform}:{device.id}"}
    if kind != "NamedSharding":
        return {"type": kind, "devices": len(devices)}
    axes = [[str(name), int(size)] for name, size in sharding.mesh.shape.items()]
    spec: list[Any] = []
    for entry in sharding.spec:
        if entry is None or isinstance(entry, str):
            spec.append(entry)
        else:
            spec.append([str(name) for name in entry] if isinstance(entry, tuple) else str(entry))
    return {"type": kind, "mesh": {"axes": axes}, "spec": spec}


def _is_key(jax: Any, value: Any) -> bool:
    return not isinstance(value.dtype, np.dtype) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def abstract_facts(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str | None]:
    """Says what a template asks for.

    Args:
        value: A jax array, typed key array or `jax.ShapeDtypeStruct`; deleted ones will do.

    Returns:
        "jax" or "key", dtype and shape as stored (for keys: of the key data), and a key's implementation.

    Raises:
        LeafProblem: A tracer, or a dtype that cannot be stored.
    """
    jax: Any = loaded("jax")
    if isinstance(value, jax.core.Tracer):
        raise LeafProblem("is a tracer; load outside of jax.jit, jax.grad and the like")
    if _is_key(jax, value):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
        return "key", np.dtype(data.dtype), tuple(data.shape), _implementation(jax, value)
    dtype = np.dtype(value.dtype)
    problem = why_not_storable(dtype)
    if problem is not None:
        raise LeafProblem(problem)
    return "jax", dtype, tuple(value.shape), None


def _implementation(jax: Any, value: Any) -> str:
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), value.dtype))
    return found[0]


def narrowed(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Gives the dtype that jax would use in place of a 64-bit one at the moment, or None if it would use this one."""
    if dtype.itemsize < 8:
        return None
    jax: Any = loaded("jax")
    actual = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return None if actual == dtype.newbyteorder("=") else actual


def put(arrays: Sequence[NDArray[Any]], templates: Sequence[Any], implementations: Sequence[str | None]) -> list[Any]:
    """Makes jax arrays, all in one call.

    Memory that is aligned to 64 bytes is taken over without a copy where the device is the CPU: nobody may write to it
    any more.

    Args:
        arrays: The values; of the dtypes and shapes that `abstract_facts` gave for the templates.
        templates: Arrays, typed keys or `jax.ShapeDtypeStruct`; each says where its array shall lie.
        implementations: For typed keys their implementation, None for others.

    Returns:
        One array for each, with the sharding of its template; uncommitted if the template is uncommitted.
    """
    jax: Any = loaded("jax")
    placements = [_target_sharding(template) for template in templates]
    results = list(jax.device_put([native(array) for array in arrays], placements))
    for index, implementation in enumerate(implementations):
        if implementation is not None:
            results[index] = jax.random.wrap_key_data(results[index], impl=implementation)
    return results


def _target_sharding(template: Any) -> Any:
    # An array that was never put anywhere on purpose may move freely; giving it a device would tie it down.
    return template.sharding if getattr(template, "committed", True) else None
