"""Whole data in the wrong place: files of another step, chunks that changed places; nothing of it loads as good."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import flip
from tests.equality import assert_same
from tests.format.ocdbt_entries import decode_database
from tests.processes.threads import together, unwrap

import holdfast as hf

LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=8192)


def weights(step: int) -> dict[str, Any]:
    """Returns what a model has after a step: no value is there twice, and none changes its place."""
    random = np.random.default_rng(step)
    return {
        "dense": random.integers(0, 255, (6, 4096), np.uint8),
        "bias": {f"layer{number}": random.normal(size=7) for number in range(5)},
        "scale": random.normal(size=()),
    }


def train(run: Path, *, several: int = 1, layout: hf.Layout = LAYOUT) -> None:
    """Saves two steps, as one or several processes."""

    def process(coordinator: Any) -> None:
        saves = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=layout))
        options = hf.CheckpointManagerOptions(barrier_timeout_secs=10)
        with hf.CheckpointManager(run, saves, options, coordinator=coordinator) as manager:
            for step in (1, 2):
                manager.save(step, weights(step))

    unwrap(together(several, process))


def exchange(step: Path, leaf: str, other: str) -> None:
    """Lets a chunk of a leaf and one of another leaf (or the same) change places, with their checksums."""
    folder = step / "state"
    manifest = (folder / "manifest.ocdbt").read_bytes()
    entries = decode_database(manifest, lambda path, at, size: (folder / path).read_bytes()[at : at + size])
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(entries.keys):
        if entries.inline[row] is None:
            rows.setdefault(key.decode().partition("/")[0], []).append(row)
    places = [
        (folder / entries.files[entries.file_ids[row]], int(entries.offsets[row]), int(entries.lengths[row]))
        for row in (rows[leaf][0], rows[other][-1])
    ]
    one, two = (path.read_bytes()[start : start + size] for path, start, size in places)
    assert len(one) == len(two)
    assert one != two
    for (path, start, _), content in zip(places, (two, one), strict=True):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(content)


LEAVES = [*(f"bias/layer{number}" for number in range(5)), "dense", "scale"]


def check_refused(run: Path, leaves: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a load and a verification name the leaves, that the others load, and that a run goes back."""
    with pytest.raises(hf.DamagedCheckpointError, match="another chunk or from another save") as caught:
        hf.load(run / "2")
    assert [leaf for leaf in LEAVES if f"  {leaf}: " in str(caught.value)] == leaves
    with pytest.raises(hf.DamagedCheckpointError, match=r"is damaged: the chunk at byte \d+ should have"):
        hf.copy_checkpoint(run / "2", run / "copy")
    report = hf.verify(run / "2")
    assert sorted({problem.leaf for one in report.checkpoints for problem in one.problems}) == leaves
    for leaf in LEAVES:
        if leaf in leaves:
            with pytest.raises(hf.DamagedCheckpointError, match=leaf):
                hf.load(run / "2", select=leaf)
        else:
            found, expected = hf.load(run / "2", select=leaf), weights(2)
            for key in leaf.split("/"):
                found, expected = found[key], expected[key]
            assert_same(found, expected)
    with caplog.at_level(logging.WARNING), hf.CheckpointManager(run) as manager:
        assert_same(manager.restore(), weights(1))
    assert "step 2 is damaged and passed over" in caplog.text
    assert hf.verify(run / "1").ok


KINDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "three processes": {"several": 3},
    "compressed": {"layout": hf.Layout(chunk_bytes=4096, compression=1)},
    "chunks of 16 MiB": {"layout": hf.Layout()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_files_of_another_step(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, **KINDS[kind])
    files = [sorted((tmp_path / step / "state/d").glob("*.*")) for step in "12"]
    for source, target in zip(*files, strict=True):
        assert source.name != target.name
        assert source.stat().st_size == target.stat().st_size
        shutil.copyfile(source, target)
    check_refused(tmp_path, LEAVES, caplog)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chunks of 16 MiB"])
@pytest.mark.parametrize("leaves", [("dense", "dense"), ("bias.layer1", "bias.layer3")], ids="-".join)
def test_two_chunks_that_changed_places(
    kind: str, leaves: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, **KINDS[kind])
    exchange(tmp_path / "2", *leaves)
    check_refused(tmp_path, sorted({leaf.replace(".", "/") for leaf in leaves}), caplog)


def test_other_files_of_another_step(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path / "aggregated") as manager:
        for step in (1, 2):
            manager.save(step, weights(step), save_kwargs={"save_args": hf.SaveArgs(aggregate=True)})
    train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/2/state/d")
    shutil.copytree(tmp_path / "run/1/state/d", tmp_path / "run/2/state/d")
    for run, copied, named in [
        ("run", "d/index", r"d/index"),
        ("run", "manifest.ocdbt", r"d/index"),  # one more file of step 1 each time
        ("run", "tree.json", r"d/index"),
        ("aggregated", "aggregate.msgpack", r"aggregate\.msgpack"),
    ]:
        shutil.copy(tmp_path / run / "1/state" / copied, tmp_path / run / "2/state" / copied)
        with pytest.raises(hf.DamagedCheckpointError, match=f"{named} is not what was saved"):
            hf.load(tmp_path / run / "2")
        assert not hf.verify(tmp_path / run / "2").ok


@pytest.mark.parametrize("path", ["d/index", "manifest.ocdbt"])
def test_an_index_that_says_other_checksums(path: str, tmp_path: Path) -> None:
    """The index ends with the checksums; the commit record has the digest of the whole."""
    hf.save(tmp_path, weights(1), overwrite=True)
    flip(tmp_path / "state" / path, -12)
    with pytest.raises(hf.DamagedCheckpointError, match=f"{path} is not what was saved"):
        hf.load(tmp_path, select="scale")
