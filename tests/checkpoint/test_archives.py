"""Items that are zip files are read, verified, copied, replaced and deleted like folders."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.archives import make_archives, read_record

import holdfast as hf
from holdfast import graph
from holdfast.engine.checkpoint import copied_step
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


def as_safetensors(place: Path) -> Any:
    target = place.parent / f"{place.name}.safetensors"
    hf.export_checkpoint(place, target, "safetensors", select=["w", "s/**"])
    return hf.load(target)


def as_orbax(place: Path) -> Any:
    target = place.parent / f"{place.name}.orbax"
    hf.export_checkpoint(place, target, "orbax")
    return hf.load(target)


READS: dict[str, Callable[[Path], Any]] = {
    "load": hf.load,
    "a template": lambda place: hf.load(place, like=TREE),
    "some leaves": lambda place: hf.load(place, select=["n/*", "w"]),
    "a checkpointer": lambda place: hf.PyTreeCheckpointer().restore(place, TREE),
    "structure": lambda place: hf.PyTreeCheckpointer().structure(place),
    "describe": lambda place: [(leaf.path, leaf.kind, leaf.shape, leaf.bytes) for leaf in hf.describe(place)],
    "verify": lambda place: hf.verify(place).ok,
    "slices": opened,
    "safetensors": as_safetensors,
    "orbax": as_orbax,
    "transformed": lambda place: hf.load_transformed(place, {"v": hf.Transform(original_key="w")}, {"v": ...}),
}


@pytest.mark.parametrize("layout", [hf.Layout(), SMALL, hf.Layout(compression=3)], ids=["plain", "parts", "compressed"])
@pytest.mark.parametrize("read", READS)
def test_reads_are_those_of_the_folder(tmp_path: Path, read: str, layout: hf.Layout, assert_same: Any) -> None:
    folder = saved(tmp_path / "folder", archive=False, layout=layout)
    archive = saved(tmp_path / "archive", archive=True, layout=layout)
    assert sorted(os.listdir(archive)) == ["checkpoint.json", "state.zip"]
    versions = [json.loads((place / "checkpoint.json").read_text())["version"] for place in (folder, archive)]
    assert versions == [1, 2], "earlier versions of holdfast refuse it, and say why"
    assert_same(READS[read](archive), READS[read](folder))


def test_other_programs_open_it(tmp_path: Path) -> None:
    import tensorstore as ts

    place = saved(tmp_path / "one", archive=True)
    file = f"file://{place}/state.zip"
    base = {"driver": "ocdbt", "base": {"driver": "zip", "base": file}, "path": "w/"}
    for spec in (f"{file}|zip:|ocdbt:w/|zarr3:", {"driver": "zarr3", "kvstore": base}):
        assert np.array_equal(ts.open(spec).result().read().result(), W)
    shutil.unpack_archive(place / "state.zip", tmp_path / "unpacked", "zip")
    assert {"tree.json", "manifest.ocdbt", "d"} == set(os.listdir(tmp_path / "unpacked"))


def test_a_run_with_items_of_all_kinds(tmp_path: Path, assert_same: Any) -> None:
    checkpointers = {
        "state": hf.Checkpointer(hf.PyTreeCheckpointHandler()),
        "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        "own": hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()),
    }
    items = {"state": TREE, "facts": {"a": [1, None]}, "own": {"seed": np.arange(5)}}
    with hf.CheckpointManager(tmp_path / "run", checkpointers) as run:
        for step in (1, 2, 3):
            run.save(step, items)
    for step in (1, 3):
        make_archives(tmp_path / "run" / str(step), ["state", "facts"])
    assert sorted(os.listdir(tmp_path / "run/3")) == ["checkpoint.json", "facts.zip", "own", "state.zip"]
    with hf.CheckpointManager(
        tmp_path / "run", checkpointers, options=hf.CheckpointManagerOptions(max_to_keep=2)
    ) as run:
        for step in (2, 3):
            assert_same(run.restore(step), run.restore(1))
        run.save(3, {**items, "state": {"w": np.zeros(3)}}, force=True)
        run.save(4, items)
    assert run.all_steps() == [3, 4]
    assert {"checkpoint.json", "facts", "state"} <= set(os.listdir(tmp_path / "run/3")), "what it replaces is gone"
    assert len(os.listdir(tmp_path / "run/3")) == 4
    assert not (tmp_path / "run/1").exists()
    assert hf.verify(tmp_path / "run").ok


def test_the_tree_of_a_process_is_one_file(tmp_path: Path) -> None:
    """A small one; a larger one has a folder, also beside small ones."""
    handler = hf.handlers.PerProcessCheckpointHandler()
    hf.Checkpointer(handler).save(tmp_path / "small", {"seed": np.arange(5)})
    hf.Checkpointer(handler).save(tmp_path / "large", {"seed": np.zeros(100_000)})
    assert os.listdir(tmp_path / "small/state") == ["0.zip"]
    assert os.listdir(tmp_path / "large/state") == ["0"]
    assert hf.Checkpointer(handler).restore(tmp_path / "small")["seed"].tolist() == [0, 1, 2, 3, 4]
    assert hf.load(tmp_path / "small", item="state/0")["seed"].tolist() == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "small/checkpoint.json").read_text())["version"] == 2
    assert json.loads((tmp_path / "large/checkpoint.json").read_text())["version"] == 1


def test_graphs(tmp_path: Path) -> None:
    node = graph.Node(w=np.arange(5.0), inner=graph.Node(step=3))
    path = Path(str(graph.Checkpoint(model=node).save(tmp_path / "one")))
    make_archives(path)
    fresh = graph.Node(w=np.zeros(5), inner=graph.Node(step=0))
    graph.Checkpoint(model=fresh).restore(path).assert_consumed()
    assert (fresh.w.tolist(), fresh.inner.step) == ([0, 1, 2, 3, 4], 3)
    assert hf.verify(path).ok


def test_copies_are_zip_files_too(tmp_path: Path, place: str, assert_same: Any) -> None:
    original = saved(tmp_path / "one", archive=True)
    hf.copy_checkpoint(original, place)
    hf.copy_checkpoint(place, tmp_path / "back")
    assert (tmp_path / "back/state.zip").read_bytes() == (original / "state.zip").read_bytes()
    assert read_record(tmp_path / "back").fingerprint == read_record(original).fingerprint
    assert_same(hf.load(place), hf.load(original))
    for how in (hf.save, lambda to, _, **options: hf.copy_checkpoint(original, to, **options)):
        how(tmp_path / "back", TREE, overwrite=True)
        assert len(os.listdir(tmp_path / "back")) == 2
        assert_same(hf.load(tmp_path / "back"), hf.load(original))


def test_an_interrupted_copy_continues(tmp_path: Path) -> None:
    original = saved(tmp_path / "one", archive=True)
    places = as_location(original), as_location(tmp_path / "two")
    with pytest.raises(EOFError), copied_step(*places, read_record(original)):
        raise EOFError
    assert sorted(os.listdir(tmp_path / "two")) == ["checkpoint.partial", "state.zip"]
    (report,) = hf.copy_checkpoint(original, tmp_path / "two")
    assert (report.sent, hf.verify(tmp_path / "two").ok) == (0, True)
    assert sorted(os.listdir(tmp_path / "two")) == ["checkpoint.json", "state.zip"]


def test_a_zip_file_alone_is_no_checkpoint(tmp_path: Path) -> None:
    place = saved(tmp_path / "one", archive=True)
    hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()).save(tmp_path / "shares", {"seed": np.arange(5)})
    shutil.copy(place / "state.zip", tmp_path / "stray.zip")
    for path, said in {
        "one/state.zip": r"part of the checkpoint .*one; .*item='state'",
        "shares/state/0.zip": r"part of the checkpoint .*shares; .*item='state/0'",
        "stray.zip": "part of one, in a zip file; load the checkpoint that it was a part of",
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


def test_orbax_cannot_read_it_in_place(tmp_path: Path) -> None:
    place = saved(tmp_path / "one", archive=True)
    with pytest.raises(hf.errors.OptionError, match=r"one: state: a zip file.*export a copy"):
        hf.add_orbax_metadata(place)


def flipped(tenths: int, content: bytes) -> bytes:
    place = tenths * (len(content) - 1) // 10
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "cut": lambda content: content[:-5],
    "longer": lambda content: content + b"x",
    "empty": lambda content: b"",
    "the first byte": lambda content: b"x" + content[1:],
    "another, whole one": lambda content: encode_archive({"tree.json": b"{}"}),
    **{f"a bit at {tenths}/10": partial(flipped, tenths) for tenths in range(11)},
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


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", HOSTILE)
def test_forged_records(tmp_path: Path, stored: Any, look: Callable[[str], list[str]], what: str) -> None:
    place = saved(tmp_path / "one", archive=True)
    stored(str(place)).edit(lambda body: HOSTILE[what](body["items"]["state"]))
    assert look(str(place))
    assert what.startswith("kind_") or not hf.verify(place).ok
