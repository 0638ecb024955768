"""Describes jax arrays and typed PRNG keys for saving, and creates them from host arrays on loading.

A host view of a jax array is a snapshot: jax arrays never change, and on the CPU, the memory of a donated or deleted
array stays allocated as long as such a view is alive. When arrays are loaded to the CPU, jax adopts memory that is
aligned to 64 bytes without copying it, so no code may write to that memory afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .host_leaves import check_storable, native
from .leaves import WEAK, ArrayLeaf, Box, Details, LeafProblem, Part, Piece, PinnedLeaf, jax, joined_parts

_logger = logging.getLogger("holdfast")

PINNED_PLATFORMS = {"gpu", "cuda", "rocm"}  # platforms whose arrays are copied to pinned host memory
_FEW = 64  # device ids are not stored for meshes with more devices than this
_ORIGINS = [(0,) * axes for axes in range(65)]


def is_key(value: Any) -> bool:
    """True if a jax array, tracer or `jax.ShapeDtypeStruct` has typed PRNG keys as elements."""
    return not isinstance(value.dtype, np.dtype) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_tracer(value: Any) -> bool:
    """True if a jax array is a tracer, which represents a value inside a transformation such as jit."""
    return isinstance(value, jax.core.Tracer)


class JaxDescriber:
    """Describes the jax arrays in one tree; starts all device-to-host copies before waiting for the first one.

    Up to ``pinned_bytes`` bytes of the copies stay in pinned memory, from which a later snapshot reads them.
    """

    def __init__(self, values: Sequence[Any], pinned_bytes: int = 0) -> None:
        self._shardings: dict[int, _ShardingInfo] = {}
        self._hosted: dict[int, list[Any]] = {}  # host copies of an array's parts, keyed by the array's id
        parts: list[tuple[int, Any]] = []
        if jax.default_backend() != "cpu" or "cpu" in PINNED_PLATFORMS:
            for value in values:
                with contextlib.suppress(LeafProblem):  # raised again when the leaf is described
                    parts += [(id(value), part) for part in self._parts(self._data_of(value))]
        self._owners = [number for number, _ in parts]
        self._copies: HostCopies | None = HostCopies([part for _, part in parts], pinned_bytes)

    def _parts(self, value: Any) -> list[Any]:
        """Return the single-device arrays that must be copied to save an array; ``[]`` if the array was deleted."""
        if value.is_deleted():
            return []
        return [value] if self._sharding(value).whole else [data for _, data in _shards(value)]

    def _fetched(self, value: Any) -> list[Any] | None:
        """Wait for all copies; return the host copies of an array's parts, or None if no copy was started."""
        if self._copies is not None:
            for number, array in zip(self._owners, self._copies.wait(), strict=True):
                self._hosted.setdefault(number, []).append(array)
            self._copies = None
        return self._hosted.get(id(value))

    def describe(self, value: Any) -> ArrayLeaf:
        return self._described(value, self._fetched(value))

    def _described(self, value: Any, hosted: Sequence[Any] | None) -> ArrayLeaf:
        """Describe an array; ``hosted`` holds the host copies of its parts, if they have already been copied."""
        sharding = self._shardings.get(id(value.sharding)) or self._sharding(value)
        kind = ArrayLeaf if hosted is None else PinnedLeaf
        try:
            if sharding.whole:
                array: NDArray[Any] = np.asarray(value) if hosted is None else hosted[0]
                pieces = [Piece(_ORIGINS[array.ndim], array)]
                return kind(array.dtype, array.shape, pieces, False, sharding.details_of(value))
            shards = _shards(value)
            arrays = hosted or [np.asarray(data) for _, data in shards]
        except RuntimeError as error:
            raise _deleted(value, error) from error
        pieces = [Piece(start, array) for (start, _), array in zip(shards, arrays, strict=True)]
        parts = None if sharding.local else parts_of(sharding.sharding, value.shape)
        return kind(np.dtype(value.dtype), value.shape, pieces, False, sharding.details_of(value), parts)

    def describe_key(self, value: Any) -> ArrayLeaf:
        """Describe a typed key array, which is stored as its key data."""
        try:
            leaf = self._described(self._data_of(value), self._fetched(value))
        except RuntimeError as error:
            raise _deleted(value, error) from error
        leaf.details = {**leaf.details, "kind": "key", "impl": str(jax.random.key_impl(value))}
        return leaf

    def _data_of(self, value: Any) -> Any:
        """Return the data of typed keys as a jax array (jax 0.5 may return a numpy array); keep other arrays as is."""
        if not is_key(value):
            return value
        data = jax.random.key_data(value)
        return jax.numpy.asarray(data) if isinstance(data, np.ndarray) else data

    def _sharding(self, value: Any) -> _ShardingInfo:
        """Return facts about an array's sharding, cached because most arrays in a tree share a few sharding objects."""
        sharding = value.sharding
        if id(sharding) not in self._shardings:
            details = {"kind": "jax", "sharding": _describe_sharding(sharding)}
            local = bool(sharding.is_fully_addressable)
            info = _ShardingInfo(sharding, details, {**details, WEAK: True}, is_whole(sharding), local)
            self._shardings[id(sharding)] = info
        return self._shardings[id(sharding)]


class _ShardingInfo(NamedTuple):
    sharding: Any  # kept alive, so that its id is not reused
    details: Details
    weak_details: Details  # leaf details of weakly typed arrays with this sharding
    whole: bool  # whether a single device of this process holds the whole array
    local: bool  # whether all devices belong to this process; if so, every process holds the same array

    def details_of(self, value: Any) -> Details:
        return self.weak_details if value.weak_type else self.details


class WholeArrays:
    """Facts about the single-device arrays of this process, used to recognize matching arrays in later saves."""

    _FACTS = attrgetter("dtype", "shape", "weak_type")
    _SHARDING = attrgetter("sharding")

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._facts = list(map(self._FACTS, arrays))
        self._shardings = list(map(self._SHARDING, arrays))

    def start(self, arrays: Sequence[Any], pinned_bytes: int) -> HostCopies | None:
        """Start copying arrays to the host; return None if they do not match the recorded facts."""
        shardings = list(map(self._SHARDING, arrays))
        if not all(map(eq, map(self._FACTS, arrays), self._facts)):
            return None
        if not all(map(is_, shardings, self._shardings)) and not self._equal(shardings):
            return None
        return HostCopies(arrays, pinned_bytes)

    def _equal(self, shardings: Sequence[Any]) -> bool:
        details = cache(lambda sharding: _describe_sharding(sharding) if is_whole(sharding) else None)
        pairs = zip(shardings, self._shardings, strict=True)
        return all(new is old or details(new) == details(old) for new, old in pairs)


class HostCopies:
    """Asynchronous host copies: jax arrays in up to `pinned_bytes` of pinned memory, and numpy arrays beyond that."""

    def __init__(self, arrays: Sequence[Any], pinned_bytes: int) -> None:
        self._arrays = arrays
        self._pinned: dict[int, Any] = {}  # pinned copies, keyed by the array's position
        self.pinned_bytes = pinned_bytes
        if not arrays or (jax.default_backend() == "cpu" and "cpu" not in PINNED_PLATFORMS):
            return
        chosen: dict[int, Any] = {}
        with jax.transfer_guard("allow"):  # a transfer guard is meant to catch implicit copies, not this one
            for number, array in enumerate(arrays):
                if 0 < array.nbytes <= self.pinned_bytes and _is_plain(array.dtype) and _may_be_pinned(array.sharding):
                    self.pinned_bytes -= array.nbytes
                    chosen[number] = array
                else:
                    array.copy_to_host_async()
            try:
                shardings = [array.sharding.with_memory_kind("pinned_host") for array in chosen.values()]
                self._pinned = dict(zip(chosen, jax.device_put([*chosen.values()], shardings), strict=True))
            except RuntimeError as error:
                self._go_without(error)

    def wait(self) -> list[Any]:
        """Wait for all copies and return them; from then on, the program may donate the originals."""
        if self._pinned:
            try:
                jax.block_until_ready(list(self._pinned.values()))
            except RuntimeError as error:
                self._go_without(error)
        if not self._arrays:  # if there are no arrays, the program may not have imported jax
            return []
        pinned, numbered = self._pinned, enumerate(self._arrays)
        with jax.transfer_guard("allow"):
            return [pinned[number] if number in pinned else np.asarray(array) for number, array in numbered]

    def _go_without(self, error: RuntimeError) -> None:
        if any(array.is_deleted() for array in self._arrays):
            raise error
        _logger.warning("this save blocks for longer: jax could not copy to pinned memory: %s", str(error))
        self._pinned = {}
        with jax.transfer_guard("allow"):
            for array in self._arrays:
                array.copy_to_host_async()


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """True if elements have the same layout in every memory kind; sub-byte dtypes may be packed in some kinds."""
    return dtype.kind in "biufc" or dtype.itemsize > 1


@lru_cache(maxsize=512)
def _may_be_pinned(sharding: Any) -> bool:
    """True if the sharding uses the default memory of an accelerator that supports copies to pinned host memory."""
    (device,) = sharding.device_set
    return (
        device.platform in PINNED_PLATFORMS
        and sharding.memory_kind in (None, device.default_memory().kind)
        and any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    )


def is_whole(sharding: Any) -> bool:
    """True if a single device of this process holds the whole array."""
    return bool(sharding.is_fully_addressable) and len(sharding.device_set) == 1


def _describe_sharding(sharding: Any) -> Details:
    """Return JSON facts about a sharding, for users, other tools and `on_saved_devices`."""
    kind = type(sharding).__name__
    devices = sharding.device_set
    if len(devices) == 1 and kind != "NamedSharding":
        (device,) = devices
        return {"type": kind, "device": f"{device.platform}:{device.id}"}
    if kind != "NamedSharding":
        return {"type": kind, "devices": len(devices)}
    mesh: Details = {"axes": [[str(name), int(size)] for name, size in sharding.mesh.shape.items()]}
    numbers = [int(device.id) for device in sharding.mesh.devices.flat]
    if len(numbers) <= _FEW and numbers != _all_devices():
        mesh["devices"] = numbers
    if unreduced := getattr(sharding.spec, "unreduced", None):
        raise LeafProblem(
            f"is not reduced over {', '.join(map(str, sorted(unreduced)))}: each device holds part of a sum. Save the "
            "result of jax.reshard(array, jax.P())"
        )
    spec: list[Any] = []
    for entry in getattr(sharding.spec, "partitions", sharding.spec):
        if entry is None or isinstance(entry, str):
            spec.append(entry)
        else:
            spec.append([str(name) for name in entry] if isinstance(entry, tuple) else str(entry))
    return {"type": kind, "mesh": mesh, "spec": spec}


def _all_devices() -> list[int]:
    return [int(device.id) for device in jax.devices()]


def _shards(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the distinct shards in this process: the start index of each, and its single-device array."""
    shards: dict[tuple[int, ...], Any] = {}
    for shard in value.addressable_shards:
        shards.setdefault(tuple([part.start or 0 for part in shard.index]), shard.data)
    return list(shards.items())


@lru_cache(maxsize=4096)
def parts_of(sharding: Any, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the parts of an array with a given sharding, in ascending order, each with the processes that hold it."""
    indices = sharding.devices_indices_map(shape)
    return joined_parts((int(device.process_index), _box_of(index, shape)) for device, index in indices.items())


def _box_of(index: Sequence[Any] | None, shape: Sequence[int]) -> Box:
    bounds = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=False)]
    bounds += [(0, size) for size in shape[len(bounds) :]]
    return Box(tuple([low for low, _ in bounds]), tuple([max(low, high) for low, high in bounds]))


def _deleted(value: Any, error: RuntimeError) -> Exception:
    if value.is_deleted():
        return LeafProblem("was deleted or donated; save the array that replaced it")
    return error


def template_facts(value: Any) -> tuple[Any, ...]:
    """Return (kind, stored shape, stored dtype, the leaf itself, variant, is weak, sharding) for a template leaf."""
    dtype = value.dtype
    if is_tracer(value):
        raise LeafProblem("is a tracer; load outside of jax.jit, jax.grad and the like")
    if isinstance(dtype, np.dtype):
        check_storable(dtype)
        is_weak = bool(getattr(value, "weak_type", False))  # weakly typed arrays adopt the other operand's dtype
        return "jax", value.shape, dtype, value, None, is_weak, template_sharding(value)
    if not is_key(value):
        raise LeafProblem(f"has dtype {dtype}, which cannot be stored")
    data_dtype, data_shape, implementation = _key_data(dtype)
    shape = (*value.shape, *data_shape)
    return "key", shape, data_dtype, value, str(implementation), False, template_sharding(value)


def implementation_of(key: Any) -> Any:
    """Return the PRNG implementation of typed keys, which may be abstract, for `jax.random.wrap_key_data`."""
    return _key_data(key.dtype)[2]


@lru_cache(maxsize=16)
def _key_data(key_dtype: Any) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Return the dtype and shape of a single key's data, and its PRNG implementation."""
    implementations: list[Any] = []

    def trace(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(trace, jax.ShapeDtypeStruct((), key_dtype))
    return np.dtype(data.dtype), tuple(data.shape), implementations[0]


class AbstractSharding(NamedTuple):
    """A sharding without concrete devices, as returned by `jax.eval_shape` for arrays on a mesh with explicit axes."""

    sharding: Any  # a `jax.sharding.NamedSharding` on a `jax.sharding.AbstractMesh`


def template_sharding(template: Any) -> Any:
    """Return the sharding with which to restore a template's array; None leaves the choice to jax."""
    # jax may move an uncommitted array freely, but restoring it to a given device would commit it.
    sharding = template.sharding if getattr(template, "committed", True) else None
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        return sharding
    if not sharding.mesh.axis_names:
        return None
    current = getattr(jax.sharding, "get_mesh", lambda: None)()
    if current is not None and dict(current.shape) == dict(sharding.mesh.shape):
        return _on(current, sharding)
    return AbstractSharding(sharding)


def on_saved_devices(abstract: AbstractSharding, saved: Details) -> Any:
    """Return the sharding on the saved mesh if its devices are available, otherwise on a mesh of all devices."""
    mesh = abstract.sharding.mesh
    numbers = _saved_devices(saved, mesh)
    if numbers is not None:
        return _on(_mesh_of(mesh, numbers), abstract.sharding)
    if mesh.size == jax.device_count():
        return _on(_mesh_of_all_devices(mesh), abstract.sharding)
    raise ValueError(
        f"it is sharded over a mesh with the axes {dict(mesh.shape)}, whose devices are unknown: it needs {mesh.size} "
        f"of the {jax.device_count()} devices. Restore within jax.set_mesh(mesh), or give the template a concrete "
        "sharding"
    )


def _saved_devices(saved: Details, mesh: Any) -> tuple[int, ...] | None:
    """Return the device ids of the saved mesh, if it has the same axes and all its devices are available."""
    try:
        axes, numbers = (saved["sharding"]["mesh"][key] for key in ("axes", "devices"))
        are_available = len(numbers) == len(set(numbers)) == mesh.size and set(numbers) <= set(_all_devices())
    except (KeyError, TypeError):  # saved without a mesh or the ids of its devices
        return None
    has_axes = axes == [[str(name), size] for name, size in mesh.shape.items()]
    return tuple(numbers) if has_axes and are_available else None


def _on(mesh: Any, sharding: Any) -> Any:
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


@lru_cache(maxsize=16)
def _mesh_of(abstract: Any, numbers: tuple[int, ...]) -> Any:
    devices = {int(device.id): device for device in jax.devices()}
    chosen = np.empty(len(numbers), object)
    chosen[:] = [devices[number] for number in numbers]
    grid = chosen.reshape(abstract.axis_sizes)
    return jax.sharding.Mesh(grid, abstract.axis_names, axis_types=abstract.axis_types)


@lru_cache(maxsize=16)
def _mesh_of_all_devices(abstract: Any) -> Any:
    return jax.make_mesh(abstract.axis_sizes, abstract.axis_names, axis_types=abstract.axis_types)


def narrowed(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype to which jax, as currently configured, would narrow a 64-bit dtype; None if it would not."""
    if dtype.itemsize < 8:
        return None
    actual = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return None if actual == dtype.newbyteorder("=") else actual


def is_spread(sharding: Any) -> bool:
    """True if a sharding is given and no single device of this process holds the whole array."""
    return sharding is not None and not is_whole(sharding)


@lru_cache(maxsize=512)
def _device_boxes(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[Box, ...], tuple[tuple[Any, int], ...]]:
    """Return the distinct boxes on this process's devices, and a (device, index of its box) pair for each device."""
    indices = sharding.addressable_devices_indices_map(shape)
    numbers: dict[Box, int] = {}
    holders = [(device, numbers.setdefault(_box_of(index, shape), len(numbers))) for device, index in indices.items()]
    return tuple(numbers), tuple(holders)


def local_boxes(sharding: Any, shape: tuple[int, ...]) -> Sequence[Box] | None:
    """Return the boxes of an array that this process needs for a sharding; None if one device holds the whole array."""
    return _device_boxes(sharding, shape)[0] if is_spread(sharding) else None


class NewArray(NamedTuple):
    """A jax array, or an array of typed keys, to be created from host arrays."""

    sharding: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    arrays: Sequence[NDArray[Any]]  # one host array for each of the `local_boxes`, or the whole array
    implementation: Any = None  # PRNG implementation, if the arrays are key data
    weak: bool = False


def put(new: Sequence[NewArray]) -> list[Any]:
    """Create jax arrays, transferring all of them with one `device_put`."""
    are_spread = [is_spread(array.sharding) for array in new]
    hosts: list[NDArray[Any]] = []
    shardings: list[Any] = []
    for (sharding, shape, _, arrays, *_), is_divided in zip(new, are_spread, strict=True):
        if not is_divided:
            hosts += map(native, arrays)
            shardings.append(sharding)
            continue
        boxes = list(map(native, arrays))
        for device, number in _device_boxes(sharding, shape)[1]:
            hosts.append(boxes[number])
            shardings.append(jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    same = len(set(map(id, shardings))) == 1
    results = []
    # Saved values may fail the program's checks for NaN and infinity, and its transfer guards mean implicit copies.
    with jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        placed = iter(jax.device_put(hosts, shardings[0] if same else shardings))
        for (sharding, shape, dtype, _, implementation, weak), is_divided in zip(new, are_spread, strict=True):
            if is_divided:
                local = [next(placed) for _ in _device_boxes(sharding, shape)[1]]
                array = jax.make_array_from_single_device_arrays(shape, sharding, local, dtype=dtype)
            else:
                array = next(placed)
            if implementation is not None:
                array = jax.random.wrap_key_data(array, impl=implementation)
            if weak:
                array = _weakening(array.sharding if array.committed else None)(array)
            results.append(array)
    return results


@lru_cache(maxsize=64)
def _weakening(sharding: Any) -> Any:
    """Return a function that converts an array to a weakly typed one with the same elements and devices."""
    convert = importlib.import_module("jax.extend.core.primitives").convert_element_type_p

    def weak(array: Any) -> Any:
        return convert.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)

    return jax.jit(weak) if sharding is None else jax.jit(weak, out_shardings=sharding)
