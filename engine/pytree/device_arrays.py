"""Torch tensors on accelerators, and their asynchronous copies into pinned host memory.

The copies run on the device while the program continues. They follow these rules:

- They run in a separate stream, which first waits for all work that the program has started on the device.
- All copies start before the host waits for any of them. The host reads the first copies while others still run.
- Work that the program starts later, such as the next optimizer step, waits for the copies on the device. The program
  itself does not wait.
- The host reads a copy only after `Arrival.wait`. Until then, the tensor is kept alive so its memory is not reused.

If no more memory can be pinned, or copies cannot be started, `PinnedMemory.start` copies synchronously. Work in any
stream other than the current or the default stream must wait for one of these two streams, as usual in torch.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .leaves import Piece, torch

_logger = logging.getLogger("holdfast")

ACCELERATORS = {"cuda"}  # device types whose tensors this module can copy; each is also the name of a torch module

# Must be a power of two: torch rounds pinned allocations up to powers of two, so other sizes would waste memory.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64
LEAST_ROOM_BYTES = 1 << 20  # a tensor is split to fill a block only if at least this many bytes are left in the block
_SMALL = 64 << 10  # size, in bytes, below which launching a copy takes longer than the copy itself
_GATHERED = 4 << 20  # maximum total size, in bytes, of small tensors that are joined on the device and copied together
FIRST_BYTES = 256 << 20  # bytes covered by the first wait; each later wait covers twice as many, as waits are costly


class DeviceArray:
    """An array on an accelerator, used in place of a host array until a snapshot copies it.

    The tensor's elements have the same item size as ``dtype``. The tensor has neither a gradient nor a conjugate bit.
    """

    __slots__ = ("dtype", "shape", "tensor")

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self.shape = tuple(tensor.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.shape)) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> DeviceArray:
        return DeviceArray(self.tensor[index], self.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        raise TypeError("elements on an accelerator were read before they were copied; this is a bug in holdfast")


def is_copied_later(tensor: Any) -> bool:
    """True if a snapshot can copy a tensor asynchronously: an ordinary tensor on a supported accelerator."""
    if tensor.device.type not in ACCELERATORS or type(tensor) is not torch.Tensor or not tensor.numel():
        return False
    if torch._C._len_torch_dispatch_stack():  # a dispatch mode may intercept the copy
        return False
    return not (tensor.is_conj() or tensor.is_neg())


class Copy(NamedTuple):
    """A copy to be started: the contiguous target on the host, the source on the device, and the leaf's index."""

    target: NDArray[Any]
    source: DeviceArray
    position: int


class Arrival:
    """Copies in progress, in leaf order on each device."""

    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []  # (index of the first leaf covered, event)
        self.held: list[Any] = []  # sources, kept alive because their memory may not belong to torch's allocator

    def in_turn(self) -> Iterator[int]:
        """Wait for the copies. After each wait but the last, yield the number of leading leaves that have arrived.

        If a copy fails, RuntimeError is raised after all copies have ended.
        """
        errors: list[RuntimeError] = []
        self.events.sort(key=operator.itemgetter(0))
        while self.events:
            _, event = self.events.pop(0)
            try:
                event.synchronize()
                # Skip waits for copies that finished while the caller was writing, so that sources are released early.
                while self.events and self.events[0][1].query():
                    self.events.pop(0)
            except RuntimeError as error:
                errors.append(error)
            if self.events and not errors:
                yield self.events[0][0]
        self.held.clear()
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait until all copies are done; raise RuntimeError if one has failed."""
        for _ in self.in_turn():
            pass


class PinnedMemory:
    """Blocks of pinned memory, allocated once and reused by each snapshot, and the streams that fill them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._blocks: list[Any] = []  # uint8 tensors
        self._by_address: list[tuple[int, Any]] = []  # (address, block), sorted by address
        self._block = 0  # index of the block being filled
        self._offset = 0
        self._needed = 0  # bytes of the current snapshot that have no target yet
        self._streams: dict[Any, Any] = {}
        self._last = Arrival()

    @property
    def nbytes(self) -> int:
        return sum(int(block.numel()) for block in self._blocks)

    def begin(self, nbytes: int) -> None:
        self._block = self._offset = 0
        self._needed = nbytes

    def places(self, piece: Piece) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """Yield the parts of a piece, each with its target array, which is pageable if no more memory can be pinned."""
        waiting = [piece]
        while waiting:
            part = waiting.pop()
            nbytes = part.array.nbytes
            room = self._room(nbytes)
            if 0 < room < nbytes:
                waiting += reversed(_cut(part, room))
                continue
            if room:
                memory: NDArray[np.uint8] = self._blocks[self._block].numpy()[self._offset : self._offset + nbytes]
                self._offset = -(-(self._offset + nbytes) // _ALIGNMENT) * _ALIGNMENT
            else:
                memory = np.empty(nbytes, np.uint8)
            self._needed -= nbytes
            yield part, memory.view(part.array.dtype).reshape(part.array.shape)

    def _room(self, nbytes: int) -> int:
        """Advance to the first block with room for all or some of the bytes; return its free bytes, or 0 if none."""
        while True:
            if self._block == len(self._blocks) and not self._grow():
                return 0
            room = int(self._blocks[self._block].numel()) - self._offset
            if room >= min(nbytes, LEAST_ROOM_BYTES):
                return room
            self._block, self._offset = self._block + 1, 0

    def _grow(self) -> bool:
        """Allocate another block; return False if that is not possible."""
        size = min(BLOCK_BYTES, 1 << (max(self._needed, LEAST_ROOM_BYTES) - 1).bit_length())
        while self.nbytes + size > self._limit:
            size //= 2
            if size < LEAST_ROOM_BYTES:
                return False
        try:
            with torch.inference_mode(False):
                block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._limit = self.nbytes  # do not try again
            # Log only the text, because a handler that keeps records would keep the error's frames and data alive.
            text = str(error)
            _logger.warning("saves block for longer, because only %d bytes can be pinned: %s", self._limit, text)
            return False
        self._blocks.append(block)
        bisect.insort(self._by_address, (int(block.data_ptr()), block), key=operator.itemgetter(0))
        return True

    def _tensor_over(self, start: int, nbytes: int) -> Any | None:
        """Return the bytes at an address as a slice of their pinned block; None if they are not in pinned memory."""
        number = bisect.bisect_right(self._by_address, start, key=operator.itemgetter(0)) - 1
        if number < 0:
            return None
        address, block = self._by_address[number]
        offset = start - address
        return block[offset : offset + nbytes] if offset + nbytes <= block.numel() else None

    def start(self, copies: Sequence[Copy]) -> Arrival:
        """Start copies; copies to unpinned memory are complete when the call returns."""
        with contextlib.suppress(RuntimeError):  # an error from the previous save does not matter here
            self._last.wait()  # an interrupted save may not have waited for its copies
        arrival = self._last = Arrival()
        devices: dict[Any, list[_Started]] = {}
        rest: list[Copy] = []
        for copy in copies:
            address = copy.target.__array_interface__["data"][0]
            target = self._tensor_over(address, copy.target.nbytes)
            if target is None:
                rest.append(copy)
            else:
                started = _Started(address, target, copy.source.tensor, copy.position)
                devices.setdefault(started.source.device, []).append(started)
        with torch.inference_mode(False), torch.no_grad():
            for device, group in devices.items():
                arrival.held += [copy.source for copy in group]
                try:
                    self._start_on(device, group, arrival)
                except RuntimeError as error:
                    _logger.warning(
                        "%s: this save blocks for longer, because its copies could not run: %s", device, str(error)
                    )
                    for started in group:
                        _over(started.target, started.source).copy_(started.source.cpu())
            for copy in rest:
                source = copy.source.tensor
                memory = torch.from_numpy(copy.target.reshape(-1).view(np.uint8))
                _over(memory, source).copy_(source.cpu())
        return arrival

    def _start_on(self, device: Any, group: Sequence[_Started], arrival: Arrival) -> None:
        streams = getattr(torch, device.type)  # torch module with Stream and Event, such as ``torch.cuda``
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = streams.Stream(device)
        program = [streams.current_stream(device), streams.default_stream(device)]
        for stream in program:
            side.wait_stream(stream)
        first, nbytes, enough = group[0].position, 0, FIRST_BYTES

        def mark() -> Any:
            event = streams.Event(blocking=True)  # the waiting thread sleeps instead of spinning
            event.record(side)
            arrival.events.append((first, event))
            return event

        try:
            with streams.stream(side):
                for copy in group:
                    copy.source.record_stream(side)
                for run in _runs(group):
                    if nbytes >= enough:
                        mark()
                        first, nbytes, enough = run[0].position, 0, 2 * enough
                    if len(run) > 1:
                        self._gather(device, run)
                    else:
                        _over(run[0].target, run[0].source).copy_(run[0].source, non_blocking=True)
                    nbytes += sum(copy.target.numel() for copy in run)
        finally:
            # Even after an error, copies in progress must finish before the program changes the arrays.
            last = mark()
            for stream in program:
                stream.wait_event(last)

    def _gather(self, device: Any, run: Sequence[_Started]) -> None:
        """Copy small tensors with adjacent targets in one transfer, after joining them on the device."""
        first, end = run[0].address, run[-1].end
        together = torch.empty(end - first, dtype=torch.uint8, device=device)
        groups: dict[Any, tuple[list[Any], list[Any]]] = {}
        for copy in run:
            targets, sources = groups.setdefault(copy.source.dtype, ([], []))
            targets.append(_over(together[copy.address - first : copy.end - first], copy.source))
            sources.append(copy.source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
        whole = self._tensor_over(first, end - first)
        assert whole is not None
        whole.copy_(together, non_blocking=True)


class _Started(NamedTuple):
    """A copy to pinned memory: target address, target as a uint8 tensor, source tensor, and leaf index."""

    address: int
    target: Any
    source: Any
    position: int

    @property
    def end(self) -> int:
        return self.address + int(self.target.numel())


def _runs(group: Sequence[_Started]) -> Iterator[list[_Started]]:
    """Yield runs of small copies with adjacent targets in one block; every other copy forms its own run."""
    run: list[_Started] = []
    for copy in group:
        small = copy.target.numel() < _SMALL and copy.source.element_size() <= 8
        if run:
            gap = copy.address - run[-1].end
            fits = copy.end - run[0].address <= _GATHERED
            same = copy.target.untyped_storage().data_ptr() == run[0].target.untyped_storage().data_ptr()
            if not (small and same and fits and 0 <= gap < _ALIGNMENT):
                yield run
                run = []
        if small:
            run.append(copy)
        else:
            yield [copy]
    if run:
        yield run


def _over(memory: Any, like: Any) -> Any:
    """View bytes as a tensor with the shape and dtype of another tensor."""
    return memory.view(like.dtype).view(like.shape)


def _cut(piece: Piece, room: int) -> list[Piece]:
    """Split a piece along its first axis longer than 1; the first part fits into `room` bytes if a single row fits."""
    shape = piece.array.shape
    axis = next(axis for axis, size in enumerate(shape) if size > 1)
    row = piece.array.nbytes // shape[axis]
    count = max(1, room // row)
    before = (slice(None),) * axis
    start = (*piece.start[:axis], piece.start[axis] + count, *piece.start[axis + 1 :])
    return [
        Piece(piece.start, piece.array[(*before, slice(0, count))]),
        Piece(start, piece.array[(*before, slice(count, None))]),
    ]


def default_pinned_bytes() -> int:
    """Return half of the machine's memory, divided by the number of training processes on the machine."""
    # torchrun and Lightning set LOCAL_WORLD_SIZE to the number of processes on the machine.
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(count) if count.isdecimal() and int(count) else 1
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // processes
