"""Fragments: each process reports to process 0 which chunks of a tree it has written, and where.

Process 0 merges the fragments of all processes into one index, after checking that all describe the same tree and that
no chunk is missing or was written twice.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..distributed import ProcessInfo
from ..errors import DamagedCheckpointError, TreeMismatchError, first_lines
from ..format import ArrayIndex, Cursor, FileRecord, crc32c, encode_varint, encode_varints
from ..pytree import format_path
from .assignment import WriteAssignment
from .plan import CHECKSUM_BYTES, Catalog, Integers

_MAGIC = b"HfFragm\0"
_VERSION = 4
_DIGEST_BYTES = 16
_TOKEN = 4  # bytes
_DATA_PATH = re.compile(r"d/[0-9a-f]{8}\.[0-9]+\.[0-9]+")
_DESCRIPTION_LIMIT = 1 << 30  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    process: int
    processes: int  # number of processes
    token: str  # eight hexadecimal digits that begin the names of its data files, the same on every process
    digest: bytes  # digest of the description of its tree; zeros on process 0, which compares the others' with its own
    description: bytes  # what the leaves of its tree are, compressed; empty on process 0
    sizes: Sequence[int]  # length of each of its data files, in bytes
    # Paths of the last of these files: those of earlier saves, which this one shares. The others have names by number.
    shared: Sequence[str]
    chunks: Integers  # numbers of the chunks, counted over all arrays, in their order in the files
    files: Integers  # number of the data file of each chunk; ascending
    offsets: Integers  # first byte of each chunk in its file; ascending within a file
    lengths: Integers  # bytes of each chunk there, with its checksum
    checksums: NDArray[np.uint32]  # CRC-32C of each chunk

    @property
    def paths(self) -> list[str]:
        own = len(self.sizes) - len(self.shared)
        return [*(data_path(self.token, self.process, number) for number in range(own)), *self.shared]

    def encode(self) -> bytes:
        """Return the fragment as bytes, about twelve for each chunk."""
        same_file = np.diff(self.files, prepend=-1) == 0
        ends = np.concatenate(([0], (self.offsets + self.lengths)[:-1])) if len(self.chunks) else self.offsets
        steps = np.diff(self.chunks, prepend=0)
        shared = "\n".join(self.shared).encode()
        parts = (
            _MAGIC,
            bytes([_VERSION]),
            bytes.fromhex(self.token),
            self.digest,
            *map(encode_varint, (self.process, self.processes, len(self.description), len(self.sizes))),
            encode_varint(len(self.chunks)),
            encode_varint(len(shared)),
            self.description,
            shared,
            encode_varints(np.array(self.sizes, np.int64)),
            encode_varints((steps << 1) ^ (steps >> 63)),  # a step back becomes odd
            encode_varints(np.diff(self.files, prepend=0)),
            encode_varints(self.offsets - np.where(same_file, ends, 0)),
            encode_varints(self.lengths),
            self.checksums.astype("<u4").tobytes(),
        )
        data = b"".join(parts)
        return data + struct.pack("<I", crc32c(data))

    @classmethod
    def decode(cls, data: bytes, source: str) -> Fragment:
        """Read what :meth:`encode` returned; ``source`` names it in errors."""
        if len(data) < len(_MAGIC) + 4 or data[: len(_MAGIC)] != _MAGIC:
            raise DamagedCheckpointError(f"{source} is damaged: it does not begin with the mark of a fragment")
        if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
            raise DamagedCheckpointError(f"{source} is damaged: its checksum does not match its {len(data)} bytes")
        cursor = Cursor(data[:-4], source)
        cursor.take(len(_MAGIC))
        version = cursor.byte()
        if version != _VERSION:
            cursor.fail(f"it has version {version}, this process reads version {_VERSION}; run one version everywhere")
        token, digest = cursor.take(_TOKEN).hex(), cursor.take(_DIGEST_BYTES)
        process, processes, described, files, count, named = (cursor.varint() for _ in range(6))
        description = cursor.take(described)
        shared = cursor.take(named).decode("ascii", "replace").split("\n") if named else []
        sizes = cursor.varints(files)
        zigzag = cursor.varints(count)
        file_ids = np.cumsum(cursor.varints(count))
        gaps, lengths = cursor.varints(count), cursor.varints(count)
        checksums = np.frombuffer(cursor.take(4 * count), "<u4")
        cursor.finish()
        if len(shared) > files or not all(map(_DATA_PATH.fullmatch, shared)):
            cursor.fail(f"it shares files of earlier saves that cannot be such: {shared[:3]!r:.100}")
        if count and int(file_ids[-1]) >= files:
            cursor.fail(f"it places chunks in data file {int(file_ids[-1])} of {files}")
        ends = np.cumsum(gaps + lengths)
        first = np.searchsorted(file_ids, np.arange(files))  # the first chunk of each file
        before = np.concatenate(([0], ends))[first]
        offsets = ends - before[file_ids] - lengths
        if count and ((offsets < 0) | (offsets + lengths > sizes[file_ids])).any():
            cursor.fail("it places chunks beyond the end of its data files")
        return cls(
            process=process,
            processes=processes,
            token=token,
            digest=digest,
            description=description,
            sizes=sizes.tolist(),
            shared=shared,
            chunks=np.cumsum((zigzag >> 1) ^ -(zigzag & 1)),
            files=file_ids,
            offsets=offsets,
            lengths=lengths,
            checksums=checksums,
        )


def data_path(token: str, process: int, number: int) -> str:
    """Return the path of a data file. Two saves never share one."""
    return f"d/{token}.{process}.{number}"


def short_token(token: str) -> str:
    """Shorten a save's token to the eight hexadecimal digits that names of files begin with."""
    return hashlib.blake2b(token.encode(), digest_size=_TOKEN).hexdigest()


def make_fragment(
    catalog: Catalog,
    member: ProcessInfo,
    token: str,
    table: NDArray[np.int64],
    sizes: Sequence[int],
    shared: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
) -> bytes:
    """Encode what a process wrote: rows of array, number in the array, file, offset, length and checksum.

    ``shared`` are the paths of the last files, which belong to earlier saves, too; ``values`` go to `Catalog.lines`.
    """
    # Process 0 knows its own tree.
    digest, description = _describe(catalog.lines(values or {})) if member.index else (bytes(_DIGEST_BYTES), b"")
    return Fragment(
        process=member.index,
        processes=member.count,
        token=token,
        digest=digest,
        description=description,
        sizes=sizes,
        shared=shared,
        chunks=catalog.starts[table[:, 0]] + table[:, 1],
        files=table[:, 2],
        offsets=table[:, 3],
        lengths=table[:, 4],
        checksums=table[:, 5].astype(np.uint32),
    ).encode()


def _describe(lines: Sequence[str]) -> tuple[bytes, bytes]:
    text = "\n".join(lines).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), zlib.compress(text, 1)


def _described_lines(description: bytes, source: str) -> list[str]:
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(description, _DESCRIPTION_LIMIT)
        if not decompressor.eof:
            raise ValueError("it is cut off")
        return text.decode().split("\n")
    except (ValueError, zlib.error) as error:
        raise DamagedCheckpointError(
            f"{source} is damaged: its description of the tree cannot be read: {error}"
        ) from error


def merge_fragments(
    catalog: Catalog, fragments: Sequence[bytes], values: Mapping[str, str] | None = None
) -> tuple[ArrayIndex, dict[str, FileRecord]]:
    """Merge the fragments of all processes, in their order, into an index and the data files by path.

    ``values`` are those of process 0, which all processes must have.
    """
    total = int(catalog.starts[-1])
    file_ids = np.full(total, -1, np.int32)
    offsets, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    checksums = np.zeros(total, np.uint32)
    files: dict[str, FileRecord] = {}
    own: list[str] = []
    token, digest = "", b""
    for process, data in enumerate(fragments):
        source = f"the fragment of process {process}"
        fragment = Fragment.decode(data, source)
        if (fragment.process, fragment.processes) != (process, len(fragments)):
            raise DamagedCheckpointError(
                f"{source} of {len(fragments)} was written by process {fragment.process} of {fragment.processes}"
            )
        token = token or fragment.token
        if fragment.token != token:
            raise DamagedCheckpointError(
                f"{source} belongs to another save: the names of its files begin with {fragment.token}, "
                f"those of process 0 with {token}"
            )
        if process:
            if not own:
                own = catalog.lines(values or {})
                digest, _ = _describe(own)
            if fragment.digest != digest:
                raise _mismatch(process, own, _described_lines(fragment.description, source))
        _check_chunks(catalog, fragment, file_ids, fragments)
        file_ids[fragment.chunks] = fragment.files + len(files)
        offsets[fragment.chunks] = fragment.offsets
        lengths[fragment.chunks] = fragment.lengths
        checksums[fragment.chunks] = fragment.checksums
        records = [FileRecord(size) for size in fragment.sizes[: len(fragment.sizes) - len(fragment.shared)]]
        records += [FileRecord(size, shared=True) for size in fragment.sizes[len(records) :]]
        named = dict(zip(fragment.paths, records, strict=True))
        if len(named) < len(records) or not named.keys().isdisjoint(files):
            raise DamagedCheckpointError(f"{source} names a data file twice, or one of another process")
        files |= named
    _check_complete(catalog, file_ids, lengths, fragments)
    index = ArrayIndex(
        names=catalog.names,
        grids=[encoding.spec.grid for encoding in catalog.encodings],
        metadata=[encoding.metadata for encoding in catalog.encodings],
        files=list(files),
        file_ids=file_ids,
        offsets=offsets,
        lengths=lengths,
        checksums=checksums,
    )
    return index, files


def _check_chunks(
    catalog: Catalog, fragment: Fragment, file_ids: NDArray[np.int32], fragments: Sequence[bytes]
) -> None:
    chunks, process = fragment.chunks, fragment.process
    if chunks.size and (int(chunks.min()) < 0 or int(chunks.max()) >= len(file_ids)):
        raise DamagedCheckpointError(
            f"the fragment of process {process} is damaged: it lists a chunk that the tree does not have"
        )
    twice = chunks[file_ids[chunks] >= 0]
    if twice.size:
        others = [other for other in range(process) if twice[0] in Fragment.decode(fragments[other], "").chunks]
        raise DamagedCheckpointError(
            f"{_chunk(catalog, int(twice[0]))} was written twice: by process {others[0]} and by process {process}"
        )
    ordered = np.sort(chunks)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise DamagedCheckpointError(f"{_chunk(catalog, int(repeated[0]))} was written twice by process {process}")


def _check_complete(
    catalog: Catalog, file_ids: NDArray[np.int32], lengths: NDArray[np.int64], fragments: Sequence[bytes]
) -> None:
    missing = np.flatnonzero(file_ids < 0)
    if missing.size:
        chunk = int(missing[0])
        raise DamagedCheckpointError(
            f"{_chunk(catalog, chunk)} was not written: expected from process "
            f"{_owner(catalog, chunk, len(fragments))}; {missing.size} of {len(file_ids)} chunks are missing"
        )
    counts = np.diff(catalog.starts)
    plain = np.array([encoding.compression is None for encoding in catalog.encodings], bool)
    sizes = np.array([encoding.spec.chunk_nbytes + CHECKSUM_BYTES for encoding in catalog.encodings], np.int64)
    wrong = np.flatnonzero(np.repeat(plain, counts) & (lengths != np.repeat(sizes, counts)))
    if wrong.size:
        chunk = int(wrong[0])
        expected = int(np.repeat(sizes, counts)[chunk])
        raise DamagedCheckpointError(
            f"{_chunk(catalog, chunk)} takes {int(lengths[chunk])} bytes in the data file of process "
            f"{_owner(catalog, chunk, len(fragments))}; expected {expected}"
        )


def _chunk(catalog: Catalog, chunk: int) -> str:
    array = int(np.searchsorted(catalog.starts, chunk, "right")) - 1
    return f"chunk {chunk - int(catalog.starts[array])} of the leaf {format_path(catalog.names[array])}"


def _owner(catalog: Catalog, chunk: int, processes: int) -> int:
    assignment = WriteAssignment(catalog, processes)
    for process in range(processes):
        arrays, numbers = assignment.chunks_of(process)
        if chunk in catalog.starts[arrays] + numbers:
            return process
    return 0


def _mismatch(process: int, own: Sequence[str], theirs: Sequence[str]) -> TreeMismatchError:
    """Return the error that lists the leaves in which the tree of a process differs from that of process 0."""
    expected, found = ({line.partition("\t")[0]: line.partition("\t")[2] for line in lines} for lines in (own, theirs))
    differences = []
    for name in sorted(expected.keys() | found.keys()):
        here, there = expected.get(name), found.get(name)
        if here is None:
            differences.append(f"{format_path(name)}: only process {process} has it, as {there}")
        elif there is None:
            differences.append(f"{format_path(name)}: process {process} does not have it; process 0 has it as {here}")
        elif here != there:
            differences.append(f"{format_path(name)}: process 0 has {here}, process {process} has {there}")
    return TreeMismatchError(
        f"process {process} saves another tree than process 0, and nothing was committed: every process must save the "
        "same leaves, numbers and plain values, or a resume would give some of them those of another one. What differs "
        "on purpose is an extra of its own in a callback, and an item of hf.handlers.PerProcessCheckpointHandler in a "
        "manager:",
        first_lines(differences),
    )
