"""The keys that a rendezvous leaves in the store, and stores that break."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tests.processes.threads import MemoryCoordinator, memory_coordinators

from holdfast.engine.checkpoint import leave_save
from holdfast.engine.distributed import Alone, BoundedCoordinator, Rendezvous, missed_a_process, next_rendezvous
from holdfast.engine.distributed.rendezvous import PART_SIZE
from holdfast.engine.errors import BarrierTimeoutError, PeerFailedError, describe_error

PATIENCE = 30.0


def exchange(coordinator: MemoryCoordinator) -> Rendezvous:
    rendezvous = next_rendezvous(coordinator, "save")
    rendezvous.gather("fragment", bytes(PART_SIZE + rendezvous.index), PATIENCE)
    rendezvous.broadcast("token", b"x", PATIENCE)
    if rendezvous.index == 0:
        rendezvous.broadcast("extra", bytes(2 * PART_SIZE), PATIENCE)
    rendezvous.barrier("end", PATIENCE)
    return rendezvous


def test_no_key_is_left_once_all_have_closed_it() -> None:
    coordinators = memory_coordinators(3)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            meetings = list(threads.map(exchange, coordinators))
            assert coordinators[0].keys()
            for rendezvous in meetings[1:]:
                rendezvous.close()
                rendezvous.close()
            meetings[0].close()
            assert coordinators[0].keys() == []


def test_values_stay_until_the_last_process_has_closed_it() -> None:
    coordinators = memory_coordinators(3)
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(exchange, coordinators))
        first[0].close()
        first[1].close()
        assert first[2].broadcast("extra", None, PATIENCE) == bytes(2 * PART_SIZE)
        second = list(threads.map(exchange, coordinators))
        for rendezvous in second:
            rendezvous.close()
        first[2].close()
        assert any(key.startswith("save%231/") for key in coordinators[0].keys())  # noqa: SIM118 - it is no dictionary
        for rendezvous in [*threads.map(exchange, coordinators)][::-1]:
            rendezvous.close()
    assert coordinators[0].keys() == []


def test_names_are_never_given_twice() -> None:
    one, other = memory_coordinators(2)
    names = [next_rendezvous(coordinator, name).name for name in ("a", "a", "b") for coordinator in (one, other)]
    assert names == ["a#1", "a#1", "a#2", "a#2", "b#1", "b#1"]


def disturbed(happens: Callable[[], object]) -> MemoryCoordinator:
    """Make the coordinator of process 1 of two, of which something happens before every call."""
    _, made = memory_coordinators(2)

    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        happens()
        return method(*args, **kwargs)

    for name in ("put", "get", "try_get", "try_get_all"):
        setattr(made, name, partial(call, getattr(made, name)))
    return made


def gone() -> None:
    raise ConnectionError("socket closed")


OPERATIONS: dict[str, Any] = {
    "barrier": lambda rendezvous: rendezvous.barrier("x", 1),
    "broadcast": lambda rendezvous: rendezvous.broadcast("x", None, 1),
    "gather": lambda rendezvous: rendezvous.gather("x", b"", 1),
    "check": lambda rendezvous: rendezvous.check(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_is_gone_is_a_failure_of_process_0(operation: str) -> None:
    rendezvous = Rendezvous(disturbed(gone), "save")
    with pytest.raises(PeerFailedError, match=r"the store that connects.* is gone.*socket closed") as caught:
        OPERATIONS[operation](rendezvous)
    assert caught.value.process == 0
    rendezvous.fail(ValueError("x"))
    rendezvous.close()


def test_waits_in_a_row_that_miss_a_process_are_ever_shorter() -> None:
    first, second, third = memory_coordinators(3)

    def missed(coordinator: MemoryCoordinator, name: str) -> str:
        rendezvous = Rendezvous(coordinator, name)
        with pytest.raises(BarrierTimeoutError) as caught:
            rendezvous.barrier("all", 0.08)
        (seconds,) = re.findall(r"within ([0-9.]+) s", str(caught.value))
        return str(seconds)

    assert [missed(first, f"{number}") for number in range(5)] == ["0.08", "0.04", "0.02", "0.01", "0.01"]
    assert missed(second, "0") == "0.08"
    for coordinator in (second, third):
        Rendezvous(coordinator, "back").gather("x", b"", PATIENCE)
    Rendezvous(first, "back").gather("x", b"", PATIENCE)
    assert missed(first, "6") == "0.08"
    with pytest.raises(BarrierTimeoutError, match=r"within 0\.15 s"):
        Rendezvous(third, "save").broadcast("committed", None, 0.08, gathered=True)
    assert missed(third, "7") == "0.01", "both together last two timeouts"


class Ahead(BoundedCoordinator):
    """A coordinator whose clock goes ahead while the program does other things."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def test_a_program_that_goes_on_after_a_miss_waits_as_long_as_before() -> None:
    coordinator: Any = Ahead(memory_coordinators(3)[0], PATIENCE)
    for name, seconds, trains in [("1", "0.4", 0.0), ("2", "0.2", 0.2), ("3", "0.4", 0.41), ("4", "0.2", 0.0)]:
        coordinator.ahead += trains
        with pytest.raises(BarrierTimeoutError, match=rf"within {seconds} s"):
            Rendezvous(coordinator, name).barrier("all", 0.4)


def test_a_process_that_process_0_has_heard_from_is_not_missed_any_more() -> None:
    first, second, third = memory_coordinators(3)
    for name in ("1", "2"):
        with pytest.raises(BarrierTimeoutError, match=r"processes 0, 2 of 3 .* within 0\.08 s"):
            Rendezvous(second, name).barrier("all", 0.08)
        for coordinator in (second, third, first):
            Rendezvous(coordinator, f"save {name}").gather("written", b"", PATIENCE)
        for coordinator in (first, second):
            Rendezvous(coordinator, f"save {name}").broadcast("committed", b"", PATIENCE, gathered=True)


@pytest.mark.parametrize(("error", "missed"), [(BarrierTimeoutError("process 2", [2]), True), (ValueError("2"), False)])
def test_the_others_hear_that_a_process_is_missing(error: Exception, missed: bool) -> None:
    first, second, _ = memory_coordinators(3)
    Rendezvous(first, "save").fail(error)
    with pytest.raises(PeerFailedError, match=r"process 0 failed: .*2") as caught:
        Rendezvous(second, "save").check()
    assert missed_a_process(error) == missed_a_process(caught.value) == missed


def test_damaged_values_are_noticed() -> None:
    one, other = memory_coordinators(2)
    Rendezvous(one, "save").broadcast("x", b"abc", PATIENCE)
    [key] = one.keys()
    for damaged in (b"", b"123", one.get(key, 0)[:-1], one.get(key, 0) + b"d", one.get(key, 0)[:-1] + b"d"):
        one.put(key, damaged)
        with pytest.raises(PeerFailedError, match="the value that process 0 sent is damaged"):
            Rendezvous(other, "save").broadcast("x", None, PATIENCE)


@pytest.mark.parametrize("length", [0, 1, PART_SIZE - 13, PART_SIZE - 12, PART_SIZE - 11, 3 * PART_SIZE])
def test_values_are_cut_into_parts(length: int) -> None:
    one, other = memory_coordinators(2)
    value = (bytes(range(256)) * (length // 256 + 1))[:length]
    Rendezvous(one, "save").broadcast("x", value, PATIENCE)
    assert max(len(one.get(key, 0)) for key in one.keys()) <= PART_SIZE  # noqa: SIM118 - it is no dictionary
    assert Rendezvous(other, "save").broadcast("x", None, PATIENCE) == value


def test_process_0_must_give_the_value_of_a_broadcast() -> None:
    with pytest.raises(ValueError, match="process 0 must give the value of 'x'"):
        Rendezvous(Alone(), "save").broadcast("x", None, 1)


def test_the_notes_of_an_error_reach_the_other_processes() -> None:
    one, other = memory_coordinators(2)
    error = KeyError("word")
    assert describe_error(error) == "'word'"
    error.add_note("raised by serialize of the TypeHandler 'words' for a/b")
    assert describe_error(error) == "'word'\nraised by serialize of the TypeHandler 'words' for a/b"
    Rendezvous(one, "save").fail(error)
    with pytest.raises(PeerFailedError, match="process 0 failed: KeyError: 'word'\nraised by serialize of the"):
        Rendezvous(other, "save").check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_call_waits_for_a_frozen_store_for_ever(operation: str) -> None:
    """Its process is stopped, and its machine is up."""
    thawed = threading.Event()
    coordinator = disturbed(thawed.wait)
    rendezvous = next_rendezvous(coordinator, "save", 0.2)
    try:
        with pytest.raises(PeerFailedError, match=r"has not answered for 0\.2 s: its process is stopped"):
            OPERATIONS[operation](rendezvous)
        rendezvous.fail(ValueError("the others cannot be told"))
        rendezvous.close()
        thawed.set()
        next_rendezvous(coordinator, "save", 30).gather("x", b"1", 1)  # it answers again
    finally:
        thawed.set()


@pytest.mark.parametrize("operation", ["barrier", "broadcast"])
def test_an_operation_that_fails_leaves_no_wait_in_a_store_of_any_kind(operation: str) -> None:
    """Also where the store continues waits until they are given up."""
    made: Any = memory_coordinators(2)[1]
    waits: set[str] = set()

    def continuing(key: str, *args: Any, get: Callable[..., bytes] = made.get, **kwargs: Any) -> bytes:
        waits.add(key)
        value = get(key, *args, **kwargs)
        waits.remove(key)
        return value

    made.get, made.give_up = continuing, waits.remove
    with pytest.raises(BarrierTimeoutError):
        OPERATIONS[operation](Rendezvous(made, "save"))
    assert waits == set()


def counted(count: int) -> tuple[MemoryCoordinator, list[MemoryCoordinator], list[list[str]]]:
    """Make process 0 and the others; gives the keys of each request of process 0 for several values, too."""
    first, *others = memory_coordinators(count)
    requests: list[list[str]] = []

    def noted(keys: Sequence[str], ask: Callable[..., Any] = first.try_get_all) -> Any:
        requests.append(list(keys))
        return ask(keys)

    first.try_get_all = noted  # type: ignore[method-assign]
    return first, others, requests


def test_the_values_of_many_processes_come_with_few_requests_and_so_do_the_missing() -> None:
    first, others, requests = counted(700)
    for coordinator in others:
        Rendezvous(coordinator, "all").gather("x", b"%d" % coordinator.process_index, PATIENCE)
        if coordinator.process_index not in {3, 500}:
            Rendezvous(coordinator, "some").gather("x", b"", PATIENCE)
    assert Rendezvous(first, "all").gather("x", b"0", PATIENCE) == [b"%d" % process for process in range(700)]
    assert len(requests) < 12
    assert all(len({key.rpartition("/")[0] for key in keys}) == 1 for keys in requests), "each is for one folder"
    assert len({key.rpartition("/")[0] for keys in requests for key in keys}) == 3
    assert not [key for key in first.keys() if key.startswith("all/")]  # noqa: SIM118 - it is no dictionary

    requests.clear()
    with pytest.raises(BarrierTimeoutError, match="processes 3, 500 of 700 did not reach 'x'") as caught:
        Rendezvous(first, "some").gather("x", b"", 0.01)
    assert caught.value.missing == (3, 500)
    assert len(requests) < 50


def test_the_keys_of_many_processes_are_deleted_once_all_have_closed() -> None:
    first, others, requests = counted(700)
    made = [Rendezvous(coordinator, "save") for coordinator in (first, *others)]
    made[0].broadcast("x", b"abc", PATIENCE)
    for rendezvous in made[2:]:
        rendezvous.close()
    made[0].close()
    assert first.keys()
    made[1].close()
    again = Rendezvous(first, "save again")
    requests.clear()
    again.close()
    left = first.keys()
    assert not [key for key in left if key.startswith("save/")]
    assert len(requests) < 10


def test_a_process_that_has_heard_of_a_failure_does_not_take_it_over() -> None:
    first, *others = [next_rendezvous(one, "save", 20) for one in memory_coordinators(3)]
    leave_save(others[0], ValueError("no space"))
    with pytest.raises(PeerFailedError) as heard:
        others[1].check()
    leave_save(others[1], heard.value)
    with pytest.raises(PeerFailedError, match="process 1 failed: ValueError: no space"):
        first.check()
