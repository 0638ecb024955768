"""Waits for a store of torch: each is one request, however long it lasts, and leaves nothing when it is given up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.distributed import next_rendezvous, torch_store
from holdfast.engine.distributed.torch_store import TorchCoordinator
from holdfast.engine.errors import BarrierTimeoutError, PeerFailedError

distributed: Any = pytest.importorskip("torch.distributed")

PATIENCE = 30.0


class CountedStore(distributed.Store):  # type: ignore[misc]
    """A store in memory that counts its requests, and says when a wait has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.values = distributed.HashStore()
        self.requests: Counter[str] = Counter()
        self.waits = threading.Event()

    def clone(self) -> CountedStore:
        return self

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self.values.set(key, value)

    def get(self, key: str) -> Any:
        self.requests["get"] += 1
        return self.values.get(key)

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return bool(self.values.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self.waits.set()
        self.values.wait(keys, timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        self.requests["compare_set"] += 1
        return self.values.compare_set(key, expected, desired)


def processes(count: int = 2) -> tuple[CountedStore, list[TorchCoordinator]]:
    """Make a store, and the coordinators of processes, which are threads."""
    store = CountedStore()
    return store, [TorchCoordinator(store, index, count) for index in range(count)]


def wait_for_end(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a wait is left in the store"


@pytest.fixture(autouse=True)
def no_wait_is_left() -> Iterator[None]:
    yield
    wait_for_end("holdfast-wait")


def test_a_wait_is_one_request_until_the_value_is_there_and_a_look_where_it_ends() -> None:
    store, (waiting, other) = processes()
    for _ in range(20):
        with pytest.raises(TimeoutError, match=r"no process stored step within 0\.01 s"):
            waiting.get("step", 0.01)
    assert store.waits.wait(PATIENCE)
    assert store.requests == {"check": 21, "wait": 1}
    other.put("step", b"12")
    assert waiting.get("step", PATIENCE) == b"12"
    assert store.requests == {"check": 21, "wait": 1, "set": 1, "get": 1}


def test_a_value_is_found_although_the_connection_of_the_wait_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store, (waiting, other) = processes()
    lost = threading.Event()
    monkeypatch.setattr(store, "wait", lambda keys, timeout: lost.wait(PATIENCE))
    with pytest.raises(TimeoutError):
        waiting.get("step", 0.01)
    other.put("step", b"12")
    assert waiting.get("step", 0.01) == b"12"
    lost.set()


def test_a_wait_that_one_process_gives_up_continues_in_the_others() -> None:
    _, (first, second, third) = processes(3)
    for coordinator in (first, second):
        with pytest.raises(TimeoutError):
            coordinator.get("step", 0.01)
    first.give_up("step")
    assert third.try_get("step") is None
    assert third.try_get_all(["step"]) is None
    with pytest.raises(TimeoutError):
        second.get("step", 0.01)
    third.put("step", b"12")
    assert [one.get("step", PATIENCE) for one in (first, second, third)] == [b"12"] * 3


def test_a_value_that_came_meanwhile_is_not_given_up() -> None:
    _, (waiting, other) = processes()
    with pytest.raises(TimeoutError):
        waiting.get("step", 0.01)
    other.put("step", b"12")
    waiting.give_up("step")
    assert other.try_get("step") == b"12"


@pytest.mark.parametrize(
    ("fails", "expected", "said"),
    [(True, PeerFailedError, "the disk is full"), (False, BarrierTimeoutError, "process 2 of 3 did")],
)
def test_a_barrier_that_another_process_does_not_reach_leaves_no_wait(
    fails: bool, expected: type[Exception], said: str
) -> None:
    _, coordinators = processes(3)
    *present, absent = [next_rendezvous(one, "save") for one in coordinators]
    if fails:
        absent.fail(OSError("the disk is full"))

    def arrive(rendezvous: Any) -> None:
        with pytest.raises(expected, match=said):
            rendezvous.barrier("written", 0.3)
        rendezvous.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(arrive, present))


# One process imports torch, and forks a process for each program. A program runs to the end of its script, where Python
# ends it as any other.
PROGRAMS = """
import json
import os
import sys
import tempfile
import time
import torch.distributed as distributed
from holdfast.engine.distributed import next_rendezvous
from holdfast.engine.distributed.torch_store import TorchCoordinator

for line in iter(sys.stdin.readline, ""):
    errors = tempfile.TemporaryFile()
    process = os.fork()
    if process == 0:
        os.dup2(errors.fileno(), 2)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    errors.seek(0)
    print(json.dumps([status, errors.read().decode()]), flush=True)
else:
    os._exit(0)
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
coordinator = TorchCoordinator(store, 0, 2)
exec(json.loads(line))
"""
Run = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a program in a process of its own; returns its status, and what it wrote to standard error."""
    command, pipe = [sys.executable, "-c", PROGRAMS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        requests: Any = process.stdin
        answers: Any = process.stdout

        def run(program: str) -> list[Any]:
            print(json.dumps(program), file=requests, flush=True)
            done: list[Any] = json.loads(answers.readline())
            return done

        yield run
        requests.close()


def test_a_barrier_that_another_process_does_not_reach_is_a_clean_end_of_process_0(run: Run) -> None:
    status, said = run('next_rendezvous(coordinator, "save").barrier("written", 0.3)')
    assert status == 1
    assert "BarrierTimeoutError: save#1: process 1 of 2 did not reach 'written' within 0.3 s" in said
    assert "waitForInput" not in said, "torch warns of a wait that timed out"


WAITS = """
try:
    coordinator.get("step", 0.3)
except TimeoutError:
    pass
"""


def test_a_wait_that_is_left_at_exit_does_not_abort_the_process(run: Run) -> None:
    """The end of the server wakes the thread that waits, and Python would end that thread in the middle of torch."""
    program = """
class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2)

_ends_first, ends_later = store, LongEnd()  # the names with an underscore go first
del store
sys.exit(5)
"""
    status, said = run(WAITS + program)
    assert status == 5, said


def test_a_call_that_the_store_answers_while_the_process_ends_does_not_abort_it(run: Run, tmp_path: Path) -> None:
    """As above: Python would end the thread that is in torch. A lock on the file makes the store answer late."""
    program = f"""
import atexit
import subprocess
import threading

path = {str(tmp_path / "store")!r}
held = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True)"
late = "sys.stdin.read(); time.sleep(0.5)"

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

coordinator = TorchCoordinator(distributed.FileStore(path, 2), 0, 2)
coordinator.put("step", b"1")
pipe = subprocess.PIPE
other = subprocess.Popen([sys.executable, "-c", f"{{held}}; {{late}}", path], stdin=pipe, stdout=pipe)
other.stdout.readline()
atexit.register(other.stdin.close)  # exit functions run in reverse order: this one before those of the engine
begun = threading.Event()

def call():
    begun.set()
    coordinator.try_get("step")

sys.setswitchinterval(30)  # the thread runs until it waits in torch
threading.Thread(target=call, daemon=True).start()
begun.wait()
ends_later = LongEnd()
sys.exit(5)
"""
    status, said = run(program)
    assert status == 5, said


def test_a_forked_process_does_not_give_up_the_waits_of_its_parent(run: Run) -> None:
    program = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=sys.exit)
child.start()
child.join()
assert not distributed.PrefixStore("holdfast", store).check(["step"])
"""
    status, said = run(WAITS + program)
    assert status == 0, said


def test_what_an_earlier_start_has_left_in_the_store_of_torchrun_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store when it starts the processes again after one has died."""
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alive = [True, True]

    def process(start: int, index: int) -> TorchCoordinator:
        return TorchCoordinator(store.clone(), index, 3, lambda: alive[start])

    def resume(process: TorchCoordinator, step: bytes | None = None) -> bytes:
        return next_rendezvous(process, "resume").broadcast("step", step, PATIENCE)  # None closes it: all die.

    with ThreadPoolExecutor(2) as threads:
        first, second = process(0, 0), process(0, 1)  # The third has died before.
        answer = threads.submit(resume, second)
        assert [resume(first, b"120"), answer.result(PATIENCE)] == [b"120"] * 2
        alive[0] = False
        wait_for_end("holdfast-start")
        began = time.time()
        monkeypatch.setattr(torch_store, "_process_began", lambda: began)
        again = [process(1, index) for index in range(3)]
        answers = [threads.submit(resume, one) for one in again[1:]]  # before process 0
        assert [resume(again[0], b"80"), *(one.result(PATIENCE) for one in answers)] == [b"80"] * 3
    wait_for_end("holdfast-start")


@pytest.mark.parametrize("ends", ["the process group", "the process"])
def test_process_0_of_torchrun_ends_before_another_asks(ends: str) -> None:
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alive = [True]
    first, second = [TorchCoordinator(store.clone(), index, 2, lambda: alive[0]) for index in range(2)]
    assert next_rendezvous(first, "copy").broadcast("done", b"yes", PATIENCE) == b"yes"
    if ends == "the process":
        first.give_up_all()
    alive[0] = False
    wait_for_end("holdfast-start")
    assert next_rendezvous(second, "copy").broadcast("done", None, PATIENCE) == b"yes"
