"""Training loaders of one's own that carry a state: an interrupted run yields what a whole one yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from holdfast.engine.generators import same_state
from holdfast.engine.stateful import restore_state, state_of

torch: Any = pytest.importorskip("torch")
lightning: Any = pytest.importorskip("lightning")
combined: Any = pytest.importorskip("lightning.pytorch.utilities.combined_loader")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
]
SIZE, EPOCHS = 3, 3


class AtStart:
    """Begins an epoch with every iterator, except the one after a resume."""

    size = SIZE

    def __init__(self) -> None:
        self.epoch = self.place = 0
        self.has_begun = self.is_resumed = False

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.is_resumed = True

    def begin(self) -> None:
        if not self.is_resumed:
            self.epoch, self.place = self.epoch + self.has_begun, 0
        self.has_begun, self.is_resumed = True, False

    def end(self) -> None:
        """An epoch ends with the next one."""

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        while self.place < self.size:
            self.place += 1
            yield torch.tensor([10.0 * self.epoch + self.place])
        self.end()


class AtEnd(AtStart):
    """Goes to the next epoch when its iterator ends; the next iterator begins at the beginning."""

    def begin(self) -> None:
        self.place = self.place if self.is_resumed else 0
        self.is_resumed = False

    def end(self) -> None:
        self.epoch, self.place = self.epoch + 1, 0


class Onward(AtEnd):
    """A new iterator continues where the one before it stopped, for any reason."""

    def begin(self) -> None:
        """Nothing is to be done."""


class WithLast(Onward):
    """Goes to the next epoch with its last batch, before its iterator ends."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size - self.place):
            self.place += 1
            batch = torch.tensor([10.0 * self.epoch + self.place])
            if self.place == self.size:
                self.end()
            yield batch


class ByNext(AtEnd):
    """Is its own iterator, and goes on after its end."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.place == self.size:
            self.end()
            raise StopIteration
        self.place += 1
        return torch.tensor([10.0 * self.epoch + self.place])


class ByCursor(ByNext):
    """Its iterators are objects of their own, and go on after their end."""

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        return Cursor(self)


class Cursor(Iterator[Any]):
    def __init__(self, loader: ByCursor) -> None:
        self.loader = loader

    def __next__(self) -> Any:
        return next(self.loader)


class Unsteady:
    """Has a state that differs at each look, and with each draw from a generator of the process."""

    looks = 0

    def state_dict(self) -> dict[str, Any]:
        self.looks += 1
        state: Any = super()
        return {**state.state_dict(), "looks": [*range(self.looks)], "random": torch.get_rng_state()}


class UnsteadyAtStart(Unsteady, AtStart):
    pass


class UnsteadyOnward(Unsteady, Onward):
    pass


class UnsteadyAtEnd(Unsteady, AtEnd):
    pass


class Dated:
    """Has a state with a time in whole seconds: it is the same at two looks, and another one after a resume."""

    now = 0

    def state_dict(self) -> dict[str, Any]:
        state: Any = super()
        return {**state.state_dict(), "saved": {"at": Dated.now}}


class DatedAtStart(Dated, AtStart):
    pass


class DatedOnward(Dated, Onward):
    pass


class DatedAtEnd(Dated, AtEnd):
    pass


class CountsLoads(AtStart):
    loads = 0

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "loads": self.loads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.loads = state["loads"] + 1


class SizedAtStart(AtStart):
    def __len__(self) -> int:
        return SIZE


class SizedAtEnd(AtEnd):
    def __len__(self) -> int:
        return SIZE


class Unsized(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(self.size)).view(-1, 1))


class Declared(AtStart):
    replicated_state = True


class DatedDeclared(Dated, Declared):
    pass


def beside(own: Callable[[], Any], mode: str, size: int = SIZE) -> Callable[[], Any]:
    """Return loaders of which the second has neither a state nor a length."""
    return lambda: combined.CombinedLoader([own(), torch.utils.data.DataLoader(Unsized(size), batch_size=1)], mode)


class KilledError(Exception):
    """Ends a run."""


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, end: int) -> None:
        super().__init__()
        self.layer, self.end = torch.nn.Linear(1, 1), end
        self.seen: list[list[float | None]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if len(self.seen) == self.end:
            raise KilledError
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
    from holdfast.integrations.lightning import CheckpointCallback

    Dated.now += 1
    interval = end if end > 0 else SIZE + 1 if directory.exists() else 1
    callback = CheckpointCallback(str(directory), save_interval_steps=interval)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        limit_train_batches=limit,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    net = Net(end)
    try:
        trainer.fit(net, loaders)
    except KilledError:
        assert end >= 0
    return net.seen


@pytest.mark.parametrize(
    "loaders",
    [AtStart, SizedAtStart, AtEnd, Onward, beside(AtStart, "min_size"), beside(AtStart, "max_size"),
     beside(SizedAtStart, "min_size"), beside(Onward, "max_size"), UnsteadyAtStart, UnsteadyOnward, DatedAtStart,
     DatedOnward, CountsLoads],
    ids=["start", "sized start", "end", "onward", "start beside", "start padded", "sized beside", "onward beside",
         "unsteady start", "unsteady onward", "dated start", "dated onward", "counts loads"],
)  # fmt: skip
def test_no_batch_is_lost_or_repeated(loaders: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(loaders(), tmp_path / "whole")
    assert [batch[0] for batch in whole] == [10.0 * e + i + 1 for e in range(EPOCHS) for i in range(SIZE)]
    for end in (2, 3, 4, 6):  # within an epoch, and at its end
        directory = tmp_path / str(end)
        assert run(loaders(), directory, end) + run(loaders(), directory) == whole


CYCLE = "max_size_cycle"


@pytest.mark.parametrize(
    ("loaders", "limit"),
    [(beside(AtStart, CYCLE), None), (beside(AtEnd, CYCLE), None), (beside(Onward, CYCLE), None),
     (beside(Declared, CYCLE), None), (beside(SizedAtEnd, CYCLE), None), (beside(AtStart, CYCLE, 4), None),
     (beside(AtStart, "min_size", 1), None), (beside(AtEnd, "min_size", 1), None),
     (beside(Onward, "min_size", 1), None), (AtStart, 2), (AtEnd, 2), (Onward, 2)],
    ids=["start together", "end together", "onward together", "declared together", "sized end together",
         "start begins again", "start cut", "end cut", "onward cut", "start limited", "end limited", "onward limited"],
)  # fmt: skip
def test_an_epoch_ends_before_the_data_of_a_loader(
    loaders: Callable[[], Any], limit: int | None, request: pytest.FixtureRequest, tmp_path: Path, every: bool
) -> None:
    """The next iterator begins a new epoch, or continues, as the loader has it; also after two resumes."""
    whole = run(loaders(), tmp_path / "whole", limit=limit)
    # Each way in which an epoch ends is interrupted after every step, with one loader or another.
    odd = request.node.callspec.indices["loaders"] % 2
    for end in (1, 2, 3, 4) if every else (1 + odd, 3 + odd):
        directory = tmp_path / str(end)
        parts = [run(loaders(), directory, steps, limit=limit) for steps in (end, 1, -1)]
        assert [batch for part in parts for batch in part] == whole


class Shuffled(SizedAtStart):
    """Its state is that of its generator before the epoch, with a tuple that holds an array, and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.RandomState(0)
        self.before = self.random.get_state()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "random": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.random.set_state(state["random"])

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.before = self.random.get_state()
        order = self.random.permutation(SIZE)
        while self.place < SIZE:
            self.place += 1
            yield torch.tensor([float(order[self.place - 1])])


class Drawing(Shuffled):
    """Draws its order from a generator that a resume finds among its attributes, and restores."""

    def __init__(self, random: Any) -> None:
        SizedAtStart.__init__(self)
        self.random = random
        self.before = state_of(random)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        SizedAtStart.load_state_dict(self, state)
        restore_state(self.random, state["random"])

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.before = state_of(self.random)
        order = self.permutation()
        while self.place < SIZE:
            self.place += 1
            yield torch.tensor([float(order[self.place - 1])])

    def permutation(self) -> Any:
        own: Any = self.random
        if isinstance(own, torch.Generator):
            return torch.randperm(SIZE, generator=own)
        return own.sample(range(SIZE), SIZE) if isinstance(own, Random) else own.permutation(SIZE)


class DrawingAlone(Drawing):
    """Is its own iterator, and draws its order with the first batch of an epoch."""

    order: Any = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.order = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.order is None:
            self.before = state_of(self.random)
            self.order = self.permutation()
        if self.place == SIZE:
            self.place, self.order = 0, None
            raise StopIteration
        self.place += 1
        return torch.tensor([float(self.order[self.place - 1])])


class Sampled(Drawing):
    """Its generator is that of its sampler."""

    def __init__(self, random: Any) -> None:
        super().__init__(random)
        self.sampler = type("Sampler", (), {})()
        self.sampler.random = random


class Adds(SizedAtStart):
    """Draws with each batch from a generator that its state does not hold."""

    def __init__(self, random: Any) -> None:
        super().__init__()
        self.random = random

    def __iter__(self) -> Iterator[Any]:
        return map(self.add, super().__iter__())

    def add(self, batch: Any) -> Any:
        if isinstance(self.random, torch.Generator):
            return batch + torch.rand(1, generator=self.random)
        return batch + self.random.random()


@pytest.mark.parametrize("kind", [Drawing, DrawingAlone, Sampled, Adds])
@pytest.mark.parametrize(
    "generator", [lambda: np.random.default_rng(0), lambda: Random(0), lambda: torch.Generator().manual_seed(0),
                  lambda: np.random.RandomState(0)],
    ids=["numpy", "python", "torch", "numpy's old"],
)  # fmt: skip
def test_generators_of_a_loader_with_a_state(kind: Any, generator: Callable[[], Any], tmp_path: Path) -> None:
    """What loading its state sets stays as it is, to draw the order again; other generators are restored."""
    whole = run(kind(generator()), tmp_path / "whole")
    for end in (1, 2, 3, 4):
        parts = [run(kind(generator()), tmp_path / str(end), steps) for steps in (end, 1, -1)]
        assert [batch for part in parts for batch in part] == whole


class Further:
    """Has no state, and shuffles the order of the epoch before; counts the epochs."""

    def __init__(self) -> None:
        self.order, self.epoch, self.random = list(range(SIZE)), 0, Random(0)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.random.shuffle(self.order)
        yield from [torch.tensor([10.0 * self.epoch + one]) for one in self.order]


class Eager(Further):
    """Counts the epoch as an iterator is made, as loaders with workers do, and not with its first batch."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()])


def lasting() -> Any:
    """Return a loader whose iterator, with the counts of its worker, stays from epoch to epoch."""
    return torch.utils.data.DataLoader(torch.arange(float(SIZE)), batch_size=1, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    "loaders",
    [Further, beside(Further, "min_size"), Eager, lasting],
    ids=["alone", "beside", "before a batch", "lasting workers"],
)
@pytest.mark.filterwarnings("ignore:.*fork")
def test_attributes_of_a_loader_without_a_state(loaders: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(loaders(), tmp_path / "whole")
    for end in (1, 2, 3, 4):
        parts = [run(loaders(), tmp_path / str(end), steps) for steps in (end, 1, 1, -1)]
        assert [batch for part in parts for batch in part] == whole


class ByReference:
    """Keeps the dictionary that it gets, and changes it; it is at the end of one epoch where the next one begins."""

    def __init__(self) -> None:
        self.state = {"count": 0}

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


@pytest.mark.parametrize(
    "loaders",
    [Shuffled, ByReference, Live, beside(Live, "min_size"), beside(Live, CYCLE)],
    ids=["shuffled", "by reference", "live", "live beside", "live together"],
)
def test_states_of_any_form(loaders: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(loaders(), tmp_path / "whole")
    for end in (1, 2):  # within an epoch, and then at its end, too
        parts = [run(loaders(), tmp_path / str(end), steps) for steps in (end, 1, -1)]
        assert [batch for part in parts for batch in part] == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with torch 2.13
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_loaders_of_torchdata_of_different_lengths(mode: str, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loaders() -> Any:
        return combined.CombinedLoader([stateful(torch.arange(6.0)), stateful(torch.arange(4.0))], mode)

    whole = run(loaders(), tmp_path / "whole")
    for end in (4, 5, 6):
        assert run(loaders(), tmp_path / str(end), end) + run(loaders(), tmp_path / str(end)) == whole


@pytest.mark.parametrize(
    ("mode", "kind", "is_declared"),
    [(CYCLE, AtStart, False), (CYCLE, AtStart, True), (CYCLE, Onward, True), ("max_size", AtStart, True),
     ("max_size", AtEnd, False), ("max_size", AtEnd, True), ("max_size", Onward, False),
     ("max_size", SizedAtEnd, False), ("min_size", AtStart, True), ("min_size", AtEnd, False),
     ("max_size", UnsteadyAtEnd, False), ("max_size", UnsteadyOnward, False), (CYCLE, UnsteadyOnward, False),
     ("max_size", DatedAtEnd, False), ("max_size", DatedOnward, False), (CYCLE, DatedAtStart, True)],
)  # fmt: skip
def test_loaders_of_different_lengths(mode: str, kind: type[AtStart], is_declared: bool, tmp_path: Path) -> None:
    """An epoch lasts until each has ended, or one of them, also where that is with the first batch after a resume."""
    own: Any = type("Own", (kind,), {"replicated_state": is_declared})
    short: Any = type("Short", (own,), {"size": 2, **({"__len__": lambda _: 2} if kind is SizedAtEnd else {})})

    def loaders() -> Any:
        return combined.CombinedLoader([short(), own()], mode)

    whole = run(loaders(), tmp_path / "whole")
    for end in (1, 2):  # then at the next step, which ends the epoch or not
        parts = [run(loaders(), tmp_path / str(end), steps) for steps in (end, 1, -1)]
        assert [batch for part in parts for batch in part] == whole


def sized(kind: type[AtStart], count: int) -> Any:
    return type("Sized", (kind,), {"size": count, "__len__": lambda _: count})()


@pytest.mark.parametrize(
    ("loaders", "limit", "steps"),
    [
        (lambda: sized(WithLast, 3), 2, 5),
        (lambda: combined.CombinedLoader([sized(AtStart, 2), sized(WithLast, 3)], "min_size"), None, 5),
        (lambda: combined.CombinedLoader([sized(AtStart, 2), WithLast()], "min_size"), None, 5),
        (lambda: combined.CombinedLoader([sized(WithLast, 1), sized(AtEnd, 3)], "max_size"), None, 9),
        (lambda: combined.CombinedLoader([sized(ByNext, 1), sized(ByNext, 3)], "max_size"), None, 6),
        (lambda: combined.CombinedLoader([sized(ByCursor, 1), sized(ByCursor, 3)], "max_size"), None, 9),
        (lambda: combined.CombinedLoader([sized(ByCursor, 1), sized(ByCursor, 3)], CYCLE), None, 9),
        (beside(AtEnd, "min_size", 2), 5, 6),
        (beside(Onward, CYCLE, 2), 5, 9),
    ],
    ids=[
        "limited",
        "beside a shorter one",
        "without a length",
        "a shorter one",
        "own iterators",
        "cursors",
        "cursors together",
        "beside a shorter one without a state",
        "with one without a state",
    ],
)
def test_the_data_of_a_loader_ends_within_an_epoch(
    loaders: Callable[[], Any], limit: int | None, steps: int, tmp_path: Path
) -> None:
    """A resume after its last batch neither begins the data again in this epoch, nor moves the end of the epoch."""
    whole = run(loaders(), tmp_path / "whole", limit=limit)
    assert len(whole) == steps
    for end in range(1, steps):
        directory = tmp_path / str(end)
        assert run(loaders(), directory, end, limit=limit) + run(loaders(), directory, limit=limit) == whole


@pytest.mark.parametrize(
    ("loaders", "ends"),
    [(SizedAtEnd, (1, 3, 6)), (beside(AtEnd, "min_size", 2), (1, 2, 4)), (beside(AtStart, "min_size", 1), (1, 2))],
    ids=["sized", "beside a shorter one", "epochs of one batch"],
)
def test_an_iterator_that_does_not_come_to_its_end(
    loaders: Callable[[], Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Lightning does not draw on after the last batch, so that the loader does not begin its next epoch."""
    whole = run(loaders(), tmp_path / "whole")
    for end in ends:
        assert run(loaders(), tmp_path / str(end), end) + run(loaders(), tmp_path / str(end)) == whole


class Opaque:
    """A batch that no checkpoint can hold."""

    def __init__(self, tensor: Any) -> None:
        self.view, self.number = tensor.view, float(tensor)

    def __float__(self) -> float:
        return self.number


class OfObjects(AtStart):
    def __iter__(self) -> Iterator[Any]:
        return map(Opaque, super().__iter__())


class FromQueue(AtStart):
    """Draws from a queue that its state does not hold."""

    queue: Iterator[int] = iter(())

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size):
            self.place += 1
            yield torch.tensor([float(next(self.queue))])


class Itself(FromQueue):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return torch.tensor([float(next(self.queue))])


class ObjectsWithLast(WithLast):
    def __iter__(self) -> Iterator[Any]:
        return map(Opaque, super().__iter__())


def short_beside_long() -> Any:
    return combined.CombinedLoader([type("Short", (ObjectsWithLast,), {"size": 1})(), ObjectsWithLast()], "max_size")


@pytest.mark.parametrize("loaders", [OfObjects, short_beside_long])
def test_a_batch_drawn_ahead_that_cannot_be_saved_is_drawn_again(loaders: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(loaders(), tmp_path / "whole")
    for end in (1, 2, 3):
        assert run(loaders(), tmp_path / str(end), end) + run(loaders(), tmp_path / str(end)) == whole


@pytest.mark.parametrize(("loader", "lost"), [(FromQueue, 1), (Itself, 0)])
def test_batches_that_a_resume_draws_are_counted(
    loader: Any, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FromQueue, "queue", iter(range(20)))
    before = run(loader(), tmp_path, 2, limit=2)
    after = run(loader(), tmp_path, limit=2)
    told = [one.getMessage() for one in caplog.records if "gave its last batch again" in one.getMessage()]
    assert [number for [number] in before + after] == [0, 1, *range(3 + lost, 7 + lost)]  # the killed run has drawn 2
    assert len(told) == lost
    assert all("FromQueue" in one and "(batches drawn: 1)" in one and "__iter__ returns self" in one for one in told)


class CountsDraws(AtStart):
    draws = 0

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "draws": self.draws}

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.draws += 1
            yield batch


class OfEpochs(Dated, Onward):
    """Has no place within its epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": super().state_dict()["epoch"], "saved": {"at": Dated.now}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "place": 0})


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (CountsDraws, "but its state then was not the saved one, so it may continue elsewhere"),
        (OfEpochs, "but its state does not change with a batch, so it may continue elsewhere"),
        (DatedAtStart, "unless that depends on what loading its state has not brought back: saved.at"),
        (CountsLoads, "unless that depends on what loading its state has not brought back: loads"),
    ],
)
def test_a_resume_that_does_not_find_the_saved_state_says_so(
    loader: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(loader(), tmp_path, 2)
    run(loader(), tmp_path, 1)
    told = [one.getMessage() for one in caplog.records if "gave its last batch again" in one.getMessage()]
    assert told
    assert all(why in one for one in told)


@pytest.mark.parametrize(
    ("kind", "end", "is_told"),
    [(SizedAtStart, 5, True), (SizedAtStart, 2, False), (ByNext, 5, True), (ByNext, 3, True), (ByNext, 2, False)],
)  # fmt: skip
def test_what_loading_does_not_bring_back_is_told_where_no_batch_is_drawn_again(
    kind: type[AtStart], end: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within an epoch that has as many batches as the data, and of loaders that are their own iterators."""
    forget = {"load_state_dict": lambda self, state: kind.load_state_dict(self, {**state, "epoch": 0})}
    loader: Any = type("Forgets", (kind,), forget)
    run(loader(), tmp_path, end)
    run(loader(), tmp_path, 1)
    told = [one.getMessage() for one in caplog.records if "is not the saved one" in one.getMessage()]
    assert len(told) == is_told
    assert all("a Forgets that was restored is not the saved one (different: epoch)" in one for one in told)


def test_a_place_that_is_not_found_again_is_told_with_what_differs(tmp_path: Path) -> None:
    from holdfast.engine.errors import StateError

    run(beside(DatedDeclared, CYCLE)(), tmp_path, 2)
    with pytest.raises(StateError, match=r"\(different: saved\.at\)\. Leave out of its state what differs without"):
        run(beside(DatedDeclared, CYCLE)(), tmp_path, 1)


def test_a_finished_run_is_not_refused(tmp_path: Path) -> None:
    """No epoch follows, whose order the resume could change."""
    run(SizedAtEnd(), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")  # as in another process, which has not finished the run itself
    assert run(SizedAtEnd(), tmp_path / "moved") == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [((np.arange(2), 1), (np.arange(2), 1), True), ((np.arange(2), 1), (np.arange(1, 3), 1), False),
     ((1, 2), [1, 2], True), (torch.ones(1), None, False), (None, np.ones(1), False), ({"a": 1}, [1], False),
     (torch.ones(1), np.ones(1), True), (object(), object(), True)],
)  # fmt: skip
def test_states_differ_where_that_can_be_told(one: Any, other: Any, same: bool) -> None:
    assert same_state(one, other) is same_state(other, one) is same
