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
from unittest import mock

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
        def log_batch(self, run_id: str, metrics: list[tuple[str, float, int, int]]) -> None:
            logged.extend((run_id, key, value, step) for key, value, _, step in metrics)
            threads.add(threading.current_thread().name)

    mlflow = types.SimpleNamespace(
        MlflowClient=Client,
        search_runs=lambda *, filter_string, output_format: [],
        start_run=lambda *, run_id, run_name: types.SimpleNamespace(info=types.SimpleNamespace(run_id="7")),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.SimpleNamespace(Metric=lambda *given: given))
    examples.run(names)
    assert [(run, key, step) for run, key, _, step in logged] == [
        ("7", f"checkpoint/{name}", step) for step in range(3) for name in SAVED
    ]
    assert threads != {threading.main_thread().name}, "the reason for the client"
    assert names["messages"] == []
    names["tell"]({"event": "restored", "step": 4, "skipped": [{"step": 6}]})
    assert names["messages"] == ["fell back to step 4"]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.examples("docs/loggers.md", "python 2")
def test_mlflow_itself(examples: Examples, names: dict[str, Any]) -> None:
    """The second start continues in the same run."""
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/mlflow.db")
    for steps in ([0, 1, 2], [0, 1, 2, 2]):
        examples.run(names)
        mlflow.end_run()
        (run,) = mlflow.search_runs(output_format="list")
        history = names["client"].get_metric_history(run.info.run_id, "checkpoint/bytes")
        assert [point.step for point in history] == steps
        shutil.rmtree("runs/mlflow/2")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="W&B is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.examples("docs/loggers.md", "python 1")
def test_wandb_itself(examples: Examples, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, as there is no server: it takes every call, and has the last numbers."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    examples.run(names)
    names["checkpoint"].manager.wait_until_finished()
    assert (names["run"].summary["checkpoint/step"], names["run"].summary["checkpoint/bytes"] > 0) == (6, True)
    names["run"].finish()


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
        # A second start resumes from step 2, as the last one is lost: its points replace those of the first.
        shutil.rmtree("runs/tensorboard/4")
        examples.run(names)


@pytest.mark.examples("docs/loggers.md", "python 3")
def test_tensorboard_with_a_stand_in(
    examples: Examples, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, mock.Mock]] = []

    def writer(log_dir: str, *, purge_step: int) -> mock.Mock:
        made.append((purge_step, mock.Mock()))
        return made[-1][1]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
    for _ in range(2):
        examples.run(names)
        shutil.rmtree("runs/tensorboard/4")
    points = [[call.args for call in one.add_scalar.call_args_list] for _, one in made]
    assert [purge_step for purge_step, _ in made] == [1, 3]
    assert [step for tag, _, step in points[0] if tag == "checkpoint/bytes"] == [2, 4]
    assert [step for tag, _, step in points[1] if tag == "loss"] == [3, 4]
