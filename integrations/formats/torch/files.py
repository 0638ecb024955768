"""Read ``torch.save`` files, such as Lightning's ``.ckpt``, without torch or code execution; write them with torch.

The files are zip archives with uncompressed records for the pickle (``data.pkl``) and for each storage
(``data/0``, ...), in a folder with an arbitrary name (see ``torch.serialization``).

Containers keep their types, and tensors become arrays. Keys of a state dict, such as ``layers.0.weight``, are not
split. Objects of other classes cannot be created without their code, so loading them is an error. In a Lightning
checkpoint, however, such objects are left out and reported unless weights or optimizer states contain them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import zipfile
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ....engine.arrays import Problem, TreeSource, load_tree, naming
from ....engine.errors import DamagedCheckpointError, OptionError, shortened
from ....engine.pytree import MAX_DEPTH, NUMBER_KINDS, NUMBERS, format_path, tensor_like
from ....engine.sources import (
    FoundSteps,
    SingleTree,
    StoredArray,
    StoredTree,
    Unreadable,
    check_destination,
    crc32_of,
    first_bytes,
    refuse_leaves,
    replacing,
)
from ....engine.storage import DataReader, Entry, Location, os_errors
from .objects import BUILDERS, ByteOrder, Record, named_dtype, plain_array, storage_finder
from .pickles import Inert, Name, shown, unpickle

ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_NEEDED = ("state_dict", "optimizer_states")  # members of a Lightning checkpoint that must be read completely
_VISITS = 200_000  # base limit on visited nodes, to which the pickle size in bytes is added
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_GONE = object()
_PICKLE = "data.pkl"
_PICKLE_LIMIT = 512 << 20  # maximum size, in bytes, of a pickle
_RECORDS_LIMIT = 1 << 22
_BLOCK = 256 << 10  # minimum read size, in bytes; the next read is likely to be nearby
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class NoArchive(DamagedCheckpointError):  # noqa: N818 - no error to callers that accept other formats
    """Raised if a file does not begin with the zip magic number."""


class TorchArchive:
    """A torch.save archive, which may start at an ``offset`` in a larger file; record offsets include this offset."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        self._offset = offset
        self._size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
            raise NoArchive("it does not begin like a torch.save archive")
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"it is not a complete zip archive: {error}") from error
        if len(members) > _RECORDS_LIMIT or sum(member.file_size for member in members) > self._size:
            raise DamagedCheckpointError("its records claim more bytes than the archive has")
        if any(member.filename.endswith("/constants.pkl") or "/code/" in member.filename for member in members):
            raise DamagedCheckpointError("it is a TorchScript archive, which holds code; save its state_dict() instead")
        self.records: dict[str, Record] = {}  # keyed by name without the folder
        for info in members:
            _, _, name = info.filename.partition("/")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                raise DamagedCheckpointError(f"record {info.filename!r:.200} is compressed or encrypted")
            if name in self.records:
                raise DamagedCheckpointError(f"record {info.filename!r:.200} occurs twice")
            self.records[name] = self._record(file, info)
        if _PICKLE not in self.records:
            raise DamagedCheckpointError(
                f"it is a zip archive of {shortened((info.filename for info in members), 4) or 'nothing'}, without the "
                f"{_PICKLE} of torch.save"
            )
        self.pickle = self._small(file, _PICKLE, _PICKLE_LIMIT)
        order = self._small(file, "byteorder", 16) if "byteorder" in self.records else b"little"
        self.byte_order: ByteOrder = ">" if order == b"big" else "<"

    def _small(self, file: BinaryIO, name: str, limit: int) -> bytes:
        record = self.records[name]
        if record.length > limit:
            raise DamagedCheckpointError(f"record {name} has {record.length} bytes, more than the {limit} allowed")
        file.seek(record.offset - self._offset)
        content = file.read(record.length)
        if record.crc32 is not None and zlib.crc32(content) != record.crc32:
            raise DamagedCheckpointError(f"record {name} does not match the checksum in the archive")
        return content

    def _record(self, file: BinaryIO, info: zipfile.ZipInfo) -> Record:
        """Locate the data of a record, which follows a local header of variable length."""
        file.seek(max(0, info.header_offset))
        header = file.read(_LOCAL_HEADER.size)
        if info.header_offset < 0 or len(header) < _LOCAL_HEADER.size or not header.startswith(ZIP_MAGIC):
            raise DamagedCheckpointError(f"record {info.filename!r:.200} does not begin where the archive says")
        _, name, extra = _LOCAL_HEADER.unpack(header)
        begin = info.header_offset + _LOCAL_HEADER.size + name + extra
        if begin + info.file_size > self._size:
            raise DamagedCheckpointError(f"record {info.filename!r:.200} ends after the archive")
        # Zero means that the writer did not compute a checksum.
        return Record(self._offset + begin, info.file_size, info.CRC or None)

    def damage(self, reader: DataReader) -> Iterator[tuple[str, str]]:
        """Verify the checksums of all records; yield the name of each damaged record and the problem."""
        for name, record in self.records.items():
            try:
                checksum = crc32_of(reader, record.offset, record.length)
            except DamagedCheckpointError as error:
                yield name, str(error)
            else:
                if record.crc32 is not None and checksum != record.crc32:
                    yield name, f"expected the checksum {record.crc32:08x}, found {checksum:08x}"


class _Extent(io.RawIOBase):
    """A file object over a byte range of a file."""

    def __init__(self, reader: DataReader, offset: int, size: int) -> None:
        self._reader = reader
        self._offset = offset
        self._size = size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError("a position before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        buffer[:count] = self._reader.read(self._offset + self._position, count).data
        self._position += count
        return count


def opened(reader: DataReader, offset: int, size: int) -> BinaryIO:
    """Open a byte range of a file as a buffered file object, so that small reads fetch a whole block."""
    if offset + size > reader.size:
        raise DamagedCheckpointError(f"it is cut off: expected {offset + size} bytes, found {reader.size}")
    if size <= _BLOCK:
        return io.BytesIO(reader.read(offset, size).tobytes())
    return io.BufferedReader(_Extent(reader, offset, size), _BLOCK)


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if names or not location.exists() or location.is_directory():
        return None
    with location.open_data() as reader:
        magic = reader.read(0, min(reader.size, len(_LEGACY_MAGIC))).tobytes()
        if magic == _LEGACY_MAGIC:
            raise DamagedCheckpointError(
                f"{location} is in the format from before torch 1.6; load it with torch.load and save it again"
            )
        if not magic.startswith(ZIP_MAGIC):
            return None
        size = reader.size
        with naming(location, " cannot be read as a torch.save file"):
            archive = TorchArchive(opened(reader, 0, size))
            tree = read_object(archive)
    is_lightning = isinstance(tree, dict) and "pytorch-lightning_version" in tree and "state_dict" in tree
    left: list[str] = []
    tree = without_objects(tree, left, len(archive.pickle), _NEEDED if is_lightning else None)

    def check() -> list[Problem]:
        with location.open_data() as reader:
            return [Problem(location.name, "", f"{name}: {problem}") for name, problem in archive.damage(reader)]

    source = StoredTree.of(location, tree, size, check=check, left_out=left)
    step = tree.get("global_step") if is_lightning else None
    step = step if type(step) is int and step >= 0 else None
    return SingleTree("Lightning" if is_lightning else "torch", location, source, size, step)


_STEP_IN_NAME = re.compile(r"(?:^|.*[-_])step=([0-9]{1,18})(?:[-_.].*|)", re.DOTALL)
_DISTRIBUTED = ".metadata"  # file in every ``.ckpt`` directory that several processes saved together


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    """Find a Lightning run's ``.ckpt`` files, and get the step of each from its name or, failing that, its contents."""
    files: dict[int, tuple[bool, int, str]] = {}
    for entry in entries:
        if not entry.name.endswith(".ckpt"):
            continue
        file, step = location / entry.name, None
        match = _STEP_IN_NAME.fullmatch(entry.name)
        if match is not None and entry.is_directory:
            step = int(match[1]) if (file / _DISTRIBUTED).is_there() else None
        elif match is not None:
            begin = first_bytes(file, len(_LEGACY_MAGIC))
            step = int(match[1]) if begin.startswith((ZIP_MAGIC, _LEGACY_MAGIC)) else None
        elif not entry.is_directory:
            with contextlib.suppress(DamagedCheckpointError):  # the step of a damaged file is unknown
                checkpoint = recognise(file, frozenset())
                step = None if checkpoint is None else checkpoint.step
        if step is not None:
            # Prefer a file named after its step to `last.ckpt`. Lightning appends `-v1` to a name if it is taken.
            candidate = (match is not None, len(entry.name), entry.name)
            files[step] = max(candidate, files.get(step, candidate))
    return FoundSteps.of("Lightning", {step: location / name for step, (_, _, name) in files.items()})


def read_object(archive: TorchArchive, file: str = "") -> Any:
    """Unpickle the object in an archive into containers of :class:`StoredArray`, plain values, and inert objects."""
    return unpickle(archive.pickle, BUILDERS, storage_finder(archive.records, file, archive.byte_order))


def without_objects(
    tree: Any, left_out: list[str], pickle_bytes: int, needed: tuple[str, ...] | None = None, *, none: bool = False
) -> Any:
    """Replace objects that are not data with `Unreadable`, or remove them from members not listed in ``needed``.

    If ``needed`` is None, nothing is removed. ``none`` allows None as a dictionary key, unlike in stored trees.
    """
    walk = _Walk(left_out, _VISITS + pickle_bytes, none)
    if needed is None or not isinstance(tree, dict):
        return walk.visit(tree, "", 0)
    pruned = {}
    for key, value in tree.items():
        if not walk.is_key(key):
            left_out.append(f"an entry with the key {shown(key)}")
        elif key in needed:
            pruned[key] = walk.visit(value, str(key), 1)
        elif (kept := walk.prune(walk.visit(value, str(key), 1), str(key))) is not _GONE:
            pruned[key] = kept
    return pruned


@dataclass
class _Walk:
    left_out: list[str]
    visits: int  # number of nodes that may still be visited
    none: bool  # whether None is allowed as a dictionary key

    def visit(self, value: Any, path: str, depth: int) -> Any:
        self.visits -= 1
        if depth > MAX_DEPTH or self.visits < 0:
            raise DamagedCheckpointError(f"the tree is nested too deeply, or repeats itself too often, at {path:.200}")
        cls = type(value)
        if cls in _SCALARS or cls is StoredArray or isinstance(value, np.generic):
            return value
        if cls is dict or cls is OrderedDict:
            for odd in (key for key in value if not self.is_key(key)):
                return Unreadable(f"a dictionary with the key {shown(odd)}")
            return cls((key, self.visit(item, f"{path}/{key}", depth + 1)) for key, item in value.items())
        if cls in (list, tuple):
            return cls([self.visit(item, f"{path}/{index}", depth + 1) for index, item in enumerate(value)])
        if cls in (set, frozenset):
            return value if all(type(item) in _SCALARS for item in value) else Unreadable("a set of objects")
        return _leaf(plain_array(value))

    def is_key(self, key: Any) -> bool:
        if key is None:
            return self.none
        return type(key) in (str, bool) or (type(key) is int and -(1 << 63) <= key < 1 << 63)

    def prune(self, value: Any, path: str) -> Any:
        """Remove unreadable objects from dictionaries, and remove lists and tuples that contain such objects."""
        if isinstance(value, Unreadable):
            self.left_out.append(f"{path.lstrip('/')} ({value.what})")
            return _GONE
        if isinstance(value, dict):
            pairs = ((key, self.prune(item, f"{path}/{key}")) for key, item in value.items())
            return type(value)((key, item) for key, item in pairs if item is not _GONE)
        if isinstance(value, list | tuple) and (reason := _object_in(value)) is not None:
            self.left_out.append(f"{path.lstrip('/')} (it holds {reason})")
            return _GONE
        return value


def _object_in(value: Any) -> str | None:
    if isinstance(value, Unreadable):
        return value.what
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((reason for item in inner if (reason := _object_in(item)) is not None), None)


def _leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray | Unreadable):
        return value
    if isinstance(value, Name):
        try:
            named_dtype(value)
        except DamagedCheckpointError:
            return Unreadable(f"the class or function {value}")
        return str(value)  # a torch dtype, as text
    name = str(value.name) if isinstance(value, Inert) else type(value).__name__.lower().lstrip("_")
    return Unreadable(f"an object of {name}")


def export_torch(source: TreeSource, destination: Location, *, overwrite: bool = False) -> None:
    """Write a tree with ``torch.save``, atomically and durably. The entire tree is held in memory."""
    check_destination(destination, overwrite=overwrite)
    try:
        import torch
    except ImportError as error:
        raise OptionError("exporting for torch needs torch: pip install torch, or export safetensors") from error
    tree = plain(torch, load_tree(source, like=source.tree.build(templates(source))))
    if not destination.is_local:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        destination.write_bytes(buffer.getvalue())
        return
    with replacing(destination) as partial, os_errors(str(destination), "write"), open(partial, "xb") as file:
        try:
            torch.save(tree, file)
        except RuntimeError as error:  # raised on closing the archive, masking the original I/O error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def templates(source: TreeSource) -> list[Any]:
    """Return a meta tensor as a placeholder for each array, and ``...`` for every other leaf."""
    tensors: list[Any] = []
    problems = []
    for leaf in source.leaves:
        saved = leaf.saved
        is_array = saved.dtype is not None and saved.kind not in (*NUMBER_KINDS, "str", "bytes", "key", NUMBERS)
        tensors.append(tensor_like(saved) if is_array else ...)
        if tensors[-1] is None:
            name = saved.details.get("torch_dtype") or np.dtype(saved.dtype).newbyteorder("=").name
            problems.append(f"{format_path(leaf.name)}: torch cannot store elements of type {name}")
    refuse_leaves(source, "a file of torch", problems)
    return tensors


def plain(torch: Any, value: Any) -> Any:
    """Replace objects that ``weights_only`` rejects: defaultdicts, deques, numpy arrays, and numpy scalars."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)  # any array left here is the data of a PRNG key
    if isinstance(value, np.generic):
        return value.item()  # an element of a number sequence that is stored as one array
    if isinstance(value, dict):
        container: Any = dict if isinstance(value, defaultdict) else type(value)
        return container({key: plain(torch, item) for key, item in value.items()})
    if isinstance(value, list | tuple | deque):
        container = list if isinstance(value, deque) else type(value)
        return container([plain(torch, item) for item in value])
    return value
