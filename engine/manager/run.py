"""The steps and events of a run, the ownership of its directory, and the collective actions of its processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..checkpoint import BackgroundSave, leave_save
from ..clock import Clock, seconds
from ..distributed import ProcessGroup, Rendezvous
from ..errors import StateError
from ..forks import Lock
from ..format import CheckpointRecord
from ..observer import Observer
from ..storage import Location, as_location
from .directory import RunDirectory, check_json
from .events import RunEvents
from .intervals import Every, LearnedInterval
from .options import CheckpointManagerOptions, mirror_of
from .ownership import RunIdentity
from .places import Point, StepPlace

_logger = logging.getLogger("holdfast")


@contextlib.contextmanager
def failing_together(rendezvous: Rendezvous | None) -> Iterator[None]:
    """If the block fails, immediately report to the other processes that this one cannot take part in the save."""
    try:
        yield
    except BaseException as error:
        leave_save(rendezvous, error)
        raise


class Run:
    """The steps of a run in its directory and other storage tiers, its events, and the ownership of its directory."""

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
        self.places: list[StepPlace] = []  # the other storage tiers, nearest first
        self.steps = RunDirectory(
            directory, options, clock, self._drain, writes=processes.is_primary, places=self.places
        )
        if not options.read_only:
            self.steps.ownership.check_usable()
        self.changing = Lock(reentrant=True)  # held by a thread that starts a save or acquires the directory
        self.learned: LearnedInterval | None = None  # the trigger that learns the save interval, on process 0 only
        # Called on the saving thread with the folder and record of each committed step, including local steps.
        self.committed: Callable[[Location, CheckpointRecord], object] | None = None
        self.metadata = check_json("metadata", metadata)
        self._compared = False  # whether the processes have compared their options
        self._acquired = False
        self._closed = False

    # ---- the right to change the run

    def check_writable(self) -> None:
        """Raise StateError if the manager is closed or read-only."""
        if self._closed:
            raise StateError(f"{self.steps.location}: this manager is closed; make a new one")
        if self.options.read_only:
            raise StateError(f"{self.steps.location}: this manager was made with read_only=True")

    def acquire(self, *adding: StepPlace) -> None:
        """Acquire the directory, remove leftovers of interrupted runs, and notify the other storage tiers."""
        self.check_writable()
        with self.changing:
            if self._acquired:
                self.steps.ownership.check_not_lost()
                return
            local = self.options.local
            identity = RunIdentity(local=None if local is None else as_location(local.url).url)
            for place in (*self.places, *adding):  # including tiers that are being added
                identity = place.identity.over(identity)
            self.compare_options()
            strays = self.processes.decide("acquire", self.steps.acquire, self.metadata, identity)
            if not self.processes.is_primary:
                self.steps.reload()
                self.steps.add_strays(strays)
            self._acquired = True
            self.events.begin(max(self.steps.steps(), default=None))
            self.report_interval()
            self.notify("changed")

    def change(self, action: str, work: Callable[..., Any], *inputs: Any) -> Any:
        """Change the directory on process 0, and then the in-memory index on the other processes."""
        self.acquire()
        answer = self.processes.decide(action, work, *inputs)
        if not self.processes.is_primary:
            work(*inputs)
        self.notify("changed")
        return answer

    def close(self) -> bool:
        """Refuse all further changes; return False if the run has already been closed."""
        with self.changing:  # a save on another thread has either started already or will be refused
            was_open, self._closed = not self._closed, True
            return was_open

    def _drain(self) -> None:
        """Wait until no save is starting or in progress; called before a newer manager takes over."""
        with self.idle(self.background, *(place.background for place in self.places)):
            pass

    @contextlib.contextmanager
    def idle(self, *saves: BackgroundSave) -> Iterator[None]:
        """Wait until the given saves have ended, and prevent other threads from starting a save during the block."""
        while True:
            for save in saves:
                save.join()  # without holding the lock, which listeners may need
            with self.changing:
                if not any(save.running for save in saves):
                    yield
                    return

    def compare_options(self) -> None:
        """Check once that the options that determine collective calls are equal on all processes."""
        if self._compared:
            return
        options, mirror, local = self.options, mirror_of(self.options), self.options.local
        policies = options.policies()[0]
        plain = ("save_interval_steps", "save_on_best", "load_and_broadcast", "step_prefix", "step_name_width")
        compared = {
            **{name: getattr(options, name) for name in plain},
            "directory": self.steps.location.url,
            "save_interval_secs": str(options.save_interval_secs),
            "save": [str(policy) if isinstance(policy, Every) else type(policy).__qualname__ for policy in policies],
            "item_intervals": dict(options.item_intervals),
            "mirror": None if mirror is None else str(mirror.url),
            "local": None if local is None else [local.every, local.copies],
        }
        self.processes.compare("the options of the managers", compared)
        self._compared = True

    def report_interval(self) -> None:
        if self.learned is not None:
            self.learned.report(self.events, self.steps.location)

    # ---- other storage tiers

    def add_place(self, place: StepPlace) -> None:
        """Add a storage tier, and fetch its newest step if it is newer than all steps in the directory."""
        self.compare_options()
        for step in place.newer_steps():
            if place.fetch(step, False):
                break
        self.places.insert(0, place)
        if self._acquired:
            place.reached("changed", -1)

    def wait_for_places(self) -> None:
        for place in self.places:
            place.background.join()

    def notify(self, point: Point, step: int = -1) -> None:
        """Notify all storage tiers that the run has reached a point, such as the start of a save or a deletion."""
        for place in self.places:
            place.reached(point, step)

    def fetch(self, step: int, *, overwrite: bool = False) -> StepPlace | None:
        """Fetch a step, and return the tier that supplied it, or None; ``overwrite`` replaces a damaged step."""
        # For a damaged step, try the mirror (the farthest tier) first: restoring its copy repairs the directory.
        places = self.places[::-1] if overwrite else self.places
        return next((place for place in places if place.fetch(step, overwrite)), None)

    def fetch_missing(self, step: int) -> bool:
        """Fetch a step if process 0 cannot find it in the directory; return whether the step can be read."""
        if step in self.steps.borrowed:
            return True
        is_here = self.processes.decide(f"look for step {step}", self.steps.__contains__, step)
        return is_here or self.fetch(step) is not None

    def steps_everywhere(self) -> list[tuple[int, bool]]:
        """Return (step, readable without a fetch) for all steps, damaged or not: abandoned steps first, newest last."""
        here = {*self.steps.steps_and_damaged(), *self.steps.borrowed}
        there = {step for place in self.places for step in place.steps()}
        known, left = here | there, self.steps.left_behind()
        return [(step, step in here) for step in (*sorted(known & left), *sorted(known - left))]
