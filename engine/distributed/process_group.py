"""Joint operations of all processes: process 0 decides for all, or the processes exchange values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import OptionError, StateError, itemized
from .all_gather import Transport, transport_of
from .coordinators import Coordinator, current_coordinator
from .rendezvous import Rendezvous, next_rendezvous

_T = TypeVar("_T")
_WORK = 7 * 24 * 3600.0  # time limit in seconds; can be long, because a failure of process 0 is noticed within seconds
_MOST_LINES = 100  # maximum number of differences reported to all processes


class ProcessGroup:
    """The processes of a program, which must all call the same methods in the same order."""

    def __init__(self, name: str, coordinator: Coordinator | None, timeout: float) -> None:
        self._coordinator = current_coordinator() if coordinator is None else coordinator
        self._name = name
        self._block: Rendezvous | None = None  # the rendezvous of the current :meth:`together` block
        self.timeout = timeout

    @property
    def alone(self) -> bool:
        return self._coordinator.process_count == 1

    @property
    def index(self) -> int:
        return self._coordinator.process_index

    @property
    def count(self) -> int:
        return self._coordinator.process_count

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which does the work that is needed only once."""
        return self.index == 0

    def transport(self) -> Transport | None:
        """Return the transport that sends arrays between processes; None if there is none or only one process."""
        return None if self.alone else transport_of(self._coordinator)

    def rendezvous(self, what: str) -> Rendezvous | None:
        """Return the rendezvous for the next joint operation; None if there is only one process."""
        return None if self.alone else self._meet(f"{self._name}: {what}")

    def _meet(self, name: str) -> Rendezvous:
        return next_rendezvous(self._coordinator, name, self.timeout, self._block)

    def fail(self, what: str, error: BaseException) -> None:
        """Report to the other processes that this process cannot take part in the next joint operation."""
        if (rendezvous := self.rendezvous(what)) is not None:
            rendezvous.leave(error)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block on all processes and wait for all of them. If one fails, the others raise PeerFailedError."""
        if self.alone or self._block is not None:
            yield
            return
        with contextlib.closing(self._meet(what)) as self._block:
            try:
                yield
                self._block.barrier("done", self.timeout)
            except BaseException as error:
                self._block.leave(error)
                raise
            finally:
                self._block = None

    def compare(self, what: str, mine: Mapping[str, Any]) -> None:
        """Raise StateError on all processes if any value differs from process 0's; the message shows both values."""
        if differences := self._agreed(None if self.alone else self._meet(what), mine, _differences):
            text = (
                f"{what} differ between the processes; give all of them the same values, or let each work alone with "
                "coordinator=hf.processes.Alone()"
            )
            raise StateError(itemized(text, differences))

    def decide(self, what: str, work: Callable[..., _T], *inputs: Any, work_timeout: float | None = None) -> _T:
        """Call ``work`` on process 0, without waiting for the others, and return its JSON result on all processes."""
        # The other processes raise PeerFailedError if the work fails, and BarrierTimeoutError if it takes longer than
        # ``work_timeout`` (default ``self.timeout``).
        rendezvous = self.rendezvous(what)
        if rendezvous is None:
            return work(*inputs)
        work_timeout = self.timeout if work_timeout is None else work_timeout
        with contextlib.closing(rendezvous):
            if not self.is_primary:
                answer: _T = json.loads(rendezvous.broadcast("answer", None, work_timeout))
                return answer
            try:
                result = work(*inputs)
                rendezvous.broadcast("answer", json.dumps(result).encode(), work_timeout)
            except BaseException as error:
                rendezvous.fail(error)
                raise
            return result

    def barrier(self, what: str) -> None:
        """Wait until all processes have called this method."""
        self.first(what, None)

    def first(self, what: str, value: Any) -> tuple[int, Any] | None:
        """Return the index and value of the first process whose value is not None; None if there is no such process."""
        first = self.agree(what, value, _first)
        return None if first is None else (first[0], first[1])

    def agree(self, what: str, mine: Any, work: Callable[[Sequence[Any]], Any]) -> Any:
        """Pass all processes' JSON values to ``work`` on process 0; return its result or raise OptionError on all."""
        return self._agreed(self.rendezvous(what), mine, work)

    def _agreed(self, rendezvous: Rendezvous | None, mine: Any, work: Callable[[Sequence[Any]], Any]) -> Any:
        if rendezvous is None:
            return work([mine])

        def summary(values: Sequence[bytes]) -> bytes:
            try:
                return json.dumps({"answer": work(list(map(json.loads, values)))}).encode()
            except OptionError as error:
                return json.dumps({"error": str(error)}).encode()
            except BaseException as error:
                rendezvous.fail(error)
                raise

        with contextlib.closing(rendezvous):
            agreed = json.loads(rendezvous.summarize("values", json.dumps(mine).encode(), self.timeout, summary))
        if "error" in agreed:
            raise OptionError(agreed["error"])
        return agreed["answer"]


def _differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    first, *others = values
    lines = [
        f"{name}: process 0 has {first.get(name)!r}, and process {process} has {theirs.get(name)!r}"
        for process, theirs in enumerate(others, 1)
        for name in first.keys() | theirs.keys()
        if first.get(name) != theirs.get(name)
    ]
    return sorted(lines)[:_MOST_LINES]


def _first(values: Sequence[Any]) -> tuple[int, Any] | None:
    return next(((process, value) for process, value in enumerate(values) if value is not None), None)


def run_on_primary(
    what: str,
    arguments: Sequence[Any],
    work: Callable[[], Any],
    coordinator: Coordinator | None,
    start_secs: float = 600.0,
) -> Any:
    """Run long work on process 0 at once. The other processes wait up to ``start_secs`` for process 0 to start it."""
    group = ProcessGroup("holdfast", coordinator, start_secs)
    theirs = group.decide(f"the arguments of {what}", lambda: arguments)
    if not group.is_primary and theirs != json.loads(json.dumps(arguments)):
        raise StateError(
            f"{what}: process {group.index} was asked for {arguments}, but process 0 for {theirs}; ask all processes "
            "for the same, or let each work alone with coordinator=hf.processes.Alone()"
        )
    return group.decide(what, work, work_timeout=_WORK)
