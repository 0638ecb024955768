"""Items that are zip files are read, verified, copied, replaced and deleted like folders."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.archives import make_archives, read_record
from tests.damage import flipped
from tests.equality import assert_same
from tests.processes.threads import together, unwrap

import holdfast as hf
from holdfast import graph
from holdfast.engine.checkpoint import copied_step
from holdfast.engine.distributed import Coordinator
from holdfast.engine.format import encode_archive
from holdfast.engine.sources import open_checkpoint
from holdfast.engine.storage.folders import FolderInMemory
from holdfast.storage import as_location

W = np.arange(300.0).reshape(30, 10)
TREE = {"w": W, "n": {"a": 1, "b": "text"}, "s": [np.float32(2)], "long": "x" * 9000}
SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=4096, data_file_bytes=4096)


def saved(place: Path, *, archive: bool, **options: Any) -> Path:
    hf.save(place, TREE, **options)
    if archive:
        make_archives(place)
    return place


def opened(place: Path) -> Any:
    with hf.open(place) as tree:
        return [tree["w"][3:20, ::2], np.asarray(tree["w"]), tree["n"]["a"], tree["w"].shape]


def exported(name: Any, **options: Any) -> Callable[[Path], Any]:
    def export(place: Path) -> Any:
        target = place.parent / f"{place.name}.{name}"
        hf.export_checkpoint(place, target, name, **options)
        return hf.load(target)

    return export


READS: dict[str, Callable[[Path], Any]] = {
    "load": hf.load,
    "a template": lambda place: hf.load(place, like=TREE),
    "some leaves": lambda place: hf.load(place, select=["n/*", "w"]),
    "a checkpointer": lambda place: hf.PyTreeCheckpointer().restore(place, TREE),
    "structure": lambda place: hf.PyTreeCheckpointer().structure(place),
    "describe": lambda place: [(leaf.path, leaf.kind, leaf.shape, leaf.bytes) for leaf in hf.describe(place)],
    "verify": lambda place: hf.verify(place).ok,
    "slices": opened,
    "safetensors": exported("safetensors", select=["w", "s/**"]),
    "orbax": exported("orbax"),
    "transformed": lambda place: hf.load_transformed(place, {"v": hf.Transform(original_key="w")}, {"v": ...}),
}


@pytest.mark.parametrize("layout", [hf.Layout(), SMALL, hf.Layout(compression=3)], ids=["plain", "parts", "compressed"])
def test_reads_are_those_of_the_folder(tmp_path: Path, layout: hf.Layout) -> None:
    folder = saved(tmp_path / "folder", archive=False, layout=layout)
    archive = saved(tmp_path / "archive", archive=True, layout=layout)
    assert sorted(os.listdir(archive)) == ["checkpoint.json", "state.zip"]
    versions = [json.loads((place / "checkpoint.json").read_text())["version"] for place in (folder, archive)]
    assert versions == [1, 2], "earlier versions of holdfast refuse it, and say why"
    for what, read in READS.items():
        assert_same(read(archive), read(folder), what)
    with pytest.raises(hf.errors.OptionError, match=r"archive: state: a zip file.*export a copy"):
        hf.add_orbax_metadata(archive)


def test_other_programs_open_it(tmp_path: Path) -> None:
    """The items of a checkpoint, and of several processes: files of which each has the zip file of its own."""
    import tensorstore as ts

    place = saved(tmp_path / "one", archive=True)
    file, several_files = f"file://{place}/state.zip", saved_shares(tmp_path / "run", [5, 6, 7]) / "own/0-2.zip"
    base = {"driver": "ocdbt", "base": {"driver": "zip", "base": file}, "path": "w/"}
    for spec, values in [
        (f"{file}|zip:|ocdbt:w/|zarr3:", W.tolist()),
        ({"driver": "zarr3", "kvstore": base}, W.tolist()),
        (f"file://{several_files}|zip:1.zip|zip:|ocdbt:values/|zarr3:", expected([5, 6, 7])[1]),
    ]:
        assert ts.open(spec).result().read().result().tolist() == values
    shutil.unpack_archive(several_files, tmp_path / "unpacked")
    assert sorted(os.listdir(tmp_path / "unpacked")) == ["0.zip", "1.zip", "2.zip"]
    for archive, to in {place / "state.zip": "folder", tmp_path / "unpacked/2.zip": "share"}.items():
        shutil.unpack_archive(archive, tmp_path / to, "zip")
        assert {"tree.json", "manifest.ocdbt", "d"} == set(os.listdir(tmp_path / to))


def test_a_run_with_items_of_all_kinds(tmp_path: Path) -> None:
    checkpointers = {
        "state": hf.Checkpointer(hf.PyTreeCheckpointHandler()),
        "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        "own": hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()),
    }
    items = {"state": TREE, "facts": {"a": [1, None]}, "own": {"seed": np.arange(5)}}
    place, options = tmp_path / "run", hf.CheckpointManagerOptions(max_to_keep=2)
    with hf.CheckpointManager(place, checkpointers) as run:
        for step in (1, 2, 3):
            run.save(step, items)
    for step in (1, 3):
        make_archives(place / str(step), ["state", "facts"])
    assert sorted(os.listdir(place / "3")) == ["checkpoint.json", "facts.zip", "own", "state.zip"]
    with hf.CheckpointManager(place, checkpointers, options=options) as run:
        for step in (2, 3):
            assert_same(run.restore(step), run.restore(1))
        run.save(3, {**items, "state": {"w": np.zeros(3)}}, force=True)
        run.save(4, items)
    assert run.all_steps() == [3, 4]
    assert {"checkpoint.json", "facts", "state"} <= set(os.listdir(place / "3")), "what it replaces is gone"
    assert len(os.listdir(place / "3")) == 4
    assert not (place / "1").exists()
    assert hf.verify(place).ok


def test_graphs(tmp_path: Path) -> None:
    path = Path(str(graph.Checkpoint(model=graph.Node(w=np.arange(5.0), step=3)).save(tmp_path / "one")))
    make_archives(path)
    fresh = graph.Node(w=np.zeros(5), step=0)
    graph.Checkpoint(model=fresh).restore(path).assert_consumed()
    assert (fresh.w.tolist(), fresh.step) == ([0, 1, 2, 3, 4], 3)
    assert hf.verify(path).ok


def test_copies_are_zip_files_too(tmp_path: Path, place: str) -> None:
    original, back = saved(tmp_path / "one", archive=True), tmp_path / "back"
    hf.copy_checkpoint(original, place)
    with pytest.raises(EOFError), copied_step(as_location(place), as_location(back), read_record(original)):
        raise EOFError  # it is interrupted
    assert sorted(os.listdir(back)) == ["checkpoint.partial", "state.zip"]
    (report,) = hf.copy_checkpoint(place, back)
    assert report.sent == 0
    assert sorted(os.listdir(back)) == ["checkpoint.json", "state.zip"]
    assert hf.verify(back).ok
    assert (back / "state.zip").read_bytes() == (original / "state.zip").read_bytes()
    assert read_record(back).fingerprint == read_record(original).fingerprint
    assert_same(hf.load(place), hf.load(original))
    for how in (hf.save, lambda to, _, **options: hf.copy_checkpoint(original, to, **options)):
        how(back, TREE, overwrite=True)
        assert len(os.listdir(back)) == 2
        assert_same(hf.load(back), hf.load(original))


def test_a_part_of_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    place = saved(tmp_path / "one", archive=True)
    saved(tmp_path / "folder", archive=False)
    hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()).save(tmp_path / "shares", {"seed": np.arange(5)})
    shutil.copy(place / "state.zip", tmp_path / "stray.zip")
    for path, said in {
        "folder/state": r"part of the checkpoint .*folder; .*item='state'",
        "one/state.zip": r"part of the checkpoint .*one; .*item='state'",
        "shares/state/0.zip": r"part of the checkpoint .*shares; .*item='state/0'",
        "stray.zip": "part of one, in a zip file; load the checkpoint that it belongs to",
    }.items():
        for read in (hf.load, hf.describe, hf.verify):
            with pytest.raises(hf.CheckpointNotFoundError, match=said):
                read(tmp_path / path)


def test_a_reader_holds_the_zip_file_of_one_item(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    checkpointers = {name: hf.Checkpointer(hf.PyTreeCheckpointHandler()) for name in names}
    with hf.CheckpointManager(tmp_path, checkpointers) as run:
        run.save(1, {name: {"w": np.full(3, position)} for position, name in enumerate(names)})
    make_archives(tmp_path / "1")
    gc.collect()  # those of other tests
    before = [one for one in gc.get_objects() if isinstance(one, FolderInMemory)]
    checkpoint = open_checkpoint(as_location(tmp_path / "1"))
    assert [checkpoint.load(name)["w"][0] for name in [*names, "a"]] == [0, 1, 2, 3, 0]
    assert sum(isinstance(one, FolderInMemory) for one in gc.get_objects()) == len(before) + 1


def flipped_at(tenths: int, content: bytes) -> bytes:
    return flipped(content, tenths * (len(content) - 1) // 10)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "cut": lambda content: content[:-5],
    "longer": lambda content: content + b"x",
    "empty": lambda content: b"",
    "the first byte": lambda content: b"x" + content[1:],
    "another, whole one": lambda content: encode_archive({"tree.json": b"{}"}),
    **{f"a bit at {tenths}/10": partial(flipped_at, tenths) for tenths in range(11)},
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(tmp_path: Path, what: str) -> None:
    place = saved(tmp_path / "one", archive=True)
    content = DAMAGE[what]((place / "state.zip").read_bytes())
    if content is None:
        (place / "state.zip").unlink()
    else:
        (place / "state.zip").write_bytes(content)
    for read in (hf.load, hf.describe, lambda place: hf.load(place, select="n/a")):
        with pytest.raises(hf.DamagedCheckpointError, match=r"one/state\.zip"):
            read(place)
    (problem,) = hf.verify(place).checkpoints[0].problems
    assert problem.file == "state.zip"
    with pytest.raises(hf.DamagedCheckpointError, match=r"state\.zip"):
        hf.copy_checkpoint(place, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "other files beside it": lambda item: item["files"].update({"tree.json": {"size": 5}}),
    "no digest": lambda item: item["files"][""].pop("crc32c"),
    "a huge size": lambda item: item["files"][""].update(size=1 << 40),
    "a negative size": lambda item: item["files"][""].update(size=-1),
    "a folder above": lambda item: item.update(folder="../state.zip"),
    "the record": lambda item: item.update(folder="checkpoint.json"),
    "the directory": lambda item: item.update(folder="."),
    "kind_components": lambda item: item.update(kind="components"),
}


# ---- the small trees of several processes lie in one file; each process reads its own, and no other


def saved_shares(place: Path, counts: Sequence[int]) -> Path:
    """Save step 1 in threads that stand for processes; each has an array of its own, of so many numbers."""

    def run(coordinator: Coordinator) -> None:
        with several(place, coordinator) as manager:
            manager.save(1, {"own": values(coordinator.process_index, counts[coordinator.process_index])})

    unwrap(together(len(counts), run))
    return place / "1"


def several(place: Path, coordinator: Coordinator) -> hf.CheckpointManager:
    own = hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler(coordinator=coordinator))
    return hf.CheckpointManager(place, {"own": own}, coordinator=coordinator)


def restored(place: Path, count: int) -> list[Any]:
    """Restore step 1 in so many threads; return what each has got, or its error."""

    def run(coordinator: Coordinator) -> list[float]:
        with several(place, coordinator) as manager:
            found: list[float] = manager.restore(1)["own"]["values"].tolist()
            return found

    return together(count, run)


def values(process: int, count: int) -> dict[str, Any]:
    return {"values": np.arange(count) + 1000.0 * process}


def expected(counts: Sequence[int]) -> list[list[float]]:
    return [values(process, count)["values"].tolist() for process, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "files", "version"),
    [
        pytest.param([5, 6, 7], ["0-2.zip"], 3, id="all small"),
        pytest.param([5], ["0.zip"], 2, id="one process"),
        pytest.param([5, 90_000, 7, 8], ["0.zip", "1", "2-3.zip"], 3, id="one large"),
        pytest.param([5, 6, 3_000, 8], ["0-1.zip", "2.zip", "3.zip"], 3, id="one too large to be sent to process 0"),
        pytest.param([90_000], ["0"], 1, id="one process, large"),
        pytest.param([90_000, 90_000], ["0", "1"], 1, id="all large"),
        pytest.param([1500] * 12, ["0-11.zip"], 3, id="numbers of two digits"),
    ],
)
def test_shares_of_several_processes(tmp_path: Path, counts: list[int], files: list[str], version: int) -> None:
    step = saved_shares(tmp_path / "run", counts)
    assert sorted(os.listdir(step / "own")) == files
    assert json.loads((step / "checkpoint.json").read_text())["version"] == version
    hf.copy_checkpoint(step, tmp_path / "copy" / "1")
    for place in (tmp_path / "run", tmp_path / "copy"):
        assert hf.verify(place).ok
        assert unwrap(restored(place, len(counts))) == expected(counts)
        assert unwrap(restored(place, 1)) == expected(counts)[:1]
        for process, own in enumerate(expected(counts)):
            began = bytes_read()
            assert hf.load(place / "1", item=f"own/{process}")["values"].tolist() == own
            if len(counts) == 12:
                assert bytes_read() - began < (step / "own" / files[0]).stat().st_size / 4, "it reads its own share"
        assert sum(leaf.path == "values" for leaf in hf.describe(place / "1")) == len(counts)
    last = len(counts) - 1
    with several(tmp_path / "run", hf.processes.Alone()) as manager:
        found = manager.restore(1, restore_kwargs={"own": {"process": last}})["own"]["values"]
        assert found.tolist() == expected(counts)[last]
        with pytest.raises(hf.errors.OptionError, match=rf"process={last + 1}: .*/own has trees? of .* from 0"):
            manager.restore(1, restore_kwargs={"own": {"process": last + 1}})


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ", 1)[1].split("\n", 1)[0])


def test_damage_is_found_by_the_process_whose_share_it_is(tmp_path: Path) -> None:
    counts = [5, 6, 7]
    pack = saved_shares(tmp_path / "run", counts) / "own" / "0-2.zip"
    whole = pack.read_bytes()
    hit = set()
    for place in range(0, len(whole), 61):
        pack.write_bytes(flipped(whole, place))
        found = restored(tmp_path / "run", 3)
        failed = {process for process, one in enumerate(found) if isinstance(one, hf.DamagedCheckpointError)}
        assert len(failed) <= 1, "the headers of the zip file belong to no share"
        for process, own in enumerate(expected(counts)):
            assert f"own/0-2.zip/{process}.zip" in str(found[process]) if process in failed else found[process] == own
        hit |= failed
        problems = hf.verify(tmp_path / "run").checkpoints[0].problems
        assert "own/0-2.zip" in {problem.file for problem in problems}
        with pytest.raises(hf.DamagedCheckpointError, match=r"own/0-2\.zip"):
            hf.copy_checkpoint(tmp_path / "run/1", tmp_path / "copy")
    assert hit == {0, 1, 2}


def test_the_file_of_another_save(tmp_path: Path) -> None:
    """It is whole, and of the same length: the record tells that it is not the one that was saved."""
    pack, other = (saved_shares(tmp_path / run, [5, 5]) / "own" / "0-1.zip" for run in ("run", "other"))
    assert other.stat().st_size == pack.stat().st_size
    shutil.copy(other, pack)
    assert all(isinstance(one, hf.DamagedCheckpointError) for one in restored(tmp_path / "run", 2))


HOSTILE_SHARES: dict[str, Callable[[Any], Any]] = {
    "fewer members": lambda files: files["0-2.zip"].update(members=files["0-2.zip"]["members"][:2]),
    "no members": lambda files: files["0-2.zip"].update(members=[]),
    "not members": lambda files: files["0-2.zip"].update(members="abc"),
    "a huge member": lambda files: files["0-2.zip"]["members"].__setitem__(1, [1 << 40, "00000000"]),
    "a negative member": lambda files: files["0-2.zip"]["members"].__setitem__(0, [-5, "00000000"]),
    "a huge file": lambda files: files["0-2.zip"].update(size=1 << 40),
    "another name": lambda files: files.update({"x.zip": files.pop("0-2.zip")}),
    "other processes": lambda files: files.update({"1-3.zip": files.pop("0-2.zip")}),
    "a process twice": lambda files: files.update({"2.zip": {"size": 5, "crc32c": "00000000"}}),
    "two of one name": lambda files: files.update({"a/0-2.zip": files["0-2.zip"]}),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", [*HOSTILE, *HOSTILE_SHARES])
def test_forged_records(tmp_path: Path, stored: Any, look: Callable[..., list[str]], what: str) -> None:
    if what in HOSTILE:
        place = saved(tmp_path / "one", archive=True)
        stored(str(place)).edit(lambda body: HOSTILE[what](body["items"]["state"]))
    else:
        place = saved_shares(tmp_path / "run", [5, 6, 7])
        stored(str(place)).edit(lambda body: HOSTILE_SHARES[what](body["items"]["own"]["files"]))
    assert look(str(place), loads=what == "a huge file")
    assert what.startswith("kind_") or not hf.verify(place).ok
