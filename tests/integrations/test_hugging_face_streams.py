"""Iterable datasets of Hugging Face in loops of one's own and in Lightning runs, stopped twice and resumed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.integrations.hugging_face import check_stream

torch: Any = pytest.importorskip("torch")
stateful_dataloader: Any = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata with torch 2.13
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
]
EXAMPLES, EPOCHS = 6, 3


class IterableDataset(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Has the state of datasets since 3.4: each iterator begins where the last load said, if that is of its epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self._starting_state_dict: Mapping[str, Any] | None = None
        self._begin()

    def _begin(self) -> dict[str, int]:
        place = {"place": 0}
        start = self._starting_state_dict
        if start and self.epoch == start["epoch"]:
            place |= start["examples_iterable"]
        self._state_dict = {"examples_iterable": place, "epoch": self.epoch}
        return place

    def __iter__(self) -> Iterator[Any]:
        place = self._begin()
        while place["place"] < EXAMPLES:
            place["place"] += 1
            yield {"x": place["place"] - 1}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._starting_state_dict = state

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


IterableDataset.__module__ = "datasets.iterable_dataset"


def of_datasets() -> Any:
    import datasets  # type: ignore[import-not-found]

    def numbers(shards: list[int]) -> Iterator[Any]:
        for shard in shards:
            yield from ({"x": 2 * shard + place} for place in range(2))

    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2]})


def in_loader(dataset: Any) -> Any:
    return stateful_dataloader.StatefulDataLoader(dataset, batch_size=None)


KINDS: dict[str, tuple[Any, Any]] = {
    "alone": (IterableDataset, lambda dataset: dataset),
    "in a loader": (IterableDataset, in_loader),
}
if find_spec("datasets"):
    KINDS |= {"of datasets": (of_datasets, KINDS["alone"][1]), "of datasets, in a loader": (of_datasets, in_loader)}


class KilledError(Exception):
    """Ends a run."""


def loop(kind: str, directory: Path, end: int, calls_set_epoch: bool, every: int = 1) -> list[int]:
    """Goes on to a step or to the end of all epochs, ``every`` examples a step; returns the examples."""
    make, wrap = KINDS[kind]
    dataset, seen, waiting = make(), list[int](), list[int]()
    data = wrap(dataset)
    with hf.CheckpointCallback(directory, save_interval_steps=1, save_at_end=False) as checkpoint:
        state, step = checkpoint.restore_or_initialize({"w": torch.zeros(1)}, data=data, epoch=0)
        for epoch in range(checkpoint.extras["epoch"], EPOCHS):
            if calls_set_epoch:
                dataset.set_epoch(epoch)
            for example in data:
                waiting.append(int(example["x"]))
                if len(waiting) < every:
                    continue
                if step == end:
                    return seen
                seen, step, waiting = seen + waiting, step + 1, []
                checkpoint.on_step(step, state, data=data, epoch=epoch)
    return seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("calls_set_epoch", "every"), [(False, 1), (True, 1), (False, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_continues_where_it_was(kind: str, calls_set_epoch: bool, every: int, tmp_path: Path) -> None:
    """Also where the examples left in the epoch are too few for a step."""
    whole = list(range(EXAMPLES)) * EPOCHS
    whole = whole[: len(whole) // every * every]
    for end in range(1, 8 if every == 1 else 2):
        ends = (end, end + 1, -1)
        parts = [loop(kind, tmp_path / str(end), one, calls_set_epoch, every) for one in ends]
        assert [example for part in parts for example in part] == whole


def trained(kind: str, directory: Path, end: int, calls_set_epoch: bool) -> list[int]:
    """Runs a Lightning trainer to a step, or to the end; returns the examples."""
    lightning: Any = pytest.importorskip("lightning")
    from holdfast.integrations.lightning import CheckpointCallback

    make, wrap = KINDS[kind]
    dataset, seen = make(), list[int]()

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def on_train_epoch_start(self) -> None:
            if calls_set_epoch:
                dataset.set_epoch(self.current_epoch)

        def training_step(self, batch: Any, index: int) -> Any:
            if len(seen) == end:
                raise KilledError
            seen.append(int(batch["x"]))
            return self.layer(torch.ones(1, 1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callback = CheckpointCallback(str(directory), save_interval_steps=1)
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], **quiet)
    try:
        trainer.fit(Net(), wrap(dataset))
    except KilledError:
        assert end >= 0
    return seen


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("fits_are_processes")
@pytest.mark.parametrize("calls_set_epoch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lightning_run_continues_where_it_was(kind: str, calls_set_epoch: bool, tmp_path: Path) -> None:
    whole = list(range(EXAMPLES)) * EPOCHS
    for end in (2, 5, 6, 8):
        parts = [trained(kind, tmp_path / str(end), one, calls_set_epoch) for one in (end, 1, -1)]
        assert [example for part in parts for example in part] == whole


def test_what_a_state_lacks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    dataset: Any = IterableDataset()
    buffer = type("BufferShuffledExamplesIterable", (), {})()
    dataset._ex_iterable = SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=buffer)])
    loader = stateful_dataloader.StatefulDataLoader(dataset, num_workers=1, persistent_workers=True)
    with caplog.at_level(logging.WARNING, "holdfast"):
        check_stream("data=", loader)
    lasting, buffered = (record.getMessage() for record in caplog.records)
    assert "data= reads a dataset of Hugging Face in workers that live across epochs" in lasting
    assert "data= shuffles a dataset of Hugging Face in a buffer" in buffered
    assert "hf.skip_to(loader)" in buffered


def test_versions_that_lose_their_place_are_refused(tmp_path: Path) -> None:
    dataset: Any = IterableDataset()
    dataset.state_dict = lambda: {"shard_idx": 0}  # as before 3.4
    with (
        hf.CheckpointCallback(tmp_path) as checkpoint,
        pytest.raises(
            hf.errors.OptionError, match=r"data= reads a dataset of datasets .*install datasets 3\.4 or newer"
        ),
    ):
        checkpoint.restore_or_initialize({"w": torch.zeros(1)}, data=dataset)
