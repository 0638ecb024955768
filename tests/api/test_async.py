"""`save_async` and `load_async`: Futures of what `save` and `load` give."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf


def test_a_checkpoint_has_the_values_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    changed, real = threading.Event(), os.pwrite

    def after_the_change(*arguments: Any) -> int:
        assert changed.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", after_the_change)
    tree = {"w": np.arange(100_000), "t": torch.ones(100_000), "l": [1]}
    futures = [hf.save_async(tmp_path / name, tree) for name in "ab"]
    assert not any(future.done() or future.cancel() for future in futures)
    tree["w"] += 1
    tree["t"].zero_()
    tree["l"].append(2)
    changed.set()
    wait(futures)
    assert [future.result().path for future in futures] == [str(tmp_path / "a"), str(tmp_path / "b")]
    loading = hf.load_async(tmp_path / "a", like={"w": ..., "t": torch.zeros(100_000), "l": [0]})
    assert_same(loading.result(), {"w": np.arange(100_000), "t": torch.ones(100_000), "l": [1]})
    assert_same(hf.load_async({"w": tmp_path / "a", "l/*": tmp_path / "b"}).result()["l"], [1])


def test_errors_before_the_snapshot_are_raised_by_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.save(tmp_path / "there", {"x": 1})
    with pytest.raises(hf.CheckpointExistsError):
        hf.save_async(tmp_path / "there", {"x": 2})
    with pytest.raises(hf.errors.UnsupportedLeafError, match="f: "):
        hf.save_async(tmp_path / "new", {"f": lambda: 1})
    with pytest.raises(hf.errors.UnknownArgumentError, match="force"):
        hf.save_async(tmp_path / "new", {"x": 2}, force=True)  # type: ignore[arg-type]
    assert hf.save_async(tmp_path / "there", {"x": 2}, overwrite=True).result().step is None
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load_async(tmp_path / "gone").result()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    failed = hf.save_async(tmp_path / "new", {"x": np.zeros(100_000)})
    for _ in range(2):
        with pytest.raises(hf.SaveFailedError, match=r"new was not saved: .*No space left") as caught:
            failed.result()
    assert isinstance(caught.value.__cause__, hf.errors.StorageError)
    assert hf.load(tmp_path / "there") == {"x": 2}
    assert not (tmp_path / "new").exists()
