"""SLURM's signal for requeueing, and the files that Lightning saves at it."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from tests.integrations.lightning import program

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, Preempted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
]

NEVER = {"save_interval_steps": 1000, "save_at_end": False}
SCONTROL = """#!{python}
import os, sys
done = os.path.exists(os.path.join({run!r}, "4", "checkpoint.json"))
with open({log!r}, "a") as file:
    print(*sys.argv[1:], "after the commit" if done else "too early", file=file)
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A job of SLURM with one process; returns the file in which ``scontrol`` notes how it was called."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    variables = {"SLURM_JOB_ID": "4321", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in {**variables, "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which Lightning sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    programs, log = tmp_path / "bin", tmp_path / "scontrol.log"
    programs.mkdir()
    scontrol = programs / "scontrol"
    scontrol.write_text(SCONTROL.format(python=sys.executable, run=str(tmp_path / "run"), log=str(log)))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return log


def trainer_of(directory: Path, *callbacks: Any, environment: Any = None, **options: Any) -> Any:
    callback = CheckpointCallback(directory, **{**NEVER, **options})
    return program.trainer(callback, *callbacks, plugins=[environment or SLURMEnvironment()], max_epochs=2)


@pytest.mark.parametrize("array", [False, True], ids=["job", "task of an array"])
def test_the_requeue_signal_saves_and_requeues(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: bool
) -> None:
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    before = signal.getsignal(signal.SIGUSR1)
    trainer = trainer_of(tmp_path / "run", program.Signal(signal.SIGUSR1, after=3))
    teardown = trainer.accelerator.teardown

    def note_teardown() -> None:
        teardown()
        slurm.write_text("ended\n")

    trainer.accelerator.teardown = note_teardown
    with pytest.raises(Preempted) as caught:
        trainer.fit(program.Model(), *program.loaders())
    assert caught.value.code == 75
    assert signal.getsignal(signal.SIGUSR1) == before
    assert slurm.read_text() == f"ended\nrequeue {'77_5' if array else '4321'} after the commit\n"
    assert [entry.reason for entry in hf.list_checkpoints(tmp_path / "run")] == ["preempted"]
    assert not list(tmp_path.glob("hpc_ckpt*"))

    # The requeued job continues to its end, and is not requeued again.
    trainer = trainer_of(tmp_path / "run", environment=SLURMEnvironment(), save_at_end=True)
    trainer.fit(program.Model(), *program.loaders())
    assert trainer.global_step == 10
    assert [entry.step for entry in hf.list_checkpoints(tmp_path / "run")] == [4, 10]
    assert len(slurm.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("number", "environment", "status"),
    [
        pytest.param(signal.SIGTERM, {}, 143, id="SIGTERM"),
        pytest.param(signal.SIGUSR2, {"requeue_signal": signal.SIGUSR2}, 75, id="another signal"),
    ],
)
def test_signals_of_a_job(slurm: Path, tmp_path: Path, number: int, environment: dict[str, Any], status: int) -> None:
    trainer = trainer_of(tmp_path / "run", program.Signal(number, after=3), environment=SLURMEnvironment(**environment))
    with pytest.raises(Preempted) as caught:
        trainer.fit(program.Model(), *program.loaders())
    assert caught.value.code == status
    assert slurm.exists() == (status == 75)


def test_a_job_that_cannot_be_requeued_ends_all_the_same(
    slurm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Job is not requeueable' >&2\nexit 1\n")
    with pytest.raises(Preempted) as caught:
        trainer_of(tmp_path / "run", program.Signal(signal.SIGUSR1, after=3)).fit(program.Model(), *program.loaders())
    assert caught.value.code == 75
    assert "scontrol requeue 4321 failed: Job is not requeueable. The run is saved" in caplog.text


def test_the_requeue_signal_in_a_test(slurm: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", program.Signal(signal.SIGUSR1, after=0, hook="on_test_batch_start"))
    with pytest.raises(Preempted) as caught:
        trainer.test(program.Model(), program.validation_loader(), verbose=False)
    assert caught.value.code == 75
    assert slurm.read_text().startswith("requeue 4321")


@pytest.fixture
def file_of_lightning(slurm: Path, tmp_path: Path) -> None:
    """A job that Lightning has requeued by itself, with a weight that is in its file only."""
    model = program.Model()
    torch.nn.init.constant_(model.head.bias, 41.0)
    trainer = program.trainer(max_steps=1, plugins=[SLURMEnvironment()], enable_checkpointing=False)
    trainer.fit(model, *program.loaders())
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")


@pytest.mark.usefixtures("file_of_lightning")
def test_a_file_of_lightning_never_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def biases(use: Callable[[Any, Any], Any]) -> list[float]:
        trainer, model = trainer_of(tmp_path / "run", save_at_end=True), program.Model()
        use(trainer, model)
        return [float(model.head.bias.detach()[0]), trainer.global_step]

    loaders = program.loaders()
    bias, step = biases(lambda trainer, model: trainer.fit(model, *loaders))
    assert (step, bias < 30.0) == (10, True)
    assert "hpc_ckpt_1.ckpt is ignored" in caplog.text
    assert biases(lambda trainer, model: trainer.fit(model, *loaders)) == [bias, 10]

    for name in ("validate", "test"):

        def given(trainer: Any, model: Any, name: str = name) -> None:
            torch.nn.init.constant_(model.head.bias, 7.0)
            getattr(trainer, name)(model, loaders[1], verbose=False)

        assert biases(given) == [7.0, 0]

        def fitted(trainer: Any, model: Any, name: str = name) -> None:
            trainer.fit(model, *loaders)
            torch.nn.init.constant_(model.head.bias, 7.0)
            getattr(trainer, name)(dataloaders=loaders[1], verbose=False)

        assert biases(fitted)[0] == bias, "the best is loaded"
    assert biases(lambda trainer, model: trainer.validate(model, loaders[1], ckpt_path="hpc", verbose=False))[0] > 30.0


@pytest.mark.usefixtures("file_of_lightning")
@pytest.mark.parametrize("given_by", ["trainer", "module", "module, the first of a process"])
@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_a_file_of_lightning_never_wins_over_a_newer_step(
    tmp_path: Path, given_by: str, function: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(function: str, *, epochs: int, ckpt_path: Any = None) -> tuple[float, int]:
        if late := given_by.endswith("the first of a process"):
            choose = inspect.unwrap(_CheckpointConnector._parse_ckpt_path)
            monkeypatch.setattr(_CheckpointConnector, "_parse_ckpt_path", choose)

        def made() -> CheckpointCallback:
            return CheckpointCallback(tmp_path / "run", save_at_end=True, save_interval_steps=1000)

        checkpoint = None if late else made()

        class Model(program.Model):
            def configure_callbacks(self) -> Any:
                return [checkpoint or made()] if given_by != "trainer" else []

            def predict_step(self, batch: Any, index: int) -> Any:
                return self.head(self.backbone(batch[0]))

        model = Model()
        torch.nn.init.constant_(model.head.bias, 7.0)
        callbacks: list[Any] = [checkpoint] if given_by == "trainer" else []
        options = {"max_epochs": epochs, "plugins": [SLURMEnvironment()]}
        trainer = program.trainer(*callbacks, enable_checkpointing=given_by == "trainer", **options)
        loaders = program.loaders()
        found = loaders if function == "fit" else loaders[1:]
        getattr(trainer, function)(model, *found, ckpt_path=ckpt_path)
        return float(model.head.bias.detach()[0]), trainer.global_step

    bias, step = use("fit", epochs=1)
    assert (step, bias < 30.0) == (5, True)  # not of the file, where the bias is 41
    caplog.clear()
    bias, step = use(function, epochs=2)
    assert bias < 30.0
    if function == "fit":
        assert [entry.step for entry in hf.list_checkpoints(tmp_path / "run")] == [5, 10]
    else:
        assert bias == 7.0
    assert len([text for text in caplog.messages if "hpc_ckpt_1.ckpt is ignored" in text]) == 1
    if function != "fit" and not given_by.endswith("the first of a process"):  # which is left alone in any case
        assert use(function, epochs=2, ckpt_path="hpc")[0] > 30.0


_TASK = """
import os, signal, torch
import lightning.pytorch as lightning
from tests.integrations.lightning import program
from holdfast.integrations.lightning import CheckpointCallback


class Signal(lightning.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


options = {**program.QUIET, "devices": 2, "strategy": "ddp", "max_epochs": 10_000}
callbacks = [CheckpointCallback("run", save_interval_steps=10**9), Signal()]
lightning.Trainer(callbacks=callbacks, **options).fit(program.Model(), program.training_loader("shuffled"))
"""


@pytest.mark.sweep
def test_several_tasks_are_requeued_once(slurm: Path, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    root = str(Path(__file__).parents[3])
    tasks = []
    for index in range(2):
        variables = {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        variables |= {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index), "MASTER_PORT": port}
        variables |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
        command = [sys.executable, "-W", "ignore", "-c", _TASK]
        with (tmp_path / f"log{index}").open("w") as log:
            tasks.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log))
    statuses = [task.wait(120) for task in tasks]
    assert statuses == [75, 75], (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    assert slurm.read_text().startswith("requeue 4321 ")
    assert len(slurm.read_text().splitlines()) == 1
    assert len(hf.list_checkpoints(tmp_path / "run")) == 1
