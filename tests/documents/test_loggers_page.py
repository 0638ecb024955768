"""The page on loggers: its examples run, with stand-ins for W&B and MLflow, and the files of TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from tests.documents.examples import Examples

SAVED = ["bytes", "shared_bytes", "blocked_seconds", "total_seconds"]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    exec("import holdfast as hf\nimport numpy as np", names)
    return names


class WandbRun:
    """Drops what comes with a smaller step than the last, as W&B does."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.defined: dict[str, str] = {}
        self._step = 0

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.defined[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if step is not None and step < self._step:
            return
        self._step = self._step + 1 if step is None else step
        self.rows.append(data)


@pytest.mark.examples("docs/loggers.md", "python 1")
def test_wandb(examples: Examples, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start falls back, and its numbers are there nevertheless."""
    run = WandbRun()
    wandb = types.SimpleNamespace(init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    examples.run(names)
    assert run.defined == {"checkpoint/*": "checkpoint/step"}
    assert [row["checkpoint/step"] for row in run.rows] == [2, 4, 6]
    assert list(run.rows[0]) == [*(f"checkpoint/{name}" for name in SAVED), "checkpoint/step"]
    Path("runs/wandb/6/state/manifest.ocdbt").unlink()
    examples.run(names)
    assert [(row["checkpoint/step"], row.get("checkpoint/skipped")) for row in run.rows[3:]] == [(4, 1), (6, None)]


@pytest.mark.examples("docs/loggers.md", "python 2", "python 4")
def test_mlflow(examples: Examples, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, str, float, int]] = []
    threads: set[str] = set()

    class Client:
        def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
            logged.append((run_id, key, value, step))
            threads.add(threading.current_thread().name)

    start = lambda *, run_name: types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))  # noqa: E731
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client, start_run=start))
    examples.run(names)
    assert [(run, key, step) for run, key, _, step in logged] == [
        ("7", f"checkpoint/{name}", step) for step in range(3) for name in SAVED
    ]
    assert threads != {threading.main_thread().name}, "the reason for the client"
    assert names["messages"] == []
    names["tell"]({"event": "restored", "step": 4, "skipped": [{"step": 6}]})
    assert names["messages"] == ["fell back to step 4"]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.examples("docs/loggers.md", "python 3")
def test_tensorboard(examples: Examples, names: dict[str, Any]) -> None:
    """The real writer, and the real reader of its files."""
    examples.run(names)
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    for _ in range(2):
        found = reader.EventAccumulator("runs/tensorboard/logs").Reload()
        assert [one.step for one in found.Scalars("loss")] == [1, 2, 3, 4]
        assert [one.step for one in found.Scalars("checkpoint/blocked_seconds")] == [2, 4]
        # A second start goes on from step 2, as the last one is lost: its points replace those of the first.
        shutil.rmtree("runs/tensorboard/4")
        examples.run(names)


@pytest.mark.examples("docs/loggers.md", "python 3")
def test_tensorboard_with_a_stand_in(
    examples: Examples, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str, *, purge_step: int) -> None:
            self.purge_step = purge_step
            self.points: list[tuple[str, int]] = []
            made.append(self)

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            self.points.append((tag, global_step))

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    examples.run(names)
    shutil.rmtree("runs/tensorboard/4")
    examples.run(names)
    assert [writer.purge_step for writer in made] == [1, 3]
    assert [step for tag, step in made[0].points if tag == "checkpoint/bytes"] == [2, 4]
    assert [step for tag, step in made[1].points if tag == "loss"] == [3, 4]
