"""Credentials for S3: which are found, when they are renewed, and that none reaches a message."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socketserver
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import tensorstore
from tests.object_stores.conftest import HURRY, Store
from tests.object_stores.s3_server import KEY_ID, REGION, SECRET
from tests.object_stores.store_server import Answer, Request, StoreServer

import holdfast as hf
from holdfast.engine.storage import Segment, as_location, aws_credentials, kvstore, s3_transfer, store_spec
from holdfast.engine.storage.s3_transfer import S3Transfer
from holdfast.engine.storage.transfer import Patience

DATA = np.arange(100_000, dtype=np.uint8)
PATIENT = Patience(10.0, 10.0, lambda: None)
CANARY = "canary"  # part of every secret below
KEYS = f"aws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"


class Amazon(StoreServer):
    """The token service, the metadata service of a machine, and that of a container: keys for one hour."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = SECRET
        self.seconds = 3600.0

    def kind(self, request: Request) -> str:
        return request.method

    def answer(self, request: Request) -> Answer:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.seconds)
        found = {
            "AccessKeyId": KEY_ID,
            "SecretAccessKey": self.secret,
            "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if request.method == "POST":
            inner = "".join(
                f"<{name}>{value}</{name}>" for name, value in {**found, "SessionToken": "canary-sts"}.items()
            )
            return Answer(200, f"<R><Credentials>{inner}</Credentials></R>".encode())
        if request.what == "PUT /latest/api/token":
            return Answer(200, b"canary-session")
        if request.path.startswith("/latest/") and request.headers.get("x-aws-ec2-metadata-token") != "canary-session":
            return Answer(401)
        if request.path.endswith("/security-credentials/"):
            return Answer(200, b"role")
        return Answer(200, json.dumps({**found, "Token": "canary-token", "Code": "Success"}).encode())

    def asked(self) -> list[str]:
        """Returns what was asked for, and the actions of the token service."""
        return [
            parse_qs(request.body.decode())["Action"][0] if request.method == "POST" else request.what
            for request in self.log
        ]


@pytest.fixture
def amazon(s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Amazon]:
    """The services, in an environment without credentials."""
    with Amazon() as server:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.server.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        context = tensorstore.Context({"s3_request_retries": HURRY})  # it keeps credentials that it has found
        monkeypatch.setattr(kvstore, "shared_context", lambda: context)
        (tmp_path / ".aws").mkdir()
        yield server


def client(s3: Store) -> S3Transfer | None:
    return S3Transfer.open(store_spec("s3", s3.bucket))


def sends(s3: Store) -> bool:
    """Returns whether the client finds credentials that the service accepts."""
    found = client(s3)
    return found is not None and found.put("object", DATA.size, lambda sent: iter([DATA]), PATIENT) == "done"


MACHINE = [
    "PUT /latest/api/token",
    *[f"GET /latest/meta-data/iam/security-credentials/{name}" for name in ("", "role")],
]
ROLE = "role_arn = arn:aws:iam::1:role/trainer\n"

SOURCES: dict[str, tuple[str, str, dict[str, str], list[str]]] = {
    "credentials": ("", f"[default]\n{KEYS}", {}, []),
    "config": (f"[default]\n{KEYS}", "", {}, []),
    "credentials go first": (
        "[default]\naws_access_key_id = x\naws_secret_access_key = y\n",
        f"[default]\n{KEYS}",
        {},
        [],
    ),
    "profile": (f"[profile lab]\n{KEYS}", "[default]\naws_access_key_id = x\n", {"AWS_PROFILE": "lab"}, []),
    "comments": (f"# mine\n[profile lab] \nregion = {REGION} # here\n{KEYS}", "", {"AWS_PROFILE": "lab"}, []),
    "a role and its source": (f"[default]\n{ROLE}source_profile = keys\n", f"[keys]\n{KEYS}", {}, ["AssumeRole"]),
    "a role of a role": (
        f"[default]\n{ROLE}source_profile = two\n[profile two]\n{ROLE}source_profile = keys\nexternal_id = e\n",
        f"[keys]\n{KEYS}",
        {},
        ["AssumeRole", "AssumeRole"],
    ),
    "a role by itself": (f"[default]\n{ROLE}source_profile = default\n{KEYS}", "", {}, ["AssumeRole"]),
    "a role of the machine": (
        f"[default]\n{ROLE}credential_source = Ec2InstanceMetadata\n",
        "",
        {},
        [*MACHINE, "AssumeRole"],
    ),
    "a role with a token": (
        f"[default]\n{ROLE}web_identity_token_file = HOME/token\n",
        "",
        {},
        ["AssumeRoleWithWebIdentity"],
    ),
    "a pod": (
        "",
        "",
        {"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "HOME/token"},
        ["AssumeRoleWithWebIdentity"],
    ),
    "a container": ("", "", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "SERVER/task"}, ["GET /task"]),
    "a task": ("", "", {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/task"}, ["GET /task"]),
    "a machine": ("", "", {}, MACHINE),
    "a profile that is not there": ("", "", {"AWS_PROFILE": "lab"}, MACHINE),
}


@pytest.mark.parametrize("which", SOURCES)
def test_where_they_are_found(
    s3: Store, amazon: Amazon, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, credentials, environment, asked = SOURCES[which]
    monkeypatch.setattr(aws_credentials, "CONTAINER_URL", amazon.url)
    (tmp_path / "token").write_text("canary-of-the-cluster\n")
    (tmp_path / ".aws" / "config").write_text(config.replace("HOME", str(tmp_path)))
    (tmp_path / ".aws" / "credentials").write_text(credentials)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)).replace("SERVER", amazon.url))
    assert sends(s3)
    assert sends(s3)
    assert amazon.asked() == asked, "once"


def test_a_program_prints_them(s3: Store, amazon: Amazon, tmp_path: Path) -> None:
    found = {"Version": 1, "AccessKeyId": KEY_ID, "SecretAccessKey": SECRET, "SessionToken": "canary-printed"}
    (tmp_path / "found.json").write_text(json.dumps(found))
    program = f"{sys.executable} -c \"print(open('{tmp_path}/found.json').read())\""
    (tmp_path / ".aws" / "config").write_text(f"[default]\ncredential_process = {program}\n")
    assert sends(s3)
    assert s3.server.log[-1].headers["x-amz-security-token"] == "canary-printed"


def test_what_a_container_needs_to_ask(
    s3: Store, amazon: Amazon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is read again each time: the cluster renews it."""
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{amazon.url}/task")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    amazon.seconds = 0.0
    for token in ("canary-1", "canary-2"):
        (tmp_path / "token").write_text(token)
        sends(s3)
        assert amazon.log[-1].headers["authorization"] == token
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://192.0.2.1/task")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert not sends(s3), "a token is sent to no other service"


def test_they_are_renewed_before_they_end(s3: Store, amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that have not ended are used while the machine does not answer."""
    now = [1000.0]
    monkeypatch.setattr("holdfast.engine.storage.tokens.time.monotonic", lambda: now[0])
    assert sends(s3)
    now[0] += 3200
    assert sends(s3)
    assert len(amazon.log) == 3
    now[0] += 200
    amazon.fail("", answer=Answer(500))
    assert sends(s3), "the machine does not answer"
    assert len(amazon.log) == 4
    now[0] += 61
    assert sends(s3)
    assert len(amazon.log) == 7
    now[0] += 3601
    amazon.fail("", answer=Answer(500), times=100)
    assert not sends(s3), "they have ended"


def test_a_file_that_changes_is_read_again(
    s3: Store, amazon: Amazon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("holdfast.engine.storage.tokens.time.monotonic", lambda: now[0])
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old\n")
    assert not sends(s3)
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{KEYS}")
    now[0] += 61 + 120
    assert sends(s3)


def test_the_file_names_the_service_and_the_region(
    s3: Store, amazon: Amazon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_REGION")
    config, url = tmp_path / ".aws" / "config", s3.server.url
    nested = f"[default]\nservices = here\nregion = {REGION}\n{KEYS}[services here]\ns3 =\n  endpoint_url = {url}\n"
    for text in (f"[default]\nregion = {REGION}\nendpoint_url = {url}\n{KEYS}", nested):
        config.write_text(text)
        spec = store_spec("s3", s3.bucket)
        assert (spec["endpoint"], spec["aws_region"]) == (url, REGION)
        assert sends(s3)
    with pytest.raises(hf.errors.ObjectNotFoundError, match=rf"endpoint_url in .*config, region {REGION}"):
        hf.save("s3://elsewhere/ckpt", {"x": 1})


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_configured_service_that_is_to_be_ignored(
    amazon: Amazon, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "[default]\nendpoint_url = http://192.0.2.1\n"
    if where == "environment":
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    else:
        config += "ignore_configured_endpoint_urls = True\n"
    (tmp_path / ".aws" / "config").write_text(config)
    assert "endpoint" not in store_spec("s3", "bucket")


def test_a_machine_that_answers_byte_by_byte_is_given_up(amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives in time; all of them would not."""
    monkeypatch.setattr(aws_credentials, "MACHINE_WAIT", 0.2)
    endless = threading.Event()

    class Drips(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while not endless.wait(0.02):
                    self.wfile.write(b"x")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drips) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        asks = threading.Thread(target=aws_credentials.aws_credentials, daemon=True)
        asks.start()
        asks.join(20)
        assert not asks.is_alive()
        endless.set()
        server.shutdown()


FORKED = """
import os, sys, threading
from holdfast.engine.storage import as_location

keys, parent, child = sys.argv[1:]
place = as_location("s3://bucket/x")
os.environ["PIPE"] = parent
asks = threading.Thread(target=place.can_share)
asks.start()
pipe = open(parent, "w")  # returns when the program that prints the keys has opened it
process = os.fork()
if not process:
    pipe.close()
    os.environ["PIPE"] = child
    os._exit(10 + place.can_share())
print(keys, file=pipe)
pipe.close()
with open(child, "w") as pipe:
    print(keys, file=pipe)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
asks.join()  # last: the process may hold the pipe by which subprocess learns that its program has started
"""


def test_a_process_that_is_forked_during_a_search_searches_itself(amazon: Amazon, tmp_path: Path) -> None:
    pipes = [tmp_path / "parent", tmp_path / "child"]
    for pipe in pipes:
        os.mkfifo(pipe)
    (tmp_path / ".aws" / "config").write_text("[default]\ncredential_process = sh -c 'cat \"$PIPE\"'\n")
    keys = json.dumps({"Version": 1, "AccessKeyId": KEY_ID, "SecretAccessKey": SECRET})
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, keys, *pipes], capture_output=True, text=True, timeout=50
    )
    assert found.stdout == "11\n", found.stderr


def test_amazon_tells_the_region_of_a_bucket(amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(s3_transfer, "LOOKUP_URL", f"{amazon.url}/{{}}")
    amazon.fail("HEAD /far-away", answer=Answer(403, b"", {"x-amz-bucket-region": "eu-far-1"}))
    found = S3Transfer.open(store_spec("s3", "far-away"))
    assert found is not None
    assert found._netloc == "far-away.s3.eu-far-1.amazonaws.com"


@pytest.mark.parametrize(
    ("status", "code", "are_ended"),
    [(400, "ExpiredToken", True), (403, "InvalidAccessKeyId", True), (403, "AccessDenied", False)],
)
def test_keys_that_the_service_refuses_are_asked_for_again(
    s3: Store, amazon: Amazon, status: int, code: str, are_ended: bool
) -> None:
    assert sends(s3)
    found = client(s3)
    assert found is not None
    s3.server.fail("PUT", answer=s3.server.error(status, code))
    assert not found.copy("object", "copy", PATIENT)
    asked = amazon.asked()
    assert sends(s3)
    assert amazon.asked() == asked + MACHINE * are_ended
    assert found.copies is are_ended, "a refusal of keys says nothing about copies"


@pytest.mark.usefixtures("amazon")
def test_keys_that_are_refused_twice_are_not_tried_again(s3: Store) -> None:
    found = client(s3)
    assert found is not None
    s3.server.fail("PUT", times=10, answer=s3.server.error(403, "InvalidAccessKeyId"))
    assert found.put("object", DATA.size, lambda sent: iter([DATA]), PATIENT, again=[0.0] * 3) == "ended"
    assert s3.server.counts() == {"PUT": 2}


@pytest.mark.usefixtures("amazon")
def test_keys_that_have_ended_once_say_nothing_about_the_next(s3: Store) -> None:
    """So TensorStore uploads at once, and no read asks first, which a role without s3:ListBucket is denied."""
    found = client(s3)
    assert found is not None
    s3.server.fail("PUT", answer=s3.server.error(400, "ExpiredToken"))
    assert found.put("object", DATA.size, lambda sent: iter([DATA]), PATIENT) == "failed"


@pytest.mark.usefixtures("amazon")
def test_a_role_that_may_not_list_uploads_after_its_keys_have_ended_twice(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore has found new ones; a read of the object that is not there is denied to such a role all the same."""
    monkeypatch.setattr(kvstore, "LARGE_UPLOAD_BYTES", DATA.size - 1)
    monkeypatch.setattr(kvstore, "UPLOAD_PAUSES", (0.0, 0.0, 0.0))
    s3.server.fail("PUT", times=2, answer=s3.server.error(400, "ExpiredToken"))
    s3.server.fail("GET|HEAD", times=100, answer=s3.server.error(403, "AccessDenied"))
    as_location(f"{s3.url}/data").write_data(DATA.size, [Segment(0, DATA.size, lambda: iter([DATA]))])
    assert s3.server.counts()["PUT"] == 3


def test_a_run_with_a_profile(s3: Store, amazon: Amazon, tmp_path: Path) -> None:
    """TensorStore finds the same; the data is carried by the client of holdfast."""
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{KEYS}")
    hf.save(f"{s3.url}/ckpt", {"w": np.arange(100_000)})
    assert np.array_equal(hf.load(f"{s3.url}/ckpt")["w"], np.arange(100_000))
    data = [request for request in s3.server.log if "/d/" in request.path and request.method in ("PUT", "GET")]
    assert any(len(request.body) > 500_000 for request in data)
    assert not any(request.is_of_tensorstore for request in data if len(request.body) > 500_000)


SSO = "sso_session = corp\nsso_account_id = 1\n[sso-session corp]\nsso_region = x\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            f"[profile lab]\n{SSO}",
            r"profile 'lab' of .*IAM Identity Center \(sso_session\).*export-credentials --profile lab",
        ),
        ("[profile lab]\nsso_start_url = https://x\n", "sso_start_url"),
        ("[profile lab]\nlogin_session = arn\n", "logs in by a browser"),
        (f"[profile lab]\n{ROLE}source_profile = keys\nmfa_serial = arn:mfa\n", "a code of a device"),
        (f"[profile lab]\naws_access_key_id = a\naws_secret_access_key = {CANARY}\u201d\n", "character that no header"),
    ],
    ids=["sso", "sso of old", "login", "mfa", "quote"],
)
def test_what_a_person_has_to_log_in_for_is_refused(
    s3: Store, amazon: Amazon, tmp_path: Path, config: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws" / "config").write_text(config)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(hf.errors.StoragePermissionError, match=message) as caught:
        hf.load(f"{s3.url}/ckpt")
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(f"{s3.url}/ckpt")


ANSWERS: dict[str, Answer] = {
    "refused": Answer(403, b"<Error>canary</Error>"),
    "broken": Answer(500, b"canary"),
    "no JSON": Answer(200, b"canary"),
    "no keys": Answer(200, b'{"Code": "canary"}'),
    "no time": Answer(200, b'{"AccessKeyId": "canary", "SecretAccessKey": "canary", "Expiration": "canary"}'),
    "a list": Answer(200, b'["canary"]'),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("which", ["a role and its source", "a pod", "a container", "a machine", "a program", "a file"])
def test_no_secret_is_told(
    s3: Store,
    amazon: Amazon,
    tmp_path: Path,
    which: str,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever a source answers, TensorStore is left to explain what is missing; nothing is raised or logged here."""
    config, credentials, environment, _ = SOURCES.get(which, ("", "", {}, []))
    if which == "a program":
        config = "[default]\ncredential_process = /bin/sh -c 'echo canary; echo canary >&2; exit 1'\n"
    if which == "a file":
        config, credentials = f"[default\naws_secret_access_key={CANARY}\n", f"{CANARY}\n[default]\nx"
    (tmp_path / "token").write_text("canary-of-the-cluster\n")
    (tmp_path / ".aws" / "config").write_text(config)
    (tmp_path / ".aws" / "credentials").write_text(credentials.replace(SECRET, f"{CANARY}-key"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)).replace("SERVER", amazon.url))
    amazon.fail("", answer=ANSWERS[answer], times=100)
    with caplog.at_level(logging.DEBUG):
        assert not sends(s3)
        assert not as_location(f"{s3.url}/x").can_share()
    assert CANARY not in caplog.text


def test_wrong_keys_are_in_no_error(
    s3: Store, amazon: Amazon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = KEYS.replace(SECRET, f"{CANARY}-of-a-profile") + f"aws_session_token = {CANARY}-token\n"
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{text}")
    with caplog.at_level(logging.DEBUG):
        for action in (
            lambda: hf.save(f"{s3.url}/ckpt", {"x": np.arange(9)}),
            lambda: hf.load(f"{s3.url}/ckpt"),
            lambda: hf.CheckpointManager(f"{s3.url}/run"),
        ):
            with pytest.raises(hf.errors.StoragePermissionError, match=r"the profile 'default' of ~/\.aws") as caught:
                action()
            assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert CANARY not in caplog.text


def test_credentials_do_not_print_themselves() -> None:
    found: Any = aws_credentials.Credentials("id", CANARY, CANARY)
    assert CANARY not in f"{found} {found!r} {[found]} {os.fspath('')}"
