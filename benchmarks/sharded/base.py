"""The interface of a contender that saves from several processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pathlib import Path

    from ..workloads import Array, Shape

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process's place in its program.

    Attributes:
        index: Which process this is, from 0.
        count: How many there are.
        port: Where they meet on this machine.
    """

    index: int
    count: int
    port: int


class ShardedPeer(ABC):
    """A library in one of several processes, each of which holds an equal part of every array's first axis.

    Args:
        program: This process's place.
    """

    verified: ClassVar[bool] = True  # whether what was loaded is compared with what was saved

    def __init__(self, program: Program) -> None:
        self.program = program

    @abstractmethod
    def meet(self) -> None:
        """Wait for the other processes."""

    @abstractmethod
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        """Make the tree that a program holds: this process's part of each array."""

    @abstractmethod
    def save(self, path: Path, tree: Tree) -> None:
        """Save together; on return files and directories are durable, on process 0 at the latest."""

    @abstractmethod
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        """Load together, with the placement of :meth:`hold`."""

    @abstractmethod
    def parts(self, tree: Tree) -> Mapping[str, NDArray[np.float32]]:
        """Return this process's part of every array."""

    def close(self) -> None:  # noqa: B027  # most have nothing to stop
        """Leave the program."""


def part_of(array: Array, program: Program) -> Array:
    """Return a process's part of an array: a run of its first axis."""
    size = array.shape[0] // program.count
    if size * program.count != array.shape[0]:
        raise ValueError(f"{array.shape[0]} rows cannot be shared evenly by {program.count} processes")
    return array[program.index * size : (program.index + 1) * size]
