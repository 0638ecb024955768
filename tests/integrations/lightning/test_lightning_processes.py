"""Trainers of several processes, under DDP: one checkpoint, and a run that goes on bit for bit on all of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.integrations.lightning import load_checkpoint

Run = Callable[..., list[tuple[int, Any, str]]]

NEVER = {"save_interval_steps": 1000, "save_at_end": False}


@pytest.fixture(scope="module")
def finish(run_together: Run) -> Callable[..., list[Any]]:
    """Runs the program to its end, and returns what its processes report."""

    def run(directory: Path, count: int = 2, **options: Any) -> list[Any]:
        ended = run_together(directory, count, **options)
        assert [status for status, _, _ in ended] == [0] * count, "\n".join(said for _, _, said in ended)
        return [report for _, report, _ in ended]

    return run


@pytest.fixture(scope="module")
def stop(run_together: Run) -> Callable[..., None]:
    """Runs the program, of which a signal ends all processes with the same status."""

    def run(directory: Path, status: int = 143, count: int = 2, **options: Any) -> None:
        ended = run_together(directory, count, **options)
        assert [status for status, _, _ in ended] == [status] * count, "\n".join(said for _, _, said in ended)

    return run


@pytest.fixture(scope="module")
def whole(finish: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Reports of a run that nobody interrupts, by the kind of its loader."""
    known: dict[str, list[Any]] = {}

    def run(loader: str) -> list[Any]:
        if loader not in known:
            known[loader] = finish(tmp_path_factory.mktemp("whole"), loader=loader, checkpoint=NEVER)
        return known[loader]

    return run


def compared(reports: list[Any]) -> list[Any]:
    return [[report["final"], report["random"]] for report in reports]


def test_two_processes_write_one_checkpoint(finish: Callable[..., list[Any]], tmp_path: Path) -> None:
    options = {"save_interval_secs": 0.05, "save_interval_steps": None, "best_fn": "val_loss", "best_mode": "min"}
    reports = finish(tmp_path, checkpoint=options, noted=True, test="best")
    assert reports[0]["steps"] == reports[1]["steps"] == hf.CheckpointManager(tmp_path).all_steps()
    assert reports[0]["final"]["model"]["output.weight"] == reports[1]["final"]["model"]["output.weight"]
    leaves = [leaf for leaf in hf.describe(tmp_path, 9) if leaf.item == "state"]
    paths = [leaf.path for leaf in leaves]
    assert len(set(paths)) == len(paths)
    for name, value in reports[0]["final"]["model"].items():
        assert paths.count(f"state_dict/{name}") == 1
        found = hf.load(tmp_path / "9", item="state", select=f"state_dict/{name}")["state_dict"][name]
        assert found.tolist() == value  # buffers are those of process 0
    # What nobody promises to be the same everywhere is process 0's.
    assert hf.load(tmp_path / "9", item="state", select="noted/**")["noted"]["large"].tolist() == [0.0] * (1 << 19)
    assert hf.load(tmp_path / "9", item="state", select="noted/rank")["noted"]["rank"] == 0
    own = [hf.load(tmp_path / "9", item=f"process/{index}")["holdfast"]["random"]["torch"] for index in range(2)]
    assert own[0].tolist() != own[1].tolist()
    assert hf.verify(tmp_path).ok
    # The best one is the one that process 0 has measured.
    losses = {
        event[1]: event[2]
        for event in reports[0]["events"]
        if event[0] == "validation" and event[1] in reports[0]["steps"]
    }
    best = min(losses, key=losses.__getitem__)
    weights = load_checkpoint(tmp_path / str(best))["state_dict"]["output.weight"].tolist()
    assert [report["tested"] for report in reports] == [[str(tmp_path / str(best)), weights]] * 2
    # It goes on, in all processes with what process 0 had; a path that is named wins.
    longer = finish(tmp_path, checkpoint=options, noted=True, ckpt_path=str(tmp_path / str(best)), max_epochs=4)
    assert [report["first_step"] for report in longer] == [best, best]
    assert [report["began"][0] for report in longer] == [weights, weights]
    assert [report["noted"] for report in longer] == [[0, 0.0, [1.0, 1.0]]] * 2


@pytest.mark.parametrize(
    ("loader", "kind", "who", "step"),
    [
        pytest.param("shuffled", "signal_after", 1, 3, id="one process"),
        pytest.param("stateful", "signal_after", 0, 1, id="process 0, stateful loaders"),
        pytest.param("stateful", "signal_after", "all", 6, id="all"),
        pytest.param("shuffled", "signal_in_validation_after", 1, 6, id="in a validation"),
        pytest.param("stateful", "signal_in_validation_after", 0, 5, id="in a validation, stateful loaders"),
    ],
)
def test_a_preempted_run_goes_on_bit_for_bit(
    finish: Callable[..., list[Any]], stop: Callable[..., None], whole: Callable[[str], list[Any]],
    tmp_path: Path, loader: str, kind: str, who: int | str, step: int,
) -> None:  # fmt: skip
    stop(tmp_path, loader=loader, checkpoint=NEVER, **{kind: [who, step]})
    [saved] = hf.list_checkpoints(tmp_path)
    assert saved.reason == "preempted"
    assert step <= saved.step <= step + 2
    resumed = finish(tmp_path, loader=loader, checkpoint=NEVER, seed=7)
    assert [report["first_step"] for report in resumed] == [saved.step] * 2
    assert compared(resumed) == compared(whole(loader))
    assert resumed[0]["random"] != resumed[1]["random"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_costs_what_was_not_saved(
    finish: Callable[..., list[Any]], stop: Callable[..., None], whole: Callable[[str], list[Any]],
    tmp_path: Path, who: int,
) -> None:  # fmt: skip
    stop(tmp_path, -signal.SIGKILL, kill_after=[who, 5])
    steps = hf.CheckpointManager(tmp_path, options=hf.CheckpointManagerOptions(read_only=True)).all_steps()
    assert steps[-1] in (4, 5)
    assert hf.verify(tmp_path).ok
    resumed = finish(tmp_path, checkpoint=NEVER, seed=7)
    assert resumed[0]["first_step"] == steps[-1]
    assert compared(resumed) == compared(whole("shuffled"))


@pytest.mark.parametrize(("before", "now", "batch"), [(2, 1, 4), (1, 3, 0), (2, 3, 1)])
def test_another_number_of_processes_goes_on(
    run_together: Run, stop: Callable[..., None], tmp_path: Path, before: int, now: int, batch: int
) -> None:
    stop(tmp_path, count=before, checkpoint=NEVER, signal_after=["all", 1])
    [saved] = hf.list_checkpoints(tmp_path)
    weights = load_checkpoint(tmp_path)["state_dict"]["output.weight"].tolist()
    ended = run_together(tmp_path, now, checkpoint=NEVER, seed=7)
    assert [status for status, _, _ in ended] == [0] * now, ended[0][2]
    assert {report["first_step"] for _, report, _ in ended} == {saved.step}
    assert [report["began"] for _, report, _ in ended] == [[weights, batch]] * now
    assert f"saved by {before} processes that had a share of the data each, and resumed by {now}" in ended[0][2]


def test_a_trainer_that_starts_the_others_itself(
    finish: Callable[..., list[Any]], stop: Callable[..., None], tmp_path: Path
) -> None:
    stop(tmp_path, count=1, devices=2, checkpoint=NEVER, signal_after=[0, 2])
    [saved] = hf.list_checkpoints(tmp_path)
    assert saved.reason == "preempted"
    own = [hf.load(tmp_path, item=f"process/{index}")["holdfast"]["replicas"] for index in range(2)]
    assert own == [2, 2]
    resumed = finish(tmp_path, checkpoint=NEVER)
    assert [report["first_step"] for report in resumed] == [saved.step] * 2


def test_the_page(run_together: Run, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "lightning.md").read_text(encoding="utf-8")
    assert "$ torchrun --nproc-per-node 2 train_lightning.py" in page
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ended = run_together(tmp_path, page=program)
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2]
    assert "\n80 steps\n" in ended[0][2]
    assert hf.CheckpointManager(tmp_path / "runs" / "ddp").all_steps() == [20, 40, 60, 80]
    assert hf.load(tmp_path / "runs" / "ddp", item="state")["state_dict"]["layer.weight"].shape == (1, 1)


def strategy(*names: str, **attributes: Any) -> Any:
    kind: Any = object
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return SimpleNamespace(world_size=2, strategy=kind(), **attributes)


@pytest.mark.parametrize(
    "names", [("FSDPStrategy",), ("DeepSpeedStrategy", "DDPStrategy"), ("XLAStrategy", "DDPStrategy")]
)
def test_other_strategies_are_refused(names: tuple[str, ...]) -> None:
    from holdfast.integrations.lightning.strategies import check_strategy

    with pytest.raises(hf.StateError, match=rf"cannot save what {names[0]} holds .* strategy='ddp'"):
        check_strategy(strategy(*names))
