"""Samples of leaves: a few evenly spaced elements of each, with a digest of their bits, taken without waiting.

Arrays in host memory are read at once. Of tensors and arrays on a device, the elements are gathered there and copied to
the host while the program goes on; :attr:`Samples.is_ready` says when they have arrived.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .jax_leaves import is_key
from .leaves import is_jax_array, is_torch_tensor, loaded
from .torch_leaves import is_dense

_ELEMENTS = 64  # of a leaf that are read
_ON_DEVICES = 64  # leaves of jax on one device: XLA takes about 8 ms to compile the gather of each
_WEIGHTS = np.random.default_rng(0x5EED).integers(1, 1 << 63, 2 * _ELEMENTS, np.uint64) | np.uint64(1)
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _Group(NamedTuple):
    """Leaves whose elements lie one after the other in one array: their places among all, and their numbers."""

    places: list[int]
    counts: list[int]
    fetch: Callable[[], NDArray[Any]]
    is_ready: Callable[[], bool]


@dataclass
class Samples:
    """Samples of several leaves, perhaps still on their way to the host.

    Attributes:
        count: The number of leaves, whether they could be read or not.
    """

    count: int
    _groups: list[_Group] = field(default_factory=list)
    _numbers: dict[int, Any] = field(default_factory=dict)
    _devices: set[str] = field(default_factory=set)

    @property
    def devices(self) -> str:
        """The kinds of devices that hold the leaves, with the number of those that hold one leaf together."""
        return ", ".join(sorted(self._devices))

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`fetch` returns without waiting for a device."""
        return all(group.is_ready() for group in self._groups)

    def fetch(self, shown: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return a digest of each leaf, 0 for one that cannot be read, and ``shown`` of its elements as numbers."""
        digests = np.zeros(self.count, np.uint32)
        values = np.full((self.count, shown), np.nan, np.float32)
        for group in self._groups:
            flat = group.fetch()
            places, counts = np.array(group.places), np.array(group.counts)
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
            digests[places] = _digests(flat, starts, counts)
            for index in np.flatnonzero(counts == 1).tolist():  # An array of one element is a number like any other.
                digests[places[index]] = _digest_of_number(flat[starts[index]].item())
            chosen = starts[:, None] + np.arange(shown) * counts[:, None] // shown
            with np.errstate(all="ignore"):
                values[places] = _real(flat[chosen])
        for place, number in self._numbers.items():
            digests[place] = _digest_of_number(number)
            values[place] = _float(number)
        return digests, values


class Sampler:
    """Takes samples of the same leaves again and again; those of torch are found by views that it keeps."""

    def __init__(self) -> None:
        # By place: the identity, address and shape of a tensor, and a view of its elements or None.
        self._views: dict[int, tuple[tuple[int, int, Any] | None, Any]] = {}
        self._gathers: dict[Any, Any] = {}  # compiled functions of jax, by strides

    def take(self, leaves: Sequence[Any]) -> Samples:
        """Begin to take samples of leaves: arrays of numpy, torch or jax, or numbers; others have none."""
        samples = Samples(len(leaves))
        on_host: dict[Any, list[tuple[int, NDArray[Any]]]] = {}
        of_torch: dict[Any, list[tuple[int, Any]]] = {}
        of_jax: dict[Any, list[tuple[int, Any]]] = {}
        for place, leaf in enumerate(leaves):
            kind = _KINDS.get(type(leaf)) or _kind_of(leaf)
            if kind == "torch":
                if (view := self._view(place, leaf)) is not None:
                    of_torch.setdefault((view.device, view.dtype), []).append((place, view))
            elif kind == "jax":
                _add_of_jax(samples, on_host, of_jax, place, leaf)
            elif kind == "array":
                _add_array(on_host, place, leaf)
            elif kind == "number":
                samples._numbers[place] = leaf.item() if isinstance(leaf, np.generic) else leaf
        for entries in on_host.values():
            flat = np.concatenate([part for _, part in entries])
            samples._groups.append(_group(entries, [len(part) for _, part in entries], flat))
        for (device, _), entries in of_torch.items():
            samples._devices.add(device.type)
            samples._groups.append(_gathered_by_torch(device, entries))
        for entries in of_jax.values():
            samples._groups.append(self._gathered_by_jax(entries[:_ON_DEVICES]))
        return samples

    def _view(self, place: int, tensor: Any) -> Any:
        """Return a view of some elements of a tensor, or None; of a distributed one, of the part of this process.

        A view keeps the memory of its tensor, so it is kept only of one that was there at the sample before. There is
        no weak reference to a tensor: torch refuses to swap a parameter that has one.
        """
        address = _address(tensor)
        known, view = self._views.get(place, (None, None))
        if known is None or known[0] != id(tensor) or known[1] != address or known[2] != tensor.shape or not address:
            self._views[place] = (id(tensor), address, tensor.shape), None
            return _view_of(tensor)
        if view is None or not _address(view):
            view = _view_of(tensor)
            self._views[place] = known, view
        return view

    def _gathered_by_jax(self, entries: list[tuple[int, Any]]) -> _Group:
        """Gather elements on the device: one compiled function for all arrays, and one copy."""
        import jax

        strides = tuple(1 + (array.size - 1) // _ELEMENTS for _, array in entries)
        gather = self._gathers.get(strides)
        if gather is None:

            def run(arrays: list[Any]) -> Any:
                parts = [array.reshape(-1)[::stride] for array, stride in zip(arrays, strides, strict=True)]
                return [jax.lax.bitcast_convert_type(part, _unsigned(part.dtype)) for part in parts]

            gather = self._gathers[strides] = jax.jit(run)
        found = gather([array for _, array in entries])
        for one in found:
            one.copy_to_host_async()
        dtypes = [array.dtype for _, array in entries]

        def fetch() -> NDArray[Any]:
            parts = [np.asarray(one).view(dtype) for one, dtype in zip(found, dtypes, strict=True)]
            return np.concatenate([part.astype(np.float64) if len(set(dtypes)) > 1 else part for part in parts])

        counts = [-(-array.size // stride) for (_, array), stride in zip(entries, strides, strict=True)]
        return _Group([place for place, _ in entries], counts, fetch, lambda: all(one.is_ready() for one in found))


_KINDS: dict[type, str] = {bool: "number", int: "number", float: "number"}  # of classes of leaves


def _kind_of(leaf: Any) -> str:
    kind = "other"
    if isinstance(leaf, np.ndarray | np.generic):
        kind = "array" if isinstance(leaf, np.ndarray) else "number"
    elif is_torch_tensor(leaf):
        kind = "torch"
    elif is_jax_array(leaf) and not isinstance(leaf, loaded("jax").core.Tracer):  # type: ignore[union-attr]
        kind = "jax"
    return _KINDS.setdefault(type(leaf), kind)


def _view_of(tensor: Any) -> Any:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not is_dense(local) or local.device.type == "meta" or not local.numel() or local.is_conj() or local.is_neg():
        return None
    if not _address(local):
        return None
    local = local.detach()
    flat = local.view(-1) if local.is_contiguous() else _memory_of(local)
    return flat[:: 1 + (flat.numel() - 1) // _ELEMENTS]


def _add_array(on_host: dict[Any, list[tuple[int, NDArray[Any]]]], place: int, array: NDArray[Any]) -> None:
    if array.size and not array.dtype.hasobject:
        flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
        on_host.setdefault(array.dtype, []).append((place, flat[:: 1 + (flat.size - 1) // _ELEMENTS]))


def _add_of_jax(
    samples: Samples,
    on_host: dict[Any, list[tuple[int, NDArray[Any]]]],
    of_jax: dict[Any, list[tuple[int, Any]]],
    place: int,
    leaf: Any,
) -> None:
    """Add an array of jax, of which the first part on a device of this process is read; deleted ones have none."""
    if leaf.is_deleted():
        return
    if is_key(leaf):
        leaf = loaded("jax").random.key_data(leaf)  # type: ignore[union-attr]
    devices = leaf.devices()
    device, count = next(iter(devices)), len(devices)
    platform = device.platform
    samples._devices.add(platform if count == 1 else f"{platform} x {count}")
    if count > 1:
        leaf = leaf.addressable_data(0)
        (device,) = leaf.devices()
    if platform == "cpu":
        _add_array(on_host, place, np.asarray(leaf))
    elif leaf.size:
        of_jax.setdefault(device, []).append((place, leaf))


def _gathered_by_torch(device: Any, entries: list[tuple[int, Any]]) -> _Group:
    torch: Any = loaded("torch")
    counts = [view.numel() for _, view in entries]
    with torch.no_grad():
        flat = torch.cat([view for _, view in entries])
        if flat.dtype.is_floating_point and flat.dtype not in (torch.float16, torch.float32, torch.float64):
            flat = flat.float()  # numpy has no such type; the numbers are the same
    if device.type == "cpu":
        return _group(entries, counts, flat.numpy())
    streams: Any = getattr(torch, device.type, None)
    if not hasattr(streams, "Event"):
        return _group(entries, counts, flat.cpu().numpy())
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    event = streams.Event()
    event.record()

    def fetch() -> NDArray[Any]:
        event.synchronize()
        array: NDArray[Any] = host.numpy()
        return array

    return _Group([place for place, _ in entries], counts, fetch, event.query)


def _group(entries: Sequence[tuple[int, Any]], counts: list[int], flat: NDArray[Any]) -> _Group:
    return _Group([place for place, _ in entries], counts, lambda: flat, lambda: True)


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory, or 0 if it has none now, as a sharded parameter between two steps."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # a tensor of a subclass
        return 0


def _memory_of(tensor: Any) -> Any:
    """Return the elements of a tensor in the order of its strides, as a flat view if they lie one after the other."""
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis))
    permuted = tensor.permute(order)
    return permuted.view(-1) if permuted.is_contiguous() else permuted.reshape(-1)


def _unsigned(dtype: Any) -> Any:
    return _WIDTHS[np.dtype(dtype).itemsize]


def _digests(flat: NDArray[Any], starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.uint32]:
    """Return a digest of the bits of each run of elements, never 0."""
    if flat.dtype.kind == "c":
        flat, starts, counts = flat.view(flat.real.dtype), 2 * starts, 2 * counts
    if flat.dtype.itemsize not in _WIDTHS:
        flat = flat.astype(np.float64)
    bits = np.ascontiguousarray(flat).view(_WIDTHS[flat.dtype.itemsize]).astype(np.uint64)
    within = np.arange(len(bits)) - np.repeat(starts, counts)
    with np.errstate(over="ignore"):
        mixed = (bits + np.uint64(1)) * _WEIGHTS[within]
        mixed ^= mixed >> np.uint64(29)
        sums = np.add.reduceat(mixed, starts) * _WEIGHTS[0]
    folded: NDArray[np.uint32] = ((sums >> np.uint64(32)) ^ (sums & np.uint64(0xFFFFFFFF))).astype(np.uint32)
    return np.maximum(folded, 1)


def _digest_of_number(number: Any) -> int:
    return zlib.crc32(repr(number).encode()) or 1


def _real(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind in "mMUSV":
        return np.zeros(array.shape, np.float32)
    found: NDArray[np.float32] = array.astype(np.float32)
    return found


def _float(number: Any) -> float:
    try:
        return float(number)
    except (OverflowError, TypeError):
        return float("nan")


def size_of(leaf: Any) -> int:
    """Return the bytes of an array in ordinary memory, and 0 of other leaves."""
    is_sparse = is_torch_tensor(leaf) and not is_dense(leaf)
    return 0 if is_sparse else int(getattr(leaf, "nbytes", 0))


def full_sum(leaf: Any) -> Any:
    """Return the sum of the bits of all elements, perhaps on their device, or None for other leaves than arrays."""
    if is_torch_tensor(leaf):
        torch: Any = loaded("torch")
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if not is_dense(local) or not _address(local) or local.element_size() not in widths or local.is_conj():
            return None
        return local.detach().contiguous().view(widths[local.element_size()]).sum(dtype=torch.int64)
    if is_jax_array(leaf) and not leaf.is_deleted() and not is_key(leaf):
        leaf = leaf if len(leaf.devices()) == 1 else leaf.addressable_data(0)
        leaf = np.asarray(leaf) if next(iter(leaf.devices())).platform == "cpu" else _sum_on_device(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize in _WIDTHS and not leaf.dtype.hasobject:
        width = _WIDTHS[leaf.dtype.itemsize]
        return int(np.ascontiguousarray(leaf).view(width).sum(dtype=max(np.dtype(width), np.dtype(np.uint32))))
    return leaf if is_jax_array(leaf) else None


def _sum_on_device(array: Any) -> Any:
    return _compiled_sum()(array)


@functools.cache
def _compiled_sum() -> Any:
    """Return the function of jax, one for all sums: each new function would be compiled again."""
    import jax

    return jax.jit(lambda one: jax.lax.bitcast_convert_type(one, _unsigned(one.dtype)).sum())
