"""Azure: addresses, errors without secrets, waits that end, forked processes, and uploads without copies."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit
from tests.object_stores.azure_server import ACCOUNT, KEY
from tests.object_stores.conftest import Store

import holdfast as hf
from holdfast.engine.storage import Segment, as_location, object_store

CANARY = "Y2FuYXJ5LWNhbmFyeS1jYW5hcnk="  # a key, a token or a password, which no message may hold
TREE: dict[str, Any] = {"w": np.arange(10_000, dtype=np.float32), "step": 3}
ALWAYS = 1000


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("az://container/a%20b", "az://container/a%20b"),
        ("abfs://container/run", "az://container/run"),
        ("abfss://box@account.dfs.core.windows.net/run", "abfs://box@account.dfs.core.windows.net/run"),
        ("abfs://box@account.blob.core.windows.net/run", "abfs://box@account.dfs.core.windows.net/run"),
        ("az://box@account/run", "abfs://box@account.dfs.core.windows.net/run"),
        ("https://account.blob.core.windows.net/box/run/1", "abfs://box@account.dfs.core.windows.net/run/1"),
        ("https://account.dfs.core.windows.net/box", "abfs://box@account.dfs.core.windows.net"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    place = as_location(text)
    assert place.url == url
    assert as_location(place.url) == place
    assert place.is_remote


def test_each_place_has_one_address(az: Store) -> None:
    """Also where an address names the account that the environment names."""
    host = f"{ACCOUNT}.blob.core.windows.net"
    hf.save(f"{az.url}/run", TREE)
    for address in (f"abfs://{az.bucket}@{ACCOUNT}.dfs.core.windows.net", f"https://{host}/{az.bucket}"):
        place = as_location(f"{address}/run")
        assert place == as_location(f"{az.url}/run")
        assert place.overlaps(as_location(f"{az.url}/run/1"))
        assert hf.load(f"{address}/run")["step"] == 3
        with pytest.raises(hf.errors.OptionError, match="cannot lie there; choose a place outside"):
            hf.copy_checkpoint(f"{az.url}/run", f"{address}/run/copy")
    assert as_location(f"abfs://{az.bucket}@other.dfs.core.windows.net/run") != as_location(f"{az.url}/run")


@pytest.mark.parametrize(
    "address", ["abfs://box@{}.dfs.core.windows.net/run", "https://{}.blob.core.windows.net/box/run", "az://box@{}/run"]
)
def test_an_address_keeps_the_account_that_it_names(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is printed, with other keys, and in another process, whose environment may name another account."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    place = as_location(address.format("account"))
    assert str(place) == "abfs://box@account.dfs.core.windows.net/run"
    for name, value in (("SAS_TOKEN", "sig=1"), ("ACCOUNT_KEY", CANARY)):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
        assert as_location("az://box/run") == place
        assert hash(as_location("az://box/run")) == hash(place)
        assert as_location("az://box/run/1").overlaps(place)
    pickled = pickle.dumps(place)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    found = pickle.loads(pickled)
    assert (found, str(found)) == (as_location(address.format("account")), str(place))
    assert found != as_location("az://box/run")
    assert not found.overlaps(as_location("az://box/run"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://blobs.example.org")
    assert as_location("az://box/run") != place


def test_managers_of_one_run_know_each_other_by_every_address(az: Store) -> None:
    run = hf.CheckpointManager(f"{az.url}/run")
    commit(run, 1, TREE)
    with hf.CheckpointManager(f"abfs://{az.bucket}@{ACCOUNT}.dfs.core.windows.net/run") as later:
        later.acquire()
        with pytest.raises(hf.errors.OwnershipError, match="has taken over"):
            run.acquire()  # this alone does not ask the store
    run.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("az://", "names no container"),
        ("az:///x", "names no container"),
        ("https://account.blob.core.windows.net", "names no container"),
        (f"az://box:{CANARY}@account/run", "does not name an account"),
        ("https://example.org/x", "unknown scheme, 'https'"),
        ("az:/box/run", "lost a slash"),
        ("az://box/a/../b", "'..'"),
        ("https://account.blob.core.windows.net/box?sig=secret", "%3F"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(hf.errors.InvalidLocationError, match=message) as caught:
        as_location(text)
    assert CANARY not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hf.errors.OptionError, match=r"needs obstore: pip install .*\[azure\]'"):
        as_location("az://container/run")


REFUSED, UNAVAILABLE = hf.errors.StoragePermissionError, hf.errors.StorageUnavailableError
FAILURES: dict[str, tuple[int, str, type[hf.HoldfastError], str]] = {
    "bad key": (403, "AuthenticationFailed", REFUSED, "AZURE_STORAGE_ACCOUNT_KEY"),
    "forbidden": (403, "AuthorizationPermissionMismatch", REFUSED, "allow listing"),
    "expired": (401, "ExpiredAuthenticationToken", REFUSED, "Expired.*credentials"),
    "malformed": (400, "InvalidAuthenticationInfo", REFUSED, "credentials"),
    "busy": (503, "ServerBusy", UNAVAILABLE, "after 2 retries.*try again"),
    "throttled": (429, "TooManyRequests", UNAVAILABLE, "try again"),
    "broken": (500, "InternalError", UNAVAILABLE, "try again"),
    "full": (507, "InsufficientStorage", hf.errors.StorageFullError, "free some space"),
    "no container": (404, "ContainerNotFound", hf.errors.ObjectNotFoundError, "Create it first"),
}


@pytest.fixture
def url(az: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a checkpoint that was saved without faults."""
    monkeypatch.setattr(object_store, "RETRIES", 2)
    hf.save(f"{az.url}/ckpt", TREE)
    return f"{az.url}/ckpt"


def canary(text: str) -> bool:
    """Whether a text holds a secret of these tests, as it is or as a header or an address has it."""
    return any(secret in text for secret in (CANARY, CANARY.rstrip("="), KEY, "hunter2"))


@pytest.mark.parametrize("what", FAILURES)
def test_failures_are_told_without_secrets(
    az: Store, url: str, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the service answers, and however it was logged into."""
    status, code, kind, message = FAILURES[what]
    ways: list[dict[str, str | None]] = [
        {},
        {"AZURE_STORAGE_ACCOUNT_KEY": CANARY},
        {"AZURE_STORAGE_ACCOUNT_KEY": None, "AZURE_STORAGE_SAS_TOKEN": f"sv=2022-11-02&sig={CANARY}"},
        {"AZURE_STORAGE_ACCOUNT_KEY": None, "AZURE_STORAGE_TOKEN": CANARY},
        {"AZURE_STORAGE_ENDPOINT": az.server.url.replace("//", "//user:hunter2@")},
    ]
    actions: list[Callable[[], Any]] = [
        lambda: hf.load(url),
        lambda: hf.save(f"{az.url}/new", TREE),
        lambda: hf.CheckpointManager(f"{az.url}/run"),
        lambda: as_location(url).remove_tree(),
        lambda: (as_location(url) / "checkpoint.json").write_bytes_if(b"x", b"y"),
    ]
    az.server.fail("", times=ALWAYS, answer=az.server.error(status, code))
    for way in ways:
        with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
            for name, value in way.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            for action in actions:
                if what == "no container" and action in (actions[0], actions[-1]):
                    continue  # what is not there is not found
                with pytest.raises(kind, match=message) as caught:
                    action()
                assert az.url in str(caught.value)
                assert len(str(caught.value)) < 700
                assert not canary("".join(traceback.format_exception(caught.value)))
    assert not canary(caplog.text)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_told_after_one_upload(az: Store, status: int) -> None:
    az.server.fail("", times=ALWAYS, answer=az.server.error(status, "AuthenticationFailed"))
    with pytest.raises(hf.errors.StoragePermissionError, match=r"cannot write .*credentials"):
        as_location(f"{az.url}/data").write_data(10, [Segment(0, 10, lambda: iter([np.zeros(10, np.uint8)]))])
    assert len(az.server.log) == 1


@pytest.mark.parametrize("status", [200, 201])
def test_an_error_with_the_status_of_success(az: Store, url: str, status: int) -> None:
    """Nothing is stored, so nothing is committed."""
    az.server.fail(r"PUT .*checkpoint\.json", times=ALWAYS, answer=az.server.error(status, "ServerBusy"))
    with pytest.raises(hf.errors.StorageUnavailableError):
        hf.save(f"{az.url}/new", TREE)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(f"{az.url}/new")


def test_ctrl_c_ends_the_wait(az: Store, url: str) -> None:
    asked = threading.Event()
    az.server.fail("GET", times=ALWAYS, how="never", act=asked.set)

    def interrupt() -> None:
        asked.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        hf.load(url)
    thread.join()
    az.server.reset()
    assert hf.load(url)["step"] == 3


def test_orbax_is_told_to_copy(az: Store) -> None:
    from holdfast.integrations.formats.orbax.arrays import directory_spec

    with pytest.raises(hf.errors.InvalidLocationError, match="does not support az://; use a disk"):
        directory_spec(as_location(f"{az.url}/orbax"))
