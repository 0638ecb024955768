"""Programs as their authors write them, stopped and started again, and compared bit for bit."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_runs import Interruption, Program
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, Preempted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None"),
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]

# ---- stopped by SIGTERM in a batch


BATCHES, EPOCHS = 4, 3


class Net(lightning.LightningModule):
    """Notes what its training, its validations and its hooks see; ``signal_at`` is the step that gets SIGTERM."""

    signal_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(4, 1)
        self.seen: list[tuple[Any, ...]] = []

    def steps_done(self) -> int:
        return int(self.trainer.global_step)

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
        if self.steps_done() + 1 == self.signal_at:
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


class CountsBatches(DrawsRows):
    """Asks its trainer for the number of steps, which makes the loaders before the counters are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CountsInSetup(Net):
    """Makes loaders with a worker, which begins to load at once, before anything is restored."""

    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows()), 2, shuffle=True, num_workers=1)


class RowsForWorkers(Net):
    """Tells the epoch to a dataset that a worker reads, when an epoch begins and with the loader."""

    def train_dataloader(self) -> Any:
        self.data = ScaledRows(self.rows())
        self.data.epoch = self.trainer.current_epoch
        return DataLoader(self.data, 2, num_workers=1)

    def on_train_epoch_start(self) -> None:
        self.data.epoch = self.trainer.current_epoch


class ScaledRows(TensorDataset):
    epoch = 0

    def __getitem__(self, index: int) -> Any:
        return [part * (1 + self.epoch) for part in super().__getitem__(index)]  # type: ignore[no-untyped-call]


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


class Adversaries(Net):
    """Updates its parts with an optimizer each, which are two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss, optimizers = super().training_step(batch, index), list[Any](self.optimizers())
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.body.parameters()), torch.optim.SGD(self.head.parameters(), 0.01, momentum=0.9)


class Measures(Net):
    """Has a metric for each epoch, some that share their states, and one over the run, and logs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker: Any = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        of_labels: Any = {"precision": torchmetrics.classification.BinaryPrecision()}
        of_labels["recall"] = torchmetrics.classification.BinaryRecall()
        self.shared: Any = torchmetrics.MetricCollection(of_labels)
        self.whole = torchmetrics.SumMetric()
        self.recent = torchmetrics.RunningMean(window=3)
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()
        self.shared.reset()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.tracker.update(loss.detach())
        self.shared.update(batch[0][:, 0].sigmoid(), (batch[0][:, 1] > 0).long())
        self.whole.update(loss.detach())
        self.recent(loss.detach())
        self.extremes.update(loss.detach())
        self.note("metrics", self.recent.compute().tolist(), str(self.extremes.compute()))
        return loss

    def on_train_epoch_end(self) -> None:
        shared = {name: value.tolist() for name, value in self.shared.compute().items()}
        self.note("epoch ends", self.tracker.compute_all().tolist(), shared, self.whole.compute().tolist())


def fit(
    directory: str,
    kind: type[Net],
    seed: int = 1,
    signal_at: int | None = None,
    made: list[Net] | None = None,
    **options: Any,
) -> Net:
    torch.manual_seed(seed)
    net = kind()
    if made is not None:
        made.append(net)
    net.signal_at = signal_at
    callbacks = options.pop("callbacks", [CheckpointCallback(directory, witness_steps_after_signal=0)])
    if options.pop("is_saved_twice", False):
        callbacks = [CheckpointCallback(f"{directory}-epochs", every_n_epochs=1), *callbacks]
    program.trainer(*callbacks, **{"max_epochs": EPOCHS, **options}).fit(net)
    return net


def weights(net: Net) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value.tolist() for name, value in net.state_dict().items()}


BY_STEPS = {"max_epochs": -1, "max_steps": 6}
RELOADED = {"reload_dataloaders_every_n_epochs": 1}


@pytest.mark.parametrize(
    ("kinds", "stops", "options"),
    [
        pytest.param([DrawsRows], (2, 6), RELOADED, id="drawn rows"),
        pytest.param([CountsBatches], (2, 6), RELOADED, id="drawn rows, counted by configure_optimizers"),
        pytest.param([CountsInSetup], (2, 6), {}, id="workers, counted by setup"),
        pytest.param([LabelsRows], (4, 8), RELOADED, id="rows labelled by the model"),
        pytest.param([RowsByEpoch], (4, 6), {"reload_dataloaders_every_n_epochs": 2}, id="rows of every second epoch"),
        pytest.param([RowsForWorkers], (2, 7), {}, id="workers that know the epoch"),
        pytest.param([Adversaries], (3, 9, 15), {}, id="two optimizers"),
        pytest.param([Net], (6,), {**BY_STEPS, "val_check_interval": 2}, id="last step, a validation is due"),
        pytest.param([Net], (6,), BY_STEPS, id="last step, the ends are due"),
        pytest.param([Stops], (6,), {"max_epochs": 9}, id="asked to stop"),
        pytest.param([Net, Compiled, Net], (2, 4), {}, id="compiled in between"),
        pytest.param([Measures], (2, 4, 7), {}, id="metrics"),
        pytest.param([Net], (5, 7), {"is_saved_twice": True}, id="two callbacks"),
    ],
)  # fmt: skip
def test_a_program_that_is_stopped_ends_as_one_that_is_not(
    kinds: list[type[Net]], stops: tuple[int, ...], options: dict[str, Any]
) -> None:
    directory, in_one, seen = new_directory(), new_directory(), []
    whole = fit(in_one, kinds[0], **options)
    for turn, stop in enumerate(stops):
        made: list[Net] = []
        with pytest.raises(Preempted):
            fit(directory, kinds[turn % len(kinds)], turn + 1, stop, made, **options)
        seen += made[0].seen
    last = fit(directory, kinds[len(stops) % len(kinds)], len(stops) + 1, **options)
    assert [*seen, *last.seen] == whole.seen
    assert hf.list_checkpoints(directory)[-1].metrics == hf.list_checkpoints(in_one)[-1].metrics
    assert fit(directory, kinds[0], 9, **options).seen == []  # Nothing is left to do.
    assert weights(last) == weights(whole)
    torch.testing.assert_close(last.trainer.callback_metrics, whole.trainer.callback_metrics, rtol=0, atol=0)


def test_an_interval_is_over_at_the_first_step_after_it() -> None:
    directory = new_directory()
    fit(directory, Adversaries, callbacks=[CheckpointCallback(directory, save_interval_steps=3)])
    assert [entry.step for entry in hf.list_checkpoints(directory)] == [4, 6, 10, 12, 16, 18, 22, 24]


def test_a_run_that_was_asked_to_stop_says_how_it_continues(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Stops, max_epochs=9)
    caplog.set_level(logging.INFO, "holdfast")
    assert fit(tmp_path, Net, max_epochs=9).seen == []
    said = re.search(r"asked to stop there; fit\(ckpt_path='(.*)'\) continues it", caplog.text)
    assert said is not None
    net = Net()
    program.trainer(CheckpointCallback(tmp_path), max_epochs=9).fit(net, ckpt_path=said[1])
    assert net.seen[0][:2] == ("batch", 6)


class EndsEpochs(Net):
    """Ends its first epoch with a batch that it does not train on."""

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == BATCHES - 1 and self.current_epoch == 0 else None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.log("updates", float(self.trainer.global_step))
        return super().training_step(batch, index)


class Rows(DummyLogger):
    """Notes at which step each number of updates is logged."""

    def __init__(self, rows: dict[float, int | None]) -> None:
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows |= {metrics["updates"]: step} if "updates" in metrics else {}


def test_loggers_count_on_after_an_epoch_that_the_module_has_ended() -> None:
    def rows_of(directory: str, *stops: int) -> dict[float, int | None]:
        rows: dict[float, int | None] = {}
        for turn, stop in enumerate([*stops, None]):
            with contextlib.suppress(Preempted):
                fit(directory, EndsEpochs, turn, stop, logger=Rows(rows), log_every_n_steps=1)
        return rows

    assert rows_of(new_directory(), 5, 6) == rows_of(new_directory())


def test_metrics_that_the_module_does_not_have_any_more_are_named(caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()
    with pytest.raises(Preempted):
        fit(directory, Measures, signal_at=2)
    fit(directory, Net)
    names = "tracker.1, shared.precision, shared.recall, whole, recent, extremes, extremes._base_metric"
    assert f"the module lacks metrics that the checkpoint has; they are ignored: {names}" in caplog.messages


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_callback_of_the_program_is_none_of_ours(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()

    class Named(ModelCheckpoint):
        """Keeps files of its own."""

    def callbacks() -> list[Any]:
        return [CheckpointCallback(directory), Named(tmp_path, monitor="val_loss", save_top_k=2)]

    with pytest.raises(Preempted):
        fit(directory, Net, signal_at=6, callbacks=callbacks())
    caplog.set_level(logging.WARNING, "holdfast")
    caplog.clear()
    fit(directory, Net, callbacks=callbacks())
    assert "kth_value" not in caplog.text


# ---- manual optimization without the optimizers of Lightning: batches are the steps


SAID = "batches count as steps, because no Lightning optimizer steps"


class Raw(Net):
    """Steps with the optimizer that Lightning has wrapped."""

    every = 1  # update after so many batches

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def steps_done(self) -> int:
        return int(self.trainer.fit_loop.total_batch_idx)

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss, optimizer = super().training_step(batch, index), self.optimizer()
        self.manual_backward(loss)
        if (index + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Accumulating(Raw):
    every = 2


class Later(Raw):
    """Steps with Lightning's optimizers in the first epoch, and with the one that they wrap after it."""

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=self.current_epoch == 0)


class Sooner(Later):
    """The other way round."""

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=self.current_epoch > 0)


class Own(Raw):
    """Keeps the optimizer from Lightning, and saves its state as the pages of Lightning have it."""

    def configure_optimizers(self) -> None:
        self.own_optimizer = torch.optim.Adam(self.parameters(), 0.02)

    def optimizer(self) -> Any:
        return self.own_optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own_optimizer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]

    def on_train_start(self) -> None:
        if hasattr(self, "loaded"):
            self.own_optimizer.load_state_dict(self.loaded)


def raw_fit(directory: str, kind: type[Raw], seed: int = 1, signal_at: int | None = None, **options: Any) -> list[Any]:
    callback = CheckpointCallback(directory, witness_steps_after_signal=0, **options)
    net: Any = fit(directory, kind, seed, signal_at, callbacks=[callback])
    return [weights(net), program.plain([*net.optimizer().state.values()])]


@pytest.mark.parametrize(
    ("kind", "signal_at", "saved", "after_signal", "at_end"),
    [
        (Raw, 5, [3], 5, 12),
        (Own, 5, [3], 5, 12),
        (Later, 7, [3, 6], 7, 12),
        (Sooner, 7, [3, 6], 7, 12),
        (Accumulating, 5, [], 3, 6),
    ],
)
def test_batches_are_steps_where_no_optimizer_of_lightning_steps(
    caplog: pytest.LogCaptureFixture,
    kind: type[Raw],
    signal_at: int,
    saved: list[int],
    after_signal: int,
    at_end: int,
) -> None:
    whole = raw_fit(new_directory(), kind)
    directory = new_directory()
    caplog.set_level(logging.INFO, "holdfast")
    caplog.clear()
    with pytest.raises(Preempted):
        raw_fit(directory, kind, signal_at=signal_at, save_interval_steps=3)
    assert caplog.text.count(SAID) == 1
    assert [entry.step for entry in hf.list_checkpoints(directory)] == [*saved, after_signal]
    assert raw_fit(directory, kind, seed=2) == whole
    assert f"resumed from step {after_signal}" in caplog.text
    assert [entry.step for entry in hf.list_checkpoints(directory)][-1] == at_end
    assert caplog.text.count(SAID) == 1  # the run keeps it
    assert raw_fit(directory, kind, seed=3)[0] == whole[0]
    assert f"nothing left to do after step {at_end}" in caplog.text
    assert raw_fit(directory, kind, seed=4, partial="initialize")[0] == whole[0]


# ---- what a program switches while it trains, such as frozen parameters


@pytest.mark.parametrize(
    ("setup", "step"),
    [("BackboneFinetuning without batch norm", 7), ("BaseFinetuning, in two stages", 12), ("modes by hand", 7)],
)
def test_after_the_unfreeze(setup: str, step: int) -> None:
    whole, directory = Program(new_directory(), setup, "shuffled"), new_directory()
    whole.fit()
    assert Program(directory, setup, "shuffled", every=step).fit(Interruption("error", step)) == 1
    resumed = Program(directory, setup, "shuffled", seed=2)
    resumed.fit()
    assert resumed.final() == whole.final()


def test_a_group_that_only_training_adds_is_refused() -> None:
    directory = new_directory()
    assert Program(directory, "parameter group by hand", "shuffled", every=7).fit(Interruption("error", 7)) == 1
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Program(directory, "parameter group by hand", "shuffled").fit()


class Switches(Net):
    """Trains its first layer, and sets its norm to evaluation, from step 2 on."""

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(requires_grad=False)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            self.body[0].requires_grad_(requires_grad=True)
            self.body[1].eval()


class FrozenByHand(Switches):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(requires_grad=False)


def test_what_an_author_changes_between_two_starts_stays() -> None:
    """The third process begins with everything that the first one has switched, too."""
    directory, made = new_directory(), list[Any]()
    for turn, (kind, stop) in enumerate([(Switches, 3), (FrozenByHand, 5), (FrozenByHand, 7)]):
        with pytest.raises(Preempted):
            fit(directory, kind, turn, stop, made)
    trained = [[one.requires_grad for one in net.parameters()] for net in made]
    assert trained == [[True] * 6, *[[True] * 4 + [False] * 2] * 2]
    assert [[part.training for part in net.body] for net in made] == [[True, False, True]] * 3
