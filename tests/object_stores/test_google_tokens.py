"""Access tokens for Google: whose they are, when they are renewed, and when only TensorStore can get one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.object_stores.store_server import Answer, Request, StoreServer

from holdfast.engine.storage import gcs_transfer
from holdfast.engine.storage.transfer import Patience

USER = {
    "type": "authorized_user",
    "client_id": "i&d",
    "client_secret": "of a program",
    "refresh_token": "of the user",
}
SERVICE = {"type": "service_account", "client_email": "a@b", "private_key": "-----BEGIN PRIVATE KEY-----"}
OTHER = USER | {"type": "external_account_authorized_user", "token_url": "https://sts.example.com"}
MACHINE = "GET /computeMetadata/v1/instance/service-accounts/default/token"


class TokenServer(StoreServer):
    """Google's token service and the metadata server of a machine: tokens for ten minutes."""

    content: object = None

    def answer(self, request: Request) -> Answer:
        if request.path.startswith("/upload/"):
            ended = request.headers["authorization"] == "Bearer token 1"
            return Answer(401) if ended else Answer(200, b'{"size": "0"}')
        if request.what == MACHINE and request.headers.get("metadata-flavor") != "Google":
            return Answer(403)
        found = {"access_token": f"token {len(self.log)}", "expires_in": 600, "token_type": "Bearer"}
        return Answer(200, json.dumps(found if self.content is None else self.content).encode())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenServer]:
    for name in ("GOOGLE_AUTH_TOKEN_FOR_TESTING", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with TokenServer() as server:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("GCE_METADATA_ROOT", server.url.removeprefix("http://"))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # machines are asked without it
        monkeypatch.setattr(gcs_transfer, "TOKENS", f"{server.url}/token")
        yield server


def place(folder: Path, name: str, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


WELL_KNOWN = "application_default_credentials.json"


@pytest.mark.parametrize(
    ("files", "environment", "asked"),
    [
        ({}, {}, MACHINE),
        ({"file.json": USER}, {"GOOGLE_APPLICATION_CREDENTIALS": "file.json"}, "POST /token"),
        ({f".config/gcloud/{WELL_KNOWN}": USER}, {}, "POST /token"),
        ({f"other/{WELL_KNOWN}": USER}, {"CLOUDSDK_CONFIG": "other"}, "POST /token"),
        ({f".config/gcloud/{WELL_KNOWN}": USER}, {"GOOGLE_APPLICATION_CREDENTIALS": "missing.json"}, "POST /token"),
        ({"file.json": SERVICE}, {"GOOGLE_APPLICATION_CREDENTIALS": "file.json"}, None),
        ({"file.json": OTHER}, {"GOOGLE_APPLICATION_CREDENTIALS": "file.json"}, None),
        ({"file.json": "not JSON"}, {"GOOGLE_APPLICATION_CREDENTIALS": "file.json"}, None),
        ({"file.json": [1]}, {"GOOGLE_APPLICATION_CREDENTIALS": "file.json"}, None),
    ],
    ids=["machine", "named", "well-known", "moved", "named, missing", "service account", "pool", "not JSON", "a list"],
)
def test_the_account_is_the_one_that_tensorstore_finds(
    files: dict[str, Any],
    environment: dict[str, str],
    asked: str | None,
    service: TokenServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, content in files.items():
        place((tmp_path / name).parent, Path(name).name, content)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(tmp_path / value))
    assert [gcs_transfer.access_token() for _ in range(2)] == [asked and "token 1"] * 2
    assert service.sent() == ([asked] if asked else [])
    if asked == "POST /token":
        body = b"client_id=i%26d&client_secret=of+a+program&refresh_token=of+the+user&grant_type=refresh_token"
        assert service.log[0].body == body


def test_tokens_are_renewed_before_they_end(service: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("holdfast.engine.storage.tokens.time.monotonic", lambda: now[0])
    seen = []
    for now[0] in (0.0, 539.0, 540.0, 1000.0, 1080.0):
        seen.append(gcs_transfer.access_token())
    assert seen == ["token 1", "token 1", "token 2", "token 2", "token 3"]


def test_a_token_that_ends_before_its_time(service: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as while the machine slept: another one is asked for, once."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", service.url)
    client = gcs_transfer.GcsTransfer.open({"bucket": "bucket"})
    assert client is not None
    for _ in range(2):
        assert client.put("object", 0, lambda sent: iter(()), Patience(5.0, 5.0, lambda: None), again=[0.0])
    upload = "POST /upload/storage/v1/b/bucket/o name=object"
    assert service.sent() == [MACHINE, upload, MACHINE, upload, upload]


def test_without_a_home_there_is_no_file_of_the_user(
    service: TokenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path / ".config" / "gcloud", WELL_KNOWN, USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    gcs_transfer.access_token()
    assert service.sent() == [MACHINE]


@pytest.mark.parametrize("how", ["cut", "reset", "never"])
def test_an_answer_that_does_not_arrive(service: TokenServer, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_transfer, "WAIT", 2.0)
    service.fail("", how=how)
    assert [gcs_transfer.access_token() for _ in range(2)] == [None, None]
    assert len(service.log) == 1


def test_a_machine_whose_name_is_none(service: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_ROOT", "not a name")
    assert gcs_transfer.access_token() is None
    assert service.log == []


@pytest.mark.parametrize("content", ["text", {}, {"access_token": "x"}, {"access_token": "x", "expires_in": "soon"}])
def test_without_a_token_tensorstore_goes_on(
    content: object, service: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("holdfast.engine.storage.tokens.time.monotonic", lambda: now[0])
    service.content = content
    assert [gcs_transfer.access_token() for _ in range(3)] == [None] * 3
    assert len(service.log) == 1, "it is not asked for each request"
    service.content, now[0] = None, 61.0
    assert gcs_transfer.access_token() == "token 2"
