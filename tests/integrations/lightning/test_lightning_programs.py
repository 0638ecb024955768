"""Programs as their authors write them, stopped by SIGTERM in a batch and started again, compared bit for bit."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.lightning.program import new_directory
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback
from holdfast.integrations.lightning.stopping import Preempted

BATCHES, EPOCHS = 4, 3


class Net(lightning.LightningModule):
    """Notes what its training, its validations and its hooks see; ``signal_at`` is the step that gets SIGTERM."""

    signal_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(4, 1)
        self.seen: list[tuple[Any, ...]] = []

    def note(self, what: str, *values: Any) -> None:
        self.seen.append((what, self.trainer.global_step, *values))

    def rows(self) -> torch.Tensor:
        return torch.randn(2 * BATCHES, 3, generator=torch.Generator().manual_seed(4))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows()), 2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 3)), 2)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.note("batch", batch[0].tolist())
        if self.trainer.global_step + 1 == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss: torch.Tensor = self.head(self.body(batch[0])).square().mean()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.head(self.body(batch[0])).square().mean()
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.note("validation", loss.tolist())

    def on_train_epoch_end(self) -> None:
        self.note("epoch ends")

    def on_train_end(self) -> None:
        self.note("training ends")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


class DrawsRows(Net):
    def rows(self) -> torch.Tensor:
        return torch.randn(2 * BATCHES, 3)


class RowsByEpoch(Net):
    def rows(self) -> torch.Tensor:
        return super().rows() * (1 + self.trainer.current_epoch)


class LabelsRows(Net):
    """Makes the rows of an epoch with the weights at its start."""

    @torch.no_grad()
    def rows(self) -> torch.Tensor:
        rows = super().rows()
        return rows.add(self.head(self.body[0](rows)))


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = torch.compile(self.body, backend="eager")


class Stops(Net):
    """Asks its trainer to stop in a batch, after which a validation is due."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.trainer.should_stop |= self.trainer.global_step == 5
        return super().training_step(batch, index)


class Measures(Net):
    """Has a metric for each epoch, some that share their states, and one over the run, and logs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker: Any = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        of_labels: Any = {"precision": torchmetrics.classification.BinaryPrecision()}
        of_labels["recall"] = torchmetrics.classification.BinaryRecall()
        self.shared: Any = torchmetrics.MetricCollection(of_labels)
        self.whole = torchmetrics.SumMetric()

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()
        self.shared.reset()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.tracker.update(loss.detach())
        self.shared.update(batch[0][:, 0].sigmoid(), (batch[0][:, 1] > 0).long())
        self.whole.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        shared = {name: value.tolist() for name, value in self.shared.compute().items()}
        self.note("epoch ends", self.tracker.compute_all().tolist(), shared, self.whole.compute().tolist())


def fit(directory: str, kind: type[Net], seed: int = 1, signal_at: int | None = None, **options: Any) -> Net:
    torch.manual_seed(seed)
    net = kind()
    net.signal_at = signal_at
    made = lightning.Trainer(
        **{
            "callbacks": [CheckpointCallback(directory, witness_steps_after_signal=0)],
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    made.fit(net)
    return net


def weights(net: Net) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value.tolist() for name, value in net.state_dict().items()}


BY_STEPS = {"max_epochs": -1, "max_steps": 6}
RELOADED = {"reload_dataloaders_every_n_epochs": 1}


@pytest.mark.parametrize(
    ("kinds", "stops", "options"),
    [
        pytest.param([DrawsRows], (2, 6), RELOADED, id="drawn rows"),
        pytest.param([LabelsRows], (4, 8), RELOADED, id="rows labelled by the model"),
        pytest.param([RowsByEpoch], (4, 6), {"reload_dataloaders_every_n_epochs": 2}, id="rows of every second epoch"),
        pytest.param([Net], (6,), {**BY_STEPS, "val_check_interval": 2}, id="last step, a validation is due"),
        pytest.param([Net], (6,), BY_STEPS, id="last step, the ends are due"),
        pytest.param([Stops], (6,), {"max_epochs": 9}, id="asked to stop"),
        pytest.param([Net, Compiled, Net], (2, 4), {}, id="compiled in between"),
        pytest.param([Measures], (2, 4, 7), {}, id="metrics"),
    ],
)  # fmt: skip
def test_a_program_that_is_stopped_ends_as_one_that_is_not(
    kinds: list[type[Net]], stops: tuple[int, ...], options: dict[str, Any]
) -> None:
    directory, in_one, seen = new_directory(), new_directory(), []
    whole = fit(in_one, kinds[0], **options)
    for turn, stop in enumerate([*stops, None]):
        kind = kinds[turn % len(kinds)]
        if stop is not None:
            made: list[Net] = []
            with pytest.raises(Preempted):
                fit(
                    directory, type(kind.__name__, (kind,), {"__init__": _noted(kind, made)}), turn + 1, stop, **options
                )
            seen += made[0].seen
            continue
        last = fit(directory, kind, turn + 1, **options)
    assert [*seen, *last.seen] == whole.seen
    assert hf.list_checkpoints(directory)[-1].metrics == hf.list_checkpoints(in_one)[-1].metrics
    assert fit(directory, kinds[0], 9, **options).seen == []  # Nothing is left to do.
    assert weights(last) == weights(whole)
    torch.testing.assert_close(last.trainer.callback_metrics, whole.trainer.callback_metrics, rtol=0, atol=0)


def _noted(kind: type[Net], made: list[Net]) -> Callable[[Any], None]:
    def init(self: Any) -> None:
        kind.__init__(self)
        made.append(self)

    return init


class Named(ModelCheckpoint):
    """Keeps files of its own."""


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_callback_of_the_program_is_none_of_ours(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()

    def callbacks() -> list[Any]:
        return [CheckpointCallback(directory), Named(tmp_path, monitor="val_loss", save_top_k=2)]

    with pytest.raises(Preempted):
        fit(directory, Net, signal_at=6, callbacks=callbacks())
    caplog.set_level(logging.WARNING, "holdfast")
    caplog.clear()
    fit(directory, Net, callbacks=callbacks())
    assert "kth_value" not in caplog.text
