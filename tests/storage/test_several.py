"""Several things at a time, and what becomes of them when one fails."""

from __future__ import annotations

import threading

import pytest

from holdfast.engine.storage import several


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_results_come_in_order(at_once: int) -> None:
    assert several(lambda number: number * number, list(range(50)), at_once) == [n * n for n in range(50)]
    assert several(str, [], at_once) == []


def test_as_many_as_may() -> None:
    together = threading.Barrier(4, timeout=10)
    several(lambda _: together.wait(), list(range(8)), 4)


def test_the_first_error_ends_it() -> None:
    begun: list[int] = []
    others = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            others.set()
            raise KeyError(number)
        assert others.wait(10)

    with pytest.raises(KeyError, match="0"):
        several(work, list(range(1000)), 3)
    assert len(begun) < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-store")]
