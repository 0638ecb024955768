"""The page for those who come from Orbax: its examples run, and what it calls the same does the same."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.documents.examples import ROOT, Examples
from tests.starts import run

import holdfast as hf

ocp: Any = pytest.importorskip("orbax.checkpoint")
managers: Any = pytest.importorskip("orbax.checkpoint.checkpoint_managers")
preservation, decisions = managers.preservation_policy, managers.save_decision_policy

PAGE = (ROOT / "docs" / "coming_from_orbax.md").read_text(encoding="utf-8")
TREE = {"w": np.arange(4.0)}


def as_program(name: str, text: str) -> str:
    """Makes a block part of one program, in which commands are calls."""
    if name.startswith("python"):
        return text
    commands = [shlex.split(line.removeprefix("$ holdfast")) for line in text.splitlines()]
    return "from holdfast.cli.main import main\n" + "".join(f"assert main({command}) == 0\n" for command in commands)


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/coming_from_orbax.md")
def test_the_examples_run_one_after_the_other(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text("\n".join(as_program(name, text) for name, text in examples.items()))
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"}
    done = run("-W", "ignore", "examples.py", backend="jax", cwd=tmp_path, env=os.environ | flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "[6, 8, 10]"


def test_the_names_of_the_page_are_there() -> None:
    names = set(re.findall(r"\bhf\.(\w+)", PAGE))
    assert names
    assert names <= set(hf.__all__)
    options = set(re.findall(r"`(\w+)=", PAGE)) & set(hf.CheckpointManagerOptions.__dataclass_fields__)
    assert options >= {"keep_time_interval", "save_interval_secs", "save_timeout_secs", "barrier_timeout_secs"}


# ---- both run, and keep the same steps


METRICS = {step: {"loss": float(step * 3 % 7)} for step in range(1, 8)}


def kept_by_orbax(path: Path, **options: Any) -> list[int]:
    options = {"enable_async_checkpointing": False, **options}
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step, metrics in METRICS.items():
            manager.save(step, args=ocp.args.StandardSave(TREE), metrics=metrics)
        return list(manager.all_steps())


def kept(path: Path, **options: Any) -> list[int]:
    with hf.CheckpointManager(path, options=hf.CheckpointManagerOptions(**options)) as manager:
        for step, metrics in METRICS.items():
            manager.save(step, TREE, metrics=metrics)
        manager.wait_until_finished()
        return manager.all_steps()


POLICIES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "newest": ([preservation.LatestN(2)], {"max_to_keep": 2}),
    "newest and multiples": (
        [preservation.LatestN(2), preservation.EveryNSteps(4)],
        {"keep_latest": 2, "keep_period": 4},
    ),
    "newest and steps": (
        [preservation.LatestN(1), preservation.CustomSteps([2, 5])],
        {"max_to_keep": 1, "keep_steps": [2, 5]},
    ),
    "newest and times": (
        [preservation.LatestN(1), preservation.EveryNSeconds(3600)],
        {"keep_latest": 1, "keep_time_interval": "1h"},
    ),
    "best and newest": (
        [preservation.BestN(get_metric_fn=lambda metrics: metrics["loss"], n=2), preservation.LatestN(2)],
        {"best_fn": "loss", "best_mode": "max", "max_to_keep": 2, "keep_latest": 2},
    ),
}


@pytest.mark.parametrize(("policies", "options"), POLICIES.values(), ids=POLICIES)
def test_what_is_kept(tmp_path: Path, policies: list[Any], options: dict[str, Any]) -> None:
    policy = preservation.AnyPreservationPolicy(policies)
    assert kept(tmp_path / "ours", **options) == kept_by_orbax(tmp_path / "orbax", preservation_policy=policy)


def test_without_a_number_everything_is_kept(tmp_path: Path) -> None:
    assert "without one of the first two, every step is" in PAGE
    assert kept(tmp_path, keep_period=4, keep_steps=[2]) == list(range(1, 8))


def test_saving_by_time(tmp_path: Path) -> None:
    said = "`save_decision_policy=ContinuousCheckpointingPolicy(minimum_interval_secs=900)`"
    (written,) = re.findall(rf"^\| {re.escape(said)} \| `([^`]*)` \|$", PAGE, re.MULTILINE)
    policy = decisions.ContinuousCheckpointingPolicy(minimum_interval_secs=900)
    assert kept_by_orbax(tmp_path / "orbax", save_decision_policy=policy) == [1]  # it always saves first
    options: dict[str, Any] = eval(f"dict({written})")  # what a program would say
    assert kept(tmp_path / "ours", **options) == []
    assert options["save_interval_secs"] == "15m"


def test_readers(tmp_path: Path) -> None:
    hf.CheckpointManager(tmp_path).close()
    (written,) = re.findall(r"`options=(hf\.CheckpointManagerOptions\(.*\))`", PAGE)
    options = eval(written, {"hf": hf})
    with (
        hf.CheckpointManager(tmp_path),
        hf.CheckpointManager(tmp_path, options=options) as reader,
        pytest.raises(hf.HoldfastError, match="read_only"),
    ):
        reader.save(1, TREE)
