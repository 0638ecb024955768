"""The pages on projects of Hydra and LightningCLI: killed and started again, as their readers do it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import output_of
from tests.documents.examples import Examples
from tests.starts import Interrupt, run

import holdfast as hf


def project(examples: Examples, directory: Path, settings: str) -> Path:
    """Writes the files of a page to a directory."""
    program, configuration = examples["python 1"], examples["yaml 1"]
    (directory / settings).parent.mkdir(parents=True)
    (directory / settings).write_text(configuration, encoding="utf-8")
    (directory / "train.py").write_text(program, encoding="utf-8")
    return directory


def commands(examples: Examples) -> list[list[str]]:
    return [command.split()[2:] for command in examples.commands()]


def start(directory: Path, arguments: list[str], status: int = 0, *, interrupt: Interrupt | None = None) -> str:
    """Runs the program of a page, which a signal may interrupt; returns what it says."""
    done = run("-W", "ignore", "train.py", *arguments, cwd=directory, backend="torch", interrupt=interrupt, merged=True)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/hydra.md")
def test_a_hydra_multirun_is_interrupted_and_repeated(
    examples: Examples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, multirun = commands(examples)
    whole, interrupted = (project(examples, tmp_path / name, "conf/config.yaml") for name in ("whole", "interrupted"))
    start(whole, multirun)
    assert "preempted" in start(interrupted, multirun, 75, interrupt=("SIGTERM", 300 + 130))  # in the second job
    said = start(interrupted, multirun)
    start(whole, alone)
    assert f"resumed from step 300 in {interrupted}/runs/width=8/checkpoints" in said
    assert f"resumed from step 130 in {interrupted}/runs/width=32/checkpoints" in said
    for width in (8, 32):
        runs = [directory / "runs" / f"width={width}" / "checkpoints" for directory in (whole, interrupted)]
        assert hf.list_checkpoints(runs[1])[-1].step == 300
        assert "bit for bit" in output_of(capsys, "diff", *runs)
    assert hf.list_checkpoints(whole / "runs" / "width=16" / "checkpoints")[-1].step == 300


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/lightning_cli.md")
def test_a_cli_program_is_killed_twice(examples: Examples, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, appended = commands(examples)
    names = ("whole", "killed", "without")
    whole, killed, without = (project(examples, tmp_path / name, "config.yaml") for name in names)
    shorter, found = re.subn(r"  callbacks:\n(?:    .*\n)+", "", (without / "config.yaml").read_text())
    assert found == 1
    (without / "config.yaml").write_text(shorter)
    start(whole, arguments)
    start(killed, arguments, -signal.SIGKILL, interrupt=("SIGKILL", 50))
    start(killed, arguments, 143, interrupt=("SIGTERM", 30))
    start(killed, arguments)
    start(without, appended)

    runs = [directory / "runs" / "line" / "checkpoints" for directory in (whole, killed, without)]
    assert [hf.list_checkpoints(run)[-1].step for run in runs] == [128] * 3
    assert "bit for bit" in output_of(capsys, "diff", *runs[:2])
    starts = [line for line in (runs[1] / "events.jsonl").read_text().splitlines() if '"started"' in line]
    assert len(starts) == 3


CALLBACK = "holdfast.integrations.lightning.CheckpointCallback"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["save_interval_secs=15m"], "save_interval_secs", "15m"),
        (["save_interval_secs=90"], "save_interval_secs", 90.0),
        (["signals=[SIGTERM,SIGUSR1]"], "signals", ["SIGTERM", "SIGUSR1"]),
        (["keep_steps=[1,2]"], "keep_steps", [1, 2]),
        (["resume=100"], "resume", 100),
        (["best_fn=val_loss", "best_mode=min"], "best_mode", "min"),
        (["mirror=s3://bucket/run"], "mirror", "s3://bucket/run"),
        (["mirror.class_path=holdfast.Mirror", "mirror.init_args.url=/m"], "mirror", hf.Mirror("/m")),
        (
            ["local.class_path=holdfast.Local", "local.init_args.url=/m", "local.init_args.every=5"],
            "local",
            hf.Local("/m", every=5),
        ),
        (["grace_secs=30s"], "grace_secs", "30s"),
        (["export_best=best.ckpt", "best_fn=loss", "best_mode=min"], "export_best", "best.ckpt"),
        (["max_to_kep=3"], "", "Option 'max_to_kep' is not accepted"),
        (["max_to_keep=three"], "", "Given value: three"),
        (["resume=newest"], "", "Given value: newest"),
        (["max_to_keep=-3"], "", "max_to_keep=-3 must be a whole number of at least 1"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cli_takes_all_options(given: list[str], name: str, value: Any, tmp_path: Path) -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    arguments = [f"--callback={CALLBACK}", f"--callback.dirpath={tmp_path / 'run'}"]
    arguments += [f"--callback.{one}" for one in given]
    if not name:
        with pytest.raises(Exception, match=re.escape(value)):
            parser.instantiate_classes(parser.parse_args(arguments))
        return
    callback = parser.instantiate_classes(parser.parse_args(arguments)).callback
    assert getattr(callback._options, name) == value


def test_lists_of_omegaconf_are_lists(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    options = {
        "directory": str(tmp_path),
        "keep_steps": [1, 2],
        "signals": ["SIGTERM", "SIGUSR1"],
        "save_interval_secs": "15m",
    }
    configuration: Any = OmegaConf.create(options)
    with hf.CheckpointCallback(**configuration) as checkpoint:
        assert [one.name for one in checkpoint._options.preemption_signals()] == ["SIGTERM", "SIGUSR1"]
        assert list(checkpoint.manager.options.keep_steps) == [1, 2]
