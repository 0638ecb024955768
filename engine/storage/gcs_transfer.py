"""Bulk data to and from Google Cloud Storage: the requests of its JSON API, and the access tokens.

Credentials are found where TensorStore finds them, and in the same order, so that both act for the same account.

https://cloud.google.com/storage/docs/json_api/v1/objects
https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite
https://cloud.google.com/docs/authentication/application-default-credentials
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from .tokens import Renewed, answer_of
from .transfer import Transfer

_SERVICE = "https://storage.googleapis.com"
TOKENS = "https://oauth2.googleapis.com/token"
WAIT = 5.0  # seconds for an answer with a token
_EARLY = 60.0  # seconds before the end of a token at which it is renewed


class GcsTransfer(Transfer):
    """Requests for objects of one bucket of Google Cloud Storage."""

    def __init__(self, url: str, verify: ssl.SSLContext | None, bucket: str) -> None:
        super().__init__(url, verify)
        self._bucket = quote(bucket, safe="")

    @classmethod
    def open(cls, spec: Mapping[str, Any]) -> GcsTransfer | None:
        """Return the client for TensorStore's specification of a store; None where only TensorStore can reach it."""
        return cls._at(os.environ.get("TENSORSTORE_GCS_HTTP_URL", _SERVICE), spec["bucket"])

    def _put_target(self, key: str) -> tuple[str, str]:
        name = quote(key, safe="", errors="surrogateescape")
        return "POST", f"{self._prefix}/upload/storage/v1/b/{self._bucket}/o?uploadType=media&name={name}"

    def _get_target(self, key: str) -> str:
        name = quote(key, safe="", errors="surrogateescape")
        return f"{self._prefix}/storage/v1/b/{self._bucket}/o/{name}?alt=media"

    def _copy_request(self, key: str, target: str) -> tuple[str, str, dict[str, str]]:
        source, name = (quote(one, safe="", errors="surrogateescape") for one in (key, target))
        objects = f"{self._prefix}/storage/v1/b/{self._bucket}/o"
        return "POST", f"{objects}/{source}/rewriteTo/b/{self._bucket}/o/{name}", {}

    def _is_copied(self, answer: bytes) -> bool:
        with contextlib.suppress(ValueError, AttributeError):
            return bool(json.loads(answer).get("done"))  # an object that moves between places takes several requests
        return False

    def _authorized(self, method: str, target: str, headers: Mapping[str, str], digest: str) -> dict[str, str] | None:
        token = access_token()
        if token is None:
            return None
        kind = {"content-type": "application/octet-stream"} if method == "POST" else {}
        return {"host": self._netloc, **kind, **headers, "authorization": f"Bearer {token}"}

    def _refuses(self, status: int, answer: bytes) -> bool:
        return status == 401

    def _forget(self, headers: Mapping[str, str]) -> bool:
        _renewed.forget(lambda token: headers["authorization"] == f"Bearer {token}")
        return "GOOGLE_AUTH_TOKEN_FOR_TESTING" not in os.environ

    def _is_stored(self, answer: bytes, size: int) -> bool:
        with contextlib.suppress(ValueError, AttributeError):
            return bool(json.loads(answer).get("size") == str(size))
        return False


def access_token() -> str | None:
    """Return a token for the account of this process; None where only TensorStore can get one."""
    if "GOOGLE_AUTH_TOKEN_FOR_TESTING" in os.environ:
        return os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"]
    names = ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME", "GCE_METADATA_ROOT")
    source = tuple(map(os.environ.get, names))
    return _renewed.get(source)


def _new_token() -> tuple[str, float]:
    answer = json.loads(_ask_for_token())
    return str(answer["access_token"]), float(answer["expires_in"])


_renewed = Renewed(_new_token, _EARLY)


def _ask_for_token() -> bytes:
    """Request a token from Google for a user, or from the machine for its account."""
    credentials = _credentials()
    if credentials is None:
        host = os.environ.get("GCE_METADATA_ROOT", "metadata.google.internal")
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        return answer_of(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), WAIT)
    # A service account has a key to sign with, which the standard library cannot.
    if credentials["type"] != "authorized_user":
        raise ValueError(credentials["type"])
    body = {name: credentials[name] for name in ("client_id", "client_secret", "refresh_token")}
    return answer_of(urllib.request.Request(TOKENS, urlencode(body | {"grant_type": "refresh_token"}).encode()), WAIT)


def _credentials() -> dict[str, Any] | None:
    """Return the content of the file with credentials, if there is one."""
    home = os.environ.get("HOME")
    folder = os.environ.get("CLOUDSDK_CONFIG") or (home and os.path.join(home, ".config", "gcloud"))
    paths = [
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"),
        folder and os.path.join(folder, "application_default_credentials.json"),
    ]
    for path in filter(None, paths):
        try:
            with open(path, "rb") as file:
                content: dict[str, Any] = json.load(file)
        except OSError:
            continue
        return content
    return None
