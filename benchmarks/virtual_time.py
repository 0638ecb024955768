"""Threads in simulated time: thousands of processes on a few cores, as if each had its own core.

Each thread has a clock. It advances by the processor time that the thread takes, and by the time of its waits, which
take no time in reality. One thread runs at a time: the one whose clock is behind those of all others that could run. So
threads do not compete for Python's lock.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from holdfast.engine.storage import parallel

if TYPE_CHECKING:
    from collections.abc import Callable

STACK = 256 * 1024
"""Bytes of the stack of each thread."""


class Timeline:
    """The threads of a simulation, and which of them runs.

    Args:
        measured: Whether processor time counts. If not, only what is waited for takes time, and two runs are the same.
    """

    def __init__(self, *, measured: bool = True) -> None:
        self.measured = measured
        self._ready: list[tuple[float, int, Actor, int]] = []  # when, order, who, and which of its waits this would end
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._over = threading.Event()
        self._here = threading.local()

    def start(self, work: Callable[[], object], owner: Any = None) -> Actor:
        """Make a thread, which begins at time 0 when :meth:`run` is called."""
        actor = Actor(self, 0.0, owner)
        self._threads.append(threading.Thread(target=actor.perform, args=(work,), daemon=True))
        return actor

    def run(self) -> None:
        """Let the threads run until all have ended; helpers that the engine starts for requests are among them."""
        size, collects = threading.stack_size(STACK), gc.isenabled()
        gc.disable()  # it would stop one thread to look at the objects of all
        try:
            for thread in self._threads:
                thread.start()
            if self._threads:
                with mock.patch.object(parallel, "Helper", partial(SimulatedHelper, self)):
                    self.hand_over()
                    self._over.wait()
        finally:
            threading.stack_size(size)
            if collects:
                gc.enable()

    @property
    def current(self) -> Actor | None:
        """The actor whose thread this is, if it is that of one."""
        return getattr(self._here, "actor", None)

    def enter(self, actor: Actor) -> None:
        """Note that the current thread is that of an actor."""
        self._here.actor = actor

    def register(self, actor: Actor) -> None:
        """Count an actor, which begins at its time."""
        self._alive += 1
        self.schedule(actor, actor.now)

    def schedule(self, actor: Actor, when: float) -> None:
        """Let an actor run at a time, unless it is woken before."""
        heapq.heappush(self._ready, (when, next(self._order), actor, actor.waits))

    def hand_over(self) -> None:
        """Let the actor run that is next."""
        while True:
            when, _, actor, waits = heapq.heappop(self._ready)
            if actor.waits == waits:
                actor.resume(when)
                return

    def is_first(self, when: float) -> bool:
        """Return whether no other actor could run before a time."""
        while self._ready and self._ready[0][2].waits != self._ready[0][3]:
            heapq.heappop(self._ready)
        return not self._ready or self._ready[0][0] > when

    def leave(self) -> None:
        """Note that an actor has ended, and let the next run."""
        self._alive -= 1
        if self._alive:
            self.hand_over()
        else:
            self._over.set()


class Actor:
    """A thread of a simulation.

    Args:
        timeline: The simulation.
        begins: When it begins, in seconds.
        owner: What it belongs to, and the helpers that it starts, too.

    Attributes:
        now: Its clock, in seconds.
        owner: As given.
    """

    def __init__(self, timeline: Timeline, begins: float, owner: Any) -> None:
        self.now = begins
        self.owner = owner
        self.waits = 0
        self._timeline = timeline
        self._turn = threading.Lock()
        self._turn.acquire()
        self._woken = self._ended = False
        self._joining: list[Actor] = []
        self._measured = 0.0
        timeline.register(self)

    def perform(self, work: Callable[[], object]) -> None:
        """Do all that this actor does, in the current thread."""
        self._timeline.enter(self)
        self._turn.acquire()
        self._measure()
        try:
            work()
        finally:
            self.count()
            self._ended = True
            for actor in self._joining:
                actor.wake(self.now)
            self._timeline.leave()

    def elapse(self, seconds: float = 0.0) -> None:
        """Let time pass; like all methods but :meth:`wake`, called in the actor's own thread."""
        self.count()
        self.now += seconds
        if not self._timeline.is_first(self.now):
            self._timeline.schedule(self, self.now)
            self._pause()

    def wait(self, timeout: float = math.inf) -> bool:
        """Wait until another actor wakes this one; return False after a timeout, in seconds."""
        self.count()
        self._woken = False
        if timeout < math.inf:
            self._timeline.schedule(self, self.now + timeout)
        self._pause()
        return self._woken

    def wake(self, when: float) -> None:
        """Let an actor that waits go on at a time."""
        self.waits += 1
        self._woken = True
        self._timeline.schedule(self, max(when, self.now))

    def join(self, other: Actor) -> None:
        """Wait until another actor has ended."""
        if not other._ended:
            other._joining.append(self)
            self.wait()

    def resume(self, when: float) -> None:
        """Let its thread run."""
        self.waits += 1
        self.now = when
        self._turn.release()

    def _pause(self) -> None:
        self._timeline.hand_over()
        self._turn.acquire()

    def count(self) -> None:
        """Advance the clock by the processor time that the actor has taken."""
        if self._timeline.measured:
            self.now += self._measure()

    def _measure(self) -> float:
        before, self._measured = self._measured, time.thread_time()
        return self._measured - before


class SimulatedHelper(parallel.Helper):
    """A helper thread of the engine, as an actor.

    Args:
        timeline: The simulation.
        work: What it does.
        name: Of the thread.
        daemon: Whether the interpreter ends without waiting for it.
    """

    def __init__(self, timeline: Timeline, work: Callable[[], None], name: str, *, daemon: bool = False) -> None:
        super().__init__(work, name, daemon=daemon)
        self._timeline = timeline
        self._actor: Actor | None = None

    def start(self) -> None:
        current = self._timeline.current
        assert current is not None, "only actors start helpers"
        current.count()  # without a pause: the engine holds a lock here
        self._actor = Actor(self._timeline, current.now, current.owner)
        super().start()

    def run(self) -> None:
        assert self._actor is not None, "it has been started"
        self._actor.perform(super().run)

    def join(self, timeout: float | None = None) -> None:
        current = self._timeline.current
        if self._actor is not None and current is not None:
            current.join(self._actor)
        super().join(timeout)
