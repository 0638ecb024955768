"""Process 0 puts the shares of all processes together, and makes sure that nothing is missing or there twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..coordination import Member
from ..errors import DamagedCheckpointError, TreeMismatchError
from ..format import ArrayIndex
from ..record import FileRecord
from ..tree import display
from .catalog import Catalog
from .fragments import DIGEST_BYTES, Fragment, describe_lines, described_lines
from .plan import CHECKSUM_BYTES

_LINES = 20  # of what differs that an error shows


class Merged(NamedTuple):
    """What all processes have written.

    Attributes:
        places: Where every chunk of every array lies.
        files: The data files by path.
    """

    places: ArrayIndex
    files: dict[str, FileRecord]


def make_fragment(
    catalog: Catalog, member: Member, token: str, places: NDArray[np.int64], sizes: Sequence[int]
) -> bytes:
    """Makes what a process tells of its share.

    Args:
        catalog: The arrays of the tree.
        member: The process.
        token: What the names of its files begin with.
        places: A row for each chunk that it wrote, as `planned_places` lists them.
        sizes: The lengths of its data files, in bytes.

    Returns:
        The fragment.
    """
    # Process 0 knows its own tree.
    digest, description = describe_lines(catalog.lines()) if member.index else (bytes(DIGEST_BYTES), b"")
    return Fragment(
        process=member.index,
        processes=member.count,
        token=token,
        digest=digest,
        description=description,
        sizes=sizes,
        chunks=catalog.starts[places[:, 0]] + places[:, 1],
        files=places[:, 2],
        offsets=places[:, 3],
        lengths=places[:, 4],
    ).encode()


def merge_fragments(catalog: Catalog, fragments: Sequence[bytes]) -> Merged:
    """Merges what every process has told.

    Args:
        catalog: The arrays of the tree.
        fragments: What each process has told, in their order.

    Returns:
        The places of all chunks, and the files that hold them.

    Raises:
        TreeMismatchError: A process saves another tree; names it and the leaves that differ.
        DamagedCheckpointError: A fragment is not what its process has sent, or a chunk is missing or there twice.
    """
    total = int(catalog.starts[-1])
    file_ids = np.full(total, -1, np.int32)
    offsets, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
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
                f"{source} belongs to another save: its files begin with {fragment.token}, "
                f"those of process 0 with {token}"
            )
        if process:
            if not own:
                own = catalog.lines()
                digest, _ = describe_lines(own)
            if fragment.digest != digest:
                raise _mismatch(process, own, described_lines(fragment.description, source))
        _check_chunks(catalog, fragment, file_ids, fragments)
        file_ids[fragment.chunks] = fragment.files + len(files)
        offsets[fragment.chunks] = fragment.offsets
        lengths[fragment.chunks] = fragment.lengths
        files |= {path: FileRecord(size) for path, size in zip(fragment.paths, fragment.sizes, strict=True)}
    _check_complete(catalog, file_ids, lengths, fragments)
    places = ArrayIndex(
        names=catalog.names,
        grids=[form.spec.grid for form in catalog.forms],
        metadata=[form.metadata for form in catalog.forms],
        files=list(files),
        file_ids=file_ids,
        offsets=offsets,
        lengths=lengths,
    )
    return Merged(places, files)


def _check_chunks(
    catalog: Catalog, fragment: Fragment, file_ids: NDArray[np.int32], fragments: Sequence[bytes]
) -> None:
    """Raises DamagedCheckpointError if chunks do not exist, or somebody has written them already."""
    chunks, process = fragment.chunks, fragment.process
    if chunks.size and (int(chunks.min()) < 0 or int(chunks.max()) >= len(file_ids)):
        raise DamagedCheckpointError(
            f"the fragment of process {process} is damaged: it holds a chunk that the tree does not have"
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
    """Raises DamagedCheckpointError if a chunk is missing, or has not the size that it should have."""
    missing = np.flatnonzero(file_ids < 0)
    if missing.size:
        chunk = int(missing[0])
        raise DamagedCheckpointError(
            f"{_chunk(catalog, chunk)} was not written, by process {_owner(catalog, chunk, len(fragments))} or any "
            f"other; {missing.size} of {len(file_ids)} chunks are missing"
        )
    counts = np.diff(catalog.starts)
    plain = np.array([form.compression is None for form in catalog.forms], bool)
    sizes = np.array([form.spec.chunk_nbytes + CHECKSUM_BYTES for form in catalog.forms], np.int64)
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
    return f"chunk {chunk - int(catalog.starts[array])} of the leaf {display(catalog.names[array])}"


def _owner(catalog: Catalog, chunk: int, processes: int) -> int:
    """Returns the process that is to write a chunk."""
    spread = catalog.spread(processes)
    for process in range(processes):
        arrays, numbers = spread.share(process)
        if chunk in catalog.starts[arrays] + numbers:
            return process
    return 0


def _mismatch(process: int, own: Sequence[str], theirs: Sequence[str]) -> TreeMismatchError:
    """Returns the error that says in which leaves the tree of a process differs from that of process 0."""
    expected, found = ({line.partition("\t")[0]: line.partition("\t")[2] for line in lines} for lines in (own, theirs))
    differences = []
    for name in sorted(expected.keys() | found.keys()):
        here, there = expected.get(name), found.get(name)
        if here is None:
            differences.append(f"{display(name)}: only process {process} has it, as {there}")
        elif there is None:
            differences.append(f"{display(name)}: process {process} does not have it; process 0 has it as {here}")
        elif here != there:
            differences.append(f"{display(name)}: process 0 has {here}, process {process} has {there}")
    shown = differences[:_LINES]
    if len(differences) > _LINES:
        shown.append(f"and {len(differences) - _LINES} more")
    return TreeMismatchError(
        f"process {process} saves another tree than process 0; all processes have to save the same leaves:", shown
    )
