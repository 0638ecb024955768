"""Forged records: every checksum is right, and nothing they say can be trusted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.format import crc32c
from holdfast.engine.format.record import VERSION

Look = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("little_memory")

RECORD = "checkpoint.json"
TREE = {"w": np.arange(6.0), "n": {"a": 1, "b": "text"}, "s": [np.float32(2)]}

# With the frames of the test, more than Python allows; until 3.11, the JSON encoder of the test shares them.
DEPTH = 700 if sys.version_info < (3, 12) else 980
DEEP: Any = "nan"
for _ in range(DEPTH):
    DEEP = {"a": DEEP}
RECORDS: dict[str, Callable[[Any], Any]] = {
    "folder_above": lambda body: body["items"]["state"].update(folder=".."),
    "folder_here": lambda body: body["items"]["state"].update(folder="."),
    "folder_absolute": lambda body: body["items"]["state"].update(folder="/etc"),
    "folder_below": lambda body: body["items"]["state"].update(folder="a/../../b"),
    "folder_with_nul": lambda body: body["items"]["state"].update(folder="a\0b"),
    "folder_empty": lambda body: body["items"]["state"].update(folder=""),
    "folder_number": lambda body: body["items"]["state"].update(folder=5),
    "file_above": lambda body: body["items"]["state"]["files"].update({"../../secret": {"size": 6}}),
    "file_absolute": lambda body: body["items"]["state"]["files"].update({"/etc/passwd": {"size": 6}}),
    "file_number": lambda body: body["items"]["state"]["files"].update({"d/0": 5}),
    "file_list": lambda body: body["items"]["state"].update(files=[1]),
    "size_negative": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=-1),
    "size_fraction": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=1.5),
    "size_true": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=True),
    "size_huge": lambda body: body["items"]["state"]["files"]["tree.json"].update(size=10**400),
    "digest_huge": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="f" * 400),
    "digest_negative": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="-1"),
    "digest_number": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c=5),
    "digest_text": lambda body: body["items"]["state"]["files"]["tree.json"].update(crc32c="xyz"),
    "no_items": lambda body: body.pop("items"),
    "items_list": lambda body: body.update(items=[{}]),
    "item_text": lambda body: body["items"].update(state="state"),
    "item_without_kind": lambda body: body["items"]["state"].pop("kind"),
    "kind_unknown": lambda body: body["items"]["state"].update(kind="os.system"),
    "kind_json": lambda body: body["items"]["state"].update(kind="json"),
    "step_text": lambda body: body.update(step="1"),
    "step_negative": lambda body: body.update(step=-1),
    "step_huge": lambda body: body.update(step=10**400),
    "step_true": lambda body: body.update(step=True),
    "time_text": lambda body: body.update(time="now"),
    "time_huge": lambda body: body.update(time=10**400),
    "time_text_nan": lambda body: body.update(time="NaN"),
    "time_text_infinite": lambda body: body.update(time="-inf"),
    "time_text_number": lambda body: body.update(time="12"),
    "time_true": lambda body: body.update(time=True),
    "time_after_all_dates": lambda body: body.update(time=1e300),
    "time_none": lambda body: body.update(time=None),
    "metrics_list": lambda body: body.update(metrics=[1]),
    "metrics_text": lambda body: body.update(metrics={"loss": "low"}),
    "metrics_deep": lambda body: body.update(metrics=DEEP),
    "replaced_above": lambda body: body.update(replaced=[".."]),
    "replaced_number": lambda body: body.update(replaced=5),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    stored(place).edit(RECORDS[name])
    assert look(place)
    assert name.startswith("kind_") or not hf.verify(place).ok


@pytest.mark.parametrize("name", RECORDS)
def test_records_among_others(name: str, place: str, stored: Any) -> None:
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2):
            manager.save(step, TREE)
    stored(f"{place}/2").edit(RECORDS[name])
    [first, second] = hf.list_checkpoints(place)
    assert (first.step, first.damage) == (1, None)
    assert second.step == 2
    reader = hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(read_only=True))
    if name.startswith("kind_"):  # no damage that could be passed over
        assert second.damage is None
        with pytest.raises(hf.errors.OptionError, match="was written by a handler of kind"):
            reader.restore_latest()
    else:
        restored = reader.restore_latest()
        assert restored is not None
        assert restored.step == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{}", b"[" * 200_000, b'{"a":' * 200_000, b'"' + b"x" * 100_000, b"9" * 10_000, b"\xff\xfe"],
    ids=lambda content: repr(content[:6]),
)
def test_documents_that_are_none(content: bytes, place: str, stored: Any, look: Look) -> None:
    hf.save(place, TREE)
    files = stored(place)
    whole = files.read()
    files.write(RECORD, content)
    assert look(place)
    files.write(RECORD, whole[RECORD])
    files.reseal("tree.json", content)
    assert look(place)


def test_newer_versions_are_told_apart_from_damage(place: str, stored: Any) -> None:
    hf.save(place, TREE)
    record = json.loads(stored(place).read()[RECORD])
    del record["digest"]
    record["version"] = VERSION + 1
    digest = f"crc32c:{crc32c(json.dumps(record, separators=(',', ':')).encode()):08x}"
    stored(place).write(RECORD, json.dumps({**record, "digest": digest}).encode())
    with pytest.raises(hf.errors.FormatVersionError, match=rf"version {VERSION + 1}.*upgrade holdfast"):
        hf.load(place)


@pytest.mark.parametrize("path", [RECORD, "state/tree.json", "state/manifest.ocdbt", "state/d/index", "state/d/0"])
def test_files_that_are_gigantic(path: str, tmp_path: Path, stored: Any) -> None:
    place = str(tmp_path / "ckpt")
    hf.save(place, TREE)
    path = stored(place).name(path)
    size = 1 << 36
    if path != RECORD:
        stored(place).edit(lambda body: body["items"]["state"]["files"][path.removeprefix("state/")].update(size=size))
    os.truncate(f"{place}/{path}", size)  # takes no place on the disk
    if path in (RECORD, "state/tree.json", "state/manifest.ocdbt", "state/d/index"):
        with pytest.raises(hf.DamagedCheckpointError, match="has 68719476736 bytes, more than"):
            hf.load(place)
    else:
        assert hf.load(place)["n"] == TREE["n"]


def test_a_gigantic_json_item(tmp_path: Path) -> None:
    hf.Checkpointer(hf.JsonCheckpointHandler()).save(tmp_path / "ckpt", {"a": 1})
    os.truncate(tmp_path / "ckpt" / "state" / "data.json", 1 << 36)
    with pytest.raises(hf.DamagedCheckpointError, match="has 68719476736 bytes, more than"):
        hf.load(tmp_path / "ckpt")


def test_nothing_outside_is_read(tmp_path: Path, stored: Any, monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    place = str(tmp_path / "inside" / "ckpt")
    hf.save(place, TREE)
    (tmp_path / "secret").write_bytes(b"secret")
    opened: list[str] = []
    real = os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(os.path.realpath(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    whole = stored(place).read()[RECORD]
    for change in RECORDS.values():
        stored(place).edit(change)
        look(place)
        stored(place).write(RECORD, whole)
    assert opened
    assert all(path.startswith(place) for path in opened)


def test_nothing_outside_is_deleted_or_written(tmp_path: Path, stored: Any) -> None:
    place = tmp_path / "run"
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2, 3):
            manager.save(step, TREE)
    (tmp_path / "secret").write_bytes(b"secret")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    marker = {
        "format": "holdfast",
        "folders": ["..", "../secret", "../../outside", str(outside), "a/../../secret", 5, ""],
    }
    (place / "1" / "checkpoint.partial").write_text(json.dumps(marker))
    (place / "2" / "state" / "link").symlink_to(outside)
    (place / "2" / "checkpoint.partial").write_text("[" * 100_000)
    (place / "7").mkdir()
    (place / "7" / "checkpoint.partial").write_text(json.dumps(marker))
    (place / "7" / "link").symlink_to(outside)
    stored(str(place / "3")).edit(lambda body: body["items"]["state"].update(folder="../../outside"))
    options = hf.CheckpointManagerOptions(max_to_keep=2)
    with hf.CheckpointManager(place, options=options) as manager:
        assert manager.all_steps() == [1, 2]
        manager.save(4, TREE)
        manager.wait_until_finished()
        manager.save(3, TREE, force=True)
    assert (outside / "precious").read_bytes() == b"precious"
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not (place / "7").exists()
    assert not (place / "2").exists()
    assert hf.load(place / "3")["n"] == TREE["n"]
