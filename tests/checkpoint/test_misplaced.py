"""Whole data in the wrong place: files of another step, chunks that changed places; nothing of it loads as good."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.format.ocdbt_entries import decode_database
from tests.processes.threads import together, unwrap

import holdfast as hf
from holdfast.engine.format import Entries

LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=8192)


def weights(step: int) -> dict[str, Any]:
    """Returns what a model has after a step: no value is there twice, and none changes its place."""
    random = np.random.default_rng(step)
    return {
        "dense": random.integers(0, 255, (6, 4096), np.uint8),
        "bias": {f"layer{number}": random.normal(size=7) for number in range(5)},
        "scale": random.normal(size=()),
    }


def train(run: Path, *, steps: int = 2, several: int = 1, **arguments: Any) -> None:
    """Saves some steps, as one or several processes."""

    def process(coordinator: Any) -> None:
        handler = hf.PyTreeCheckpointHandler(**{"layout": LAYOUT, **arguments})
        options = hf.CheckpointManagerOptions(barrier_timeout_secs=10)
        with hf.CheckpointManager(run, hf.Checkpointer(handler), options, coordinator=coordinator) as manager:
            for step in range(1, steps + 1):
                manager.save(step, weights(step))

    if several == 1:
        process(hf.processes.Alone())
    else:
        unwrap(together(several, process))


def data_files(step: Path) -> list[Path]:
    return sorted(path for path in (step / "state/d").iterdir() if path.name != "index")


def index_of(step: Path) -> Entries:
    """Reads where the chunks of a step lie."""
    folder = step / "state"
    manifest = (folder / "manifest.ocdbt").read_bytes()
    return decode_database(manifest, lambda path, at, size: (folder / path).read_bytes()[at : at + size])


def exchange(step: Path, leaf: str, other: str) -> None:
    """Lets a chunk of a leaf and one of another leaf (or the same) change places, with their checksums."""
    entries = index_of(step)
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(entries.keys):
        if entries.inline[row] is None:
            rows.setdefault(key.decode().partition("/")[0], []).append(row)
    one, two = rows[leaf][0], rows[other][-1]
    assert entries.lengths[one] == entries.lengths[two]
    contents = {}
    for row, source in ((one, two), (two, one)):
        start, size = int(entries.offsets[source]), int(entries.lengths[source])
        path = step / "state" / entries.files[entries.file_ids[source]]
        contents[row] = path.read_bytes()[start : start + size]
    assert contents[one] != contents[two]
    for row, content in contents.items():
        with open(step / "state" / entries.files[entries.file_ids[row]], "r+b") as file:
            file.seek(int(entries.offsets[row]))
            file.write(content)


def check_refused(run: Path, leaves: list[str], caplog: pytest.LogCaptureFixture, assert_same: Any) -> None:
    """Checks that a load and a verification name the leaves, that the others load, and that a run goes back."""
    with pytest.raises(hf.DamagedCheckpointError, match="another chunk or from another save") as caught:
        hf.load(run / "2")
    assert [leaf for leaf in LEAVES if f"  {leaf}: " in str(caught.value)] == leaves
    report = hf.verify(run / "2")
    assert sorted({problem.leaf for one in report.checkpoints for problem in one.problems}) == leaves
    for leaf in LEAVES:
        if leaf in leaves:
            with pytest.raises(hf.DamagedCheckpointError, match=leaf):
                hf.load(run / "2", select=leaf)
    others = [leaf for leaf in LEAVES if leaf not in leaves]
    if others:
        select = [f"{leaf}/**" if leaf == "bias" else leaf for leaf in others]
        kept = hf.load(run / "2", select=select)
        for leaf in others:
            assert_same(value_of(kept, leaf), value_of(weights(2), leaf))
    with caplog.at_level(logging.WARNING), hf.CheckpointManager(run) as manager:
        assert_same(manager.restore(), weights(1))
    assert "step 2 is damaged and passed over" in caplog.text
    caplog.clear()


LEAVES = ["bias/layer0", "bias/layer1", "bias/layer2", "bias/layer3", "bias/layer4", "dense", "scale"]


def value_of(tree: Any, leaf: str) -> Any:
    for key in leaf.split("/"):
        tree = tree[key]
    return tree


KINDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "three processes": {"several": 3},
    "compressed": {"layout": hf.Layout(chunk_bytes=4096, compression=1)},
    "chunks of 16 MiB": {"layout": hf.Layout()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_files_of_another_step(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, assert_same: Any
) -> None:
    run = tmp_path / "run"
    train(run, **KINDS[kind])
    for source, target in zip(data_files(run / "1"), data_files(run / "2"), strict=True):
        assert source.stat().st_size == target.stat().st_size
        shutil.copyfile(source, target)
    check_refused(run, LEAVES, caplog, assert_same)
    assert_same(hf.load(run / "1"), weights(1))
    assert hf.verify(run / "1").ok


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chunks of 16 MiB"])
@pytest.mark.parametrize("leaves", [("dense", "dense"), ("bias.layer1", "bias.layer3")], ids="-".join)
def test_two_chunks_that_changed_places(
    kind: str, leaves: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, assert_same: Any
) -> None:
    run = tmp_path / "run"
    train(run, **KINDS[kind])
    exchange(run / "2", *leaves)
    check_refused(run, sorted({leaf.replace(".", "/") for leaf in leaves}), caplog, assert_same)


def test_the_whole_folder_of_data_of_another_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    shutil.rmtree(run / "2/state/d")
    shutil.copytree(run / "1/state/d", run / "2/state/d")
    for copied in ("d/index", "manifest.ocdbt", "tree.json"):  # one more file of step 1 each time
        shutil.copy(run / "1/state" / copied, run / "2/state" / copied)
        with pytest.raises(hf.DamagedCheckpointError, match="d/index is not what was saved"):
            hf.load(run / "2")
        assert not hf.verify(run / "2").ok


def test_the_leaves_in_one_file_of_another_step(tmp_path: Path) -> None:
    everything = {"save_args": hf.SaveArgs(aggregate=True)}
    with hf.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, weights(step), save_kwargs=everything)
    shutil.copy(tmp_path / "1/state/aggregate.msgpack", tmp_path / "2/state/aggregate.msgpack")
    with pytest.raises(hf.DamagedCheckpointError, match=r"aggregate\.msgpack is not what was saved"):
        hf.load(tmp_path / "2")


@pytest.mark.parametrize("other", [lambda path: path / "d/index", lambda path: path / "manifest.ocdbt"])
def test_an_index_that_says_other_checksums(other: Callable[[Path], Path], tmp_path: Path) -> None:
    """The index ends with the checksums; the commit record has the digest of the whole."""
    hf.save(tmp_path / "saved", weights(1))
    path = other(tmp_path / "saved/state")
    content = path.read_bytes()
    path.write_bytes(content[:-12] + bytes([content[-12] ^ 1]) + content[-11:])
    with pytest.raises(hf.DamagedCheckpointError, match=f"{path.name} is not what was saved"):
        hf.load(tmp_path / "saved", select="scale")
