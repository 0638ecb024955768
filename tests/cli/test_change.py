"""``holdfast prune``, ``rm``, ``pin``, ``unpin``, ``rollback`` and ``watch``."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.commands import Cli, cut_short, said_by
from tests.manager.runs import opened, saved

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.steps import read_record

LOSSES = (3.0, 1.0, 2.0, 5.0, 4.0, 6.0)


def train(run: Path, **options: Any) -> Path:
    """Makes a run with steps 0 to 5, each with its loss."""
    saved(run, *range(6), items=weights, metrics=lambda step: {"loss": LOSSES[step]}, **options)
    return run


def weights(step: int) -> dict[str, Any]:
    return {"w": np.full(8, step)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("saved") / "run", keep_period=2)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def steps(run: Path, prefix: str | None = None) -> list[int]:
    return opened(run, read_only=True, step_prefix=prefix).all_steps()


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ((), [0, 1, 2, 3, 4, 5]),  # those of the run, which keeps everything
        (("--keep-latest", "1"), [0, 2, 4, 5]),  # the run keeps every second step
        (("--keep-latest", "2", "--only"), [4, 5]),
        (("--max-to-keep", "1", "--only"), [5]),
        (("--max-to-keep", "2", "--best-fn", "loss", "--best-mode", "min", "--only"), [1, 2, 5]),
        (("--keep-period", "4"), [0, 4, 5]),
        (("--keep-step", "1", "--keep-step", "3", "--only"), [1, 3, 5]),
        (("--keep-time-interval", "1h", "--only"), [0, 5]),
    ],
)
def test_prune(cli: Cli, run: Path, rules: tuple[str, ...], left: list[int]) -> None:
    found = cli.json("prune", run, *rules, "--dry-run")
    assert (steps(run), found["deleted"]) == ([0, 1, 2, 3, 4, 5], [])
    assert sorted(map(int, found["kept"])) == left

    cli.output("prune", run, *rules, "--yes")
    assert steps(run) == left


def better(metrics: dict[str, float]) -> float:
    return -metrics["loss"]


@pytest.mark.parametrize(
    ("kept_by_the_run", "rules", "left"),
    [
        ({"best_fn": "loss", "best_mode": "min"}, ("--keep-latest", "2"), [1, 4, 5]),
        ({"best_fn": "loss", "best_mode": "min"}, ("--keep-latest", "2", "--only"), [4, 5]),
        ({"best_fn": "loss", "best_mode": "min", "max_to_keep": 3, "keep_latest": 1}, ("--max-to-keep", "1"), [1, 5]),
        ({"best_fn": "loss", "best_mode": "max"}, ("--keep-latest", "1", "--best-mode", "min"), [1, 5]),
        ({"best_fn": better}, ("--keep-latest", "2"), "a function in its program, better"),
        ({"best_fn": better}, ("--keep-latest", "2", "--best-fn", "loss"), "needs --best-mode"),
        ({"best_fn": better}, ("--keep-latest", "1", "--best-fn", "loss", "--best-mode", "min"), [1, 5]),
        ({"best_fn": better}, (), "a function in its program, better"),
        ({}, ("--only",), "--only needs a rule"),
        (
            {},
            ("--best-fn", "lost", "--best-mode", "min"),
            "no checkpoint has the metric lost, so none is the best, and nothing was deleted; the metrics are: loss",
        ),
    ],
)
def test_rules_that_are_not_given_are_those_of_the_run(
    cli: Cli, tmp_path: Path, kept_by_the_run: dict[str, Any], rules: tuple[str, ...], left: list[int] | str
) -> None:
    run = train(tmp_path / "run", **{"keep_latest": 6, **kept_by_the_run})
    before = steps(run)
    if isinstance(left, str):
        assert left in cli.error("prune", run, *rules, "--yes", status=2)
        assert steps(run) == before
    else:
        cli.output("prune", run, *rules, "--yes")
        assert steps(run) == left


def test_pinned_steps_stay(cli: Cli, run: Path) -> None:
    options = (run / "options.json").read_bytes()
    assert cli.output("pin", run, 1, 2) == "pinned 1, 2\n"
    assert cli.json("unpin", run, 2) == {"directory": str(run), "unpinned": [2]}

    said = cli.output("prune", run, "--keep-latest", "1", "--only", "--yes")

    assert "keep 1: pinned\n" in said
    assert "delete 0, 2, 3, 4: 4 checkpoints of" in said
    assert steps(run) == [1, 5]
    assert (run / "options.json").read_bytes() == options, "the rules of the run are its own"


def test_damaged_steps_are_only_deleted_by_name(cli: Cli, run: Path) -> None:
    record = run / "3" / "checkpoint.json"
    cut_short(record)
    assert str(record) in cli.error("rollback", run, 3, "--yes", status=1)
    assert steps(run) == [0, 1, 2, 4, 5]
    said = cli.output("prune", run, "--keep-latest", "6", "--yes")
    assert "damaged, left alone (holdfast rm deletes them): 3\n" in said

    cli.output("rm", run, 3, 0, "--yes")

    assert sorted(path.name for path in run.iterdir() if path.name.isdigit()) == ["1", "2", "4", "5"]
    assert "no checkpoint of step 7; there are 1, 2, 4, 5" in cli.error("rm", run, 1, 7, "--yes", status=2)
    assert steps(run) == [1, 2, 4, 5], "either all of the steps or none"


def test_rollback(cli: Cli, run: Path) -> None:
    said = cli.output("rollback", run, 3, "--yes")
    assert said.splitlines()[0] == "keep 3: the run resumes from it"
    assert steps(run) == [0, 1, 2, 3]
    assert opened(run).restore()["w"][0] == 3


@pytest.fixture
def mirrored(tmp_path: Path) -> tuple[Path, Path]:
    """Makes a run with steps 1 to 4, of which the mirror has all."""
    run, mirror = tmp_path / "mirrored", tmp_path / "bucket"
    for step in (1, 2, 3, 4):
        saved(run, step, items=weights, mirror=str(mirror))
    assert steps(mirror) == [1, 2, 3, 4]
    return run, mirror


@pytest.mark.parametrize(("command", "gone_here"), [("rollback 2", False), ("rollback 2", True), ("rm 4 3", False)])
def test_what_a_command_deletes_does_not_come_back_from_the_mirror(
    cli: Cli, mirrored: tuple[Path, Path], command: str, gone_here: bool
) -> None:
    run, mirror = mirrored
    name, *arguments = command.split()
    if gone_here:  # only the mirror has them
        for step in (3, 4):
            shutil.rmtree(run / str(step))
        assert f"also delete 3, 4 in the mirror {mirror}\n" in cli.output(name, run, *arguments, "--dry-run")
    cli.output(name, run, *arguments, "--yes")
    assert (steps(run), steps(mirror)) == ([1, 2], [1, 2])
    assert saved(run, mirror=str(mirror)) == [1, 2]
    assert "nothing to delete" in cli.output("rollback", run, 2, "--yes")


def test_a_mirror_that_is_not_there_is_changed_by_the_next_run(
    capsys: pytest.CaptureFixture[str], mirrored: tuple[Path, Path], tmp_path: Path
) -> None:
    run, mirror = mirrored
    shutil.copytree(run, tmp_path / "copy")  # which leaves the mirror of the original
    said = said_by(capsys, "rollback", tmp_path / "copy", 2, "--yes")[1]
    assert f"it is the mirror of the run in {run}" in said
    assert steps(mirror) == [1, 2, 3, 4]
    away = mirror.rename(mirror.with_name("unmounted"))
    mirror.write_bytes(b"")  # such as a mount point that is broken
    said = said_by(capsys, "rollback", run, 2, "--yes")[1]
    assert "all steps after 2 of" in said
    assert "are still in this mirror" in said
    mirror.unlink()
    away.rename(mirror)
    assert saved(run, mirror=str(mirror)) == [1, 2]
    saved(run, 3, items=lambda _: weights(33), mirror=str(mirror))
    assert steps(mirror)[-1] == 3
    assert hf.load(mirror)["w"][0] == 33


def test_pins_reach_the_mirror_and_prune_leaves_it(cli: Cli, mirrored: tuple[Path, Path]) -> None:
    run, mirror = mirrored
    cli.output("pin", run, 2)
    assert read_record(hf.storage.as_location(mirror / "2")).pinned
    assert f"the mirror {mirror} follows its own rules" in cli.output("prune", run, "--keep-latest", 1, "--yes")
    assert (steps(run), steps(mirror)) == ([2, 4], [1, 2, 3, 4])


@pytest.mark.parametrize("command", [("rm", 1), ("rollback", 1), ("prune", "--keep-latest", 1)])
def test_no_answer_deletes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path, command: tuple[object, ...]
) -> None:
    name, *arguments = command
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "give --yes, or --dry-run" in said_by(capsys, name, run, *arguments, status=2)[1]
    answers = io.StringIO("n\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", answers)
    assert said_by(capsys, name, run, *arguments, status=1)[0].endswith("nothing was deleted\n")
    assert len(steps(run)) == 6


def test_a_rollback_of_a_run_with_local_steps_says_that_these_do_not_count(cli: Cli, tmp_path: Path) -> None:
    local = tmp_path / "local"
    saved(tmp_path / "run", 1, 2, items=weights, save_interval_steps=1, local=hf.Local(local, every=1, copies=0))
    said = cli.output("rollback", tmp_path / "run", 1, "--yes")
    assert f"local steps of the hosts in {local} no longer count\n" in said
    assert steps(tmp_path / "run") == [1]


def test_a_run_that_is_alive_is_refused(cli: Cli, run: Path) -> None:
    program = (
        "import sys, holdfast as hf\n"
        "manager = hf.CheckpointManager(sys.argv[1]); manager.acquire(); print('ready', flush=True); sys.stdin.read()"
    )
    writer = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(writer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        said = cli.error("pin", run, 1, status=1)
        process.communicate("")
    assert "another run is writing to this directory" in said


def test_several_prefixes(cli: Cli, run: Path) -> None:
    for step in (1, 2):
        shutil.copytree(run / str(step), run / f"b_{step}")

    assert "give one with --prefix" in cli.error("rm", run, 1, "--yes", status=2)
    said = cli.error("rm", run, 1, "--prefix", "c", "--yes", status=2)
    assert "no checkpoint has the prefix c; there are: " in said
    cli.output("rm", run, 1, "--prefix", "b", "--yes")

    assert (steps(run), steps(run, "b")) == ([0, 1, 2, 3, 4, 5], [2])


@pytest.mark.parametrize(("given", "waited"), [("1s", 1.0), ("0.5", 0.5), ("2m", 120.0), ("10ms", 0.1)])
def test_how_often_watch_looks(given: str, waited: float, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.listing.time", SimpleNamespace(sleep=sleep, time=time.time))
    assert main(["watch", str(run), "--interval", given]) == 0
    assert pauses == [waited]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watch_says_what_comes_and_goes(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def a_new_step() -> None:
        saved(run, 6, items=weights, metrics=lambda _: {"loss": 0.5})

    def metrics_and_a_deletion() -> None:
        hf.record_metrics(run, 4, {"loss": 0.25})
        shutil.rmtree(run / "0")

    def end() -> None:
        raise KeyboardInterrupt

    happening = iter((metrics_and_a_deletion, a_new_step, lambda: cut_short(run / "3" / "checkpoint.json"), end))
    clock = SimpleNamespace(sleep=lambda _: next(happening)(), strftime=time.strftime, time=time.time)
    monkeypatch.setattr("holdfast.cli.listing.time", clock)
    said = said_by(capsys, "watch", run, *flags)[0].splitlines()

    if flags:
        changes = [json.loads(line) for line in said]
        assert [change["step"] for change in changes[:6]] == [0, 1, 2, 3, 4, 5]
        assert [(one["change"], one["step"], (one["metrics"] or {}).get("loss")) for one in changes[6:]] == [
            ("deleted", 0, 3.0),
            ("metrics", 4, 0.25),
            ("saved", 6, 0.5),
            ("damaged", 3, None),
        ]
        return
    lines = [line.split(" ", 1)[1] for line in said[7:]]
    assert lines[:2] == ["deleted 0", "metrics of 4: loss 0.25"]
    assert re.fullmatch("saved 6: .*loss 0.5", lines[2])
    assert lines[3].startswith("damaged 3: ")
    assert len(lines) == 4
