"""A run that ends with an exception, and with ``save_on_exception`` saves the last point between two batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf

RARELY: dict[str, Any] = {"save_interval_steps": 4, "save_on_exception": True}


class Fails(lightning.pytorch.Callback):
    """Ends the run at a step, in one of the hooks, after it has spoiled the weights there."""

    def __init__(self, where: str, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error
        setattr(self, where, self.fail)

    def fail(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            with torch.no_grad():
                module.head.weight.data.add_(1.0)
            torch.rand(3)
            raise self.error("spoiled")


@pytest.mark.parametrize(
    ("where", "step", "saved", "options", "error"),
    [
        ("on_train_batch_start", 6, 6, {}, KeyboardInterrupt),
        ("on_after_backward", 7, 7, {}, RuntimeError),
        ("on_train_batch_end", 8, 7, {}, RuntimeError),  # the update is done, but not all that belongs to it
        ("on_before_zero_grad", 2, 2, {"accumulate_grad_batches": 2}, RuntimeError),
        ("on_validation_batch_end", 3, 3, {"val_check_interval": 3}, RuntimeError),
        pytest.param("on_validation_batch_start", 10, 10, {}, RuntimeError, marks=pytest.mark.sweep),
        pytest.param("on_validation_end", 10, 10, {}, KeyboardInterrupt, marks=pytest.mark.sweep),
        pytest.param("on_train_epoch_start", 5, 5, {}, RuntimeError, marks=pytest.mark.sweep),
        pytest.param("on_train_batch_start", 8, 8, {}, RuntimeError, marks=pytest.mark.sweep),  # saved anyway
        pytest.param("on_train_epoch_end", 10, 10, {}, KeyboardInterrupt, marks=pytest.mark.sweep),
    ],
)
def test_the_last_point_is_saved(
    where: str, step: int, saved: int, options: dict[str, Any], error: type[BaseException]
) -> None:
    whole = program.run(new_directory(), **options)
    directory = new_directory()
    failing = Fails(where, step, error)
    with pytest.raises((error, SystemExit)):
        program.run(directory, checkpoint=RARELY, callbacks=(failing,), **options)
    newest = hf.list_checkpoints(directory)[-1]
    assert newest.step == saved
    assert newest.reason == ("every 4 steps" if saved % 4 == 0 else f"after {error.__name__}")
    resumed = program.run(directory, seed=3, **options)
    assert resumed.recorder.first_step == saved
    assert resumed.final == whole.final


def test_without_the_option_nothing_more_is_saved() -> None:
    directory = new_directory()
    with pytest.raises(RuntimeError, match="spoiled"):
        program.run(
            directory, checkpoint={"save_interval_steps": 4}, callbacks=(Fails("on_after_backward", 6, RuntimeError),)
        )
    assert [one.step for one in hf.list_checkpoints(directory)] == [4]


def test_a_fresh_run_that_fails_at_once_saves_nothing() -> None:
    directory = new_directory()
    with pytest.raises(RuntimeError, match="spoiled"):
        program.run(directory, checkpoint=RARELY, callbacks=(Fails("on_after_backward", 0, RuntimeError),))
    assert hf.list_checkpoints(directory) == []
