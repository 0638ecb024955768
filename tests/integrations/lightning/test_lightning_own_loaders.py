"""Training loaders of one's own that carry a state: an interrupted run yields what a whole one yields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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


def run(loaders: Any, directory: Path, end: int = -1, limit: int | None = None) -> list[Any]:
    """Run up to the given number of steps, or all; return the batches.

    A run that is cut off saves its last step only, a run that resumes every fourth step and its end, and a whole run
    every step: saves may not change what follows.
    """
    Dated.now += 1
    interval = end if end > 0 else SIZE + 1 if directory.exists() else 1
    callback, net = CheckpointCallback(str(directory), save_interval_steps=interval), Net(end)
    try:
        program.trainer(callback, max_epochs=EPOCHS, limit_train_batches=limit).fit(net, loaders)
    except program.InterruptionError:
        assert end >= 0
    return net.seen


def check(
    loaders: Callable[[], Any],
    directory: Path,
    ends: Sequence[int],
    then: Sequence[int] = (1, -1),
    limit: int | None = None,
    every: bool = False,
) -> list[Any]:
    """Compare a whole run with runs that are cut off at some steps, and cut off again as they go on; return it.

    They are cut off again a step later: every second one of the steps will do, unless ``every`` is to come first, too.
    """

    def seeded(seed: int, directory: Path, end: int = -1) -> list[Any]:
        torch.manual_seed(seed)
        return run(loaders(), directory, end, limit)

    whole = seeded(1, directory / "whole")
    for end in ends[: len(whole) - 2][:: 1 if every else 2]:
        parts = [seeded(seed, directory / str(end), steps) for seed, steps in enumerate((end, *then), start=1)]
        assert [batch for part in parts for batch in part] == whole
    return whole


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "loaders",
    [
        pytest.param(Sized, id="sized"),
        pytest.param(Unsized, id="unsized"),
        pytest.param(WithLast, id="with last"),
        pytest.param(ByNext, id="by next"),
        pytest.param(Dated, id="dated"),
        pytest.param(Declared, id="declared"),
        pytest.param(beside(Sized, "min_size"), id="sized beside"),
        pytest.param(beside(Sized, "max_size"), id="sized padded"),
        pytest.param(beside(Unsized, "max_size"), id="unsized beside"),
        pytest.param(beside(WithLast, "max_size"), id="with last beside"),
    ],
)
def test_no_batch_is_lost_or_repeated(loaders: Callable[[], Any], tmp_path: Path, every: bool) -> None:
    whole = check(loaders, tmp_path, (1, 2, 3, 4, 6), every=every)  # within an epoch, and at its end
    assert [batch[0] for batch in whole] == [10.0 * e + i + 1 for e in range(EPOCHS) for i in range(SIZE)]


class Shuffled(Sized):
    """Its state is that of its generator before the epoch, with a tuple that holds an array, and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(0)
        self.before = self.generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        random = self.before if self.place < SIZE else self.generator.get_state()
        return {**super().state_dict(), "random": random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator.set_state(state["random"])

    def __iter__(self) -> Iterator[Any]:
        is_resumed, self.is_resumed = self.is_resumed, False
        self.place = self.place if is_resumed else 0
        self.before = self.generator.get_state()
        order = self.generator.permutation(SIZE)
        while self.place < SIZE:
            self.place += 1
            yield torch.tensor([float(order[self.place - 1])])


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
    whole = check(lambda: kind(torch.arange(float(SIZE)).view(-1, 1), 1), tmp_path, (1, 2, 3, 4))
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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with torch 2.13
@pytest.mark.parametrize(
    ("loaders", "ends", "limit"),
    [
        # The epoch ends before the data of a loader: the next iterator continues behind the last batch.
        pytest.param(beside(Unsized, CYCLE), (1, 2, 3, 4), None, id="together"),
        pytest.param(beside(WithLast, CYCLE), (1, 2, 3, 4), None, id="with last together"),
        pytest.param(beside(Declared, CYCLE), (1, 2, 3, 4), None, id="declared together"),
        pytest.param(beside(Endless, "min_size", 1), (1, 2, 3, 4), None, id="cut"),
        pytest.param(Endless, (1, 2, 3, 4), 2, id="limited"),
        # Also where that is with the first batch after a resume.
        pytest.param(lengths(Unsized, CYCLE), (1, 2, 3), None, id="until both have ended"),
        pytest.param(lengths(Declared, CYCLE), (1, 2, 3), None, id="declared, until both have ended"),
        pytest.param(lengths(Unsized, "min_size"), (1, 2, 3), None, id="until one has ended"),
        pytest.param(lengths(Declared, "min_size"), (1, 2, 3), None, id="declared, until one has ended"),
        pytest.param(of_torchdata(3, shuffle=True), (2, 3, 4, 5), None, id="torchdata"),
        pytest.param(of_torchdata(3, shuffle=True, generator=True), (2, 3, 4, 5), None, id="torchdata, generator"),
        pytest.param(of_torchdata(3, wrapped=True, shuffle=True), (2, 3, 4, 5), None, id="torchdata, wrapped"),
        pytest.param(of_torchdata(5, shuffle=True), (2, 3, 4, 5), 3, id="torchdata, limited"),
        pytest.param(of_torchdata(6, 4), (2, 3, 4, 5), None, id="torchdata, together"),
        pytest.param(of_torchdata(6, 4, "min_size"), (2, 3, 4, 5), None, id="torchdata, beside a shorter one"),
        # A loader restores its generator itself; nothing else does.
        pytest.param(Shuffled, (1, 2, 3), None, id="shuffled"),
        pytest.param(ByReference, (1, 2, 3), None, id="by reference"),
        pytest.param(Live, (1, 2, 3), None, id="live"),
        pytest.param(beside(Live, "min_size"), (1, 2, 3), None, id="live beside"),
        pytest.param(beside(Live, CYCLE), (1, 2, 3), None, id="live together"),
    ],
)
def test_a_run_goes_on_behind_its_last_batch(
    loaders: Callable[[], Any], ends: tuple[int, ...], limit: int | None, tmp_path: Path, every: bool
) -> None:
    check(loaders, tmp_path, ends, limit=limit, every=every)


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


def lasting() -> Any:
    """Return a loader whose iterator, with the counts of its worker, stays from epoch to epoch."""
    data: Any = torch.arange(float(SIZE))
    return torch.utils.data.DataLoader(data, batch_size=1, num_workers=1, persistent_workers=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "loaders",
    [
        pytest.param(Drawing, id="as it begins"),
        pytest.param(DrawingLater, id="with a batch"),
        pytest.param(beside(Drawing, "min_size"), id="beside"),
        pytest.param(lasting, id="lasting workers"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_loader_without_a_state(loaders: Callable[[], Any], tmp_path: Path, every: bool) -> None:
    check(loaders, tmp_path, (1, 2, 3, 4), then=(1, 1, -1), every=every)


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
