"""Items that differ between processes, such as the position of each process's data iterator."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arrays import write_file
from ..distributed import Coordinator, ProcessInfo, current_coordinator
from ..errors import OptionError, UnsupportedLeafError
from ..format import (
    ARCHIVE,
    ARCHIVE_FILES,
    GRAPH,
    GRAPH_KIND,
    OWN_FOLDER,
    PROCESSES,
    FileRecord,
    ItemRecord,
    crc32c,
    encode_archive,
    encode_document,
    pack_name,
)
from ..storage import Location
from .base import Files, PreparedCheckpointHandler, PreparedFiles, PreparedItem, write_alone, write_archive
from .pytree import PyTreeCheckpointHandler

_logger = logging.getLogger("holdfast")

SMALL_SHARE = 16 << 10  # maximum size in bytes of a zip file that process 0 receives and writes (see `Save`)


class PerProcessCheckpointHandler(PreparedCheckpointHandler):
    """Saves one tree for each process, in a folder named after the process, or in a zip file if the tree is small.

    Each process restores its own tree. If the number of processes has changed, a warning is logged. With fewer
    processes, the trees of the last processes are not restored. An additional process, which has no saved tree,
    receives its template (or None), but never the random stream or data position of another process.

    Args:
        handler: The handler that saves and restores the tree of each process; None creates one.
        coordinator: Connects the processes; None uses jax.distributed or torch.distributed if one is initialized.
    """

    kind = PROCESSES
    collective = True
    reuses = True
    verifies = True
    optional = True

    def __init__(
        self, handler: PyTreeCheckpointHandler | None = None, *, coordinator: Coordinator | None = None
    ) -> None:
        self._handler = handler or PyTreeCheckpointHandler()
        self.layout = self._handler.layout
        self._coordinator = coordinator

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Prepare the tree of this process to be written."""
        return ProcessShare(self._handler.prepare(item, snapshot=snapshot, **kwargs))

    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        process: int | None = None,
        every: bool = False,
        files: Files | None = None,
        **kwargs: Any,
    ) -> Any:
        """Restore the tree of this process; return the template if this process has no saved tree.

        Args:
            directory: The item's folder.
            item: The template, as for the ``restore`` method of the tree handler.
            process: The index of the process whose tree is restored instead of this process's tree.
            every: If the number of processes has changed, log no warning, and return a :class:`SavedShares` that holds
                the trees of all processes that took part in the save.
            files: The folder's files, as listed in the commit record.
            **kwargs: Further arguments of the tree handler's ``restore``.
        """
        if every:
            shares = _shares(directory, files)
            coordinator = self._coordinator or current_coordinator()
            if len(shares) != coordinator.process_count:
                read = (self._handler.restore(share.folder, item, files=share.files, **kwargs) for share in shares)
                return SavedShares(tuple(read))
        share = own_share(directory, files, self._coordinator, process)
        return self._handler.restore(share.folder, item, files=share.files, **kwargs) if share.is_own else item

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Return the descriptions of all processes' trees, in process order."""
        return [self._handler.structure(share.folder, files=share.files) for share in _shares(directory, files)]


@dataclass(frozen=True, slots=True)
class SavedShares:
    """The trees of all processes that took part in the save, in process order."""

    trees: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """The saved tree of a process, or the tree of process 0 as a substitute if the process has no saved tree."""

    folder: Location
    files: Mapping[str, FileRecord]
    is_own: bool = True


def _shares(directory: Location, files: Files | None) -> list[Share]:
    shares = ItemRecord(directory.name, PROCESSES, files or {}).shares()
    return [Share(directory.parent / share.folder, share.files) for share in shares]


def own_share(
    directory: Location,
    files: Files | None,
    coordinator: Coordinator | None = None,
    process: int | None = None,
    is_same: Callable[[Share, Share], bool] = lambda *_: False,
    otherwise: str = "keeps its fresh state",
) -> Share:
    """Return the share of this or the given process; warn if the count changed, unless another process has the same."""
    shares = _shares(directory, files)
    if process is not None:
        if not 0 <= process < len(shares):
            raise OptionError(f"process={process!r}: {directory} has trees of {len(shares)} processes, from 0")
        return shares[process]
    coordinator = coordinator or current_coordinator()
    index, count = coordinator.process_index, coordinator.process_count
    is_own = index < len(shares)
    chosen, other = shares[index if is_own else 0], shares[0 if is_own and index else -1]
    if len(shares) != count and not is_same(chosen, other):
        outcome = "restores its own tree" if is_own else f"has no tree there, and {otherwise}"
        text = "%s was saved by %d processes and is restored by %d: process %d %s"
        _logger.warning(text, directory, len(shares), count, index, outcome)
    return replace(chosen, is_own=is_own)


class ProcessShare:
    """The tree of one process, to be written into a folder, or into a zip file if it is small.

    If all processes save to the same location, very small zip files are sent to process 0, which packs them together.
    """

    def __init__(self, prepared: PreparedItem) -> None:
        self._prepared = prepared

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        archive = folder / f"{member.index}{ARCHIVE}"
        content = write_archive(self._prepared, archive, ProcessInfo(awaited=member.awaited))
        if content is None:
            share = folder / str(member.index)
            share.make_directory()
            files = write_alone(self._prepared, share, member.awaited)
        elif member.shared and len(content) <= SMALL_SHARE:
            return content
        else:
            archive.write_bytes(content, atomic=False)
            files = {"": FileRecord(len(content), crc32c(content))}
        folder.sync_directory()
        return json.dumps({path: [file.size, file.crc32c, file.shared] for path, file in files.items()}).encode()

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        files: dict[str, FileRecord] = {}
        packs: list[dict[int, bytes]] = []  # each pack contains the zip files of consecutive processes
        for process, fragment in enumerate(fragments):
            if not fragment.startswith(b"{"):
                if not packs or process - 1 not in packs[-1] or len(packs[-1]) == ARCHIVE_FILES:
                    packs.append({})
                packs[-1][process] = fragment
                continue
            for path, (size, digest, shared) in json.loads(fragment).items():
                file = FileRecord(size, digest, shared=shared)
                files[f"{process}/{path}" if path else f"{process}{ARCHIVE}"] = file
        for pack in packs:
            named = {f"{process}{ARCHIVE}": content for process, content in pack.items()}
            if len(named) == 1:
                files |= {name: write_file(folder / name, content) for name, content in named.items()}
            else:
                name = pack_name(min(pack), max(pack))
                members = tuple((len(content), crc32c(content)) for content in named.values())
                files[name] = replace(write_file(folder / name, encode_archive(named)), members=members)
        return files


class PreparedGraph(PreparedFiles):
    """A tree to be written with its graph document and, optionally, a tree that is specific to this process."""

    def __init__(self, tree: PreparedItem, document: Any, own: PreparedItem | None = None) -> None:
        try:
            content = encode_document(GRAPH_KIND, document)
        except ValueError as error:
            raise UnsupportedLeafError(f"this graph cannot be described: {error}; nothing was written") from error
        super().__init__({GRAPH: content}, tree)
        self._own = own

    def estimate_bytes(self) -> int | None:
        return super().estimate_bytes() if self._own is None else None

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        fragment = super().write(folder, member)
        if self._own is None:
            return fragment
        (folder / OWN_FOLDER).make_directory()
        own_fragment = self._own.write(folder / OWN_FOLDER, member)
        return b"%d\n%b%b" % (len(own_fragment), own_fragment, fragment)

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        if self._own is None:
            return super().merge(folder, fragments)
        heads = [fragment.partition(b"\n") for fragment in fragments]
        own_files = self._own.merge(folder / OWN_FOLDER, [rest[: int(length)] for length, _, rest in heads])
        files = super().merge(folder, [rest[int(length) :] for length, _, rest in heads])
        return {**files, **{f"{OWN_FOLDER}/{path}": file for path, file in own_files.items()}}
