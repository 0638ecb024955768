"""Small Lightning programs with all that a resume could get wrong.

Each program trains for three epochs of five batches; its model has dropout (random generators), batch normalization
(buffers), Adam (optimizer state), a schedule, means over epochs, and an average kept by the module's own hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lightning
import torch
import torchmetrics
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

BATCHES, BATCH_SIZE, FEATURES = 5, 4, 3


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Net(lightning.LightningModule):
    """A backbone and a head; ``frozen`` gives the optimizer only what is trained from the beginning."""

    def __init__(self, schedule: str = "epoch", *, frozen: bool = False) -> None:
        super().__init__()
        self.schedule, self.frozen = schedule, frozen
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5)
        )
        self.head = torch.nn.Linear(8, 1)
        self.train_error = torchmetrics.MeanMetric()
        self.val_error = torchmetrics.MeanMetric()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(1, 8))

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):  # of several loaders
            return sum((self.loss(part) for part in batch.values()), torch.zeros(()))
        return torch.nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.logged(self.loss(batch))

    def logged(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.train_error(loss.detach())
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        # Runs after the hooks of all callbacks, so it would be missed by what is saved in one of those.
        self.average.mul_(0.5).add_(self.head.weight.detach(), alpha=0.5)
        self._tell("after_batch")

    def _tell(self, moment: str, *args: Any) -> None:
        """Call what callbacks do at a moment for which Lightning has no hook."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined] # missing in Lightning's types
            getattr(callback, moment, lambda *_: None)(self.trainer, *args)

    def validation_step(self, batch: Any, index: int) -> None:
        self._tell("during_validation", index)
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.val_error(loss)
        self.log("val_error", self.val_error)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad or not self.frozen]
        optimizer = torch.optim.Adam(trained, lr=0.05)
        scheduler: Any
        if self.schedule.startswith("plateau"):
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            monitor = "val_loss" if self.schedule == "plateau of validation" else "train_loss_epoch"
            plateau = {"scheduler": scheduler, "monitor": monitor, "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": plateau}
        if self.schedule == "one cycle":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Adversaries(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override] # no loss to return
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(sign * loss)
            optimizer.step()
        self.logged(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.backbone.parameters()), torch.optim.SGD(self.head.parameters(), 0.01)


class SwapsInHooks(Net):
    """Validates an average of its own weights, in hooks of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: torch.Tensor
        self.register_buffer("shadow", torch.zeros(1, 8))

    def on_train_batch_start(self, *args: Any) -> None:
        self.shadow.mul_(0.9).add_(self.head.weight.detach(), alpha=0.1)

    def on_validation_start(self) -> None:
        self._exchange()

    def on_validation_end(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        kept = self.shadow.clone()
        self.shadow.copy_(self.head.weight.data)
        self.head.weight.data.copy_(kept)


class CountsValidation(Net):
    """Counts the batches of its validations in a buffer, which its training depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: torch.Tensor
        self.register_buffer("validated", torch.zeros(()))

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.validated += 1

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + 0.01 * self.validated)


# ---- data loaders


class StatefulLoader:
    """Shuffles by itself and knows where it is, as torchdata's loader does, but not how many batches it has."""

    def __init__(self) -> None:
        self.dataset = samples(BATCHES * BATCH_SIZE, seed=1)
        self.place = 0
        self.order: list[int] = []
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed or not self.order:
            self.order, self.place = torch.randperm(len(self.dataset)).tolist(), 0
        self.resumed = False
        while self.place * BATCH_SIZE < len(self.order):
            chosen = self.order[self.place * BATCH_SIZE : (self.place + 1) * BATCH_SIZE]
            self.place += 1
            yield self.dataset[chosen]
        self.order = []  # The epoch has ended, and the next iterator begins another one.

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place, self.resumed = list(state["order"]), state["place"], True


class SizedStatefulLoader(StatefulLoader):
    def __len__(self) -> int:
        return BATCHES

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.place == BATCHES:  # A trainer that knows the length requests no batch behind the last one.
            self.order = []


class Stream(IterableDataset[Any]):
    """Samples in an order of their own, with no length."""

    def __iter__(self) -> Iterator[Any]:
        dataset = samples(BATCHES * BATCH_SIZE, seed=1)
        for index in torch.randperm(len(dataset)).tolist():
            yield dataset[index]


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(BATCHES * BATCH_SIZE, seed=1), BATCH_SIZE, **options)


def _short(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(2 * BATCH_SIZE, seed=3), BATCH_SIZE, shuffle=True, **options)


_LASTING = {"num_workers": 2, "persistent_workers": True}

LOADERS: dict[str, Callable[[], Any]] = {
    "plain": _loader,
    "shuffled": lambda: _loader(shuffle=True),
    "generator": lambda: _loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "weighted": lambda: _loader(sampler=WeightedRandomSampler([1.0, 2.0] * 10, BATCHES * BATCH_SIZE)),
    "stateful": SizedStatefulLoader,
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH_SIZE),
    "workers": lambda: _loader(shuffle=True, num_workers=2),
    "two": lambda: {"one": _loader(shuffle=True), "short": _short()},
    "stateful and plain": lambda: {"one": SizedStatefulLoader(), "short": _short()},
    "persistent": lambda: _loader(shuffle=True, **_LASTING),
    "persistent, not shuffled": lambda: _loader(**_LASTING),
    "persistent, generator": lambda: _loader(shuffle=True, generator=torch.Generator().manual_seed(7), **_LASTING),
    "persistent and short": lambda: {"one": _loader(shuffle=True), "short": _short(**_LASTING)},
}


def validation_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(2 * BATCH_SIZE, seed=2), BATCH_SIZE, **options)


# ---- callbacks


class SwapByHand(lightning.Callback):
    """Keeps an average of the weights, and validates it."""

    def __init__(self, start: str, end: str) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}
        setattr(self, start, self._show)
        setattr(self, end, self._hide)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, value in module.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * value if name in self.average else value.clone()

    def _show(self, trainer: Any, module: Any) -> None:
        if self.average:
            self.kept = {name: value.clone() for name, value in module.state_dict().items()}
            module.load_state_dict(self.average)

    def _hide(self, trainer: Any, module: Any) -> None:
        if self.kept:
            module.load_state_dict(self.kept)
            self.kept = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state["average"])


class MovesAndReturns(lightning.Callback):
    """Moves the weights for a validation and back, which rounds: an optimizer without a schedule does so."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.lerp_(module.average, 0.3)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.lerp_(module.average, 1 - 1 / 0.7)


class Unfreezes(callbacks.BaseFinetuning):
    """Unfreezes one layer after the other."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[epoch - 1], optimizer, lr=0.01 * epoch)


class UnfreezesByHand(lightning.Callback):
    """Switches ``requires_grad``; the optimizer has all parameters from the beginning."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.backbone.requires_grad_(requires_grad=False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(requires_grad=True)


class SetsModes(lightning.Callback):
    """Turns batch normalization and dropout off from the second epoch on."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.backbone.eval()


class AddsGroup(lightning.Callback):
    """Unfreezes with a parameter group of its own, which a resumed program does not make before its state is loaded."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.backbone.requires_grad_(requires_grad=False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(requires_grad=True)
            trainer.optimizers[0].add_param_group({"params": list(module.backbone.parameters())})


class DrawsNumbers(lightning.Callback):
    """Uses the random generators at moments that a resumed run has fewer, or more, of."""

    def on_train_start(self, *args: Any) -> None:
        torch.rand(3)

    def on_train_epoch_start(self, *args: Any) -> None:
        torch.rand(3)

    def on_validation_start(self, *args: Any) -> None:
        torch.rand(3)


# ---- set-ups


@dataclass(frozen=True)
class Setup:
    """How a program is built.

    Attributes:
        trainer: Options of the trainer.
        model: Makes the module.
        callbacks: Makes the callbacks beside holdfast's.
        validation: Options of the validation's data loader.
        refused: What the message says where a resumed run is refused.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Net] = Net
    callbacks: Callable[[], list[Any]] = list
    validation: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def _ema(**options: Any) -> Callable[[], list[Any]]:
    return lambda: [callbacks.EMAWeightAveraging(decay=0.9, **options)]


def _frozen() -> Net:
    return Net(frozen=True)


def _backbone(**options: Any) -> Callable[[], list[Any]]:
    return lambda: [callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, **options)]


_EVERY_THREE = {"val_check_interval": 3}

COMMON = {
    "default": Setup(),
    "validation within epochs": Setup(_EVERY_THREE),
    "validation every second epoch": Setup({"check_val_every_n_epoch": 2}),
    "validation across epochs": Setup({"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "no validation": Setup({"limit_val_batches": 0}),
    "no sanity check": Setup({"num_sanity_val_steps": 0}),
    "max_steps": Setup({"max_steps": 12, "max_epochs": -1}),
    "max_steps and max_epochs": Setup({"max_steps": 12}),
    "accumulation": Setup({"accumulate_grad_batches": 3}),
    "accumulation, validation": Setup({"accumulate_grad_batches": 2, **_EVERY_THREE}),
    "part of the data": Setup({"limit_train_batches": 3}),
    "bf16, clipping": Setup({"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "schedule by step": Setup(model=lambda: Net("step")),
    "one cycle": Setup(model=lambda: Net("one cycle")),
    "plateau": Setup(model=lambda: Net("plateau")),
    "two optimizers": Setup(model=Adversaries),
    "random numbers in hooks": Setup(callbacks=lambda: [DrawsNumbers()]),
    "early stopping": Setup(
        {"max_epochs": 9}, callbacks=lambda: [callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0)]
    ),
    "float64": Setup({"precision": "64-true"}),
}

AVERAGES = {
    "EMA": Setup(callbacks=_ema()),
    "EMA, validation within epochs": Setup(_EVERY_THREE, callbacks=_ema()),
    "EMA, every second step": Setup(_EVERY_THREE, callbacks=_ema(update_every_n_steps=2)),
    "EMA, later": Setup(callbacks=_ema(update_starting_at_step=4)),
    "EMA, by epochs": Setup(callbacks=_ema(update_every_n_steps=0, update_starting_at_epoch=0)),
    "EMA without buffers": Setup(_EVERY_THREE, callbacks=_ema(use_buffers=False)),
    "EMA, accumulation": Setup({"accumulate_grad_batches": 2}, callbacks=_ema()),
    "WeightAveraging": Setup(_EVERY_THREE, callbacks=lambda: [callbacks.WeightAveraging()]),
    "StochasticWeightAveraging": Setup(
        callbacks=lambda: [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    ),
    "swap by hand": Setup(_EVERY_THREE, callbacks=lambda: [SwapByHand("on_validation_start", "on_validation_end")]),
    "swap by hand, epoch hooks": Setup(
        callbacks=lambda: [SwapByHand("on_validation_epoch_start", "on_validation_epoch_end")]
    ),
    "swap by the module": Setup(_EVERY_THREE, model=SwapsInHooks),
    "moved and returned": Setup(callbacks=lambda: [MovesAndReturns()]),
    "counts validation batches": Setup(_EVERY_THREE, model=CountsValidation),
}

FINETUNING = {
    "BackboneFinetuning": Setup(model=_frozen, callbacks=_backbone()),
    "BackboneFinetuning, validation within epochs": Setup(_EVERY_THREE, model=_frozen, callbacks=_backbone()),
    "BackboneFinetuning without batch norm": Setup(model=_frozen, callbacks=_backbone(train_bn=False)),
    "BackboneFinetuning, accumulation": Setup(
        {"accumulate_grad_batches": 2}, model=_frozen, callbacks=_backbone(should_align=False)
    ),
    "BackboneFinetuning, EMA": Setup(model=_frozen, callbacks=lambda: [*_backbone()(), *_ema()()]),
    "BaseFinetuning, in two stages": Setup(model=_frozen, callbacks=lambda: [Unfreezes()]),
    "unfrozen by hand": Setup(callbacks=lambda: [UnfreezesByHand()]),
    "modes by hand": Setup(_EVERY_THREE, callbacks=lambda: [SetsModes()]),
    "parameter group by hand": Setup(
        model=_frozen, callbacks=lambda: [AddsGroup()], refused="different number of parameter groups"
    ),
}

VALIDATION_LOADERS = {
    "validation: persistent": Setup(validation=_LASTING),
    "validation: persistent, within epochs": Setup(_EVERY_THREE, validation=_LASTING),
    "validation: persistent, no sanity check": Setup({"num_sanity_val_steps": 0}, validation=_LASTING),
    "validation: shuffled": Setup(_EVERY_THREE, validation={"shuffle": True}),
    "validation: new every epoch": Setup(
        {"reload_dataloaders_every_n_epochs": 1, **_EVERY_THREE}, validation={"shuffle": True}
    ),
}

SETUPS = COMMON | AVERAGES | FINETUNING | VALIDATION_LOADERS
