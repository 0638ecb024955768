"""Credentials for S3 and where they come from: variables, ``~/.aws``, roles, and the machine or container.

They are found where TensorStore finds them, and in the same order, so that both act for the same account. No error and
no line of the log contains them.

https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html
https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-v2-how-it-works.html
"""

from __future__ import annotations

import configparser
import datetime
import functools
import hashlib
import hmac
import ipaddress
import json
import os
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from ..errors import StoragePermissionError
from .tokens import Renewed, answer_of

_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")  # keys of a profile

_INTERACTIVE = {
    "sso_session": "IAM Identity Center (sso_session)",
    "sso_start_url": "IAM Identity Center (sso_start_url)",
    "login_session": "a browser (login_session)",
    "mfa_serial": "a code of a device (mfa_serial)",
}
"""Settings of profiles that require a login."""

_SETTINGS = re.compile(r"AWS_|HOME$")  # variables that credentials depend on
_EARLY = 300.0  # seconds before their end at which credentials are renewed; the next ones are there before that
_STATIC = 60.0 + _EARLY  # seconds for which the content of a file is kept: another program may renew it
MACHINE_WAIT = 2.0  # seconds for an answer of the metadata service, which many machines lack
_SERVICE = 10.0  # seconds for an answer of the token service
_PROCESS = 60.0  # seconds for a program that prints credentials

CONTAINER_URL = "http://169.254.170.2"
_CONTAINERS = ("169.254.170.2", "169.254.170.23", "fd00:ec2::23")  # plain HTTP does not leave the machine
_INSTANCE = "http://169.254.169.254"
_GLOBAL_REGION = "us-east-1"


class Credentials(NamedTuple):
    """A key, its secret, and the token of temporary ones."""

    key_id: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"


class _NotFoundError(Exception):
    """A source has no credentials; the search continues with the next one."""


def aws_credentials() -> Credentials | None:
    """Return the credentials of this process; None where only TensorStore can find some."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return _in_environment()
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if _SETTINGS.match(name)))
    return _renewed.get(settings)


def forget_credentials(authorization: str) -> None:
    """Forget the credentials that a service has refused, given the header of the request."""
    _renewed.forget(lambda found: f" Credential={found.key_id}/" in authorization)


def chosen_profile() -> str:
    """Return the name of the profile of ``~/.aws`` that is used."""
    return os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"


def aws_profile() -> Mapping[str, str]:
    """Return the chosen profile of ``~/.aws``; empty if there is none."""
    return _profiles().get(chosen_profile(), {})


def aws_region() -> str | None:
    """Return the region of the environment, or of the chosen profile."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or aws_profile().get("region")


def aws_endpoint(service: str) -> str | None:
    """Return the address of a service, such as "s3", by the environment or the chosen profile; None for Amazon's.

    https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html
    """
    profile = aws_profile()
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get("ignore_configured_endpoint_urls")
    if ignored is not None and ignored.lower() == "true":
        return None
    found = os.environ.get(f"AWS_ENDPOINT_URL_{service.upper()}") or os.environ.get("AWS_ENDPOINT_URL")
    if found:
        return found
    nested = _profiles().get(f"services {profile.get('services')}", {}).get(service, "")
    own = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", nested, re.MULTILINE)
    return own[1] if own else profile.get("endpoint_url")


def described_endpoint(service: str) -> str:
    """Return where the address of a service comes from."""
    variables = (f"AWS_ENDPOINT_URL_{service.upper()}", "AWS_ENDPOINT_URL")
    name = next((name for name in variables if os.environ.get(name)), None)
    return f"the value of {name}" if name else f"the endpoint_url in {_config_file()}"


def described_credentials() -> str:
    """Return where the credentials come from."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return "the credentials of AWS_ACCESS_KEY_ID"
    name = chosen_profile()
    if aws_profile():
        return f"the credentials of the profile {name!r} of ~/.aws"
    return f"the credentials of this machine, if any (AWS_ACCESS_KEY_ID is not set, and ~/.aws has no profile {name!r})"


def check_profile() -> None:
    """Raise StoragePermissionError if the chosen profile has credentials that cannot be used."""
    name, profile = chosen_profile(), aws_profile()
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return
    if any(not (profile.get(key, "").isascii() and profile.get(key, "").isprintable()) for key in _KEYS):
        raise StoragePermissionError(
            f"the profile {name!r} of {_credentials_file()} or {_config_file()} has a key or a token with a character "
            "that no header can have; enter it again, with `aws configure`"
        )
    unattended = {"aws_access_key_id", "credential_process", "role_arn"} & profile.keys()
    way = next(
        (way for key, way in _INTERACTIVE.items() if key in profile and (key == "mfa_serial" or not unattended)), ""
    )
    if way:
        raise StoragePermissionError(
            f"the profile {name!r} of {_config_file()} logs in by {way}, which holdfast does not: put temporary "
            'credentials into the environment, as `eval "$(aws configure export-credentials --profile '
            f'{shlex.quote(name)} --format env)"` does, or choose another profile with AWS_PROFILE'
        )


def signed_headers(
    method: str, target: str, headers: Mapping[str, str], digest: str, found: Credentials, region: str, service: str
) -> dict[str, str]:
    """Return the headers of a request with its signature; ``headers`` holds the host, ``digest`` is that of the body.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = {"x-amz-date": stamp, **{name: value for name, value in headers.items() if name != "content-length"}}
    if found.token:
        signed["x-amz-security-token"] = found.token
    names = sorted(signed)
    path, _, query = target.partition("?")
    query = f"{query}=" if query else ""  # the only ones are names without values
    canonical = [method, path, query, *(f"{name}:{signed[name]}" for name in names), "", ";".join(names), digest]
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256("\n".join(canonical).encode()).hexdigest()]
    derived = f"AWS4{found.secret}".encode()
    for part in (stamp[:8], region, service, "aws4_request", "\n".join(text)):
        derived = hmac.digest(derived, part.encode(), "sha256")
    return {
        **signed,
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 Credential={found.key_id}/{scope}, SignedHeaders={';'.join(names)}, "
        f"Signature={derived.hex()}",
    }


def _in_environment() -> Credentials | None:
    key_id, secret, token = map(os.environ.get, _VARIABLES)
    return Credentials(key_id, secret, token) if key_id and secret else None


# ---- ~/.aws


def _config_file() -> str:
    return os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")


def _credentials_file() -> str:
    return os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")


def _profiles() -> dict[str, dict[str, str]]:
    """Return the settings of all profiles by name; those of the file with credentials go first."""
    found: dict[str, dict[str, str]] = {}
    for path, pattern in ((_config_file(), r"(?:profile\s+)?(.+)"), (_credentials_file(), "(.+)")):
        try:
            status = os.stat(path)
        except OSError:
            continue
        for section, values in _sections(path, status.st_mtime_ns, status.st_size):
            match = re.fullmatch(pattern, section)
            if match is not None:  # sections of other kinds have names with a blank
                name = match[1].strip("\"'")
                found[name] = {**found.get(name, {}), **values}
    return found


@functools.lru_cache(maxsize=8)
def _sections(path: str, modified: int, size: int) -> list[tuple[str, dict[str, str]]]:  # noqa: ARG001 - in the key
    parser = configparser.RawConfigParser(strict=False, default_section="\0", inline_comment_prefixes=(" #",))
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return []
    return [(section, dict(parser[section])) for section in parser.sections()]


def _of_chosen_profile() -> _Found:
    return _of_profile(chosen_profile(), _profiles())


def _of_profile(name: str, profiles: Mapping[str, Mapping[str, str]], passed: tuple[str, ...] = ()) -> _Found:
    """Return the credentials of a profile, with those of the profiles that it refers to."""
    profile = profiles.get(name, {})
    key_id, secret, token = map(profile.get, _KEYS)
    own = Credentials(key_id, secret, token) if key_id and secret else None
    if "role_arn" in profile and name not in passed:
        if "mfa_serial" in profile:
            raise _NotFoundError
        if "web_identity_token_file" in profile:
            return _of_web_identity(
                profile["role_arn"], profile["web_identity_token_file"], profile.get("role_session_name"), profile
            )
        if "source_profile" in profile:
            source = _of_profile(profile["source_profile"], profiles, (*passed, name))[0]
        else:
            source = _SOURCES[profile["credential_source"]]()[0]
        return _of_role(profile, source)
    if own is not None:
        return own, _STATIC
    if "credential_process" in profile:
        command = shlex.split(profile["credential_process"])
        output = subprocess.run(command, capture_output=True, timeout=_PROCESS, check=True).stdout
        return _from_json(json.loads(output), "SecretAccessKey", "SessionToken")
    raise _NotFoundError


# ---- roles


def _of_role(profile: Mapping[str, str], source: Credentials) -> _Found:
    """Assume the role of a profile with the credentials of another."""
    asked = {"Action": "AssumeRole", "RoleArn": profile["role_arn"], "RoleSessionName": _session(profile)}
    for key, name in (("external_id", "ExternalId"), ("duration_seconds", "DurationSeconds")):
        if key in profile:
            asked[name] = profile[key]
    return _ask_token_service(asked, profile, source)


def _of_web_identity(role: str, token_file: str, session: str | None, profile: Mapping[str, str]) -> _Found:
    """Assume a role with the token that a cluster renews in a file."""
    with open(token_file, encoding="utf-8") as file:
        token = file.read().strip()
    name = session or _session(profile)
    asked = {"Action": "AssumeRoleWithWebIdentity", "RoleArn": role, "RoleSessionName": name, "WebIdentityToken": token}
    return _ask_token_service(asked, profile, None)


def _session(profile: Mapping[str, str]) -> str:
    return os.environ.get("AWS_ROLE_SESSION_NAME") or profile.get("role_session_name") or f"holdfast-{os.getpid()}"


def _ask_token_service(asked: Mapping[str, str], profile: Mapping[str, str], source: Credentials | None) -> _Found:
    region = aws_region() or profile.get("region")
    url = aws_endpoint("sts") or f"https://sts.{region + '.' if region else ''}amazonaws.com"
    parts = urlsplit(url)
    body = urlencode({**asked, "Version": "2011-06-15"}).encode()
    headers = {"host": parts.netloc, "content-type": "application/x-www-form-urlencoded; charset=utf-8"}
    target = parts.path.rstrip("/") + "/"
    if source is not None:
        digest = hashlib.sha256(body).hexdigest()
        headers = signed_headers("POST", target, headers, digest, source, region or _GLOBAL_REGION, "sts")
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}{target}", body, headers)
    text = answer_of(request, _SERVICE).decode()
    names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
    return _from_json({name: re.findall(rf"<{name}>([^<]+)</{name}>", text)[0] for name in names}, names[1], names[2])


# ---- the machine


def _of_environment() -> _Found:
    found = _in_environment()
    if found is None:
        raise _NotFoundError
    return found, _STATIC


def _of_cluster() -> _Found:
    role, file = os.environ.get("AWS_ROLE_ARN"), os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if not role or not file:
        raise _NotFoundError
    return _of_web_identity(role, file, None, aws_profile())


def _of_container() -> _Found:
    """Ask for the role of a task of ECS or a pod of EKS.

    https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
    """
    relative, url = map(
        os.environ.get, ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    )
    if relative:
        url = CONTAINER_URL + relative
    elif not url:
        raise _NotFoundError
    else:
        _check_nearby(url)
    headers = {}
    file, token = map(os.environ.get, ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN"))
    if file:
        with open(file, encoding="utf-8") as opened:  # it is renewed there
            token = opened.read().strip()
    if token:
        headers["Authorization"] = token
    return _from_json(json.loads(answer_of(urllib.request.Request(url, headers=headers), MACHINE_WAIT)))


def _check_nearby(url: str) -> None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" or host in (*_CONTAINERS, "localhost") or ipaddress.ip_address(host).is_loopback:
        return
    raise _NotFoundError


def _of_instance() -> _Found:
    """Ask for the role of a machine of EC2, by version 2 of its metadata service."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise _NotFoundError
    base = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _INSTANCE).rstrip("/") + "/latest"
    request = urllib.request.Request(f"{base}/api/token", method="PUT")
    request.add_header("X-aws-ec2-metadata-token-ttl-seconds", "300")
    headers = {"X-aws-ec2-metadata-token": answer_of(request, MACHINE_WAIT).decode()}
    roles = f"{base}/meta-data/iam/security-credentials/"
    role = answer_of(urllib.request.Request(roles, headers=headers), MACHINE_WAIT).decode().split("\n")[0]
    return _from_json(json.loads(answer_of(urllib.request.Request(roles + role, headers=headers), MACHINE_WAIT)))


def _from_json(found: Mapping[str, Any], secret: str = "SecretAccessKey", token: str = "Token") -> _Found:
    """Return the credentials of an answer, and the seconds until they end."""
    seconds = _STATIC
    if found.get("Expiration"):
        end = datetime.datetime.fromisoformat(found["Expiration"])
        seconds = (end - datetime.datetime.now(datetime.UTC)).total_seconds()
    return Credentials(str(found["AccessKeyId"]), str(found[secret]), found.get(token)), seconds


def _find() -> _Found:
    """Ask one source after the other; a source that fails for another reason than having none ends the search."""
    for source in (_of_chosen_profile, _of_cluster, _of_container, _of_instance):
        try:
            return source()
        except _NotFoundError:
            continue
    raise _NotFoundError


_Found = tuple[Credentials, float]

_SOURCES = {"Environment": _of_environment, "EcsContainer": _of_container, "Ec2InstanceMetadata": _of_instance}

_renewed = Renewed(_find, _EARLY)
