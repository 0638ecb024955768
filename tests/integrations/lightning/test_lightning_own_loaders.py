"""Training loaders of one's own that carry a state: an interrupted run yields what a whole one yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.generators import same_state

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


def beside(own: Callable[[], Any], mode: str, size: int = SIZE) -> Callable[[], Any]:
    """Return loaders of which the second has neither a state nor a length."""
    return lambda: combined.CombinedLoader([own(), torch.utils.data.DataLoader(Unsized(size), batch_size=1)], mode)


class KilledError(Exception):
    """Ends a run."""


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, end: int) -> None:
        super().__init__()
        self.layer, self.end = torch.nn.Linear(1, 1), end
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if len(self.seen) == self.end:
            raise KilledError
        parts = batch if isinstance(batch, list | tuple) else [batch]
        self.seen.append([float(part) for part in parts])
        return self.layer(parts[0].view(-1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def run(loaders: Any, directory: Path, end: int = -1, limit: int | None = None) -> list[Any]:
    """Run up to the given number of steps, or all; return the batches."""
    from holdfast.integrations.lightning import CheckpointCallback

    callback = CheckpointCallback(str(directory), save_interval_steps=1)
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
     beside(SizedAtStart, "min_size"), beside(Onward, "max_size")],
    ids=["start", "sized start", "end", "onward", "start beside", "start padded", "sized beside", "onward beside"],
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
    loaders: Callable[[], Any], limit: int | None, tmp_path: Path
) -> None:
    """The next iterator begins a new epoch, or continues, as the loader has it; also after two resumes."""
    whole = run(loaders(), tmp_path / "whole", limit=limit)
    for end in (1, 2, 3, 4):
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


class ByReference:
    """Keeps the dictionary that it gets, and changes it."""

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


@pytest.mark.parametrize("loader", [Shuffled, ByReference])
def test_states_of_any_form(loader: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(loader(), tmp_path / "whole")
    for end in (3, 6):  # at the end of an epoch
        assert run(loader(), tmp_path / str(end), end) + run(loader(), tmp_path / str(end)) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with torch 2.13
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_loaders_of_torchdata_of_different_lengths(mode: str, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loaders() -> Any:
        return combined.CombinedLoader([stateful(torch.arange(6.0)), stateful(torch.arange(4.0))], mode)

    whole = run(loaders(), tmp_path / "whole")
    for end in (4, 6):
        assert run(loaders(), tmp_path / str(end), end) + run(loaders(), tmp_path / str(end)) == whole


class Short(AtStart):
    size = 2


@pytest.mark.parametrize("mode", [CYCLE, "min_size"])
def test_loaders_of_different_lengths(mode: str, tmp_path: Path) -> None:
    """An epoch lasts until each has ended, or one of them, also where that is with the first batch after a resume."""

    def loaders() -> Any:
        return combined.CombinedLoader([Short(), AtStart()], mode)

    whole = run(loaders(), tmp_path / "whole")
    for end in (1, 2, 3, 4):
        assert run(loaders(), tmp_path / str(end), end) + run(loaders(), tmp_path / str(end)) == whole


@pytest.mark.parametrize(
    ("loaders", "end"), [(SizedAtEnd, 3), (beside(AtEnd, "min_size", 2), 2)], ids=["sized", "beside a shorter one"]
)
def test_an_order_that_a_resume_would_change_is_refused(loaders: Callable[[], Any], end: int, tmp_path: Path) -> None:
    """Lightning does not let the iterator of such a loader end, which would begin the next epoch."""
    run(loaders(), tmp_path, end)
    with pytest.raises(hf.errors.StateError, match=r"AtEnd changes its state when its iterator ends.*in __iter__"):
        run(loaders(), tmp_path)


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
