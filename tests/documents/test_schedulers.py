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


@pytest.mark.parametrize(
    ("number", "variables", "job_id"),
    [
        (signal.SIGUSR1, {}, "12"),
        (signal.SIGTERM, {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}, "11_3"),
    ],
)
def test_a_job_is_saved_and_requeued(job: Path, number: signal.Signals, variables: dict[str, str], job_id: str) -> None:
    with submit(job, **variables) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "step 3\n"
        first.send_signal(number)
        assert first.wait(60) == 75
    assert (job / "calls").read_text().splitlines() == ["srun python train.py", f"scontrol requeue {job_id}"]

    with submit(job, **variables) as second:
        assert second.wait(60) == 0
    assert (job / "calls").read_text().splitlines()[2:] == ["srun python train.py"], "a job that is done stays done"
    with hf.CheckpointManager(job / "runs" / "x", options=hf.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.all_steps() == [3, 6]
        expected = sum(np.random.default_rng(step).normal(size=3) for step in range(1, 7))
        np.testing.assert_allclose(manager.restore()["x"], expected)


def test_torchrun_under_a_supervisor_is_saved_and_requeued(job: Path) -> None:
    """The program crashes once as well, and the supervisor starts it again within the job."""
    crash = 'import os\nif not os.path.exists("crashed"):\n    open("crashed", "w").close()\n    raise SystemExit(1)\n'
    (job / "train.py").write_text(crash + PROGRAM)
    with submit(job, "torchrun.sbatch") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "step 3\n"
        first.send_signal(signal.SIGUSR1)
        assert first.wait(60) == 75
    calls = ["torchrun train.py", "torchrun train.py", "scontrol requeue 12"]
    assert (job / "calls").read_text().splitlines() == calls
    assert "--max-restarts=0" in (job / "supervised").read_text()
    with submit(job, "torchrun.sbatch") as second:
        assert second.wait(60) == 0
    assert (job / "calls").read_text().splitlines() == [*calls, "torchrun train.py"]
    assert [one.step for one in hf.list_checkpoints(job / "runs" / "x")] == [3, 6]


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
    expected = np.zeros(4)
    for step in range(1, 501):
        expected = expected + np.sin(step)
    assert np.array_equal(weights, expected)


def test_the_unit_of_systemd() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names in capitals and small letters
    unit.read(FILES / "train.service")
    service = unit["Service"]
    assert (service["Restart"], service["RestartForceExitStatus"], service["RestartPreventExitStatus"]) == (
        "on-failure",
        "75",
        "2",
    )
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("name", ["train.sbatch", "lightning.sbatch", "torchrun.sbatch"])
def test_scripts_have_no_mistakes_in_their_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(FILES / name)], check=True)
    directives = [line for line in (FILES / name).read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(directives)


# ---- Kubernetes


def mistakes(job: dict[str, Any]) -> list[str]:
    """Returns what the API server refuses, as far as it is not in the schema (batch/v1, Pod failure policy)."""
    found = []
    try:
        kubernetes_validate.validate(job, "1.34", strict=True)
    except kubernetes_validate.ValidationError as error:
        found.append(str(error))
    spec = job["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    if spec["template"]["spec"].get("restartPolicy") != "Never":
        found.append("podFailurePolicy needs restartPolicy: Never")
    for rule in rules:
        codes = rule.get("onExitCodes")
        if (codes is None) == ("onPodConditions" not in rule):
            found.append("a rule has exit codes or conditions, one of them")
        if codes is not None and (codes["values"] != sorted(set(codes["values"])) or 0 in codes["values"]):
            found.append("exit codes are in ascending order, without doubles and without 0")
        if rule["action"] == "Ignore" and codes is not None and codes["operator"] != "In":
            found.append("codes to ignore are listed")
        if rule["action"] not in ("Ignore", "FailJob", "Count", "FailIndex"):
            found.append(f"there is no action {rule['action']}")
    return found


def job_with(file: str = "job.yaml", **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = YAML(typ="safe", pure=True).load((FILES / file).read_text())
    for path, value in changes.items():
        target: Any = job["spec"]
        *inner, last = path.split("__")
        for key in inner:
            target = target[int(key)] if key.isdigit() else target[key]
        target[int(last) if last.isdigit() else last] = value
    return job


@pytest.mark.parametrize("file", ["job.yaml", "job_mirror.yaml"])
def test_the_jobs_are_valid(file: str) -> None:
    job = job_with(file)
    assert mistakes(job) == []
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    assert ("emptyDir" in volume) == ("MIRROR" in {one["name"] for one in container.get("env", [])})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template__spec__restartPolicy": "OnFailure"}, "podFailurePolicy needs restartPolicy: Never"),
        ({"podFailurePolicy__rules__0__onExitCodes__values": [143, 75]}, "ascending order"),
        ({"podFailurePolicy__rules__0__action": "Retry"}, "there is no action Retry"),
        ({"backoffLimits": 3}, "backoffLimits"),
    ],
)
def test_mistakes_in_a_job_are_found(changes: dict[str, Any], said: str) -> None:
    assert said in "\n".join(mistakes(job_with(**changes)))
