"""A GPU that is not there: tensors in the host's memory, whose work is put off for as long as its rules allow.

Work that the program or a copy starts is only noted. It runs when something waits for it: then the streams run up to
what is waited for, and nothing else does. So a missing wait shows as wrong bits, or as a broken rule.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Work = Callable[[], object]


class FakeEvent:
    def __init__(self, gpu: FakeGpu, blocking: bool) -> None:
        assert blocking, "a thread that waits for an event has to sleep"
        self._gpu = gpu
        self.mark: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        assert not stream.unmarked, f"{len(stream.unmarked)} tensors could be freed while the stream reads them"
        self.mark = stream, stream.started

    def synchronize(self) -> None:
        self._gpu.log.append("wait")
        assert self.mark is not None
        stream, count = self.mark
        stream.run(count)
        if self._gpu.failure is not None:
            raise RuntimeError(self._gpu.failure)

    def query(self) -> bool:
        assert self.mark is not None
        stream, count = self.mark
        return stream.done >= count


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._queue: list[Work] = []
        self.done = 0
        self.recorded: set[int] = set()  # addresses of storages that are not given away before this stream is done
        self.unmarked: set[int] = set()  # of storages that it reads, and that could be

    @property
    def started(self) -> int:
        return len(self._queue)

    def start(self, work: Work) -> None:
        self._queue.append(work)

    def run(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            with torch._C.DisableTorchFunction():
                self._queue[self.done - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        assert event.mark is not None
        stream, count = event.mark
        self.start(lambda: stream.run(count))

    def wait_stream(self, stream: FakeStream) -> None:
        count = stream.started
        self.start(lambda: stream.run(count))


class FakeGpu(TorchFunctionMode):
    """The device, in the place of ``torch.cuda``; while it is entered, what this thread asks of torch goes to it.

    Attributes:
        log: What happened, in order: "pin", "copy" (one is started), "gather", "wait" (a thread waits), "block" (a copy
            while the program waits).
        pinned: The sizes of the blocks of pinned memory.
        limit: How many blocks can be pinned.
        refuses: From which copy on no copy can be started.
        failure: Why work fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.pinned: list[int] = []
        self.limit = 1000
        self.refuses = 1_000_000
        self.failure: str | None = None
        self.program = FakeStream(self)
        self.streams: list[FakeStream] = []
        self._current = threading.local()

    # ---- the part of torch.cuda

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, *, blocking: bool) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, blocking)

    def current_stream(self, device: Any) -> FakeStream:
        found: FakeStream = getattr(self._current, "stream", self.program)
        return found

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream

    def synchronize(self, device: Any) -> None:
        for stream in (self.program, *self.streams):
            stream.run(stream.started)

    # ---- what a program does

    def launch(self, work: Work) -> None:
        """Start work of the program, which runs later."""
        self.program.start(work)

    def settle(self) -> None:
        """Run all work of the program, and what it has to wait for."""
        self.program.run(self.program.started)

    # ---- what torch is asked for

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        stream = self.current_stream(None)
        if function is torch.empty and kwargs.pop("pin_memory", False):
            self.log.append("pin")
            if len(self.pinned) == self.limit:
                raise RuntimeError("out of pinned memory")
            self.pinned.append(args[0])
            return function(*args, **kwargs).fill_(0xA5)
        if function is torch.empty and kwargs.get("device") is not None and stream is not self.program:
            made = function(*args, **kwargs).fill_(0x5A)
            stream.recorded.add(_storage(made))  # its memory is this stream's own
            return made
        if (name == "copy_" and kwargs.get("non_blocking")) or name == "_foreach_copy_":
            self.log.append("copy" if name == "copy_" else "gather")
            if len(self.log) > self.refuses:
                raise RuntimeError("no copy can be started")
            sources = [args[1]] if name == "copy_" else args[1]
            assert stream is not self.program, "copies run beside the program"
            stream.unmarked |= {_storage(source) for source in sources} - stream.recorded
            stream.start(lambda: function(*args, **kwargs))
            return args[0]
        if name == "cpu" or (name == "to" and args[1:2] == ("cpu",)):
            self.log.append("pin" if kwargs.get("non_blocking") else "block")  # torch's own pinned memory
            stream.run(stream.started)
            return args[0].clone()
        return function(*args, **kwargs)


def record_stream(tensor: Any, stream: FakeStream) -> None:
    """Stand in for ``torch.Tensor.record_stream``, which takes none but torch's own streams."""
    stream.recorded.add(_storage(tensor))
    stream.unmarked.discard(_storage(tensor))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
