"""The commit record of one checkpoint: what it holds, and how to tell that it is all there.

The record is the last file that a save writes. It names every folder and file that belongs to the checkpoint,
with sizes, and with digests for the small files that do not carry their own; it digests itself. A checkpoint
exists if and only if its record verifies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import DamagedCheckpointError
from .format import decode_document, encode_document

RECORD = "checkpoint.json"
"""Name of the commit record inside a checkpoint's directory."""
PARTIAL = "checkpoint.partial"
"""Marks a directory in which a save has begun; gone once it has been committed."""
DELETED = "checkpoint.deleted"
"""Marks a directory whose checkpoint is being deleted; the last file to go."""

TREES = "pytree"
"""Kind of an item that is a tree."""
PROCESSES = "processes"
"""Kind of an item of which every process has a tree of its own."""
OWN_FOLDER = "own"
"""Folder inside of a tree's that holds what every process has of its own."""
COMPONENTS = "components"
"""Kind of an item that is a tree of components, each of which has a tree of its own."""
COMPONENT = "component.json"
"""Name of the file that says what a component is, in the folder of its tree."""

_KIND = "checkpoint"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an item.

    Attributes:
        size: Length in bytes.
        crc32c: Digest of the whole file, or None where the file carries digests of its own.
    """

    size: int
    crc32c: int | None = None


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """One item of a checkpoint.

    Attributes:
        folder: The folder's path inside the checkpoint's directory: one name, or several with slashes between them.
        kind: What wrote it: ``"pytree"``, ``"json"``, ``"processes"``, ``"components"``, or ``"files"`` for a
            handler of the user's own.
        files: The files by their path inside the folder.
    """

    folder: str
    kind: str
    files: Mapping[str, FileRecord]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all files."""
        return sum(file.size for file in self.files.values())

    def shares(self) -> list[ItemRecord]:
        """Returns what every process has of an item of kind ``"processes"``, each a tree in a folder of its own.

        Raises:
            DamagedCheckpointError: The folders are not those of processes 0, 1, 2 and so on.
        """
        found: dict[str, dict[str, FileRecord]] = {}
        for path, record in self.files.items():
            process, _, rest = path.partition("/")
            found.setdefault(process, {})[rest] = record
        if not found or set(found) != {str(index) for index in range(len(found))}:
            raise DamagedCheckpointError(
                f"{self.folder}: expected folders 0, 1, 2, ... of processes, found {sorted(found)}"
            )
        return [ItemRecord(f"{self.folder}/{index}", TREES, found[str(index)]) for index in range(len(found))]

    def components(self) -> dict[str, ItemRecord]:
        """Returns the trees of an item of kind ``"components"`` by the component's path, ``""`` for the root.

        The folder of a component's tree lies in the component's directory. Files that belong to none are left out.
        """
        folders = {path.removesuffix(f"/{COMPONENT}") for path in self.files if path.endswith(f"/{COMPONENT}")}
        found: dict[str, dict[str, FileRecord]] = {}
        for path, record in self.files.items():
            parts = path.split("/")
            above = ("/".join(parts[:length]) for length in range(1, len(parts)))
            folder = next((one for one in above if one in folders), None)
            if folder is not None:
                found.setdefault(folder, {})[path.removeprefix(f"{folder}/")] = record
        return {
            folder.rpartition("/")[0]: ItemRecord(f"{self.folder}/{folder}", TREES, files)
            for folder, files in found.items()
        }


def own_item(files: Mapping[str, FileRecord]) -> ItemRecord | None:
    """Returns what every process has of its own inside of a tree's folder; None if there is no such thing."""
    begin = f"{OWN_FOLDER}/"
    own = {path.removeprefix(begin): known for path, known in files.items() if path.startswith(begin)}
    return ItemRecord(OWN_FOLDER, PROCESSES, own) if own else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """What one committed checkpoint holds.

    Attributes:
        items: The items by name.
        time: When it was committed, in seconds since 1970-01-01 UTC.
        step: Its step, or None for a checkpoint outside a manager.
        reason: Why it was saved, for people.
        metrics: Metrics recorded with it (numbers, possibly nested), or None.
        pinned: Whether somebody asked to keep it for good.
        replaced: Folders of the checkpoint that this one replaced; they may be removed.
    """

    items: Mapping[str, ItemRecord]
    time: float
    step: int | None = None
    reason: str = ""
    metrics: Mapping[str, Any] | None = None
    pinned: bool = False
    replaced: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all items."""
        return sum(item.nbytes for item in self.items.values())

    def parts(self) -> dict[str, ItemRecord]:
        """Returns the items by name, and the trees within items by the item's name and their own.

        Of an item of which every process has its own these are ``name/0``, ``name/1`` and so on; of a tree of
        components ``name`` is the root's own, and ``name/learner`` that of its component ``learner``.

        Raises:
            DamagedCheckpointError: The folders of one are not those of processes 0, 1, 2 and so on.
        """
        found: dict[str, ItemRecord] = {}
        for name, item in self.items.items():
            if item.kind == PROCESSES:
                found |= {f"{name}/{index}": share for index, share in enumerate(item.shares())}
            elif item.kind == COMPONENTS and (components := item.components()):
                found |= {f"{name}/{path}" if path else name: one for path, one in components.items()}
            else:
                found[name] = item
        return found

    def with_metrics(self, metrics: Mapping[str, Any]) -> CheckpointRecord:
        """Returns this record with more metrics; new values win."""
        return replace(self, metrics={**(self.metrics or {}), **metrics})

    def encode(self) -> bytes:
        """Returns the record's file content."""
        items = {
            name: {
                "folder": item.folder,
                "kind": item.kind,
                "files": {
                    path: {"size": file.size} | ({} if file.crc32c is None else {"crc32c": f"{file.crc32c:08x}"})
                    for path, file in item.files.items()
                },
            }
            for name, item in self.items.items()
        }
        body: dict[str, Any] = {"step": self.step, "time": self.time, "reason": self.reason, "items": items}
        if self.metrics is not None:
            body["metrics"] = _encode_numbers(self.metrics)
        if self.pinned:
            body["pinned"] = True
        if self.replaced:
            body["replaced"] = list(self.replaced)
        return encode_document(_KIND, body)

    @classmethod
    def decode(cls, data: bytes, *, source: str) -> CheckpointRecord:
        """Reads a record.

        Args:
            data: The file's content.
            source: Where it came from, for error messages.

        Returns:
            The record.

        Raises:
            DamagedCheckpointError: It does not verify.
            FormatVersionError: A newer version of holdfast wrote it.
        """
        body = decode_document(data, _KIND, source=source)
        try:
            items = {
                str(name): ItemRecord(
                    _relative_path(item["folder"]),
                    str(item["kind"]),
                    {
                        _relative_path(path): FileRecord(
                            _size(file["size"]), int(file["crc32c"], 16) if "crc32c" in file else None
                        )
                        for path, file in item["files"].items()
                    },
                )
                for name, item in body["items"].items()
            }
            step = body["step"]
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise ValueError(f"step {step!r}")
            metrics = body.get("metrics")
            return cls(
                items=items,
                time=float(body["time"]),
                step=step,
                reason=str(body.get("reason", "")),
                metrics=None if metrics is None else _decode_metrics(metrics),
                pinned=bool(body.get("pinned", False)),
                replaced=tuple(_relative_path(name) for name in body.get("replaced", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedCheckpointError(f"{source}: the commit record has an unexpected content: {error!r}") from error


def _encode_numbers(value: Any) -> Any:
    """JSON has no NaN or infinities: they become text; everything else in metrics is a number."""
    if isinstance(value, Mapping):
        return {str(key): _encode_numbers(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _decode_metrics(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, dict):
        raise TypeError(f"metrics {metrics!r:.80}")
    return {key: _decode_numbers(inner) for key, inner in metrics.items()}


def _decode_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode_numbers(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) else value


def _folder_name(name: Any) -> str:
    """A hostile record must not lead outside its own directory."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"folder name {name!r}")
    return name


def _relative_path(path: Any) -> str:
    if not isinstance(path, str):
        raise TypeError(f"file path {path!r}")
    for part in path.split("/"):
        _folder_name(part)
    return path


def _size(size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"file size {size!r}")
    return size
