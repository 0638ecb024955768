"""SLURM's signal for requeueing, and the files that Lightning saves at it."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from tests.integrations.lightning import program
from tests.integrations.lightning.program import NEVER
from tests.processes.harness import free_port

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, Preempted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
]

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


def status_of(trainer: Any, function: str = "fit") -> Any:
    """Returns the status with which a signal ends the trainer."""
    with pytest.raises(Preempted) as caught:
        getattr(trainer, function)(program.Model(), *program.loaders()[function != "fit" :])
    return caught.value.code


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
    assert status_of(trainer) == 75
    assert signal.getsignal(signal.SIGUSR1) == before
    assert slurm.read_text() == f"ended\nrequeue {'77_5' if array else '4321'} after the commit\n"
    assert [entry.reason for entry in hf.list_checkpoints(tmp_path / "run")] == ["preempted"]
    assert not list(tmp_path.glob("hpc_ckpt*"))

    # The requeued job continues to its end, and is not requeued again.
    trainer = trainer_of(tmp_path / "run", save_at_end=True)
    trainer.fit(program.Model(), *program.loaders())
    assert trainer.global_step == 10
    assert [entry.step for entry in hf.list_checkpoints(tmp_path / "run")] == [4, 10]
    assert len(slurm.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("number", "function", "status"),
    [(signal.SIGTERM, "fit", 143), (signal.SIGUSR2, "fit", 75), (signal.SIGUSR1, "test", 75)],
)
def test_the_status_of_a_job_and_whether_it_is_requeued(
    slurm: Path, tmp_path: Path, number: int, function: str, status: int
) -> None:
    sender = program.Signal(number, after=3)
    if function == "test":
        sender = program.Signal(number, hook="on_test_batch_start")
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2) if number == signal.SIGUSR2 else SLURMEnvironment()
    assert status_of(trainer_of(tmp_path / "run", sender, environment=environment), function) == status
    assert slurm.exists() == (status == 75)


def test_a_job_that_cannot_be_requeued_ends_all_the_same(
    slurm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Job is not requeueable' >&2\nexit 1\n")
    assert status_of(trainer_of(tmp_path / "run", program.Signal(signal.SIGUSR1, after=3))) == 75
    assert "scontrol requeue 4321 failed: Job is not requeueable. The run is saved" in caplog.text


@pytest.fixture
def file_of_lightning(slurm: Path, tmp_path: Path) -> None:
    """A job that Lightning has requeued by itself, with a weight that is in its file only."""
    model = program.Model()
    torch.nn.init.constant_(model.head.bias, 41.0)
    trainer = program.trainer(max_steps=1, plugins=[SLURMEnvironment()], enable_checkpointing=False)
    trainer.fit(model, *program.loaders())
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")


@pytest.mark.usefixtures("file_of_lightning")
def test_after_a_fit_the_best_step_is_evaluated_and_no_file_of_lightning(tmp_path: Path) -> None:
    trainer, model, loaders = trainer_of(tmp_path / "run", save_at_end=True), program.Model(), program.loaders()
    trainer.fit(model, *loaders)
    saved = model.head.bias.tolist()
    for function in (trainer.validate, trainer.test):
        torch.nn.init.constant_(model.head.bias, 7.0)
        function(dataloaders=loaders[1], verbose=False)
        assert model.head.bias.tolist() == saved


@pytest.mark.usefixtures("file_of_lightning")
@pytest.mark.parametrize("given_by", ["trainer", "module", "module, the first of a process"])
@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_a_file_of_lightning_never_wins(
    tmp_path: Path, given_by: str, function: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = given_by.endswith("the first of a process")

    def use(function: str, *, epochs: int, ckpt_path: Any = None) -> tuple[float, int]:
        if is_first:
            choose = inspect.unwrap(_CheckpointConnector._parse_ckpt_path)
            monkeypatch.setattr(_CheckpointConnector, "_parse_ckpt_path", choose)

        def made() -> list[CheckpointCallback]:
            return [CheckpointCallback(tmp_path / "run", save_interval_steps=1000)]

        checkpoint = [] if is_first else made()

        class Model(program.Model):
            def configure_callbacks(self) -> Any:
                return [] if given_by == "trainer" else checkpoint or made()

            def predict_step(self, batch: Any, index: int) -> Any:
                return self.head(self.backbone(batch[0]))

        model = Model()
        torch.nn.init.constant_(model.head.bias, 7.0)
        options = {"enable_checkpointing": given_by == "trainer", "plugins": [SLURMEnvironment()]}
        trainer = program.trainer(*checkpoint * (given_by == "trainer"), max_epochs=epochs, **options)
        getattr(trainer, function)(model, *program.loaders()[function != "fit" :], ckpt_path=ckpt_path)
        return float(model.head.bias.detach()[0]), trainer.global_step

    bias, step = use("fit", epochs=1)
    assert (step, bias < 30.0) == (5, True)  # not of the file, where the bias is 41
    caplog.clear()
    bias, step = use(function, epochs=2)
    if function == "fit":
        assert (step, bias < 30.0) == (10, True)
        assert [entry.step for entry in hf.list_checkpoints(tmp_path / "run")] == [5, 10]
    else:
        assert bias == 7.0
    assert len([text for text in caplog.messages if "hpc_ckpt_1.ckpt is ignored" in text]) == 1
    if function != "fit" and not is_first:  # which is left alone in any case
        assert use(function, epochs=2, ckpt_path="hpc")[0] > 30.0


_TASK = """
import os, signal
from tests.integrations.lightning import program
from tests.integrations.lightning.program import NEVER
from holdfast.integrations.lightning import CheckpointCallback

told = [program.Signal(signal.SIGUSR1, after=3)] if os.environ["SLURM_PROCID"] == "1" else []
callback = CheckpointCallback("run", save_interval_steps=10**9)
trainer = program.trainer(callback, *told, devices=2, strategy="ddp", max_epochs=10_000)
trainer.fit(program.Model(), program.training_loader("shuffled"))
"""


@pytest.mark.sweep
def test_several_tasks_are_requeued_once(slurm: Path, tmp_path: Path) -> None:
    port, root = str(free_port()), str(Path(__file__).parents[3])
    shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    tasks = []
    for index in range(2):
        variables = {**os.environ, **shared, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        command = [sys.executable, "-W", "ignore", "-c", _TASK]
        with (tmp_path / f"log{index}").open("w") as log:
            tasks.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
    statuses = [task.wait(120) for task in tasks]
    assert statuses == [75, 75], (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    assert slurm.read_text().startswith("requeue 4321 ")
    assert len(slurm.read_text().splitlines()) == 1
    assert len(hf.list_checkpoints(tmp_path / "run")) == 1
