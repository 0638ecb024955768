"""Damage of any kind to any file gives an error or the right values, never wrong ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.kinds import TextFiles
from tests.damage import flipped
from tests.equality import assert_same
from tests.manager.runs import reading, saved

import holdfast as hf
from holdfast.engine.arrays import ArrayDatabase, TreeReader
from holdfast.engine.arrays.assemble import Assembly
from holdfast.engine.steps import read_record

RECORD = "checkpoint.json"
TREE: dict[str, Any] = {
    "params": {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.float16(0.5)},
    "opt": [np.asarray(3), (None, "text", b"bytes", 1 << 70)],
    "time": np.array(["2020-01-01"], "M8[s]"),
}
CHUNKED = {"w": np.random.default_rng(0).integers(0, 255, (5, 3000), np.uint8), "v": np.arange(3000.0)}
SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=20_000)


def check(place: str, expected: Any) -> bool:
    """Check that damage is noticed, by an error that holdfast raises on purpose, or has no effect; return which."""
    found: Any
    try:
        found = hf.load(place)
    except hf.HoldfastError as error:
        found = error
    if is_noticed := isinstance(found, hf.HoldfastError):
        assert place in str(found)
    else:
        assert_same(found, expected)
    return is_noticed


INDEX = ("state/manifest.ocdbt", "state/d/index")


def test_a_flipped_bit_in_every_byte(place: str, stored: Any, short: Any, every: bool) -> None:
    """Of the index, it is noticed wherever it is; the sweep flips each of its bits."""
    hf.save(place, TREE)
    files = stored(place)
    noticed = {}
    for name, content in files.read().items():
        path = short(name)
        noticed[path] = 0
        bits = 8 if every and path in INDEX else 1
        for position, bit in itertools.product(range(len(content)), range(bits)):
            files.write(path, flipped(content, position, (position * 5 + bit) % 8))
            noticed[path] += check(place, TREE)
        files.write(path, content)
        if path in INDEX:
            assert noticed[path] == bits * len(content)
        elif path != "state/d/0":  # which has gaps between arrays
            assert noticed[path] > 0.9 * len(content)
    assert set(noticed) == {RECORD, "state/d/0", "state/d/index", "state/manifest.ocdbt", "state/tree.json"}
    assert noticed["state/d/0"] == 24 * 4 + 2 + 8 + 8 + 4 * 4  # every byte of every array and of its checksum
    assert_same(hf.load(place), TREE)


@pytest.mark.parametrize("local", [False, True], ids=["memory", "local"])
def test_flipped_bits_in_arrays_of_many_chunks(local: bool, place: str, tmp_path: Any, stored: Any) -> None:
    place = str(tmp_path / "ckpt") if local else place
    hf.save(place, CHUNKED, layout=SMALL)
    files = stored(place)
    random = np.random.default_rng(1)
    contents = files.read()
    for path, content in contents.items():
        for position in random.integers(0, len(content), 12 if local else 60).tolist():
            files.write(path, flipped(content, position, position % 8))
            check(place, CHUNKED)
        files.write(path, content)
    files.write("state/d/0", flipped(contents["state/d/0"], 4200))
    with pytest.raises(
        hf.DamagedCheckpointError,
        match=f"(?s)in 1 of its leaves.*w: {place}/{files.name('state/d/0')}: chunk 1 has crc32c",
    ):
        hf.load(place)
    files.write("state/d/1", contents["state/d/1"][:-1])
    with pytest.raises(hf.DamagedCheckpointError, match=r"(?s)in 2 of its leaves.*v: .*/d/\w+\.0\.1: "):
        hf.load(place)


@pytest.mark.parametrize("grows", [False, True], ids=["cut off", "grown"])
def test_files_of_other_lengths(place: str, stored: Any, grows: bool) -> None:
    hf.save(place, TREE)
    files = stored(place)
    for path, content in files.read().items():
        size = len(content)
        lengths = {0, 1, 2, size // 3, size // 2, size - 1, *range(0, size, 61)}
        more = [content + more for more in (b"\0", b"\n", b"{}", content)]
        for damaged in more if grows else [content[:length] for length in lengths]:
            files.write(path, damaged)
            is_noticed = check(place, TREE)
            # Without its last newline, a document is still the same document.
            assert is_noticed or grows or (path == RECORD and len(damaged) == size - 1)
            assert grows or not hf.verify(place).ok or path == RECORD
        files.remove(path)
        expected = hf.CheckpointNotFoundError if path == RECORD else hf.DamagedCheckpointError
        with pytest.raises(expected, match=place if path == RECORD else path):
            hf.load(place)
        files.write(path, content)


def test_a_folder_or_a_pipe_in_the_place_of_a_file(tmp_path: Any, stored: Any) -> None:
    hf.save(tmp_path / "ckpt", TREE)
    for path, content in stored(str(tmp_path / "ckpt")).read().items():
        file = tmp_path / "ckpt" / path
        for make, unmake in ((os.mkdir, os.rmdir), (os.mkfifo, os.unlink)):
            file.unlink()
            make(file)
            with pytest.raises(hf.DamagedCheckpointError, match="not a regular file"):
                hf.load(tmp_path / "ckpt")
            unmake(file)
            file.write_bytes(content)


@pytest.fixture
def run(place: str) -> str:
    """A directory with the steps 1 and 2."""
    saved(place, 1, 2, items=lambda step: {**TREE, "step": step})
    return place


def restore(run: str) -> int:
    """Resume, check the values, and return the step."""
    manager = reading(run)
    restored = manager.restore_latest()
    assert restored is not None
    assert_same(restored.items, {**TREE, "step": restored.step})
    if restored.step == 1 and 2 in [step for step, _ in restored.skipped]:
        assert manager.latest_step() == 1
    return restored.step


def test_resuming_goes_back_to_the_step_before(run: str, stored: Any, short: Any, caplog: Any, every: bool) -> None:
    stride = 7 if every else 23
    files = stored(f"{run}/2")
    assert restore(run) == 2
    for path, content in files.read().items():
        back = 0
        for position in range(0, len(content), stride):
            files.write(path, flipped(content, position, position % 8))
            back += restore(run) == 1
        assert back > len(content) // stride * (0.2 if short(path) == "state/d/0" else 0.9)
        caplog.clear()
        for length in (0, len(content) // 2, len(content) - 2):
            files.write(path, content[:length])
            assert restore(run) == 1
            assert "step 2 is damaged and passed over" in caplog.text
            assert "going back to step 1" in caplog.text
        files.remove(path)
        assert restore(run) == 1
        files.write(path, content)
    assert restore(run) == 2


def test_json_items(place: str, stored: Any) -> None:
    checkpointer = hf.Checkpointer(hf.JsonCheckpointHandler())
    for value in (None, True, 3, 1.5, "text", [1, [2, {}]], {"lr": 0.1, "names": ["a", None, True], "n": {"m": 12}}):
        checkpointer.save(place, value, force=True)
        for read in (hf.load, checkpointer.restore, checkpointer.structure):
            assert_same(read(place), value)
    files, path = stored(place), next(path for path in stored(place).read() if path.endswith("data.json"))
    content = files.read()[path]
    for position in range(len(content)):
        files.write(path, flipped(content, position, position % 8))
        assert check(place, value) or position == len(content) - 1
    files.write(path, content.replace(b"0.1", b"0.2"))
    with pytest.raises(hf.DamagedCheckpointError, match=r"data\.json"):
        checkpointer.restore(place)
    files.remove(path)
    for read in (hf.load, checkpointer.restore):
        with pytest.raises(hf.DamagedCheckpointError, match=r"data\.json is missing"):
            read(place)
    with pytest.raises(hf.errors.OptionError, match="is JSON, not a tree of arrays"):
        hf.load(place, select="lr")


def test_items_of_handlers_that_check_nothing(tmp_path: Path, stored: Any) -> None:
    items = [{"one": f"step {step} ", "two": "text"} for step in range(3)]
    with hf.CheckpointManager(tmp_path, hf.Checkpointer(TextFiles())) as manager:
        for step in (1, 2):
            manager.save(step, items[step])
        assert manager.restore(2) == items[2]
        files = stored(f"{tmp_path}/2")
        contents = files.read()
        for path in ("state/one.txt", "state/two.txt"):
            for content in (flipped(contents[path], 3), b"", contents[path] + b"x"):
                files.write(path, content)
                for reader in (manager, hf.CheckpointManager(tmp_path, hf.Checkpointer(TextFiles()))):
                    with pytest.raises(hf.DamagedCheckpointError, match=path):
                        reader.restore(2)
                assert path in [problem.file for problem in hf.verify(tmp_path / "2").checkpoints[0].problems]
            files.remove(path)
            with pytest.raises(hf.DamagedCheckpointError, match=f"{path} is missing"):
                manager.restore(2)
            files.write(path, contents[path])
        files.remove("state/two.txt")
        restored = manager.restore_latest()
    assert restored is not None
    assert (restored.step, restored.items) == (1, items[1])


def test_another_handler_than_the_one_that_wrote_it_is_no_damage(run: str) -> None:
    for handler, kind in ((TextFiles(), "TextFiles .* 'files'"), (hf.JsonCheckpointHandler(), "JsonC.* 'json'")):
        with hf.CheckpointManager(run, hf.Checkpointer(handler)) as manager:
            with pytest.raises(hf.errors.OptionError, match=f"written by a handler of kind 'pytree'; {kind}"):
                manager.restore_latest()
            assert manager.all_steps() == [1, 2]


def test_only_documents_have_a_limit(place: str) -> None:
    """The index of a large tree does not: it grows with the number of chunks."""
    hf.save(place, {f"leaf {number}": np.zeros(1) for number in range(300)})
    item = read_record(hf.storage.as_location(place)).items["state"]
    location = hf.storage.as_location(place) / item.folder
    limit = max(item.files[path].size for path in ("tree.json", "manifest.ocdbt"))
    assert item.files["d/index"].size > 2 * limit
    database = ArrayDatabase(location, item.files, limit=limit)
    database.read_file("tree.json")
    assert database.file_checks()
    names = [leaf.name for leaf in TreeReader(location, item.files).leaves]
    metadata = [one for one in database.metadata(names) if one is not None]
    assert database.read(names, Assembly(metadata, keep=False)) == []
    with pytest.raises(hf.DamagedCheckpointError, match=r"tree\.json"):
        ArrayDatabase(location, item.files, limit=item.files["tree.json"].size - 1).read_file("tree.json")
