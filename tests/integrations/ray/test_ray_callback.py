"""The callback in a worker of Ray Train, with a stand-in for Ray that has only what the callback asks it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import holdfast as hf
from holdfast.errors import OptionError, StateError, UnsupportedLeafError
from holdfast.integrations.ray import CheckpointCallback, PreemptedError, RemoteComponent, run_directory
from holdfast.storage import as_location

CONTEXT = "ray.train.v2._internal.execution.context"


class Ray:
    """A worker of a run in ``storage``; the calls to its actor run in the main thread, once ``serve`` is called."""

    def __init__(self, storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage, self.workers = storage, 1
        self.filesystem: Any = LocalFileSystem(skip_instance_cache=True)
        self.filesystem.type_name = "local"  # as pyarrow calls it
        self.reports: list[tuple[dict[str, Any], str | None]] = []
        self.known: str | None = None
        self.drained: object = None
        self._calls: list[tuple[Callable[[], None], threading.Event]] = []
        modules = {
            "ray": types.SimpleNamespace(get_runtime_context=lambda: self, get=self._get),
            "ray.train": types.SimpleNamespace(
                get_context=lambda: self,
                get_checkpoint=lambda: (
                    self.known and types.SimpleNamespace(path=self.known, filesystem=self.filesystem)
                ),
                Checkpoint=lambda path, filesystem: path,
                CheckpointUploadMode=types.SimpleNamespace(NO_UPLOAD="no upload"),
                report=self._report,
            ),
            CONTEXT: types.SimpleNamespace(get_train_context=lambda: self),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def get_storage(self) -> Any:
        return types.SimpleNamespace(experiment_fs_path=str(self.storage), storage_filesystem=self.filesystem)

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
        assert checkpoint is None or hf.load(as_location(checkpoint, filesystem=self.filesystem)), "it is durable"
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


def test_every_saved_step_is_reported_once_where_it_lies_also_after_a_failure(ray: Ray) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert isinstance(ray.run(loop(5, at=5, event=fail)), ZeroDivisionError)
    assert reported(ray) == [(2, "2")]
    for _ in range(2):  # the second run finds nothing left to do
        assert ray.run(loop(5)) is None
        assert reported(ray) == [(2, "2"), (4, "4"), (5, "5")]
        assert value(ray) == 2**5 - 1


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
    assert "SIGTERM or SIGHUP is not handled" in caplog.text
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


class S3FileSystem:
    """What the callback asks one of pyarrow, which tests do not install."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.type_name, self.options = kind, options

    def __reduce__(self) -> tuple[Any, ...]:
        return S3FileSystem, (self.options,)


S3FileSystem.__module__ = "pyarrow._s3fs"
AZURE = {"account_name": "acc", "blob_storage_authority": ".blob.core.windows.net"}


@pytest.mark.parametrize(
    ("kind", "options", "endpoint", "url"),
    [
        ("s3", {"region": "eu"}, None, "s3://bucket/a%20run"),
        ("s3", {"endpoint_override": "host:9", "scheme": "http"}, "http://host:9", "s3://bucket/a%20run"),
        ("s3", {"endpoint_override": "http://host:9", "scheme": "https"}, "http://host:9", "s3://bucket/a%20run"),
        ("s3", {"endpoint_override": "host:9", "scheme": "http"}, None, "s3+"),
        ("s3", {"region": "eu"}, "http://host:9", "s3+"),
        ("s3", {"access_key": "a", "secret_key": "b"}, None, "s3+"),
        ("gcs", {"endpoint_override": ""}, "http://host:9", "gs://bucket/a%20run"),
        ("gcs", {"anonymous": True}, None, "gcs+"),
        ("abfs", AZURE, None, "abfs://bucket@acc.dfs.core.windows.net/a%20run"),
        ("abfs", {**AZURE, "blob_storage_authority": "localhost"}, None, "abfs+"),
        ("hdfs", {}, None, "hdfs+"),
    ],
)
def test_storage_is_reached_where_ray_reaches_it(
    kind: str, options: dict[str, Any], endpoint: str | None, url: str, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL stands for the service of the environment; other services are reached through Ray's own file system."""
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    ray.filesystem, ray.storage = S3FileSystem(kind, options), Path("bucket/a run")
    assert run_directory().startswith(url)
    assert run_directory().endswith("/checkpoints")


def test_a_run_in_a_file_system_that_the_program_made(ray: Ray, tmp_path: Path) -> None:
    ray.filesystem = DirFileSystem(str(tmp_path), fs=LocalFileSystem(auto_mkdir=True))
    ray.filesystem.type_name = "py::fsspec+dir"
    ray.storage = Path("run")
    assert ray.run(loop(3)) is None
    assert ray.run(loop(5)) is None
    assert reported(ray) == [(2, "2"), (3, "3"), (4, "4"), (5, "5")]
    assert [one.step for one in hf.list_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3, 4, 5]


def test_outside_of_a_worker_it_is_the_ordinary_callback(tmp_path: Path) -> None:
    with CheckpointCallback(tmp_path) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": 0})
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoint.on_step(start + 1, state).should_stop
    with pytest.raises(StateError, match="must be called in"):
        run_directory()


class Runner:
    """An object for an actor, which here is the object itself."""

    def __init__(self, seed: int) -> None:
        self.total = seed

    def get_state(self, inference_only: bool = False) -> dict[str, Any]:
        return {"total": self.total, **({"only": True} if inference_only else {})}

    def set_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class ActorHandle:
    """A handle of Ray: a method is called by ``remote()``, and cannot be called directly."""

    def __init__(self, made: Any) -> None:
        self.object = made

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=getattr(self.object, name))

    def __eq__(self, other: object) -> bool:
        """Two handles of one actor are equal in Ray."""
        return isinstance(other, ActorHandle) and self.object is other.object

    def __hash__(self) -> int:
        return id(self.object)


ActorHandle.__module__ = "ray.actor"


class Actors:
    """``ray.remote``, ``ray.get`` and handles, whose calls happen at once."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.busy = 0  # how often a wait ends before the answer

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            self.options.append(given)
            return types.SimpleNamespace(remote=lambda *args, **kwargs: ActorHandle(kind(*args, **kwargs)))

        return types.SimpleNamespace(options=options)

    def wait(self, results: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        self.busy -= 1
        return ([], results) if self.busy >= 0 else (results, [])

    def get(self, result: Any) -> Any:
        return result


class Team(hf.components.Checkpointable):
    def __init__(self) -> None:
        self.runners = [RemoteComponent(Runner, seed, options={"num_cpus": 1}) for seed in range(3)]

    def totals(self) -> list[int]:
        return [one.actor.object.total for one in self.runners]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    found = Actors()
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def test_components_are_saved_restored_and_made_in_their_actors(actors: Actors, tmp_path: Path) -> None:
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


def test_a_wait_for_an_actor_at_every_step_is_told(
    actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For other objects, only processor time counts: threads of a busy program wait for each other, too."""
    ticks = itertools.count(step=0.02)
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks), thread_time=lambda: 0.0)
    monkeypatch.setattr("holdfast.integrations.loop.steps.time", clock)
    for name, data in (("actor", ActorHandle(Runner(0))), ("object", random.Random(3))):
        with hf.CheckpointCallback(tmp_path / name) as checkpoint:
            checkpoint.restore_or_initialize({"w": 0}, data=data)
            for step in range(1, 5):
                checkpoint.on_step(step, {"w": step}, data=data)
    told = [one.getMessage().split(":")[0] for one in caplog.records if "at every step" in one.getMessage()]
    assert told == ["taking the state of data= costs 20.0 ms at every step"]


class Counter:
    """An object for an actor, with the methods of torch."""

    def __init__(self) -> None:
        self.n = np.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


class Bare(hf.components.Checkpointable):
    """Starts its actors by itself."""

    def __init__(self, kind: type = Counter) -> None:
        self.rounds = 0
        self.runners = [ActorHandle(Runner(seed)) for seed in range(2)]
        self.counter = ActorHandle(kind())

    def play(self) -> Bare:
        self.rounds += 1
        self.runners[1].object.total += 10
        self.counter.object.n += 1
        return self

    def values(self) -> tuple[int, int, float]:
        return self.rounds, self.runners[1].object.total, float(self.counter.object.n[0])


@pytest.mark.usefixtures("actors")
def test_bare_handles_of_actors_are_components(tmp_path: Path) -> None:
    path = Bare().play().save_to_path(tmp_path / "bare")
    fresh, again = Bare(), Bare()
    assert fresh.restore_from_path(path).complete
    again.set_state(fresh.get_state())
    assert again.values() == fresh.values() == Bare.from_checkpoint(path).values() == (1, 11, 1.0)
    # An error in an actor leaves the others as they were.
    failing = Bare()
    failing.runners[1].object.set_state = lambda state: state["missing"]
    with pytest.raises(KeyError):
        failing.restore_from_path(path)
    assert failing.values() == (0, 1, 0.0)
    # A handle alone is started again by its class.
    with pytest.raises(OptionError, match=r"an actor handle does not know them.*Pass kind=Class"):
        RemoteComponent.from_checkpoint(f"{path}/runners/1")
    assert RemoteComponent.from_checkpoint(f"{path}/runners/1", kind=Runner, seed=1).actor.object.total == 11


def test_two_handles_of_one_actor_are_one_component(actors: Actors, tmp_path: Path) -> None:
    calls: list[str] = []

    class Counted(Runner):
        def get_state(self, inference_only: bool = False) -> dict[str, Any]:
            calls.append("get")
            return super().get_state()

    class Pair(hf.components.Checkpointable):
        def __init__(self) -> None:
            self.runner = ActorHandle(Counted(1))
            self.others = [ActorHandle(self.runner.object)]

    pair = Pair()
    pair.runner.object.total = 7
    path = pair.save_to_path(tmp_path / "pair")
    assert calls == ["get"]
    assert not (tmp_path / "pair" / "others").exists()
    fresh = Pair()
    assert fresh.restore_from_path(path).complete
    assert (fresh.runner.object.total, dict(fresh.get_checkpointable_components())["runner"]) == (7, fresh.runner)


def test_a_wait_for_an_actor_is_told(actors: Actors, caplog: pytest.LogCaptureFixture) -> None:
    """The log names it, less and less often."""
    actors.busy = 2
    component = RemoteComponent(Runner, 7)
    assert component.get_state() == {"total": 7}
    waiting = f"still waiting for the state of {component.actor!r} after"
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == [f"{waiting} 20 s", f"{waiting} 60 s"]


def test_an_actor_without_a_state_is_refused(actors: Actors, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"counter: .*in another process; give it get_state\(\)"):
        Bare(object).save_to_path(tmp_path / "bare")
    assert not (tmp_path / "bare").exists()


def test_handles_beside_a_state_are_saved_through_their_actors(actors: Actors, tmp_path: Path) -> None:
    for total in (7, 0):
        runner = ActorHandle(Runner(total))
        with hf.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"w": np.zeros(1)}, runner=runner)
            checkpoint.on_step(step + 1, state, runner=runner)
        assert runner.object.total == 7
    path = hf.graph.Checkpoint(runner=runner).save(str(tmp_path / "graph"))
    fresh = ActorHandle(Runner(0))
    hf.graph.Checkpoint(runner=fresh).restore(path).assert_consumed()
    assert fresh.object.total == 7
