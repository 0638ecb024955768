"""The interface of a contender."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from ..workloads import Array, Shape

Tree = dict[str, Any]
Wait = Callable[[], None]


class Peer(ABC):
    """A library, in its fastest mode and with its fastest settings.

    Attributes:
        library: The array library whose arrays are saved; a second column is loaded into it.
        asynchronous: Whether ``save_async`` returns before the bytes are durable.
        verified: Whether what is loaded is compared with what was saved.
    """

    library: ClassVar[str] = "numpy"
    asynchronous: ClassVar[bool] = False
    verified: ClassVar[bool] = True

    @abstractmethod
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        """Make the tree that a program of this library would hold; numpy's memory is not shared."""

    @abstractmethod
    def save(self, path: Path, tree: Tree) -> None:
        """Save; on return files and directories are durable."""

    def save_async(self, path: Path, tree: Tree) -> Wait:
        """Start a save; the returned function waits until it is durable."""
        raise TypeError(f"{type(self).__name__} has no asynchronous save of {len(tree)} items to {path}")

    @abstractmethod
    def load_numpy(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        """Load numpy arrays, all of their bytes in memory, nested or under dotted names."""

    def load_native(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        """Load arrays of ``library``, all of their bytes in memory."""
        raise TypeError(
            f"{type(self).__name__} cannot load {path} into arrays other than numpy's ({len(shapes)} leaves)"
        )

    def close(self) -> None:  # noqa: B027  # most have nothing to stop
        """Stop threads that would delay the end of the process."""
