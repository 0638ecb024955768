"""Credentials and settings: which are found where the environment has none, and none in a message."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.object_stores.azure_server import KEY
from tests.object_stores.conftest import Store
from tests.object_stores.gcs_server import TOKEN
from tests.object_stores.s3_server import KEY_ID, REGION, SECRET
from tests.object_stores.store_server import Answer, Request, StoreServer

import holdfast as hf
from holdfast.engine.storage import as_location, services

KEYS = f"aws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"


class Amazon(StoreServer):
    """The token service, the metadata service of a machine, and that of a container: keys for one hour."""

    def kind(self, request: Request) -> str:
        return request.method

    def answer(self, request: Request) -> Answer:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        found = {"AccessKeyId": KEY_ID, "SecretAccessKey": SECRET, "SessionToken": "canary-sts"}
        found["Expiration"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        if request.method == "POST":
            inner = "".join(f"<{name}>{value}</{name}>" for name, value in found.items())
            action = parse_qs(request.body.decode())["Action"][0]
            text = f"<{action}Result><Credentials>{inner}</Credentials></{action}Result>"
            return Answer(200, f"<{action}Response>{text}</{action}Response>".encode())
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
        (tmp_path / ".aws").mkdir()
        yield server


def write_twice(s3: Store) -> None:
    """Writes an object twice, with credentials that the service accepts."""
    for content in (b"1", b"2"):
        as_location(f"{s3.url}/object").write_bytes(content)
    assert as_location(f"{s3.url}/object").read_bytes() == b"2"


MACHINE = [
    "PUT /latest/api/token",
    *[f"GET /latest/meta-data/iam/security-credentials/{name}" for name in ("", "role")],
]
ROLE = "role_arn = arn:aws:iam::1:role/trainer\n"

# The files and variables in which credentials are found, and what is asked for them.
SOURCES: dict[str, dict[str, Any]] = {
    "credentials": {"credentials": f"[default]\n{KEYS}"},
    "config": {"config": f"[default]\n{KEYS}"},
    "credentials go first": {
        "config": "[default]\naws_access_key_id = x\naws_secret_access_key = y\n",
        "credentials": f"[default]\n{KEYS}",
    },
    "profile": {
        "config": f"[profile lab]\n{KEYS}",
        "credentials": "[default]\naws_access_key_id = x\n",
        "AWS_PROFILE": "lab",
    },
    "comments": {"config": f"# mine\n[profile lab] \nregion = {REGION} # here\n{KEYS}", "AWS_PROFILE": "lab"},
    "a role and its source": {
        "config": f"[default]\n{ROLE}source_profile = keys\n",
        "credentials": f"[keys]\n{KEYS}",
        "asked": ["AssumeRole"],
    },
    "a role of a role": {
        "config": f"[default]\n{ROLE}source_profile = two\n"
        f"[profile two]\n{ROLE}source_profile = keys\nexternal_id = ours\n",
        "credentials": f"[keys]\n{KEYS}",
        "asked": ["AssumeRole", "AssumeRole"],
    },
    "a role by itself": {"config": f"[default]\n{ROLE}source_profile = default\n{KEYS}", "asked": ["AssumeRole"]},
    "a role of the machine": {
        "config": f"[default]\n{ROLE}credential_source = Ec2InstanceMetadata\n",
        "asked": [*MACHINE, "AssumeRole"],
    },
    "a role with a token": {
        "config": f"[default]\n{ROLE}web_identity_token_file = HOME/token\n",
        "asked": ["AssumeRoleWithWebIdentity"],
    },
    "a pod": {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/trainer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "HOME/token",
        "asked": ["AssumeRoleWithWebIdentity"],
    },
    "a container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "SERVER/task", "asked": ["GET /task"]},
    "a machine": {"asked": MACHINE},
}


@pytest.mark.parametrize("which", SOURCES)
def test_where_they_are_found(
    s3: Store, amazon: Amazon, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"config": "", "credentials": "", "asked": [], **SOURCES[which]}
    asked = environment.pop("asked")
    (tmp_path / "token").write_text("canary-of-the-cluster\n")
    for name in ("config", "credentials"):
        (tmp_path / ".aws" / name).write_text(environment.pop(name).replace("HOME", str(tmp_path)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)).replace("SERVER", amazon.url))
    write_twice(s3)
    assert amazon.asked() == asked, "once"


def test_a_program_prints_them(s3: Store, amazon: Amazon, tmp_path: Path) -> None:
    found = {"Version": 1, "AccessKeyId": KEY_ID, "SecretAccessKey": SECRET, "SessionToken": "canary-printed"}
    (tmp_path / "found.json").write_text(json.dumps(found))
    program = f"{sys.executable} -c \"print(open('{tmp_path}/found.json').read())\""
    (tmp_path / ".aws" / "config").write_text(f"[default]\ncredential_process = {program}\n")
    write_twice(s3)
    assert s3.server.log[-1].headers["x-amz-security-token"] == "canary-printed"


def test_the_file_names_the_service_and_the_region(
    s3: Store, amazon: Amazon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_REGION")
    nested = f"services = here\nregion = {REGION}\n{KEYS}[services here]\ns3 =\n  endpoint_url = {s3.server.url}\n"
    for text in (f"region = {REGION}\nendpoint_url = {s3.server.url}\n{KEYS}", nested):
        (tmp_path / ".aws" / "config").write_text(f"[default]\n{text}")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / ".aws" / "config"))
        write_twice(s3)
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
        assert services.aws_endpoint() is None
        monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")


def test_the_region_of_a_bucket_is_asked_for(amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a request without credentials, if neither the environment nor a profile has one."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(services, "LOOKUP_URL", f"{amazon.url}/{{}}")
    amazon.fail("HEAD /far-away", answer=Answer(403, headers={"x-amz-bucket-region": "eu-far-1"}))
    store = services.S3("s3://far-away").connect({}, {}, once=False)
    assert store.config["region"] == "eu-far-1"


SSO = "sso_start_url = https://example.org\nsso_region = x\nsso_account_id = 1\nsso_role_name = r\n"
WRONG = {  # the file of the configuration, and what is said
    "a role of a device": (f"[default]\n{ROLE}source_profile = default\nmfa_serial = 7\n{KEYS}", "code from a device"),
    "a character": ("[default]\naws_access_key_id = k\xe9y\naws_secret_access_key = canary\n", "a header cannot have"),
    "a service that refuses": (f"[default]\n{ROLE}source_profile = default\n{KEYS}", "AccessDenied"),
    "a login that has ended": (f"[default]\n{SSO}", "SSO"),
    "a profile that is not there": ("[profile other]\n", "no credentials.*lab"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_used_is_told_without_secrets(
    s3: Store,
    amazon: Amazon,
    tmp_path: Path,
    which: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, message = WRONG[which]
    (tmp_path / ".aws" / "config").write_text(config, encoding="utf-8")
    if "[profile other]" in config:
        monkeypatch.setenv("AWS_PROFILE", "lab")
    text = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>"
    amazon.fail("POST", times=100, answer=Answer(403, text.encode()))
    with caplog.at_level(logging.INFO), pytest.raises(hf.errors.StoragePermissionError, match=message) as caught:
        hf.save(f"{s3.url}/ckpt", {"step": 1})
    assert "canary" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    assert s3.stored() == []


def test_without_credentials_a_public_bucket_is_read(
    s3: Store, amazon: Amazon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are not signed."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(type(s3.server), "refusal", lambda self, request: None)
    s3.server.put(s3.bucket, "object", b"content")
    assert as_location(f"{s3.url}/object").read_bytes() == b"content"
    assert "authorization" not in s3.server.log[-1].headers


def test_the_workload_identity_of_a_cluster_at_google(
    gs: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is exchanged for one of an hour, once; a service of tokens that is down is no wrong account."""
    pytest.importorskip("google.auth")
    monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    (tmp_path / "token").write_text("canary-of-the-cluster")
    with Amazon() as server:
        login = {
            "type": "external_account",
            "audience": "identitynamespace:1f12345:provider",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{server.url}/token",
            "credential_source": {"file": str(tmp_path / "token")},
        }
        (tmp_path / "login.json").write_text(json.dumps(login))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "login.json"))
        answer = json.dumps({"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}).encode()
        server.fail("POST /token", times=100, answer=Answer(200, answer))
        write_twice(gs)
        assert [request.method for request in server.log] == ["POST"]
    login["token_url"] = f"{server.url}/other"  # it has ended
    (tmp_path / "login.json").write_text(json.dumps(login))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "another")  # other settings
    with pytest.raises(hf.errors.StorageUnavailableError, match="try again") as caught:
        as_location(f"{gs.url}/object").write_bytes(b"3")
    assert "canary" not in str(caught.value)


OF_THE_KEY = "credentials of AWS_ACCESS_KEY_ID"
NO_KEY = {"AZURE_STORAGE_ACCOUNT_KEY": None}
SETTINGS: list[tuple[str, dict[str, str | None], str]] = [
    ("s3", {"AWS_ACCESS_KEY_ID": "another"}, f"InvalidAccessKeyId.*{OF_THE_KEY}"),
    ("s3", {"AWS_SECRET_ACCESS_KEY": "canary"}, f"SignatureDoesNotMatch.*{OF_THE_KEY}"),
    ("s3", {"AWS_SECRET_ACCESS_KEY": None}, f"AWS_SECRET_ACCESS_KEY is missing.*{OF_THE_KEY}"),
    ("s3", {"AWS_REGION": "elsewhere-1"}, "AuthorizationHeaderMalformed.*region elsewhere-1"),
    ("s3", {"AWS_REGION": None}, "AuthorizationHeaderMalformed.*region us-east-1"),
    ("s3", {"AWS_ACCESS_KEY_ID": "canary\n"}, "value of AWS_ACCESS_KEY_ID .*line break"),
    ("s3", {"AWS_SECRET_ACCESS_KEY": "canary\n"}, "value of AWS_SECRET_ACCESS_KEY .*line break"),
    ("s3", {"AWS_SESSION_TOKEN": "canary\n"}, "value of AWS_SESSION_TOKEN .*line break"),
    ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "not base64, canary"}, "Invalid Access Key.*credentials"),
    ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "Y2FuYXJ5LWNhbmFyeS1jYW5hcnk="}, "AuthenticationFailed"),
    ("az", {**NO_KEY, "AZURE_STORAGE_SAS_TOKEN": "canary"}, "SAS query.*credentials"),
    ("az", {**NO_KEY, "AZURE_STORAGE_TOKEN": "canary\n"}, "AZURE_STORAGE_TOKEN.*line break"),
    ("az", {"AZURE_STORAGE_ACCOUNT_NAME": None}, "Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME"),
]


@pytest.mark.parametrize(("store", "change", "message"), SETTINGS, indirect=["store"])
def test_settings_that_are_wrong_are_told_without_secrets(
    store: Store, change: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(hf.errors.StoragePermissionError, match=message) as caught:
        hf.CheckpointManager(f"{store.url}/run")
    told = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in ("canary", "Y2FuYXJ5LWNhbmFyeS1jYW5hcnk", KEY) if secret in told]
