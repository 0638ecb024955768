"""The fake stores, and the environment in which they are found."""

from __future__ import annotations

import datetime
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.object_stores.azure_server import ACCOUNT, KEY, AzureServer
from tests.object_stores.gcs_server import TOKEN, GcsServer
from tests.object_stores.installed_servers import Server, reach, started
from tests.object_stores.s3_server import KEY_ID, REGION, SECRET, S3Server
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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a request that gets no answer be given up soon."""
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr(object_store, "SLOWEST", 1 << 40)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        with pytest.MonkeyPatch.context() as patch:
            hf.save(f"{s3_store(server, patch).url}/first", {})  # the first save asks whether conditions are honoured
        yield server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


def _store(server: StoreServer, scheme: str, environment: dict[str, str], patch: pytest.MonkeyPatch) -> Store:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE", "GOOGLE_", "TENSORSTORE_"))]:
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)
    bucket = f"bucket-{next(_numbers)}"
    server.reset()
    server.buckets[bucket] = {}
    return Store(server, bucket, f"{scheme}://{bucket}", environment)


def s3_store(server: S3Server, patch: pytest.MonkeyPatch) -> Store:
    """Returns an empty bucket of a fake S3."""
    environment = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    return _store(server, "s3", environment, patch)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket of the fake S3."""
    yield s3_store(s3_server, monkeypatch)
    s3_server.reset()


@pytest.fixture
def gs(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket of the fake Google Cloud Storage."""
    environment = {"TENSORSTORE_GCS_HTTP_URL": gcs_server.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN}
    yield _store(gcs_server, "gs", environment, monkeypatch)
    gcs_server.reset()


@pytest.fixture
def az(azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty container of the fake Azure."""
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": azure_server.url,
        "AZURE_ALLOW_HTTP": "true",
    }
    yield _store(azure_server, "az", environment, monkeypatch)
    azure_server.reset()


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
