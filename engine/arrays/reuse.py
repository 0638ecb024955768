"""Detects chunks that have not changed since earlier saves, and shares the files of earlier steps that contain them.

Chunks are compared by a 128-bit digest of the bytes to be written, because neither torch's version counters nor the
identity of jax arrays proves that bytes are equal. The digest of a chunk is computed when the chunk is written. Later
saves compute the digests of their chunks, and share each file of an earlier step that contains enough unchanged chunks.

Digests are kept in memory for the lifetime of a manager. Chunks that change in every save add almost no cost, because a
sample of each chunk is compared first. Chunks that change only outside their sample are compared less and less often.

A step shares no files with the step before it, so one bad sector never damages both the newest step and its fallback.
Files thus form two separate lineages. In an object store, shared files are copied, and copies may inherit damage.
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

ChunkKey = tuple[str, int]  # an array's name and encoding, and a chunk number
_Held = tuple[tuple[int, int], bytes]  # a chunk of the tree, given by array number and chunk number, and its digest

_SMALLEST_CHUNK = 64 << 10  # maximum size, in bytes, of a chunk that is faster to write than to compare
SMALLEST_FILE_BYTES = 1 << 20  # minimum size, in bytes, of a shared file; smaller files are rewritten
_LIVE = 0.5  # minimum fraction of unchanged bytes in a shared file; all other bytes waste disk space
_SAMPLES = 256
_SAMPLE_BYTES = 64  # size of a sample in bytes
_SAMPLE_GAP = 4096  # minimum distance in bytes between samples
_THREADS = 4
_SHARE = 16 << 20  # bytes to digest per thread
_PATIENCE = 2  # a chunk is compared less often once its sample has missed this many consecutive changes
_LONGEST_REST = 64  # longest pause between comparisons, in saves
_REMEMBERED = 64  # number of recent steps whose files are remembered

# Error numbers of problems with a single file: it is missing, has changed, or has reached its link limit.
_OF_ONE_FILE = (errno.ENOENT, errno.ESTALE, errno.EMLINK, errno.EAGAIN)


class WrittenChunk(NamedTuple):
    """A chunk in a data file, and the digest of its uncompressed content."""

    key: ChunkKey
    offset: int
    length: int
    checksum: int
    digest: bytes


class WrittenFile(NamedTuple):
    path: str  # relative to the item's folder; unique to a save, so it also identifies a file's lineage
    size: int
    identity: FileIdentity
    chunks: Sequence[WrittenChunk]  # chunks with a known digest


@dataclass(slots=True)
class _WrittenStep:
    folder: Location
    files: dict[str, WrittenFile] = field(default_factory=dict)


@dataclass(slots=True)
class _SeenChunk:
    """The state of a chunk as observed by the last save."""

    sample: bytes | None  # sampled bytes; None if the chunk is not contiguous in memory
    digest: bytes | None = None
    changes: int = 0  # consecutive changes that the sample missed
    rest: int = 0  # number of saves to skip before the next comparison

    def keeps_digest(self, digest: bytes) -> bool:
        """Record the digest of a chunk whose sample is unchanged; return True if the digest is also unchanged."""
        if digest == self.digest:
            self.changes = 0
            return True
        self.digest = digest
        self.changes += 1
        if self.changes >= _PATIENCE:
            self.rest, self.digest = min(2**self.changes, _LONGEST_REST), None
        return False


@dataclass(slots=True)
class SharedFiles:
    """The chunks that a save shares with earlier steps, and the chunks that it must write."""

    # Chunks to write, in two groups that never share a file: recently unchanged chunks, and all other chunks.
    groups: list[ChunkIds]
    linked: list[WrittenFile] = field(default_factory=list)  # files of earlier steps, linked into this step
    # One row per chunk in the linked files: array, chunk number, index in `linked`, offset, length and checksum.
    rows: list[tuple[int, ...]] = field(default_factory=list)
    digests: Digests = field(default_factory=dict)  # filled while writing; compared by later saves
    keys: dict[tuple[int, int], ChunkKey] = field(default_factory=dict)


class _Unchanged(NamedTuple):
    """A file of an earlier step, and its unchanged chunks."""

    source: Location
    file: WrittenFile
    chunks: dict[ChunkKey, _Held]


class WrittenSteps:
    """The data files that this process wrote for one item in recent steps.

    A manager has one instance per item. It calls ``begin`` before each save and ``commit`` after the save has been
    committed. The writer calls ``share`` before it writes a group of chunks, and ``note`` afterwards.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _WrittenStep] = {}  # keyed by step, in commit order
        self._seen: dict[ChunkKey, _SeenChunk] = {}
        self._before: dict[ChunkKey, _SeenChunk] = {}  # chunks as observed by the previous save
        self._parts: dict[str, WrittenSteps] = {}
        self._pending: _WrittenStep | None = None
        self._step = -1
        self._apart: Collection[int] = ()
        self._refused: set[str] = set()  # paths of files that cannot be shared
        self._off = False  # True once the storage has turned out not to support sharing files

    def part(self, name: str) -> WrittenSteps:
        """Return the instance for a part of the item; each part has its own folder."""
        if name not in self._parts:
            self._parts[name] = WrittenSteps()
            self._parts[name].begin(self._step, self._apart, lambda _: True)
        return self._parts[name]

    def begin(self, step: int, apart: Collection[int], is_there: Callable[[int], bool]) -> None:
        """Begin saving a step, which must not share files with incomplete steps or with the steps in ``apart``."""
        self._step, self._apart, self._pending = step, apart, None
        self._steps = {step: written for step, written in self._steps.items() if is_there(step)}
        for part in self._parts.values():
            part.begin(step, apart, is_there)

    def commit(self) -> None:
        """Record that the save has been committed, so that later saves may share its files."""
        if self._pending is not None:
            self._steps.pop(self._step, None)
            self._steps[self._step] = self._pending
            self._pending = None
            if len(self._steps) > _REMEMBERED:
                del self._steps[next(iter(self._steps))]
        for part in self._parts.values():
            part.commit()

    def forget(self) -> None:
        """Stop sharing files of earlier steps. Called if a step is damaged, because other steps may share its files."""
        self._steps.clear()
        self._pending = None
        for part in self._parts.values():
            part.forget()

    def share(
        self,
        folder: Location,
        catalog: Catalog,
        sources: Sources,
        chunks: ChunkIds,  # the chunks that this process must write
        awaited: threading.Event | None = None,
    ) -> SharedFiles:
        """Link files of earlier steps that contain unchanged chunks; return these files and the chunks to write."""
        if self._pending is None:  # the first group of the save
            self._pending = _WrittenStep(folder)
            self._before, self._seen = self._seen, {}
        large = catalog.lengths[chunks[0]] > _SMALLEST_CHUNK + CHECKSUM_BYTES
        if self._off or not large.any():
            return SharedFiles([chunks])
        steady = np.zeros(len(large), bool)
        written = np.ones(len(large), bool)
        compared: dict[tuple[int, int], int] = {}  # positions of the chunks to compare by digest
        shared = SharedFiles([])
        keys = shared.keys
        for position in np.flatnonzero(large).tolist():
            chunk = array, number = int(chunks[0][position]), int(chunks[1][position])
            key = keys[chunk] = f"{catalog.names[array]}\t{catalog.encodings[array].text}", number
            sample = _sample(sources[array], number)
            seen = self._before.get(key)
            if seen is None:
                self._seen[key] = _SeenChunk(sample)
                shared.digests[chunk] = None
                continue
            self._seen[key] = seen
            same, seen.sample = sample == seen.sample, sample
            if seen.rest:
                seen.rest -= 1
                if not seen.rest:  # compute a digest, which the next save compares with its own
                    shared.digests[chunk] = None
            elif not same:
                seen.digest = None
            elif seen.digest is None:
                shared.digests[chunk] = None
                steady[position] = True
            else:
                compared[chunk] = position
        if compared:
            digests = _digests_of(list(compared), sources, awaited)
            self._link(self._pending, shared, {keys[chunk]: (chunk, digest) for chunk, digest in digests.items()})
            linked = {row[:2] for row in shared.rows}
            for chunk, digest in digests.items():
                seen = self._seen[keys[chunk]]
                unchanged = seen.keeps_digest(digest)
                if chunk in linked:
                    written[compared[chunk]] = False
                    continue
                steady[compared[chunk]] = unchanged
                if seen.digest is not None:
                    shared.digests[chunk] = None
        shared.groups += [(chunks[0][some], chunks[1][some]) for some in (steady & written, ~steady & written)]
        return shared

    def _link(self, new: _WrittenStep, shared: SharedFiles, held: dict[ChunkKey, _Held]) -> None:
        """Link files that have enough unchanged chunks, preferring the newest steps whose files may be shared."""
        apart = {path for step in self._apart if step in self._steps for path in self._steps[step].files} | {*new.files}
        tried: set[Location] = set()
        while not self._off and (chosen := list(self._choose(apart, tried, held))):
            at_once = max_concurrency(new.folder)
            identities = parallel_map(partial(self._share, new.folder), chosen, at_once, name="holdfast-share")
            for (_, file, unchanged), identity in zip(chosen, identities, strict=True):
                if identity is None:
                    held.update(unchanged)  # put the chunks back, because another file may also contain them
                    continue
                apart.add(file.path)
                number = len(shared.linked)
                shared.linked.append(file._replace(identity=identity))
                for written in file.chunks:
                    if written.key in unchanged:
                        chunk, _ = unchanged[written.key]
                        shared.rows.append((*chunk, number, written.offset, written.length, written.checksum))

    def _choose(
        self, apart: Collection[str], tried: set[Location], held: dict[ChunkKey, _Held]
    ) -> Iterator[_Unchanged]:
        """Yield the files of earlier steps to share, and remove their chunks from ``held``."""
        chosen: set[str] = set()
        for step in reversed(self._steps.values()):
            for file in step.files.values():
                if file.path in apart or file.path in self._refused or file.path in chosen:
                    continue
                source = step.folder / file.path
                if file.size < SMALLEST_FILE_BYTES or source in tried:
                    continue
                unchanged = [chunk for chunk in file.chunks if held.get(chunk.key, (None, b""))[1] == chunk.digest]
                if sum(chunk.length for chunk in unchanged) < _LIVE * file.size:
                    continue
                chosen.add(file.path)
                tried.add(source)
                yield _Unchanged(source, file, {chunk.key: held.pop(chunk.key) for chunk in unchanged})

    def _share(self, folder: Location, unchanged: _Unchanged) -> FileIdentity | None:
        """Link a file into the new step's folder and return its identity; return None if it cannot be shared."""
        source, file, _ = unchanged
        target = folder / file.path
        if self._off:
            return None
        try:
            current = source.identity()
            if current != file.identity and current[:3] == file.identity[:3] and not _has_chunks(source, file):
                raise OSError(errno.ESTALE, "it was changed after it was written, and its times were set back")
            identity = source.share(target, file.identity._replace(changed=current.changed))
            for step in self._steps.values():  # linking changes the file's change time, which other steps have recorded
                named = step.files.get(file.path)
                if named is not None and named.identity.inode == identity.inode:
                    step.files[file.path] = named._replace(identity=identity)
            return identity
        except OSError as error:
            reason = error.strerror or error
            if error.errno not in _OF_ONE_FILE:
                self._off = True
                _logger.warning(
                    "%s: unchanged arrays are written again because their files cannot be shared: %s", target, reason
                )
            elif error.errno != errno.ENOENT:  # the file may still exist under another name
                self._refused.add(file.path)
                _logger.info("%s: written again because it cannot be shared: %s", source, reason)
            return None

    @contextlib.contextmanager
    def names_removed(self) -> Iterator[None]:
        """Refresh recorded change times after the ``with`` block has removed some hard links to shared files."""
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
                identity = _identity_of(step, file)
                if identity is not None and identity[:3] == file.identity[:3]:
                    step.files[file.path] = file._replace(identity=identity)

    def note(self, shared: SharedFiles, paths: Sequence[str], sizes: Sequence[int], table: Integers) -> None:
        """Record new files; the columns of ``table`` are array, chunk number, file, offset, length and checksum."""
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
        for number, written in chunks.items():
            identity = (step.folder / paths[number]).identity()
            step.files[paths[number]] = WrittenFile(paths[number], sizes[number], identity, written)
        step.files.update({file.path: file for file in shared.linked})


def _identity_of(step: _WrittenStep, file: WrittenFile) -> FileIdentity | None:
    with contextlib.suppress(OSError):
        return (step.folder / file.path).identity()
    return None


def _has_chunks(location: Location, file: WrittenFile) -> bool:
    """Return True if a file's chunks match their checksums. Timestamps prove nothing, because linking changes them."""
    buffer = Buffer()
    with contextlib.suppress(DamagedCheckpointError, StorageError), location.open_data(size=file.size) as opened:
        return all(
            crc32c(opened.read(chunk.offset, chunk.length, buffer)[:-CHECKSUM_BYTES]) == chunk.checksum
            for chunk in file.chunks
        )
    return False


def _sample(source: Source, number: int) -> bytes | None:
    """Return a sample of bytes spread over a chunk; if the sample differs, the chunk has changed."""
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
    digests = parallel_map(digest, chunks, threads, beside=1, awaited=awaited, name="holdfast-digest")
    return dict(zip(chunks, digests, strict=True))
