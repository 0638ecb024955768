"""Samples a few evenly spaced elements of each leaf and digests their bits, without waiting for devices.

Arrays in host memory are read immediately. Elements of arrays on a device are gathered there and copied to the host
while the program continues; :attr:`Samples.is_ready` is True once they have arrived.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .jax_leaves import is_key, is_tracer
from .leaves import is_jax_array, is_torch_tensor, jax, library_of, torch
from .torch_leaves import is_dense

_ELEMENTS = 64  # maximum number of elements to read from each leaf
_ON_DEVICES = 64  # maximum number of sampled jax leaves per device; XLA takes about 8 ms to compile the gather for each
_WEIGHTS = np.random.default_rng(0x5EED).integers(1, 1 << 63, 2 * _ELEMENTS, np.uint64) | np.uint64(1)
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _Group(NamedTuple):
    """Leaves of one dtype whose sampled elements are concatenated into one array."""

    positions: list[int]  # leaf indices
    counts: tuple[int, ...]  # number of sampled elements of each leaf
    fetch: Callable[[], NDArray[Any]]
    is_ready: Callable[[], bool]


@dataclass
class Samples:
    """Samples of several leaves, which may still be in transfer to the host."""

    count: int  # number of leaves, including unreadable ones
    _groups: list[_Group] = field(default_factory=list)
    _devices: dict[str, int] = field(default_factory=dict)  # index of the first leaf on each kind of device

    def devices(self, count: int) -> str:
        """Return the device kinds of the first ``count`` leaves as text; ``gpu x 4`` means arrays on 4 devices."""
        # Omit ``gpu`` if there is ``gpu x 4``, because the first step moves arrays such as optax counts to all devices.
        found = [device for device, position in self._devices.items() if position < count]
        return ", ".join(sorted(kind for kind in found if not any(other.startswith(f"{kind} x") for other in found)))

    @property
    def is_ready(self) -> bool:
        """True if :meth:`fetch` would return without waiting for a device."""
        return all(group.is_ready() for group in self._groups)

    def fetch(self, shown: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return, for each leaf, a digest (0 if unreadable) and ``shown`` sampled values."""
        digests = np.zeros(self.count, np.uint32)
        values = np.full((self.count, shown), np.nan, np.float32)
        for group in self._groups:
            flat = group.fetch()
            if flat.size == 1:
                digests[group.positions], values[group.positions] = _of_number(flat.tobytes(), flat.dtype)
                continue
            positions = np.array(group.positions)
            digests[positions] = _digests(flat, group.counts)
            with np.errstate(all="ignore"):
                values[positions] = _real(flat[_chosen(group.counts, shown)])
        return digests, values

    def differs(self, other: Samples, end: int | None = None) -> bool:
        """True if any of the first ``end`` leaves differs, ignoring unreadable ones. May wait for a device."""
        mine, yours = (samples.fetch(1)[0][:end] for samples in (self, other))
        return len(mine) == len(yours) and bool(((mine != yours) & (mine != 0) & (yours != 0)).any())


class _View(NamedTuple):
    """A view of the sampled elements of a tensor, valid as long as the tensor's facts stay the same."""

    facts: tuple[Any, ...]  # results of the functions that `_facts` returns
    address: int
    part: Any  # the view, a numpy array if numpy has the dtype, else a tensor; None until the second sample


class _Runs(NamedTuple):
    """Leaves whose elements are read together: numpy arrays grouped by dtype, tensors by device and dtype."""

    on_host: dict[Any, _Run]
    of_torch: dict[tuple[Any, Any], _Run]

    def add(self, position: int, part: Any) -> None:
        """Add the sampled elements of a leaf, as a tensor or a numpy array."""
        if isinstance(part, np.ndarray):
            runs, key = self.on_host, part.dtype
        else:
            runs, key = self.of_torch, (part.device, part.dtype)
        positions, counts, parts = runs.get(key) or runs.setdefault(key, _Run([], [], []))
        positions.append(position)
        counts.append(part.shape[0])
        parts.append(part)

    def copy(self) -> _Runs:
        return _Runs(*({key: _Run(*map(list, run)) for key, run in runs.items()} for runs in self))


class _Run(NamedTuple):
    positions: list[int]
    counts: list[int]
    parts: list[Any]


class _Steady:
    """Tensors that stayed in the same memory between two samples, so that all of them can be checked at once."""

    def __init__(self, views: Mapping[int, _View], count: int) -> None:
        """``views`` contains the view of each tensor, keyed by its position among the ``count`` leaves."""
        self.views = views
        self.others = [position for position in range(count) if position not in views]
        self.runs = _Runs({}, {})
        self.devices: dict[str, int] = {}
        for position, view in views.items():
            self.runs.add(position, view.part)
            on_host = isinstance(view.part, np.ndarray)
            self.devices.setdefault("cpu" if on_host else view.part.device.type, position)
        self._count = count
        self._positions = [*views]
        self._seen = [[*values] for values in zip(*(view.facts for view in views.values()), strict=True)]
        self._tensors = [part for run in self.runs.of_torch.values() for part in run.parts]
        self._addresses = [views[position].address for run in self.runs.of_torch.values() for position in run.positions]

    def are_in(self, leaves: Sequence[Any]) -> bool:
        """Return True if the leaves still contain the recorded tensors, each in the same memory."""
        if len(leaves) != self._count or not self._positions:
            return len(leaves) == self._count
        tensors = [*map(leaves.__getitem__, self._positions)]
        try:
            same = all([*map(get, tensors)] == seen for get, seen in zip(_facts(), self._seen, strict=True))
            return same and [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses
        except (RuntimeError, TypeError):  # a tensor subclass without memory, or not a tensor
            return False


class Sampler:
    """Samples the same leaves repeatedly, and keeps views of the tensors among them."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}  # views of tensors that were sampled only once, keyed by position
        self._steady = _Steady({}, 0)

    def take(self, leaves: Sequence[Any], passing: Sequence[Any] = ()) -> Samples:
        """Start sampling arrays and numbers; keep no views of short-lived leaves (``passing``), such as gradients."""
        samples = Samples(len(leaves) + len(passing))
        is_steady = self._steady.are_in(leaves)
        last_views = self._views if is_steady else {**self._views, **self._steady.views}
        runs = self._steady.runs.copy() if is_steady else _Runs({}, {})
        samples._devices |= self._steady.devices if is_steady else {}
        views: dict[int, _View] = {}
        of_jax: dict[Any, list[tuple[int, Any]]] = {}
        others = self._steady.others if is_steady else range(len(leaves))
        entries = chain(((position, leaves[position]) for position in others), enumerate(passing, len(leaves)))
        for position, leaf in entries:
            kind = _KINDS.get(type(leaf)) or _kind_of(leaf)
            if kind == "torch" and (part := _view_of(leaf)) is not None:
                if position < len(leaves):
                    views[position] = view = _seen_again(leaf, part, last_views.get(position))
                    part = part if view.part is None else view.part
                    samples._devices.setdefault(leaf.device.type, position)
                runs.add(position, part)
            elif kind == "jax" and not leaf.is_deleted():
                part, device, name = _first_part(leaf)
                samples._devices.setdefault(name, position)
                if name.startswith("cpu"):
                    _add_array(runs, position, np.asarray(part))
                elif part.size:
                    of_jax.setdefault(device, []).append((position, part))
            elif kind == "array":
                leaf = np.asarray(leaf)  # an np.matrix would always stay two-dimensional
                # Read in C order, because a restored leaf may have a different memory order.
                is_other = position < len(leaves) and not leaf.flags.c_contiguous
                _add_array(runs, position, leaf.flat[:: _stride(leaf.size)] if is_other else leaf)
            elif kind == "number":  # integers of more than 63 bits would become object arrays
                is_long = isinstance(leaf, int) and leaf.bit_length() > 63
                _add_array(runs, position, np.asarray(hash(leaf) if is_long else leaf))
        kept = {position: view for position, view in views.items() if view.part is not None}
        if kept or not is_steady:
            self._steady = _Steady({**self._steady.views, **kept} if is_steady else kept, len(leaves))
        self._views = {position: view for position, view in views.items() if view.part is None}
        for (device, _), run in runs.of_torch.items():
            flat = _gathered_by_torch(run.parts)
            if device.type == "cpu":
                positions, counts, parts = runs.on_host.setdefault(flat.numpy().dtype, _Run([], [], []))
                positions += run.positions
                counts += run.counts
                parts.append(flat.numpy())
            else:
                samples._groups.append(_Group(run.positions, tuple(run.counts), *_copied_to_host(flat)))
        for run in runs.on_host.values():
            flat = np.concatenate(run.parts)
            samples._groups.append(_Group(run.positions, tuple(run.counts), partial(np.asarray, flat), lambda: True))
        for entries_of_jax in of_jax.values():
            samples._groups += gathered_by_jax(entries_of_jax[:_ON_DEVICES])
        return samples


@functools.cache
def _facts() -> Sequence[Callable[[Any], Any]]:
    """Return functions whose results together identify a tensor and the location of its elements."""
    tensor = torch.Tensor
    return id, tensor.data_ptr, tensor.numel, tensor.stride, operator.attrgetter("dtype")


def _seen_again(tensor: Any, view: Any, last: _View | None) -> _View:
    """Return the tensor facts to keep and, from the second sample on, a view of the tensor's memory."""
    # A view keeps its tensor's memory alive, so create one only if the previous sample saw the same tensor. Weak
    # references to tensors would not work, because torch refuses to swap a parameter that has one.
    address = _address(tensor)
    now = _View(tuple(get(tensor) for get in _facts()) if address else (), address, None)
    if last is None or last.facts != now.facts or not address or _address(view) != address:
        return now
    if view.device.type == "cpu":
        with contextlib.suppress(RuntimeError):  # numpy lacks the dtype
            # Unlike Tensor.numpy, this keeps the storage resizable, so FSDP can still free it between steps.
            return now._replace(part=np.from_dlpack(view))
    return now._replace(part=view)


def gathered_by_jax(entries: list[tuple[int, Any]]) -> list[_Group]:
    """Gather elements on the device with one compiled function for all arrays, and start one host copy per dtype."""
    groups: dict[Any, list[tuple[int, Any]]] = {}
    for position, array in entries:
        groups.setdefault(array.dtype, []).append((position, array))
    strides = tuple(tuple(_stride(array.size) for _, array in group) for group in groups.values())
    flat_arrays = _compiled_gather()([[array for _, array in group] for group in groups.values()], strides)
    gathered = []
    for flat, group, steps in zip(flat_arrays, groups.values(), strides, strict=True):
        flat.copy_to_host_async()
        counts = tuple(-(-array.size // stride) for (_, array), stride in zip(group, steps, strict=True))
        gathered.append(_Group([position for position, _ in group], counts, partial(np.asarray, flat), flat.is_ready))
    return gathered


_KINDS: dict[type, str] = {bool: "number", int: "number", float: "number"}  # keyed by class; `_kind_of` adds entries


def _kind_of(leaf: Any) -> str:
    kind = library_of(leaf)
    if kind == "numpy":
        kind = "array" if isinstance(leaf, np.ndarray) else "number"
    elif kind == "jax" and is_tracer(leaf):
        kind = None
    return _KINDS.setdefault(type(leaf), kind or "other")


def _view_of(tensor: Any) -> Any:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not is_dense(local) or local.is_meta or local.is_conj() or local.is_neg() or not (size := local.numel()):
        return None
    if not _address(local):
        return None
    flat = local.detach() if local.requires_grad else local
    stride = _stride(size)
    # Even a 1-d tensor may be non-contiguous: a matrix column has a stride above 1, an expanded scalar has stride 0.
    if flat.is_contiguous():
        return flat.as_strided((-(-size // stride),), (stride,))
    # Copied in C order, because a restored tensor may have a different memory order.
    return flat[_in_c_order(tuple(flat.shape), stride, flat.device)]


def _first_part(array: Any) -> tuple[Any, Any, str]:
    """Return a jax array's first local shard, the shard's device, and the kind and number of the array's devices."""
    if is_key(array):
        array = jax.random.key_data(array)
    device, *others = array.sharding.device_set
    if not others:
        return array, device, device.platform
    part = array.addressable_data(0)
    (device,) = part.devices()
    return part, device, f"{device.platform} x {1 + len(others)}"


@functools.lru_cache(1024)
def _stride(size: int) -> int:
    """Return a stride coprime to the size, so that the samples of a matrix do not all fall in one column."""
    stride = 1 + (size - 1) // _ELEMENTS
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _add_array(runs: _Runs, position: int, array: NDArray[Any]) -> None:
    dtype = array.dtype
    if array.size and not dtype.hasobject and (dtype.itemsize in _WIDTHS or dtype.kind in "fc"):
        flat = array.ravel(order="K")
        runs.add(position, flat[:: _stride(flat.size)])


def _gathered_by_torch(views: list[Any]) -> Any:
    flat = torch.cat(views)
    if flat.dtype.is_floating_point and flat.dtype not in (torch.float16, torch.float32, torch.float64):
        flat = flat.float()  # numpy lacks dtypes such as bfloat16; float32 represents their values exactly
    return flat


def _copied_to_host(flat: Any) -> tuple[Callable[[], NDArray[Any]], Callable[[], bool]]:
    """Start copying a tensor to the host; return one function to fetch it, and one to test whether it has arrived."""
    streams: Any = getattr(torch, flat.device.type, None)
    if not hasattr(streams, "Event"):
        return partial(np.asarray, flat.cpu().numpy()), lambda: True
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    event = streams.Event()
    event.record()

    def fetch() -> NDArray[Any]:
        event.synchronize()
        array: NDArray[Any] = host.numpy()
        return array

    return fetch, event.query


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory, or 0 if there is none. FSDP, for example, frees it between steps."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # a tensor subclass
        return 0


@functools.lru_cache(1024)
def _in_c_order(shape: tuple[int, ...], stride: int, device: Any) -> tuple[Any, ...]:
    """Return the indices of every ``stride``-th element in C order, for tensors with any memory order."""
    return tuple(torch.unravel_index(torch.arange(0, math.prod(shape), stride, device=device), shape))


@functools.lru_cache(64)
def _chosen(counts: tuple[int, ...], shown: int) -> NDArray[Any]:
    """Return the indices of the elements whose values are recorded, one row per leaf."""
    each = np.array(counts)
    return np.asarray((np.cumsum(each) - each)[:, None] + np.arange(shown) * each[:, None] // shown)


@functools.lru_cache(64)
def _layout(counts: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[np.uint64], NDArray[Any]]:
    """Return the start of each run of elements, each element's digest weight, and the starts of single-element runs."""
    each = np.array(counts)
    starts = np.cumsum(each) - each
    return starts, _WEIGHTS[np.arange(each.sum()) - np.repeat(starts, each)], starts[each == 1]


def _digests(flat: NDArray[Any], counts: tuple[int, ...]) -> NDArray[np.uint32]:
    """Return a nonzero digest of each run's bits; a run of one number is first converted to 64 bits."""
    if flat.dtype.kind == "c":
        flat, counts = flat.view(flat.real.dtype), tuple(2 * count for count in counts)
    if flat.dtype.itemsize not in _WIDTHS:
        flat = flat.astype(np.float64)
    starts, weights, single = _layout(counts)
    bits = np.ascontiguousarray(flat).view(_WIDTHS[flat.dtype.itemsize]).astype(np.uint64)
    if single.size and flat.dtype.kind not in "mMSU" and not issubclass(flat.dtype.type, np.void):
        numbers = flat[single].astype(np.int64 if flat.dtype.kind in "biu" else np.float64)
        numbers[numbers != numbers] = np.nan if numbers.dtype.kind == "f" else 0
        bits[single] = numbers.view(np.uint64)
    bits += np.uint64(1)
    bits *= weights
    bits ^= bits >> np.uint64(29)
    sums = np.add.reduceat(bits, starts) * _WEIGHTS[0]
    folded: NDArray[np.uint32] = ((sums >> np.uint64(32)) ^ sums).astype(np.uint32)
    return np.maximum(folded, 1)


@functools.lru_cache(64)  # cached, because numbers such as learning rates seldom change
def _of_number(content: bytes, dtype: np.dtype[Any]) -> tuple[int, float]:
    """Return the digest and value of a single-element array."""
    flat = np.frombuffer(content, dtype)
    with np.errstate(all="ignore"):
        return int(_digests(flat, (1,))[0]), float(_real(flat)[0])


def _real(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind in "mMUS" or issubclass(array.dtype.type, np.void):
        return np.zeros(array.shape, np.float32)
    return array.astype(np.float32)


def size_of(leaf: Any) -> int:
    """Return the size of an array in bytes; 0 for other leaves, such as sparse tensors."""
    is_sparse = is_torch_tensor(leaf) and not is_dense(leaf)
    return 0 if is_sparse else int(getattr(leaf, "nbytes", 0))


def full_sum(leaf: Any) -> Any:
    """Return the sum of all elements' bit patterns as an int, tensor or jax array; None if it cannot be computed."""
    if is_torch_tensor(leaf):
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if not is_dense(local) or not _address(local) or local.element_size() not in widths or local.is_conj():
            return None
        return local.detach().contiguous().view(widths[local.element_size()]).sum(dtype=torch.int64)
    if is_jax_array(leaf) and not leaf.is_deleted():
        leaf, device, _ = _first_part(leaf)
        leaf = np.asarray(leaf) if device.platform == "cpu" else _compiled_sum()(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize in _WIDTHS and not leaf.dtype.hasobject:
        width = _WIDTHS[leaf.dtype.itemsize]
        return int(np.ascontiguousarray(leaf).view(width).sum(dtype=max(np.dtype(width), np.dtype(np.uint32))))
    return leaf if is_jax_array(leaf) else None


@functools.cache
def _compiled_gather() -> Any:
    def gather(arrays: list[list[Any]], strides: tuple[tuple[int, ...], ...]) -> list[Any]:
        pairs = (zip(*of_dtype, strict=True) for of_dtype in zip(arrays, strides, strict=True))
        return [jax.numpy.concatenate([array.reshape(-1)[::stride] for array, stride in pair]) for pair in pairs]

    return jax.jit(gather, static_argnums=1)


@functools.cache
def _compiled_sum() -> Any:
    return jax.jit(lambda array: jax.lax.bitcast_convert_type(array, _WIDTHS[array.dtype.itemsize]).sum())
