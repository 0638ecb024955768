"""A run that is interrupted anywhere and resumed ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks
from tests.fixtures import StoredFiles
from tests.integrations.lightning import program
from tests.integrations.lightning.program import NEVER, new_directory
from tests.sweep.lightning_programs import BATCH_SIZE, DrawsNumbers
from torch.utils.data import DataLoader

from holdfast.engine.storage import as_location
from holdfast.integrations.lightning.replay import EpochReplay

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "validation within epochs": {"val_check_interval": 3},
    "max_steps": {"max_steps": 12, "max_epochs": -1},
    "accumulation": {"accumulate_grad_batches": 3},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
}


def check(steps: Iterable[int], make: Callable[[], Callback] | None = None, **options: Any) -> program.Outcome:
    """Resumes a run from each of some steps alone, and compares everything with a whole run that has saved nothing.

    The later half of the steps comes from a run that was resumed itself. Returns the whole run; ``make`` makes another
    callback of each.
    """

    def run(directory: str, *, checkpoint: Any = NEVER, **more: Any) -> program.Outcome:
        others = () if make is None else (make(),)
        return program.run(directory, checkpoint=checkpoint, callbacks=others, **options, **more)

    whole, every_step = run(new_directory()), new_directory()
    middle = whole.trainer.global_step // 2
    with pytest.raises(program.InterruptionError):
        run(every_step, checkpoint=None, recorder=program.Recorder(stop_after=middle))
    continued = run(every_step, checkpoint=None, seed=3)
    assert continued.recorder.first_step == middle
    assert continued.final == whole.final
    for step in [step for step in steps if step < whole.trainer.global_step]:
        directory = new_directory()
        for path, content in StoredFiles(f"{every_step}/{step}").read().items():
            (as_location(directory) / str(step) / path).write_bytes(content)
        resumed = run(directory, seed=step + 10)
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final, f"resumed from step {step}"
        before = [event for event in whole.recorder.events if event[1] <= step]
        assert before + resumed.recorder.events == whole.recorder.events, f"resumed from step {step}"
    return whole


LOADERS = ["plain", "shuffled", "stateful"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loader", LOADERS)
def test_resumed_from_any_step(loader: str, variant: str, every: bool) -> None:
    # Together, the loaders cover every step of every variant; the end of the first epoch is among the steps of each.
    steps = range(1, 100) if every else sorted({5, *range(1 + LOADERS.index(loader), 100, len(LOADERS))})
    check(steps, loader=loader, **VARIANTS[variant])


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss which is not available")
@pytest.mark.parametrize(
    "options",
    [
        *({"loader": loader} for loader in ("generator", "stream", "stateful stream")),
        # beside a shorter one that begins again
        *({"loader": loader} for loader in ("shuffled+generator", "shuffled+stateful", "stateful+plain")),
        {"schedule": "step"},
        {"schedule": "plateau"},
        {"schedule": "plateau of validation", "check_val_every_n_epoch": 2},
        {"limit_train_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
        {"reload_dataloaders_every_n_epochs": 2},
        {"max_steps": 12},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"limit_val_batches": 0},
        {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
        {"precision": "64-true", "loader": "stateful stream"},
    ],
    ids=str,
)
def test_other_loaders_and_options(options: dict[str, Any], every: bool) -> None:
    check([1, 2, 3, 4, 5, 6, 7, 8, 9, 10] if every else [3, 5, 8, 10], **options)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(DrawsNumbers, id="random numbers in hooks"),
        pytest.param(
            lambda: callbacks.EMAWeightAveraging(decay=0.9),
            id="EMAWeightAveraging",
            marks=pytest.mark.needs("lightning", "2.6"),
        ),
        pytest.param(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}), id="GradientAccumulationScheduler"),
        pytest.param(
            lambda: callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1), id="StochasticWeightAveraging"
        ),
    ],
)
def test_other_callbacks(make: Callable[[], Callback], every: bool) -> None:
    check((2, 5, 6, 7, 8) if every else (2, 5, 7), make)


class Draws(torch.utils.data.IterableDataset[Any]):
    """Shuffles in a buffer, with a generator that each epoch seeds; ``kind`` says from which it draws."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        own = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        generator = own if self.kind == "a generator of its own" else None
        buffer = list(torch.rand(4, 3, generator=generator))
        for _ in range(20):
            place = int(torch.randint(len(buffer), (), generator=generator))
            yield buffer[place], buffer[place].sum(0, keepdim=True)
            buffer[place] = torch.rand(3, generator=generator)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("kind", ["a generator of its own", "a worker"])
def test_a_dataset_that_draws(monkeypatch: pytest.MonkeyPatch, kind: str, every: bool) -> None:
    """A dataset that draws from the generator of the model, in its process, would draw other numbers."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": int(kind == "a worker")}
    monkeypatch.setattr(program, "training_loader", lambda _: DataLoader(Draws(kind), **options))
    check([2, 4, 5, 8] if every else [2, 5])


def as_earlier(replay: Any, *args: Any, capture: Any = EpochReplay.capture, **options: Any) -> dict[str, Any]:
    """Return a position with what earlier versions have saved as well."""
    position: dict[str, Any] = capture(replay, *args, **options)
    position["random"]["attributes"] = {"0.loader.count": 3}
    position["random"]["loaders"] = {"0.dataset.rng": torch.zeros(2), "0.dataset.transform.rng": torch.zeros(2)}
    return position | {"found": {"lr": 0.1}, "earlier": []}


def test_what_a_step_of_an_earlier_version_has_more_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EpochReplay, "capture", as_earlier)
    for step in (2, 5):  # within an epoch, and at its end
        directory = new_directory()
        program.interrupt(directory, step)
        caplog.clear()
        program.run(directory, checkpoint=NEVER, max_steps=step + 1)
        (told,) = [one.getMessage() for one in caplog.records if "an earlier version of holdfast" in one.getMessage()]
        assert (
            "has state that is no longer restored: data loader attributes (0.loader.count); data loader generators "
            "(0.dataset.rng, 0.dataset.transform.rng); search results (lr)."
        ) in told


class ByColumns(torch.optim.SGD):
    """Keeps matrices in the order of Fortran, as those do that come from an eigenvalue solver."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            if (momentum := state["momentum_buffer"]).ndim == 2:
                state["momentum_buffer"] = momentum.T.contiguous().T
        return loss


def test_an_optimizer_with_matrices_in_another_order() -> None:
    class Model(program.Model):
        def configure_optimizers(self) -> Any:
            return ByColumns(self.parameters(), 0.01, momentum=0.9)

    def fit(directory: str) -> list[Any]:
        outcome = program.run(directory, model=Model, max_epochs=2)
        momenta = [state["momentum_buffer"] for state in outcome.trainer.optimizers[0].state.values()]
        return [str(outcome.model.state_dict()), [(str(one), one.stride()) for one in momenta]]

    whole, directory = fit(new_directory()), new_directory()
    assert any(stride[0] == 1 < stride[-1] for _, stride in whole[1])
    program.interrupt(directory, 6, model=Model, max_epochs=2)
    assert fit(directory) == whole
    assert fit(directory) == whole  # as it was loaded


def test_early_stopping_ends_at_the_same_step() -> None:
    def stopping() -> Callback:
        return callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0)

    assert check((5, 7, 10, 13), stopping, max_epochs=9).trainer.global_step == 15


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 7}, {"max_steps": 10}])
def test_longer_run_goes_on(limit: dict[str, int]) -> None:
    whole = program.run(new_directory(), checkpoint=NEVER)
    directory = new_directory()
    program.run(directory, checkpoint={"save_interval_steps": 1000}, **limit)
    assert program.run(directory, seed=2).final == whole.final


@pytest.mark.needs("lightning", "2.6")  # before, ModelPruning fails in its second epoch
@pytest.mark.filterwarnings("ignore:ModelPruning")
def test_what_is_not_exact_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pruning = callbacks.ModelPruning("l1_unstructured", amount=0.2)
    program.run(new_directory(), callbacks=(pruning,), checkpoint={"save_interval_steps": 2})
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "ModelPruning makes its pruning permanent" in told
    assert "head.weight" in told


class SetsUpEpochs(program.Model):
    def on_train_epoch_start(self) -> None:
        self.scale = 1 + self.current_epoch


@pytest.mark.parametrize(
    ("kind", "step", "is_told"), [(SetsUpEpochs, 7, True), (SetsUpEpochs, 5, False), (program.Model, 7, False)]
)
def test_a_resume_within_an_epoch_names_a_hook_that_is_not_called_again(
    kind: type[program.Model], step: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    for last in (step, step + 1):
        program.run(str(tmp_path), model=kind, max_steps=last)
    assert ("within epoch 1: SetsUpEpochs.on_train_epoch_start is called again when" in caplog.text) == is_told
    assert ("or in train_dataloader, if the workers of a loader read it" in caplog.text) == is_told
