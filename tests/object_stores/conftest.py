"""The fake stores, and the environment in which they are found."""

from __future__ import annotations

import datetime
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import cli as cli
from tests.object_stores.azure_server import AzureServer
from tests.object_stores.gcs_server import GcsServer
from tests.object_stores.installed_servers import Server, reach, started
from tests.object_stores.s3_server import S3Server
from tests.object_stores.store_server import StoreServer

import holdfast as hf
from holdfast.engine.storage import cloud, object_store

_numbers = itertools.count()


@dataclass(frozen=True)
class Store:
    """A bucket of a fake store, for one test."""

    server: StoreServer
    bucket: str  # its name
    url: str
    environment: dict[str, str]  # the variables with which another process finds it

    def stored(self, prefix: str = "") -> list[str]:
        """Returns the keys in the bucket that begin with a prefix."""
        return self.server.keys(self.bucket, prefix)

    def names(self, prefix: str) -> set[str]:
        """Returns the names directly below a prefix."""
        return {key.removeprefix(prefix).split("/")[0] for key in self.stored(prefix)}

    def hold(self, pattern: str, action: Callable[[], Any], **fault: Any) -> Held:
        """Begins an action in a thread; returns when it waits at a request that a pattern matches."""
        held = Held(action)
        self.server.fail(pattern, act=held.arrived.set, after=held.may_go_on, **fault)
        held.start()
        assert held.arrived.wait(60)
        return held


class Held(threading.Thread):
    """A thread that waits at a request until :meth:`finish` lets it go on, and returns the outcome of its action."""

    def __init__(self, action: Callable[[], Any], *, arrives_at_end: bool = False) -> None:
        super().__init__(daemon=True)
        self.arrived, self.may_go_on = threading.Event(), threading.Event()
        self._action = action
        self._arrives_at_end = arrives_at_end
        self._outcome: Any = None

    def run(self) -> None:
        self._outcome = outcome(self._action)
        if self._arrives_at_end:
            self.arrived.set()

    def finish(self) -> Any:
        self.may_go_on.set()
        self.join()
        return self._outcome


def outcome(action: Callable[[], Any]) -> Any:
    """Returns what an action returns, or the error of holdfast that it raises."""
    try:
        return action()
    except hf.HoldfastError as error:
        return error


def value_of(url: str) -> int | None:
    """Returns the one value in the array of a checkpoint, which must be whole; None without a checkpoint."""
    try:
        [found] = set(hf.load(url)["w"].tolist())
    except hf.CheckpointNotFoundError:
        return None
    assert hf.verify(url).ok
    value: int = found
    return value


def is_whole(url: str, tree: dict[str, Any]) -> bool:
    """Whether a checkpoint holds a tree, and verifies."""
    found = hf.load(url)
    return all(np.array_equal(found[name], value) for name, value in tree.items()) and hf.verify(url).ok


def wait_for_mirror(run: hf.CheckpointManager, step: int) -> None:
    """Waits until the mirror of a run has a step."""
    mirror = run._mirror
    assert mirror is not None
    with mirror._wake:
        assert mirror._wake.wait_for(lambda: mirror.status().step == step, 60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a request that gets no answer be given up soon."""
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr(object_store, "SLOWEST", 1 << 40)


def new_bucket(server: StoreServer, patch: pytest.MonkeyPatch) -> Store:
    """Returns an empty bucket of a server, in an environment in which it is found."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE", "GOOGLE_", "TENSORSTORE_"))]:
        patch.delenv(name)
    for name, value in server.environment().items():
        patch.setenv(name, value)
    bucket = f"bucket-{next(_numbers)}"
    server.reset()
    server.buckets[bucket] = {}
    return Store(server, bucket, f"{server.scheme}://{bucket}", server.environment())


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, StoreServer]]:
    with S3Server() as s3, GcsServer() as gs, AzureServer() as az:
        with pytest.MonkeyPatch.context() as patch:
            hf.save(f"{new_bucket(s3, patch).url}/first", {})  # the first save asks whether conditions are honoured
        yield {"s3": s3, "gs": gs, "az": az}


def bucket_of(name: str) -> Any:
    """Returns the fixture with an empty bucket of a fake store."""

    @pytest.fixture(name=name)
    def bucket(_servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        yield new_bucket(_servers[name], monkeypatch)
        _servers[name].reset()

    return bucket


s3, gs, az = map(bucket_of, ("s3", "gs", "az"))


@pytest.fixture(scope="session")
def _rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started("rclone-s3", tmp_path_factory.mktemp("rclone")) as found:
        yield found


@pytest.fixture
def rclone(_rclone_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of its own below the bucket of ``rclone serve s3``, a server that is not ours."""
    reach(_rclone_server, monkeypatch)
    return f"{_rclone_server.url}/{next(_numbers)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests of ``store`` with each of the fake stores; those of modules with ``AZURE = True`` with Azure, too."""
    if "store" in metafunc.fixturenames and not any(
        "store" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        azure = ["az"] if getattr(metafunc.module, "AZURE", False) else []
        metafunc.parametrize("store", ["s3", "gs", *azure], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    """An empty bucket of each of the fake stores."""
    found: Store = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries at once, and fewer times: a fake store needs no time to recover."""
    pause = datetime.timedelta(milliseconds=2)
    monkeypatch.setattr(cloud, "BACKOFF", dict.fromkeys(cloud.BACKOFF, pause) | {"base": 2})
    monkeypatch.setattr(object_store, "RETRIES", 3)
