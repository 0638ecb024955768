"""Items that differ from process to process, such as the position of each one's data iterator."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..coordination import Coordinator, Member, current_coordinator
from ..record import PROCESSES, FileRecord, ItemRecord
from ..storage import Location
from .base import PreparedCheckpointHandler
from .pytree import PyTreeCheckpointHandler
from .saves import Files, PreparedItem, write_alone

_logger = logging.getLogger("holdfast")


class PerProcessCheckpointHandler(PreparedCheckpointHandler):
    """Saves a tree for each process of a program, in a folder named after the process.

    Each process gets its own back. Where there are not as many processes as have saved, nobody can say what that would
    be: with fewer, the first ones' are taken, with more, they are dealt out again from the first on; a warning says so.

    Args:
        handler: What saves and restores each process's tree.
        coordinator: How the processes find each other; None finds out by itself.
    """

    kind = PROCESSES
    collective = True
    verifies = True
    optional = True

    def __init__(
        self, handler: PyTreeCheckpointHandler | None = None, *, coordinator: Coordinator | None = None
    ) -> None:
        self._handler = handler or PyTreeCheckpointHandler()
        self._coordinator = coordinator

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes this process's tree ready to be written."""
        return ProcessShare(self._handler.prepare(item, snapshot=snapshot, **kwargs))

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads this process's tree back.

        Args:
            directory: The folder.
            item: The template, as for trees.
            files: What the commit record says about the folder.
            **kwargs: As for trees.
        """
        share, known = own_share(directory, files or {}, self._coordinator)
        return self._handler.restore(share, item, files=known, **kwargs)

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Returns what every process's tree looks like, in their order."""
        shares = ItemRecord(directory.name, self.kind, files or {}).shares()
        return [self._handler.structure(directory / str(i), files=each.files) for i, each in enumerate(shares)]


def own_share(
    directory: Location, files: Files, coordinator: Coordinator | None = None
) -> tuple[Location, Mapping[str, FileRecord]]:
    """Returns the folder that this process goes on with, and its files; where there were fewer, some serve twice.

    Args:
        directory: The folder that holds one for each process that saved.
        files: What the commit record says about it.
        coordinator: How the processes find each other; None finds out by itself.

    Raises:
        DamagedCheckpointError: The folders are not those of processes 0, 1, 2 and so on.
    """
    shares = ItemRecord(directory.name, PROCESSES, files).shares()
    coordinator = current_coordinator() if coordinator is None else coordinator
    index, count = coordinator.process_index, coordinator.process_count
    chosen = index % len(shares)
    if len(shares) != count:
        _logger.warning(
            "%s was saved by %d processes and is restored by %d: process %d goes on with what process %d had",
            directory,
            len(shares),
            count,
            index,
            chosen,
        )
    return directory / str(chosen), shares[chosen].files


class ProcessShare:
    """One process's tree on its way into its folder.

    Args:
        prepared: The tree.
    """

    def __init__(self, prepared: PreparedItem) -> None:
        self._prepared = prepared

    def write(self, folder: Location, member: Member) -> bytes:
        """Writes the tree into the folder of this process; returns its list of files."""
        own = folder / str(member.index)
        own.make_directory()
        files = write_alone(self._prepared, own)
        folder.sync_directory()
        return json.dumps({path: [file.size, file.crc32c] for path, file in files.items()}).encode()

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Returns the files of all processes."""
        shares: list[Mapping[str, Any]] = [json.loads(fragment) for fragment in fragments]
        return {
            f"{process}/{path}": FileRecord(*record)
            for process, share in enumerate(shares)
            for path, record in share.items()
        }
