"""The same calls give the same results in a store as on a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.object_stores.conftest import Store
from tests.object_stores.test_remote import SCENARIOS

import holdfast as hf
from holdfast.cli.main import main

AZURE = True

# Two read the folders of items, which have new names for every save in object stores.
NAMES = [name for name in SCENARIOS if name not in ("damage", "leftovers")]
TREE = {"params": {"kernel": np.arange(600, dtype=np.float32)}, "step": 3}


@pytest.fixture(scope="session")
def on_a_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return {name: SCENARIOS[name](str(tmp_path_factory.mktemp(name))) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_on_a_disk(store: Store, name: str, on_a_disk: dict[str, list[Any]]) -> None:
    assert_same(SCENARIOS[name](f"{store.url}/a run"), on_a_disk[name])


def test_damaged_steps_are_passed_over(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as run:
        for step in range(1, 6):
            run.save(step, {"w": np.full(50_000, step), "step": step})
    objects = store.server.buckets[store.bucket]
    objects["run/5/checkpoint.json"].content = b"{"
    [manifest] = [key for key in objects if key.startswith("run/4/") and key.endswith("manifest.ocdbt")]
    [data] = [key for key in objects if key.startswith("run/3/") and ".0.0" in key]
    [gone] = [key for key in objects if key.startswith("run/2/") and ".0.0" in key]
    del objects[manifest], objects[gone]
    objects[data].content = objects[data].content[:100]
    with hf.CheckpointManager(url) as run:
        restored = run.restore_latest()
        assert restored is not None
        assert (restored.step, [step for step, _ in restored.skipped]) == (1, [5, 4, 3, 2])
        assert "is missing: the checkpoint is incomplete" in restored.skipped[3][1]
        for step in (2, 3, 4, 5):
            run.save(step, TREE, force=True)
        run.wait_until_finished()
        assert run.all_steps() == [1, 2, 3, 4, 5]
    assert hf.verify(url).ok
    assert "step 4 is damaged and passed over" in caplog.text


def test_damaged_zip_files_are_passed_over(store: Store) -> None:
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as run:
        for step in range(1, 5):
            run.save(step, TREE)
    objects = store.server.buckets[store.bucket]
    second, third, fourth = (key for key in sorted(objects) if key.endswith(".zip") and not key.startswith("run/1/"))
    del objects[second]
    objects[third].content = objects[third].content[:-1]
    objects[fourth].content = objects[fourth].content.replace(b"tree.json", b"tree.jsom")
    with hf.CheckpointManager(url) as run:
        restored = run.restore_latest()
        assert restored is not None
        assert (restored.step, [step for step, _ in restored.skipped]) == (1, [4, 3, 2])
        assert "is missing: the checkpoint is incomplete" in restored.skipped[2][1]
        for step in (2, 3, 4):
            run.save(step, TREE, force=True)
    assert hf.verify(url).ok
    assert len(store.stored("run/2/") + store.stored("run/3/") + store.stored("run/4/")) == 6


def test_the_command_takes_urls(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{store.url}/a run"
    with hf.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, TREE, metrics={"loss": 1.0 / step})
    escaped = url.replace(" ", "%20")
    assert main(["ls", escaped, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["damage"]) for one in listed["checkpoints"]] == [(1, None), (2, None)]
    assert main(["show", escaped]) == 0
    assert "params/kernel" in capsys.readouterr().out
    assert main(["show", f"{escaped}/1"]) == 0
    assert main(["verify", escaped]) == 0
    assert "2 whole" in capsys.readouterr().out
    [key] = [key for key in store.stored("a run/2/") if key.endswith(".zip")]
    content = bytearray(store.server.buckets[store.bucket][key].content)
    content[70] ^= 1
    store.server.put(store.bucket, key, bytes(content))
    assert main(["verify", escaped]) == 1
    assert key.rpartition("/")[2] in capsys.readouterr().out
    assert main(["ls", f"{store.url}/nothing"]) == 2
    assert f"{store.url}/nothing" in capsys.readouterr().err


def test_an_error_of_the_store_is_one_line_of_the_command(s3: Store, capsys: pytest.CaptureFixture[str]) -> None:
    s3.server.fail(".", times=1000, answer=s3.server.error(403, "AccessDenied"))
    assert main(["ls", f"{s3.url}/run"]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("holdfast: ")
    assert "credentials of AWS_ACCESS_KEY_ID" in said
    assert "Traceback" not in said


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
