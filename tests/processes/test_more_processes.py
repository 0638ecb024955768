"""Runs that more processes continue with than saved them: no two processes draw the same numbers from then on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Logged, Process, run_processes

import holdfast as hf
from holdfast import graph
from holdfast.integrations.flax import CheckpointCallback

STEPS = 3


class Batches:
    """A process's share of the data, and its place there."""

    def __init__(self, index: int) -> None:
        self.index, self.position = index, 0

    def __next__(self) -> int:
        self.position += 1
        return self.position * 10 + self.index

    def get_state(self) -> dict[str, int]:
        return {"position": self.position, "index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        self.position, self.index = state["position"], state["index"]


class Schedule:
    """Belongs to the model, as the schedulers of torch do."""

    def __init__(self) -> None:
        self.rate = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.rate = state["rate"]


def by_graph(directory: str, objects: dict[str, Any]) -> Any:
    checkpoint = graph.Checkpoint(**objects)
    with graph.CheckpointManager(checkpoint, directory, max_to_keep=None) as manager:
        manager.restore_or_initialize()
        yield
        manager.save()


def by_rank(name: str, states: Sequence[Any], index: int, count: int) -> Any:
    """Gives each process the state that it had, and a new one a fresh state."""
    return states[index] if index < len(states) else Batches(index).get_state()


def by_callback(directory: str, objects: dict[str, Any]) -> Any:
    with CheckpointCallback(directory, save_interval_steps=1, reshard=by_rank) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)}, **objects)
        yield
        checkpoint.on_step(start + 1, state, **objects)


def by_manager(directory: str, objects: dict[str, Any]) -> Any:
    own = hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler())
    with hf.CheckpointManager(directory, {"own": own, "common": hf.Checkpointer(hf.PyTreeCheckpointHandler())}) as run:

        def states() -> dict[str, Any]:
            return {"batches": objects["batches"].get_state(), "noise": objects["noise"].bit_generator.state}

        restored = run.restore_latest({"own": states(), "common": None})
        if restored is not None:
            objects["batches"].set_state(restored.items["own"]["batches"])
            objects["noise"].bit_generator.state = restored.items["own"]["noise"]
            objects["schedule"].rate = restored.items["common"]["rate"]
        yield
        run.save((run.latest_step() or 0) + 1, {"own": states(), "common": {"rate": objects["schedule"].rate}})


WAYS = {"graph": by_graph, "callback": by_callback, "manager": by_manager}


def train(process: Process, directory: str) -> dict[str, tuple[Any, ...]]:
    """Goes on with a run in each way; returns what was drawn after the resume, the rate before, and the warnings."""
    found = {}
    for name, way in WAYS.items():
        schedule, noise = Schedule(), np.random.default_rng(process.index)
        objects: dict[str, Any] = {"batches": Batches(process.index), "noise": noise, "schedule": schedule}
        run = way(f"{directory}/{name}", objects)
        with Logged() as logged:
            next(run)
            rate = schedule.rate
            drawn = [(next(objects["batches"]), float(noise.random())) for _ in range(STEPS)]
            schedule.rate /= 2
            next(run, None)
        found[name] = drawn, rate, [line for line in logged.warnings if f"process {process.index}" in line]
    return found


def expected(index: int, first: int) -> list[tuple[int, float]]:
    """What a process draws from its ``first`` step on, when nothing interrupts it."""
    batches, noise = Batches(index), np.random.default_rng(index)
    return [(next(batches), float(noise.random())) for _ in range(first + STEPS)][first:]


def test_a_process_without_a_saved_state_keeps_its_own(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        found = run_processes(train, count, str(tmp_path), backend="torch")
        for index, ways in enumerate(found):
            before = count - 1 - index  # runs that had this process
            for name, (drawn, rate, warnings) in ways.items():
                assert drawn == expected(index, before * STEPS), (name, index)
                assert rate == 0.5 ** (count - 1), (name, index)  # belongs to the model: that of process 0
                is_new = index == count - 1 > 0
                assert any("fresh" in line for line in warnings) == is_new, (name, index)
        assert len({value for ways in found for _, value in ways["graph"][0]}) == count * STEPS


class Shared:
    """A place in an order that all processes share: each has taken a part of what lies before it."""

    def __init__(self) -> None:
        self.taken = 0

    def get_state(self) -> int:
        return self.taken

    def set_state(self, state: int) -> None:
        self.taken = state


def divided(name: str, states: Sequence[Any], index: int, count: int) -> Any:
    assert name == "data"
    whole = sum(states)
    return whole // count + (index < whole % count)


def go_on(process: Process, directory: str) -> dict[str, Any]:
    """Goes on with a run, first without a word about its data and then with one; returns what came of it."""
    data, found = Shared(), dict[str, Any]()
    average = [0.5]
    objects: dict[str, Any] = {"data": data, "noise": np.random.default_rng(process.index), "average": average}
    for reshard in (None, divided):
        callback = CheckpointCallback(directory, save_interval_steps=1, resume="auto", reshard=reshard)
        with Logged() as logged, callback as checkpoint:
            try:
                state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)}, **objects)
            except hf.errors.StateError as error:
                found["refused"] = str(error)
                continue
            found |= {"start": start, "taken": data.taken, "average": checkpoint.extras["average"]}
            found["said"] = [line for line in logged.warnings if "generators" in line]
            if start == 0:
                data.taken = 5 + process.index
                checkpoint.on_step(1, state, **objects)
            break
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_place_in_the_data_goes_to_other_processes_as_the_program_says(
    tmp_path: Path, before: int, after: int
) -> None:
    run_processes(go_on, before, str(tmp_path), backend="torch")
    taken = sum(range(5, 5 + before))
    again = run_processes(go_on, after, str(tmp_path), backend="torch")
    for found in again:
        assert f"step 1 in {tmp_path} was saved by {before} processes, and {after} are to continue" in found["refused"]
        assert "the states of data= belong to one process each" in found["refused"]
        assert "reshard=" in found["refused"]
        assert (found["start"], found["average"]) == (1, [0.5])
    assert sum(found["taken"] for found in again) == taken
    said = [index for index, found in enumerate(again) if found["said"]]
    assert said == (list(range(before, after)) if after > before else [0]), "what generators a process has is said"
