"""JSON documents with a digest, including the commit record of a checkpoint.

A document is one JSON object: ``{"format": "holdfast", "version": 1, "kind": ..., <body>, "digest": "crc32c:..."}``.
The digest is the CRC-32C of the compact JSON text of all other members in file order. It covers the names, values and
order of the members, but not whitespace. This rule applies to every version of the format.

The commit record is the last file that a save writes. It lists all folders and files of the checkpoint with their
sizes, and a digest of each file without internal digests. A checkpoint exists if and only if its record is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import google_crc32c

from ..errors import DamagedCheckpointError, FormatVersionError
from .archive import ARCHIVE, is_inside, offsets_in_archive

FORMAT = "holdfast"
VERSION = 3  # newest format version that can be read
_ARCHIVES_VERSION = 2  # first format version in which items can be stored as zip files
_PACKS_VERSION = 3  # first format version in which a zip file can contain the zip files of several processes

DOCUMENT_LIMIT = 128 << 20  # maximum size in bytes of a document that is read or written

_RESERVED = ("format", "version", "kind", "digest")
_READABLE = frozenset({"checkpoint"})  # document kinds that are formatted for human readers; all others are compact
_LEVELS = 4  # number of indented levels (document, items, item, files); deeper objects are written on one line
_DIGEST = re.compile(r"crc32c:[0-9a-f]{8}")
_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_spaced = json.JSONEncoder(allow_nan=False).encode

RECORD = "checkpoint.json"  # name of the commit record inside a checkpoint's directory
PARTIAL = "checkpoint.partial"  # marks a directory with an uncommitted save; removed by the commit
DELETED = "checkpoint.deleted"  # marks a directory whose checkpoint is being deleted; removed last
_LATEST = 6e10  # latest valid time, in seconds since 1970-01-01 UTC; within the range of date libraries
OWNER = "owner.json"  # name of the file that identifies the run writing to a directory; locked by that run
PADDED = "zero-padded_0"  # folder whose name causes an error in holdfast versions that do not support zero-padded names
# Names of step folders: an optional series and the step number, possibly with leading zeros.
STEP_FOLDER = re.compile(rf"(?!{PADDED}$)(.*[_-])?([0-9]+)", re.DOTALL)
WITNESS = "witness.jsonl"  # records the steps after a save, for comparison on resume; not listed in commit records
WITNESSES = re.compile(r"witness(-[1-9][0-9]*)?\.jsonl")  # names of all witness files, one per process
WITNESS_LIMIT = 128 << 10  # maximum number of bytes read from a witness file

ITEM = "state"  # item name in a checkpoint with a single item
TREES = "pytree"  # kind of an item that is a pytree
PROCESSES = "processes"  # kind of an item with one tree per process
OWN_FOLDER = "own"  # folder inside a tree's folder that contains one tree per process
COMPONENTS = "components"  # kind of an item that consists of components, each with its own tree
COMPONENT = "component.json"  # name of the file in a component's tree folder that describes the component
GRAPH = "graph.json"  # name of the file in a tree's folder that describes its objects and the edges between them
GRAPH_KIND = "graph"  # document kind of the graph file

_KIND = "checkpoint"
_PACK = re.compile(rf"(0|[1-9][0-9]*)-([1-9][0-9]*)\{ARCHIVE}")  # name of a zip file with several processes' zip files


def encode_document(kind: str, body: dict[str, Any], *, version: int = 1) -> bytes:
    """Encode a document; ``version`` is the oldest format version whose readers understand the document."""
    taken = [name for name in _RESERVED if name in body]
    if taken:
        raise ValueError(f"the body of a document cannot have members called {', '.join(taken)}")
    document = {"format": FORMAT, "version": version, "kind": kind, **body}
    try:
        text = _compact(document)
        digest = _digest(text)
        if kind in _READABLE:
            text = _readable({**document, "digest": digest})
        else:
            text = f'{text[:-1]},"digest":"{digest}"}}'
    except RecursionError as error:
        raise ValueError(f"the {kind} document is nested too deeply or contains itself") from error
    if len(text) >= DOCUMENT_LIMIT:
        raise ValueError(f"the {kind} document has {len(text)} bytes; the limit is {DOCUMENT_LIMIT}")
    return text.encode("ascii") + b"\n"


def _readable(value: Any, levels: int = _LEVELS, margin: str = "\n") -> str:
    """Encode JSON, indenting only objects that contain objects. This is much faster than `json` with an indent."""
    is_object = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if levels == 0 or not is_object or (levels < _LEVELS and not any(isinstance(x, dict) for x in value.values())):
        return _spaced(value)
    inner = f"{margin} "
    members = [f"{_spaced(key)}: {_readable(member, levels - 1, inner)}" for key, member in value.items()]
    return f"{{{inner}{f',{inner}'.join(members)}{margin}}}"


def decode_document(data: bytes, kind: str, *, source: str) -> dict[str, Any]:
    """Verify a document and return its body."""

    def damaged(reason: str, cause: Exception | None = None) -> NoReturn:
        raise DamagedCheckpointError(f"{source} is damaged: {reason}") from cause

    if len(data) > DOCUMENT_LIMIT:
        damaged(f"it has {len(data)} bytes; the limit is {DOCUMENT_LIMIT}")
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as error:
        damaged("it is nested too deeply", error)
    except ValueError as error:
        damaged(f"it is not JSON ({error})", error)
    if not isinstance(document, dict):
        damaged(f"expected a JSON object, found {type(document).__name__}")
    digest = document.pop("digest", None)
    ours = document.get("format") == FORMAT
    version = document.get("version")
    version = version if type(version) is int else 0
    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
        try:
            computed = _written_digest(data, digest) or _digest(_compact(document))
        except (ValueError, RecursionError) as error:
            damaged(f"its values cannot be checked ({error})", error)
        if computed != digest:
            damaged(f"expected the digest {digest}, computed {computed} from its content")
    elif ours and version <= VERSION:
        damaged("it has no digest")
    if not ours:
        raise FormatVersionError(f"{source} was not written by holdfast: its format is {document.get('format')!r}")
    if version < 1:
        damaged(f"its version is {document.get('version')!r}")
    if version > VERSION:
        raise FormatVersionError(
            f"{source} has format version {version}, but this holdfast reads up to version {VERSION}; "
            "upgrade holdfast to read it"
        )
    if document.get("kind") != kind:
        damaged(f"expected a {kind!r} document, found {document.get('kind')!r}")
    return {name: value for name, value in document.items() if name not in _RESERVED}


def _digest(text: str) -> str:
    return f"crc32c:{google_crc32c.value(text.encode('ascii')):08x}"


def _written_digest(data: bytes, digest: str) -> str | None:
    """Return ``digest`` if it matches the bytes of a compact document; None if not, for example after reformatting."""
    end = f',"digest":"{digest}"}}\n'.encode("ascii")
    if not data.endswith(end):
        return None
    computed = f"crc32c:{google_crc32c.extend(google_crc32c.value(data[: -len(end)]), b'}'):08x}"
    return computed if computed == digest else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an item."""

    size: int  # length in bytes
    crc32c: int | None = None  # digest of the whole file; None if the file contains its own digests
    # For a zip file that contains the zip files of several processes: the size in bytes and the digest of each.
    members: tuple[tuple[int, int], ...] = ()
    # For a zip file inside another zip file: the offset in the outer file, and the outer file's length. Not stored.
    within: tuple[int, int] | None = None
    # Whether the file is shared with an earlier step. Not stored, because the earlier step may be deleted.
    shared: bool = field(default=False, compare=False)
    # Whether the contents would survive a power failure; otherwise, the commit syncs the file. Not stored.
    durable: bool = field(default=True, compare=False)


def unsynced(files: Mapping[str, FileRecord]) -> set[str]:
    """Return the paths of all files that are not yet durable and of their parent folders; "" is the root folder."""
    paths = {path for path, file in files.items() if not file.durable}
    return paths | {path[:end] for path in paths for end in (0, *(slash.start() for slash in re.finditer("/", path)))}


class ItemRecord(NamedTuple):
    folder: str  # path inside the checkpoint's directory
    kind: str  # "pytree", "json", "processes", "components", or "files" for a user's handler
    # Files, keyed by path inside the folder. If the item is stored as a zip file, the only path is "".
    files: Mapping[str, FileRecord]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def paths(self) -> dict[str, FileRecord]:
        """The files, keyed by path inside the checkpoint's directory."""
        return {f"{self.folder}/{path}" if path else self.folder: file for path, file in self.files.items()}

    @property
    def is_archive(self) -> bool:
        """Whether the item is stored as a zip file instead of a folder."""
        return "" in self.files

    @property
    def version(self) -> int:
        """The oldest format version whose readers understand all files of the item."""
        if any(file.members for file in self.files.values()):
            return _PACKS_VERSION
        item = self if self.kind == PROCESSES else own_item(self.files) if self.kind == TREES else None
        has_archives = self.is_archive or (item is not None and any("/" not in path for path in item.files))
        return _ARCHIVES_VERSION if has_archives else 1

    def shares(self) -> list[ItemRecord]:
        """Return the trees of a ``"processes"`` item, in process order."""
        folders: dict[str, dict[str, FileRecord]] = {}
        for path, record in self.files.items():
            process, _, rest = path.partition("/")
            if not record.members:
                folders.setdefault(process, {})[rest] = record
                continue
            names = (f"{number}{ARCHIVE}" for number in _packed(path))
            members = dict(zip(names, record.members, strict=True))
            offsets = offsets_in_archive({name: size for name, (size, _) in members.items()})
            for name, (size, digest) in members.items():
                folders[f"{path}/{name}"] = {"": FileRecord(size, digest, within=(offsets[name], record.size))}
        by_process = {folder.rpartition("/")[2].removesuffix(ARCHIVE): folder for folder in folders}
        ordered = [by_process.get(str(number), "") for number in range(len(folders))]
        if not folders or "" in ordered:
            raise DamagedCheckpointError(
                f"{self.folder}: expected folders 0, 1, 2, ... of processes, or {ARCHIVE} files of them, found "
                f"{sorted(folders)}"
            )
        return [ItemRecord(f"{self.folder}/{folder}", TREES, folders[folder]) for folder in ordered]

    def components(self) -> dict[str, ItemRecord]:
        """Return the trees of a ``"components"`` item, keyed by component path; ``""`` is the root component."""
        # Each component has a directory that contains the folder of its tree.
        trees: dict[str, dict[str, FileRecord]] = {
            path.removesuffix(f"/{COMPONENT}"): {} for path in self.files if path.endswith(f"/{COMPONENT}")
        }
        for path, record in self.files.items():
            ends = (slash.start() for slash in re.finditer("/", path))
            if end := next((end for end in ends if path[:end] in trees), None):
                trees[path[:end]][path[end + 1 :]] = record
        return {
            folder.rpartition("/")[0]: ItemRecord(f"{self.folder}/{folder}", TREES, files)
            for folder, files in trees.items()
            if files  # a folder inside another tree's folder is not a component; its files belong to the outer tree
        }


def own_item(files: Mapping[str, FileRecord]) -> ItemRecord | None:
    """Return the per-process trees inside a tree's folder as an item; None if there are none."""
    prefix = f"{OWN_FOLDER}/"
    own = {path.removeprefix(prefix): file for path, file in files.items() if path.startswith(prefix)}
    return ItemRecord(OWN_FOLDER, PROCESSES, own) if own else None


def own_shares(files: Mapping[str, FileRecord]) -> list[ItemRecord]:
    """Return the per-process trees inside a tree's folder, in process order."""
    return [] if (own := own_item(files)) is None else own.shares()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    items: Mapping[str, ItemRecord]  # items, keyed by name
    time: float  # commit time, in seconds since 1970-01-01 UTC
    step: int | None = None  # None if the checkpoint was saved without a manager
    reason: str = ""  # why the checkpoint was saved, as text for users
    metrics: Mapping[str, Any] | None = None  # metrics recorded with the checkpoint (numbers, possibly nested), or None
    custom_metadata: Mapping[str, Any] | None = None  # JSON that the program stored with the checkpoint, or None
    pinned: bool = False  # whether the user asked to keep the checkpoint permanently
    # Folders of the checkpoint that this checkpoint replaced. They can be removed.
    replaced: tuple[str, ...] = field(default=())
    # The identity and fingerprint of the complete record if this record is a summary, as sent to the other processes of
    # a save. Not stored.
    summarizes: tuple[str, str] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items.values())

    @property
    def shared_bytes(self) -> int:
        """Total size, in bytes, of the files shared with earlier steps; 0 if the record was read from a checkpoint."""
        return sum(file.size for item in self.items.values() for file in item.files.values() if file.shared)

    def parts(self) -> dict[str, ItemRecord]:
        """Return items by name, split into per-process trees (``name/0``) or components (``name/learner``), if any."""
        parts: dict[str, ItemRecord] = {}
        for name, item in self.items.items():
            if item.kind == PROCESSES:
                parts |= {f"{name}/{index}": share for index, share in enumerate(item.shares())}
            elif item.kind == COMPONENTS and (components := item.components()):
                parts |= {f"{name}/{path}" if path else name: tree for path, tree in components.items()}
            else:
                parts[name] = item
        return parts

    def with_metrics(self, metrics: Mapping[str, Any]) -> CheckpointRecord:
        """Return a copy of this record with additional metrics, which override existing metrics with the same names."""
        return replace(self, metrics={**(self.metrics or {}), **metrics})

    def summary(self) -> CheckpointRecord:
        """Return a copy of this record without its files, whose number grows with the number of saving processes."""
        items = {name: item._replace(files={}) for name, item in self.items.items()}
        return replace(self, items=items, summarizes=(self.identity, self.fingerprint))

    @property
    def identity(self) -> str:
        """Identity of the save. It differs between saves of the same step, but does not depend on metrics or pins."""
        if self.summarizes is not None:
            return self.summarizes[0]
        facts = json.dumps([float(self.time), self._items_document()], sort_keys=True)
        return f"{google_crc32c.value(facts.encode()):08x}"

    @property
    def fingerprint(self) -> str:
        """Digest of the time, step and files, which are the same in all copies of a checkpoint."""
        if self.summarizes is not None:
            return self.summarizes[1]
        import hashlib  # imported lazily because it loads OpenSSL, which is not needed to list or read checkpoints

        files = {name: [item["kind"], item["files"]] for name, item in self._items_document().items()}
        text = json.dumps([float(self.time), self.step, files], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self) -> bytes:
        version = max((item.version for item in self.items.values()), default=1)
        return encode_document(_KIND, self.to_document(), version=version)

    def to_document(self) -> dict[str, Any]:
        """Return the record as a JSON object without a digest. This is the inverse of :meth:`from_document`."""
        body: dict[str, Any] = {"step": self.step, "time": self.time, "reason": self.reason}
        body["items"] = self._items_document()
        if self.metrics is not None:
            body["metrics"] = encode_metrics(self.metrics)
        if self.custom_metadata is not None:
            body["custom_metadata"] = dict(self.custom_metadata)
        if self.pinned:
            body["pinned"] = True
        if self.replaced:
            body["replaced"] = list(self.replaced)
        return body

    def _items_document(self) -> dict[str, Any]:
        return {
            name: {
                "folder": folder,
                "kind": kind,
                "files": {path: _file_document(file) for path, file in files.items()},
            }
            for name, (folder, kind, files) in self.items.items()
        }

    @classmethod
    def decode(cls, data: bytes, *, source: str) -> CheckpointRecord:
        return cls.from_document(decode_document(data, _KIND, source=source), source=source)

    @classmethod
    def from_document(cls, body: Mapping[str, Any], *, source: str) -> CheckpointRecord:
        """Validate a document and return the record that it contains."""
        try:
            items = {
                str(name): ItemRecord(_relative_path(item["folder"]), str(item["kind"]), _files(item["files"]))
                for name, item in body["items"].items()
            }
            step = body["step"]
            if step is not None:
                _natural("step", step)
            metrics, custom = body.get("metrics"), body.get("custom_metadata")
            if custom is not None and not isinstance(custom, dict):
                raise TypeError(f"custom_metadata {custom!r:.80}")
            return cls(
                items=items,
                time=_time(body["time"]),
                step=step,
                reason=str(body.get("reason", "")),
                metrics=None if metrics is None else decode_metrics(metrics),
                custom_metadata=custom,
                pinned=bool(body.get("pinned", False)),
                replaced=tuple(_relative_path(name) for name in body.get("replaced", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedCheckpointError(f"{source}: the commit record has unexpected content: {error!r}") from error


def pack_name(first: int, last: int) -> str:
    """Return the name of the zip file that contains the zip files of consecutive processes."""
    return f"{first}-{last}{ARCHIVE}"


def _packed(path: str) -> range:
    """Parse a file name from :func:`pack_name` as a range of processes; return an empty range for other names."""
    name = _PACK.fullmatch(path.rpartition("/")[2])
    return range(0) if name is None else range(int(name[1]), int(name[2]) + 1)


def _file_document(file: FileRecord) -> dict[str, Any]:
    document: dict[str, Any] = {"size": file.size}
    if file.crc32c is not None:
        document["crc32c"] = f"{file.crc32c:08x}"
    if file.members:
        document["members"] = [[size, f"{digest:08x}"] for size, digest in file.members]
    return document


def _members(path: str, members: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(members, list) or not members or len(_packed(path)) != len(members):
        raise ValueError(f"members {members!r:.80} of {path!r}")
    return tuple((_natural("file size", size), _crc32c(digest)) for size, digest in members)


def _files(documents: Mapping[str, Any]) -> dict[str, FileRecord]:
    if "" in documents and (len(documents) > 1 or "crc32c" not in documents[""]):
        raise ValueError("an item that is a zip file has no other files, and needs a crc32c")
    return {
        path and _relative_path(path): FileRecord(
            _natural("file size", file["size"]),
            _crc32c(file["crc32c"]) if "crc32c" in file else None,
            _members(path, file["members"]) if "members" in file else (),
        )
        for path, file in documents.items()
    }


def encode_metrics(value: Any) -> Any:
    """Convert metrics to JSON values. NaN and infinities become strings."""
    if isinstance(value, Mapping):
        return {str(key): encode_metrics(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [encode_metrics(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def decode_metrics(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, dict):
        raise TypeError(f"metrics {metrics!r:.80}")
    return {key: _decode_numbers(value) for key, value in metrics.items()}


def _decode_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decode_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) else value


def _relative_path(path: Any) -> str:
    """Return the path; raise ValueError if it leaves the directory. Malicious records may contain such paths."""
    if not isinstance(path, str) or not is_inside(path):
        raise ValueError(f"file path {path!r}")
    return path


def _natural(name: str, number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{name} {number!r:.80}")
    return number


def _crc32c(text: str) -> int:
    if not 0 <= (digest := int(text, 16)) < 1 << 32:
        raise ValueError(f"crc32c {text!r:.80}")
    return digest


def _time(time: Any) -> float:
    """Return a time as a float; raise ValueError unless it is a number that can be converted to a date."""
    if type(time) not in (int, float) or not abs(time) <= _LATEST:
        raise ValueError(f"time {time!r:.80}")
    return float(time)
