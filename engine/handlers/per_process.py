"""Items that differ from process to process, such as the position of each one's data iterator."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..distributed import Coordinator, ProcessInfo, current_coordinator
from ..format import PROCESSES, FileRecord, ItemRecord
from ..storage import Location
from .base import Files, PreparedCheckpointHandler, PreparedItem, write_alone
from .pytree import PyTreeCheckpointHandler

_logger = logging.getLogger("holdfast")


class PerProcessCheckpointHandler(PreparedCheckpointHandler):
    """Saves a tree for each process of a program, in a folder named after the process.

    Each process gets its own tree back. Where the number of processes differs from that of the save, process ``i`` gets
    the tree of process ``i`` modulo the number of trees: fewer processes take the first ones, and more processes start
    again from the first. A warning says so.

    Args:
        handler: Handler that saves and restores each process's tree; None makes one.
        coordinator: How the processes find each other; None detects it.
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
        """Make this process's tree ready to be written."""
        return ProcessShare(self._handler.prepare(item, snapshot=snapshot, **kwargs))

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Read this process's tree back.

        Args:
            directory: The folder.
            item: The template, as for trees.
            files: What the commit record says about the folder.
            **kwargs: As for trees.
        """
        share, known = own_share(directory, files or {}, self._coordinator)
        return self._handler.restore(share, item, files=known, **kwargs)

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Describe every process's tree, in their order."""
        shares = ItemRecord(directory.name, self.kind, files or {}).shares()
        return [self._handler.structure(directory / str(i), files=each.files) for i, each in enumerate(shares)]


def own_share(
    directory: Location, files: Files, coordinator: Coordinator | None = None
) -> tuple[Location, Mapping[str, FileRecord]]:
    shares = ItemRecord(directory.name, PROCESSES, files).shares()
    coordinator = current_coordinator() if coordinator is None else coordinator
    index, count = coordinator.process_index, coordinator.process_count
    chosen = index % len(shares)
    if len(shares) != count:
        _logger.warning(
            "%s was saved by %d processes and is restored by %d: process %d restores the tree of process %d",
            directory,
            len(shares),
            count,
            index,
            chosen,
        )
    return directory / str(chosen), shares[chosen].files


class ProcessShare:
    """One process's tree, to be written into a folder of its own."""

    def __init__(self, prepared: PreparedItem) -> None:
        self._prepared = prepared

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        own = folder / str(member.index)
        own.make_directory()
        files = write_alone(self._prepared, own)
        folder.sync_directory()
        return json.dumps({path: [file.size, file.crc32c] for path, file in files.items()}).encode()

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        shares: list[Mapping[str, Any]] = [json.loads(fragment) for fragment in fragments]
        return {
            f"{process}/{path}": FileRecord(*record)
            for process, share in enumerate(shares)
            for path, record in share.items()
        }
