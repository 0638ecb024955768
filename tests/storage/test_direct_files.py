"""Bulk files on a disk: direct I/O and its memory, fallbacks, and failures in the middle."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from holdfast.engine.errors import DamagedCheckpointError, StorageError, StorageFullError
from holdfast.engine.storage import DataReader, Location, Segment, aligned_empty, as_location
from holdfast.engine.storage import local as local_storage
from holdfast.engine.storage.buffers import HUGE_PAGE, PAGE

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from numpy.typing import NDArray

MIB = 1 << 20
SIZE = 11 * MIB + 123
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)

real_open, real_pwrite, real_preadv = os.open, os.pwrite, os.preadv


def segments() -> list[Segment]:
    def parts(start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        yield from (DATA[at : min(at + MIB // 2, end)] for at in range(start, end, MIB // 2))

    ends = [*range(2 * MIB, SIZE, 2 * MIB), SIZE]
    return [Segment(start, end - start, partial(parts, start, end)) for start, end in pairwise([0, *ends])]


def small(*, wrong: int = 0) -> list[Segment]:
    return [Segment(0, 100, lambda: iter([DATA[: 100 - wrong]]))]


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def fails(number: int) -> Any:
    """Return a call of the system that fails."""

    def call(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def modes(place: Location, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each read or write bypassed the page cache."""
    try:
        os.close(real_open(place.parent / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct I/O")
    seen: list[bool] = []

    def noted(real: Any) -> Any:
        def call(descriptor: int, memory: Any, offset: int) -> int:
            seen.append(is_direct(descriptor))
            return int(real(descriptor, memory, offset))

        return call

    monkeypatch.setattr(os, "pwrite", noted(real_pwrite))
    monkeypatch.setattr(os, "preadv", noted(real_preadv))
    return seen


def assert_whole(place: Location) -> None:
    assert place.path.stat().st_size == SIZE
    with place.open_data() as reader:
        assert np.array_equal(reader.read(0, SIZE), DATA)
        assert np.array_equal(reader.read(SIZE - 5000, 5000), DATA[-5000:])


def assert_nothing_left(place: Location) -> None:
    assert not os.path.lexists(place.path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-write")]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Location:
    return as_location(tmp_path) / "data"


def test_a_disk_is_written_and_read_directly(place: Location, modes: list[bool]) -> None:
    place.write_data(SIZE, segments())
    assert_whole(place)
    assert len(modes) > 6
    assert all(modes)


def test_the_page_cache_takes_a_small_file(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small blocks, without padding; the disk has begun to write it on return."""
    seen: list[tuple[Any, ...]] = []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        seen.append((is_direct(descriptor), offset, len(data)))
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: seen.append(arguments))
    block, gap = DATA[: (256 << 10) + 3], b"\0" * (256 << 10)
    first, last = Segment(0, block.size, lambda: iter([block])), Segment(512 << 10, 5, lambda: iter([block[:5]]))
    place.write_data((512 << 10) + 7, [first, last], sync=False)
    writes = [(False, 0, 256 << 10), (False, 256 << 10, 3), (False, 512 << 10, 5)]
    assert seen.pop() == (0, 0, os.POSIX_FADV_DONTNEED)
    assert sorted(seen) == writes, "two threads write the segments"
    assert place.path.read_bytes() == block.tobytes() + gap[3:] + block[:5].tobytes() + b"\0\0"


def test_readers_that_see_each_other_read_through_the_page_cache(place: Location, modes: list[bool]) -> None:
    """From the moment on at which there are two; a reader that does not take part neither sees nor is seen."""
    place.write_data(SIZE, segments())

    def read(reader: DataReader) -> bool:
        modes.clear()
        assert np.array_equal(reader.read(MIB + 1, MIB), DATA[MIB + 1 : 2 * MIB + 1])
        assert len(set(modes)) == 1
        return modes[0]

    with place.open_data(cached=None) as first, place.open_data() as other:
        assert [read(first), read(other)] == [True, True]
        with place.open_data(cached=None) as second:
            assert [read(first), read(other), read(second)] == [False, True, False]
        assert read(first) is False
    with place.open_data(cached=None) as last:
        assert read(last) is True


def test_a_cached_reader_reads_what_is_asked_for(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct I/O reads whole pages; through the page cache, a few bytes of each of a thousand files are a few bytes."""
    place.write_data(SIZE, segments())
    read: list[int] = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(count := real_preadv(descriptor, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with place.open_data(cached=True) as reader:
        for begin, length in ((0, 10), (MIB + 1, 1000), (SIZE - 3, 3)):
            assert np.array_equal(reader.read(begin, length), DATA[begin : begin + length])
    assert read == [10, 1000, 3]


def refuses_direct_io(*, creates: bool) -> Any:
    """Return an ``open`` that refuses direct I/O, perhaps after it has created the file."""

    def opens(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            if creates:
                os.close(real_open(path, flags & ~os.O_DIRECT, *rest, **options))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **options)

    return opens


def buffered_only(real: Any) -> Any:
    def call(descriptor: int, memory: Any, offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(real(descriptor, memory, offset))

    return call


def stopping_early(most: int) -> dict[str, Any]:
    """Return calls that write and read so many bytes at most."""
    return {
        "pwrite": lambda descriptor, data, offset: real_pwrite(descriptor, data[:most], offset),
        "preadv": lambda descriptor, buffers, offset: real_preadv(descriptor, [one[:most] for one in buffers], offset),
    }


PASSING: dict[str, dict[str, Any]] = {
    "direct I/O is refused at open": {"open": refuses_direct_io(creates=False)},
    "direct I/O is refused after the file was created": {"open": refuses_direct_io(creates=True)},
    "direct I/O is refused at the first block": {
        "pwrite": buffered_only(real_pwrite),
        "preadv": buffered_only(real_preadv),
    },
    "reserving space is invalid": {"posix_fallocate": fails(errno.EINVAL)},
    "reserving space is not supported": {"posix_fallocate": fails(errno.EOPNOTSUPP)},
    "calls stop after a page": stopping_early(4096),
    "calls stop after three pages": stopping_early(3 * 4096),
    "calls stop within a page": stopping_early(100_001),
}


@pytest.mark.parametrize("calls", PASSING.values(), ids=PASSING)
def test_trouble_of_a_disk_that_is_not_noticed(
    place: Location, monkeypatch: pytest.MonkeyPatch, calls: dict[str, Any]
) -> None:
    for name, call in calls.items():
        monkeypatch.setattr(os, name, call)
    place.write_data(SIZE, segments())
    assert_whole(place)


@pytest.mark.parametrize(
    ("good", "number", "kind"),
    [(0, errno.EINVAL, StorageError), *((good, errno.ENOSPC, StorageFullError) for good in (0, 1, 4))],
    ids=["always invalid", "full at once", "full after one write", "full after four writes"],
)
def test_writes_that_fail_leave_nothing(
    place: Location, monkeypatch: pytest.MonkeyPatch, good: int, number: int, kind: type[StorageError]
) -> None:
    calls = iter([real_pwrite] * good)
    monkeypatch.setattr(os, "pwrite", lambda *arguments: next(calls, fails(number))(*arguments))
    with pytest.raises(kind, match=f"data: {os.strerror(number)}") as caught:
        place.write_data(SIZE, segments())
    assert caught.value.errno == number
    assert_nothing_left(place)


def test_a_full_disk_is_noticed_before_anything_is_computed(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> Iterator[NDArray[np.uint8]]:
        raise AssertionError("asked for data")

    monkeypatch.setattr(local_storage, "is_direct", lambda _: True)
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    with pytest.raises(StorageFullError, match=r"data: No space left.*free some space"):
        place.write_data(SIZE, [Segment(0, SIZE, parts)])
    assert_nothing_left(place)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_an_interrupt_stops_everything(place: Location, error: BaseException) -> None:
    def parts() -> Iterator[NDArray[np.uint8]]:
        yield DATA[:MIB]
        raise error

    with pytest.raises(type(error)):
        place.write_data(SIZE, [*segments()[:4], Segment(8 * MIB, 2 * MIB, parts)])
    assert_nothing_left(place)


def test_several_threads_write_within_bounded_memory(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(local_storage.THREADS)
    addresses = set()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        addresses.add(np.frombuffer(data, np.uint8).ctypes.data)
        assert len(data) <= local_storage.BLOCK
        return real_pwrite(descriptor, data, offset)

    def parts() -> Iterator[NDArray[np.uint8]]:
        barrier.wait(20)  # Breaks unless every thread has a segment at the same time.
        yield from (DATA[:MIB] for _ in range(8))

    monkeypatch.setattr(os, "pwrite", pwrite)
    count = local_storage.THREADS
    for _ in range(2):  # The second time, with the same blocks.
        place.write_data(count * 8 * MIB, [Segment(number * 8 * MIB, 8 * MIB, parts) for number in range(count)])
        assert len(addresses) == count
    assert count * local_storage.BLOCK < 64 * MIB


def test_few_threads_write_beside_a_loop(place: Location) -> None:
    writers: set[str] = set()

    def parts() -> Iterator[NDArray[np.uint8]]:
        writers.update(thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-write"))
        yield DATA[:MIB]

    segments = [Segment(number * MIB, MIB, parts) for number in range(2 * local_storage.THREADS)]
    for awaited in (False, True):
        event = threading.Event()
        if awaited:
            event.set()
        place.write_data(len(segments) * MIB, segments, event)
        assert len(writers) + 1 == (local_storage.THREADS if awaited else local_storage.THREADS_BESIDE)


def test_a_file_that_shrinks_while_it_is_open(place: Location) -> None:
    place.write_data(SIZE, segments())
    with place.open_data() as reader:
        os.truncate(place, 5 * MIB + 7)
        assert np.array_equal(reader.read(MIB, 4 * MIB), DATA[MIB : 5 * MIB])
        with pytest.raises(DamagedCheckpointError, match=rf"data .*expected {2 * MIB} bytes .* {5 * MIB + 7} bytes"):
            reader.read(4 * MIB, 2 * MIB)


def test_no_descriptor_is_left_open(place: Location) -> None:
    before = len(os.listdir("/proc/self/fd"))
    place.write_data(100, small())
    reader = place.open_data()
    reader.close()
    reader.close()
    with pytest.raises(StorageError, match="data"):
        reader.read(0, 100)
    with contextlib.suppress(ValueError):
        place.write_data(100, small(wrong=1))
    os.mkdir(place)
    with contextlib.suppress(DamagedCheckpointError):
        place.open_data()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 255 << 10, 256 << 10, 1 << 20, 2 << 20, (5 << 20) + 3], ids=str)
def test_aligned_empty(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.dtype == np.uint8
    assert memory.flags.writeable
    assert nbytes == 0 or memory.ctypes.data % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
    memory[:] = 7
    assert int(memory.sum(dtype=np.int64)) == 7 * nbytes
