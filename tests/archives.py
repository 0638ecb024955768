"""Checkpoints whose items are zip files, as saves to object stores make them, on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from holdfast.engine.format import ARCHIVE, CheckpointRecord, FileRecord, crc32c, encode_archive


def read_record(checkpoint: Path) -> CheckpointRecord:
    return CheckpointRecord.decode((checkpoint / "checkpoint.json").read_bytes(), source=str(checkpoint))


def make_archives(checkpoint: Path, items: Collection[str] | None = None) -> None:
    """Puts the items of a checkpoint into zip files, in the place of their folders."""
    record = read_record(checkpoint)
    found = dict(record.items)
    for name, item in record.items.items():
        if items is not None and name not in items:
            continue
        folder = checkpoint / item.folder
        content = encode_archive({path: (folder / path).read_bytes() for path in item.files})
        shutil.rmtree(folder)
        (checkpoint / f"{item.folder}{ARCHIVE}").write_bytes(content)
        files = {"": FileRecord(len(content), crc32c(content))}
        found[name] = item._replace(folder=f"{item.folder}{ARCHIVE}", files=files)
    (checkpoint / "checkpoint.json").write_bytes(replace(record, items=found).encode())
