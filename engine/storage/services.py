"""Addresses, settings and credentials of S3, Google Cloud Storage and Azure Blob Storage.

A URL names only the bucket and the object. Everything else comes from the environment variables and configuration files
of each service's own tools. boto3, google-auth and azure-identity read the sources that obstore does not support.
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import (
    HoldfastError,
    InvalidLocationError,
    ObjectNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from .cloud import CloudBackend, check_installed
from .status import check_header, hidden_address

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Credential, S3Store

LOOKUP_URL = "https://s3.amazonaws.com/{}"  # returns the region of a bucket, without authentication
_LOOKUP_WAIT = 5.0  # time limit of the request to LOOKUP_URL, in seconds
_STATIC = datetime.timedelta(seconds=60)  # how long credentials from a file are cached; another program may renew them
_AWS_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}(\.[a-z0-9-]+)*")
_HTTPS = re.compile(r"[a-z0-9]{3,24}\.(blob|dfs)\.core\.windows\.net")
_AZURE_SUFFIX = ".dfs.core.windows.net"  # suffix of the host names of Azure storage accounts
_AZURE_SERVICES = re.compile(r"AZURE_(STORAGE_)?ENDPOINT|AZURE_.*USE_.*(EMULATOR|FABRIC).*|AZURITE.*")
"""Matches the uppercase names of variables that select the service, but not of variables that hold keys or tokens."""
_AZURE_LOGINS = re.compile(r"AZURE_.*(KEY|SAS|TOKEN|SECRET|USE_|SKIP_SIGNATURE|MSI|CERTIFICATE).*")
"""Matches the uppercase names of variables with credentials for obstore; if none is set, azure-identity is used."""


class CredentialsError(ValueError):
    """The credentials are invalid, or the settings refer to credentials that do not exist."""


# ---- S3


class S3(CloudBackend):
    """A bucket in S3 or in an S3-compatible service."""

    extra = "s3"
    packages = ("obstore", "boto3")
    variables = ("AWS_", "TENSORSTORE_C", "HOME")
    secrets = re.compile("AWS_ACCESS_KEY_ID|AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN")
    is_conditional = False

    def __init__(self, root: str) -> None:
        super().__init__(root, _named_endpoint()[1])

    def connect(self, options: Mapping[str, Any], client: Any, *, once: bool) -> S3Store:
        from obstore.store import S3Store

        endpoint = aws_endpoint()
        region = aws_region() or ("us-east-1" if endpoint else _bucket_region(self._bucket))
        config: dict[str, Any] = {
            "region": region,
            "unsigned_payload": not (endpoint or "").startswith("http:"),  # TLS already detects modified bytes
            "disable_bulk_delete": not once,  # some services lack bulk deletion, so only calls with a fallback use it
        }
        if endpoint:
            config["endpoint"] = endpoint.rstrip("/")
        if "AWS_ACCESS_KEY_ID" in os.environ:
            if not os.environ.get("AWS_SECRET_ACCESS_KEY"):
                raise CredentialsError("no credentials: AWS_SECRET_ACCESS_KEY is missing")
        else:
            provider = _aws_credentials()
            config |= {"skip_signature": True} if provider is None else {"credential_provider": provider}
        client["allow_http"] = (endpoint or "").startswith("http:")
        return S3Store(self._bucket, client_options=client, **config, **options)

    def advice(self, kind: type[HoldfastError]) -> str:
        endpoint, asked = aws_endpoint(), "asked Amazon"
        if endpoint:
            name = _named_endpoint()[0]
            source = f"the value of {name}" if name else "the endpoint_url of ~/.aws/config"
            asked = f"asked {hidden_address(endpoint)}, {source}"
        region = aws_region() or ("us-east-1" if endpoint else None)
        asked += f", region {region}" if region else ", no AWS_REGION set"
        profile = chosen_profile()
        if "AWS_ACCESS_KEY_ID" in os.environ:
            source = "the credentials of AWS_ACCESS_KEY_ID"
        elif _aws_profile():
            source = f"the credentials of the profile {profile!r} of ~/.aws"
        else:
            source = (
                "the credentials of this machine, if any (AWS_ACCESS_KEY_ID is not set, and ~/.aws has no profile "
                f"{profile!r})"
            )
        return _advice(kind, asked, source, self._bucket)


def _named_endpoint() -> tuple[str, str]:
    """Return the name and value of the environment variable that sets the S3 endpoint, or two empty strings."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", ""))


def aws_region() -> str | None:
    """Return the region from the environment or from the selected profile in ``~/.aws``."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return region or _aws_profile().get("region")


def aws_endpoint() -> str | None:
    """Return the S3 endpoint from the environment or the selected profile; None for Amazon's default.

    https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html
    """
    profile = _aws_profile()
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get("ignore_configured_endpoint_urls")
    if str(ignored).lower() == "true":
        return None
    endpoint = _named_endpoint()[1]
    if endpoint or not profile:
        return endpoint or None
    from botocore.configprovider import ConfiguredEndpointProvider

    configured: str | None = ConfiguredEndpointProvider(_aws_session().full_config, profile, "s3").provide()
    return configured


def chosen_profile() -> str:
    """Return the name of the selected profile in ``~/.aws``."""
    return os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"


def _aws_session() -> Any:
    import botocore.session

    session = botocore.session.Session()
    for setting in ("profile", "region"):  # botocore prefers AWS_DEFAULT_PROFILE and reads only AWS_DEFAULT_REGION
        if os.environ.get(f"AWS_{setting.upper()}"):
            session.set_config_variable(setting, os.environ[f"AWS_{setting.upper()}"])
    return session


def _aws_profile() -> Mapping[str, Any]:
    """Return the settings of the selected profile; an empty mapping if there are no profile files."""
    paths = (os.path.expanduser(os.environ.get(name) or path) for name, path in _AWS_FILES.items())
    if not any(map(os.path.exists, paths)):
        return {}
    settings: Mapping[str, Any] = _aws_session().full_config.get("profiles", {}).get(chosen_profile(), {})
    return settings


def _aws_credentials() -> Callable[[], S3Credential] | None:
    """Return a function that supplies credentials to obstore; None if there are no credentials."""
    from botocore.credentials import RefreshableCredentials
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from obstore.auth.boto3 import Boto3CredentialProvider

    profile = chosen_profile()
    if "mfa_serial" in _aws_profile():
        raise StoragePermissionError(
            f"the profile {profile!r} of ~/.aws logs in with a code from a device (mfa_serial), which holdfast does "
            'not ask for: put temporary credentials in the environment, as `eval "$(aws configure export-credentials '
            f'--profile {shlex.quote(profile)} --format env)"` does, or choose another profile with AWS_PROFILE'
        )
    provider: Boto3CredentialProvider | None = None

    def current() -> S3Credential:
        nonlocal provider
        try:
            if provider is None or not isinstance(provider.credentials, RefreshableCredentials):
                provider = Boto3CredentialProvider(_aws_session(), ttl=_STATIC)
            credentials = provider()
        except HTTPClientError as error:
            raise ConnectionError(f"the login service does not answer: {error}") from None
        except (BotoCoreError, ClientError) as error:
            raise CredentialsError(f"no credentials: {error}") from None
        for value in (credentials["access_key_id"], credentials["secret_access_key"], credentials["token"]):
            check_header("S3", f"a key or a token of the profile {profile!r}", value or "")
        return credentials

    try:
        current()
    except CredentialsError:
        raise
    except ValueError:  # raised by the provider if botocore finds no credentials
        return None
    return current


def _bucket_region(bucket: str) -> str:
    """Return the region that Amazon reports for a bucket, or us-east-1 if unknown. This needs no credentials."""
    import urllib.error  # imported lazily because a command that only parses a URL needs no HTTP client
    import urllib.request

    request = urllib.request.Request(LOOKUP_URL.format(bucket), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_LOOKUP_WAIT) as answer:
            region = answer.headers["x-amz-bucket-region"]
    except urllib.error.HTTPError as error:
        region = error.headers["x-amz-bucket-region"]
    except OSError:
        region = None
    return region or "us-east-1"


# ---- Google


class Google(CloudBackend):
    """A Google Cloud Storage bucket."""

    extra = "gcs"
    variables = ("GOOGLE_", "CLOUDSDK_", "GCE_", "TENSORSTORE_", "HOME")
    secrets = re.compile("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    lacks = frozenset({"remove"})

    def __init__(self, root: str) -> None:
        super().__init__(root, os.environ.get("TENSORSTORE_GCS_HTTP_URL", ""))

    def connect(self, options: Mapping[str, Any], client: Any, *, once: bool) -> GCSStore:
        from obstore.store import GCSStore

        config: dict[str, Any] = {"base_url": self._address} if self._address else {}
        token = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
        if token is not None:
            config["bearer_token"] = token
        else:
            provider = self._credentials()
            config |= {"skip_signature": True} if provider is None else {"credential_provider": provider}
        client["allow_http"] = self._address.startswith("http:")
        return GCSStore(self._bucket, client_options=client, **config, **options)

    def _credentials(self) -> Any:
        """Return a function that supplies tokens to obstore; None if no account is configured."""
        check_installed("google.auth", self._root, self.extra)
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
        from obstore.auth.google import GoogleCredentialProvider

        try:
            account = google.auth.default(scopes=[_GOOGLE_SCOPE])[0]
        except TransportError as error:
            raise ConnectionError(f"the login service does not answer: {error}") from None
        except GoogleAuthError as error:
            if isinstance(error, DefaultCredentialsError) and "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
                return None
            raise CredentialsError(f"no credentials: {error}") from None
        return GoogleCredentialProvider(account)

    def advice(self, kind: type[HoldfastError]) -> str:
        shown = f"{hidden_address(self._address)}, the value of TENSORSTORE_GCS_HTTP_URL"
        source = (
            "the credentials in the file that GOOGLE_APPLICATION_CREDENTIALS names, or those that `gcloud auth "
            "application-default login` creates"
        )
        return _advice(kind, f"asked {shown if self._address else 'storage.googleapis.com'}", source, self._bucket)


def _advice(kind: type[HoldfastError], asked: str, source: str, bucket: str) -> str:
    if issubclass(kind, StoragePermissionError):
        return f" ({asked}, with {source}; they must allow listing, reading, writing and deleting objects)"
    if issubclass(kind, ObjectNotFoundError):
        return f" ({asked}; does the bucket {bucket!r} exist? Create it first)"
    return f" ({asked})" if issubclass(kind, StorageUnavailableError) else ""


# ---- Azure


class Azure(CloudBackend):
    """An Azure Blob Storage container. The URL or the environment names the account."""

    extra = "azure"
    variables = ("AZURE", "AZURITE", "TENSORSTORE_C", "MSI_", "IDENTITY_", "HOME")
    secrets = re.compile("AZUR.*")
    lacks = frozenset({"copy"})

    def __init__(self, root: str) -> None:
        super().__init__(root)
        settings = {name.upper(): value for name, value in self.settings()}
        account = settings.get("AZURE_STORAGE_ACCOUNT_NAME", "") + _AZURE_SUFFIX
        container, _, named = root.partition("://")[2].partition("@")
        services = ((name, value) for name, value in settings.items() if _AZURE_SERVICES.fullmatch(name))
        self._identity = (container, named or account, *services)
        # The URL keeps the account name, because the environment of another process may name a different account.
        self._container = container if (named or account) == account else root

    def connect(self, options: Mapping[str, Any], client: Any, *, once: bool) -> AzureStore:
        from obstore.store import AzureStore

        settings = {name.upper(): value for name, value in self.settings()}
        config: dict[str, Any] = {}
        if not any(map(_AZURE_LOGINS.fullmatch, settings)):
            check_installed("azure.identity", self._root, self.extra)
            from obstore.auth.azure import AzureCredentialProvider

            config["credential_provider"] = AzureCredentialProvider()
        client["allow_http"] = settings.get("AZURE_ALLOW_HTTP", "").lower() in ("true", "1")
        make = AzureStore.from_url if "://" in self._container else AzureStore
        return make(self._container, client_options=client, **config, **options)

    def advice(self, kind: type[HoldfastError]) -> str:
        if issubclass(kind, StoragePermissionError):
            return (
                " (the account and its key come from AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the "
                "others that docs/object_stores.md names; they must allow listing, reading, writing and deleting blobs)"
            )
        if issubclass(kind, ObjectNotFoundError):
            return " (does the container exist? Create it first)"
        return ""


def azure_root(scheme: str, authority: str, path: str) -> tuple[str, str] | None:
    """Return the URL of a container and the path inside it; None if this is not an Azure address."""
    shown = hidden_address(f"{scheme}://{authority}/{path}")
    if scheme == "https":
        if not _HTTPS.fullmatch(authority):
            return None
        container, _, path = path.partition("/")
        account = authority.partition(".")[0] + _AZURE_SUFFIX
    else:
        container, at, account = authority.partition("@")
        if ":" in authority or (at and not _ACCOUNT.fullmatch(account)):
            raise InvalidLocationError(
                f"{shown!r} does not name an account as abfs://container@account.dfs.core.windows.net/name does; "
                "keys and tokens come from the environment"
            )
        if account and "." not in account:
            account += _AZURE_SUFFIX
        account = account.replace(".blob.core.windows.net", _AZURE_SUFFIX)
    if not container:
        raise InvalidLocationError(f"{shown!r} names no container: write az://container/name")
    return (f"abfs://{container}@{account}" if account else f"az://{container}"), path
