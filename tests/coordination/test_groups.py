"""What groups leave behind, and what they do with stores that break."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.engine.coordination import Alone, Group, MemoryCoordinator, memory_coordinators, next_group
from holdfast.engine.coordination.framing import PART_SIZE, announced, join, part_names, split
from holdfast.engine.errors import PeerFailedError

PATIENCE = 30.0


def exchange(coordinator: MemoryCoordinator) -> Group:
    group = next_group(coordinator, "save")
    group.gather("fragment", bytes(PART_SIZE + group.index), PATIENCE)
    group.broadcast("token", b"x", PATIENCE)
    group.send("extra", bytes(2 * PART_SIZE))
    group.barrier("end", PATIENCE)
    return group


def test_a_group_leaves_nothing_once_all_have_closed_it() -> None:
    coordinators = memory_coordinators(3)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            groups = list(threads.map(exchange, coordinators))
            assert coordinators[0].keys()
            for group in groups[1:]:
                group.close()
                group.close()
            groups[0].close()
            assert coordinators[0].keys() == []


def test_values_stay_until_the_last_one_has_closed_the_group() -> None:
    coordinators = memory_coordinators(3)
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(exchange, coordinators))
        first[0].close()
        first[1].close()
        assert first[2].receive("extra", 0, PATIENCE) == bytes(2 * PART_SIZE)
        second = list(threads.map(exchange, coordinators))
        for group in second:
            group.close()
        first[2].close()
        assert any(key.startswith("save%231/") for key in coordinators[0].keys())  # noqa: SIM118 - it is no dictionary
        for group in [*threads.map(exchange, coordinators)][::-1]:
            group.close()
    assert coordinators[0].keys() == []


def test_alone_there_is_nothing_to_wait_for_and_nothing_left() -> None:
    coordinator = Alone()
    group = next_group(coordinator, "save")
    assert group.gather("a", b"1", 0) == [b"1"]
    assert group.all_gather("a", b"1", 0) == [b"1"]
    assert group.broadcast("a", b"2", 0) == b"2"
    group.barrier("b", 0)
    group.close()
    assert coordinator.try_get("save%231/broadcast/a/0") is None


def test_names_are_never_given_twice() -> None:
    one, other = memory_coordinators(2)
    names = [next_group(coordinator, name).name for name in ("a", "a", "b") for coordinator in (one, other)]
    assert names == ["a#1", "a#1", "a#2", "a#2", "b#1", "b#1"]


class Broken(MemoryCoordinator):
    """A coordinator whose store is gone from some time on."""

    gone = False

    def _look(self) -> None:
        if self.gone:
            raise ConnectionError("socket closed")

    def put(self, key: str, value: bytes) -> None:
        self._look()
        super().put(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        self._look()
        return super().get(key, timeout)

    def try_get(self, key: str) -> bytes | None:
        self._look()
        return super().try_get(key)


def broken() -> Broken:
    made = memory_coordinators(2)[1]
    made.__class__ = Broken
    assert isinstance(made, Broken)
    return made


OPERATIONS: dict[str, Any] = {
    "barrier": lambda group: group.barrier("x", 1),
    "broadcast": lambda group: group.broadcast("x", None, 1),
    "receive": lambda group: group.receive("x", 0, 1),
    "send": lambda group: group.send("x", b""),
    "check": lambda group: group.check(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_is_gone_is_a_failure_of_process_0(operation: str) -> None:
    coordinator = broken()
    group = Group(coordinator, "save")
    coordinator.gone = True
    with pytest.raises(PeerFailedError, match=r"the store that connects.* is gone.*socket closed") as caught:
        OPERATIONS[operation](group)
    assert caught.value.process == 0
    group.fail(ValueError("x"))
    group.close()


def test_damaged_values_are_noticed() -> None:
    one, other = memory_coordinators(2)
    Group(one, "save").send("x", b"abc")
    [key] = one.keys()
    for damaged in (b"", b"123", one.get(key, 0)[:-1], one.get(key, 0) + b"d", one.get(key, 0)[:-1] + b"d"):
        one.put(key, damaged)
        with pytest.raises(PeerFailedError, match="what process 0 sent is damaged"):
            Group(other, "save").receive("x", 0, PATIENCE)


@pytest.mark.parametrize("length", [0, 1, PART_SIZE - 13, PART_SIZE - 12, PART_SIZE - 11, 3 * PART_SIZE])
def test_values_are_cut_into_parts(length: int) -> None:
    value = bytes(range(256)) * (length // 256 + 1)
    value = value[:length]
    parts = split(value)
    assert max(len(part) for part in parts) <= PART_SIZE
    assert announced(parts[0]) == length
    assert len(part_names("key", length)) == len(parts)
    assert join(parts) == value


def test_process_0_has_to_say_what_it_broadcasts() -> None:
    with pytest.raises(ValueError, match="process 0 has to give the value of 'x'"):
        Group(Alone(), "save").broadcast("x", None, 1)
