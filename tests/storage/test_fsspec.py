"""Places that fsspec reaches, and file systems that are passed: promises, errors, secrets, forked processes."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from tests.storage.test_storage_conformance import BackendConformance

import holdfast as hf
from holdfast.engine.storage import Location, Segment, as_location, fsspec_store, object_store

CANARY = "canary"


class Plain(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system on the disk of which nothing is known."""

    protocol = "plain"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("plain://")))


class Replaces(Plain):
    """Its rename replaces a target, as that of SFTP does."""

    protocol = "sftp"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        os.rename(path1, path2)


class Renames(Replaces):
    """Its rename refuses a target that is there, as that of HDFS does."""

    protocol = "hdfs"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if os.path.exists(path2):
            raise FileExistsError(17, "File exists", path2)
        super().mv(path1, path2)


KINDS = {"memory": MemoryFileSystem, "renames": Renames, "replaces": Replaces, "plain": Plain}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("plain", Plain, clobber=True)
    yield
    fsspec_store._open_fsspec.cache_clear()


@pytest.fixture(params=KINDS)
def filesystem(request: pytest.FixtureRequest) -> Any:
    """A file system of each kind."""
    return KINDS[request.param](skip_instance_cache=True, auto_mkdir=False)


@pytest.fixture
def place(filesystem: Any, tmp_path: pathlib.Path) -> Location:
    """A folder in a file system of each kind."""
    return as_location(f"{tmp_path}/some where/{uuid.uuid4().hex}", filesystem=filesystem)


class TestFsspec(BackendConformance):
    @pytest.fixture
    def root(self, place: Location) -> Location:
        return place


def test_a_run(place: Location) -> None:
    options = hf.CheckpointManagerOptions(max_to_keep=2)
    for first in (1, 4):
        with hf.CheckpointManager(place, options=options) as run:
            assert run.latest_step() == (first - 1 or None)
            for step in range(first, first + 3):
                run.save(step, {"w": np.full(1000, step), "step": step})
    assert [one.step for one in hf.list_checkpoints(place)] == [5, 6]
    assert hf.load(place)["step"] == 6
    assert hf.verify(place).ok
    hf.save(place / "other", {"x": 1})
    hf.save(place / "other", {"x": 2}, overwrite=True)
    assert hf.load(place / "other") == {"x": 2}


MISSING = {
    "memory": "concurrent saves to one path are not kept apart$",
    "replaces": "concurrent saves .*; what was written may be lost if the machines that keep it lose power$",
    "renames": "concurrent saves .*lose power; a crash while a checkpoint is replaced may leave neither",
    "plain": "concurrent saves .*lose power; a crash may leave half a commit record.*; a crash while",
}


def test_what_is_not_promised_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, missing in MISSING.items():
        caplog.clear()
        filesystem = KINDS[kind](skip_instance_cache=True)
        for name in ("a", "b"):
            as_location(f"{tmp_path}/{name}", filesystem=filesystem)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert re.search(rf"^{filesystem.protocol}\+.*{missing}", record.getMessage())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what://x", "unknown scheme, 'what': expected a path"),
        ("simplecache://x", "unknown scheme"),
        ("zip://x", "unknown scheme"),
        ("no_library://x", "unknown scheme, 'no_library'"),
        (f"simplecache::ftp://user:{CANARY}@host/x", "chains fsspec file systems.*filesystem="),
        ("webhdfs:/host/x", "lost a slash"),
        (f"ftp://user:{CANARY}@host/x", "contains a password.*filesystem="),
        ("sftp:/host/x", "lost a slash"),
        ("plain:///a/../b", "'..'"),
        ("memory+1234abcd://x", "that this process does not have: pass it"),
    ],
)
def test_what_is_no_place(text: str, message: str) -> None:
    with pytest.raises(hf.errors.InvalidLocationError, match=message) as caught:
        as_location(text)
    assert CANARY not in str(caught.value)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError('SFTPFileSystem requires "paramiko" to be installed')
    monkeypatch.setattr(fsspec, "get_filesystem_class", Mock(side_effect=error))
    with pytest.raises(hf.errors.OptionError, match=r'sftp://host/x.* needs another package.*"paramiko"'):
        as_location("sftp://host/x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hf.errors.InvalidLocationError, match=r"needs fsspec \(pip install .*\[fsspec\]'\)"):
        as_location("hdfs://host/run")
    with pytest.raises(hf.errors.OptionError, match="needs fsspec"):
        as_location("run", filesystem=object())


def test_file_systems_that_are_passed(tmp_path: pathlib.Path) -> None:
    assert as_location(str(tmp_path / "x"), filesystem=LocalFileSystem()).path == tmp_path / "x"
    with pytest.raises(hf.errors.OptionError, match=r"filesystem=builtins\.int is neither an fsspec nor"):
        as_location("x", filesystem=3)
    filesystem = MemoryFileSystem()
    place = as_location("/runs/x", filesystem=filesystem)
    assert as_location("runs/y", filesystem=filesystem).parent == place.parent
    assert pickle.loads(pickle.dumps(place)).name == "x"
    with pytest.raises(hf.errors.InvalidLocationError, match=r"'\.\.'"):
        as_location("/runs/../x", filesystem=filesystem)
    with pytest.raises(hf.errors.OptionError, match="leave filesystem= out"):
        as_location(place, filesystem=filesystem)


def url_of(filesystem: Any) -> str:
    return as_location("runs/x", filesystem=filesystem).url


def test_the_url_of_a_file_system_is_the_same_in_all_processes(tmp_path: pathlib.Path) -> None:
    """A process of several opens what another one names, and all compare their directories."""
    systems = [
        DirFileSystem(str(tmp_path / "a"), fs=LocalFileSystem()),
        DirFileSystem(str(tmp_path / "b"), fs=LocalFileSystem()),
        MemoryFileSystem(kinds={"checkpoint", "log", "metrics"}, skip_instance_cache=True),
        MemoryFileSystem(proxy={"password": ""}, skip_instance_cache=True),  # as pyarrow describes one for S3
    ]
    urls = [url_of(one) for one in systems]
    assert len(set(urls)) == len(systems)
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(url_of, pickle.loads(pickle.dumps(one))).result() for one in systems] == urls
    program = (
        "import pickle, sys; from holdfast.storage import as_location\n"
        "for one in pickle.load(sys.stdin.buffer): print(as_location('runs/x', filesystem=one).url)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=pickle.dumps(systems), capture_output=True, env=environment, check=True)
    assert done.stdout.decode().split() == urls


def test_urls_of_this_process(tmp_path: pathlib.Path) -> None:
    """A name without the secrets of a file system would mean files of another account elsewhere."""
    one, other = (MemoryFileSystem(zone="a", token=token, skip_instance_cache=True) for token in (CANARY, "another"))
    assert url_of(one) == url_of(pickle.loads(pickle.dumps(one))) != url_of(other)
    first, *_ = fsspec_store._names_of(one, "")
    assert fsspec_store._names_of(one, "")[0] != first, "chosen at random"
    locked = MemoryFileSystem(lock=threading.Lock(), skip_instance_cache=True)  # which cannot be pickled
    assert url_of(locked) == url_of(locked)
    assert re.match(r"memory\+[0-9a-f]{8}://runs/x", url_of(locked))


class Home(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Relative paths count from a home, as those of SFTP do."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.rstrip("/")


def test_relative_and_absolute_paths_of_one_file_system() -> None:
    filesystem = Home(skip_instance_cache=True)
    absolute, relative = (
        [as_location(path, filesystem=filesystem) for _ in range(2)] for path in ("/data/x", "data/x")
    )
    assert absolute[0] == absolute[1] != relative[0] == relative[1]


def test_the_deletion_of_a_snapshot_spares_what_was_written_since(place: Location) -> None:
    (place / "a" / "old").write_bytes(b"1")
    (place / "b" / "old").write_bytes(b"1")
    snapshot = place.snapshot()
    (place / "a" / "new").write_bytes(b"2")
    snapshot.remove_tree()
    assert [entry.name for entry in place.entries()] == ["a"]
    assert [entry.name for entry in (place / "a").entries()] == ["new"]
    place.snapshot().remove_tree()
    assert not list(place.entries())


def test_components_take_the_file_system_of_rllib(filesystem: Any, tmp_path: pathlib.Path) -> None:
    class Policy(hf.components.Checkpointable):
        def __init__(self, size: int = 3) -> None:
            self.weights = np.zeros(size)

    policy = Policy()
    policy.weights += 1
    path = policy.save_to_path(f"{tmp_path}/policy", filesystem=filesystem)
    other = Policy()
    other.restore_from_path(f"{tmp_path}/policy", filesystem=filesystem)
    assert other.weights.tolist() == [1, 1, 1]
    assert Policy.from_checkpoint(f"{tmp_path}/policy", filesystem=filesystem).weights.tolist() == [1, 1, 1]
    assert Policy.from_checkpoint(path).weights.tolist() == [1, 1, 1]


class Fails(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Raises an error with a secret from every call."""

    protocol = "fails"

    def __init__(self, error: Exception, **options: Any) -> None:
        super().__init__(**options)
        self.error = error

    def info(self, path: str, **kwargs: Any) -> Any:
        raise self.error

    ls = cat_file = pipe_file = open = rm_file = makedirs = info


DATA = Segment(0, 10, lambda: iter([np.zeros(10, np.uint8)]))


def of_a_library(name: str, message: str) -> Exception:
    """Returns an error that holdfast does not know, as libraries name theirs."""
    error: Exception = type(name, (Exception,), {})(message)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "Permission denied"), hf.errors.StoragePermissionError),
        (of_a_library("AuthenticationFailedError", f"no password: {CANARY}"), hf.errors.StoragePermissionError),
        (OSError(28, "No space left on device"), hf.errors.StorageFullError),
        (of_a_library("ConnectTimeoutError", "https://user:canary@host"), hf.errors.StorageUnavailableError),
        (ConnectionResetError(104, "reset"), hf.errors.StorageUnavailableError),
        (TimeoutError(f"login {CANARY}"), hf.errors.StorageUnavailableError),
        (socket.gaierror(-2, "Name or service not known"), hf.errors.StorageUnavailableError),
        (EOFError(), hf.errors.StorageUnavailableError),
        (RuntimeError(f"token {CANARY} is wrong"), hf.errors.StorageError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_without_secrets(error: Exception, kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    """A list that fails is not an empty directory either."""
    place = as_location("/run", filesystem=Fails(error, password=CANARY, nested={"api_key": CANARY}))
    with caplog.at_level(logging.DEBUG):
        for action in (
            lambda: hf.load(place),
            lambda: hf.save(place, {"x": 1}),
            lambda: hf.CheckpointManager(place),
            place.entries,
            place.remove_tree,
            lambda: place.write_bytes(b"x"),
            lambda: place.write_data(10, [DATA]),
        ):
            with pytest.raises(kind, match=r"cannot .*fails") as caught:
                action()
            assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"password": f"two  spaces {CANARY}"}, "two  spaces canary"),
        ({"client_kwargs": {"headers": {"Authorization": f"Bearer {CANARY}"}}}, "Bearer canary"),
        ({"auth": ("user", f"it's {CANARY}")}, repr(f"it's {CANARY}")),
        ({"key": f"a/b+{CANARY}"}, "https://host/?k=a%2Fb%2Bcanary"),
        ({"endpoint_url": f"https://user:in an address {CANARY}@host"}, "in an address canary"),
        ({"connection_string": f"AccountName=a;AccountKey={CANARY}=="}, "AccountName=a;AccountKey=canary=="),
        ({"sas_token": f"{CANARY}\nlines".encode()}, f"{CANARY}\nlines"),
        ({"proxies": [f"http://user:{CANARY} of@proxy"]}, "canary of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_secrets_of_any_form_among_the_options(options: dict[str, Any], said: str) -> None:
    place = as_location("/run", filesystem=Fails(RuntimeError(f"refused: {said}"), **options))
    with pytest.raises(hf.errors.StorageError, match="refused: ") as caught:
        place.entries()
    assert CANARY not in "".join(traceback.format_exception(caught.value))


class Loses(Replaces):
    """A file system that loses the end of each file, and renames none."""

    protocol = "sftp"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "I/O error")

    def info(self, path: str, **kwargs: Any) -> Any:
        found = super().info(path, **kwargs)
        return {**found, "size": max(0, found["size"] - 1)} if found["type"] == "file" else found


def test_what_arrives_in_part_or_under_another_name_only_is_removed(tmp_path: pathlib.Path) -> None:
    place = as_location(str(tmp_path / "folder"), filesystem=Loses(skip_instance_cache=True))
    with pytest.raises(hf.errors.StorageError, match="10 bytes were sent, but 9 were stored; try again"):
        (place / "data").write_data(10, [DATA])
    with pytest.raises(hf.errors.StorageError, match="I/O error"):
        (place / "record").write_bytes(b"content")
    assert list((tmp_path / "folder").iterdir()) == []


class LibraryError(OSError):
    """As libraries below derive theirs, such as smbprotocol's ``SMBOSError``."""


class Shared(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that others use at the same time, with errors of its own."""

    protocol = "smb"

    def info(self, path: str, **kwargs: Any) -> Any:
        try:
            return super().info(path, **kwargs)
        except FileNotFoundError:
            raise LibraryError(errno.ENOENT, "No such file") from None

    def rmdir(self, path: str) -> None:
        if path.endswith("filled"):
            self.pipe_file(f"{path}/new", b"of another process")
        else:
            super().rmdir(path)
        raise LibraryError("Failure")


def test_errors_of_a_library_for_what_others_have_removed_or_written() -> None:
    place = as_location("/shared/run", filesystem=Shared(skip_instance_cache=True))
    assert not place.is_there()
    for name in ("filled/old", "gone/old"):
        (place / name).write_bytes(b"x")
    place.snapshot().remove_tree()
    assert [(one.name, [file.name for file in (place / one.name).entries()]) for one in place.entries()] == [
        ("filled", ["new"])
    ]


class Lost(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system whose connection is lost at the first deletion of a folder, or before it, once a file is gone."""

    protocol = "lost"
    is_lost = False

    def info(self, path: str, **kwargs: Any) -> Any:
        if self.is_lost:
            raise ConnectionResetError(errno.ECONNRESET, "the later error")
        return super().info(path, **kwargs)

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        self.is_lost = bool(self.storage_options["early"])

    def rm(self, path: str, **kwargs: Any) -> None:
        self.is_lost = True
        raise ConnectionResetError(errno.ECONNRESET, "connection lost")

    rmdir = rm


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("early", "message"), [(False, "connection lost"), (True, "the later error")])
def test_a_lost_connection_is_no_folder_that_is_gone(listed: bool, early: bool, message: str) -> None:
    place = as_location(f"/lost/{listed}/{early}", filesystem=Lost(listed=listed, early=early))
    (place / "state" / "file").write_bytes(b"x")
    with pytest.raises(hf.errors.StorageUnavailableError, match=message):
        (place.snapshot() if listed else place).remove_tree()


@pytest.mark.parametrize("error", [None, OSError(CANARY)], ids=["an answer", "an error"])
def test_what_comes_too_late_is_dropped(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a call that is no longer awaited ends without a warning."""
    told: list[Any] = []
    threads: list[threading.Thread] = []
    given_up = threading.Event()

    class Late(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
            threads.append(threading.current_thread())
            given_up.wait()
            if error is not None:
                raise error

    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", 0.01)
    with pytest.raises(hf.errors.StorageUnavailableError, match="no answer"):
        as_location("/run", filesystem=Late(skip_instance_cache=True)).write_bytes(b"x")
    given_up.set()
    threads[0].join()
    assert not told


FORKED = """
import os, sys
import fsspec
from tests.storage.test_fsspec import Plain
import holdfast as hf

class Noted(Plain):
    def __init__(self, **options):
        super().__init__(**options)
        self.process = os.getpid()

    def info(self, path, **options):
        assert self.process == os.getpid(), "made by the parent"
        return super().info(path, **options)

url = f"plain://{sys.argv[1]}/a%20b/run"
fsspec.register_implementation("plain", Noted)
hf.save(url, {"step": 3})
child = os.fork()
found = hf.load(url)
os.write(1, f"{'parent' if child else 'child'} {found}\\n".encode())  # at once: both print
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_url_and_forked_processes_that_connect_again(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert sorted(found.stdout.splitlines()) == ["child {'step': 3}", "parent {'step': 3}"], found.stderr
    assert (tmp_path / "a b" / "run" / "checkpoint.json").is_file()
    place = as_location(f"plain://{tmp_path}/a%20b/run")
    assert hf.load(place.url) == {"step": 3}
    assert as_location(place.url) == place
