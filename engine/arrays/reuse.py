"""Which chunks have not changed since earlier saves, and which files of earlier steps hold them already.

The evidence is a digest of 128 bits over exactly the bytes that would be written: neither torch's version counters nor
the identity of jax's arrays proves that bytes are equal. The digest of a chunk is computed as it is written. Later
saves compute the digests of their chunks, and share each file of an earlier step of which enough is unchanged.

Digests are kept in memory, for the lifetime of a manager. Chunks that change from save to save cost next to nothing: a
few bytes of each chunk are compared first, and chunks that change elsewhere are compared less and less often.

A step shares no file with the step before it, so that one bad sector never damages both the newest step and the one to
fall back to. There are thus two lineages of files. An object store copies the files, and a copy may repeat damage.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import DamagedCheckpointError, StorageError
from ..format import content_digest, crc32c
from ..storage import Buffer, FileIdentity, Location, max_concurrency, parallel_map
from .digests import CHECKSUM_BYTES, Integers
from .encode import Digests, Source, Sources, chunk_bytes, chunk_view
from .plan import Catalog, ChunkIds

_logger = logging.getLogger("holdfast")

ChunkKey = tuple[str, int]  # the description of an array, its name included, and the number of a chunk of it
_Held = tuple[tuple[int, int], bytes]  # a chunk of the tree, by the number of its array and its own, and its digest

_SMALLEST_CHUNK = 64 << 10  # bytes; smaller ones are written faster than they are compared
SMALLEST_FILE_BYTES = 1 << 20  # bytes; a smaller one is written again
_LIVE = 0.5  # fraction of a file's bytes that must be unchanged; the others stay on the disk unused
_SAMPLES = 256
_SAMPLE_BYTES = 64  # size of a sample
_SAMPLE_GAP = 4096  # bytes from one sample to the next, at least
_THREADS = 4
_SHARE = 16 << 20  # bytes that are worth a thread
_PATIENCE = 2  # changes in a row that only digests show; then the chunk is compared less often
_LONGEST_REST = 64  # saves
_REMEMBERED = 64  # steps

# These errors concern a single file: it is gone, was changed, or has as many names as it can have.
_OF_ONE_FILE = (errno.ENOENT, errno.ESTALE, errno.EMLINK, errno.EAGAIN)


class WrittenChunk(NamedTuple):
    """A chunk in a data file, with its place there and the digest of its content in memory."""

    key: ChunkKey
    offset: int
    length: int
    checksum: int
    digest: bytes


class WrittenFile(NamedTuple):
    path: str  # in the folder of the item; unique to one save, so it also identifies the lineage of a file
    size: int
    identity: FileIdentity
    chunks: Sequence[WrittenChunk]  # chunks with a known digest


@dataclass(slots=True)
class _WrittenStep:
    step: int
    folder: Location
    files: dict[str, WrittenFile] = field(default_factory=dict)


@dataclass(slots=True)
class _SeenChunk:
    """The observations of the last save about a chunk."""

    sample: bytes | None  # some of its bytes; None if it does not lie in memory in one run
    digest: bytes | None = None
    changes: int = 0  # found by comparing digests, in a row
    rest: int = 0  # saves in which it is not compared


@dataclass(slots=True)
class SharedFiles:
    """The chunks that a save shares with earlier steps, and how it writes the others."""

    # The chunks to write: those that have not changed lately, and the others. Each group goes into files of its own.
    groups: list[ChunkIds]
    linked: list[WrittenFile] = field(default_factory=list)  # files of earlier steps, which have their names here now
    # A row for each chunk in them: array, number in the array, file among these, offset, length and checksum.
    rows: list[tuple[int, ...]] = field(default_factory=list)
    digests: Digests = field(default_factory=dict)  # digests of written chunks, where they are worth knowing
    keys: dict[tuple[int, int], ChunkKey] = field(default_factory=dict)


class _Unchanged(NamedTuple):
    """A file of an earlier step, and the unchanged chunks in it."""

    source: Location
    file: WrittenFile
    chunks: dict[ChunkKey, _Held]


class WrittenSteps:
    """The data files of the last steps of one item, as far as this process wrote them.

    A manager has one for each item. ``begin`` comes before every save, ``share`` and ``note`` around each group of
    chunks that is written, and ``commit`` after the commit.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _WrittenStep] = {}  # keys are steps, in the order of their commits
        self._seen: dict[ChunkKey, _SeenChunk] = {}
        self._before: dict[ChunkKey, _SeenChunk] = {}  # chunks that the previous save has seen
        self._parts: dict[str, WrittenSteps] = {}
        self._pending: _WrittenStep | None = None
        self._step = -1
        self._apart: Collection[int] = ()
        self._refused: set[str] = set()  # paths of files that cannot be shared
        self._off = False  # the file system refuses all

    def part(self, name: str) -> WrittenSteps:
        """Return the data files of a part of the item, which has a folder of its own."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = WrittenSteps()
            part.begin(self._step, self._apart, lambda _: True)
        return part

    def begin(self, step: int, apart: Collection[int], is_there: Callable[[int], bool]) -> None:
        """Begin the save of a step, which shares nothing with steps ``apart`` or those that are not there, whole."""
        self._step, self._apart, self._pending = step, apart, None
        self._steps = {step: written for step, written in self._steps.items() if is_there(step)}
        for part in self._parts.values():
            part.begin(step, apart, is_there)

    def commit(self) -> None:
        """Note that the save is committed: later ones may share its files."""
        if self._pending is not None:
            self._steps.pop(self._step, None)
            self._steps[self._step] = self._pending
            self._pending = None
            if len(self._steps) > _REMEMBERED:
                del self._steps[next(iter(self._steps))]
        for part in self._parts.values():
            part.commit()

    def forget(self) -> None:
        """Do not share with the earlier steps any more: one is damaged, perhaps in a file that others share."""
        self._steps.clear()
        self._pending = None
        for part in self._parts.values():
            part.forget()

    def share(
        self,
        folder: Location,
        catalog: Catalog,
        sources: Sources,
        chunks: ChunkIds,  # those that this process must write
        awaited: threading.Event | None = None,
    ) -> SharedFiles:
        """Link the files of an earlier step that hold unchanged chunks; return them, and the chunks to write."""
        if self._pending is None:  # the first of its groups
            self._pending = _WrittenStep(self._step, folder)
            self._before, self._seen = self._seen, {}
        large = catalog.lengths[chunks[0]] > _SMALLEST_CHUNK + CHECKSUM_BYTES
        if self._off or not large.any():
            return SharedFiles([chunks])
        steady = np.zeros(len(large), bool)
        written = np.ones(len(large), bool)
        asked: dict[tuple[int, int], int] = {}  # chunks whose digests are compared, with their places among the chunks
        shared = SharedFiles([])
        keys = shared.keys
        for place in np.flatnonzero(large).tolist():
            chunk = array, number = int(chunks[0][place]), int(chunks[1][place])
            key = keys[chunk] = f"{catalog.names[array]}\t{catalog.encodings[array].text}", number
            sample = _sample(sources[array], number)
            known = self._before.get(key)
            if known is None:
                self._seen[key] = _SeenChunk(sample)
                shared.digests[chunk] = None
                continue
            self._seen[key] = known
            same, known.sample = sample == known.sample, sample
            if known.rest:
                known.rest -= 1
                if not known.rest:  # the next save compares with this one
                    shared.digests[chunk] = None
            elif not same:
                known.digest = None
            elif known.digest is None:
                shared.digests[chunk] = None
                steady[place] = True
            else:
                asked[chunk] = place
        if asked:
            digests = _digests_of(list(asked), sources, awaited)
            self._link(self._pending, shared, {keys[chunk]: (chunk, digest) for chunk, digest in digests.items()})
            linked = {row[:2] for row in shared.rows}
            for chunk, digest in digests.items():
                unchanged = self._note_digest(self._seen[keys[chunk]], digest)
                if chunk in linked:
                    written[asked[chunk]] = False
                    continue
                steady[asked[chunk]] = unchanged
                if self._seen[keys[chunk]].digest is not None:
                    shared.digests[chunk] = None
        shared.groups += [(chunks[0][some], chunks[1][some]) for some in (steady & written, ~steady & written)]
        return shared

    def _note_digest(self, known: _SeenChunk, digest: bytes) -> bool:
        """Note the digest of a chunk that may have changed; return whether it has not."""
        if digest == known.digest:
            known.changes = 0
            return True
        known.digest = digest
        known.changes += 1
        if known.changes >= _PATIENCE:
            known.rest, known.digest = min(2**known.changes, _LONGEST_REST), None
        return False

    def _link(self, new: _WrittenStep, shared: SharedFiles, held: dict[ChunkKey, _Held]) -> None:
        """Share files of which enough is unchanged, from the newest step that shares none with the newest of all."""
        apart = {path for step in self._apart if step in self._steps for path in self._steps[step].files} | {*new.files}
        tried: set[Location] = set()
        while not self._off and (chosen := list(self._choose(apart, tried, held))):
            at_once = max_concurrency(new.folder)
            given = parallel_map(partial(self._share, new.folder), chosen, at_once, name="holdfast-share")
            for one, identity in zip(chosen, given, strict=True):
                if identity is None:
                    held.update(one.chunks)  # another file may have them
                    continue
                apart.add(one.file.path)
                number = len(shared.linked)
                shared.linked.append(one.file._replace(identity=identity))
                for written in one.file.chunks:
                    if written.key in one.chunks:
                        chunk, _ = one.chunks[written.key]
                        shared.rows.append((*chunk, number, written.offset, written.length, written.checksum))

    def _choose(
        self, apart: Collection[str], tried: set[Location], held: dict[ChunkKey, _Held]
    ) -> Iterator[_Unchanged]:
        """Generate the files of earlier steps to share, and take out of ``held`` the chunks that they have."""
        chosen: set[str] = set()
        for step in reversed(self._steps.values()):
            for file in step.files.values():
                if file.path in apart or file.path in self._refused or file.path in chosen:
                    continue
                source = step.folder / file.path
                if file.size < SMALLEST_FILE_BYTES or source in tried:
                    continue
                found = [chunk for chunk in file.chunks if held.get(chunk.key, (None, b""))[1] == chunk.digest]
                if sum(chunk.length for chunk in found) < _LIVE * file.size:
                    continue
                chosen.add(file.path)
                tried.add(source)
                yield _Unchanged(source, file, {chunk.key: held.pop(chunk.key) for chunk in found})

    def _share(self, folder: Location, one: _Unchanged) -> FileIdentity | None:
        """Give a file a name in the folder of the new step; None if that is refused."""
        source, file, target = one.source, one.file, folder / one.file.path
        if self._off:
            return None
        try:
            found = source.identity()
            if found != file.identity and found[:3] == file.identity[:3] and not _has_chunks(source, file):
                raise OSError(errno.ESTALE, "it was changed after it was written, and its times were set back")
            identity = source.share(target, file.identity._replace(changed=found.changed))
            self._renew(file, identity)
            return identity
        except OSError as error:
            reason = error.strerror or error
            if error.errno not in _OF_ONE_FILE:
                self._off = True
                _logger.warning(
                    "%s: unchanged arrays are written again, as their files cannot be shared: %s", target, reason
                )
            elif error.errno != errno.ENOENT:  # a missing name says nothing about the file's other names
                self._refused.add(file.path)
                _logger.info("%s: written again, as it cannot be shared: %s", source, reason)
            return None

    def _renew(self, file: WrittenFile, identity: FileIdentity) -> None:
        """Note the new change time of a file, which another name of it has changed for all of its names."""
        for step in self._steps.values():
            known = step.files.get(file.path)
            if known is not None and known.identity.inode == identity.inode:
                step.files[file.path] = known._replace(identity=identity)

    @contextlib.contextmanager
    def names_removed(self) -> Iterator[None]:
        """Note the change times of shared files after a deletion of names: others are read before they are shared."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.names_removed())
            names = Counter(path for step in list(self._steps.values()) for path in step.files)
            files = [
                (step, file)
                for step in list(self._steps.values())
                for file in list(step.files.values())
                if names[file.path] > 1 and _identity_of(step, file) == file.identity
            ]
            yield
            for step, file in files:
                found = _identity_of(step, file)
                if found is not None and found[:3] == file.identity[:3]:
                    step.files[file.path] = file._replace(identity=found)

    def note(self, shared: SharedFiles, paths: Sequence[str], sizes: Sequence[int], table: Integers) -> None:
        """Note the new files, with rows of array, number in the array, file, offset, length and checksum."""
        step = self._pending
        if step is None or self._off:
            return
        chunks: dict[int, list[WrittenChunk]] = {}
        for array, number, file, offset, length, checksum in table.tolist() if shared.digests else ():
            digest = shared.digests.get((array, number))
            if digest is not None:
                key = shared.keys[array, number]
                self._seen[key].digest = digest
                chunks.setdefault(file, []).append(WrittenChunk(key, offset, length, checksum, digest))
        for number, found in chunks.items():
            identity = (step.folder / paths[number]).identity()
            step.files[paths[number]] = WrittenFile(paths[number], sizes[number], identity, found)
        step.files.update({file.path: file for file in shared.linked})


def _identity_of(step: _WrittenStep, file: WrittenFile) -> FileIdentity | None:
    with contextlib.suppress(OSError):
        return (step.folder / file.path).identity()
    return None


def _has_chunks(place: Location, file: WrittenFile) -> bool:
    """Read the chunks of a file; return whether they are unchanged: a new name sets the same time as a write."""
    buffer = Buffer()
    with contextlib.suppress(DamagedCheckpointError, StorageError), place.open_data(size=file.size) as opened:
        return all(
            crc32c(opened.read(chunk.offset, chunk.length, buffer)[:-CHECKSUM_BYTES]) == chunk.checksum
            for chunk in file.chunks
        )
    return False


def _sample(source: Source, number: int) -> bytes | None:
    """Return some of the bytes of a chunk, from all over it: if they differ, the chunk has changed."""
    data = chunk_view(source, number)
    if data is None:
        return None
    gap = max(_SAMPLE_GAP, len(data) // _SAMPLES)
    rows = len(data) // gap
    samples = data[: rows * gap].reshape(rows, gap)[:, :_SAMPLE_BYTES].reshape(-1)
    return content_digest(samples) + data[-_SAMPLE_BYTES:].tobytes()


def _digests_of(
    chunks: Sequence[tuple[int, int]], sources: Sources, awaited: threading.Event | None
) -> dict[tuple[int, int], bytes]:
    def digest(chunk: tuple[int, int]) -> bytes:
        return content_digest(chunk_bytes(sources[chunk[0]], chunk[1]))

    nbytes = sum(sources.specs[array].chunk_nbytes for array, _ in chunks)
    threads = min(_THREADS, os.cpu_count() or 1, 1 + nbytes // _SHARE)
    found = parallel_map(digest, chunks, threads, beside=1, awaited=awaited, name="holdfast-digest")
    return dict(zip(chunks, found, strict=True))
