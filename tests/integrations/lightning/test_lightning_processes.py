"""Trainers of several processes, under DDP: one checkpoint, and a run that continues bit for bit on all of them."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.documents.examples import Examples
from tests.integrations.lightning import program
from tests.integrations.lightning.program import NEVER
from tests.sweep.lightning_programs import BATCHES

import holdfast as hf
from holdfast.integrations.lightning import load_checkpoint
from holdfast.integrations.lightning.resharding import check_replicated
from holdfast.integrations.lightning.strategies import check_strategy

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(run_together: Run) -> Run:
    return run_together


@pytest.fixture(scope="module")
def stop(run: Run) -> Run:
    """Runs the program until a signal ends all of its processes."""
    return functools.partial(run, status=143)


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Reports of an uninterrupted run, by its options."""
    known: dict[str, list[Any]] = {}

    def whole(**options: Any) -> list[Any]:
        key = str(options)
        if key not in known:
            known[key] = run(tmp_path_factory.mktemp("whole"), checkpoint=NEVER, **options)
        return known[key]

    return whole


SWEEP = pytest.mark.sweep


# ---- one process


@pytest.mark.parametrize(
    ("kind", "first", "second", "options"),
    [
        # Steps 5 and 10 are the ends of epochs; with accumulation, steps 2 and 4 are.
        pytest.param("signal_after", 3, 5, {}, id="SIGTERM"),
        pytest.param("signal_after", 2, 4, {"accumulate_grad_batches": 3}, id="SIGTERM while accumulating"),
        pytest.param("signal_in_validation_after", 5, 10, {}, id="SIGTERM in a validation"),
        pytest.param("kill_after", 5, 8, {}, id="SIGKILL"),
    ],
)
def test_killed_twice(
    run_process: Callable[..., Any], tmp_path: Path, kind: str, first: int, second: int, options: dict[str, Any]
) -> None:
    whole = json.loads(json.dumps(program.run(program.new_directory(), checkpoint=NEVER, **options).final))
    directory = tmp_path / "run"
    # SIGTERM loses nothing although nothing else makes it save; in a validation, it loses what is not saved, and
    # SIGKILL loses what was not on disk yet.
    killed = kind == "kill_after"
    checkpoint = NEVER if kind == "signal_after" else {"save_interval_steps": 1}
    for seed, step in enumerate((first, second), start=1):
        status, result, said = run_process(directory, seed=seed, checkpoint=checkpoint, **{kind: step}, **options)
        assert (status, result) == (-signal.SIGKILL if killed else 143, None), said
        assert hf.verify(directory).ok
    status, result, said = run_process(directory, seed=9, checkpoint=checkpoint, **options)
    assert status == 0, said
    assert result["final"] == whole
    # The batch in which SIGTERM came belongs to the step that is saved.
    saved = {"signal_after": second + 1, "signal_in_validation_after": second - 1, "kill_after": second}[kind]
    assert result["first_step"] in ({saved - 1, saved} if killed else {saved})


# ---- several processes


def compared(reports: list[Any]) -> list[Any]:
    return [[report["final"], report["random"]] for report in reports]


def test_two_processes_write_one_checkpoint(run: Run, tmp_path: Path) -> None:
    options = {"save_interval_secs": 0.05, "save_interval_steps": 4, "best_fn": "val_loss", "best_mode": "min"}
    reports = run(tmp_path, checkpoint=options, noted=True, test="best")
    assert reports[0]["steps"] == reports[1]["steps"] == hf.CheckpointManager(tmp_path).all_steps()
    assert reports[0]["final"]["model"]["head.weight"] == reports[1]["final"]["model"]["head.weight"]
    leaves = [leaf for leaf in hf.describe(tmp_path, 9) if leaf.item == "state"]
    paths = [leaf.path for leaf in leaves]
    assert len(set(paths)) == len(paths)
    for name, value in reports[0]["final"]["model"].items():
        assert paths.count(f"state_dict/{name}") == 1
        found = hf.load(tmp_path / "9", item="state", select=f"state_dict/{name}")["state_dict"][name]
        assert found.tolist() == value
    # Values that may differ between processes are those of process 0.
    for step in reports[0]["steps"]:
        buffers = hf.load(tmp_path / str(step), item="state", select="state_dict/own*")["state_dict"]
        assert [buffer.tolist() for buffer in buffers.values()] == [[0.0] * 64] * 4
    noted = hf.load(tmp_path / "9", item="state", select="noted/**")["noted"]
    assert noted["rank"] == 0
    assert [large.any() for large in noted["large"]] == [False, False]
    own = [hf.load(tmp_path / "9", item=f"process/{index}")["holdfast"]["random"]["torch"] for index in range(2)]
    assert own[0].tolist() != own[1].tolist()
    assert hf.verify(tmp_path).ok
    # The best one is the one that process 0 has measured.
    measured = {event[1]: event[2] for event in reports[0]["events"] if event[0] == "validation"}
    losses = {step: loss for step, loss in measured.items() if step in reports[0]["steps"]}
    best = min(losses, key=losses.__getitem__)
    weights = load_checkpoint(tmp_path / str(best))["state_dict"]["head.weight"].tolist()
    assert [report["tested"] for report in reports] == [[str(tmp_path / str(best)), weights]] * 2
    # It continues, in all processes with what process 0 had; a path that is named wins.
    longer = run(tmp_path, checkpoint=options, noted=True, ckpt_path=str(tmp_path / str(best)), max_epochs=4)
    assert [report["first_step"] for report in longer] == [best, best]
    assert [report["began"][0] for report in longer] == [weights, weights]
    assert [report["noted"] for report in longer] == [[0, 0.0, [1.0, 1.0]]] * 2


@pytest.mark.parametrize(
    ("who", "step", "options"),
    [
        pytest.param(1, 3, {}, id="one process"),
        pytest.param(0, 1, {"loader": "stateful"}, id="process 0, stateful loaders", marks=SWEEP),
        pytest.param("all", 6, {"loader": "stateful"}, id="all", marks=SWEEP),
        pytest.param(1, 3, {"average": True}, id="an average", marks=[SWEEP, pytest.mark.needs("lightning", "2.6")]),
        pytest.param(1, 3, {"strategy": "ddp with own buffers"}, id="own buffers"),
        pytest.param(1, 4, {"strategy": "fsdp2"}, id="FSDP2", marks=SWEEP),
        pytest.param(1, 3, {"wide": True}, id="float64 and int64 in the optimizer"),
        pytest.param(1, 4, {"wide": True, "strategy": "fsdp2"}, id="float64 and int64 in the optimizer, FSDP2"),
    ],
)
def test_a_preempted_run_goes_on_bit_for_bit(
    run: Run, stop: Run, whole: Run, tmp_path: Path, who: int | str, step: int, options: dict[str, Any]
) -> None:
    stop(tmp_path, checkpoint=NEVER, signal_after=[who, step], **options)
    [saved] = hf.list_checkpoints(tmp_path)
    assert saved.reason == "preempted"
    assert step <= saved.step
    if "average" in options:  # what Lightning has as the state dict is the average, and the weights are beside it
        parts = hf.load(tmp_path, item="state", select=["state_dict/head.*", "current_model_state/head.*"])
        assert parts["state_dict"]["head.weight"].tolist() != parts["current_model_state"]["head.weight"].tolist()
    resumed = run(tmp_path, checkpoint={**NEVER, "load_and_broadcast": True}, seed=7, **options)
    assert [report["first_step"] for report in resumed] == [saved.step] * 2
    assert compared(resumed) == compared(whole(**options))
    assert resumed[0]["random"] != resumed[1]["random"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("who", "step", "options"),
    [
        pytest.param(1, 6, {}, id="one process", marks=SWEEP),
        pytest.param(0, 5, {"loader": "stateful"}, id="stateful loaders"),
        pytest.param(1, 6, {"average": True}, id="an average", marks=pytest.mark.needs("lightning", "2.6")),
    ],
)
def test_a_run_that_is_preempted_in_a_validation_goes_on_from_the_step_before(
    run: Run, stop: Run, whole: Run, tmp_path: Path, who: int, step: int, options: dict[str, Any]
) -> None:
    stop(tmp_path, signal_in_validation_after=[who, step], **options)
    saved = hf.list_checkpoints(tmp_path)[-1].step
    resumed = run(tmp_path, checkpoint=NEVER, seed=7, **options)
    assert [report["first_step"] for report in resumed] == [saved] * 2
    assert compared(resumed) == compared(whole(**options))


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=SWEEP)])
def test_a_killed_process_costs_what_was_not_saved(run: Run, stop: Run, whole: Run, tmp_path: Path, who: int) -> None:
    run(tmp_path, status=-signal.SIGKILL, kill_after=[who, 5])
    steps = hf.CheckpointManager(tmp_path, options=hf.CheckpointManagerOptions(read_only=True)).all_steps()
    assert steps[-1] in (4, 5)
    assert hf.verify(tmp_path).ok
    resumed = run(tmp_path, checkpoint=NEVER, seed=7)
    assert resumed[0]["first_step"] == steps[-1]
    assert compared(resumed) == compared(whole())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=SWEEP)])
def test_a_run_resumes_from_local_steps_without_one_host(
    stop: Run, run: Run, whole: Run, tmp_path: Path, strategy: str
) -> None:
    options = {} if strategy == "ddp" else {"strategy": strategy}
    memory = str(tmp_path / "memory")
    directory = tmp_path / "run"
    killed = {"status": -signal.SIGKILL, "kill_after": ["all", 5]}
    run(directory, checkpoint=NEVER, memory=memory, **killed, **options)
    shutil.rmtree(tmp_path / "memory" / "0")
    resumed = run(directory, checkpoint=NEVER, memory=memory, seed=2, **options)
    first = {report["first_step"] for report in resumed}
    assert first <= {2, 4}, "the local save of step 4 may have been under way"
    assert len(first) == 1
    assert compared(resumed) == compared(whole(**options))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("who", "step", "where"),
    [
        pytest.param(1, 3, "directory", id="at a save"),
        pytest.param(0, 3, "directory", id="process 0", marks=SWEEP),
        pytest.param(1, 2, "directory", id="when a validation begins"),
        pytest.param(1, 4, "local places", id="at a local save", marks=SWEEP),
        pytest.param(1, 3, "program", id="at a save of the program"),
        pytest.param(0, 3, "program", id="process 0 at one of the program", marks=SWEEP),
        pytest.param(-1, 3, "program", id="no process"),
    ],
)
def test_a_process_without_a_state_to_save_stops_the_save_of_the_others_at_once(
    run: Run, tmp_path: Path, who: int, step: int, where: str
) -> None:
    options: dict[str, Any] = {"checkpoint": {"barrier_timeout_secs": 600}}
    if where == "local places":
        options = {"memory": str(tmp_path / "memory"), "checkpoint": NEVER}
    if where == "program":
        options = {"saves_itself": True, "checkpoint": {**NEVER, "barrier_timeout_secs": 600}}
    ended = run(tmp_path / "run", 3, status=int(who >= 0), fails_at=[who, step], **options)
    saved = [one.step for one in hf.list_checkpoints(tmp_path / "run")]
    if who < 0:
        assert saved == [3, 5]
        return
    for index, report in enumerate(ended):
        expected = "ValueError: no state today" if index == who else f"process {who} failed: ValueError: no state today"
        assert expected in report["said"], report["said"]
    assert (step - 1 in saved) == (where == "directory")


def test_a_save_after_an_exception_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    """The others may wait in a collective for the one that has failed: no save of all of them is possible then."""
    for report in run(tmp_path, status=1, checkpoint={"save_on_exception": True}):
        assert "save_on_exception=True works with one process, but this run has 2" in report["said"]
    assert hf.list_checkpoints(tmp_path) == []


# ---- another number of processes, and positions in the data


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), pytest.param(2, 3, marks=SWEEP)])
def test_another_number_of_processes_goes_on(run: Run, stop: Run, tmp_path: Path, before: int, now: int) -> None:
    stop(tmp_path, count=before, checkpoint=NEVER, signal_after=["all", 1])
    [saved] = hf.list_checkpoints(tmp_path)
    weights = load_checkpoint(tmp_path)["state_dict"]["head.weight"].tolist()
    ended = run(tmp_path, now, checkpoint=NEVER, seed=7)
    assert {report["first_step"] for report in ended} == {saved.step}
    assert [report["began"] for report in ended] == [[weights, saved.step * before // now]] * now
    assert len({str(report["random"]) for report in ended}) == now, "two processes draw the same numbers"
    assert f"saved by {before} processes, each with a share of the data, and resumed by {now}" in ended[0]["said"]


def test_the_same_batch_of_all_processes_with_another_number(run: Run, stop: Run, tmp_path: Path) -> None:
    """One process takes batches of the size that two had together, or half of it: the position counts samples."""
    stop(tmp_path, checkpoint=NEVER, loader="half batches", signal_after=["all", 2])
    [saved] = hf.list_checkpoints(tmp_path)
    [report] = run(tmp_path, 1, checkpoint=NEVER, loader="shuffled", seed=7)
    assert report["began"][1] == saved.step
    assert "are repeated" not in report["said"]


@pytest.mark.parametrize("now", [1, pytest.param(3, marks=SWEEP)])
def test_places_in_the_data_of_another_number_of_processes(run: Run, stop: Run, tmp_path: Path, now: int) -> None:
    options = {"checkpoint": NEVER, "loader": "stateful"}
    stop(tmp_path, **options, signal_after=["all", 1])
    [saved] = hf.list_checkpoints(tmp_path)
    for report in run(tmp_path, now, status=1, **options, seed=7):
        assert "each state of its data loaders (loaders/0) is a position in the data of one process" in report["said"]
        assert "give CheckpointCallback reshard=" in report["said"]
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [saved.step]
    ended = run(tmp_path, now, **options, seed=7, reshard=True, max_epochs=1)
    for index, report in enumerate(ended):
        assert report["first_step"] == saved.step
        assert f"loaders/0 of 2 for {index} of {now}" in report["said"]
        taken = saved.step * 2 // now  # batches of the epoch that are done
        assert report["began"][1] == taken
        assert report["final"]["step"] == saved.step + BATCHES - taken
    left = "of processes from 1 on are dropped" if now == 1 else "Processes from 2 on start with fresh"
    assert left in ended[0]["said"]


SIX = {"checkpoint": NEVER, "max_steps": 6, "max_epochs": -1}
CUT = {**SIX, "limit_train_batches": 6}


def numbers(folder: Path) -> list[int]:
    """Returns the numbers of the samples that any process has seen, in order."""
    return sorted(int(line) for path in folder.glob("seen-*") for line in path.read_text().split())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loader", ["of all", "of all, named"])
def test_one_position_of_all_processes(run: Run, stop: Run, tmp_path: Path, loader: str) -> None:
    """Four, two and three processes see each sample of an epoch once."""
    checkpoint = {**NEVER, "replicated": ["loaders"]} if loader == "of all, named" else NEVER
    options = {**CUT, "checkpoint": checkpoint, "loader": loader}
    stop(tmp_path / "run", count=4, **options, signal_after=["all", 1])
    stop(tmp_path / "run", count=2, **options, signal_after=["all", 3])
    ended = run(tmp_path / "run", 3, **options)

    assert "the data continues in the order that all processes share" in ended[0]["said"]
    assert len(list(tmp_path.glob("seen-*"))) == 4 + 2 + 3
    assert numbers(tmp_path) == list(range(72))
    assert ended[0]["final"]["step"] == 6


def test_one_position_of_all_processes_stopped_before_a_validation_and_in_it(
    run: Run, stop: Run, tmp_path: Path
) -> None:
    """Data without a length is drawn one batch ahead, by a resume as well."""
    options = {**SIX, "loader": "of all", "val_check_interval": 2}
    stop(tmp_path / "run", **options, signal_after=["all", 1])
    stop(tmp_path / "run", **options, signal_in_validation_after=["all", 2])
    run(tmp_path / "run", 1, **options)
    assert numbers(tmp_path) == list(range(72))


@pytest.mark.parametrize(
    ("loader", "after", "messages"),
    [
        pytest.param("share", 1, [], id="an order stays with its process"),
        pytest.param("of all, beside", 2, [], id="a position beside counted batches"),
        # a position that counted batches do not reach
        ("of all, beside the same batches", 2, ["instead of {'epoch': 0, 'samples': "]),
        (
            "of all, apart",
            1,
            [
                "the data loader of loaders/0 declares that its state is the same in all processes",
                "but 2 processes saved different ones",
            ],
        ),
    ],
)
def test_one_process_goes_on_from_two(
    run: Run, stop: Run, tmp_path: Path, loader: str, after: int, messages: list[str]
) -> None:
    """Or it is refused, with messages that say why."""
    options = {"checkpoint": NEVER, "max_epochs": 2} if loader == "share" else CUT
    stop(tmp_path / "run", loader=loader, **options, signal_after=["all", after])
    [report] = run(tmp_path / "run", 1, status=int(bool(messages)), loader=loader, **options)
    assert [message for message in messages if message not in report["said"]] == []
    if loader == "of all, beside":
        assert numbers(tmp_path) == list(range(72))


@pytest.mark.parametrize("alike", [True, pytest.param(False, marks=SWEEP)])
def test_generators_of_all_processes(run: Run, stop: Run, tmp_path: Path, alike: bool) -> None:
    options = {"checkpoint": {**NEVER, "replicated": ["global_generators"]}, "alike": alike}
    stop(tmp_path, **options, signal_after=["all", 1])
    ended = run(tmp_path, 3, status=int(not alike), **options, seed=7)
    if alike:
        assert len({str(report["random"]) for report in ended}) == 1
        assert "Processes from 2 on start with fresh averages over the epoch" in ended[0]["said"]
    else:
        assert "the 2 processes of the checkpoint saved different states of python, torch" in ended[0]["said"]


@pytest.mark.parametrize("shares", [None, [{"loaders": []}, {"loaders": []}]])
def test_a_step_without_the_states_that_it_declares_is_refused(shares: Any) -> None:
    saved = {"point": "validation", "replicas": 2, "replicated": [0], "loaders": []}
    with pytest.raises(hf.errors.StateError, match="pass an earlier step as fit"):
        check_replicated(saved, shares)


def test_what_two_processes_had_parts_of(run: Run, tmp_path: Path) -> None:
    reports = run(tmp_path, strategy="fsdp2", max_steps=4, test="best")
    layouts = {leaf.path: leaf.sharding for leaf in hf.describe(tmp_path, 4) if leaf.item == "state"}
    assert layouts["state_dict/head.weight"] is not None
    assert layouts["optimizer_states/0/state/head.weight/exp_avg"] is not None
    saved = load_checkpoint(tmp_path)["state_dict"]["head.weight"].tolist()
    assert [report["tested"] for report in reports] == [[str(tmp_path / "4"), saved]] * 2
    # One process that has all of it resumes from there.
    [alone] = run(tmp_path, 1, max_steps=5, ckpt_path=str(tmp_path / "4"))
    assert alone["first_step"] == 4
    assert alone["began"][0] == saved
    assert [moments["step"] for moments in alone["final"]["optimizer"]["state"].values()] == [5.0] * 6


WORLDS: dict[str, tuple[int, str]] = {
    "DDP": (2, "ddp"),
    "FSDP2": (2, "fsdp2"),
    "FSDP2 of three": (3, "fsdp2"),
    "ModelParallel": (2, "tensor"),
    "single": (1, "auto"),
}


@pytest.fixture(scope="module")
def saved_by(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The directory of a run of one of the worlds that has done all steps, and what it ended with."""
    known: dict[str, tuple[Path, Any]] = {}

    def saved(name: str) -> tuple[Path, Any]:
        if name not in known:
            directory, (count, strategy) = tmp_path_factory.mktemp("saved"), WORLDS[name]
            known[name] = directory, run(directory, count, strategy=strategy, max_steps=3)[0]["final"]
        return known[name]

    return saved


CHANGES = [
    ("DDP", "FSDP2"),
    ("FSDP2", "ModelParallel"),
    ("ModelParallel", "single"),
    *(("single", other) for other in ("ModelParallel", "DDP", "FSDP2")),
]
OTHERS = [pair for pair in itertools.permutations(WORLDS, 2) if pair not in CHANGES]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "now"), [*CHANGES, *(pytest.param(*pair, marks=SWEEP) for pair in OTHERS)])
def test_another_strategy_has_the_same_weights_and_optimizer_states(
    run: Run, saved_by: Callable[[str], Any], before: str, now: str
) -> None:
    """A run that has reached its last step restores it, and neither does nor saves a step."""
    directory, one = saved_by(before)
    count, strategy = WORLDS[now]
    other = run(directory, count, strategy=strategy, max_steps=3, seed=7)[0]["final"]
    assert other["step"] == one["step"] == 3
    assert other["model"] == one["model"]
    assert list(other["optimizer"]["state"].values()) == list(one["optimizer"]["state"].values())


def test_a_trainer_that_starts_the_others_itself(run: Run, stop: Run, tmp_path: Path) -> None:
    stop(tmp_path, count=1, devices=2, checkpoint=NEVER, signal_after=[0, 2])
    [saved] = hf.list_checkpoints(tmp_path)
    assert saved.reason == "preempted"
    own = [hf.load(tmp_path, item=f"process/{index}")["holdfast"]["replicas"] for index in range(2)]
    assert own == [2, 2]
    resumed = run(tmp_path, checkpoint=NEVER)
    assert [report["first_step"] for report in resumed] == [saved.step] * 2


@pytest.mark.examples("docs/lightning.md", "python 3", "console 1")
def test_the_page(examples: Examples, run: Run, tmp_path: Path) -> None:
    assert examples.commands()[1] == "torchrun --nproc-per-node 2 train_lightning.py"
    assert "\n80 steps\n" in run(tmp_path, page=examples["python 3"])[0]["said"]
    assert hf.CheckpointManager(tmp_path / "runs" / "ddp").all_steps() == [20, 40, 60, 80]
    assert hf.load(tmp_path / "runs" / "ddp", item="state")["state_dict"]["layer.weight"].shape == (1, 1)


@pytest.mark.examples("docs/several_processes.md", "python 3", "console 3")
def test_the_page_of_several_processes(examples: Examples, run: Run, tmp_path: Path) -> None:
    assert examples.commands() == ["python train_lightning.py"]
    assert "\n48 steps\n" in run(tmp_path, page=examples["python 3"])[0]["said"]
    assert hf.CheckpointManager(tmp_path / "runs" / "lightning").all_steps() == [20, 40, 48]


def trainer(*names: str, **attributes: Any) -> Any:
    """Gives a trainer whose strategy has a class of the first name, derived from those of the others."""
    kind: Any = object
    for name in reversed(names):
        kind = type(name, (kind,), {})
    strategy = kind()
    vars(strategy).update(attributes, world_size=2)
    return SimpleNamespace(strategy=strategy)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (trainer("FSDPStrategy"), "cannot save the state of FSDPStrategy in .*'ddp' or ModelParallelStrategy"),
        (trainer("DeepSpeedStrategy", "DDPStrategy"), "cannot save the state of DeepSpeedStrategy"),
        (trainer("XLAStrategy", "DDPStrategy"), "cannot save the state of XLAStrategy"),
        (trainer("ModelParallelStrategy", _save_distributed_checkpoint=False), "save_distributed_checkpoint=False"),
        (trainer("DDPStrategy", _ddp_comm_state=type("PostLocalSGDState", (), {})()), "averages models"),
    ],
)
def test_other_strategies_are_refused(refused: Any, message: str) -> None:
    with pytest.raises(hf.errors.StateError, match=message):
        check_strategy(refused)
