"""The ownership of the directory of a run, and its mirror: the operations that all processes do together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..arrays import SharedReads
from ..checkpoint import BackgroundSave
from ..clock import Clock, format_duration, seconds
from ..distributed import ProcessGroup
from ..errors import StateError
from ..forks import Lock
from ..observer import Observer
from ..storage import Location, as_location
from .directory import RunDirectory, check_json
from .events import RunEvents
from .intervals import LearnedInterval
from .mirror import RunMirror
from .options import CheckpointManagerOptions, mirror_of
from .ownership import RunIdentity
from .policies import Every

if TYPE_CHECKING:
    from .local_tier import LocalTier

_logger = logging.getLogger("holdfast")

_FETCH = 86400.0  # seconds that the other processes wait while process 0 fetches a step


class RunAccess:
    """The directory and the mirror of a run, their ownership, and the objects that all saves share."""

    def __init__(
        self,
        directory: Location,
        options: CheckpointManagerOptions,
        clock: Clock,
        processes: ProcessGroup,
        observer: Observer,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.options = options
        self.clock = clock
        self.processes = processes
        self.observer = observer
        self.background = BackgroundSave(seconds(options.save_timeout_secs))
        self.events = RunEvents(directory, clock, processes.index, observer)
        self.run = RunDirectory(directory, options, clock, self._drain, writes=processes.is_primary)
        if not options.read_only:
            self.run.ownership.check_usable()
        self.mirror: RunMirror | None = None  # None without one, and for a manager that only reads
        self.local: LocalTier | None = None  # the local steps of the hosts; None as above
        self.changing = Lock(reentrant=True)  # of the thread that begins a save, or takes ownership
        self.learned: LearnedInterval | None = None  # on process 0, the trigger that learns the interval between saves
        self._metadata = check_json("metadata", metadata)
        self._compared = False  # whether the processes have compared their options
        self._acquired = False
        self._closed = False

    def metadata(self) -> Mapping[str, Any] | None:
        """Return the facts about the run: those that were given, or those that are stored."""
        return self._metadata if self._metadata is not None else self.run.stored_metadata()

    # ---- the interval between saves

    def learn_interval(self, trigger: LearnedInterval) -> None:
        """Let a trigger learn from the events of the run, on process 0, which decides about time."""
        if self.processes.is_primary and not self.options.read_only:
            trigger.learn(self.events.earlier())
            self.events.add_listener(lambda event: trigger.learn([event]))
            self.learned = trigger

    def tell_interval(self) -> None:
        """Note the interval that was learned in the log and in the events, if it has changed."""
        if self.learned is not None and (facts := self.learned.news()) is not None:
            every = format_duration(round(facts["seconds"], 1))
            _logger.info("%s: saves every %s from now on: %s", self.run.location, every, facts["why"])
            self.events.write("interval", **facts)

    # ---- ownership

    def check_writable(self) -> None:
        """Raise StateError where nothing may be written: by a manager that is closed, or only reads."""
        if self._closed:
            raise StateError(f"{self.run.location}: this manager is closed; make a new one")
        if self.options.read_only:
            raise StateError(f"{self.run.location}: this manager was made with read_only=True")

    def acquire(self) -> None:
        """Take ownership of the directory, and remove the remains of interrupted runs."""
        self.check_writable()
        with self.changing:
            if self._acquired:
                self.run.ownership.check_not_lost()
                return
            belongs = RunIdentity() if self.mirror is None else self.mirror.identity
            if self.options.local is not None:
                belongs = replace(belongs, local=as_location(self.options.local.url).url)
            self.compare_options()
            self.run.strays = frozenset(self.processes.decide("acquire", self.run.acquire, self._metadata, belongs))
            if not self.processes.is_primary:
                self.run.reload()
            self._acquired = True
            self.events.begin(max(self.run.steps(), default=None))
            self.tell_interval()
            self._start_mirror()

    def change(self, what: str, work: Callable[..., None], *inputs: Any) -> None:
        """Change the directory on process 0, and after a success the view of it that the other processes have."""
        self.acquire()
        self.processes.decide(what, work, *inputs)
        if not self.processes.is_primary:
            work(*inputs)
        self.notify_mirror()

    def close(self) -> bool:
        """Refuse all further changes; return False if an earlier call has done so."""
        with self.changing:  # a save of another thread has begun before this, or is refused
            was_open, self._closed = not self._closed, True
            return was_open

    def _drain(self) -> None:
        """Wait until no thread begins a save, and none is under way: a newer manager takes over."""
        with self.changing:
            self.background.join()
            if self.local is not None:
                self.local.wait()

    @contextlib.contextmanager
    def shared_reads(self) -> Iterator[SharedReads | None]:
        """Begin reads that all processes make together; None where each reads on its own."""
        transport = self.processes.transport() if self.options.load_and_broadcast is not False else None
        rendezvous = None if transport is None else self.processes.rendezvous("restore: shared reads")
        if transport is None or rendezvous is None:
            yield None
            return
        always = self.options.load_and_broadcast is True
        with contextlib.closing(SharedReads(rendezvous, transport, self.processes.timeout, always=always)) as shared:
            yield shared

    def compare_options(self) -> None:
        """Compare, once, the options that decide which calls the processes make together."""
        if self._compared:
            return
        options = self.options
        mirror = mirror_of(options)
        self.processes.compare(
            "the options of the managers",
            {
                "directory": self.run.location.url,
                "save_interval_steps": options.save_interval_steps,
                "save_interval_secs": str(options.save_interval_secs),
                "save_on_best": options.save_on_best,
                "save": [
                    str(policy) if isinstance(policy, Every) else type(policy).__qualname__
                    for policy in options.policies()[0]
                ],
                "item_intervals": dict(options.item_intervals),
                "load_and_broadcast": options.load_and_broadcast,
                "step_prefix": options.step_prefix,
                "mirror": None if mirror is None else str(mirror.url),
                "local": None if options.local is None else [options.local.every, options.local.copies],
            },
        )
        self._compared = True

    # ---- the mirror

    def open_mirror(self, location: Location) -> None:
        """Fetch the newest step of the mirror, if it is newer than all that are here."""
        self.mirror = RunMirror(location, self.run, self.options, self.clock, self.events)
        self.mirror.fetches = True
        self.compare_options()
        for step in self.processes.decide("the newest step of the mirror", self.mirror.newer_steps):
            if self.fetch(step):
                break
        self.mirror.fetches = False
        if self._acquired:
            self._start_mirror()

    def open_local(self) -> None:
        """Find the hosts of the program, and the newest step that is whole on them."""
        from .local_tier import LocalTier  # needs sockets, which take longer to import than a small save

        self.compare_options()
        self.local = LocalTier(self.options, self.run, self.processes, self.clock, self.events)

    def wait_for_saves(self) -> None:
        """Wait for the saves of a run with local steps, as they note the history, before steps are deleted."""
        if self.local is not None:
            self.background.join()
            self.local.wait()

    def forget_local(self) -> None:
        """Let the local steps not count any more: steps were deleted explicitly."""
        if self.local is not None:
            self.local.forget()

    def fetch(self, step: int, *, overwrite: bool = False) -> bool:
        """Find a step on the hosts, or copy it from the mirror into the directory; return whether it can be read now.

        With ``overwrite``, for a step that is damaged there, the mirror goes first: its copy repairs the directory.
        """
        if overwrite:
            return self._copy(step, overwrite=True) or self.take(step)
        return self.take(step) or self._copy(step, overwrite=False)

    def _copy(self, step: int, *, overwrite: bool) -> bool:
        """Copy a step from the mirror into the directory; return whether it was there."""
        if self.mirror is None:
            return False
        self.acquire()
        fetch = self.mirror.fetch
        found: bool = self.processes.decide(f"fetch step {step}", fetch, step, overwrite, work_timeout=_FETCH)
        if found and not self.processes.is_primary:
            self.run.reload()
        return found

    def take(self, step: int) -> bool:
        """Let the run read a local step that is not the newest; the processes agree on whether there is one."""
        return self.local is not None and step in self.run.hosts.further and self.local.take(step)

    def fetch_missing(self, step: int) -> bool:
        """Fetch a step that process 0 does not see in the directory; return whether it can be read now."""
        if step in self.run.hosts.read:
            return True
        here: bool = self.processes.decide(f"look for step {step}", self.run.__contains__, step)
        return here or self.fetch(step)

    def may_be_elsewhere(self, step: int) -> bool:
        """Return whether a step may be in the mirror or on the hosts only; then all processes look for it together."""
        return self.mirror is not None or (step in self.run.hosts.further and step not in self.run)

    def steps_of_both_places(self) -> list[tuple[int, bool]]:
        """Return the steps, the newest last, damaged ones among them, and whether each is there without a fetch."""
        here = {*self.run.steps_and_damaged(), *self.run.hosts.read}
        there = [*self.run.hosts.further, *(() if self.mirror is None else self.mirror.steps())]
        every = [(step, True) for step in here] + [(step, False) for step in set(there).difference(here)]
        left = self.run.left_behind()
        return sorted(every, key=lambda one: (one[0] not in left, one[0]))

    def notify_mirror(self) -> None:
        """Tell the mirror that the directory has changed."""
        if self.mirror is not None:
            self.mirror.notify()

    def delete_in_mirror(self) -> None:
        """Let the mirror delete the steps that the run has deleted for good."""
        if self.own_mirror is not None:
            self.own_mirror.delete()

    @property
    def own_mirror(self) -> RunMirror | None:
        """The mirror, on process 0, which writes to it."""
        return self.mirror if self.processes.is_primary else None

    def settle_mirror(self) -> bool:
        """Bring deletions and pins to the mirror of a run whose manager was made without one."""
        self.acquire()
        url = self.run.identity.mirror
        if self.mirror is not None or url is None or not self.processes.is_primary:
            return True
        place, options = as_location(url, writes=True), replace(self.options, mirror=url)
        return RunMirror(place, self.run, options, self.clock, self.events).settle()

    def _start_mirror(self) -> None:
        if self.own_mirror is not None:
            self.own_mirror.start()
