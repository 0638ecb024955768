"""How a tree of components comes into being at a path, and how it replaces another: one commit for all of it.

The record at the root decides. Every part's directory has a record of its own besides, which says the same of that
part, so that it can be loaded, verified and copied alone. Those records are derived: they go before the root's record
changes, and come back after, so that one that is there never disagrees with the root's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping

from ..commit import read_record, sweep, write_record
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    InvalidLocationError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
)
from ..marks import Mark
from ..record import DELETED, PARTIAL, RECORD, CheckpointRecord
from ..storage import Location
from .layout import DATA, METADATA, OWN, below, folders_of, part_records, parts_of, whole_around
from .names import Path

_logger = logging.getLogger("holdfast")


class PendingTree:
    """A tree of components that is being written and does not exist yet.

    Args:
        root: Its directory.
        parts: The paths of all components, the root's own, ``()``, among them.
        overwrite: Whether a tree of components that is there may be replaced.

    Raises:
        CheckpointExistsError: Something is there that must not be replaced.

    Attributes:
        folders: The folder of every component's state.
    """

    def __init__(self, root: Location, parts: Iterable[Path], *, overwrite: bool) -> None:
        self.root = root
        if root.is_local and root.exists() and not root.is_directory():
            raise CheckpointExistsError(f"{root}: a file is there; choose another path")
        whole = whole_around(root)
        if whole is not None and whole[2] in parts_of(whole[1]):
            raise CheckpointExistsError(
                f"{root} is a part of the tree at {whole[0]}, which would not be whole any more; save to another path, "
                "or save the whole tree anew"
            )
        if _is_item(root):
            raise CheckpointExistsError(
                f"{root} is an item of the checkpoint at {root.parent}, which would not be whole any more; save to "
                "another path"
            )
        self._token = uuid.uuid4().hex
        self._mark = Mark(root / PARTIAL)
        self._swept = False
        self._old = self._replaceable(overwrite)
        taken = {*(() if self._old is None else folders_of(self._old))}
        self.folders: dict[Path, Location] = {}
        for path in parts:
            own = "/".join((*path, OWN))
            # What was swept may be of a save that is alive, where there are no locks: folders must not be the same.
            fresh = own in taken or self._swept or root.is_remote
            self.folders[path] = root / (f"{own}.{self._token[:8]}" if fresh else own)
        self._begun = False

    def begin(self) -> None:
        """Makes the folders, and marks the root so that a crash leaves nothing unexplained.

        Raises:
            StorageConflictError: Another save to the same path is under way, or has been committed meanwhile.
        """
        self.root.make_directory()
        if self.root.is_local:
            self._mark.make()
        self._begun = True
        if (read_record(self.root) if (self.root / RECORD).exists() else None) != self._old:
            raise self._mark.conflict()
        marker = json.dumps({"format": "holdfast", "token": self._token, "folders": self._written()})
        (self.root / PARTIAL).write_bytes(marker.encode(), atomic=False)
        for folder in self.folders.values():
            (folder / DATA).make_directory(sync=False)

    def commit(self, record: CheckpointRecord, metadata: Mapping[Path, bytes]) -> None:
        """Makes the tree exist; the folders must be durable.

        Args:
            record: What it holds.
            metadata: For every component what people read about it.
        """
        if self._mark.content().get("token") != self._token:
            raise self.conflict()
        for path in sorted(self.folders, key=len, reverse=True):
            below(self.root, path).sync_directory()
        self._sync_between()
        self.root.parent.sync_directory()
        if self._old is not None:
            self._remove_derived(self._old)
            replaced = set(folders_of(self._old)) - set(folders_of(record))
            record = dataclasses.replace(record, replaced=tuple(sorted(replaced)))
        write_record(self.root, record)
        for path, part in part_records(record).items():
            place = below(self.root, path)
            (place / METADATA).write_bytes(metadata[path], atomic=self._old is not None)
            if path:
                write_record(place, part)  # which makes the names of both durable
        with _leftover(self.root):
            self._remove_folders(record.replaced, record)
            (self.root / PARTIAL).remove()
            self.root.sync_directory()
        self._mark.release()

    @property
    def lost(self) -> bool:
        """Whether another save to the same path has begun since, which is possible where there are no locks."""
        with contextlib.suppress(StorageUnavailableError):
            return self._begun and self._mark.content().get("token", self._token) != self._token
        return False

    def conflict(self) -> StorageConflictError:
        """Returns the error that says so."""
        return self._mark.conflict()

    def abort(self, error: BaseException | None = None) -> None:
        """Removes what was written; the tree that was to be replaced, or that another save makes, stays as it is.

        Args:
            error: Why. A request that an object store did not answer may still arrive: what was written stays then, for
                the next save to remove.
        """
        late = isinstance(error, StorageUnavailableError) and self.root.is_remote
        if self._begun and not late and not self.lost:
            with _leftover(self.root):
                self._remove()
        self._mark.release()

    def _remove(self) -> None:
        if not any(entry.name == RECORD for entry in self.root.entries()):
            self.root.remove_tree(last=PARTIAL)
            return
        record = read_record(self.root)
        self._remove_folders([*self._written(), *record.replaced], record)
        _repair(self.root, record)
        (self.root / PARTIAL).remove()

    def _written(self) -> list[str]:
        return ["/".join((*path, folder.name)) for path, folder in self.folders.items()]

    def _replaceable(self, overwrite: bool) -> CheckpointRecord | None:
        names = {entry.name for entry in self.root.entries()}
        record = None
        if RECORD in names:
            if not overwrite:
                raise CheckpointExistsError(
                    f"{self.root}: a checkpoint is there already; choose another path, or replace it with "
                    "overwrite=True"
                )
            record = read_record(self.root)
            if parts_of(record).keys() != set(map(_path_of, record.items)):
                raise CheckpointExistsError(
                    f"{self.root}: the checkpoint there is none of components; choose another path"
                )
        elif names and not {PARTIAL, DELETED} & names:
            raise CheckpointExistsError(
                f"{self.root}: the directory is not empty and is not a checkpoint (it holds {min(names)!r}); "
                "choose another path"
            )
        if {PARTIAL, DELETED} & names:
            if PARTIAL in names and not self._mark.take_over():
                raise self._mark.conflict()
            try:
                self._sweep(record)
            finally:
                self._mark.release()
            self._swept = True
        return record

    def _sweep(self, record: CheckpointRecord | None) -> None:
        """Removes what an interrupted save has left, beside a tree if there is one, and completes what it had not."""
        if record is None:
            sweep(self.root)
            return
        left = self._mark.content().get("folders")
        self._remove_folders([*(left if isinstance(left, list) else ()), *record.replaced], record)
        _repair(self.root, record)
        (self.root / DELETED).remove()
        (self.root / PARTIAL).remove()

    def _remove_folders(self, folders: Iterable[object], record: CheckpointRecord) -> None:
        """Removes folders of states that are not those of a tree that is there, and directories that were for these."""
        live, parts = set(folders_of(record)), parts_of(record)
        found = [folder for folder in folders if isinstance(folder, str) and _is_own(folder) and folder not in live]
        for folder in sorted(found, key=len, reverse=True):
            with contextlib.suppress(InvalidLocationError):
                (self.root / folder).remove_tree()
                path = tuple(folder.split("/")[:-1])
                if path not in parts:
                    (below(self.root, path) / METADATA).remove()
                    (below(self.root, path) / RECORD).remove()
                for length in range(len(path), 0, -1):
                    _remove_if_empty(below(self.root, path[:length]))

    def _sync_between(self) -> None:
        """Makes the names of directories durable that lie between two components."""
        between = {path[:length] for path in self.folders for length in range(1, len(path))}
        for path in sorted(between - self.folders.keys(), key=len, reverse=True):
            below(self.root, path).sync_directory()
        self.root.sync_directory()

    def _remove_derived(self, record: CheckpointRecord) -> None:
        for path in parts_of(record):
            if path:
                (below(self.root, path) / RECORD).remove()


def _repair(root: Location, record: CheckpointRecord) -> None:
    """Writes the records of parts that are missing."""
    for path, part in part_records(record).items():
        place = below(root, path)
        if path and not (place / RECORD).exists():
            write_record(place, part)


def _remove_if_empty(place: Location) -> None:
    if place.is_local and place.is_directory() and not place.entries():
        place.remove_tree()


def _is_item(place: Location) -> bool:
    """Whether a directory is that of an item of a checkpoint, such as a step of a manager."""
    with contextlib.suppress(CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, StorageError):
        return place.name in folders_of(read_record(place.parent))
    return False


def _is_own(folder: str) -> bool:
    name = folder.rpartition("/")[2]
    return name == OWN or name.startswith(f"{OWN}.")


def _path_of(item: str) -> Path:
    return () if item == OWN else tuple(item.split("/"))


@contextlib.contextmanager
def _leftover(root: Location) -> Iterator[None]:
    """Tidying up after the fact must not turn a success, or the real error, into another error."""
    try:
        yield
    except (StorageError, DamagedCheckpointError, FormatVersionError) as error:
        _logger.warning("%s: could not tidy up, the next save will: %s", root, error)
