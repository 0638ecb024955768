"""One suite for the callbacks of all training loops: when they save, keep, resume and stop, and what they refuse.

A driver knows how one kind of loop trains; every story runs with every driver, and where no state matters, with one of
each class of callback. What only one of them does has tests of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lightning.pytorch as lightning
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import pytest
import torch
from flax.training.train_state import TrainState
from tests.fixtures import StoredFiles
from tests.lightning_advice import ADVICE

import holdfast as hf
from holdfast.engine.checkpoint.save import Save
from holdfast.engine.manager import read_run_events
from holdfast.engine.storage import as_location
from holdfast.integrations.lightning import CheckpointCallback as LightningCallback
from holdfast.integrations.lightning import Preempted
from holdfast.recipes.self_play import Trainer

pytestmark = [
    pytest.mark.usefixtures("fits_are_processes"),
    pytest.mark.usefixtures("default_sigterm"),
    *ADVICE,
]

LOSSES = {1: 0.5, 2: 0.7, 3: 0.4, 4: 0.4, 5: 0.9, 6: 0.3, 7: 0.6, 8: 0.35, 9: 0.8, 10: 0.5}
EVERY_STEP: dict[str, Any] = {"save_interval_steps": 1}
NEVER: dict[str, Any] = {"save_interval_steps": 1000, "save_at_end": False}

Actions = Mapping[int, Callable[[], None]]
Bits = list[bytes]


@dataclass(frozen=True)
class Run:
    """How a run went: the updates that were done and the weights when it began, and the updates and all at its end."""

    first: int
    begun: Bits
    last: int
    final: Bits


def bits(arrays: Iterable[Any]) -> Bits:
    return [np.asarray(value).tobytes() for value in arrays]


@dataclass(frozen=True)
class LoopDriver:
    """A loop that the user writes: how it makes a state of a seed and updates it, what its weights and values are."""

    make: Callable[[int], Any]
    update: Callable[[Any], Any]
    weights: Callable[[Any], Iterable[Any]]
    values: Callable[[Any], Iterable[Any]]

    def train(
        self, directory: str | Path, last: int, *, seed: int = 1, during: Actions | None = None, **options: Any
    ) -> Run:
        """Trains to a step, from nothing but the directory: every object is new, and its values depend on the seed.

        What is to be done during some steps is done before they are reported.
        """
        with hf.CheckpointCallback(directory, **options) as checkpoint:
            state, first = checkpoint.restore_or_initialize(self.make(seed))
            begun, step = bits(self.weights(state)), first
            for step in range(first + 1, last + 1):
                state = self.update(state)
                (during or {}).get(step, lambda: None)()
                if checkpoint.on_step(step, state, metrics={"loss": LOSSES[step]}).should_stop:
                    break
        return Run(first, begun, step, bits(self.values(state)))


def of_arrays(make: Callable[[float], Any], sine: Callable[[Any], Any]) -> LoopDriver:
    """Descends with a momentum."""

    def update(state: Any) -> Any:
        momentum = state["momentum"] * 0.9 + sine(state["params"]["w"])
        return {"params": {"w": state["params"]["w"] - 0.1 * momentum}, "momentum": momentum}

    return LoopDriver(
        lambda seed: {"params": {"w": make(seed)}, "momentum": make(0)},
        update,
        lambda state: [state["params"]["w"]],
        lambda state: [state["params"]["w"], state["momentum"]],
    )


def of_flax(seed: int) -> Any:
    create: Any = TrainState.create
    return create(apply_fn=None, params={"w": jnp.full(3, seed, jnp.float32)}, tx=optax.adam(0.1))


def played(state: Trainer) -> Trainer:
    state.train_step()
    return state


def policies(state: Trainer) -> list[Any]:
    return [value for policy in state.learner.policies.values() for value in policy.state_dict().values()]


class Module(lightning.LightningModule):
    def __init__(self, seed: int, during: Actions) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), float(seed)))
        self.during = during
        self.first: int | None = None
        self.begun: Bits = []

    def on_train_start(self) -> None:
        self.first, self.begun = self.trainer.global_step, bits([self.w.detach().clone()])

    def training_step(self, batch: Any, index: int) -> Any:
        self.during.get(self.trainer.global_step + 1, lambda: None)()
        return (torch.sin(self.w) * batch[0]).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", LOSSES[self.trainer.global_step])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class LightningDriver:
    def train(
        self, directory: str | Path, last: int, *, seed: int = 1, during: Actions | None = None, **options: Any
    ) -> Run:
        module = Module(seed, during or {})
        trainer = lightning.Trainer(
            max_steps=last,
            val_check_interval=1,  # the metrics of validations are the ones that rank steps
            num_sanity_val_steps=0,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[LightningCallback(directory, **options)],
        )
        batches = torch.utils.data.TensorDataset(torch.arange(1.0, 5.0))
        loaders = torch.utils.data.DataLoader(batches), torch.utils.data.DataLoader(batches, batch_size=4)
        with contextlib.suppress(Preempted):
            trainer.fit(module, *loaders)
        final = bits([module.w.detach(), *trainer.optimizers[0].state[module.w].values()])
        step = trainer.global_step
        return Run(step if module.first is None else module.first, module.begun, step, final)


Driver = LoopDriver | LightningDriver
DRIVERS: dict[str, Driver] = {
    "numpy": of_arrays(lambda value: np.full(3, value, np.float32), np.sin),
    "torch": of_arrays(lambda value: torch.full((3,), float(value)), torch.sin),
    "flax": LoopDriver(
        of_flax,
        lambda state: state.apply_gradients(grads={"w": jnp.sin(state.params["w"])}),
        lambda state: jax.tree.leaves(state.params),
        jax.tree.leaves,
    ),
    "self_play": LoopDriver(
        lambda seed: Trainer(5, [4], games=2, seed=seed),
        played,
        policies,
        lambda state: [*policies(state), state.step],
    ),
    "lightning": LightningDriver(),
}


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]


@pytest.fixture(params=["numpy", "lightning"])
def either(request: pytest.FixtureRequest) -> Driver:
    """One driver of each class of callback, for what is decided before a state matters."""
    return DRIVERS[request.param]


def steps_in(directory: str | Path) -> list[int]:
    return hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(read_only=True)).all_steps()


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# When it saves and what it keeps

BEST = {"best_fn": "loss", "best_mode": "min"}


SAVED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "interval and end": ({"save_interval_steps": 3}, [3, 6, 9, 10]),
    "interval": ({"save_interval_steps": 3, "save_at_end": False}, [3, 6, 9]),
    "end that is saved already": ({"save_interval_steps": 5}, [5, 10]),
    "end": ({"save_interval_steps": None}, [10]),
    "time and newest": ({"save_interval_secs": 1e-6, "max_to_keep": 3}, [8, 9, 10]),
    "period": ({"save_interval_steps": 2, "max_to_keep": 1, "keep_period": 6}, [6, 10]),
    "chosen": ({"save_interval_steps": 1, "max_to_keep": 1, "keep_steps": [2, 5]}, [2, 5, 10]),
    "new bests": ({"save_on_best": True, **BEST, "save_at_end": False}, [1, 3, 6]),
    "two bests": ({"save_on_best": True, **BEST, "max_to_keep": 2, "save_at_end": False}, [3, 6]),
    "bests and newest": ({**EVERY_STEP, **BEST, "max_to_keep": 2, "keep_latest": 1}, [6, 8, 10]),
}


def saved_by(name: str, case: str) -> Any:
    """A case for a driver; the default run has every second one for drivers whose loop is that of numpy's."""
    swept = name in ("torch", "flax", "self_play") and (list(DRIVERS).index(name) + list(SAVED).index(case)) % 2
    return pytest.param(name, *SAVED[case], id=f"{name}-{case}", marks=pytest.mark.sweep if swept else ())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("driver", "options", "steps"), [saved_by(name, case) for name in DRIVERS for case in SAVED], indirect=["driver"]
)
def test_saved_and_kept_steps(driver: Driver, place: str, options: dict[str, Any], steps: list[int]) -> None:
    run = driver.train(place, 10, **options)
    assert (run.first, run.last) == (0, 10)
    assert steps_in(place) == steps
    assert hf.verify(place).ok
    for entry in hf.list_checkpoints(place):
        assert entry.metrics is not None
        assert entry.metrics["loss"] == pytest.approx(LOSSES[entry.step])


@pytest.mark.parametrize("options", [{"save_on_best": True, "save_at_end": False}, {**EVERY_STEP, "max_to_keep": 1}])
def test_a_misspelt_metric_is_told_at_the_first_report(
    either: Driver, place: str, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    either.train(place, 4, **options, best_fn="los", best_mode="min")
    told = [text for one in caplog.records if "without the metric" in (text := one.getMessage())]
    assert len(told) == 1
    assert "step 1 was reported without the metric los," in told[0]
    assert "did you mean loss?" in told[0]


# Resuming


@pytest.mark.one_in(2)
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_resumed_run_ends_with_the_bits_of_a_run_without_a_stop(driver: Driver, place: str, resume: str) -> None:
    whole = driver.train(f"{place}/whole", 7, **NEVER)
    first = driver.train(f"{place}/run", 3, save_interval_steps=2)
    assert steps_in(f"{place}/run") == [2, 3]
    again = driver.train(f"{place}/run", 7, seed=2, save_interval_steps=2, resume=resume)
    assert (first.first, again.first, again.last) == (0, 3, 7)
    assert again.final == whole.final
    assert steps_in(f"{place}/run") == [2, 3, 4, 6, 7]


def test_a_finished_run_has_nothing_to_do(driver: Driver, place: str) -> None:
    whole = driver.train(place, 4, **EVERY_STEP)
    again = driver.train(place, 4, seed=2, **EVERY_STEP)
    assert (again.first, again.last) == (4, 4)
    assert steps_in(place) == [1, 2, 3, 4]
    assert driver.train(place, 5, seed=2, **NEVER).first == whole.last


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("resume", "first"), [(3, 3), ("best", 5)])
def test_a_run_begins_from_a_step_that_is_named(
    driver: Driver, place: str, resume: Any, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is deleted by hand: a later step stays until the run saves it again."""
    options = {**EVERY_STEP, **BEST, "best_mode": "max", "save_at_end": False}
    whole = driver.train(f"{place}/whole", 7, **EVERY_STEP)
    driver.train(f"{place}/run", 7, during={first + 1: lambda: None}, **options)
    before = StoredFiles(f"{place}/run/7").read()["checkpoint.json"]
    caplog.clear()
    again = driver.train(f"{place}/run", 6, seed=2, resume=resume, **options)
    assert (again.first, again.last) == (first, 6)
    assert steps_in(f"{place}/run") == [1, 2, 3, 4, 5, 6, 7]
    assert StoredFiles(f"{place}/run/7").read()["checkpoint.json"] == before
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [text for text in told if f"went back to step {first}, and later steps are there" in text] == told[:1]
    assert driver.train(f"{place}/run", 7, seed=3, resume=6, **options).final == whole.final


def test_a_step_that_is_named_and_not_there(either: Driver, place: str) -> None:
    either.train(place, 2, **EVERY_STEP)
    with pytest.raises(hf.CheckpointNotFoundError, match=r"resume=9, but .* has no such step: it has the steps 1, 2\."):
        either.train(place, 3, resume=9)
    with pytest.raises(hf.CheckpointNotFoundError, match=r"resume='best', but .*: no step has the metric that ranks"):
        either.train(place, 3, resume="best", best_fn="other", best_mode="max")
    with pytest.raises(hf.CheckpointNotFoundError, match=r"resume=1, but .*: it has no checkpoint"):
        either.train(f"{place}/other", 3, resume=1)
    StoredFiles(f"{place}/1").write("checkpoint.json", b"{")
    with pytest.raises(hf.HoldfastError, match="1"):
        either.train(place, 3, resume=1)
    with pytest.raises(hf.errors.OptionError, match="resume='best' needs best_fn="):
        either.train(place, 3, resume="best")
    with pytest.raises(hf.errors.OptionError, match="resume=-1 must not be negative"):
        either.train(place, 3, resume=-1)
    with pytest.raises(hf.CheckpointNotFoundError, match="nothing at this path"):
        either.train(f"{place}/fresh", 1, init_from="/nowhere")
    assert steps_in(f"{place}/fresh") == []


def test_must_needs_a_checkpoint_and_never_an_empty_directory(either: Driver, tmp_path: Path) -> None:
    message = r"resume='must', but there is no checkpoint in .*checkpoints.*auto"
    place = tmp_path / "checkpoints"
    with pytest.raises(hf.CheckpointNotFoundError, match=message):
        either.train(place, 1, resume="must")
    assert not place.exists()
    assert either.train(place, 2, resume="never", **EVERY_STEP).first == 0
    message = r"resume='never', but .* holds 2 checkpoint\(s\), the newest of step 2; choose another directory"
    with pytest.raises(hf.CheckpointExistsError, match=message):
        either.train(place, 3, resume="never")
    for step in (1, 2):
        StoredFiles(str(place)).write(f"{step}/checkpoint.json", b"{")
    with pytest.raises(hf.CheckpointExistsError, match=message):
        either.train(place, 3, resume="never")
    for resume in ("auto", "must"):
        with pytest.raises(hf.errors.NoWholeCheckpointError, match="step 2"):
            either.train(place, 3, resume=resume)


@pytest.mark.parametrize("damaged", ["record", "data"])
def test_a_damaged_newest_step_is_passed_over_loudly(
    driver: Driver, place: str, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = driver.train(place, 4, **EVERY_STEP)
    stored = StoredFiles(place)
    for path in stored.read():
        if path.startswith("4/") and path.endswith("/checkpoint.json") == (damaged == "record"):
            stored.write(path, b"")
    again = driver.train(place, 4, seed=2, **EVERY_STEP)
    assert again.first == 3
    assert again.final == whole.final
    assert hf.verify(place).ok
    assert any("step 4 is damaged" in line for line in caplog.messages)


# Preemption


@pytest.mark.parametrize("options", [NEVER, EVERY_STEP], ids=["nothing due", "due anyway"])
def test_sigterm_saves_the_step_and_stops(driver: Driver, place: str, options: dict[str, Any]) -> None:
    whole = driver.train(f"{place}/whole", 7, **NEVER)
    stopped = driver.train(f"{place}/run", 7, during={3: preempt}, witness_steps_after_signal=0, **options)
    assert stopped.last == 3
    assert steps_in(f"{place}/run") == ([3] if options is NEVER else [1, 2, 3])
    if options is NEVER:
        assert [entry.reason for entry in hf.list_checkpoints(f"{place}/run")] == ["preempted"]
    again = driver.train(f"{place}/run", 7, seed=2, **NEVER)
    assert again.first == 3
    assert again.final == whole.final


# The weights of another run


def test_weights_of_another_run(driver: Driver, place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    driver.train(f"{place}/other", 3, seed=5)
    other = driver.train(f"{place}/other", 4, seed=1, **NEVER)
    run = driver.train(f"{place}/run", 1, init_from=f"{place}/other")
    assert (run.first, run.begun) == (0, other.begun)
    assert len([line for line in caplog.messages if line.startswith("took the weights from ")]) == 1

    again = driver.train(f"{place}/run", 2, seed=6, init_from="/nowhere")
    assert again.first == 1
    assert again.begun != other.begun
    assert "init_from=/nowhere is ignored, as the run resumes" in caplog.messages


# Other runs, and failures


def test_a_second_live_run_is_refused(tmp_path: Path) -> None:
    begins = "import sys, holdfast as hf; manager = hf.CheckpointManager(sys.argv[1]); manager.acquire()"
    command = [sys.executable, "-c", f"{begins}; print('owned', flush=True); sys.stdin.read()", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "owned\n"
        owner = rf"another run is writing to this directory \(process {other.pid}"
        for name in ("numpy", "lightning"):
            with pytest.raises(hf.errors.OwnershipError, match=owner) as refused:
                DRIVERS[name].train(tmp_path, 1)
            assert "Traceback" not in "".join(traceback.format_exception(refused.value)).partition("\n")[2]
    assert read_run_events(as_location(tmp_path))[0]["event"] == "started"


def test_a_save_that_fails_in_the_background_is_raised(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Save.write

    def fails(save: Save, *rest: Any) -> Any:
        if save._location.name == "3":
            raise hf.errors.StorageFullError("no space left for step 3")
        return write(save, *rest)

    monkeypatch.setattr(Save, "write", fails)
    with pytest.raises(hf.SaveFailedError, match="no space left for step 3"):
        driver.train(tmp_path, 5, **EVERY_STEP)
    assert steps_in(tmp_path) == [1, 2, 4]


def test_an_exception_of_the_loop_lets_the_save_under_way_commit(driver: Driver, place: str) -> None:
    class LoopError(Exception):
        pass

    def fail() -> None:
        raise LoopError

    with pytest.raises(LoopError):
        driver.train(place, 5, during={4: fail}, save_interval_steps=2)
    assert steps_in(place) == [2]


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "alway"}, "resume='alway'.*'auto', 'must', 'never'"),
        ({"resume": "nevr"}, "did you mean 'never'"),
        ({"save_on_best": True}, "best_fn"),
        ({"partial": "some"}, "partial='some' must be \"initialize\" or None"),
        ({"on_inexact": "stop"}, "on_inexact='stop' is not one of 'warn', 'raise', 'ignore'"),
        ({"replicated": "data"}, "replicated='data' must name extras"),
        ({"hyperparameters": "mine"}, "hyperparameters='mine' must be 'saved' or 'program'"),
        ({"barrier_timeout_secs": "soon"}, "barrier_timeout_secs='soon'"),
    ],
)
@pytest.mark.parametrize("callback", [hf.CheckpointCallback, LightningCallback], ids=["loop", "lightning"])
def test_options_that_make_no_sense_are_refused(
    callback: Any, place: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        callback(place, **options)
