"""``hf.resumable``: loops over epochs as people write them, interrupted in many places, end with the same bits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import holdfast as hf
from holdfast import graph
from holdfast.engine.stateful import restore_state, state_of

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*fork.*:DeprecationWarning",
        r"ignore:os.fork\(\) was called:RuntimeWarning",
        "ignore:Detected call of `lr_scheduler.step:UserWarning",  # the code after a loop with no batch left
    ),
    pytest.mark.usefixtures("default_sigterm"),
]
_directories = itertools.count()


def new_directory() -> str:
    return f"memory://resumable-{os.getpid()}/{next(_directories)}"


# ---- data


class Images(data.Dataset[Any]):
    """Ten items, which may draw noise where they are made; counts how many were."""

    def __init__(self, noise: bool = False) -> None:
        self.values = torch.linspace(-1, 1, 20).view(10, 2)
        self.noise, self.made = noise, 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return self.values[index] + 0.1 * torch.randn(2) + random.random() if self.noise else self.values[index]


class Lines(data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Images().values)


class Own:
    """A loader of the program's own, which shuffles by numpy's global generator and one of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(10)
        self.rng.shuffle(order)
        yield from torch.split(Images().values[order], 3)


def torchs(dataset: Any = Images, **options: Any) -> Any:
    return data.DataLoader(dataset(), batch_size=3, **options)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_own() -> Any:
    loader = Own()
    return hf.resumable(loader, generators=[loader.rng])


def looked_at(loader: Any) -> Any:
    """A batch before the run does not count."""
    next(iter(loader))
    return loader


def of_indices(**options: Any) -> Any:
    return hf.resumable(torchs(**options), redraw="indices")


def of_grain() -> Any:
    grain = pytest.importorskip("grain")
    return hf.resumable(grain.MapDataset.source(Images().values.numpy()).shuffle(seed=3).batch(3))


def of_hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": row} for row in Images().values.tolist()]
    return hf.resumable(datasets.Dataset.from_list(rows).with_format("torch").batch(3))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: hf.resumable(torchs()),
    "shuffle": lambda: hf.resumable(torchs(shuffle=True)),
    "an order repeated for ever": lambda: hf.resumable(Endless()),
    "a dataset of noise": lambda: hf.resumable(torchs(lambda: Images(noise=True), shuffle=True)),
    "workers": lambda: hf.resumable(torchs(shuffle=True, **FORK)),
    "a batch to look at": lambda: looked_at(hf.resumable(torchs(shuffle=True))),
    "drop_last": lambda: hf.resumable(torchs(shuffle=True, drop_last=True)),
    "a generator": lambda: hf.resumable(torchs(shuffle=True, generator=seeded())),
    "weighted": lambda: hf.resumable(torchs(sampler=data.WeightedRandomSampler([1.0] * 10, 10))),
    "subset": lambda: hf.resumable(torchs(sampler=data.SubsetRandomSampler(range(10)))),
    "batch_sampler": lambda: hf.resumable(
        data.DataLoader(Images(), batch_sampler=data.BatchSampler(data.RandomSampler(range(10)), 3, False))
    ),
    "a stream": lambda: hf.resumable(torchs(Lines)),
    "an order of its own": of_own,
    "a list": lambda: hf.resumable(torch.split(Images().values, 3)),
    "an array": lambda: hf.resumable(Images().values.numpy().reshape(4, 5)),
    "Grain": of_grain,
    "Hugging Face": of_hugging_face,
    "indices": lambda: of_indices(shuffle=True),
    "indices, a generator": lambda: of_indices(
        sampler=data.RandomSampler(range(10), replacement=True, num_samples=40, generator=seeded())
    ),
    "indices, single items": lambda: hf.resumable(
        data.DataLoader(Images(), batch_size=None, shuffle=True), redraw="indices"
    ),
    "indices, workers": lambda: of_indices(shuffle=True, **FORK),
    "indices, workers that last": lambda: of_indices(shuffle=True, persistent_workers=True, **FORK),
}


# ---- the loops


class KilledError(BaseException):
    """Ends a program between two steps, with nothing saved on the way out."""


@dataclass
class Run:
    """One start of a program: how it is interrupted, and what it has seen and left.

    Attributes:
        directory: The directory of its checkpoints.
        at: The step that is saved, and after which the program is killed.
        told: The step in which SIGTERM comes.
        turn: How many starts there were before it; each has another seed.
        breaks: After how many batches its inner loop is left, or 0.
    """

    directory: str
    at: int = 0
    told: int = 0
    turn: int = 0
    breaks: int = 0
    start: int = 0
    batches: dict[int, str] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)  # epochs whose end was reached, and the step then
    left: Any = None

    def callback(self) -> hf.CheckpointCallback:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1 + self.turn)
        return hf.CheckpointCallback(self.directory, save_interval_steps=self.at or 1000)

    def report(self, checkpoint: hf.CheckpointCallback, step: int, batch: str, state: Any, loader: Any) -> None:
        """Reports a step, as a program that does not look whether it should stop."""
        self.batches[step] = batch
        if step == self.told:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoint.on_step(step, state, data=loader)
        if step == self.at:
            raise KilledError

    def end_epoch(self, checkpoint: hf.CheckpointCallback, epoch: int, step: int) -> bool:
        if not checkpoint.should_stop:
            self.ends.append((epoch, step))
        return not checkpoint.should_stop


def train(run: Run, make: Callable[[], Any]) -> None:
    """Three epochs of torch, with dropout and a schedule that goes by epochs."""
    with run.callback() as checkpoint:
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = make()
        state, step = {"model": model, "optimizer": optimizer, "schedule": schedule}, 0
        state, step = checkpoint.restore_or_initialize(state, data=loader)
        run.start = step
        for epoch in range(loader.epoch, 3):
            for i, batch in enumerate(loader, loader.batch):
                x = torch.as_tensor(np.asarray(batch["x"] if isinstance(batch, dict) else batch)).float().view(-1)
                loss = model(x[: len(x) // 2 * 2].view(-1, 2)).square().mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                step += 1
                run.report(checkpoint, step, f"{epoch} {i} {x.tolist()}", state, loader)
                if i + 1 == run.breaks:
                    break
            if run.end_epoch(checkpoint, epoch, step):
                schedule.step()
    run.left = [one.tolist() for one in model.parameters()], schedule.state_dict(), torch.rand(2).tolist()


def check_interrupted(make: Callable[[], Any], length: int = 4, first: int = 0, breaks: int = 0) -> None:
    """Interrupt a program within its first epoch, at a last, a first and a middle batch, and again after each resume.

    It is killed and told in turns; ``first`` chooses with which of them it begins.
    """
    whole = Run(new_directory(), breaks=breaks)
    train(whole, make)
    assert whole.ends == [(epoch, length * (epoch + 1)) for epoch in range(3)]
    directory, steps = new_directory(), sorted({2, length, length + 1, length + 2, 2 * length, 3 * length})
    if getattr(make(), "num_workers", 0):  # processes take longer to start than all else
        steps = [length, length + 2, 3 * length]
    for turn, step in enumerate(steps):
        told = (turn + first) % 2
        run = Run(directory, 0 if told else step, step if told else 0, turn, breaks)
        # A program whose loop ends in the steps after a signal ends there.
        with contextlib.suppress(KilledError, *([SystemExit] if told else [])):
            train(run, make)
        assert run.start == (steps[turn - 1] if turn else 0)
        assert step in run.batches
        assert run.batches.items() <= whole.batches.items()
        assert {*run.ends} <= {*whole.ends}
    assert [one.step for one in hf.list_checkpoints(directory)] == steps
    last = Run(directory, turn=9, breaks=breaks)
    train(last, make)
    assert (last.start, last.batches, last.ends) == (3 * length, {}, whole.ends[-1:])
    assert last.left == whole.left


@pytest.mark.parametrize("name", LOADERS)
def test_a_loop_over_epochs_is_exact(name: str) -> None:
    lengths = {"drop_last": 3, "indices, a generator": 14, "indices, single items": 10}
    check_interrupted(LOADERS[name], lengths.get(name, 4), first=len(name) % 2)


# ---- loaders that are resumed at every step, each with what it depends on

Steps = Iterator[
    tuple[Any, list[Any]]
]  # what is seen in each step, and the states of the loaders, if it can be resumed


def check_resumed_anywhere(make: Callable[[], Any], steps: Callable[[Any], Steps]) -> None:
    """Wherever the loaders, which come first in what is made, are put back, the same steps follow."""
    whole = [*steps(make())]
    for done, (_, states) in enumerate(whole, 1):
        parts = make()
        for loader, state in zip(parts, states, strict=False):
            restore_state(loader, state)
        if states:
            assert [seen for seen, _ in steps(parts)] == [seen for seen, _ in whole[done:]]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (6, 4)])
def test_loaders_in_step_are_resumed_together(lengths: tuple[int, int], shares: bool) -> None:
    """At the end of the first one, zip asks the second one for no batch. They may share a generator."""

    def make() -> list[Any]:
        common = seeded()
        generators = [common if shares else seeded(length) for length in lengths]
        return [
            hf.resumable(data.DataLoader(torch.arange(length), shuffle=True, generator=one))  # type: ignore[arg-type]
            for length, one in zip(lengths, generators, strict=True)
        ]

    def steps(loaders: list[Any]) -> Steps:
        for _ in range(loaders[0].epoch, 3):
            for pair in zip(*loaders, strict=False):
                yield [one.tolist() for one in pair], [state_of(one) for one in loaders]

    check_resumed_anywhere(make, steps)


class Scored(list[Any]):
    """Items in the order of scores, which training changes."""

    def __init__(self) -> None:
        super().__init__(range(4))
        self.scores = np.zeros(4)

    def __iter__(self) -> Iterator[Any]:
        yield from np.argsort(self.scores, stable=True)

    def set_scores(self, scores: Any) -> None:
        self.scores = scores


def test_an_order_that_training_changes() -> None:
    def make() -> tuple[Any, Scored]:
        items = Scored()
        return hf.resumable(items, state=(lambda: items.scores, items.set_scores)), items

    def steps(parts: tuple[Any, Scored]) -> Steps:
        loader, items = parts
        for _ in range(loader.epoch, 3):
            for item in loader:
                items.scores[item] += 5 - 3 * items.scores[item] - item
                yield (int(item), items.scores.tolist()), [state_of(loader)]

    check_resumed_anywhere(make, steps)


def test_the_program_calls_set_epoch() -> None:
    def make() -> tuple[Any, Any]:
        sampler: Any = data.DistributedSampler(range(10), num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]
        return hf.resumable(data.DataLoader(Images(), batch_size=2, sampler=sampler)), sampler

    def steps(parts: tuple[Any, Any]) -> Steps:
        loader, sampler = parts
        for epoch in range(loader.epoch, 3):
            sampler.set_epoch(epoch)
            for batch in loader:
                yield batch.tolist(), [state_of(loader)]

    check_resumed_anywhere(make, steps)


def test_the_model_and_a_validation_draw_from_the_generator_of_training() -> None:
    def make() -> tuple[Any, torch.Generator, Any]:
        generator = seeded()
        training = hf.resumable(torchs(shuffle=True, generator=generator))
        return training, generator, torchs(shuffle=True, generator=generator)

    def steps(parts: tuple[Any, torch.Generator, Any]) -> Steps:
        training, generator, validation = parts
        for _ in range(training.epoch, 3):
            for batch in training:
                yield (batch.tolist(), torch.rand(1, generator=generator).item()), [state_of(training)]
            yield [batch.tolist() for batch in validation], []

    check_resumed_anywhere(make, steps)


@pytest.mark.parametrize("breaks", [0, 3])
@pytest.mark.parametrize("redraw", ["batches", "indices"])
def test_epochs_of_a_number_of_batches(redraw: Any, breaks: int) -> None:
    """Each loop ends there, whether or not the program leaves it by a break."""

    def make() -> Any:
        return hf.resumable(torchs(shuffle=True), batches_per_epoch=3, redraw=redraw)

    assert len(make()) == 3
    check_interrupted(make, length=3, breaks=breaks)


# ---- the end of the data


@pytest.mark.parametrize("after", [0, 2])
def test_the_data_end_when_the_run_was_stopped(after: int) -> None:
    """The steps after the signal still get their batches; a loop without any break then ends, and saves no more."""
    directory, seen, epochs = new_directory(), [], 0
    loader = hf.resumable(list(range(10)))
    options: Any = {"grace_secs": "1h", "witness_steps_after_signal": after}
    with hf.CheckpointCallback(directory, save_interval_steps=1, **options) as checkpoint:
        state, step = checkpoint.restore_or_initialize({"w": 0}, data=loader)
        while loader.epoch < 3:
            epochs += 1
            for batch in loader:
                seen.append(batch)
                step += 1
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                checkpoint.on_step(step, state, data=loader)
        outcome = checkpoint.on_step(99, {"w": 1}, data=loader)
    assert (seen, epochs) == ([*range(4 + after)], 3)
    assert (outcome.saved, outcome.should_stop) == (False, True)
    assert [one.step for one in hf.list_checkpoints(directory)] == [1, 2, 3, 4]
    assert checkpoint.exit_status == 75
    with hf.CheckpointCallback(directory) as checkpoint:  # the same loader, as in a notebook
        checkpoint.restore_or_initialize({"w": 0}, data=loader)
        assert (loader.epoch, loader.batch, list(loader)) == (0, 4, [*range(4, 10)])


def test_an_endless_iterator_ends_with_the_run() -> None:
    batches, seen = hf.skip_to(["a", "b", "c"]), []
    with hf.CheckpointCallback(new_directory(), witness_steps_after_signal=0) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": 0}, data=batches)
        for step, batch in enumerate(batches, 1):
            seen.append(batch)
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoint.on_step(step, state, data=batches)
        with pytest.raises(StopIteration, match="the run was stopped"):
            next(batches)
    assert seen == ["a", "b", "c", "a"]


def test_a_program_that_asks_for_batches_for_ever_ends(caplog: pytest.LogCaptureFixture) -> None:
    steps = []

    def program() -> None:
        loader = hf.resumable([1, 2, 3])
        with hf.CheckpointCallback(new_directory(), witness_steps_after_signal=0) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"w": 0}, data=loader)
            while step < 100:
                for _ in loader:
                    step += 1
                    steps.append(step)
                    if step == 4:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if checkpoint.on_step(step, state, data=loader).should_stop:
                        break

    with pytest.raises(SystemExit) as ended:
        program()
    assert (ended.value.code, steps) == (75, [1, 2, 3, 4])
    assert "the program asks for batches although the run was stopped, and ends here" in caplog.text


# ---- places


def restored(loader: Any, state: Any) -> Any:
    restore_state(loader, state)
    return loader


def test_epochs_and_batches_are_counted() -> None:
    loader = hf.resumable([[1, 2], [3, 4], [5, 6]])
    assert (len(loader), loader.epoch, loader.batch, loader.left) == (3, 0, 0, 3)
    places = [(loader.epoch, loader.batch, loader.left) for _ in loader]
    assert places == [(0, 1, 2), (0, 2, 1), (0, 3, 0)]
    assert (loader.epoch, loader.batch) == (1, 0)
    for _ in loader:
        state = state_of(loader)
        break
    assert (loader.epoch, loader.batch, list(loader)) == (2, 0, [[1, 2], [3, 4], [5, 6]])  # a new epoch after a break
    assert loader.epoch == 3
    again = restored(hf.resumable([[1, 2], [3, 4], [5, 6]]), state)
    assert (again.epoch, again.batch, list(again), again.epoch) == (1, 1, [[3, 4], [5, 6]], 2)
    assert state_of(restored(hf.resumable([[1], [2]]), state)) == state  # before its first loop


def test_lengths_and_attributes_are_those_of_the_loader() -> None:
    inner: Any = torchs(shuffle=True)
    loader = hf.resumable(inner)
    assert (loader.batch_size, loader.dataset, loader.sampler) == (3, inner.dataset, inner.sampler)
    for name in ("_iterator", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(loader, name)
    stream = hf.resumable(torchs(Lines))
    with pytest.raises(TypeError):
        len(stream)
    assert [stream.left for _ in stream] == [None] * 4
    assert len(hf.resumable(torchs(Lines), batches_per_epoch=2)) == 2


def test_a_graph_saves_the_place(tmp_path: Path) -> None:
    loader, again = hf.resumable([1, 2, 3, 4]), hf.resumable([1, 2, 3, 4])
    rest = iter(loader)
    next(rest)
    path = graph.Checkpoint(data=loader).save(f"{tmp_path}/ckpt")
    graph.Checkpoint(data=again).restore(path).assert_consumed()
    assert list(again) == [2, 3, 4]


# ---- drawing again


def test_no_item_is_loaded_again_by_indices() -> None:
    def at_batch_3(**options: Any) -> tuple[Images, Any, Any]:
        torch.manual_seed(0)
        loader = hf.resumable(torchs(shuffle=True), **options)
        batches = iter(loader)
        return loader.dataset, [next(batches).tolist() for _ in range(3)], state_of(loader)

    cases: list[tuple[dict[str, Any], int]] = [({}, 10), ({"redraw": "indices"}, 1)]
    for options, made in cases:
        _, first, state = at_batch_3(**options)
        torch.manual_seed(9)
        loader = restored(hf.resumable(torchs(shuffle=True), **options), state)
        (last,) = [batch.tolist() for batch in loader]
        assert loader.dataset.made == made
        rows = sorted(row for batch in (*first, last) for row in batch)
        assert rows == sorted(Images().values.tolist())


def test_a_line_names_indices_when_drawing_again_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    clock = itertools.count(step=2)
    monkeypatch.setattr("holdfast.engine.loaders.time.monotonic", lambda: float(next(clock)))
    for make, says in ((lambda: data.DataLoader(Images(), shuffle=True), True), (lambda: [*range(20)], False)):
        directory = new_directory()
        for turn in range(2):
            loader = hf.resumable(make())
            with hf.CheckpointCallback(directory) as checkpoint:
                _, step = checkpoint.restore_or_initialize({"w": 0}, data=loader)
                for _ in loader:
                    step += 1
                    checkpoint.on_step(step, {"w": 0}, data=loader)
                    if step == 8 and turn == 0:
                        break
        said = [one for one in caplog.messages if "redraw='indices'" in one]
        caplog.clear()
        assert len(said) == says
        assert not says or "again, 3 of 8 so far" in said[0]


@pytest.mark.parametrize("kind", ["other data", "a generator of its own", "workers that last", "their end of an epoch"])
def test_what_is_not_as_it_was_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    new_workers = "continues with new worker processes, whose random generators cannot be saved"
    told = {
        "other data": "batch 1 of an epoch, which a list has drawn again, differs from before the stop",
        "a generator of its own": "was saved with other parts than resumable is given now: generators.0 (saved)",
        "workers that last": new_workers,
        "their end of an epoch": new_workers,
    }

    def make(turn: int) -> Any:
        if kind == "other data":
            return hf.resumable([turn, 2, 3])
        if kind == "a generator of its own":
            return hf.resumable(torchs(shuffle=True), generators=[np.random.default_rng()] * (1 - turn))
        return hf.resumable(torchs(shuffle=True, persistent_workers=True, **FORK))

    loader = make(0)
    for _ in range(1 if kind == "their end of an epoch" else 2):
        for _ in loader:
            state = state_of(loader)
            if told[kind] != new_workers or loader.epoch:
                break
    again = restored(make(1), state)
    assert len([*again, *again]) >= 4
    assert told[kind] in caplog.text


# ---- what is refused


class Endless(data.DataLoader[Any]):
    """As in YOLO: keeps its workers by a batch sampler that repeats for ever, and one iterator."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Images(), batch_size=3, shuffle=True, **options)
        order: Any = self.batch_sampler
        object.__setattr__(self, "batch_sampler", itertools.chain.from_iterable(itertools.repeat(order)))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return itertools.islice(self.iterator, len(self))


class DataLoaderAdapter(list[int]):
    """As the prepared loaders of Accelerate."""

    __module__ = "accelerate.data_loader"


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: iter([1]), {}, "resumable needs a loader that can be restarted"),
        (lambda: 3, {}, "resumable needs a loader"),
        (lambda: DataLoaderAdapter([1]), {}, "counts the epochs itself"),
        (lambda: Endless(**FORK), {}, "keeps one iterator for all epochs"),
        (lambda: Endless(generator=seeded()), {}, "keeps one iterator for all epochs"),
        (lambda: [1], {"batches_per_epoch": 0}, "batches_per_epoch=0 must be a number of batches"),
        (lambda: [1], {"batches_per_epoch": True}, "batches_per_epoch=True must be"),
        (lambda: [1], {"generators": 7}, "generators=7 must be a sequence"),
        (lambda: [1], {"state": 7}, "state=7 must be a pair of functions"),
        (lambda: [1], {"redraw": "items"}, "redraw='items' must be 'batches' or 'indices'"),
        (lambda: [1], {"redraw": "indices"}, "needs a DataLoader of torch over a dataset with indices, not a list"),
        (lambda: torchs(Lines), {"redraw": "indices"}, "over a dataset with indices"),
    ],
)
def test_what_cannot_be_resumed_is_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        hf.resumable(make(), **arguments)


def test_one_loop_at_a_time() -> None:
    loader = hf.resumable([1, 2, 3])
    outer = iter(loader)
    assert (next(outer), list(loader)) == (1, [1, 2, 3])
    with pytest.raises(hf.errors.StateError, match="another loop over the same resumable loader has begun"):
        next(outer)


def test_the_state_of_another_object() -> None:
    with pytest.raises(hf.errors.StateError, match="this one has position: it was saved of another object"):
        hf.resumable([1]).set_state({"position": 3})


def test_a_data_loader_that_is_passed_itself_is_pointed_here() -> None:
    with (
        hf.CheckpointCallback(new_directory()) as checkpoint,
        pytest.raises(hf.errors.OptionError, match=r"make data = hf.resumable\(data\)"),
    ):
        checkpoint.restore_or_initialize({"w": 0}, data=torchs(shuffle=True))


@pytest.mark.parametrize(
    ("evaluates", "told"), [(True, 1), (False, 0), ("on the loader inside", 0)], ids=["other loops", "none", "inside"]
)
def test_other_loops_over_the_same_loader_are_told(evaluates: Any, told: int, caplog: pytest.LogCaptureFixture) -> None:
    inside = data.DataLoader(Images(), batch_size=5, shuffle=True)
    loader, step = hf.resumable(inside), 0
    with hf.CheckpointCallback(new_directory(), save_interval_steps=2) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.zeros(2)}, data=loader)
        for _ in range(3):
            for _batch in loader:
                step += 1
                checkpoint.on_step(step, state, data=loader)
            for _batch in (loader if evaluates is True else inside) if evaluates else ():
                pass
    assert sum("each counts as an epoch" in text for text in caplog.messages) == told


def test_the_rest_of_an_epoch_without_an_update_is_no_other_loop(caplog: pytest.LogCaptureFixture) -> None:
    """An update takes two of the five batches of an epoch, so that the last one is left after a resume."""
    directory, updates = new_directory(), [0, 0]
    for start in range(2):
        loader, step = hf.resumable(list(range(5))), 0
        with hf.CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"w": np.zeros(2)}, data=loader)
            for _ in range(loader.epoch, 1 + 2 * start):
                for index, _batch in enumerate(loader, loader.batch):
                    if index % 2:
                        step, updates[start] = step + 1, updates[start] + 1
                        checkpoint.on_step(step, state, data=loader)
    assert updates == [2, 4]
    assert "each counts as an epoch" not in caplog.text


class Stages(data.Sampler[int]):
    """Counts its epochs."""

    def __init__(self) -> None:
        self.stage = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.stage += 1
        return iter(np.random.default_rng(self.stage).permutation(10).tolist())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["workers", "workers of torchdata", "what is handed over"])
def test_what_a_loader_makes_or_takes_back_later_is_no_attribute(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()

    def make() -> Any:
        workers: Any = FORK
        if kind == "workers":
            return hf.resumable(data.DataLoader(Images(), batch_size=2, shuffle=True, **workers))
        if kind == "workers of torchdata":
            loaders = pytest.importorskip("torchdata.stateful_dataloader")
            return loaders.StatefulDataLoader(Images(), batch_size=2, shuffle=True, **workers)
        order = Stages()
        loader: Any = data.DataLoader(Images().values, batch_size=2, sampler=order)  # type: ignore[arg-type]
        return hf.resumable(loader, state=(lambda: order.stage, lambda stage: setattr(order, "stage", stage)))

    def train(last: int) -> None:
        loader = make()
        with hf.CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"w": np.zeros(2)}, data=loader)
            while step < 20:
                for _batch in loader:
                    step += 1
                    checkpoint.on_step(step, state, data=loader)
                    if step == last:
                        raise KeyError

    for last in (7, 13):
        with pytest.raises(KeyError):
            train(last)
        caplog.clear()
    train(99)
    assert not [text for text in caplog.messages if "as saved, except" in text]
