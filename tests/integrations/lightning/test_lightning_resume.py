"""A run that is interrupted anywhere and resumed ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, callbacks
from tests.fixtures import StoredFiles
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import BATCH_SIZE, BATCHES, FEATURES, DrawsNumbers
from torch.utils.data import DataLoader

from holdfast.engine.storage import as_location
from holdfast.integrations.lightning import CheckpointCallback
from holdfast.integrations.lightning.replay import EpochReplay

NEVER = {"save_interval_steps": 1000, "save_at_end": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "validation within epochs": {"val_check_interval": 3},
    "max_steps": {"max_steps": 12, "max_epochs": -1},
    "accumulation": {"accumulate_grad_batches": 3},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
}


def interrupt(directory: str, step: int, **options: Any) -> None:
    """Train until a step, which is the only one that is saved."""
    program.interrupt(directory, step, checkpoint={"save_interval_steps": step}, **options)


def check(steps: Iterable[int], **options: Any) -> None:
    """Resumes a run from each of some steps alone, and compares everything with a whole run that has saved nothing."""
    whole = program.run(new_directory(), checkpoint=NEVER, **options)
    every_step = new_directory()
    assert program.run(every_step, checkpoint={"save_interval_steps": 1}, **options).final == whole.final
    for step in [step for step in steps if step < whole.trainer.global_step]:
        directory = new_directory()
        for path, content in StoredFiles(f"{every_step}/{step}").read().items():
            (as_location(directory) / str(step) / path).write_bytes(content)
        resumed = program.run(directory, seed=step + 10, checkpoint=NEVER, **options)
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final, f"resumed from step {step}"
        before = [event for event in whole.recorder.events if event[1] <= step]
        assert before + resumed.recorder.events == whole.recorder.events, f"resumed from step {step}"


LOADERS = ["plain", "shuffled", "stateful"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loader", LOADERS)
def test_resumed_from_any_step(loader: str, variant: str, every: bool) -> None:
    # Together, the loaders cover every step of every variant; the end of the first epoch is among the steps of each.
    steps = range(1, 100) if every else sorted({5, *range(1 + LOADERS.index(loader), 100, len(LOADERS))})
    check(steps, loader=loader, **VARIANTS[variant])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "loader",
    [
        *("generator", "stream", "stateful stream"),
        *("shuffled+generator", "shuffled+stateful", "stateful+plain"),  # beside a shorter one that begins again
    ],
)
def test_other_loaders(loader: str, every: bool) -> None:
    check([2, 4, 5, 7, 9, 10] if every else [2, 5, 9], loader=loader)


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
    whole = program.run(new_directory(), checkpoint=NEVER, callbacks=(make(),))
    for step in (2, 5, 6, 7, 8) if every else (2, 5, 7):
        directory = new_directory()
        interrupt(directory, step, callbacks=(make(),))
        resumed = program.run(directory, seed=2, checkpoint=NEVER, callbacks=(make(),))
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final, f"interrupted after step {step}"


class CountsSanityChecks(Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self.batches += trainer.sanity_checking


def test_a_resumed_run_has_no_sanity_check() -> None:
    """Its validation steps would change what was restored, such as a count of batches."""
    fresh = CountsSanityChecks()
    program.run(new_directory(), checkpoint=NEVER, callbacks=(fresh,))
    assert fresh.batches > 0
    for step in (2, 5, 7):
        directory, resumed = new_directory(), CountsSanityChecks()
        interrupt(directory, step)
        program.run(directory, seed=2, checkpoint=NEVER, callbacks=(resumed,))
        assert resumed.batches == 0, f"interrupted after step {step}"


def test_two_optimizers() -> None:
    class Adversaries(LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(FEATURES, 2), torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> None:
            for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
                optimizer.zero_grad()
                hidden = torch.nn.functional.dropout(self.one(batch[0]))
                self.manual_backward(sign * torch.nn.functional.mse_loss(self.other(hidden), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.one.parameters()), torch.optim.SGD(self.other.parameters(), 0.01)

    def fit(directory: str, seed: int, stop_after: int | None = None) -> Any:
        torch.manual_seed(seed)
        model = Adversaries()
        callback = CheckpointCallback(directory, save_interval_steps=3)
        recorder: Any = program.Recorder(stop_after=stop_after)
        recorder.on_train_epoch_end = lambda *_: None
        trainer = program.trainer(callback, recorder, max_epochs=3)
        trainer.fit(model, program.training_loader("shuffled"))
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        return str([model.state_dict(), optimizers]), callback.manager.all_steps()

    # The step counts both optimizers, so it jumps over multiples of the interval.
    whole, steps = fit(new_directory(), 1)
    assert steps == [4, 6, 10, 12, 16, 18, 22, 24, 28, 30]
    for step in (6, 10, 16, 20, 24):
        directory = new_directory()
        with pytest.raises(program.InterruptionError):
            fit(directory, 1, stop_after=step)
        assert fit(directory, 2)[0] == whole


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
        interrupt(directory, step)
        caplog.clear()
        program.run(directory, checkpoint=NEVER, max_steps=step + 1)
        (told,) = [one.getMessage() for one in caplog.records if "an earlier version of holdfast" in one.getMessage()]
        assert (
            "has state that is no longer restored: data loader attributes (0.loader.count); data loader generators "
            "(0.dataset.rng, 0.dataset.transform.rng); search results (lr)."
        ) in told


@pytest.mark.parametrize("loader", ["shuffled", "stateful stream"])
def test_float64(loader: str) -> None:
    check([2, 5, 8], loader=loader, precision="64-true")


class Rotated(torch.optim.Optimizer):
    """Keeps a rotation for each matrix, as SOAP does; it comes from an eigenvalue solver, in the order of Fortran."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.reshape(len(parameter), -1)
            state = self.state[parameter]
            if not state:
                state["factor"] = torch.zeros(len(gradient), len(gradient))
            state["factor"].lerp_(gradient @ gradient.T, 0.1)
            state["rotation"] = torch.linalg.eigh(state["factor"]).eigenvectors
            parameter.sub_((state["rotation"] @ (state["rotation"].T @ gradient)).sign().view_as(parameter), alpha=0.01)
        return loss


def test_an_optimizer_with_matrices_in_another_order() -> None:
    class Rotates(program.Model):
        def configure_optimizers(self) -> Any:
            return Rotated(self.parameters())

    def fit(directory: str) -> list[Any]:
        outcome = program.run(directory, model=Rotates, max_epochs=2)
        rotations = [state["rotation"] for state in outcome.trainer.optimizers[0].state.values()]
        return [str(outcome.model.state_dict()), [(str(one), one.stride()) for one in rotations]]

    whole, directory = fit(new_directory()), new_directory()
    program.interrupt(directory, 6, model=Rotates, max_epochs=2)
    assert fit(directory) == whole
    assert fit(directory) == whole  # as it was loaded


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss which is not available")
@pytest.mark.parametrize("schedule", ["step", "plateau of validation", "plateau"])
def test_schedules(schedule: str, every: bool) -> None:
    epochs = 2 if schedule == "plateau of validation" else 1
    steps = [1, 4, 5, 6, 10, 12] if every else [4, 5, 10]
    check(steps, schedule=schedule, check_val_every_n_epoch=epochs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"limit_train_batches": 3}, id="part of the data"),
        pytest.param({"reload_dataloaders_every_n_epochs": 1}, id="new loaders every epoch"),
        pytest.param({"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}, id="new loaders every other epoch"),
        pytest.param({"max_steps": 12}, id="max_steps and max_epochs"),
        pytest.param({"val_check_interval": 4, "check_val_every_n_epoch": None}, id="validation across epochs"),
        pytest.param({"limit_val_batches": 0}, id="no validation"),
        pytest.param({"gradient_clip_val": 0.1, "precision": "bf16-mixed"}, id="bf16"),
    ],
)
def test_trainer_options(options: dict[str, Any], every: bool) -> None:
    check([1, 3, 4, 5, 6, 8] if every else [3, 5, 8], **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_interruptions_in_a_row(variant: str, every: bool) -> None:
    options = VARIANTS[variant]
    whole = program.run(new_directory(), checkpoint=NEVER, **options)
    last = whole.trainer.global_step
    pairs = [(1, 2), (2, 5), (4, 5), (5, 6), (7, 9), (10, 11)]
    if not every:  # every pair with some variant
        pairs = pairs[list(VARIANTS).index(variant) % 2 :: 2]
    for first, second in [pair for pair in pairs if pair[1] < last]:
        directory = new_directory()
        interrupt(directory, first, **options)
        # The second save is not at a multiple of its interval only: it comes from a run that was resumed.
        recorder = program.interrupt(directory, second, seed=20, checkpoint={"save_interval_steps": 1}, **options)
        resumed = program.run(directory, seed=30, checkpoint=NEVER, **options)
        assert (recorder.first_step, resumed.recorder.first_step) == (first, second)
        assert resumed.final == whole.final, f"interrupted after steps {first} and {second}"


def test_early_stopping_ends_at_the_same_step() -> None:
    def stopping() -> tuple[Any, ...]:
        return (callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0),)

    whole = program.run(new_directory(), callbacks=stopping(), max_epochs=9, checkpoint=NEVER)
    assert whole.trainer.global_step == 15
    for step in (5, 7, 10, 13):
        directory = new_directory()
        interrupt(directory, step, callbacks=stopping(), max_epochs=9)
        resumed = program.run(directory, seed=2, callbacks=stopping(), max_epochs=9)
        assert resumed.final == whole.final
    again = program.run(directory, seed=3, callbacks=stopping(), max_epochs=9)
    assert again.trainer.global_step == 15
    assert again.recorder.first_step is None


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 7}, {"max_steps": 10}])
def test_longer_run_goes_on(limit: dict[str, int]) -> None:
    whole = program.run(new_directory(), checkpoint=NEVER)
    directory = new_directory()
    program.run(directory, checkpoint={"save_interval_steps": 1000}, **limit)
    assert program.run(directory, seed=2).final == whole.final


@pytest.mark.parametrize("loader", ["shuffled", "stateful"])
def test_signal_in_the_middle_of_a_validation(loader: str, every: bool) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    for number, variant in enumerate(VARIANTS.values(), start=LOADERS.index(loader)):
        if not every and number % 2:  # the other loader's
            continue
        options = {"loader": loader, **variant}
        whole = program.run(new_directory(), checkpoint=NEVER, **options)
        steps = sorted({event[1] for event in whole.recorder.events if event[0] == "validation"})
        for step in steps[:: 1 if every else 2]:
            directory = new_directory()
            recorder = program.Recorder(signal_in_validation_after=step)
            with pytest.raises(SystemExit) as caught:
                program.run(directory, recorder=recorder, **options)  # It saves every step.
            assert caught.value.code == 143
            resumed = program.run(directory, seed=2, **options)
            assert resumed.recorder.first_step < step
            assert resumed.final == whole.final
            # The validation is begun anew: its result is that of all its batches.
            assert recorder.events + resumed.recorder.events == whole.recorder.events
            manager = resumed.manager
            measured = next(event[2] for event in resumed.recorder.events if event[0] == "validation")
            assert manager.metrics(step)["val_loss"] == measured
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.needs("lightning", "2.6")  # before, ModelPruning fails in its second epoch
@pytest.mark.filterwarnings("ignore:ModelPruning")
def test_what_is_not_exact_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pruning = functools.partial(callbacks.ModelPruning, "l1_unstructured", amount=0.2)
    directory, recorder = new_directory(), program.Recorder()
    program.run(directory, recorder=recorder, callbacks=(pruning(),), checkpoint={"save_interval_steps": 2})
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


class ReadByWorkers(torch.utils.data.Dataset[Any]):
    epoch = 0

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        inputs = torch.linspace(index, self.epoch, FEATURES)
        return inputs, inputs.sum(0, keepdim=True)


class TellsWorkers(program.Model):
    """Tells the dataset its epoch, which its workers read."""

    def on_train_epoch_start(self) -> None:
        self.dataset.epoch = self.current_epoch

    def train_dataloader(self) -> Any:
        self.dataset = ReadByWorkers()
        self.dataset.epoch = self.current_epoch
        return DataLoader(self.dataset, BATCH_SIZE, num_workers=1)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_what_workers_read_is_set_with_their_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "loaders", lambda _: (None, program.validation_loader()))
    check([2, 7], model=TellsWorkers)
