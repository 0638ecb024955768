"""Describes torch tensors for saving, and creates them from host arrays on loading.

The parts of a DTensor that each process holds are derived from its mesh and placements, without communication. As
defined by ``torch.distributed.tensor``, placements apply from the first mesh axis to the last, and each placement
divides the parts that result from the previous placements.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, eq
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..forks import cached_property
from .device_arrays import DeviceArray, is_copied_later
from .host_leaves import native
from .leaves import ArrayLeaf, Box, Details, LeafProblem, Part, Piece, Saved, joined_parts, ml_dtypes, torch

COMMON_DTYPES = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
})  # fmt: skip  # names of the dtypes that torch and numpy share
_TINY = re.compile("u?int[1-7]")  # sub-byte integer dtypes, for which torch implements no operations
_PAIRED = {"complex32": "float16"}  # stored as real and imaginary parts along an additional last axis
HOST_DEVICES = {"cpu", "meta"}
ASYNCHRONOUS_DEVICES = {"cuda", "xpu"}  # device types that can copy to the host asynchronously
# Maximum number of bytes that a save without its own pinned memory copies asynchronously; torch pins up to twice that.
BYTES_AT_ONCE = 1 << 30
_SMALL = 1 << 15  # minimum number of elements for which torch copies a tensor with several threads


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor"


class TorchDescriber:
    """Describes the tensors in one tree; ``later`` defers copies from devices to the next snapshot if possible."""

    def __init__(self, values: Sequence[Any], *, later: bool = False) -> None:
        self._later = later
        self._copies: dict[int, Any] = {}
        self._devices: set[Any] = set()
        self._left = BYTES_AT_ONCE
        self._axes: dict[Mesh, set[int]] = {}  # for each root mesh, the axes that DTensors in the tree span
        for value in values:
            with contextlib.suppress(LeafProblem):  # raised again when the leaf is described
                self._prepare(value)

    def _prepare(self, value: Any) -> None:
        if is_dtensor(value) and (location := _axes_in_root(value.device_mesh)) is not None:
            self._axes.setdefault(location[0], set()).update(location[1])
        if value.device.type in HOST_DEVICES:
            return
        _check(value)
        local = _local(value) if is_dtensor(value) else value.detach()
        if self._later and is_copied_later(local):
            self._copies[id(value)] = encoding_of(value.dtype).on_device(local)
            return
        overlaps = value.device.type in ASYNCHRONOUS_DEVICES and local.nbytes <= self._left
        self._copies[id(value)] = local.to("cpu", non_blocking=overlaps)
        if overlaps:
            self._left -= local.nbytes
            self._devices.add(value.device)

    def describe(self, value: Any) -> ArrayLeaf:
        array, volatile, encoding = self._array(value, value)
        details = encoding.details if not value.requires_grad else {**encoding.details, "requires_grad": True}
        if not value.is_contiguous() and is_permuted(value.shape, strides := list(value.stride())):
            details = {**details, STRIDES: strides}
        return ArrayLeaf.of(array, details, volatile=volatile)

    def describe_distributed(self, value: Any) -> ArrayLeaf:
        """Describe a DTensor: the part in this process, and the processes that hold each part."""
        sharding = self._sharding(value)
        array, volatile, encoding = self._array(value, _local(value))
        shape, parts = sharding.shape, sharding.parts()
        share = sharding.share(int(torch.distributed.get_rank()))
        pieces = []
        if share is not None:
            local = array.shape[: len(shape)]
            if local != share.shape:
                raise LeafProblem(f"is a DTensor whose local part has shape {local}; its placements give {share.shape}")
            pieces = [Piece(box.start, array[index]) for box, index in share.boxes]
        if encoding.paired:
            shape, parts = (*shape, 2), tuple([part.with_axis(2) for part in parts])
            pieces = [Piece((*piece.start, 0), piece.array) for piece in pieces]
        details: Details = {**encoding.details, "sharding": sharding.describe()}
        if value.requires_grad:
            details["requires_grad"] = True
        is_alone = int(torch.distributed.get_world_size()) == 1
        return ArrayLeaf(array.dtype, shape, pieces, volatile, details, None if is_alone else parts)

    def _sharding(self, value: Any) -> DTensorSharding:
        """Return the sharding of a DTensor over all processes that hold it, including processes outside its submesh."""
        # If the DTensors of a tree span two axes of a mesh, such as one for tensor parallelism and one for FSDP2, a
        # parameter that spans only one axis is replicated along the other. Along an axis that no DTensor spans, such as
        # the stages of a pipeline, processes may hold different parameters.
        sharding, location = sharding_of(value), _axes_in_root(value.device_mesh)
        more = () if location is None else tuple(sorted(self._axes.get(location[0], set()) - location[1]))
        if location is None or not more:
            return sharding
        copies = tuple([Division(None)] * len(more))
        return DTensorSharding(_repeated(sharding.mesh, location[0], more), copies + sharding.divisions, sharding.shape)

    def _array(self, value: Any, local: Any) -> tuple[NDArray[Any], bool, TorchDType]:
        """Return the (local) elements of a tensor, whether they can still change, and their encoding."""
        _check(value)
        for device in self._devices:
            getattr(torch, device.type).synchronize(device)
        self._devices.clear()
        tensor = self._copies.get(id(value))  # not popped, because two leaves may be the same tensor
        encoding = encoding_of(value.dtype)
        if isinstance(tensor, DeviceArray):
            _check_memory(tensor.tensor)
            return cast("NDArray[Any]", tensor), True, encoding
        volatile = tensor is None
        if tensor is None:
            tensor = local.detach() if local.requires_grad else local
        if tensor.is_conj() or tensor.is_neg():
            tensor, volatile = tensor.resolve_conj().resolve_neg(), False
        _check_memory(tensor)
        try:
            return encoding.to_numpy(tensor), volatile, encoding
        except (RuntimeError, TypeError) as error:
            raise LeafProblem(f"is a {type(value).__name__} that cannot be turned into an array: {error}") from error


def _local(value: Any) -> Any:
    with torch.no_grad():
        local = value.to_local().detach()
    # Wait for the result of an asynchronous collective, which may still be in progress.
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local


def _check_memory(tensor: Any) -> None:
    if tensor.numel() and not tensor.data_ptr():
        raise LeafProblem(
            "has no memory: its storage was freed, as FSDP frees unsharded parameters; save the sharded ones"
        )


def _check(value: Any) -> None:
    if value.layout is not torch.strided:
        raise LeafProblem(f"is a tensor of layout {value.layout}; store its indices and values, or value.to_dense()")
    if value.is_quantized:
        raise LeafProblem("is a quantized tensor; store value.int_repr(), its scale and its zero point")
    if value.is_nested:
        raise LeafProblem("is a nested tensor; store value.unbind()")
    if value.is_meta:
        raise LeafProblem("is on the meta device and has no values")
    name = type(value).__name__
    if name == "ShardedTensor":
        raise LeafProblem("is a ShardedTensor; use DTensors instead: use FSDP2, or pass a device mesh to FSDP")
    if name.startswith("Uninitialized"):
        raise LeafProblem("is not initialized yet; run the module once")


class TorchDType(NamedTuple):
    """Describes how the elements of a torch dtype are stored."""

    name: str
    dtype: np.dtype[Any]  # numpy dtype of the stored bytes
    carrier: str | None  # dtype of the same size that both libraries have, used as an intermediate; None if not needed
    paired: bool  # whether an element is stored as a pair of real and imaginary parts
    variant: str | None  # torch dtype name if the numpy dtype does not imply it; otherwise None
    details: Details  # `ArrayLeaf.details` of tensors with this dtype

    def to_numpy(self, tensor: Any) -> NDArray[Any]:
        """Return a numpy view of a tensor, which must have no gradient, conjugate bit or negative bit."""
        if self.paired:
            return np.asarray(torch.view_as_real(tensor).numpy())
        if self.carrier is None:
            return np.asarray(tensor.numpy())
        return np.asarray(tensor.view(getattr(torch, self.carrier)).numpy()).view(self.dtype)

    def on_device(self, tensor: Any) -> DeviceArray:
        """Wrap a tensor on an accelerator, which must meet the conditions of `to_numpy`, as a `DeviceArray`."""
        elements = torch.view_as_real(tensor) if self.paired else tensor
        # View the elements as integers, which keep every bit pattern and support all torch operations.
        carrier = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}.get(self.dtype.itemsize)
        return DeviceArray(elements if carrier is None else elements.view(getattr(torch, carrier)), self.dtype)

    def to_tensor(self, array: NDArray[Any]) -> Any:
        """Create a tensor that shares the memory of an array, which must be writable and in native byte order."""
        if self.paired:
            return torch.view_as_complex(torch.from_numpy(np.ascontiguousarray(array)))
        if self.carrier is None:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}")).view(getattr(torch, self.name))


@lru_cache(maxsize=128)
def torch_dtype(name: str, itemsize: int = 1) -> TorchDType:
    """Return how the torch dtype with this name is stored, without importing torch."""
    dtype, variant = _PAIRED.get(name, name), name if name in _PAIRED else None
    if dtype not in COMMON_DTYPES:
        is_number = name.startswith(("float", "bfloat")) and hasattr(ml_dtypes, name)
        # Torch has no operations for any other dtypes, such as sub-byte integers, so these are stored as bytes.
        dtype = getattr(ml_dtypes, name) if is_number else f"uint{8 * itemsize}"
        variant = None if is_number else name
    details = {"kind": "torch"} if variant is None else {"kind": "torch", "torch_dtype": variant}
    stored, is_paired = np.dtype(dtype), name in _PAIRED
    carrier = None if is_paired or name in COMMON_DTYPES else f"uint{8 * stored.itemsize}"
    return TorchDType(name, stored, carrier, is_paired, variant, details)


@lru_cache(maxsize=128)
def encoding_of(dtype: Any) -> TorchDType:
    return torch_dtype(str(dtype).removeprefix("torch."), dtype.itemsize)


# ---- many small tensors in host memory, checked and copied together

# All attributes that determine how a tensor is stored and whether it can be copied; other objects lack some of them.
_FACTS = attrgetter("dtype", "shape", "requires_grad", "layout", "is_cpu")


def is_small(value: Any) -> bool:
    """True if `copy_tensors` can copy this tensor, given that `TorchDescriber.describe` has accepted it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type not in HOST_DEVICES:
        return False
    if not 0 < value.numel() < _SMALL:
        return False
    encoding = encoding_of(value.dtype)
    return not encoding.paired and encoding.variant is None and value.is_contiguous()


def small_facts(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(map(_FACTS, tensors))


def have_facts(tensors: Sequence[Any], facts: Sequence[tuple[Any, ...]]) -> bool:
    """True if tensors match the facts of earlier tensors of the same types, are contiguous and are backed by memory."""
    # A dispatch mode, such as FakeTensorMode, may intercept the copy.
    if torch._C._len_torch_dispatch_stack():
        return False
    tensor: Any = torch.Tensor
    same = all(map(eq, map(_FACTS, tensors), facts)) and all(map(tensor.is_contiguous, tensors))
    return same and all(map(tensor.data_ptr, tensors))


def tensors_over(arrays: Sequence[NDArray[Any]], facts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return destination tensors that share memory with the arrays and have the dtypes in the facts."""
    with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
        return [encoding_of(fact[0]).to_tensor(array) for array, fact in zip(arrays, facts, strict=True)]


def copy_tensors(targets: list[Any], sources: list[Any]) -> None:
    """Copy tensors to the destination tensors from `tensors_over`, which have the same shapes and dtypes."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def torch_name(dtype: np.dtype[Any]) -> str | None:
    name = dtype.name
    of_torch = getattr(torch, name, None)
    if dtype.kind not in "biufcV" or not isinstance(of_torch, torch.dtype):
        return None
    encoding = encoding_of(of_torch)
    return name if encoding.variant is None and dtype.newbyteorder("=") == encoding.dtype else None


def tensor_like(saved: Saved) -> Any | None:
    """Return a meta tensor with a saved array's shape and dtype; None if torch lacks the dtype or operations for it."""
    name = saved.variant or (None if saved.dtype is None else torch_name(saved.dtype))
    dtype = getattr(torch, name or "", None)
    if saved.shape is None or not isinstance(dtype, torch.dtype) or _TINY.fullmatch(str(name)):
        return None
    return torch.empty(saved.shape[:-1] if name in _PAIRED else saved.shape, dtype=dtype, device="meta")


def is_dense(tensor: Any) -> bool:
    """True unless a tensor is sparse, quantized or nested."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def tensor_of(array: NDArray[Any], *, copy: bool = True) -> Any:
    """Return a tensor with the elements of an array; if ``copy`` is false, the tensor and the array share memory."""
    name = torch_name(array.dtype)
    if name is None:
        raise TypeError(f"torch has no elements of type {array.dtype}")
    return put([np.array(array) if copy else array], array.shape, None, name)


def template_facts(value: Any) -> tuple[Any, ...]:
    """Return (kind, stored shape, stored dtype, the leaf itself, variant) for a template leaf."""
    if not value.is_meta:
        _check(value)
    encoding = encoding_of(value.dtype)
    shape = (*value.shape, 2) if encoding.paired else tuple(value.shape)
    return "torch", shape, encoding.dtype, value, encoding.variant


def local_boxes(template: Any, shape: tuple[int, ...]) -> list[Box] | None:
    """Return the boxes of an array that this process needs if the template is a DTensor; None for other tensors."""
    if not is_dtensor(template):
        return None
    share = _share(template, shape)
    boxes = [] if share is None else [box for box, _ in share.boxes]
    return [box.with_axis(2) for box in boxes] if encoding_of(template.dtype).paired else boxes


def parts_of(template: Any, shape: tuple[int, ...]) -> Sequence[Part] | None:
    """Return an array's parts and the processes that will hold each part, or None if the template is not a DTensor."""
    if not is_dtensor(template):
        return None
    parts = _sharding_like(template, shape).parts()
    return [part.with_axis(2) for part in parts] if encoding_of(template.dtype).paired else parts


def put(
    arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], template: Any, name: str | None = None, strides: Any = None
) -> Any:
    """Create a tensor like a template from its `local_boxes` or the whole array; on the CPU, usually without a copy."""
    dtype = template.dtype if name is None else getattr(torch, name)
    if template is None:
        return with_strides(_moved(arrays[0], dtype, torch.device("cpu")), strides)
    if not is_dtensor(template):
        return _finished(with_strides(_moved(arrays[0], dtype, template.device), strides), template)
    old = template.to_local()
    device = torch.device(template.device_mesh.device_type) if old.is_meta else old.device
    local = _moved(_assembled(arrays, shape, template, encoding_of(dtype)), dtype, device)
    size = torch.Size(shape[: template.ndim])
    stride = template.stride() if size == template.shape else torch.empty(size, device="meta").stride()
    tensor = torch.distributed.tensor.DTensor.from_local(
        local, template.device_mesh, template.placements, run_check=False, shape=size, stride=stride
    )
    return _finished(tensor, template)


STRIDES = "strides"  # key in the details for the strides, in elements, of dense tensors that are not in C order


def is_permuted(shape: Sequence[int], strides: Any) -> bool:
    """True if strides, which may come from a file, describe a dense tensor with its axes in any order."""
    if not isinstance(strides, list) or len(strides) != len(shape) or {*map(type, strides)} - {int}:
        return False
    elements = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    return elements > 0 and all(0 <= stride <= elements for stride in strides)


def with_strides(tensor: Any, strides: Any) -> Any:
    """Return a tensor with its saved strides, because strides may affect rounding in later steps."""
    if strides is None or not is_permuted(tensor.shape, strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _sharding_like(template: Any, shape: tuple[int, ...]) -> DTensorSharding:
    return sharding_of(template)._replace(shape=shape[: template.ndim])


def _share(template: Any, shape: tuple[int, ...]) -> Share | None:
    return _sharding_like(template, shape).share(int(torch.distributed.get_rank()))


def _assembled(
    arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], template: Any, encoding: TorchDType
) -> NDArray[Any]:
    """Assemble the boxes of this process into its local array."""
    if len(arrays) == 1:
        return arrays[0]
    share = _share(template, shape)
    if share is None:  # this process is not in the mesh
        return np.zeros((0,), encoding.dtype)
    joined = np.empty((*share.shape, 2) if encoding.paired else share.shape, encoding.dtype)
    for array, (_, index) in zip(arrays, share.boxes, strict=True):
        joined[index] = array
    return joined


def _moved(array: NDArray[Any], dtype: Any, device: Any) -> Any:
    array = native(array)
    if not array.flags.writeable:
        array = array.copy()
    tensor = encoding_of(dtype).to_tensor(array)
    return tensor if device.type in HOST_DEVICES else tensor.to(device)


def _finished(tensor: Any, template: Any) -> Any:
    differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex  # integers have no gradient
    needs_gradient = template.requires_grad and differentiable
    if isinstance(template, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=needs_gradient)
    return tensor.requires_grad_(needs_gradient)


Interval = tuple[int, int]  # half-open range of indices along an axis: (start, stop)
PlacedBox = tuple[Box, tuple[slice, ...]]  # a box of the whole array, and the slices that select it in a local tensor


class Division(NamedTuple):
    """Describes how one axis of a mesh divides an array."""

    axis: int | None  # the sharded array axis; None if the array is replicated along this mesh axis
    rounds: int = 1  # number of blocks that are divided separately; more than 1 for a ``_StridedShard``


@dataclass(frozen=True, eq=False)
class Mesh:
    shape: tuple[int, ...]  # number of processes along each mesh axis
    processes: tuple[int, ...]  # global ranks, in C order
    names: tuple[str, ...]  # mesh axis names

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.processes, itertools.product(*map(range, self.shape)), strict=True))


class Share(NamedTuple):
    """The part of an array that one process holds: the shape of its local tensor, and the boxes in it."""

    shape: tuple[int, ...]
    boxes: tuple[PlacedBox, ...]


class DTensorSharding(NamedTuple):
    mesh: Mesh  # mesh of the processes that hold the array
    divisions: tuple[Division, ...]  # one for each mesh axis
    shape: tuple[int, ...]  # shape of the whole array

    def intervals(self, process: int) -> list[list[Interval]] | None:
        """Return a process's index ranges along each axis, in memory order; None if the process is not in the mesh."""
        coordinates = self.mesh.coordinates.get(process)
        if coordinates is None:
            return None
        held: list[list[Interval]] = [[(0, size)] if size else [] for size in self.shape]
        for (axis, rounds), count, index in zip(self.divisions, self.mesh.shape, coordinates, strict=True):
            if axis is not None:
                held[axis] = _divide(held[axis], rounds, count, index)
        return list(map(_joined, held))

    @lru_cache(maxsize=4096)  # noqa: B019 - shardings are values, and a program has few of them
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the array in ascending order, each with the ranks that hold it."""
        processes = self.mesh.processes
        if 0 in self.shape:
            return (Part((0,) * len(self.shape), self.shape, tuple(sorted(processes))),)
        return joined_parts((rank, box) for rank in processes for box, _ in _placed_boxes(self.intervals(rank) or []))

    @lru_cache(maxsize=4096)  # noqa: B019
    def share(self, process: int) -> Share | None:
        held = self.intervals(process)
        if held is None:
            return None
        shape = tuple([sum(high - low for low, high in intervals) for intervals in held])
        return Share(shape, tuple(_placed_boxes(held)))

    @lru_cache(maxsize=4096)  # noqa: B019
    def describe(self) -> Details:
        """Return JSON facts in the same form as for a jax sharding; the result is cached and must not be modified."""
        names = self.mesh.names
        spec = [
            [name for name, division in zip(names, self.divisions, strict=True) if division.axis == axis]
            for axis in range(len(self.shape))
        ]
        facts: Details = {
            "type": "DTensor",
            "mesh": {"axes": [list(pair) for pair in zip(names, self.mesh.shape, strict=True)]},
            "spec": [(axes if len(axes) > 1 else axes[0]) if axes else None for axes in spec],
        }
        if any(division.rounds > 1 for division in self.divisions):
            facts["rounds"] = [division.rounds for division in self.divisions]
        return facts


def _placed_boxes(held: Sequence[Sequence[Interval]]) -> Iterator[PlacedBox]:
    axes = []
    for intervals in held:
        ends = itertools.accumulate(high - low for low, high in intervals)
        axes.append(
            [(low, high, slice(end - high + low, end)) for (low, high), end in zip(intervals, ends, strict=True)]
        )
    for chosen in itertools.product(*axes):
        low, high, index = zip(*chosen, strict=True) if chosen else ((), (), ())
        yield Box(low, high), index


def _divide(held: list[Interval], rounds: int, count: int, index: int) -> list[Interval]:
    """Split indices into ``rounds`` equal blocks with ``count`` shares each; return share ``index`` of every block."""
    shares = []
    size = sum(high - low for low, high in held)
    for block in range(rounds):
        begin, end = _chunk(0, size, rounds, block)
        shares += _taken(held, *_chunk(begin, end, count, index))
    return shares


def _chunk(begin: int, end: int, count: int, index: int) -> Interval:
    # Like torch.chunk: all shares have the same size, except that the last ones may be smaller or empty.
    size = math.ceil((end - begin) / count)
    return min(begin + index * size, end), min(begin + (index + 1) * size, end)


def _taken(held: list[Interval], begin: int, end: int) -> list[Interval]:
    """Treat the held intervals as one sequence of indices; return the slice from ``begin`` to ``end``."""
    taken, position = [], 0
    for low, high in held:
        first, last = max(begin - position, 0), min(end - position, high - low)
        if first < last:
            taken.append((low + first, low + last))
        position += high - low
    return taken


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def sharding_of(tensor: Any) -> DTensorSharding:
    ndim = len(tensor.shape)
    divisions = tuple([_division(placement, ndim) for placement in tensor.placements])
    return DTensorSharding(_mesh(tensor.device_mesh), divisions, tuple(tensor.shape))


def _division(placement: Any, ndim: int) -> Division:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Division(None)
    if kind in {"Shard", "_StridedShard"}:
        axis = int(placement.dim)
        return Division(axis % ndim if ndim else axis, int(getattr(placement, "split_factor", 1)))
    if placement.is_partial():
        raise LeafProblem(f"is a DTensor with {placement!r}, not reduced yet; redistribute it to Shard or Replicate")
    raise LeafProblem(f"is a DTensor with the placement {placement!r}, which holdfast does not know; redistribute it")


def _mesh(mesh: Any) -> Mesh:
    if mesh not in _meshes:
        ranks, names = mesh.mesh, mesh.mesh_dim_names or range(mesh.ndim)
        _meshes[mesh] = _interned(tuple(ranks.shape), tuple(ranks.reshape(-1).tolist()), tuple(map(str, names)))
    return _meshes[mesh]


def _axes_in_root(mesh: Any) -> tuple[Mesh, frozenset[int]] | None:
    """Return a mesh's root and the root axes that it covers fully; None if it covers some axis only partly."""
    if mesh not in _roots:
        get = getattr(mesh, "_get_root_mesh", None)  # a method of `_mesh_resources` in earlier torch versions
        root_mesh = torch.distributed.device_mesh._mesh_resources.get_root_mesh(mesh) if get is None else get()
        root, processes = _mesh(root_mesh), _mesh(mesh).processes
        _roots[mesh] = None
        if root.coordinates.keys() >= set(processes):
            coordinates = [root.coordinates[process] for process in processes]
            axes = frozenset(axis for axis, indices in enumerate(zip(*coordinates, strict=True)) if len({*indices}) > 1)
            if math.prod(root.shape[axis] for axis in axes) == len(processes):
                _roots[mesh] = root, axes
    return _roots[mesh]


@lru_cache(maxsize=64)
def _repeated(mesh: Mesh, root: Mesh, axes: tuple[int, ...]) -> Mesh:
    """Return a mesh repeated along further axes of its root mesh, which become the leading axes of the result."""
    ranks = {coordinates: process for process, coordinates in root.coordinates.items()}
    processes = []
    for indices in itertools.product(*(range(root.shape[axis]) for axis in axes)):
        moved = dict(zip(axes, indices, strict=True))
        for process in mesh.processes:
            coordinates = enumerate(root.coordinates[process])
            processes.append(ranks[tuple(moved.get(axis, index) for axis, index in coordinates)])
    shape, names = (tuple(values[axis] for axis in axes) for values in (root.shape, root.names))
    return _interned((*shape, *mesh.shape), tuple(processes), (*names, *mesh.names))


_roots: weakref.WeakKeyDictionary[Any, tuple[Mesh, frozenset[int]] | None] = weakref.WeakKeyDictionary()
_meshes: weakref.WeakKeyDictionary[Any, Mesh] = weakref.WeakKeyDictionary()
_interned = lru_cache(maxsize=64)(Mesh)  # maps equal meshes to one object, to speed up lookups in the other caches
