"""Which hosts keep copies of each other, and which local step is whole: tables and properties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.format import RECORD, CheckpointRecord, FileRecord, ItemRecord
from holdfast.engine.manager.local_steps import COPIES, OWN, HeldStep, neighbours, whole_steps


@pytest.mark.parametrize(
    ("domains", "copies", "expected"),
    [
        ("a", 1, [[]]),
        ("ab", 0, [[], []]),
        ("ab", 1, [[1], [0]]),
        ("abc", 1, [[1], [2], [0]]),
        ("abc", 2, [[1, 2], [2, 0], [0, 1]]),
        ("aabb", 1, [[2], [3], [1], [0]]),  # racks of two hosts: each copy lies in the other rack, one on each host
        ("aab", 1, [[2], [2], [1]]),
        ("aa", 1, [[1], [0]]),  # no other domain: better than no copy
        ("ab", 5, [[1], [0]]),
    ],
)
def test_neighbours(domains: str, copies: int, expected: list[list[int]]) -> None:
    assert neighbours(domains, copies) == expected


def held(hosts: int, copies_on: Sequence[Sequence[int]], step: int) -> list[dict[str, HeldStep]]:
    """Returns what hosts have of a step: each has a file of its own, and host 0 the record; and of what others keep."""
    names = [f"state/d/{host}" for host in range(hosts)]
    item = ItemRecord("state", "pytree", {f"d/{host}": FileRecord(10 + host) for host in range(hosts)})
    record = CheckpointRecord(items={"state": item}, time=float(step), step=step)
    files: list[dict[str, tuple[str, int]]] = [{name: (OWN, 10 + host)} for host, name in enumerate(names)]
    files[0][RECORD] = (OWN, 99)
    for host, others in enumerate(copies_on):
        for other in others:
            for name, (where, size) in list(files[host].items()):
                if where == OWN:
                    files[other].setdefault(name, (COPIES, size))
    return [{f"{step:08d}.x": HeldStep(one, record if RECORD in one else None)} for one in files]


def together(*steps: list[dict[str, HeldStep]]) -> list[dict[str, HeldStep]]:
    return [{name: one for held in host for name, one in held.items()} for host in zip(*steps, strict=True)]


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=9), st.integers(1, 3), st.data())
def test_as_many_hosts_may_be_lost_as_there_are_copies(domains: list[str], copies: int, data: st.DataObject) -> None:
    hosts = len(domains)
    copies = min(copies, hosts - 1)
    copies_on = neighbours(domains, copies)
    assert all(len({*others, host}) == copies + 1 for host, others in enumerate(copies_on))
    here = held(hosts, copies_on, 7)
    lost = data.draw(st.sets(st.integers(0, hosts - 1), max_size=copies))
    (whole,) = whole_steps([one for host, one in enumerate(here) if host not in lost])
    assert whole.step == 7
    assert whole.holders.keys() == {RECORD, *(f"state/d/{host}" for host in range(hosts))}


@pytest.mark.parametrize("hosts", range(4, 10))
def test_two_hosts_that_are_no_neighbours_may_be_lost_and_so_may_a_domain(hosts: int) -> None:
    copies_on = neighbours([str(host) for host in range(hosts)], 1)
    here = held(hosts, copies_on, 7)
    for pair in combinations(range(hosts), 2):
        adjacent = any(other in copies_on[one] for one in pair for other in pair)
        left = [one for host, one in enumerate(here) if host not in pair]
        assert bool(whole_steps(left)) is not adjacent
    domains = "ab" * (hosts // 2)
    here = held(len(domains), neighbours(domains, 1), 7)
    assert whole_steps([one for host, one in enumerate(here) if domains[host] == "b"])


def test_the_newest_step_that_is_whole_counts() -> None:
    copies = neighbours("ab", 1)
    both = together(held(2, copies, 5), held(2, copies, 9))
    assert [one.step for one in whole_steps(both)] == [9, 5]
    torn = together(held(2, copies, 5), held(2, [[], []], 9))  # the copies of step 9 were under way
    for hosts, whole in ((torn, [9, 5]), (torn[:1], [5]), (torn[1:], [5])):
        assert [one.step for one in whole_steps(hosts)] == whole
    (folder, five), *_ = both[0].items()
    short = {**five.files, "state/d/0": (OWN, 9)}
    assert [one.step for one in whole_steps([{**both[0], folder: HeldStep(short, five.record)}])] == [9]


def test_records_of_two_saves_are_never_mixed() -> None:
    first, second = held(2, neighbours("ab", 1), 7), held(2, neighbours("ab", 1), 7)
    (folder,) = first[0]
    record = second[1][folder].record
    assert record is not None
    other = CheckpointRecord(items=record.items, time=record.time + 1, step=7)
    assert whole_steps([first[0], {folder: HeldStep(second[1][folder].files, other)}]) == []
