"""Manual optimization without the optimizers of Lightning, whose ``global_step`` stays 0: batches are the steps."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import lightning.pytorch
import pytest
import torch
from tests.integrations.lightning.program import new_directory
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback
from holdfast.integrations.lightning.stopping import Preempted

pytestmark = [pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")]

BATCHES, EPOCHS = 6, 2
SAID = "steps are batches here, since no optimizer of Lightning steps"


class Raw(lightning.pytorch.LightningModule):
    """Steps with the optimizer that Lightning has wrapped."""

    every = 1  # update after so many batches

    def __init__(self, signal_at: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.signal_at, self.drawn = signal_at, 0
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.02)

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizer()
        self.manual_backward(self.layer(batch).square().mean())
        if (index + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.drawn += 1
        if self.drawn == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


class Accumulating(Raw):
    every = 2


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


def fit(directory: str, kind: type[Raw], seed: int = 1, signal_at: int | None = None, **options: Any) -> list[Any]:
    torch.manual_seed(seed)
    model = kind(signal_at)
    callback = CheckpointCallback(directory, max_to_keep=None, witness_steps_after_signal=0, **options)
    trainer = lightning.pytorch.Trainer(
        callbacks=[callback],
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.randn(BATCHES * 2, 4, generator=torch.Generator().manual_seed(3))
    trainer.fit(model, DataLoader(data, 2, shuffle=True))
    optimizer = [state.tolist() for moments in model.optimizer().state.values() for state in moments.values()]
    return [{name: value.tolist() for name, value in model.state_dict().items()}, optimizer]


@pytest.mark.parametrize(
    ("kind", "saved", "after_signal", "at_end"),
    [(Raw, [3], 5, 12), (Own, [3], 5, 12), (Accumulating, [], 3, 6)],
)
def test_batches_are_steps_where_no_optimizer_of_lightning_steps(
    caplog: pytest.LogCaptureFixture, kind: type[Raw], saved: list[int], after_signal: int, at_end: int
) -> None:
    whole = fit(new_directory(), kind)
    directory = new_directory()
    caplog.set_level(logging.INFO, "holdfast")
    caplog.clear()
    with pytest.raises(Preempted):
        fit(directory, kind, signal_at=5, save_interval_steps=3)
    assert caplog.text.count(SAID) == 1
    assert [entry.step for entry in hf.list_checkpoints(directory)] == [*saved, after_signal]
    assert fit(directory, kind, seed=2) == whole
    assert f"resumed from step {after_signal}" in caplog.text
    assert [entry.step for entry in hf.list_checkpoints(directory)][-1] == at_end
    assert caplog.text.count(SAID) == 1  # the run keeps it
    assert fit(directory, kind, seed=3)[0] == whole[0]
    assert f"nothing left to do after step {at_end}" in caplog.text
