"""Lightning programs that are interrupted, and what each of them has to equal afterwards."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch

from holdfast.integrations.lightning import CheckpointCallback

from . import cases
from .cases import NEVER, Case, InterruptionError, bits, first_difference, new_directory, run_cases, seed_all
from .lightning_programs import AVERAGES, COMMON, FINETUNING, LOADERS, SETUPS, VALIDATION_LOADERS, validation_loader

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 3,
}
_TALKATIVE = tuple(
    f"{name}{part}" for name in ("lightning.pytorch", "pytorch_lightning") for part in ("", ".utilities.rank_zero")
)


def be_quiet() -> None:
    """Silence what Lightning says of every program."""
    cases.be_quiet("lightning")
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class Interruption:
    """What happens when.

    Attributes:
        kind: ``error``, ``signal``, ``signal after batch``, ``signal before validation``, ``signal in validation``,
            ``signal at epoch end`` or ``kill``.
        step: After how many steps.
        batch: The batch of a validation.
    """

    kind: str
    step: int
    batch: int = 0


class Recorder(lightning.Callback):
    """Notes what happens when, and interrupts the run."""

    def __init__(self) -> None:
        self.interruption: Interruption | None = None
        self.events: dict[tuple[str, int], Any] = {}
        self.steps: list[int] = []
        self.validations: list[int] = []
        self.raw: Any = None

    def _interrupt(self, kind: str, trainer: Any, batch: int = 0) -> None:
        """Interrupt the run where that is to happen now."""
        if self.interruption == Interruption(kind, trainer.global_step, batch):
            self.interruption = None
            if kind == "error":
                raise InterruptionError
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.steps.append(trainer.global_step)
        for kind in ("error", "kill", "signal"):
            self._interrupt(kind, trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._interrupt("signal before validation", trainer)

    def after_batch(self, trainer: Any) -> None:
        """Be called by the module's own hook, after those of all callbacks."""
        self._interrupt("signal after batch", trainer)

    def during_validation(self, trainer: Any, index: int) -> None:
        """Be called by the module, as a hook would make the program another one."""
        if not trainer.sanity_checking:
            self._interrupt("signal in validation", trainer, index)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)
            self._note("validation", trainer, "val_loss", "val_error")

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._note("epoch", trainer, "train_loss_epoch", "train_error")
        self._interrupt("signal at epoch end", trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.raw = bits(module.state_dict())  # some callbacks put an average in its place

    def _note(self, what: str, trainer: Any, *names: str) -> None:
        self.events[what, trainer.global_step] = [float(trainer.callback_metrics[name]) for name in names]


class Program:
    """The objects of one program: a module, data loaders and a trainer."""

    def __init__(
        self, directory: str, setup: str, loader: str, *, seed: int = 1, every: int = NEVER, **limits: int
    ) -> None:
        seed_all(seed)
        self.directory, self.loader, self.every = directory, loader, every
        self.setup = SETUPS[setup]
        self.module = self.setup.model()
        self.recorder = Recorder()
        self.drawn: list[Any] | None = None
        self.training, self.validation = LOADERS[loader](), validation_loader(**self.setup.validation)
        self.trainer = self.new_trainer(**limits)

    def new_trainer(self, **limits: int) -> Any:
        """Return another trainer, with callbacks of its own."""
        # Programs after the first stand for processes of their own, which know of no run before.
        resume: Any = "must" if CheckpointCallback(self.directory).manager.all_steps() else "auto"
        checkpoint = CheckpointCallback(self.directory, save_interval_steps=self.every, resume=resume)
        return lightning.Trainer(
            callbacks=[self.recorder, checkpoint, *self.setup.callbacks()], **{**QUIET, **self.setup.trainer, **limits}
        )

    def fit(self, interruption: Interruption | None = None) -> int | None:
        """Train; return the status that the process would end with where it was interrupted, or None."""
        self.recorder.interruption = interruption
        if multiprocessing.active_children():
            # Iterators of interrupted runs wait for the garbage collector. In a process that is forked from this one,
            # it would have them end workers that are not that process's own.
            gc.collect()
        try:
            self.trainer.fit(self.module, self.training, self.validation)
        except InterruptionError:
            return 1
        except SystemExit as error:
            return int(str(error.code))
        self.drawn = [torch.rand(2).tolist(), np.random.rand(), random.random()]  # as what follows a run would draw
        return None

    def final(self) -> dict[str, Any]:
        """Return everything that has to be equal, as values to compare."""
        trainer = self.trainer
        averages = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
        return {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "module": bits(self.module.state_dict()),
            "raw module": self.recorder.raw,
            "trained": {name: value.requires_grad for name, value in self.module.named_parameters()},
            "modes": {name: part.training for name, part in self.module.named_modules()},
            "optimizers": [bits(optimizer.state_dict()) for optimizer in trainer.optimizers],
            "schedules": [bits(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
            "drawn after it": self.drawn,
            "averages": [bits(average.state_dict()) for average in averages if average is not None],
        }


# ---- cases

_SPECIAL = AVERAGES | FINETUNING | VALIDATION_LOADERS
_OTHERS = [name for name in LOADERS if name not in ("shuffled", "stateful")]
# Refuses data without a length, and adds an epoch to those of the trainer, at every start.
_PLANS_AHEAD = "StochasticWeightAveraging"


def groups() -> list[tuple[str, str]]:
    """Return pairs of a data loader and a set-up, each with its own uninterrupted run.

    Every set-up comes with two to four loaders; together the common ones go through all loaders several times.
    """
    found = []
    turns = itertools.cycle(_OTHERS)
    for setup in COMMON:
        found += [(loader, setup) for loader in ("shuffled", "stateful", next(turns), next(turns))]
    found += [("persistent", setup) for setup in ("default", "validation within epochs", "accumulation")]
    for setup in _SPECIAL:
        other = next(turns)
        while setup == _PLANS_AHEAD and other == "stream":
            other = next(turns)
        found += [(loader, setup) for loader in ("shuffled", other)]
    # The data of that loader last longer than the epochs of that set-up, of which a warning says that it is not exact.
    return [pair for pair in dict.fromkeys(found) if pair != ("stateful", "part of the data")]


def run_group(loader: str, setup: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of one loader and set-up whose names contain one of ``only``."""
    whole = Program(new_directory(), setup, loader)
    if whole.fit() is not None:
        raise RuntimeError(f"{loader}, {setup}: the uninterrupted run ended early")
    number = groups().index((loader, setup)) if (loader, setup) in groups() else 0
    cases = dict(_cases(whole, loader, setup, number))
    yield from run_cases(f"lightning/{loader}/{setup}", cases, only, SETUPS[setup].refused)


def _cases(whole: Program, loader: str, setup: str, number: int) -> Iterator[tuple[str, Any]]:
    last, validations = whole.trainer.global_step, whole.recorder.validations
    epoch_end = min(step for what, step in whole.recorder.events if what == "epoch")
    begun = sorted({*whole.recorder.steps} - {0})  # two optimizers count by two

    def near(step: int) -> int:
        return max((each for each in begun if each <= step), default=begun[0])

    within = near(1 + number % max(1, epoch_end - 1))

    def interrupted(*interruptions: Interruption, every: int = NEVER, again: bool = False) -> Any:
        def run() -> str | None:
            programs: list[Program] = []
            directory = new_directory()
            for turn, interruption in enumerate([*interruptions, None]):
                if not again or not programs:
                    programs.append(Program(directory, setup, loader, seed=1 + turn, every=every))
                ended = programs[-1].fit(interruption) is not None
                if ended != (interruption is not None):
                    raise RuntimeError(f"{interruption} did not happen" if interruption else "the resumed run ended")
            return _compare(whole, programs)

        return run

    def one(kind: str, step: int, batch: int = 0, **options: Any) -> Any:
        return interrupted(Interruption(kind, step, batch), **options)

    for step in sorted({within, near(epoch_end), near(epoch_end + within)}):
        yield f"error after step {step}", one("error", step, every=step)
    repeated = near(5 + number % 4)
    yield f"steps 1 to {repeated} in part again", one("error", repeated, every=2)
    signalled = near(1 + (3 * number) % (last - 2))  # not the last step: hooks of the end do not run after it
    yield f"SIGTERM in step {signalled + 1}", one("signal", signalled)
    yield f"SIGTERM at the end of batch {signalled}", one("signal after batch", signalled)
    yield (
        f"SIGTERM in steps {within + 1} and {near(epoch_end + 2) + 1}",
        interrupted(Interruption("signal", within), Interruption("signal", near(epoch_end + 2))),
    )
    yield f"SIGTERM at the end of the epoch, step {epoch_end}", one("signal at epoch end", epoch_end)
    # The epoch that StochasticWeightAveraging adds has no step; one that resumes before it has other learning rates.
    last_one = [] if setup == _PLANS_AHEAD else validations[-1:]
    for index, step in enumerate(sorted({*validations[:1], *last_one})):
        in_validation = one("signal in validation", step, (number + index) % 2, every=1)  # what is not saved is lost
        yield f"SIGTERM in the validation of step {step}", in_validation
    if validations:
        step = validations[number % len(validations)]
        yield f"SIGTERM before the validation of step {step}", one("signal before validation", step)
    if number % 8 == 0:  # each takes a process
        yield f"killed after step {repeated}", lambda: _killed(whole, loader, setup, Interruption("kill", repeated))
    yield "finished, and started again", lambda: _finished(whole, loader, setup)
    if setup == _PLANS_AHEAD:
        return
    yield f"error after step {within}, the same objects", one("error", within, every=within, again=True)
    kinds = ("new objects", "a new trainer", "the same trainer")
    for kind in kinds if loader == "shuffled" else kinds[number % 3 :][:1]:
        yield f"longer with {kind}", lambda kind=kind: _longer(whole, loader, setup, kind)


def _compare(whole: Program, programs: list[Program], names: tuple[str, ...] = ()) -> str | None:
    found, expected = programs[-1].final(), whole.final()
    if found["raw module"] is None:  # interrupted at the end of the last step
        found["raw module"] = expected["raw module"]
    if not found["schedules"]:  # StochasticWeightAveraging takes them away where none of its own is due any more
        found["schedules"] = expected["schedules"]
    if names:
        found, expected = ({name: tree[name] for name in names} for tree in (found, expected))
    if (difference := first_difference(found, expected)) is not None or names:
        return difference
    events = {key: value for program in programs for key, value in program.recorder.events.items()}
    return first_difference(
        {str(key): events.get(key) for key in whole.recorder.events},
        {str(key): value for key, value in whole.recorder.events.items()},
        "events",
    )


def _killed(whole: Program, loader: str, setup: str, interruption: Interruption) -> str | None:
    directory = tempfile.mkdtemp(prefix="sweep-")
    try:
        process = multiprocessing.get_context("forkserver").Process(
            target=_die, args=(directory, setup, loader, interruption)
        )
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"the process was to be killed, and ended with {process.exitcode}")
        resumed = Program(directory, setup, loader, seed=2)
        resumed.fit()
        events = resumed.recorder.events  # those of the process that was killed are lost
        return _compare(whole, [resumed], tuple(whole.final())) or first_difference(
            list(events.values()), [whole.recorder.events.get(key) for key in events], "events"
        )
    finally:
        shutil.rmtree(directory)


def _die(directory: str, setup: str, loader: str, interruption: Interruption) -> None:
    be_quiet()
    Program(directory, setup, loader, every=2).fit(interruption)


def _finished(whole: Program, loader: str, setup: str) -> str | None:
    directory = new_directory()
    Program(directory, setup, loader).fit()
    again = Program(directory, setup, loader, seed=2)
    again.fit()
    if again.recorder.events:
        return f"events: expected none, found {sorted(again.recorder.events)}"
    return _compare(whole, [again], ("step", "module", "trained", "averages", "drawn after it"))


def _longer(whole: Program, loader: str, setup: str, kind: str) -> str | None:
    by_steps = "max_steps" in SETUPS[setup].trainer
    short = {"max_steps": 7} if by_steps else {"max_epochs": 2}
    directory = new_directory()
    first = Program(directory, setup, loader, **short)
    limits = whole.trainer.fit_loop.max_epochs, whole.trainer.fit_loop.epoch_loop.max_steps
    first.fit()
    if kind == "new objects":
        second = Program(directory, setup, loader, seed=2)
    else:
        second = first
        if kind == "a new trainer":
            second.trainer = second.new_trainer()
        elif by_steps:
            second.trainer.fit_loop.epoch_loop.max_steps = limits[1]
        else:
            second.trainer.fit_loop.max_epochs = limits[0]
    second.fit()
    return _compare(whole, [first, second])
