"""Which process writes which chunks. Pure, and the same on every process, which need not talk about it.

Chunks that only one process holds are its own. All others are dealt to their holders so that everybody has the same
to write, as far as that is possible: groups with few holders first, as they have the least choice, and large chunks
before small ones. All chunks of arrays that look alike are dealt together: the work depends on how many kinds of
arrays there are, not on how many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .grid import Holders

Numbers = NDArray[np.int64]

_ROUNDS = 8  # in which groups that share holders make room for each other


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Arrays that are cut and held alike.

    Attributes:
        arrays: Their numbers, ascending.
        chunks: How many chunks each has.
        nbytes: What one chunk takes in a file, in bytes.
        holders: Who holds which chunk; None where all processes hold all.
    """

    arrays: Numbers
    chunks: int
    nbytes: int
    holders: Holders | None


@dataclass(slots=True, eq=False)
class _Lot:
    """Chunks of arrays that are alike and that one group holds, array by array."""

    alike: Alike
    numbers: Numbers  # of these chunks in each array
    ends: Numbers | None = None  # how many of them the first holder has, the first two, and so on

    @property
    def count(self) -> int:
        return len(self.alike.arrays) * len(self.numbers)

    def between(self, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Returns the arrays and numbers of some chunks."""
        arrays, chunks = np.divmod(np.arange(start, stop), len(self.numbers))
        return self.alike.arrays[arrays], self.numbers[chunks]


class Spread:
    """Every chunk given to one of its holders.

    Args:
        kinds: All arrays, those that are alike together; in the same order on every process.
        processes: How many processes there are.

    Attributes:
        loads: What each process writes, in bytes.
    """

    def __init__(self, kinds: Sequence[Alike], processes: int) -> None:
        self._kinds = kinds
        self.loads: Numbers = np.zeros(processes, np.int64)
        everybody = tuple(range(processes))
        lots: dict[tuple[int, ...], list[_Lot]] = {}
        for kind in kinds:
            if not kind.chunks:
                continue
            if kind.holders is None:
                lots.setdefault(everybody, []).append(_Lot(kind, np.arange(kind.chunks)))
                continue
            for group, numbers in zip(kind.holders.groups, _positions(kind.holders), strict=True):
                if len(group) == 1:
                    self.loads[group[0]] += kind.nbytes * len(numbers) * len(kind.arrays)
                else:
                    lots.setdefault(group, []).append(_Lot(kind, numbers))
        self._lots = {group: lots[group] for group in sorted(lots, key=lambda group: (len(group), group))}
        self._deal()

    def share(self, process: int) -> tuple[Numbers, Numbers]:
        """Returns what one process writes.

        Args:
            process: The process.

        Returns:
            The number of the array and the number within the array of every chunk.
        """
        found: list[tuple[Numbers, Numbers]] = []
        for kind in self._kinds:
            if kind.holders is None or (process,) not in kind.holders.groups:
                continue
            numbers = np.flatnonzero(kind.holders.of_chunk == kind.holders.groups.index((process,)))
            found.append((np.repeat(kind.arrays, len(numbers)), np.tile(numbers, len(kind.arrays))))
        for group, lots in self._lots.items():
            if process not in group:
                continue
            position = group.index(process)
            for lot in lots:
                assert lot.ends is not None
                start = int(lot.ends[position - 1]) if position else 0
                found.append(lot.between(start, int(lot.ends[position])))
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        arrays, numbers = (np.concatenate(column) for column in zip(*found, strict=True))
        return arrays, numbers

    def _deal(self) -> None:
        members = {group: np.array(group) for group in self._lots}
        expected = self._expected(members)
        for group in self._lots:
            self.loads[members[group]] += expected[group]
        for group, lots in self._lots.items():
            loads = self.loads[members[group]] - expected[group]
            for lot in sorted(lots, key=lambda lot: -lot.alike.nbytes):
                counts = _shares(loads, lot.count, lot.alike.nbytes)
                loads += counts * lot.alike.nbytes
                lot.ends = np.cumsum(counts)
            self.loads[members[group]] = loads

    def _expected(self, members: dict[tuple[int, ...], NDArray[np.int64]]) -> dict[tuple[int, ...], Numbers]:
        """Returns how many bytes each holder would get of each group's if chunks could be cut anywhere.

        Groups can overlap, as the rows and the columns of a mesh do. Each in turn fills up whoever has the least, again
        and again, which approaches the most even spread that there is.
        """
        expected = {group: np.zeros(len(group), np.int64) for group in self._lots}
        loads = self.loads.copy()
        for _ in range(_ROUNDS if len(self._lots) > 1 else 1):
            moved = 0
            for group, lots in self._lots.items():
                others = loads[members[group]] - expected[group]
                level = _level(others, sum(lot.count * lot.alike.nbytes for lot in lots))
                filled = np.maximum(level - others, 0)
                moved = max(moved, int(np.abs(filled - expected[group]).max()))
                expected[group] = filled
                loads[members[group]] = others + filled
            if moved * 100 <= int(loads.max()):
                break
        return expected


def _positions(holders: Holders) -> list[Numbers]:
    """Returns the numbers of the chunks of each group."""
    order = np.argsort(holders.of_chunk, kind="stable")
    ends = np.cumsum(np.bincount(holders.of_chunk, minlength=len(holders.groups)))
    return np.split(order, ends[:-1])


def _level(loads: Numbers, nbytes: int) -> int:
    """Returns up to where loads are filled when so many bytes are added to the least of them."""
    ordered = np.sort(loads)
    # Filling the first k to the height of the next takes k times that height, less what they have.
    below = np.cumsum(ordered)
    needed = ordered[1:] * np.arange(1, len(ordered)) - below[:-1]
    count = int(np.searchsorted(needed, nbytes, "left")) + 1
    return (nbytes + int(below[count - 1])) // count


def _shares(loads: Numbers, count: int, nbytes: int) -> Numbers:
    """Deals equal chunks to whoever has the least to write.

    Args:
        loads: What each holder writes already, in bytes.
        count: How many chunks there are.
        nbytes: What each takes.

    Returns:
        How many each holder gets.
    """
    shares = np.maximum(_level(loads, count * nbytes) - loads, 0) // nbytes
    left = count - int(shares.sum())
    while left > 0:
        least = np.argsort(loads + shares * nbytes, kind="stable")[:left]
        shares[least] += 1
        left -= len(least)
    return shares
