"""A small Lightning program, that of the sweep: run by the tests in their own process, and in processes of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
from typing import Any

import lightning.pytorch as lightning
import torch
from tests.endings import run_to_end
from tests.sweep.lightning_programs import (
    BATCH_SIZE,
    BATCHES,
    Net,
    SizedStatefulLoader,
    StatefulLoader,
    Stream,
    samples,
)
from torch.utils.data import DataLoader

from holdfast.integrations.lightning import CheckpointCallback

torch.set_num_threads(1)  # on these sizes more threads only wait for each other

_count = itertools.count()

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
NEVER: dict[str, Any] = {"save_interval_steps": 1000, "save_at_end": False}
BY_LOSS: dict[str, Any] = {"best_fn": "val_loss", "best_mode": "min", "save_interval_steps": 5}


def new_directory() -> str:
    """Return the name of a directory that does not exist yet, in memory, where a save takes milliseconds."""
    return f"memory://lightning-tests/{next(_count)}"


class Model(Net):
    def __init__(self, schedule: str = "epoch", **facts: Any) -> None:
        super().__init__(schedule)
        self.save_hyperparameters()

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch))


class Wide(torch.optim.Optimizer):
    """Keeps sums of float64 and counts of int64 for parameters of float32, and uses all their digits."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()  # torch initializes the states of FSDP2 by a step
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            if not state:
                state |= {"sum": torch.zeros_like(parameter, dtype=torch.float64), "count": torch.tensor(1 << 25)}
            state["sum"] += parameter.grad.double() / 3
            state["count"] += 1
            parameter -= (self.param_groups[0]["lr"] * state["sum"] / (state["count"] % 100)).to(parameter.dtype)
        return loss


def training_loader(kind: str) -> Any:
    if "+" in kind:
        short = samples(2 * BATCH_SIZE, seed=3)
        parts = [training_loader(part) for part in kind.split("+")]
        return {**dict(zip("abc", parts, strict=False)), "short": DataLoader(short, BATCH_SIZE, shuffle=True)}
    if kind.startswith("stateful"):
        return SizedStatefulLoader() if kind == "stateful" else StatefulLoader()
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH_SIZE)
    size = BATCH_SIZE // 2 if kind == "half batches" else BATCH_SIZE
    generator = torch.Generator().manual_seed(7) if kind == "generator" else None
    return DataLoader(samples(BATCHES * BATCH_SIZE, seed=1), size, shuffle=kind != "plain", generator=generator)


def validation_loader() -> Any:
    return DataLoader(samples(2 * BATCH_SIZE, seed=2), BATCH_SIZE)


class InterruptionError(RuntimeError):
    """What ends a run in the tests' own process."""


class Recorder(lightning.Callback):
    """Notes what happens when, and interrupts the run before the batch that follows a step."""

    __untracked__ = ("events", "first_step", "signal_in_validation_after")

    def __init__(
        self,
        stop_after: int | None = None,
        signal_after: int | None = None,
        signal_in_validation_after: int | None = None,
        kill_after: int | None = None,
    ) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.stop_after, self.signal_after, self.kill_after = stop_after, signal_after, kill_after
        self.signal_in_validation_after = signal_in_validation_after
        self.first_step: int | None = None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.first_step is None:
            self.first_step = trainer.global_step
        if self.stop_after == trainer.global_step:
            raise InterruptionError
        if self.kill_after == trainer.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.signal_after == trainer.global_step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sanity_check_start(self, *args: Any) -> None:
        self.events.append(("sanity check", 0))

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, index: int, *args: Any) -> None:
        if self.signal_in_validation_after == trainer.global_step and not trainer.sanity_checking and index == 0:
            self.signal_in_validation_after = None
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._note("validation", trainer, "val_loss", "val_error")

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._note("epoch", trainer, "train_loss_epoch", "train_error")

    def _note(self, what: str, trainer: Any, *metrics: str) -> None:
        values = [float(trainer.callback_metrics[name]) for name in metrics]
        self.events.append((what, trainer.global_step, *values))


class Signal(lightning.Callback):
    """Sends a signal in the first batch of a hook after a step, and counts the batches of the hook."""

    def __init__(self, number: int = signal.SIGTERM, *, after: int = 0, hook: str = "on_train_batch_start") -> None:
        self.number, self.after, self.batches = number, after, 0
        self.is_sent = False
        setattr(self, hook, self.send)

    def send(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        if trainer.global_step == self.after and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.number)


@dataclasses.dataclass
class Outcome:
    trainer: Any
    model: Any
    recorder: Recorder

    @property
    def manager(self) -> Any:
        return self.trainer.checkpoint_callback.manager

    @property
    def measured(self) -> dict[int, float]:
        """The losses of validations by their steps."""
        return {event[1]: event[2] for event in self.recorder.events if event[0] == "validation"}

    @property
    def best(self) -> int:
        """The step with the least loss of its validation."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def final(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer state and schedule, to be compared bit by bit."""
        return {
            "step": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
            "model": plain(self.model.state_dict()),
            "optimizer": plain(self.trainer.optimizers[0].state_dict()),
            "schedule": plain(self.trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        }


def run(
    directory: str,
    *,
    loader: Any = "shuffled",
    seed: Any = 1,
    schedule: Any = "epoch",
    facts: Any = None,
    model: Any = None,
    callbacks: Any = (),
    checkpoint: Any = None,
    recorder: Any = None,
    package: Any = lightning,
    ckpt_path: Any = None,
    **trainer_options: Any,
) -> Outcome:
    """Trains from nothing but the directory: every object is new, and the seed is another one after a restart."""
    torch.manual_seed(seed)
    module = Model(schedule, **(facts or {})) if model is None else model()
    recorder = recorder or Recorder()
    callback = CheckpointCallback(directory, **{"save_interval_steps": 1, **(checkpoint or {})})
    used = trainer(callback, recorder, *callbacks, package=package, **{"max_epochs": 3, **trainer_options})
    used.fit(module, *loaders(loader), ckpt_path=ckpt_path)
    return Outcome(used, module, recorder)


def trainer(*callbacks: Any, package: Any = lightning, **options: Any) -> Any:
    """Return a trainer that says and shows nothing."""
    return package.Trainer(callbacks=[*callbacks], **{**QUIET, **options})


def loaders(kind: str = "shuffled") -> tuple[Any, Any]:
    return training_loader(kind), validation_loader()


def interrupt(directory: str, step: int, **options: Any) -> Recorder:
    """Train until the batch after a step fails; return what was noted until then."""
    recorder = Recorder(stop_after=step)
    try:
        run(directory, recorder=recorder, **options)
    except InterruptionError:
        return recorder
    raise AssertionError(f"the run has not come to step {step}")


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return getattr(value, "full_tensor", lambda: value)().tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def main(directory: str, result: str, options: dict[str, Any]) -> None:
    recorder = Recorder(**{name: options.pop(name) for name in list(options) if name.endswith("_after")})
    outcome = run(directory, recorder=recorder, **options)
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"final": outcome.final, "first_step": recorder.first_step, "events": recorder.events}, file)


def serve(directory: str, result: str, options: dict[str, Any]) -> int:
    """Runs the program in a process of its own; returns its status."""
    process = os.fork()
    if process == 0:
        run_to_end(main, directory, result, options)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
