"""Arrays, and boxes of arrays, that are put together from chunks as these arrive, each verified on the way."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..format import ArrayMetadata
from ..tree import Box, whole
from .chunks import Chunks
from .forms import COPY, Form, fresh_memory
from .small import small_arrays
from .sources import Bytes


class Slot(NamedTuple):
    """A box of an array that is wanted.

    Attributes:
        output: The position of its elements in the result.
        box: Which elements.
    """

    output: int
    box: Box


class Assembly:
    """The wanted arrays while their chunks arrive, from any number of threads.

    Memory is taken when the first chunk for it has been verified: a description alone never costs any.

    Args:
        metadata: What the index says of each array.
        boxes: For each array the boxes that are wanted; None where all of it is, or where all of every array is.
        keep: Whether the arrays are wanted; otherwise chunks are only verified.

    Attributes:
        forms: How each array is read.
        keep: As above.
    """

    def __init__(
        self,
        metadata: Sequence[ArrayMetadata],
        boxes: Sequence[Sequence[Box] | None] | None = None,
        *,
        keep: bool,
    ) -> None:
        self.forms = _forms(metadata)
        self.keep = keep
        self._slots: dict[int, list[Slot]] = {}
        self._outputs: list[int] = []  # of each array its only one, if all of it is wanted; otherwise the first one
        count = 0
        for array, wanted in enumerate(boxes or ()):
            self._outputs.append(count)
            if wanted is None:
                count += 1
            else:
                self._slots[array] = [Slot(count + position, box) for position, box in enumerate(wanted)]
                count += len(wanted)
        if boxes is None:
            self._outputs = list(range(len(metadata)))
            count = len(metadata)
        self._arrays: list[NDArray[Any] | None] = [None] * count
        self._fill: dict[int, bytes] = {}
        self._damaged: set[int] = set()
        self._lock = threading.Lock()

    def is_whole(self, array: int) -> bool:
        """Whether all of an array is wanted."""
        return array not in self._slots

    def slots(self, array: int) -> list[Slot]:
        """Returns the boxes of an array that are wanted."""
        found = self._slots.get(array)
        return [Slot(self._outputs[array], whole(self.forms[array].shape))] if found is None else found

    def wanted_chunks(self, array: int) -> list[int]:
        """Returns the numbers of the chunks that are needed of an array."""
        form = self.forms[array]
        if self.is_whole(array):
            return list(range(form.chunk_count))
        return sorted({chunk for slot in self._slots[array] for chunk in form.chunks_in(slot.box)})

    def keeps(self, array: int, chunk: int) -> bool:
        """Whether the memory that a chunk is read into becomes an array of the result."""
        form = self.forms[array]
        if not self.keep or form.compressed or form.data_bytes < COPY:
            return False
        return any(self._is_slot(form, chunk, slot) for slot in self.slots(array))

    def fill(self, array: int, element: bytes) -> None:
        """Says what the elements of an array are where no chunk arrives."""
        self._fill[array] = element

    def give_up(self, array: int) -> None:
        """Says that an array is damaged: its chunks are still verified, and it takes no memory."""
        self._damaged.add(array)

    def accept(self, array: int, chunk: int, data: Bytes, *, kept: bool = False) -> str:
        """Checks a chunk and puts it where it belongs.

        Args:
            array: The wanted array that it belongs to.
            chunk: The chunk's number in the array's grid.
            data: Its bytes, as they are stored.
            kept: Whether they can become an array of the result, as nobody else uses the memory.

        Returns:
            What is wrong with it, or nothing.
        """
        form = self.forms[array]
        values, problem = form.content(data)
        if problem:
            return f"chunk {chunk} {problem}"
        if not self.keep or array in self._damaged:
            return ""
        view = values.view(form.dtype).reshape(form.chunk_shape)
        kept = (kept or form.compressed) and view.flags.aligned and view.flags.writeable
        for slot in self.slots(array):
            if self._is_slot(form, chunk, slot):
                self._arrays[slot.output] = view if kept else view.copy()
                kept = False  # another box of the same elements gets memory of its own
            else:
                part = form.chunk_box(chunk)
                common = part.common(slot.box)
                if common is not None:
                    self._array(array, slot)[common.within(slot.box)] = view[common.within(part)]
        return ""

    def accept_many(self, chunks: Chunks, rows: range, base: int, data: Bytes, kept: bool) -> Iterator[tuple[int, str]]:
        """Checks chunks that were read in one piece, and puts them where they belong.

        Args:
            chunks: The table of chunks.
            rows: Which of them.
            base: The place in the file where the piece begins.
            data: The piece.
            kept: Whether it can become memory of the result.

        Yields:
            The row of every chunk that is not as it should be, and what is wrong with it.
        """
        others: Sequence[int] = rows
        if len(rows) > 1:
            span = slice(rows.start, rows.stop)
            single = [self.forms[array].small and array not in self._slots for array in chunks.arrays[span].tolist()]
            if any(single):
                mask = np.array(single)
                some = np.flatnonzero(mask) + rows.start
                owners = chunks.arrays[some].tolist()
                starts = chunks.offsets[some] - base
                made, bad = small_arrays(data, starts, [self.forms[array] for array in owners], keep=self.keep)
                for array, value in zip(owners, made, strict=True):
                    self._arrays[self._outputs[array]] = value
                others = sorted([*(np.flatnonzero(~mask) + rows.start).tolist(), *some[bad].tolist()])
        for row in others:
            start = int(chunks.offsets[row]) - base
            array, chunk = int(chunks.arrays[row]), int(chunks.numbers[row])
            stored = data[start : start + int(chunks.lengths[row])]
            what = self.accept(array, chunk, stored, kept=kept and bool(chunks.kept[row]))
            if what:
                yield row, what

    def finish(self) -> list[NDArray[Any] | None]:
        """Returns the arrays, box by box, in this machine's byte order; None in the place of those that are damaged."""
        if self._damaged or any(array is None for array in self._arrays):
            self._fill_in()
        for form in set(self.forms):
            if not form.dtype.isnative:
                return [None if array is None else _native(array) for array in self._arrays]
        return self._arrays

    def _fill_in(self) -> None:
        for array in range(len(self.forms)):
            for slot in self.slots(array):
                if array in self._damaged:
                    self._arrays[slot.output] = None
                elif self._arrays[slot.output] is None:
                    self._array(array, slot)

    def _is_slot(self, form: Form, chunk: int, slot: Slot) -> bool:
        """Whether a wanted box is exactly one chunk."""
        return form.chunk_shape == slot.box.shape and form.chunk_box(chunk) == slot.box

    def _array(self, array: int, slot: Slot) -> NDArray[Any]:
        found = self._arrays[slot.output]
        if found is not None:
            return found
        with self._lock:
            found = self._arrays[slot.output]
            if found is None:
                found = self._arrays[slot.output] = _empty(
                    slot.box.shape, self.forms[array].dtype, self._fill.get(array)
                )
            return found


def _forms(metadata: Sequence[ArrayMetadata]) -> list[Form]:
    known: dict[int, Form] = {}  # equal metadata is mostly one object, which is told apart faster by its identity
    equal: dict[ArrayMetadata, Form] = {}
    for one in metadata:
        if id(one) not in known:
            if one not in equal:
                equal[one] = Form(one)
            known[id(one)] = equal[one]
    return [known[id(one)] for one in metadata]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], fill: bytes | None) -> NDArray[Any]:
    array = fresh_memory(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    if fill is not None:
        array.reshape(-1).view(np.uint8).reshape(-1, len(fill))[...] = np.frombuffer(fill, np.uint8)
    return array


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in this machine's byte order; not all libraries compute with the other one."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
