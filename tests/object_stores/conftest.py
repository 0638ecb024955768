"""The fake stores, and the environment in which they are found."""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.object_stores.azure_server import ACCOUNT, KEY, AzureServer
from tests.object_stores.gcs_server import TOKEN, GcsServer
from tests.object_stores.s3_server import KEY_ID, REGION, SECRET, S3Server
from tests.object_stores.store_server import StoreServer

import holdfast as hf
from holdfast.engine.storage import cloud, object_store

RCLONE_SECRET = "of-a-test-and-of-nothing-else-at-all"

_numbers = itertools.count()


@dataclass(frozen=True)
class Store:
    """A bucket of a fake store, for one test.

    Attributes:
        server: The store.
        bucket: The bucket's name.
        url: The bucket's URL.
        environment: The variables with which another process finds it.
    """

    server: StoreServer
    bucket: str
    url: str
    environment: dict[str, str]

    def stored(self, prefix: str = "") -> list[str]:
        """Returns the keys in the bucket that begin with a prefix."""
        return self.server.keys(self.bucket, prefix)


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
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of ``rclone serve s3``, a server that is not ours, with the bucket ``bucket``."""
    program = Path(sys.executable).with_name("rclone")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [str(program), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key"]
    output = subprocess.PIPE
    with subprocess.Popen(
        [*command, f"{KEY_ID},{RCLONE_SECRET}"], env={"RCLONE_CONFIG": os.devnull, "HOME": str(folder)}, stderr=output
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        while line and b"Starting s3 server" not in line:
            line = server.stderr.readline()
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def rclone(rclone_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of its own below the bucket of ``rclone serve s3``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", RCLONE_SECRET)
    return f"s3://bucket/{next(_numbers)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests of ``store`` with each of the fake stores; those of modules with ``AZURE = True`` with Azure, too."""
    if "store" in metafunc.fixturenames and not any(
        "store" in str(mark.args[0]).split(",") for mark in metafunc.definition.iter_markers("parametrize")
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
