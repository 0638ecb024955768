"""The callback in a worker of Ray Train, with a stand-in for Ray that has only what the callback asks it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import OptionError, StateError
from holdfast.integrations.ray import CheckpointCallback, PreemptedError, RemoteComponent, run_directory

CONTEXT = "ray.train.v2._internal.execution.context"


class Ray:
    """A worker of a run in ``storage``; the calls to its actor run in the main thread, once ``serve`` is called."""

    def __init__(self, storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage, self.kind, self.workers = storage, "local", 1
        self.reports: list[tuple[dict[str, Any], str | None]] = []
        self.known: str | None = None
        self.drained: object = None
        self._calls: list[tuple[Callable[[], None], threading.Event]] = []
        modules = {
            "ray": types.SimpleNamespace(get_runtime_context=lambda: self, get=self._get),
            "ray.train": types.SimpleNamespace(
                get_context=lambda: self,
                get_checkpoint=lambda: self.known and types.SimpleNamespace(path=self.known),
                Checkpoint=lambda path, filesystem: path,
                CheckpointUploadMode=types.SimpleNamespace(NO_UPLOAD="no upload"),
                report=self._report,
            ),
            CONTEXT: types.SimpleNamespace(get_train_context=lambda: self),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def get_storage(self) -> Any:
        return types.SimpleNamespace(
            experiment_fs_path=str(self.storage), storage_filesystem=types.SimpleNamespace(type_name=self.kind)
        )

    def get_world_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return self.workers

    @property
    def preemption_context(self) -> Any:
        return types.SimpleNamespace(preemption_info=self.drained)

    @property
    def current_actor(self) -> Any:
        return types.SimpleNamespace(execute=types.SimpleNamespace(remote=self._remote))

    def _report(self, metrics: dict[str, Any], checkpoint: str | None, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "no upload"
        assert checkpoint is None or hf.load(checkpoint) is not None, "it is durable"
        self.reports.append((metrics, checkpoint and Path(checkpoint).name))
        self.known = checkpoint or self.known

    def _remote(self, function: Callable[..., None], *args: Any) -> threading.Event:
        done = threading.Event()
        self._calls.append((lambda: function(*args), done))
        return done

    def _get(self, done: threading.Event, timeout: float) -> None:
        assert done.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the worker, whose main thread handles it before it serves the next call."""
        os.kill(os.getpid(), signal.SIGTERM)
        self._get(self._remote(lambda: None), 20)

    def run(self, loop: Callable[[], None]) -> BaseException | None:
        """Run a loop in a thread, as a worker does, and the calls to the actor in this one; return its error."""
        failed: list[BaseException] = []

        def work() -> None:
            try:
                loop()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            while self._calls:
                call, done = self._calls.pop()
                call()
                done.set()
        return failed[0] if failed else None


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    before = signal.getsignal(signal.SIGTERM)
    yield Ray(tmp_path / "run", monkeypatch)
    assert signal.getsignal(signal.SIGTERM) is before


def loop(last: int, at: int = 0, event: Callable[[], None] = lambda: None, **options: Any) -> Callable[[], None]:
    """Return a loop that doubles a number and adds one; ``event`` happens at step ``at``."""

    def train() -> None:
        with CheckpointCallback(run_directory(), save_interval_steps=2, **options) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(1)})
            for step in range(start + 1, last + 1):
                state = {"w": 2 * state["w"] + 1}
                if step == at:
                    event()
                if checkpoint.on_step(step, state, metrics={"loss": float(step)}).should_stop:
                    break

    return train


def reported(ray: Ray) -> list[tuple[int, str | None]]:
    assert all(metrics.get("loss", metrics["step"]) == metrics["step"] for metrics, _ in ray.reports)
    return [(metrics["step"], name) for metrics, name in ray.reports]


def value(ray: Ray) -> float:
    return float(hf.load(ray.storage / "checkpoints", item="state")["w"][0])


def test_every_saved_step_is_reported_once_where_it_lies(ray: Ray) -> None:
    assert ray.run(loop(5)) is None
    assert reported(ray) == [(2, "2"), (4, "4"), (5, "5")]
    assert value(ray) == 2**5 - 1


def test_a_step_that_was_saved_but_not_reported_is_reported_after_the_resume(ray: Ray) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert isinstance(ray.run(loop(5, at=5, event=fail)), ZeroDivisionError)
    assert reported(ray) == [(2, "2")]
    assert ray.run(loop(5)) is None
    assert reported(ray) == [(2, "2"), (4, "4"), (5, "5")]
    assert ray.run(loop(5)) is None
    assert reported(ray)[3:] == []


def test_the_callback_deletes_only_what_ray_has_not_registered(ray: Ray) -> None:
    """Ray refuses to start a run again whose registered checkpoints are gone."""
    assert ray.run(loop(6, max_to_keep=1)) is None
    assert reported(ray) == [(2, None), (4, None), (6, None)]
    assert [one.step for one in hf.list_checkpoints(ray.storage / "checkpoints")] == [6]


def test_sigterm_reaches_a_loop_beside_the_main_thread_and_ray_starts_it_again(
    ray: Ray, caplog: pytest.LogCaptureFixture
) -> None:
    error = ray.run(loop(5, at=3, event=ray.terminate))
    assert isinstance(error, PreemptedError)
    assert "step 3 is saved" in str(error)
    assert reported(ray) == [(2, "2"), (3, "3")]
    assert ray.run(loop(5)) is None
    assert reported(ray)[2:] == [(4, "4"), (5, "5")]
    assert value(ray) == 2**5 - 1
    assert "main thread" not in caplog.text


def test_a_drained_node_has_the_step_saved_and_the_run_goes_on(ray: Ray) -> None:
    """Ray ends the workers itself, and does not count it as a failure; a return would be the end of the run."""
    assert ray.run(loop(6, at=3, event=lambda: setattr(ray, "drained", object()))) is None
    assert reported(ray) == [(2, "2"), (3, "3"), (4, "4"), (6, "6")]


def test_an_actor_that_cannot_be_reached_is_reported(
    ray: Ray, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ConnectionError("no such actor")

    monkeypatch.setattr(ray, "_remote", fail)
    assert ray.run(loop(2)) is None
    assert "SIGTERM is not handled" in caplog.text
    assert "no such actor" in caplog.text


def test_a_directory_without_steps_takes_the_checkpoint_that_ray_has(ray: Ray, tmp_path: Path) -> None:
    assert ray.run(loop(3)) is None
    ray.storage = tmp_path / "another"
    ray.reports.clear()
    assert ray.run(loop(5)) is None
    assert reported(ray) == [(3, "3"), (4, "4"), (5, "5")]
    assert value(ray) == 2**5 - 1


def test_workers_that_are_not_connected_are_refused(ray: Ray) -> None:
    ray.workers = 2
    error = ray.run(loop(2))
    assert isinstance(error, StateError)
    assert "JaxTrainer on CPUs, call jax.distributed.initialize()" in str(error)


def test_a_storage_without_a_url_is_refused(ray: Ray) -> None:
    ray.kind = "py::fsspec"
    assert isinstance(ray.run(loop(2)), OptionError)


def test_outside_of_a_worker_it_is_the_ordinary_callback(tmp_path: Path) -> None:
    with CheckpointCallback(tmp_path) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": 0})
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoint.on_step(start + 1, state).should_stop
    with pytest.raises(StateError, match="outside"):
        run_directory()


class Runner:
    """An object for an actor, which here is the object itself."""

    def __init__(self, seed: int) -> None:
        self.total = seed

    def get_state(self, inference_only: bool = False) -> dict[str, Any]:
        return {"total": self.total, **({"only": True} if inference_only else {})}

    def set_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Actors:
    """``ray.remote``, ``ray.get`` and handles, whose calls happen at once."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            self.options.append(given)
            return types.SimpleNamespace(remote=lambda *args, **kwargs: handle(kind(*args, **kwargs)))

        def handle(made: Any) -> Any:
            calls = {name: types.SimpleNamespace(remote=getattr(made, name)) for name in ("get_state", "set_state")}
            return types.SimpleNamespace(object=made, **calls)

        return types.SimpleNamespace(options=options)

    def get(self, result: Any) -> Any:
        return result


class Team(hf.components.Checkpointable):
    def __init__(self) -> None:
        self.runners = [RemoteComponent(Runner, seed, options={"num_cpus": 1}) for seed in range(3)]

    def totals(self) -> list[int]:
        return [one.actor.object.total for one in self.runners]


def test_components_are_saved_restored_and_made_in_their_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = Actors()
    monkeypatch.setitem(sys.modules, "ray", actors)
    team = Team()
    for one in team.runners:
        one.actor.object.total += 10
    assert team.get_state(inference_only=True)["runners/1"] == {"total": 11, "only": True}
    path = team.save_to_path(tmp_path / "team")
    fresh = Team()
    fresh.restore_from_path(path)
    assert fresh.totals() == [10, 11, 12]
    assert Team.from_checkpoint(path, allowed=[Runner]).totals() == [10, 11, 12]
    part = RemoteComponent.from_checkpoint(f"{path}/runners/2", allowed=[Runner])
    assert part.actor.object.total == 12
    assert actors.options == [{"num_cpus": 1}] * 10
