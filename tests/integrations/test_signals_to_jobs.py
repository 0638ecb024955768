"""SIGTERM to every process of a job, as SLURM, torchrun and ``timeout`` send it: workers survive until the save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integrations.served import Server

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("lightning")

Job = Callable[..., tuple[int, str]]


@pytest.fixture
def job(server: Server) -> Job:
    """Runs a program as a job, which gets the signal in all its processes; returns its status and what it said."""

    def run(kind: str, directory: Path, signal_at: int | None = None) -> tuple[int, str]:
        before = len(server.errors.read_text())
        server.send("job", kind, str(directory), signal_at)
        answer = server.receive().split()
        if answer[0] == "ready":
            os.killpg(int(answer[1]), signal.SIGTERM)
            server.send()
            answer = server.receive().split()
        return int(answer[0]), server.errors.read_text()[before:]

    return run


def swept(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.sweep) for kind in kinds]


@pytest.mark.parametrize("kind", ["torch, persistent", "a spawned process", *swept("torch, by a fork server")])
def test_a_loop_saves_its_step_and_goes_on(job: Job, tmp_path: Path, kind: str) -> None:
    status, said = job(kind, tmp_path, signal_at=2)
    assert (status, "Traceback" in said, "killed" in said) == (75, False, False), said
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [3]
    status, said = job(kind, tmp_path)
    assert (status, "Traceback" in said) == (0, False), said
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [3, 4]


@pytest.mark.parametrize("kind", ["torchdata, persistent", *swept("torchdata", "grain", "grain, a loader")])
def test_every_sample_comes_once(job: Job, tmp_path: Path, kind: str) -> None:
    """Interrupted twice in one epoch of eight batches and once in a later one: no sample is lost or comes twice."""
    pytest.importorskip(kind.partition(",")[0])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for directory, stops in ((whole, [None]), (cut, [1, 4, 13, None])):
        for stop in stops:
            status, said = job(kind, directory, signal_at=stop)
            assert (status, "Traceback" in said) == (0 if stop is None else 75, False), said
    assert [entry.step for entry in hf.list_checkpoints(cut)] == [2, 5, 14, 20]
    lines = [Path(f"{directory}.log").read_text().splitlines() for directory in (whole, cut)]
    assert lines[0] == lines[1]
    assert sorted(int(one) for line in lines[1][:8] for one in line.split()[1:]) == list(range(64))
    np.testing.assert_equal(*(hf.load(directory / "20", item="state") for directory in (whole, cut)))


@pytest.mark.parametrize(
    "kind", ["lightning, torchdata", *swept("lightning", "lightning, persistent", "lightning, torchdata, persistent")]
)
def test_lightning_saves_its_step_and_goes_on(job: Job, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchdata")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert job(kind, whole)[0] == 0
    status, said = job(kind, cut, signal_at=2)
    assert (status, "DataLoader worker" in said) == (143, False), said
    status, said = job(kind, cut)
    assert status == 0, said
    assert [entry.step for entry in hf.list_checkpoints(cut)] == [3, 8]
    parts = ["state_dict/**", "optimizer_states/**"]
    np.testing.assert_equal(*(hf.load(directory / "8", select=parts) for directory in (whole, cut)))


_UNDER_TORCHRUN = """
import os, sys, torch
from tests.integrations.jobs import Samples

directory = sys.argv[1]
rank = int(os.environ["RANK"])


def note(status):
    with open(f"{directory}.{rank}", "w") as file:
        file.write(str(status))


def train():
    import lightning
    from holdfast.integrations.lightning import CheckpointCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            if self.global_step == 3 and rank == 0:
                print("ready", flush=True)
            return self.layer(batch[None].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"logger": False, "enable_progress_bar": False, "max_epochs": 100_000}
    checkpoint = CheckpointCallback(directory, save_interval_steps=10**9)
    loader = torch.utils.data.DataLoader(Samples(), 2, num_workers=2)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[checkpoint], **options)
    trainer.fit(Model(), loader)


try:
    train()
except SystemExit as error:
    note(error.code)
    raise
"""


@pytest.mark.sweep
def test_torchrun_with_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_UNDER_TORCHRUN)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "stderr").open("w") as stderr:
        torchrun = subprocess.Popen(
            [*command, str(script), str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            start_new_session=True,
        )
    assert torchrun.stdout is not None
    assert any("ready" in line for line in torchrun.stdout)
    os.killpg(torchrun.pid, signal.SIGTERM)
    torchrun.communicate(timeout=120)
    statuses = [(tmp_path / f"run.{rank}").read_text() for rank in range(2)]
    assert statuses == ["143"] * 2, (tmp_path / "stderr").read_text()
    assert len(hf.list_checkpoints(tmp_path / "run")) == 1
