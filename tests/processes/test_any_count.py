"""Runs that change their number of processes: 4, then 2, then 3, with the data and the generators that they share."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes.harness import Process, run_processes
from torch.utils.data import DataLoader, DistributedSampler

import holdfast as hf

SAMPLES, BATCH = 120, 12  # in an epoch, and of all processes in a step
STEPS = 4  # of each run: three runs take more than one epoch


def loader_of(index: int, count: int, size: int) -> Any:
    data: Any = range(SAMPLES)
    return DataLoader(data, batch_size=size, sampler=DistributedSampler(data, count, index, seed=7))


def torch_batches(index: int, count: int) -> Any:
    return hf.skip_to(loader_of(index, count, BATCH // count), global_batch_size=BATCH)


def grain_batches(index: int, count: int) -> Any:
    grain: Any = pytest.importorskip("grain")
    pytest.importorskip("grain.experimental")
    dataset = grain.MapDataset.range(SAMPLES).shuffle(seed=7).repeat()
    sharding = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    reads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # by default, 500 batches by 16 threads
    return iter(grain.experimental.ElasticIterator(dataset, BATCH, sharding, read_options=reads))


class OwnOrder:
    """A position in one order, declared by an attribute."""

    replicated_state = True

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.taken = index, count, 0

    def __next__(self) -> list[int]:
        order = np.concatenate([np.random.default_rng(epoch).permutation(SAMPLES) for epoch in range(2)])
        batch = order[self.taken : self.taken + BATCH][self.index :: self.count]
        self.taken += BATCH
        return [int(sample) for sample in batch]

    def get_state(self) -> int:
        return self.taken

    def set_state(self, state: int) -> None:
        self.taken = state


class Undeclared(OwnOrder):
    replicated_state = False


def plain_batches(index: int, count: int) -> Any:
    """Of which each process draws other seeds for its workers; what is handed over is alike in all of them."""
    torch.manual_seed(index)
    loader = loader_of(index, count, BATCH // count)
    return hf.skip_to(loader, generators=[np.random.default_rng(5)], state=(lambda: [1], print))


BATCHES: dict[str, Callable[[int, int], Any]] = {
    "DistributedSampler": torch_batches,
    "replicated= of batches": plain_batches,
    "ElasticIterator": grain_batches,
    "attribute": OwnOrder,
    "replicated=": Undeclared,
}


def train(process: Process, directory: str, kind: str) -> tuple[int, list[list[int]], list[float]]:
    """Goes on for some steps; returns the first step, the samples of each and a random number of each."""
    batches, noise = BATCHES[kind](process.index, process.count), np.random.default_rng(0)
    replicated = ("noise", "data") if kind.startswith("replicated=") else ("noise",)
    taken, drawn = [], []
    with hf.CheckpointCallback(directory, save_interval_steps=1, replicated=replicated) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": torch.zeros(2)}, data=batches, noise=noise)
        for step in range(start, start + STEPS):
            taken.append(np.asarray(next(batches)).tolist())
            drawn.append(float(noise.random()))
            checkpoint.on_step(step + 1, state, data=batches, noise=noise)
    return start, taken, drawn


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", BATCHES)
def test_every_sample_comes_once_with_4_then_2_then_3_processes(tmp_path: Path, kind: str) -> None:
    steps: list[list[int]] = []
    numbers: list[float] = []
    imports = ["grain"] if BATCHES[kind] is grain_batches and find_spec("grain") else []
    for count in (4, 2, 3):
        found = run_processes(train, count, str(tmp_path), kind, backend="torch", imports=imports)
        assert {start for start, _, _ in found} == {len(steps)}
        steps += [[sample for _, taken, _ in found for sample in taken[step]] for step in range(STEPS)]
        assert all(drawn == found[0][2] for _, _, drawn in found), "all processes draw alike"
        numbers += found[0][2]
    assert [len(step) for step in steps] == [BATCH] * 3 * STEPS
    assert sorted(chain(*steps[:10])) == list(range(SAMPLES))
    assert len(set(chain(*steps[10:]))) == 2 * BATCH
    assert numbers == np.random.default_rng(0).random(3 * STEPS).tolist()


DIFFERENT = ("data", "noise")


def differ_all(process: Process, directory: str) -> list[str]:
    return [differ(process, f"{directory}/{name}", name) for name in DIFFERENT]


def differ(process: Process, directory: str, name: str) -> str:
    """Saves replicated extras of which one differs; returns the error."""
    data, noise = OwnOrder(process.index, process.count), np.random.default_rng(0)
    data.taken += process.index if name == "data" else 0
    noise.random(process.index if name == "noise" else 0)
    try:
        with hf.CheckpointCallback(directory, save_interval_steps=1, replicated=("noise",)) as checkpoint:
            state, _ = checkpoint.restore_or_initialize({"w": torch.zeros(2)}, data=data, noise=noise)
            checkpoint.on_step(1, state, data=data, noise=noise)
    except hf.errors.HoldfastError as error:
        return f"{error} {error.__cause__} {getattr(error, '__notes__', '')}"
    return "saved"


def test_replicated_states_that_differ_are_not_saved(tmp_path: Path) -> None:
    for errors in run_processes(differ_all, 2, str(tmp_path), backend="torch"):
        for name, error in zip(DIFFERENT, errors, strict=True):
            assert name in error
            assert hf.list_checkpoints(tmp_path / name) == []


def draw(process: Process, directory: str) -> list[list[float]]:
    """Draws from the global generator of torch, which all processes have seeded by their rank, or alike."""
    drawn = []
    for name, seed in (("apart", process.index), ("alike", 3)):
        torch.manual_seed(seed)
        with hf.CheckpointCallback(f"{directory}/{name}", save_interval_steps=1) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": torch.zeros(2)})
            drawn.append(torch.rand(2).tolist())
            checkpoint.on_step(start + 1, state)
    return drawn


def test_more_processes_draw_alike_where_all_did(tmp_path: Path) -> None:
    run_processes(draw, 2, str(tmp_path), backend="torch")
    apart, alike = zip(*run_processes(draw, 3, str(tmp_path), backend="torch"), strict=True)
    assert len({number for drawn in apart for number in drawn}) == 6
    assert alike[0] == alike[1] == alike[2]


@pytest.mark.parametrize(
    ("count", "size", "state", "message"),
    [
        (4, 12, None, "batches of 12 in each of 4 processes, which are 48: give it batch_size=12 // 4"),
        (1, 7, {"epoch": 0, "samples": 24}, "24 samples after the start of epoch 0, which is no multiple of glo"),
        (
            1,
            12,
            {"epoch": 1, "samples": 600},
            "an epoch of this loader has 10 batches of 12: give it the data of the sa",
        ),
    ],
)
def test_a_position_of_all_processes_that_does_not_fit_is_refused(
    count: int, size: int, state: dict[str, int] | None, message: str
) -> None:
    with pytest.raises((hf.errors.OptionError, hf.errors.StateError), match=message):
        hf.skip_to(loader_of(0, count, size), global_batch_size=size).set_state(state or {})


def test_a_position_of_all_processes_needs_their_batch_size() -> None:
    with pytest.raises(hf.errors.StateError, match=r"24 of epoch 3\): give skip_to the global_batch_size"):
        hf.skip_to([1, 2]).set_state({"epoch": 3, "samples": 24})


def test_replicated_names_what_the_callback_is_given(tmp_path: Path) -> None:
    message = r"'dta', and restore_or_initialize was given no extra of this name \(known: data, global_generators\)"
    with (
        hf.CheckpointCallback(tmp_path, replicated=["dta"]) as checkpoint,
        pytest.raises(hf.errors.OptionError, match=message),
    ):
        checkpoint.restore_or_initialize({"w": np.zeros(2)}, data=OwnOrder(0, 1))
    with (
        hf.CheckpointCallback(tmp_path, replicated=["data"]) as checkpoint,
        pytest.raises(hf.errors.OptionError, match="replicated names 'data', and on_step was given no extra of this"),
    ):
        checkpoint.on_step(1, {"w": np.zeros(2)})
