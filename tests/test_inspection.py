"""What is said of whole and of damaged checkpoints."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import TickingClock

import holdfast as hf
from holdfast.engine import inspection
from holdfast.engine.sources import discovery

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192)
TREE: dict[str, Any] = {
    "params": {"w": np.zeros((3, 4), np.float32), "b.c": np.ones(2, ">f4")},
    "step": 7,
    "lr": 1e-3,
    "name": "digits",
    "note": "x" * 100,
    "big": -(1 << 70),
    "raw": b"\x00\xff",
    "none": None,
    "scalar": np.float16(1),
    "time": np.zeros(3, "M8[s]"),
    "tags": {"only"},
    "empty": [],
}


@pytest.fixture
def run(place: str) -> str:
    """A directory of four steps with metrics, of which two are kept for a reason."""
    options = hf.CheckpointManagerOptions(max_to_keep=1, best_fn="accuracy", best_mode="max", keep_period=2)
    with hf.CheckpointManager(place, options=options, clock=TickingClock(by=10)) as manager:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, float("nan")], start=1):
            manager.save(step, {"w": np.full(1000, step)}, metrics={"accuracy": accuracy}, reason=f"at {accuracy}")
    return place


# ---- describe


def test_every_leaf_is_described_without_its_data(place: str, stored: Any) -> None:
    hf.save(place, TREE)
    stored(place).remove("state/d/0")
    leaves = {leaf.path: leaf for leaf in hf.describe(place)}
    assert {path: (leaf.kind, leaf.dtype, leaf.shape, leaf.bytes, leaf.value) for path, leaf in leaves.items()} == {
        "params/w": ("numpy", "float32", (3, 4), 48, None),
        "params/b.c": ("numpy", ">f4", (2,), 8, None),
        "step": ("int", "int64", (), 8, None),
        "lr": ("float", "float64", (), 8, None),
        "name": ("str", None, (), 0, "'digits'"),
        "note": ("str", None, (), 0, "'" + "x" * 56 + "..."),
        "big": ("int", None, (), 0, "-0x400000000000000000"),
        "raw": ("bytes", None, (), 0, r"b'\x00\xff'"),
        "none": ("none", None, (), 0, "None"),
        "scalar": ("numpy_scalar", "float16", (), 2, None),
        "time": ("numpy", "datetime64[s]", (3,), 24, None),
        "tags": ("set", None, (), 0, "{'only'}"),
    }
    assert {leaf.item for leaf in leaves.values()} == {"state"}


def test_shardings_are_described(place: str) -> None:
    jax: Any = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    tree = {
        "sharded": jax.device_put(np.zeros((4, 2, 4), np.float32), sharding),
        "single": jax.device_put(np.zeros(3, np.float32), jax.devices()[1]),
        "key": jax.random.key(0),
    }
    hf.save(place, tree)
    sharded, single, key = hf.describe(place)
    assert (sharded.kind, sharded.sharding) == ("jax", '["data", null, "model"] over (data=2, model=2)')
    assert single.sharding == "cpu:1"
    assert (key.kind, key.dtype, key.shape) == ("key", "uint32", (2,))


def test_items_and_steps_are_described(place: str) -> None:
    items = {"state": hf.PyTreeCheckpointer(), "config": hf.Checkpointer(hf.JsonCheckpointHandler())}
    with hf.CheckpointManager(place, items) as manager:
        for step in (3, 4):
            manager.save(step, {"state": {"w": np.zeros(step)}, "config": {"lr": 0.1}})
    for asked, size in ((None, 4), (4, 4), (3, 3)):
        leaves = {(leaf.item, leaf.path): leaf for leaf in hf.describe(place, asked)}
        assert leaves["state", "w"].shape == (size,)
        assert leaves["config", "data.json"].kind == "json"
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 5 here; it holds the steps 3, 4"):
        hf.describe(place, 5)


def test_the_structure_of_a_checkpoint(place: str) -> None:
    hf.save(place, {"params": [np.zeros((2, 3), np.float32), None]})
    found = hf.PyTreeCheckpointer().structure(place)
    assert found["params"][0] == hf.reports.LeafMetadata("numpy", (2, 3), "float32")
    assert [str(leaf) for leaf in found["params"]] == ["float32[2, 3]", "none"]


# ---- list_checkpoints


def test_steps_are_listed_with_what_is_known_of_them(run: str) -> None:
    found = hf.list_checkpoints(run)
    assert [summary.step for summary in found] == [2, 4]
    second, fourth = found
    times: list[Any] = [summary.time for summary in found]
    assert times[1] >= times[0] + 20  # one tick for each save, and for the events between them
    assert second.metrics == {"accuracy": 0.9}
    assert repr(fourth.metrics) == "{'accuracy': nan}"
    assert (second.reason, fourth.reason) == ("at 0.9", "at nan")
    assert second.path == f"{run}/2"
    assert second.bytes > 8000
    assert second.damage is None
    assert len(second.kept) == 2  # the best, and every second one
    assert any("best" in reason for reason in second.kept)
    assert any("newest" in reason for reason in fourth.kept)


def test_listing_says_what_is_damaged_at_first_sight(tmp_path: Path, stored: Any, short: Any) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": np.full(1000, step)})
    (tmp_path / "2" / "checkpoint.json").write_bytes(b"{}")
    stored(str(tmp_path / "3")).write("state/d/0", b"short")
    (tmp_path / "4" / "state" / "tree.json").unlink()
    (tmp_path / "5" / "checkpoint.json").unlink()
    (tmp_path / "1" / "checkpoint.json").replace(tmp_path / "5" / "checkpoint.json")
    (tmp_path / "7").mkdir()
    (tmp_path / "notes").mkdir()
    damage = {summary.step: summary.damage or "" for summary in hf.list_checkpoints(tmp_path)}
    assert list(damage) == [1, 2, 3, 4, 5]
    assert "checkpoint.json" in damage[1]
    assert "checkpoint.json" in damage[2]
    assert short(damage[3]) == "state/d/0: expected 8004 bytes, found 5"
    assert damage[4] == "state/tree.json: missing"
    assert "written for step 1" in damage[5]


def test_listing_what_is_no_directory_of_steps(place: str, tmp_path: Path) -> None:
    assert hf.list_checkpoints(tmp_path) == []
    for missing in (place, tmp_path / "nothing"):
        with pytest.raises(hf.CheckpointNotFoundError, match="nothing at this path"):
            hf.list_checkpoints(missing)


# ---- verify


def test_verifying_a_directory_of_steps(run: str, stored: Any) -> None:
    report = hf.verify(run)
    assert report.ok
    assert [(one.step, one.problems) for one in report.checkpoints] == [(2, ()), (4, ())]
    assert [one.bytes for one in report.checkpoints] == [one.bytes for one in hf.list_checkpoints(run)]
    assert [one.step for one in hf.verify(run, 4).checkpoints] == [4]
    assert [one.step for one in hf.verify(f"{run}/2").checkpoints] == [2]
    with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 3"):
        hf.verify(run, 3)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.verify(f"{run}/nothing")
    stored(f"{run}/2").write("checkpoint.json", b"")
    report = hf.verify(run)
    assert not report.ok
    assert [(one.step, bool(one.problems)) for one in report.checkpoints] == [(2, True), (4, False)]


Spoil = Callable[[Any], None]  # damages the files of a checkpoint


def flipping(path: str, *positions: int) -> Spoil:
    """Flips a bit in each of these bytes."""

    def flip(files: Any) -> None:
        content = bytearray(files.read()[path])
        for position in positions:
            content[position] ^= 1
        files.write(path, bytes(content))

    return flip


DATA = "state/d/0"
SPOILED: dict[str, tuple[Spoil, set[tuple[str, str]], str]] = {
    "bit_in_data": (flipping(DATA, 4200), {(DATA, "params/w")}, "chunk 1 has crc32c"),
    "bits_in_data": (flipping(DATA, 0, 4200, 24_000), {(DATA, "params/w"), (DATA, "v")}, "chunk 0 has crc32c"),
    "bit_in_the_tree": (flipping("state/tree.json", 100), {("state/tree.json", "")}, "expected crc32c"),
    "bit_in_the_index": (flipping("state/d/index", 60), {("state/d/index", "")}, "expected crc32c"),
    "bit_in_the_manifest": (flipping("state/manifest.ocdbt", 20), {("state/manifest.ocdbt", "")}, "expected crc32c"),
    "bit_in_the_record": (flipping("checkpoint.json", 100), {("checkpoint.json", "")}, "is damaged"),
    "short_data": (
        lambda files: files.write(DATA, files.read()[DATA][:20_000]),
        {(DATA, ""), (DATA, "v")},
        "expected .* bytes, found 20000",
    ),
    "longer_data": (
        lambda files: files.write(DATA, files.read()[DATA] + b"x"),
        {(DATA, "")},
        "expected .* bytes, found",
    ),
    "missing_data": (lambda files: files.remove(DATA), {(DATA, ""), (DATA, "params/w"), (DATA, "v")}, "missing"),
    "missing_tree": (lambda files: files.remove("state/tree.json"), {("state/tree.json", "")}, "is missing"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_verifying_names_the_files_and_leaves_that_are_damaged(name: str, place: str, stored: Any, short: Any) -> None:
    spoil, expected, says = SPOILED[name]
    tree = {"params": {"w": np.arange(5000, dtype=np.uint16)}, "v": np.ones(2000), "whole": "text"}
    hf.save(place, tree, layout=SMALL)
    assert hf.verify(place).ok
    spoil(stored(place))
    report = hf.verify(place)
    assert not report.ok
    (checkpoint,) = report.checkpoints
    assert {(short(problem.file), problem.leaf) for problem in checkpoint.problems} == expected
    assert any(re.search(says, problem.what) for problem in checkpoint.problems)


def test_verifying_several_items_names_them(place: str, stored: Any, short: Any) -> None:
    items = {
        "state": hf.PyTreeCheckpointer(),
        "ema": hf.PyTreeCheckpointer(),
        "config": hf.Checkpointer(hf.JsonCheckpointHandler()),
    }
    with hf.CheckpointManager(place, items) as manager:
        manager.save(1, {"state": {"w": np.ones(9)}, "ema": {"w": np.ones(9)}, "config": {"a": 1}})
    for path, position in (("ema/d/0", 0), ("config/data.json", 10)):
        flipping(path, position)(stored(f"{place}/1"))
    (checkpoint,) = hf.verify(place).checkpoints
    assert [(short(problem.file), problem.leaf) for problem in checkpoint.problems] == [
        ("ema/d/0", "ema: w"),
        ("config/data.json", ""),
    ]


@pytest.mark.parametrize("distance", [31, pytest.param(7, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", ["bit", "missing", "short"])
def test_verifying_finds_all_that_makes_loading_fail(kind: str, distance: int, place: str, stored: Any) -> None:
    hf.save(place, TREE)
    files = stored(place)
    for path, content in files.read().items():
        for position in range(0, len(content), distance):
            if kind == "bit":
                flipping(path, position)(files)
            elif kind == "short":
                files.write(path, content[:position])
            elif path != "checkpoint.json":
                files.remove(path)
            try:
                hf.load(place)
            except hf.HoldfastError:
                assert not hf.verify(place).ok
            files.write(path, content)
            if kind == "missing":
                break


def test_a_step_that_is_deleted_before_it_is_verified_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        hf.save(tmp_path / str(step), {"x": step})

    def deleting(location: Any) -> Any:
        found = discovery.find_steps(location)
        shutil.rmtree(tmp_path / "1")
        return found

    monkeypatch.setattr(inspection, "find_steps", deleting)
    assert [(one.step, one.problems) for one in hf.verify(tmp_path).checkpoints] == [(2, ())]


def test_what_save_wrote_under_numbers_are_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        hf.save(tmp_path / str(step), {"x": step})

    assert [(one.step, one.damage) for one in hf.list_checkpoints(tmp_path)] == [(1, None), (2, None)]
    assert hf.verify(tmp_path).ok
    with hf.CheckpointManager(tmp_path) as manager:
        assert manager.restore() == {"x": 2}
        manager.delete(2)
    with hf.CheckpointManager(tmp_path, options=hf.CheckpointManagerOptions(max_to_keep=1)) as manager:
        manager.save(3, {"x": 3})
        manager.save(4, {"x": 4})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4], "what no manager has saved is left alone"
        assert manager.why_kept(1) == ("pinned",)
    assert hf.load(tmp_path / "1") == {"x": 1}
