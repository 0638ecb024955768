"""An object store behaves as a disk does: the same calls, the same results, the same files; also one of others."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.commands import Cli
from tests.equality import assert_same
from tests.manager.runs import newest_whole, saved
from tests.object_stores.conftest import Store, outcome
from tests.object_stores.store_server import StoredObject
from tests.storage.test_storage_conformance import BackendConformance

import holdfast as hf
from holdfast.engine.steps import read_record
from holdfast.engine.storage import Location, as_location, location

AZURE = True

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=16_384)


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full((60, 100), step, np.float32), "step": step, "name": "x" * step, "none": None}


class Note(hf.handlers.CheckpointHandler):
    """A handler of the user's own: text in files of its own choice."""

    def save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> None:
        (directory / "note.txt").write_bytes(item.encode())
        (directory / "below").make_directory()
        (directory / "below" / "copy.txt").write_bytes(item.encode())

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> str:
        return (directory / "below" / "copy.txt").read_bytes().decode()


def result(action: Callable[[], Any]) -> Any:
    """What a call returns, or which error it raises."""
    found = outcome(action)
    return type(found).__name__ if isinstance(found, hf.HoldfastError) else found


def save_and_load(place: str) -> list[Any]:
    one = f"{place}/a folder/größe"
    results = [
        result(lambda: hf.load(one)),
        hf.save(one, tree(1), layout=SMALL).bytes == read_record(as_location(one)).nbytes,
        result(lambda: hf.save(one, tree(2))),
        hf.load(one),
        hf.save(one, tree(3), overwrite=True).bytes == read_record(as_location(one)).nbytes,
        hf.load(one, like=tree(0)),
        hf.load(one, select="w"),
        hf.verify(one).ok,
        [leaf.path for leaf in hf.describe(one)],
        result(lambda: hf.save(f"{place}/a folder", tree(1))),
        result(lambda: hf.save(one, {"bad": object()}, overwrite=True)),
        hf.load(one),
    ]
    (as_location(place) / "mine" / "notes").parent.make_directory()
    (as_location(place) / "mine" / "notes").write_bytes(b"mine")
    results.append(result(lambda: hf.save(f"{place}/mine", tree(1), overwrite=True)))
    return results


def checkpointers(place: str) -> list[Any]:
    results: list[Any] = []
    with hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()) as checkpointer:
        for number in range(3):
            checkpointer.save(f"{place}/async", tree(number), force=True)
        results.append(checkpointer.restore(f"{place}/async"))
        checkpointer.save(f"{place}/taken", 1)
        checkpointer.wait_until_finished()
        results.append(result(lambda: checkpointer.save(f"{place}/taken", 2)))
    json = hf.Checkpointer(hf.JsonCheckpointHandler())
    json.save(f"{place}/json", {"a": [1, None]})
    results += [json.restore(f"{place}/json"), hf.load(f"{place}/json")]
    note = hf.Checkpointer(Note())
    note.save(f"{place}/note", "hello")
    results += [note.restore(f"{place}/note"), result(lambda: hf.load(f"{place}/note")), hf.verify(f"{place}/note").ok]
    return results


def manager(place: str) -> list[Any]:
    results: list[Any] = []
    options = hf.CheckpointManagerOptions(
        max_to_keep=2, best_fn="loss", best_mode="min", keep_period=5, step_prefix="s"
    )
    items = {"state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()), "note": hf.Checkpointer(Note())}
    with hf.CheckpointManager(place, items, options, metadata={"run": 1}) as first:
        for step in range(1, 8):
            first.save(step, {"state": tree(step), "note": f"note{step}"}, metrics={"loss": (step - 3) ** 2})
        first.wait_until_finished()
        assert first.all_steps() == [3, 4, 5, 7]
        results += [first.best_step(), first.latest_step(), first.why_kept(5), first.metrics(3)]
        first.pin(7)
        first.record_metrics(7, {"loss": -1.0, "more": {"a": 2}})
        first.save(7, {"state": tree(70), "note": "again"}, force=True)
        first.delete(3)
        results += [first.all_steps(), result(lambda: first.restore(3)), first.restore(7)]
    with hf.CheckpointManager(place, items, options) as second:
        results += [second.all_steps(), second.metadata(), second.metrics(7)]
        second.save(8, {"state": tree(8), "note": "note8"}, metrics={"loss": float("nan")})
        restored = newest_whole(second, {"state": tree(0)})
        results += [restored.step, restored.items, restored.skipped, second.all_steps()]
    results += [
        [(s.step, s.reason, s.kept, s.damage) for s in hf.list_checkpoints(place)],
        hf.load(place, item="state"),
        result(lambda: hf.load(place, item="note")),
        hf.verify(place).ok,
    ]
    return results


SCENARIOS: dict[str, Callable[[str], list[Any]]] = {
    "save_and_load": save_and_load,
    "checkpointers": checkpointers,
    "manager": manager,
}


def files_of(stored: Any, short: Any, place: str) -> list[str]:
    """The paths below a place, without the parts of names that are new each time, and what only disks have."""
    found = (re.sub(r"\.[0-9a-f]{8}(?=/)", ".*", short(path)) for path in stored(place).read())
    return sorted(path for path in found if path != "events.jsonl")


@pytest.fixture(scope="session")
def on_a_disk(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    return functools.cache(lambda name: SCENARIOS[name](str(tmp_path_factory.mktemp(name))))


@pytest.mark.parametrize("name", SCENARIOS)
def test_memory_is_the_same_as_a_disk(name: str, place: str, tmp_path: Path, stored: Any, short: Any) -> None:
    assert_same(SCENARIOS[name](place), SCENARIOS[name](str(tmp_path)))
    assert files_of(stored, short, place) == files_of(stored, short, str(tmp_path))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_store_is_the_same_as_a_disk(store: Store, name: str, on_a_disk: Callable[[str], list[Any]]) -> None:
    assert_same(SCENARIOS[name](f"{store.url}/a run"), on_a_disk(name))


@pytest.mark.parametrize("name", ["save_and_load", "manager"])
def test_a_server_of_others_is_the_same_as_a_disk(
    rclone: str, name: str, on_a_disk: Callable[[str], list[Any]]
) -> None:
    assert_same(SCENARIOS[name](rclone), on_a_disk(name))


TREE = {"params": {"kernel": np.arange(600, dtype=np.float32)}, "step": 3}


def folders(objects: dict[str, StoredObject]) -> None:
    """Damages the step 5 by its record, 4 and 2 by an object that is gone, and 3 by one that is cut short."""
    objects["run/5/checkpoint.json"].content = b"{"
    [manifest] = [key for key in objects if key.startswith("run/4/") and key.endswith("manifest.ocdbt")]
    [data] = [key for key in objects if key.startswith("run/3/") and ".0.0" in key]
    [gone] = [key for key in objects if key.startswith("run/2/") and ".0.0" in key]
    del objects[manifest], objects[gone]
    objects[data].content = objects[data].content[:100]


def zip_files(objects: dict[str, StoredObject]) -> None:
    _, second, third, fourth, fifth = (key for key in sorted(objects) if key.endswith(".zip"))
    del objects[second]
    objects[third].content = objects[third].content[:-1]
    objects[fourth].content = objects[fourth].content.replace(b"tree.json", b"tree.jsom")
    objects[fifth].content = b"PK"


@pytest.mark.parametrize(("damages", "size"), [(folders, 50_000), (zip_files, 600)])
def test_damaged_steps_are_passed_over(
    store: Store, damages: Callable[[dict[str, StoredObject]], None], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{store.url}/run"
    saved(url, *range(1, 6), items=lambda step: {"w": np.full(size, step), "step": step})
    damages(store.server.buckets[store.bucket])
    with hf.CheckpointManager(url) as run:
        restored = newest_whole(run)
        assert (restored.step, [step for step, _ in restored.skipped]) == (1, [5, 4, 3, 2])
        assert "is missing: the checkpoint is incomplete" in restored.skipped[3][1]
        for step in (2, 3, 4, 5):
            run.save(step, TREE, force=True)
        run.wait_until_finished()
        assert run.all_steps() == [1, 2, 3, 4, 5]
    assert hf.verify(url).ok
    assert "step 4 is damaged and passed over" in caplog.text
    assert sum(len(store.names(f"run/{step}/")) for step in (2, 3, 4)) == 6, "a record and a zip file of each"


def test_the_command_takes_urls(store: Store, cli: Cli) -> None:
    saved(f"{store.url}/a run", 1, 2)
    url = f"{store.url}/a%20run"
    listed = cli.json("ls", url)["checkpoints"]
    assert [(one["step"], one["damage"]) for one in listed] == [(1, None), (2, None)]
    for place in (url, f"{url}/1"):
        assert "b/c" in cli.output("show", place)
    assert "2 whole" in cli.output("verify", url)
    [key] = [key for key in store.stored("a run/2/") if key.endswith(".zip")]
    content = bytearray(store.server.buckets[store.bucket][key].content)
    content[70] ^= 1
    store.server.put(store.bucket, key, bytes(content))
    assert key.rpartition("/")[2] in cli.output("verify", url, status=1)
    assert f"{store.url}/nothing" in cli.error("ls", f"{store.url}/nothing", status=2)


def test_an_error_of_the_store_is_one_line_of_the_command(s3: Store, cli: Cli) -> None:
    s3.server.fail(".", times=1000, answer=s3.server.error(403, "AccessDenied"))
    said = cli.error("ls", f"{s3.url}/run", status=1)
    assert said.startswith("holdfast: ")
    assert "credentials of AWS_ACCESS_KEY_ID" in said


def test_from_disk_to_store_and_back(store: Store, tmp_path: Path) -> None:
    hf.save(f"{store.url}/ckpt", TREE)
    for key in store.stored():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(store.server.buckets[store.bucket][key].content)
    assert hf.verify(tmp_path / "ckpt").ok
    assert_same(hf.load(tmp_path / "ckpt"), hf.load(f"{store.url}/ckpt"))
    hf.save(tmp_path / "other", TREE)
    for path in sorted((tmp_path / "other").rglob("*")):
        if path.is_file():
            store.server.put(store.bucket, str(path.relative_to(tmp_path)), path.read_bytes())
    assert hf.verify(f"{store.url}/other").ok


def test_without_ranges_objects_are_read_as_a_whole(rclone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore refuses a range with the status of a whole object."""
    monkeypatch.setattr(location, "UPLOADS", 1)  # rclone may answer 500 to two that go to one folder at a time
    tree = {"w": np.arange(2_000_000, dtype=np.float32), "small": {str(n): np.full(n, n) for n in range(50)}}
    layout = hf.Layout(chunk_bytes=1 << 20, segment_bytes=1 << 20, upload_bytes=2 << 20)
    hf.save(f"{rclone}/ckpt", tree, layout=layout)
    assert_same(hf.load(f"{rclone}/ckpt"), tree)
    assert hf.verify(f"{rclone}/ckpt").ok


def test_conditions_are_found_to_be_ignored(rclone: str) -> None:
    place = as_location(f"{rclone}/object")
    place.write_bytes(b"content")
    assert not place.honours_conditions(b"content")
    assert place.read_bytes() == b"content"


class TestStores(BackendConformance):
    @pytest.fixture
    def root(self, store: Store) -> Location:
        return as_location(f"{store.url}/a folder/below")
