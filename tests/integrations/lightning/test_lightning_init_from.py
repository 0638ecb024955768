"""init_from= of the Lightning callback: fresh runs that begin with the weights of another."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytest
import safetensors.torch
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback
from holdfast.integrations.lightning.callback import take_weights


class Beginning(lightning.Callback):
    """Notes what a run begins with."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.step = -1
        self.moments = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {key: value.clone() for key, value in pl_module.state_dict().items()}
        self.step = trainer.global_step
        self.moments = len(trainer.optimizers[0].state)


def fit(directory: str, steps: int, seed: int, **options: Any) -> tuple[Beginning, Any]:
    torch.manual_seed(seed)
    beginning = Beginning()
    trainer = lightning.Trainer(
        max_steps=steps,
        callbacks=[beginning, CheckpointCallback(directory, save_interval_steps=100, **options)],
        num_sanity_val_steps=0,
        **program.QUIET,
    )
    trainer.fit(program.Model(), program.training_loader("plain"), program.validation_loader())
    return beginning, trainer


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three steps, and what else may be written of it."""
    path = tmp_path_factory.mktemp("other")
    _, trainer = fit(str(path / "run"), 3, seed=5)
    weights = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}
    trainer.save_checkpoint(path / "lightning.ckpt")
    torch.save(weights, path / "weights.pt")
    safetensors.torch.save_file(weights, path / "weights.safetensors")
    return path, weights


@pytest.mark.parametrize("name", ["run", "lightning.ckpt", "weights.pt", "weights.safetensors"])
def test_weights_come_from_any_checkpoint(other: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path, weights = other

    with caplog.at_level(logging.INFO, "holdfast"):
        beginning, _ = fit(new_directory(), 1, seed=6, init_from=path / name)

    assert beginning.weights.keys() == weights.keys()
    assert all(torch.equal(beginning.weights[key], value) for key, value in weights.items())
    assert (beginning.step, beginning.moments) == (0, 0)
    assert len([line for line in caplog.messages if line.startswith("took the weights from ")]) == 1


def test_every_difference_is_named(other: Any, tmp_path: Path) -> None:
    _, weights = other
    changed = {**weights, "head.bias": torch.ones(2), "head.weight": weights["head.weight"].double()}
    del changed["average"]
    torch.save({**changed, "new": torch.ones(1)}, tmp_path / "x.pt")

    with pytest.raises(hf.TreeMismatchError, match="are not those of the model") as caught:
        fit(new_directory(), 1, seed=6, init_from=tmp_path / "x.pt")

    assert sorted(line.partition(":")[0] for line in caught.value.differences) == [
        "average",
        "head.bias",
        "head.weight",
        "new",
    ]


def test_one_fit_after_another_takes_it_once(
    other: Any,
) -> None:
    path, weights = other
    beginning = Beginning()
    checkpoint = CheckpointCallback(
        new_directory(), save_interval_steps=100, save_at_end=False, init_from=path / "weights.pt"
    )
    model = program.Model()
    for _ in range(2):
        trainer = lightning.Trainer(
            max_steps=2, callbacks=[beginning, checkpoint], num_sanity_val_steps=0, **program.QUIET
        )
        trainer.fit(model, program.training_loader("plain"), program.validation_loader())

    assert not torch.equal(beginning.weights["head.weight"], weights["head.weight"])


def test_strategies_that_shard_first_are_refused(
    other: Any,
) -> None:
    path, _ = other
    trainer = SimpleNamespace(strategy=SimpleNamespace(restore_checkpoint_after_setup=True))

    with pytest.raises(hf.errors.OptionError, match="does not work with SimpleNamespace"):
        take_weights(trainer, program.Model(), path / "weights.pt")
