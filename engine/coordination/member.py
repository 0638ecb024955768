"""One process's place among those that write a checkpoint together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """Who writes which share of a checkpoint.

    Attributes:
        index: Which of the processes this is, from 0.
        count: How many there are.
        token: Text that is the same on all of them and belongs to this save alone: part of the names of its files.
    """

    index: int = 0
    count: int = 1
    token: str = ""
