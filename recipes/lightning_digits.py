"""A PyTorch Lightning classifier on scikit-learn's digits."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ..integrations.lightning import CheckpointCallback, Preempted
from .digits import CLASSES, Images, split_digits
from .registry import Outcome, Progress, RunContext
from .schema import LightningDigits, Schedule, TrainSection

Batch = tuple[Tensor, Tensor]
# Lightning is published as two packages with the same code; the package imported last determines the logger names.
LOGGERS = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")


class Classifier(LightningModule):
    """A multilayer perceptron with BatchNorm and dropout after every hidden layer."""

    def __init__(self, config: LightningDigits) -> None:
        super().__init__()
        self.schedule = config.optimizer
        layers: list[nn.Module] = []
        width = 64
        for units in config.model.hidden:
            layers += [nn.Linear(width, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Dropout(config.model.dropout)]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, CLASSES))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits, float32[n, 10], for pixels, float32[n, 64]."""
        logits: Tensor = self.layers(pixels)
        return logits

    def training_step(self, batch: Batch, _: int) -> Tensor:
        pixels, labels = batch
        loss = functional.cross_entropy(self(pixels), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        pixels, labels = batch
        logits = self(pixels)
        self.log("val_loss", functional.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        """Return AdamW and its learning rate schedule, which advances after every update."""
        section = self.schedule
        optimizer = torch.optim.AdamW(self.parameters(), section.learning_rate, weight_decay=section.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(section, step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(section: Schedule, step: int) -> float:
    """Return the fraction of the peak learning rate at a step: linear warmup, then cosine decay to 0.1."""
    if step < section.warmup_steps:
        return step / section.warmup_steps
    done = min(1.0, (step - section.warmup_steps) / (section.decay_steps - section.warmup_steps))
    return 0.55 + 0.45 * math.cos(math.pi * done)


class Report(Callback):
    """A Lightning callback that logs progress as the other recipes do, and records the step at which the run began."""

    def __init__(self, context: RunContext, train: TrainSection) -> None:
        self.context = context
        self.train = train
        self.start = 0
        self.progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = trainer.global_step
        self.progress = self.context.progress(self.start, self.train.steps)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Report an update. If a validation follows, :meth:`on_validation_end` reports the update instead."""
        if self.progress is not None and trainer.global_step % self.train.eval_interval_steps:
            self.progress.update(trainer.global_step, trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report an update with the validation metrics."""
        if self.progress is not None:
            self.progress.update(trainer.global_step, trainer.callback_metrics)


def loader(images: Images, batch_size: int, *, training: bool) -> DataLoader[Any]:
    """Return a data loader of float32[n, 64] pixels and int64[n] labels, shuffled for training."""
    dataset = TensorDataset(torch.from_numpy(images.pixels), torch.from_numpy(images.labels).long())
    return DataLoader(dataset, batch_size, shuffle=training, drop_last=training)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's informational messages."""
    levels = {log: log.level for log in map(logging.getLogger, LOGGERS)}
    for log in levels:
        log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", r".*does not have many workers")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def run(config: LightningDigits, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from scratch if there is none."""
    total = config.train.steps
    # A model this small does not benefit from more threads, and one thread sums in the same order on every machine.
    torch.set_num_threads(1)
    seed_everything(config.seed, verbose=False)
    training, validation = split_digits(config.data.validation_fraction, config.seed)
    checkpoint = CheckpointCallback(context.checkpoints, **context.callback_arguments)
    report = Report(context, config.train)
    with quiet():
        trainer = Trainer(
            max_steps=total,
            max_epochs=-1,
            val_check_interval=config.train.eval_interval_steps,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            devices=1,
            callbacks=[checkpoint, report],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=context.run_dir,
        )
        try:
            trainer.fit(
                Classifier(config),
                loader(training, config.data.batch_size, training=True),
                loader(validation, len(validation.labels), training=False),
            )
        except Preempted:
            return Outcome(start=report.start, step=trainer.global_step, preempted=True)
    return Outcome(start=report.start, step=trainer.global_step, preempted=False)
