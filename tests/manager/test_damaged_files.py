"""A damaged or strange file harms what it belongs to, and nothing else.

Each file that a run, its mirror and its hosts have, or that a crash of the file system leaves, is damaged in each way,
and each action is tried on a copy of the same run. The outcome is right, older and told, or refused and told, and wrong
in no case; an action is refused only if nothing right is left for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.readers  # noqa: F401 - a user without rights cannot import it
import itertools
import logging
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.manager.damages import CONTENT, DAMAGES, STRANGE
from tests.manager.runs import commit, newest_whole, opened
from tests.processes.threads import together, unwrap

import holdfast as hf
from holdfast.cli.main import main

NEWEST = 3
RIGHT, OLDER, REFUSED = "right", "older and told", "refused and told"
LIKE = {"w": np.zeros(8, np.float32)}


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full(8, step, np.float32)}


def mirrored(folder: Path, **facts: Any) -> hf.CheckpointManager:
    options = hf.CheckpointManagerOptions(mirror=str(folder / "mirror"))
    return hf.CheckpointManager(folder / "run", options=options, metadata=facts or None)


def on_hosts(folder: Path, count: int, work: Callable[[hf.CheckpointManager], Any]) -> list[Any]:
    """Runs a program that has a process on each of its hosts, and is killed at the end."""

    def process(coordinator: Any) -> Any:
        name = f"host{coordinator.process_index}"
        local = hf.Local(folder / name, every=NEWEST, copies=count - 1, host=name)
        manager = opened(folder / "run", coordinator=coordinator, local=local, barrier_timeout_secs=30)
        with contextlib.suppress(KeyboardInterrupt), manager:
            found = work(manager)
            manager.wait_until_finished()
            raise KeyboardInterrupt
        return found

    return unwrap(together(count, process, timeout=60))


@pytest.fixture(scope="module")
def originals() -> Iterator[dict[str, Path]]:
    """Runs of three steps: one with a mirror, and two that have the last step on their hosts only."""

    def work(manager: hf.CheckpointManager) -> None:
        for step in range(1, NEWEST):
            manager.save(step, tree(step))
        manager.save_locally(NEWEST, tree(NEWEST))

    with tempfile.TemporaryDirectory() as base:  # where other users come, too
        Path(base).chmod(0o755)
        folders = {name: Path(base, name) for name in ("mirror", "1", "2")}
        at = folders["mirror"] / "at"
        for step in range(1, NEWEST + 1):
            with mirrored(at, lr=0.1) as run:
                commit(run, step, tree(step), metrics={"loss": 1.0})
                assert run.finish_mirror(60)
        hf.record_metrics(at / "run", 2, {"score": 1.0})
        for count in (1, 2):
            on_hosts(folders[str(count)] / "at", count, work)
        for folder in folders.values():
            (folder / "at").rename(folder / "original")
        yield folders


# ---- damages


def of_another_step(path: Path) -> None:
    other = Path(str(path.parent).replace(f"/{NEWEST}", "/2"))
    shutil.copy(next(other.glob(f"*{path.suffix}")), path)


def of_another_user(path: Path) -> None:
    if not path.exists():
        path.write_bytes(b"")
    path.chmod(0o700 if path.is_dir() else 0o600)
    os.chown(path, 0, 0)


def folder_of_another_user(path: Path) -> None:
    DAMAGES["folder"](path)
    of_another_user(path)


@contextlib.contextmanager
def as_a_user(folder: Path, path: Path) -> Iterator[None]:
    """Gives a folder to a user without rights, except what another one has, and acts as that user."""
    away = {path, *path.rglob("*")}
    for name in {folder, *folder.rglob("*")} - away:
        os.lchown(name, NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@functools.cache
def makes_devices() -> bool:
    """Returns whether this user makes devices."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        DAMAGES["device"](Path(folder, "x"))
        return True
    return False


IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NOBODY = 65534
OTHERS = ("of another user", "folder of another user")
ALL_DAMAGES: dict[str, Callable[[Path], object]] = {
    **DAMAGES,
    "of another step": of_another_step,
    "of another user": of_another_user,
    "folder of another user": folder_of_another_user,
}
DATA = f"{NEWEST}/state/d/*.0.0"

FILES: dict[str, tuple[str, ...]] = {
    "owner.json": (*CONTENT, *STRANGE),
    "options.json": (*CONTENT, *STRANGE),
    "events.jsonl": ("empty", "away", *STRANGE),
    "metadata": ("empty", "away", "pipe", "socket", "device"),
    "metadata/data.json": (*CONTENT, *STRANGE),
    "metrics": ("empty", "away", "pipe", "socket", "device"),
    ".holdfast-0123": ("empty", *STRANGE),
    f"{NEWEST}/checkpoint.json": (*CONTENT, *STRANGE, "of another step"),
    f"{NEWEST}/state/tree.json": (*CONTENT, *STRANGE),
    DATA: (*CONTENT, *STRANGE, "of another step"),
    f"{NEWEST}/checkpoint.partial": ("empty", *STRANGE),
    f"{NEWEST}/checkpoint.deleted": ("empty", *STRANGE),
    f"{NEWEST}/.holdfast-0123": ("empty", *STRANGE),
    f"{NEWEST + 1}/checkpoint.partial": ("empty", *STRANGE),
    f"{NEWEST + 1}/checkpoint.deleted": ("empty", *STRANGE),
}

LOCAL = f"*.{NEWEST}.*"
LOCAL_FILES: dict[str, tuple[str, ...]] = {
    f"{LOCAL}/checkpoint.json": (*CONTENT, *STRANGE),
    f"{LOCAL}/state/tree.json": (*CONTENT, *STRANGE),
    f"{LOCAL}/state/d/index": (*CONTENT, *STRANGE),
    f"{LOCAL}/state/d/*.0.*": (*CONTENT, *STRANGE),
    f"{LOCAL}/state": ("empty", "away", *STRANGE),
    LOCAL: ("empty", *STRANGE),
    "": ("empty", "pipe", "socket", "device", "dangling link"),
}
HOSTS = {  # the run, and the folders whose files are damaged
    "host": ("1", "host0/*/own"),
    "one of two hosts": ("2", "host0/*/own"),
    "both hosts": ("2", "host*/*/*"),
}


# ---- actions; each returns the step that it has used


def restored(run: hf.CheckpointManager) -> int:
    found = newest_whole(run, LIKE)
    assert np.array_equal(found.items["w"], tree(found.step)["w"])
    return int(found.step)


def resume(folder: Path) -> int:
    if count := len([*folder.glob("host*")]):
        (used,) = set(on_hosts(folder, count, restored))
        return int(used)
    with mirrored(folder) as run:
        return restored(run)


def save_locally(folder: Path) -> int:
    """Resumes, and saves a step in the directory and one on the hosts."""

    def work(manager: hf.CheckpointManager) -> int:
        used = restored(manager)
        assert manager.save(NEWEST + 1, tree(NEWEST + 1))
        manager.save_locally(2 * NEWEST, tree(2 * NEWEST))
        return used

    (used,) = set(on_hosts(folder, len([*folder.glob("host*")]), work))
    assert resume(folder) == 2 * NEWEST
    return int(used)


def save(folder: Path) -> int:
    """Saves the steps after the newest, of which an interrupted save may have left a folder."""
    with mirrored(folder) as run:
        for step in (NEWEST + 1, NEWEST + 2):
            assert run.save(step, tree(step))
    assert hf.verify(folder / "run", step=NEWEST + 1).ok
    assert hf.verify(folder / "run", step=NEWEST + 2).ok
    return NEWEST


def mirror(folder: Path) -> int:
    ended = threading.Event()

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "mirror_failed" or (event["event"], event.get("step")) == ("mirrored", NEWEST + 1):
            ended.set()

    with mirrored(folder) as run:
        run.events.add_listener(listen)
        commit(run, NEWEST + 1, tree(NEWEST + 1))
        assert ended.wait(60)
        if not run.finish_mirror(0.5):
            status = run.mirror_status()
            assert status is not None
            raise hf.errors.StorageError(str(status.error))
    assert hf.verify(folder / "mirror", step=NEWEST + 1).ok
    return NEWEST


def fetch(folder: Path) -> int:
    """Starts on another machine, which has only the mirror."""
    shutil.rmtree(folder / "run")
    return resume(folder)


def command(*arguments: str) -> Callable[[Path], int]:
    def act(folder: Path) -> int:
        with contextlib.chdir(folder):
            status = main([*arguments])
        assert status in (0, 1, 2)
        if status:
            raise hf.HoldfastError
        return NEWEST

    return act


ACTIONS: dict[str, Callable[[Path], int]] = {
    "resume": resume,
    "save_locally": save_locally,
    "save": save,
    "mirror": mirror,
    "fetch": fetch,
    "ls": command("ls", "run"),
    "show": command("show", "run", "--step", "2"),
    "verify": command("verify", "run"),
    "cp": command("cp", "run", "copy"),
    "pin": command("pin", "run", "2"),
    "rm": command("rm", "run", "1", "--yes"),
    "rollback": command("rollback", "run", "2", "--yes"),
    "prune": command("prune", "run", "--keep-latest", "1", "--yes"),
    "report": command("report", "run", "--no-stats"),
}
CHANGES = {"resume", "save", "mirror", "pin", "rm", "rollback", "prune"}


# ---- outcomes


class Case(NamedTuple):
    place: str
    file: str
    damage: str
    action: str

    @property
    def name(self) -> str:
        return f"{self.place}/{self.file}, {self.damage}: {self.action}"

    @property
    def expected(self) -> str:
        """The only outcome that is allowed."""
        is_strange = self.damage in STRANGE
        if self.damage in OTHERS and self.place not in HOSTS:
            return self.expected_of_others
        if self.place == "the run of a host":
            return REFUSED if self.damage == "folder" else OLDER
        if self.place in HOSTS:
            return RIGHT if self.place == "one of two hosts" else OLDER
        if self.place == "run" and self.action in CHANGES:
            if is_strange and self.file == "owner.json":
                return REFUSED  # no save could succeed: told before the first step
            if self.damage == "folder" and self.file == "options.json":
                return REFUSED
        if self.place == "mirror" and self.action == "mirror":
            if is_strange and self.file == "owner.json":
                return REFUSED
            if self.damage == "folder" and self.file == "options.json":
                return REFUSED
        if self.file in (f"{NEWEST}/checkpoint.json", f"{NEWEST}/state/tree.json", DATA):
            if self.place == "mirror" and self.action == "fetch":
                return OLDER
            is_listed = not (self.file.endswith("checkpoint.json") and self.damage in ("away", "dangling link"))
            if (self.place, self.action, is_listed) == ("run", "resume", False):
                return OLDER  # what the folder holds is not known, so that no step of the mirror replaces it
            if self.place == "run" and self.action in ("verify", "cp") and is_listed:
                return REFUSED  # the step is named as damaged; the others are copied
        return RIGHT

    @property
    def expected_of_others(self) -> str:
        """The same for what belongs to another user, who may be asked for it: no older step stands in for it."""
        is_refused = {
            "owner.json": (self.place == "run" and self.action in CHANGES - {"resume"}) or self.action == "mirror",
            "metrics": True,
            f"{NEWEST}/checkpoint.json": self.place == "run" or self.action in ("mirror", "fetch"),
            f"{NEWEST}/state/tree.json": self.action in ("verify", "cp", "fetch")
            or (self.place, self.action) == ("run", "resume"),
        }
        is_refused[DATA] = is_refused[f"{NEWEST}/state/tree.json"]
        is_refused["options.json"] = is_refused["owner.json"] or (self.place, self.action) == ("mirror", "fetch")
        if self.damage == "folder of another user" and self.file in ("owner.json", "options.json"):
            is_refused[self.file] |= (self.place, self.action) == ("run", "resume")
        return REFUSED if is_refused.get(self.file, False) else RIGHT


class Warnings(logging.Handler):
    """Keeps the warnings of the package; what commands do to its logger does not matter."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome(case: Case, originals: dict[str, Path], told: Callable[[], str]) -> str:
    run, within = {"the run of a host": ("1", "run"), **HOSTS}.get(case.place, ("mirror", case.place))
    folder = originals[run] / "at"  # local steps belong to the path of the run
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(originals[run] / "original", folder)
    path = f"{within}/{case.file}".rstrip("/")
    found = [*folder.glob(path)] if "*" in path else [folder / path]
    assert found
    for damaged in found:
        damaged.parent.mkdir(exist_ok=True)
        ALL_DAMAGES[case.damage](damaged)
    warnings, logger = Warnings(), logging.getLogger("holdfast")
    logger.addHandler(warnings)
    logger.setLevel(logging.WARNING)
    told()
    try:
        with as_a_user(folder, found[0]) if case.damage in OTHERS else contextlib.nullcontext():
            used = ACTIONS[case.action](folder)
    except hf.HoldfastError as error:
        text = f"{error} {told()}"
        is_named = str(folder) in text or "run/" in text or f"step {NEWEST}" in text
        return REFUSED if is_named else f"refused without a name: {text}"
    finally:
        logger.removeHandler(warnings)
    if used == NEWEST:
        return RIGHT
    is_named = any(f"step {NEWEST}" in text or "host0" in text for text in warnings.texts)
    return OLDER if is_named else f"step {used}, and said {warnings.texts}"


CASES = [
    Case(place, file, damage, action)
    for place, (file, damages) in itertools.product(("run", "mirror"), FILES.items())
    for damage in (*damages, *(OTHERS if IS_ROOT else ()))
    for action in ACTIONS
    if action != "save_locally" and (damage not in OTHERS or action != "fetch" or place == "mirror")
    if place == "run" or action in ("resume", "save", "mirror", "fetch")  # the other actions do not read the mirror
    if (place, file) not in (("mirror", "metrics"), ("mirror", "events.jsonl"))  # it has none
    # Without its record, a step of the mirror does not exist: it may be a copy that has not ended.
    if (place, file) != ("mirror", f"{NEWEST}/checkpoint.json") or damage not in ("away", "dangling link")
] + [
    Case(place, file, damage, action)
    for place, file, damages in [
        ("the run of a host", "options.json", (*CONTENT, *STRANGE)),
        *((place, file, damages) for place, (file, damages) in itertools.product(HOSTS, LOCAL_FILES.items())),
    ]
    for damage in (*damages, *(OTHERS if place in ("host", "one of two hosts") and IS_ROOT else ()))
    for action in ("resume", "save_locally")
    # Without the folder of all steps, local saves fail, which does not end training.
    if action == "resume" or (file and damage not in OTHERS)
]


def test_what_each_damage_does_to_each_action(
    every: bool, originals: dict[str, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # this is about files, not about power

    def told() -> str:
        captured = capfd.readouterr()
        return captured.out + captured.err

    cases = CASES if every else random.Random(7).sample(CASES, len(CASES) // 10)
    wrong = {}
    for case in cases:
        if case.damage == "device" and not makes_devices():
            continue
        try:
            found = outcome(case, originals, told)
        except Exception as error:  # a foreign error is an outcome, too
            found = f"wrong: {error!r}"
        if found != case.expected:
            wrong[case.name] = f"{found}, expected {case.expected}"
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
