"""Encodes and merges fragments. A fragment lists the chunks that one process has written, with their locations.

Process 0 merges the fragments of all processes into one index, after checking that all of them describe the same
tree and that each chunk was written exactly once.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..distributed import ProcessInfo
from ..errors import DamagedCheckpointError, TreeMismatchError, first_lines
from ..format import ArrayIndex, FileRecord, compress_chunks, crc32c, decompress
from ..pytree import format_path
from .assignment import write_assignment
from .digests import CHECKSUM_BYTES, Integers, checksum_after
from .plan import Catalog

_VERSION = 5
_DATA_PATH = re.compile(r"d/[0-9a-f]{8}\.[0-9]+\.[0-9]+")
_LIMIT = 8 << 30  # maximum size of a decompressed fragment in bytes


class Fragment(NamedTuple):
    process: int
    processes: int  # number of processes
    token: str  # 8 hex digits that prefix the names of the data files; the same on every process
    digest: str  # digest of `description`; empty on process 0, which compares all other digests with its own
    sizes: Sequence[int]  # size of each data file in bytes
    # Paths of files shared with earlier saves; these files come last in `sizes`. All other files are named by number.
    shared: Sequence[str]
    description: str  # one line per leaf of the tree; empty on process 0
    chunks: Integers  # global chunk numbers, in the order of the chunks in the files
    files: Integers  # index of each chunk's data file
    offsets: Integers  # start of each chunk in its file
    lengths: Integers  # stored size of each chunk, including its checksum
    checksums: NDArray[np.uint32]  # CRC-32C of each chunk

    @property
    def written(self) -> int:
        """Number of data files that this save has written, excluding shared files."""
        return len(self.sizes) - len(self.shared)

    @property
    def paths(self) -> list[str]:
        return [*(data_path(self.token, self.process, number) for number in range(self.written)), *self.shared]

    def encode(self) -> bytes:
        """Encode the fragment; delta coding of the columns reduces it to about 5 bytes per chunk."""
        head = json.dumps([_VERSION, len(self.chunks), *self[:6]]).encode()  # the first six fields, up to `shared`
        columns = np.diff(np.stack((self.chunks, self.files, self.offsets, self.lengths)), axis=1, prepend=0)
        numbers = columns.astype("<i8").tobytes() + self.checksums.astype("<u4").tobytes()
        content = b"".join((head, b"\n", numbers, self.description.encode()))
        return compress_chunks([np.frombuffer(content, np.uint8)], 1)[0]

    @classmethod
    def decode(cls, data: bytes, process: int) -> Fragment:
        """Decode and check the fragment of a process."""
        try:
            if crc32c(data[:-CHECKSUM_BYTES]) != checksum_after(data):
                raise ValueError(f"its checksum does not match its {len(data)} bytes")
            head, _, rest = decompress(data[:-CHECKSUM_BYTES], _LIMIT).partition(b"\n")
            version, count, *facts = json.loads(head)
            if version != _VERSION:
                raise ValueError(f"it has version {version}, this process reads {_VERSION}; run one version everywhere")
            *_, sizes, shared = facts
            columns = np.frombuffer(rest, "<i8", 4 * count).reshape(4, count)
            checksums = np.frombuffer(rest, "<u4", count, columns.nbytes)
            description = rest[columns.nbytes + checksums.nbytes :].decode()
            chunks, files, offsets, lengths = columns.cumsum(axis=1)
            if len(shared) > len(sizes) or not all(map(_DATA_PATH.fullmatch, shared)):
                raise ValueError(f"these cannot be files of earlier saves that it shares: {shared[:3]!r:.100}")
            if count and not 0 <= files.min() <= files.max() < len(sizes):
                raise ValueError(f"it places chunks in data file {files.max()} of {len(sizes)}")
            ends = np.array(sizes, np.int64)[files]
            if ((offsets < 0) | (lengths < 0) | (offsets > ends - lengths)).any():
                raise ValueError("it places chunks beyond the end of its data files")
            return cls._make([*facts, description, chunks, files, offsets, lengths, checksums])
        except (DamagedCheckpointError, ValueError, TypeError) as error:
            raise DamagedCheckpointError(f"the fragment of process {process} is damaged: {error}") from error


def data_path(token: str, process: int, number: int) -> str:
    """Return the path of a data file. No two saves use the same path."""
    return f"d/{token}.{process}.{number}"


def make_fragment(
    catalog: Catalog,
    member: ProcessInfo,
    token: str,
    table: NDArray[np.int64],
    sizes: Sequence[int],
    shared: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
) -> Fragment:
    """Build a fragment; the columns of ``table`` are array, chunk number, file, offset, length and checksum."""
    description = "\n".join(catalog.lines(values or {})) if member.index else ""  # not needed on process 0
    return Fragment(
        process=member.index,
        processes=member.count,
        token=token,
        digest=xxhash.xxh3_128_hexdigest(description.encode()) if member.index else "",
        description=description,
        sizes=sizes,
        shared=shared,
        chunks=catalog.starts[table[:, 0]] + table[:, 1],
        files=table[:, 2],
        offsets=table[:, 3],
        lengths=table[:, 4],
        checksums=table[:, 5].astype(np.uint32),
    )


def merge_fragments(
    catalog: Catalog, fragments: Iterable[Fragment], processes: int, values: Mapping[str, str] | None = None
) -> tuple[ArrayIndex, dict[str, FileRecord]]:
    """Merge fragments, given in process order, into an index and file records; raise an error if their trees differ."""
    total = int(catalog.starts[-1])
    file_ids = np.full(total, -1, np.int32)
    offsets, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    checksums = np.zeros(total, np.uint32)
    files: dict[str, FileRecord] = {}
    lines: list[str] = []
    token = digest = ""
    first_files: list[int] = []  # index of each process's first data file
    for process, fragment in enumerate(fragments):
        source = f"the fragment of process {process}"
        if (fragment.process, fragment.processes) != (process, processes):
            raise DamagedCheckpointError(
                f"{source} of {processes} was written by process {fragment.process} of {fragment.processes}"
            )
        token = token or fragment.token
        if fragment.token != token:
            raise DamagedCheckpointError(
                f"{source} belongs to another save: the names of its files begin with {fragment.token}, "
                f"those of process 0 with {token}"
            )
        if process:
            if not lines:
                lines = catalog.lines(values or {})
                digest = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
            if fragment.digest != digest:
                raise _mismatch(process, lines, fragment.description.split("\n"))
        _check_chunks(catalog, fragment, file_ids, first_files)
        first_files.append(len(files))
        file_ids[fragment.chunks] = fragment.files + len(files)
        offsets[fragment.chunks] = fragment.offsets
        lengths[fragment.chunks] = fragment.lengths
        checksums[fragment.chunks] = fragment.checksums
        records = [FileRecord(size, durable=processes > 1) for size in fragment.sizes[: fragment.written]]
        records += [FileRecord(size, shared=True) for size in fragment.sizes[fragment.written :]]
        named = dict(zip(fragment.paths, records, strict=True))
        if len(named) < len(records) or not named.keys().isdisjoint(files):
            raise DamagedCheckpointError(f"{source} names a data file twice, or one of another process")
        files |= named
    _check_complete(catalog, file_ids, lengths, processes)
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
    catalog: Catalog, fragment: Fragment, file_ids: NDArray[np.int32], first_files: Sequence[int]
) -> None:
    chunks, process = fragment.chunks, fragment.process
    if chunks.size and (int(chunks.min()) < 0 or int(chunks.max()) >= len(file_ids)):
        raise DamagedCheckpointError(
            f"the fragment of process {process} is damaged: it lists a chunk that the tree does not have"
        )
    twice = chunks[file_ids[chunks] >= 0]
    if twice.size:
        other = bisect_right(first_files, int(file_ids[twice[0]])) - 1
        raise DamagedCheckpointError(
            f"{_chunk(catalog, int(twice[0]))} was written twice: by process {other} and by process {process}"
        )
    ordered = np.sort(chunks)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise DamagedCheckpointError(f"{_chunk(catalog, int(repeated[0]))} was written twice by process {process}")


def _check_complete(catalog: Catalog, file_ids: NDArray[np.int32], lengths: NDArray[np.int64], processes: int) -> None:
    missing = np.flatnonzero(file_ids < 0)
    if missing.size:
        chunk = int(missing[0])
        raise DamagedCheckpointError(
            f"{_chunk(catalog, chunk)} was not written: expected from process "
            f"{_owner(catalog, chunk, processes)}; {missing.size} of {len(file_ids)} chunks are missing"
        )
    counts = np.diff(catalog.starts)
    plain = catalog.column(lambda encoding: encoding.compression is None, bool)
    expected = np.repeat(catalog.lengths, counts)
    wrong = np.flatnonzero(np.repeat(plain, counts) & (lengths != expected))
    if wrong.size:
        chunk = int(wrong[0])
        raise DamagedCheckpointError(
            f"{_chunk(catalog, chunk)} takes {int(lengths[chunk])} bytes in the data file of process "
            f"{_owner(catalog, chunk, processes)}; expected {expected[chunk]}"
        )


def _chunk(catalog: Catalog, chunk: int) -> str:
    array = int(np.searchsorted(catalog.starts, chunk, "right")) - 1
    return f"chunk {chunk - int(catalog.starts[array])} of the leaf {format_path(catalog.names[array])}"


def _owner(catalog: Catalog, chunk: int, processes: int) -> int:
    assignment = write_assignment(catalog, processes)
    for process in range(processes):
        arrays, numbers = assignment.chunks_of(process)
        if chunk in catalog.starts[arrays] + numbers:
            return process
    return 0


def _mismatch(process: int, *lines: Sequence[str]) -> TreeMismatchError:
    """Return an error that lists the leaves that differ between a process and process 0, given both descriptions."""
    ours, theirs = ({line.partition("\t")[0]: line.partition("\t")[2] for line in described} for described in lines)
    differences = []
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if here is None:
            differences.append(f"{format_path(name)}: only process {process} has it, as {there}")
        elif there is None:
            differences.append(f"{format_path(name)}: process {process} does not have it; process 0 has it as {here}")
        elif here != there:
            differences.append(f"{format_path(name)}: process 0 has {here}, process {process} has {there}")
    return TreeMismatchError(
        f"process {process} saves a different tree from process 0, so nothing was committed: every process must save "
        "the same leaves, numbers and plain values, or a resume would give some of them another process's values. "
        "What differs on purpose belongs in a separate extra of a callback, or in an item of "
        "hf.handlers.PerProcessCheckpointHandler in a manager:",
        first_lines(differences),
    )
