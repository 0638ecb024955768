"""Elements of torch tensors on accelerators, and their copies into pinned host memory.

The copies run on the device while the program continues. Their rules:

- They run in a separate stream, which waits for everything that the program has started on the device.
- All copies are started before the host waits for one, and it reads the first while the others are under way.
- What the program starts later, such as the next step of the optimizer, waits for them on the device. The program
  itself does not wait.
- The host reads a copy only after `Arrival.wait`. Until then the tensor is held, and its memory is not reused.

If no more memory can be pinned, or copies cannot be started, they are done before the call returns. Work that the
program starts in streams other than its current and the default one must wait for one of these, as usual in torch.
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

ACCELERATORS = {"cuda"}  # types of devices whose tensors are copied in this way; torch has a module of this name

# torch rounds the size of pinned memory up to a power of two, so blocks of such a size waste nothing.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64
LEAST_ROOM_BYTES = 1 << 20  # bytes; a tensor is not cut to fill less than this at the end of a block
_SMALL = 64 << 10  # bytes; starting the copy of a smaller tensor takes longer than the copy
_GATHERED = 4 << 20  # bytes of small tensors that are put together on the device, and copied at once
FIRST_BYTES = 256 << 20  # bytes of the first wait; each later wait is for twice as many, because a wait costs time


class DeviceArray:
    """Elements on an accelerator, instead of a host array until a snapshot copies them.

    The tensor has elements of the same size as the dtype, and neither a gradient nor a conjugate bit.
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
        raise TypeError("elements on an accelerator were read before they were copied; this is a defect of holdfast")


def is_copied_later(tensor: Any) -> bool:
    """True if a snapshot can start the copy of a tensor: an ordinary one on such a device."""
    if tensor.device.type not in ACCELERATORS or type(tensor) is not torch.Tensor or not tensor.numel():
        return False
    if torch._C._len_torch_dispatch_stack():  # a mode may turn a copy into something else
        return False
    return not (tensor.is_conj() or tensor.is_neg())


class Copy(NamedTuple):
    """One copy: a host array, contiguous, the elements that go there, and the number of their leaf."""

    target: NDArray[Any]
    source: DeviceArray
    position: int


class Arrival:
    """Copies that were started, in the order of their leaves on each device."""

    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []  # the number of the first leaf that each waits for, and the event
        self.held: list[Any] = []  # sources of the copies; foreign memory may be freed with its last tensor

    def in_turn(self) -> Iterator[int]:
        """Wait for the copies; yield from time to time the number of leaves that have arrived, counted from the first.

        If a copy fails, raise RuntimeError as soon as none is under way.
        """
        errors: list[RuntimeError] = []
        self.events.sort(key=operator.itemgetter(0))
        while self.events:
            _, event = self.events.pop(0)
            try:
                event.synchronize()
                # The caller writes in between, which takes longer than the copies. Sources are not held that long.
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
    """Blocks of pinned memory, allocated once and refilled by each snapshot, and the streams that fill them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._blocks: list[Any] = []  # tensors of bytes
        self._by_address: list[tuple[int, Any]] = []  # the same, sorted
        self._block = 0  # the block that is being filled
        self._offset = 0
        self._needed = 0  # bytes that have no memory yet
        self._streams: dict[Any, Any] = {}
        self._last = Arrival()

    @property
    def nbytes(self) -> int:
        return sum(int(block.numel()) for block in self._blocks)

    def begin(self, nbytes: int) -> None:
        self._block = self._offset = 0
        self._needed = nbytes

    def places(self, piece: Piece) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """Generate the parts of a piece, each with its memory, which is not pinned if no more memory can be."""
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
        """Return how many bytes fit into the current block, or into the next if hardly any do; 0 if there is none."""
        while True:
            if self._block == len(self._blocks) and not self._grow():
                return 0
            room = int(self._blocks[self._block].numel()) - self._offset
            if room >= min(nbytes, LEAST_ROOM_BYTES):
                return room
            self._block, self._offset = self._block + 1, 0

    def _grow(self) -> bool:
        """Add a block; return whether that was possible."""
        size = min(BLOCK_BYTES, 1 << (max(self._needed, LEAST_ROOM_BYTES) - 1).bit_length())
        while self.nbytes + size > self._limit:
            size //= 2
            if size < LEAST_ROOM_BYTES:
                return False
        try:
            with torch.inference_mode(False):
                block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._limit = self.nbytes  # so that it is not tried again
            # Only the text: a handler that keeps records would keep the error's frames, and so the snapshot's memory.
            text = str(error)
            _logger.warning("saves block for longer, as no more than %d bytes can be pinned: %s", self._limit, text)
            return False
        self._blocks.append(block)
        bisect.insort(self._by_address, (int(block.data_ptr()), block), key=operator.itemgetter(0))
        return True

    def _tensor_over(self, start: int, nbytes: int) -> Any | None:
        """Return the bytes at an address as a part of their block, which torch knows as pinned; None if not pinned."""
        number = bisect.bisect_right(self._by_address, start, key=operator.itemgetter(0)) - 1
        if number < 0:
            return None
        address, block = self._by_address[number]
        offset = start - address
        return block[offset : offset + nbytes] if offset + nbytes <= block.numel() else None

    def start(self, copies: Sequence[Copy]) -> Arrival:
        """Start copies. Copies to memory that is not pinned are done on return."""
        with contextlib.suppress(RuntimeError):  # an error of the last save does not concern this one
            self._last.wait()  # an interrupted save has not waited for its copies
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
                        "%s: this save blocks for longer, as its copies could not run: %s", device, str(error)
                    )
                    for started in group:
                        _over(started.target, started.source).copy_(started.source.cpu())
            for copy in rest:
                source = copy.source.tensor
                memory = torch.from_numpy(copy.target.reshape(-1).view(np.uint8))
                _over(memory, source).copy_(source.cpu())
        return arrival

    def _start_on(self, device: Any, group: Sequence[_Started], arrival: Arrival) -> None:
        streams = getattr(torch, device.type)  # the module with its streams and events, such as ``torch.cuda``
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = streams.Stream(device)
        program = [streams.current_stream(device), streams.default_stream(device)]
        for stream in program:
            side.wait_stream(stream)
        first, nbytes, enough = group[0].position, 0, FIRST_BYTES

        def mark() -> Any:
            event = streams.Event(blocking=True)  # the thread that waits for it sleeps
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
            # After an error, too, the copies that were started must end before the arrays change.
            last = mark()
            for stream in program:
                stream.wait_event(last)

    def _gather(self, device: Any, run: Sequence[_Started]) -> None:
        """Copy small tensors with neighbouring targets at once: the device joins them in the layout of the host."""
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
    """A copy to pinned memory: its address, that memory as a tensor of bytes, the elements, and the leaf's number."""

    address: int
    target: Any
    source: Any
    position: int

    @property
    def end(self) -> int:
        return self.address + int(self.target.numel())


def _runs(group: Sequence[_Started]) -> Iterator[list[_Started]]:
    """Group the copies to start together: small ones to neighbouring bytes of one block; others are alone."""
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
    """Return bytes as a tensor of the shape and dtype of another."""
    return memory.view(like.dtype).view(like.shape)


def _cut(piece: Piece, room: int) -> list[Piece]:
    """Cut a piece in two along its first axis longer than 1; the first part has at most `room` bytes if possible."""
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
    """Return half of the machine's memory, divided by the number of its processes."""
    # torchrun and Lightning report how many processes share the machine.
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(count) if count.isdecimal() and int(count) else 1
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // processes
