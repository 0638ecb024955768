"""Long calls say how far they are: what they expect at first, they have done in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information
import pytest
import torch
from tests.damage import flip

import holdfast as hf
from holdfast.engine.progress import Share
from holdfast.engine.sources import compare_checkpoints, leaf_statistics, open_checkpoint
from holdfast.engine.storage import as_location

TREE = {name: np.arange(50_000.0) for name in "abcd"} | {"n": 3, "text": "x", "empty": np.zeros((0, 3))}


class Counted:
    """A listener; refuses to be told of more than was expected."""

    def __init__(self, limit: int | None = None) -> None:
        self.expected = self.done = self.calls = 0
        self._limit = limit
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        assert nbytes >= 0
        self.expected += nbytes

    def advance(self, nbytes: int) -> None:
        with self._lock:
            assert nbytes >= 0
            self.calls += 1
            self.done += nbytes
            assert self.done <= self.expected
        if self._limit is not None and self.done >= self._limit:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of several kinds."""
    root = tmp_path_factory.mktemp("places")
    with hf.CheckpointManager(root / "run") as manager:
        for step in (1, 2):
            manager.save(step, TREE, force=True)
    hf.save(root / "one", TREE)
    hf.save(root / "compressed", {"w": np.zeros(200_000), "v": np.ones(200_000)}, layout=hf.Layout(compression=1))
    hf.save(root / "damaged", TREE)
    data = max((root / "damaged").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    flip(data)
    torch.save({name: torch.ones(1000) for name in "ab"}, root / "file.pt")
    with ocp.CheckpointManager(root / "orbax") as orbax:
        for step in (1, 2):
            orbax.save(step, args=ocp.args.StandardSave({"w": np.arange(1000.0), "v": np.ones(10)}))
    return root


def compare(one: Path, other: Path, heard: Any) -> object:
    return list(compare_checkpoints(*(open_checkpoint(as_location(each)) for each in (one, other)), progress=heard))


CALLS: dict[str, Callable[[Path, Path, Any], object]] = {
    "verify a run": lambda at, _, heard: hf.verify(at / "run", progress=heard),
    "verify one step": lambda at, _, heard: hf.verify(at / "run", 1, progress=heard),
    "verify one": lambda at, _, heard: hf.verify(at / "one", progress=heard),
    "verify compressed": lambda at, _, heard: hf.verify(at / "compressed", progress=heard),
    "verify damaged": lambda at, _, heard: hf.verify(at / "damaged", progress=heard),
    "verify orbax": lambda at, _, heard: hf.verify(at / "orbax", progress=heard),
    "verify torch": lambda at, _, heard: hf.verify(at / "file.pt", progress=heard),
    "copy one": lambda at, to, heard: hf.copy_checkpoint(at / "one", to, progress=heard),
    "copy a run": lambda at, to, heard: hf.copy_checkpoint(at / "run", to, progress=heard),
    "import torch": lambda at, to, heard: hf.import_checkpoint(at / "file.pt", to, progress=heard),
    "import orbax": lambda at, to, heard: hf.import_checkpoint(at / "orbax", to, progress=heard),
    "export safetensors": lambda at, to, heard: hf.export_checkpoint(at / "one", to, "safetensors", progress=heard),
    "export torch": lambda at, to, heard: hf.export_checkpoint(at / "one", to, "torch", progress=heard),
    "export orbax": lambda at, to, heard: hf.export_checkpoint(at / "run", to, "orbax", progress=heard),
    "export some": lambda at, to, heard: hf.export_checkpoint(at / "run", to, "orbax", select="a", progress=heard),
    "compare": lambda at, _, heard: compare(at / "one", at / "run", heard),
    "compare others": lambda at, _, heard: compare(at / "one", at / "file.pt", heard),
    "statistics": lambda at, _, heard: list(
        leaf_statistics(open_checkpoint(as_location(at / "one")), ["a", "n", "text"], heard)
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_expected_is_done_in_the_end(call: str, places: Path, tmp_path: Path) -> None:
    heard = Counted()
    CALLS[call](places, tmp_path / "to", heard)

    assert heard.done == heard.expected > 0


def test_a_copy_counts_what_is_there_already(places: Path, tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    for heard in (first, second):
        hf.copy_checkpoint(places / "run", tmp_path / "to", progress=heard)

    assert first.expected == second.expected == second.done
    assert first.calls > second.calls


@pytest.mark.parametrize("call", ["verify a run", "copy a run", "import orbax", "export safetensors", "export orbax"])
def test_a_listener_can_end_a_call(call: str, places: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](places, tmp_path / "to", Counted(limit=1000))

    assert not list(hf.list_checkpoints(tmp_path)), "half a result is none"


def test_a_share_reports_its_bytes_whatever_its_work_counts() -> None:
    heard = Counted()
    heard.expect(70)
    with Share(heard, 7, 1000) as scaled:
        for _ in range(30):  # some of it twice
            scaled.advance(100)
    assert heard.done == 7
    with Share(heard, 60) as unknown:
        unknown.advance(5)
        unknown.expect(100)
        unknown.advance(50)
        assert heard.done == 37
    assert heard.done == 67
    failed = Share(heard, 3, 3)
    failed.advance(1)
    failed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert heard.done == 68
