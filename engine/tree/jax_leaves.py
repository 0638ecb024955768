"""Leaves that are jax arrays or typed PRNG keys.

A host view of a jax array is a snapshot: jax arrays never change, and while such a view is alive on the CPU, an array
that is donated or deleted keeps its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .frameworks import loaded
from .jax_layouts import distinct_shards, parts_of, start_of
from .leaves import ArrayLeaf, Details, LeafProblem, Piece
from .numpy_leaves import why_not_storable

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ORIGINS = [(0,) * axes for axes in range(65)]


class JaxDescriber:
    """Describes jax arrays, one after the other, of one tree.

    Where `prefetches` is true, `prepare` every array before the first is described: then all copies from devices are
    under way before one is waited for.

    Attributes:
        prefetches: Whether arrays may lie elsewhere than in this machine's memory.
    """

    def __init__(self) -> None:
        jax: Any = loaded("jax")
        self._jax = jax
        self._placements: dict[int, _Placement] = {}
        self.prefetches: bool = jax.default_backend() != "cpu"

    def prepare(self, value: Any) -> None:
        """Starts the copy of an array or typed key to the host."""
        if isinstance(value, self._jax.core.Tracer) or value.is_deleted():
            return
        if is_key(value):
            value = self._jax.random.key_data(value)
        placement = self._placement(value)
        if placement.whole:
            value.copy_to_host_async()
        else:
            for _, data in placement.shards(value):
                data.copy_to_host_async()

    def describe(self, value: Any) -> ArrayLeaf:
        """Describes one array that is neither a tracer nor a typed key.

        Raises:
            LeafProblem: It was deleted.
        """
        placement = self._placements.get(id(value.sharding)) or self._placement(value)
        try:
            if not placement.whole:
                return _in_pieces(value, placement)
            array: NDArray[Any] = np.asarray(value)
        except RuntimeError as error:
            raise _deleted(value, error) from error
        return ArrayLeaf(array.dtype, array.shape, [Piece(_ORIGINS[array.ndim], array)], False, placement.details)

    def describe_key(self, value: Any) -> ArrayLeaf:
        """Describes one array of typed keys, stored as its key data.

        Raises:
            LeafProblem: As `describe`.
        """
        try:
            leaf = self.describe(self._jax.random.key_data(value))
        except RuntimeError as error:
            raise _deleted(value, error) from error
        leaf.details = {**leaf.details, "kind": "key", "impl": str(self._jax.random.key_impl(value))}
        return leaf

    def describe_tracer(self, value: Any) -> ArrayLeaf:
        """Refuses a tracer.

        Raises:
            LeafProblem: Always.
        """
        raise LeafProblem(f"is a tracer ({type(value).__name__}); save outside of jax.jit, jax.grad and the like")

    def _placement(self, value: Any) -> _Placement:
        """Finds what is known of an array's sharding. Most arrays of a tree share a few sharding objects."""
        sharding = value.sharding
        found = self._placements.get(id(sharding))
        if found is None:
            local = bool(sharding.is_fully_addressable)
            details = {"kind": "jax", "sharding": describe_sharding(sharding)}
            found = _Placement(sharding, details, local and len(sharding.device_set) == 1, local)
            self._placements[id(sharding)] = found
        return found


@dataclass(frozen=True, slots=True)
class _Placement:
    """What arrays of one sharding have in common.

    Attributes:
        sharding: Held, so that its id stays its own.
        details: For the leaf.
        whole: Whether one device, which is this process's, has all of the array.
        local: Whether all devices are this process's. Others may have such an array, too: it is the same one then.
    """

    sharding: Any
    details: Details
    whole: bool
    local: bool

    def shards(self, value: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Gives what this process holds, once each: where it begins, and the array of one device."""
        if not self.local:
            return distinct_shards(value)
        return [(start_of(shard.index), shard.data) for shard in value.addressable_shards if shard.replica_id == 0]


def _in_pieces(value: Any, placement: _Placement) -> ArrayLeaf:
    pieces = [Piece(start, np.asarray(data)) for start, data in placement.shards(value)]
    parts = None if placement.local else parts_of(placement.sharding, value.shape)
    return ArrayLeaf(np.dtype(value.dtype), value.shape, pieces, False, placement.details, parts)


def _deleted(value: Any, error: RuntimeError) -> Exception:
    if value.is_deleted():
        return LeafProblem("was deleted or donated; save the array that took its place")
    return error


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


def is_key(value: Any) -> bool:
    """Whether a jax array, tracer or `jax.ShapeDtypeStruct` is one of typed PRNG keys."""
    jax: Any = loaded("jax")
    return not isinstance(value.dtype, np.dtype) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_tracer(value: Any) -> bool:
    """Whether a jax array is a tracer, which stands for a value inside a transformation."""
    jax: Any = loaded("jax")
    return isinstance(value, jax.core.Tracer)


def abstract_facts(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str | None]:
    """Says what a template asks for.

    Args:
        value: A jax array, typed key array or `jax.ShapeDtypeStruct`; deleted ones will do.

    Returns:
        "jax" or "key", dtype and shape as stored (for keys: of the key data), and a key's implementation.

    Raises:
        LeafProblem: A tracer, or a dtype that cannot be stored.
    """
    dtype = value.dtype
    if is_tracer(value):
        raise LeafProblem("is a tracer; load outside of jax.jit, jax.grad and the like")
    if not isinstance(dtype, np.dtype):
        if is_key(value):
            return _key_facts(value)
        raise LeafProblem(f"has dtype {dtype}, which cannot be stored")
    problem = why_not_storable(dtype)
    if problem is not None:
        raise LeafProblem(problem)
    return "jax", dtype, value.shape, None


def _key_facts(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str | None]:
    dtype, shape, implementation = _key_data(value.dtype)
    return "key", dtype, (*value.shape, *shape), implementation


@lru_cache(maxsize=16)
def _key_data(key_dtype: Any) -> tuple[np.dtype[Any], tuple[int, ...], str]:
    """Gives dtype and shape of one key's data, and the name of its implementation."""
    jax: Any = loaded("jax")
    found: list[str] = []

    def trace(key: Any) -> Any:
        found.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    data = jax.eval_shape(trace, jax.ShapeDtypeStruct((), key_dtype))
    return np.dtype(data.dtype), tuple(data.shape), found[0]


def narrowed(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Gives the dtype that jax would use in place of a 64-bit one at the moment, or None if it would use this one."""
    if dtype.itemsize < 8:
        return None
    jax: Any = loaded("jax")
    actual = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return None if actual == dtype.newbyteorder("=") else actual
