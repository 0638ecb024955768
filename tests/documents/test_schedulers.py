"""The files for schedulers: the scripts run with the commands of SLURM replaced, the job is valid."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it comes without type information
import numpy as np
import pytest
from ruamel.yaml import YAML
from tests.documents.examples import Examples
from tests.starts import run

import holdfast as hf

FILES = Path(__file__).parents[2] / "docs" / "schedulers"

PROGRAM = """
import signal, sys, threading
import numpy as np
import holdfast as hf

received = threading.Event()

with hf.CheckpointCallback("runs/x") as checkpoint:
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *given: (ours(*given), received.set()))
    state, start = checkpoint.restore_or_initialize({"x": np.zeros(3)})
    for step in range(start + 1, 7):
        state["x"] += np.random.default_rng(step).normal(size=3)
        if step == 3 and start == 0:
            print("step 3", flush=True)
            while not received.wait(0.1):  # Python notices a signal that comes right before a wait only after it
                pass
        if checkpoint.on_step(step, state).should_stop:
            break
sys.exit(checkpoint.exit_status)
"""
# What would be run, with the program's exit status; then, as SLURM does, the job is ended.
SRUN = '#!/bin/sh\nshift\necho "srun $*" >> calls\nexec "$@"\n'
TORCHRUN = '#!/bin/sh\nshift 2\necho "torchrun $*" >> calls\nexec python "$@"\n'
SCONTROL = '#!/bin/sh\necho "scontrol $*" >> calls\n'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} -W ignore "$@"\n'
    holdfast = python.replace('"$@"', '-m holdfast "$@" 2>> supervised')
    commands = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN, "python": python, "holdfast": holdfast}
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def submit(job: Path, script: str = "train.sbatch", **variables: str) -> subprocess.Popen[str]:
    path = f"{job / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(FILES / script)],
        cwd=job,
        env={**os.environ, "PATH": path, "SLURM_JOB_ID": "12", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


CRASH = 'import os\nif not os.path.exists("crashed"):\n    open("crashed", "w").close()\n    raise SystemExit(1)\n'


ARRAY = {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}
# The script, the program, the signal, variables of SLURM, what is called in the first job, and the job's id.
JOBS: dict[str, tuple[str, str, signal.Signals, dict[str, str], list[str], str]] = {
    "job": ("train.sbatch", PROGRAM, signal.SIGUSR1, {}, ["srun python train.py"], "12"),
    "job of an array": ("train.sbatch", PROGRAM, signal.SIGTERM, ARRAY, ["srun python train.py"], "11_3"),
    # The program crashes once as well, and the supervisor starts it again within the job.
    "supervised": ("torchrun.sbatch", CRASH + PROGRAM, signal.SIGUSR1, {}, ["torchrun train.py"] * 2, "12"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_saved_and_requeued(job: Path, name: str) -> None:
    script, program, number, variables, calls, job_id = JOBS[name]
    (job / "train.py").write_text(program)
    with submit(job, script, **variables) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "step 3\n"
        first.send_signal(number)
        assert first.wait(60) == 75
    calls = [*calls, f"scontrol requeue {job_id}"]
    assert (job / "calls").read_text().splitlines() == calls
    with submit(job, script, **variables) as second:
        assert second.wait(60) == 0
    assert (job / "calls").read_text().splitlines() == [*calls, calls[0]], "a job that is done stays done"
    assert [one.step for one in hf.list_checkpoints(job / "runs" / "x")] == [3, 6]
    expected = sum(np.random.default_rng(step).normal(size=3) for step in range(1, 7))
    np.testing.assert_allclose(hf.load(job / "runs" / "x", item="state")["x"], expected)
    if name == "supervised":
        assert "--max-restarts=0" in (job / "supervised").read_text()


def test_a_crash_is_not_requeued(job: Path) -> None:
    (job / "train.py").write_text("raise SystemExit(1)\n")
    with submit(job) as process:
        assert process.wait(60) == 1
    assert (job / "calls").read_text().splitlines() == ["srun python train.py"]


@pytest.mark.examples("docs/schedulers/kubernetes.md", "yaml 1", "yaml 2")
@pytest.mark.examples("docs/schedulers/slurm.md")
@pytest.mark.examples("docs/schedulers/spot.md")
@pytest.mark.examples("docs/schedulers/torchrun.md")
def test_the_pages_show_their_files(request: pytest.FixtureRequest) -> None:
    shown = {mark.args[0]: Examples(*mark.args).items() for mark in request.node.iter_markers("examples")}
    files = {
        "kubernetes": ["job.yaml", "job_mirror.yaml"],
        "slurm": ["train.sbatch"],
        "spot": ["train.service"],
        "torchrun": ["torchrun.sbatch"],
    }
    assert {page: [text for _, text in items] for page, items in shown.items()} == {
        f"docs/schedulers/{page}.md": [f'--8<-- "schedulers/{name}"\n' for name in names]
        for page, names in files.items()
    }


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/schedulers/kubernetes.md", "python 1")
def test_a_new_pod_goes_on_from_the_mirror(examples: Examples, tmp_path: Path) -> None:
    """Every pod has an empty directory; the first is preempted in the middle of its training."""
    program = examples["python 1"].replace('"/runs/digits"', '"runs/digits"')
    told = "        if step == 250:\n            os.kill(os.getpid(), 15)\n"
    assert "        if checkpoint.on_step" in program
    program = program.replace("        if checkpoint.on_step", f"{told}        if checkpoint.on_step")
    statuses = []
    for pod in ("first", "second"):
        (tmp_path / pod).mkdir()
        (tmp_path / pod / "train.py").write_text(program)
        environment = {**os.environ, "MIRROR": str(tmp_path / "bucket")}
        done = run("-W", "ignore", "train.py", cwd=tmp_path / pod, env=environment)
        statuses.append(done.returncode)
    assert statuses == [75, 0], done.stderr
    assert "resumed from step 250" in done.stderr
    weights = hf.load(tmp_path / "bucket", item="state")["weights"]
    assert np.array_equal(weights, sum((np.sin(step) for step in range(1, 501)), np.zeros(4)))


def test_the_unit_of_systemd() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names in capitals and small letters
    unit.read(FILES / "train.service")
    service = unit["Service"]
    names = ("Restart", "RestartForceExitStatus", "RestartPreventExitStatus", "KillMode")
    assert [service[name] for name in names] == ["on-failure", "75", "2", "mixed"]


@pytest.mark.parametrize("name", ["train.sbatch", "lightning.sbatch", "torchrun.sbatch"])
def test_scripts_have_no_mistakes_in_their_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(FILES / name)], check=True)
    directives = [line for line in (FILES / name).read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(directives)


@pytest.mark.parametrize("file", ["job.yaml", "job_mirror.yaml"])
def test_the_jobs_of_kubernetes_are_valid(file: str) -> None:
    """By the schema, and by what the API server refuses beyond it (batch/v1, Pod failure policy)."""
    job: dict[str, Any] = YAML(typ="safe", pure=True).load((FILES / file).read_text())
    kubernetes_validate.validate(job, "1.34", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs that"
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("Ignore", "FailJob", "Count", "FailIndex")
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes", {"values": [], "operator": "In"})
        assert codes["values"] == sorted({*codes["values"]} - {0})
        assert codes["operator"] == "In" or rule["action"] != "Ignore"
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    assert ("emptyDir" in volume) == ("MIRROR" in {one["name"] for one in container.get("env", [])})
