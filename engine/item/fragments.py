"""What one process tells process 0 of its share of a tree: where it wrote which chunks, and what tree it saves."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..format import Cursor, crc32c, encode_varint, encode_varints

_MAGIC = b"HfFragm\0"
_VERSION = 1
DIGEST_BYTES = 16
_TOKEN = 4  # bytes
_DESCRIPTION_LIMIT = 1 << 30  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """One process's share of a tree.

    Attributes:
        process: The process.
        processes: How many there are.
        token: Eight hexadecimal digits that the names of its data files begin with, the same on all processes.
        digest: Of the description of the tree; zeros on process 0, which compares the others' with its own.
        description: The description, compressed; empty on process 0.
        sizes: The length of each of its data files, in bytes.
        chunks: The chunks that it wrote, in the order of their places, counted over all arrays.
        files: In which of its data files each lies; ascending.
        offsets: Where each starts in that file, in bytes; ascending.
        lengths: What each takes there, in bytes, with its checksum.
    """

    process: int
    processes: int
    token: str
    digest: bytes
    description: bytes
    sizes: Sequence[int]
    chunks: NDArray[np.int64]
    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def paths(self) -> list[str]:
        """The paths of its data files, relative to the tree's folder."""
        return [data_path(self.token, self.process, number) for number in range(len(self.sizes))]

    def encode(self) -> bytes:
        """Returns the fragment as bytes; some eight for each chunk."""
        same_file = np.diff(self.files, prepend=-1) == 0
        ends = np.concatenate(([0], (self.offsets + self.lengths)[:-1])) if len(self.chunks) else self.offsets
        steps = np.diff(self.chunks, prepend=0)
        parts = (
            _MAGIC,
            bytes([_VERSION]),
            bytes.fromhex(self.token),
            self.digest,
            *map(encode_varint, (self.process, self.processes, len(self.description), len(self.sizes))),
            encode_varint(len(self.chunks)),
            self.description,
            encode_varints(np.array(self.sizes, np.int64)),
            encode_varints((steps << 1) ^ (steps >> 63)),  # a step back becomes odd
            encode_varints(np.diff(self.files, prepend=0)),
            encode_varints(self.offsets - np.where(same_file, ends, 0)),
            encode_varints(self.lengths),
        )
        data = b"".join(parts)
        return data + struct.pack("<I", crc32c(data))

    @classmethod
    def decode(cls, data: bytes, source: str) -> Fragment:
        """Reads what :meth:`encode` returned.

        Args:
            data: The bytes.
            source: What to call them in errors.

        Returns:
            The fragment.

        Raises:
            DamagedCheckpointError: They are not what was encoded.
        """
        if len(data) < len(_MAGIC) + 4 or data[: len(_MAGIC)] != _MAGIC:
            raise DamagedCheckpointError(f"{source} is damaged: it does not begin as a fragment does")
        if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
            raise DamagedCheckpointError(f"{source} is damaged: its checksum does not match its {len(data)} bytes")
        cursor = Cursor(data[:-4], source)
        cursor.take(len(_MAGIC))
        version = cursor.byte()
        if version != _VERSION:
            cursor.fail(f"it has version {version}, this process reads version {_VERSION}: versions must not be mixed")
        token, digest = cursor.take(_TOKEN).hex(), cursor.take(DIGEST_BYTES)
        process, processes, described, files, count = (cursor.varint() for _ in range(5))
        description = cursor.take(described)
        sizes = cursor.varints(files)
        zigzag = cursor.varints(count)
        file_ids = np.cumsum(cursor.varints(count))
        gaps, lengths = cursor.varints(count), cursor.varints(count)
        cursor.finish()
        if count and int(file_ids[-1]) >= files:
            cursor.fail(f"it places chunks in data file {int(file_ids[-1])} of {files}")
        ends = np.cumsum(gaps + lengths)
        first = np.searchsorted(file_ids, np.arange(files))  # the first chunk of each file
        before = np.concatenate(([0], ends))[first]
        offsets = ends - before[file_ids] - lengths
        if count and ((offsets < 0) | (offsets + lengths > sizes[file_ids])).any():
            cursor.fail("it places chunks where its data files do not reach")
        return cls(
            process=process,
            processes=processes,
            token=token,
            digest=digest,
            description=description,
            sizes=sizes.tolist(),
            chunks=np.cumsum((zigzag >> 1) ^ -(zigzag & 1)),
            files=file_ids,
            offsets=offsets,
            lengths=lengths,
        )


def data_path(token: str, process: int, number: int) -> str:
    """Returns the path of a data file; no two saves have one in common."""
    return f"d/{token}.{process}.{number}"


def short_token(token: str) -> str:
    """Shortens a save's token to the eight hexadecimal digits that names of files begin with."""
    return hashlib.blake2b(token.encode(), digest_size=_TOKEN).hexdigest()


def describe_lines(lines: Sequence[str]) -> tuple[bytes, bytes]:
    """Digests what the leaves of a tree are, and compresses it.

    Args:
        lines: One line for each leaf.

    Returns:
        Their digest, and the lines compressed.
    """
    text = "\n".join(lines).encode()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest(), zlib.compress(text, 1)


def described_lines(description: bytes, source: str) -> list[str]:
    """Returns the lines that `describe_lines` has compressed.

    Raises:
        DamagedCheckpointError: These are not such lines.
    """
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
