"""Training loaders of one's own that carry a state: an interrupted run yields what a whole one yields."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import combined_loader as combined
from tests.documents.examples import Examples
from tests.integrations.lightning import program
from tests.integrations.wrapped_states import of_a_rank

from holdfast.engine.generators import same_state
from holdfast.errors import StateError
from holdfast.integrations.lightning import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata with torch 2.13
    pytest.mark.filterwarnings("ignore:.*fork"),
]
SIZE, EPOCHS = 3, 3


class Placed:
    """Has an epoch, and a place in it."""

    size = SIZE

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Sized(Placed):
    """Begins an epoch with every iterator, except the one after a resume within an epoch."""

    has_begun = is_resumed = False

    def __len__(self) -> int:
        return self.size

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.has_begun = self.place > 0
        self.is_resumed = 0 < self.place < self.size

    def __iter__(self) -> Iterator[Any]:
        if not self.is_resumed:
            self.epoch, self.place = self.epoch + self.has_begun, 0
        self.has_begun, self.is_resumed = True, False
        while self.place < self.size:
            self.place += 1
            yield torch.tensor([10.0 * self.epoch + self.place])


class Unsized(Placed):
    """Goes to the next epoch when its iterator ends; a new iterator continues where the one before it stopped."""

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            self.place += 1
            yield torch.tensor([10.0 * self.epoch + self.place])
        self.epoch, self.place = self.epoch + 1, 0


class WithLast(Unsized):
    """Goes to the next epoch with its last batch, before its iterator ends."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size - self.place):
            batch = torch.tensor([10.0 * self.epoch + self.place + 1])
            self.epoch, self.place = self.epoch + (self.place + 1) // self.size, (self.place + 1) % self.size
            yield batch


class ByNext(Unsized):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.place == self.size:
            self.epoch, self.place = self.epoch + 1, 0
            raise StopIteration
        self.place += 1
        return torch.tensor([10.0 * self.epoch + self.place])


class Dated(Sized):
    """Has a state with a time in whole seconds, a count of looks, and the state of a generator of the process."""

    now = looks = 0

    def state_dict(self) -> dict[str, Any]:
        self.looks += 1
        return {**super().state_dict(), "at": Dated.now, "looks": [*range(self.looks)], "torch": torch.get_rng_state()}


class Endless(Unsized):
    """Has data that do not end within a run."""

    size = 1 << 20


class Declared(Unsized):
    replicated_state = True


class DatedDeclared(Dated):
    replicated_state = True

    def state_dict(self) -> dict[str, Any]:
        return {**Sized.state_dict(self), "saved": {"at": Dated.now}}


class WithoutLength(torch.utils.data.IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(self.size)).view(-1, 1))


def beside(own: Callable[[], Any], mode: Any, size: int = SIZE) -> Callable[[], Any]:
    """Return loaders of which the second has neither a state nor a length."""
    return lambda: combined.CombinedLoader(
        [own(), torch.utils.data.DataLoader(WithoutLength(size), batch_size=1)], mode
    )


class Net(LightningModule):
    def __init__(self, end: int) -> None:
        super().__init__()
        self.layer, self.end = torch.nn.Linear(1, 1), end
        self.seen: list[list[float | None]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if len(self.seen) == self.end:
            raise program.InterruptionError
        Dated.now += 1
        parts = batch if isinstance(batch, list | tuple) else [batch]
        self.seen.append([part if part is None else float(part) for part in parts])
        return self.layer(next(part for part in parts if part is not None).view(-1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def run(loaders: Any, directory: Path | None, end: int = -1, limit: int | None = None) -> list[Any]:
    """Run up to the given number of steps, or all; return the batches.

    A run that is cut off saves its last step only, a run that resumes every fourth step and its end, and a whole run
    every step; one without a directory saves nothing.
    """
    Dated.now += 1
    callbacks, net = list[Any](), Net(end)
    if directory is not None:
        interval = end if end > 0 else SIZE + 1 if directory.exists() else 1
        callbacks = [CheckpointCallback(directory, save_interval_steps=interval)]
    options = {"max_epochs": EPOCHS, "limit_train_batches": limit, "enable_checkpointing": bool(callbacks)}
    try:
        program.trainer(*callbacks, **options).fit(net, loaders)
    except program.InterruptionError:
        assert end >= 0
    return net.seen


def check(loaders: Callable[[], Any], directory: Path, ends: Sequence[int], limit: int | None = None) -> list[Any]:
    """Compare a run that saves nothing with a whole run and with runs that are cut off at some steps; return it.

    They are cut off again a step later.
    """

    def seeded(seed: int, directory: Path | None, end: int = -1) -> list[Any]:
        torch.manual_seed(seed)
        return run(loaders(), directory, end, limit)

    whole = seeded(1, None)
    assert seeded(1, directory / "whole") == whole
    for end in ends[: len(whole) - 2]:
        parts = [seeded(seed, directory / str(end), steps) for seed, steps in enumerate((end, 1, -1), start=1)]
        assert [batch for part in parts for batch in part] == whole, f"cut off after {end} batches"
    return whole


class ByReference:
    """Keeps the dictionary that it gets, and changes it; it is at the end of one epoch where the next one begins."""

    def __init__(self) -> None:
        self.state = {"count": 0}

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE - self.state["count"] % SIZE):
            self.state["count"] += 1
            yield torch.tensor([float(self.state["count"])])


class Live(ByReference):
    """Returns the dictionary that it changes."""

    def state_dict(self) -> dict[str, int]:
        return self.state


@pytest.mark.examples("docs/lightning.md", "python 2")
def test_the_loader_of_the_page(examples: Examples, tmp_path: Path) -> None:
    kind = examples.run({})["Shuffled"]
    whole = check(lambda: kind(torch.arange(float(SIZE)).view(-1, 1), 1), tmp_path, (1, 3))
    assert len(set(map(str, [whole[:SIZE], whole[SIZE : 2 * SIZE], whole[2 * SIZE :]]))) > 1


CYCLE = "max_size_cycle"


def lengths(kind: type[Any], mode: Any) -> Callable[[], Any]:
    """Return loaders of two lengths: an epoch lasts until each has ended, or one of them."""
    short: Any = type("Short", (kind,), {"size": 2})
    return lambda: combined.CombinedLoader([short(), kind()], mode)


def of_torchdata(
    size: int, other: int = 0, mode: Any = CYCLE, *, wrapped: bool = False, **options: Any
) -> Callable[[], Any]:
    """Return a loader of torchdata, or two of them."""

    def loaders() -> Any:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        kind = of_a_rank(kind) if wrapped else kind
        generators = {"generator": torch.Generator().manual_seed(1)} if options.get("generator") else {}
        parts = [kind(torch.arange(float(one)), **{**options, **generators}) for one in (size, other) if one]
        return combined.CombinedLoader(parts, mode) if other else parts[0]

    return loaders


class Drawing:
    """Has no state, and draws the order of each epoch from its generator, as its iterator is made."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([float(one)]) for one in self.generator.permutation(SIZE)])


class DrawingLater(Drawing):
    """Draws the order with the first batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class DrawingInSamplers(Drawing):
    """Draws from the generators of its samplers, one of torch and one of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = SimpleNamespace(generator=torch.Generator())
        self.batch_sampler = SimpleNamespace(sampler=SimpleNamespace(generator=random.Random(0)))

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SIZE, generator=self.sampler.generator)
        return iter(order[:, None] + self.batch_sampler.sampler.generator.random())


def lasting() -> Any:
    """Return a loader whose iterator, with the counts of its worker, stays from epoch to epoch."""
    data: Any = torch.arange(float(SIZE))
    return torch.utils.data.DataLoader(data, batch_size=1, num_workers=1, persistent_workers=True)


# By the name of a case: its loaders, and the steps that it is cut off at, within an epoch and at its end.
IN_EPOCHS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "sized": (Sized, (1, 3)),
    "unsized": (Unsized, (1, 3)),
    "with last": (WithLast, (1, 3)),
    "by next": (ByNext, (1, 3)),
    "dated": (Dated, (1, 3)),
    "declared": (Declared, (1, 3)),
    "sized beside": (beside(Sized, "min_size"), (1, 3)),
    "sized padded": (beside(Sized, "max_size"), (1, 3)),
    "unsized beside": (beside(Unsized, "max_size"), (1, 3)),
    "with last beside": (beside(WithLast, "max_size"), (1, 3)),
    # The epoch ends before the data of a loader: the next iterator continues behind the last batch.
    "together": (beside(Unsized, CYCLE), (1, 3)),
    "with last together": (beside(WithLast, CYCLE), (1, 3)),
    "declared together": (beside(Declared, CYCLE), (1, 3)),
    "cut": (beside(Endless, "min_size", 1), (1, 2)),
    # Also where that is with the first batch after a resume.
    "until both have ended": (lengths(Unsized, CYCLE), (1, 3)),
    "declared, until both have ended": (lengths(Declared, CYCLE), (1, 3)),
    "until one has ended": (lengths(Unsized, "min_size"), (1, 2, 3)),
    "declared, until one has ended": (lengths(Declared, "min_size"), (1, 2, 3)),
    "torchdata": (of_torchdata(3, shuffle=True), (1, 3)),
    "torchdata, generator": (of_torchdata(3, shuffle=True, generator=True), (1, 3)),
    "torchdata, wrapped": (of_torchdata(3, wrapped=True, shuffle=True), (1, 3)),
    "torchdata, together": (of_torchdata(6, 4), (1, 4, 6)),
    "torchdata, beside a shorter one": (of_torchdata(6, 4, "min_size"), (1, 4)),
    "by reference": (ByReference, (1, 3)),
    "live": (Live, (1, 3)),
    "live beside": (beside(Live, "min_size"), (1, 3)),
    "live together": (beside(Live, CYCLE), (1, 3)),
    # Without a state
    "drawn as it begins": (Drawing, (1, 3)),
    "drawn with a batch": (DrawingLater, (1, 3)),
    "drawn in samplers": (DrawingInSamplers, (1, 3)),
    "drawn beside": (beside(Drawing, "min_size"), (1, 3)),
    "lasting workers": (lasting, (1, 3)),
}


@pytest.mark.parametrize("name", IN_EPOCHS)
def test_no_batch_is_lost_or_repeated(name: str, tmp_path: Path) -> None:
    loaders, ends = IN_EPOCHS[name]
    check(loaders, tmp_path, ends)


@pytest.mark.parametrize(("loaders", "limit"), [(Endless, 2), (of_torchdata(5, shuffle=True), 3)])
def test_a_limited_epoch_goes_on_behind_its_last_batch(loaders: Callable[[], Any], limit: int, tmp_path: Path) -> None:
    check(loaders, tmp_path, (1, 2, 3), limit)


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 2 * SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)) + (torch.rand(()) / 2 if self.draws else 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("draws", "persistent"), [(False, False), (False, True), (True, False)])
def test_the_order_of_a_loader_of_torchdata_with_workers_is_exact_and_what_they_draw_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, draws: bool, persistent: bool
) -> None:
    def numbers(seed: int, directory: Path | None, end: int = -1) -> list[float]:
        torch.manual_seed(seed)
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        loader = kind(Numbers(draws), shuffle=True, num_workers=2, persistent_workers=persistent)
        return [number for [number] in run(loader, directory, end)]

    whole, first = numbers(1, None), numbers(1, tmp_path, 2 * SIZE + 2)  # in the second epoch
    caplog.clear()
    found = first + numbers(2, tmp_path)
    said = "StatefulDataLoader continues with new worker processes, whose random generators cannot be saved"
    assert [said in text for text in caplog.messages].count(True) == 1
    assert [int(number) for number in found] == [int(number) for number in whole]
    assert (found == whole) is not draws


class Opaque:
    """A batch that no checkpoint can hold."""

    def __init__(self, tensor: Any) -> None:
        self.view, self.number = tensor.view, float(tensor)

    def __float__(self) -> float:
        return self.number


class OfObjects(Unsized):
    def __iter__(self) -> Iterator[Any]:
        return map(Opaque, super().__iter__())


def test_a_batch_drawn_ahead_that_cannot_be_saved_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run(OfObjects(), tmp_path / "whole")
    with caplog.at_level(logging.WARNING, "holdfast"):
        parts = run(OfObjects(), tmp_path / "run", 1) + run(OfObjects(), tmp_path / "run")
    assert parts == whole[:1] + whole[2:]
    assert "This batch cannot be saved" in caplog.text


def rows(count: int) -> Any:
    data: Any = torch.arange(float(count)).view(-1, 1)
    return torch.utils.data.DataLoader(data, batch_size=1)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        pytest.param(lambda: rows(3), lambda: rows(1), "after 2 batches of .* data now ends after 1: use", id="fewer"),
        pytest.param(Sized, lambda: rows(3), "of 1 training data loaders, but 0 of this run's loaders", id="no state"),
        pytest.param(lambda: rows(3), Sized, "of 0 training data loaders, but 1 of this run's loaders", id="a state"),
    ],
)
def test_other_data_than_those_of_the_run_are_refused(
    before: Callable[[], Any], now: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    run(before(), tmp_path, 2)
    with pytest.raises(StateError, match=message):
        run(now(), tmp_path)


class FromQueue(Sized):
    """Draws from a queue that its state does not hold."""

    queue: Iterator[int] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([float(next(self.queue))]) for _ in super().__iter__())


def test_a_resume_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromQueue, "queue", iter(range(20)))
    parts = [run(FromQueue(), tmp_path, steps) for steps in (2, 1, 1, -1)]
    given = [number for part in parts for [number] in part]
    assert given == [0, 1, 3, 5, *range(7, 12)]  # a run that is killed has drawn one more


def test_a_place_that_is_not_found_again_is_told_with_what_differs(tmp_path: Path) -> None:
    run(beside(DatedDeclared, CYCLE)(), tmp_path, 2)
    with pytest.raises(StateError, match=r"\(different: saved\.at\)\. Leave out of its state whatever changes without"):
        run(beside(DatedDeclared, CYCLE)(), tmp_path, 1)


@pytest.mark.parametrize(
    ("loader", "limit", "warned"), [(Sized, None, 0), (Sized, SIZE, 0), (Sized, SIZE - 1, 1), (Unsized, SIZE - 1, 0)]
)
def test_data_that_last_longer_than_an_epoch_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: type[Any], limit: int | None, warned: int
) -> None:
    run(loader(), tmp_path, limit=limit)
    found = [text for text in caplog.messages if f"there is more data in {loader.__name__}" in text]
    assert len(found) == warned


def test_a_finished_run_is_not_refused(tmp_path: Path) -> None:
    """No epoch follows, whose order the resume could change."""
    run(WithLast(), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")  # as in another process, which has not finished the run itself
    assert run(WithLast(), tmp_path / "moved") == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [((np.arange(2), 1), (np.arange(2), 1), True), ((np.arange(2), 1), (np.arange(1, 3), 1), False),
     ((1, 2), [1, 2], True), (torch.ones(1), None, False), (None, np.ones(1), False), ({"a": 1}, [1], False),
     (torch.ones(1), np.ones(1), True), (object(), object(), True)],
)  # fmt: skip
def test_states_differ_where_that_can_be_told(one: Any, other: Any, same: bool) -> None:
    assert same_state(one, other) is same_state(other, one) is same
