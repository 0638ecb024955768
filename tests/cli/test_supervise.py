"""``holdfast supervise``: the rules for restarts as tables, and real programs that crash, hang and are preempted."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Cli
from tests.cli.programs import PROGRAM
from tests.starts import Program, run

from holdfast.cli.main import main
from holdfast.cli.supervise import Kind, RestartPolicy, RunRecord, Start, in_words, kind_of
from holdfast.engine.manager import read_events, slow_saves

pytestmark = pytest.mark.xdist_group("programs")

SUPERVISE = [sys.executable, "-m", "holdfast.cli.main", "supervise", "--pause", "10ms"]

CRASH, HANG = Start("crashed", 1, True), Start("hung", -9, True)
STUCK, LOST, PREEMPTED = Start("crashed", 1, False), Start("crashed", 1, None), Start("preempted", 75, True)

EARLY = Start("crashed", 1, None, early=True)


# ---- the rules


@pytest.mark.parametrize(
    ("starts", "max_restarts", "action", "status"),
    [
        ([Start("finished", 0, True)], 0, "end", 0),
        ([Start("finished", 1, True)], 9, "end", 1),  # training has finished, and what came after it failed
        ([CRASH], 0, "end", 1),
        ([CRASH], 1, "restart", 0),
        ([CRASH, CRASH], 1, "end", 1),
        ([CRASH, HANG], 1, "end", 137),
        ([CRASH, HANG], 2, "restart", 0),
        ([PREEMPTED] * 20, 0, "restart", 0),
        ([PREEMPTED, CRASH], 0, "end", 1),
        ([CRASH, PREEMPTED], 1, "restart", 0),
        ([STUCK] * 3, 99, "restart", 0),
        ([STUCK] * 4, 99, "end", 93),  # the first start is no restart
        ([STUCK] * 3 + [CRASH] + [STUCK] * 2, 99, "restart", 0),
        ([STUCK] * 3 + [CRASH] + [STUCK] * 3, 99, "end", 93),
        ([Start("preempted", 75, False)] * 4, 99, "end", 93),
        ([LOST] * 9, 99, "restart", 0),  # unknown progress is not the same as none
        ([STUCK, STUCK, LOST, STUCK], 99, "restart", 0),
        ([STUCK, STUCK, LOST, STUCK, STUCK], 99, "end", 93),
        ([EARLY] * 2, 99, "restart", 0),
        ([EARLY] * 3, 99, "end", 93),
        ([CRASH, EARLY, EARLY, EARLY], 99, "end", 93),
        ([EARLY, EARLY, LOST, EARLY, EARLY], 99, "restart", 0),
        ([Start("preempted", 75, None, early=True)] * 3, 99, "end", 93),
        ([EARLY] * 3, 2, "end", 93),
        ([EARLY] * 2, 1, "end", 1),
        ([Start("misused", 2, None)], 99, "end", 2),
        ([Start("interrupted", 130, True)], 99, "end", 130),
        ([Start("interrupted", -2, True, asked=True)], 99, "end", 130),
        ([Start("preempted", 75, True, asked=True)], 99, "end", 75),
        ([Start("preempted", 143, True, asked=True)], 99, "end", 143),
        ([Start("preempted", -15, True, asked=True)], 99, "end", 143),
        ([Start("preempted", 1, True, asked=True)], 99, "end", 75),  # as torchrun reports it
        ([Start("preempted", 0, True, asked=True)], 99, "end", 75),  # as an old trainer reports it
        ([Start("crashed", 1, True, asked=True)], 99, "end", 1),
        ([Start("finished", 0, True, asked=True)], 99, "end", 0),
    ],
)
def test_when_to_restart(starts: list[Start], max_restarts: int, action: str, status: int) -> None:
    verdict = RestartPolicy(max_restarts).decide(starts)
    assert (verdict.action, verdict.status) == (action, status), verdict


@pytest.mark.parametrize(
    ("starts", "pause"),
    [
        ([STUCK], 1),
        ([STUCK, STUCK], 2),
        ([STUCK, STUCK, LOST], 4),
        ([STUCK, CRASH], 1),
        ([CRASH, CRASH, CRASH], 1),
        ([STUCK, STUCK, PREEMPTED], 1),
        ([LOST] * 90, 10),
    ],
)
def test_pauses_grow_until_there_is_progress(starts: list[Start], pause: float) -> None:
    assert RestartPolicy(99, 1.0, 10.0).decide(starts).pause == pause


@pytest.mark.parametrize(
    ("returncode", "state", "hung", "asked", "kind"),
    [
        (0, "finished", False, False, "finished"),
        (1, "finished", False, False, "finished"),
        (0, None, False, False, "finished"),  # a program that reports nothing
        (0, "unfinished", False, False, "finished"),
        (0, "unfinished", False, True, "preempted"),
        (0, None, False, True, "preempted"),
        (0, "preempted", False, False, "preempted"),
        (1, "preempted", False, False, "preempted"),  # torchrun turns 75 into 1
        (75, None, False, False, "preempted"),
        (130, "preempted", False, True, "interrupted"),  # Ctrl-C, after which the callback has saved
        (-2, "unfinished", False, False, "interrupted"),
        (130, "finished", False, False, "finished"),
        (143, "unfinished", False, False, "preempted"),
        (-15, None, False, False, "preempted"),
        (-10, "unfinished", False, True, "preempted"),  # died of the SIGUSR1 that was forwarded
        (-10, "unfinished", False, False, "crashed"),
        (1, "unfinished", False, True, "crashed"),
        (2, None, False, False, "misused"),
        (2, "unfinished", False, False, "crashed"),
        (-9, "unfinished", True, False, "hung"),
        (75, "preempted", True, False, "hung"),
        (0, "finished", True, False, "finished"),  # it was only slow
    ],
)
def test_how_a_start_has_ended(returncode: int, state: str | None, hung: bool, asked: bool, kind: Kind) -> None:
    assert kind_of(returncode, state, hung=hung, asked=asked) == kind


def event(name: str, directory: str = "a", process: int = 0, **facts: Any) -> dict[str, Any]:
    return {"event": name, "directory": directory, "process": process, **facts}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], None),
        ([event("started")], "unfinished"),
        ([event("started"), event("saved"), event("finished")], "finished"),
        ([event("started"), event("finished"), event("started")], "unfinished"),
        ([event("started"), event("finished"), event("started", "b")], "unfinished"),
        ([event("started"), event("preempted"), event("started", "b"), event("finished", "b")], "preempted"),
        ([event("started"), event("started", process=1), event("finished")], "unfinished"),
        ([event("started"), event("save_failed"), event("finished")], "finished"),
        ([event("started"), event("failed")], "unfinished"),
    ],
)
def test_the_record_of_a_run(events: list[dict[str, Any]], state: str | None) -> None:
    record = RunRecord()
    record.add(events)
    assert record.state == state
    assert ("failed" in record.states.values()) == (event("failed") in events)
    # The step before the first start is that of the first event.
    record = RunRecord()
    record.add([event("started", newest=None), event("started", "b", newest=7), event("started", "b", newest=9)])
    assert record.newest == {"a": -1, "b": 7}


def test_slow_saves_in_a_row_are_reported_once() -> None:
    found: list[Any] = []
    note = slow_saves(10.0, lambda step, took: found.append((step, took)))
    for step, took in enumerate([1, 11, 12, 9, 13]):
        note({"event": "saved", "step": step, "total_seconds": took})
    assert found == [(1, 11), (4, 13)]


def test_words_about_a_resume() -> None:
    for exact, said in (
        (True, "exact: batch, state"),
        (False, "NOT exact: batch, state differ from before the stop"),
        (None, "exact up to rounding: batch, state"),
    ):
        words = in_words("witness", {"step": 8, "exact": exact, "layers": ["batch", "state"]})
        assert words == f"the resume from step 8 is {said}"


# ---- real programs


def supervise(*arguments: object, status: int = 0) -> list[dict[str, Any]]:
    """Supervises a program to its end; returns the events."""
    done = run(*SUPERVISE[1:], *arguments)
    assert done.returncode == status, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return [*found, {"event": "output", "text": done.stderr}]


def test_a_program_with_crashes_a_hang_and_a_preemption_ends_as_the_undisturbed_one(cli: Cli, tmp_path: Path) -> None:
    troubles = ["crash@3", "kill@6", "hang@8", "term@9"]
    log = tmp_path / "log.jsonl"
    options = ["--hang-timeout", "2s", "--grace", "1s", "--events", log, "--max-restarts", 30]
    events = supervise(*options, "--", *PROGRAM, tmp_path / "run", 12, *troubles)
    assert run(*PROGRAM[1:], tmp_path / "whole", 12).returncode == 0

    same, whole = (
        {path.name for path in (tmp_path / one).iterdir() if path.name.isdecimal()} for one in ("run", "whole")
    )
    assert same == whole == {"10", "12"}
    for step in whole:
        assert "bit for bit" in cli.output("diff", tmp_path / "run" / step, tmp_path / "whole" / step)
    proofs = [one for one in events if one["event"] == "witness"]
    assert proofs
    assert {(one["exact"], one["directory"]) for one in proofs} == {(True, str(tmp_path / "run"))}
    assert {"batch", "state"} & {layer for one in proofs for layer in one["layers"]}
    names = [one["event"] for one in events if one["event"] != "witness"]
    # On a busy machine, a start may take longer than the timeout, too.
    assert [name for name, _ in itertools.groupby(names)][-4:] == ["started", "finished", "ended", "output"]
    assert {"crashed", "hung", "preempted"} <= set(names)
    assert "in happen" in events[-1]["text"].partition('"hangs"')[2], "the stack of the thread that hangs"
    assert [one["event"] for one in read_events(log)[0]] == [one["event"] for one in events[:-1]]
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--no-stats", "-o", str(report)]) == 0
    marks = re.findall(r'data-mark="(\w+)" aria-label="\S+ \S+ ([^:"]+)', report.read_text())
    for mark, said in (
        ("crash", "Failed after step 2"),
        ("crash", "Crashed after step"),
        ("hung", "Hung after step 7"),
    ):
        assert any(one == mark and text.startswith(said) for one, text in marks), marks
    assert ("preempted", "Preempted after step 9") in [(one, text) for one, text in marks]
    assert marks[-1] == ("finished", "Finished after step 12")


def test_it_forwards_signals_and_the_last_status(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*SUPERVISE, "--", *PROGRAM, str(tmp_path / "run"), "8", "ready@3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        lines: list[str] = []
        while not lines or '"forwarded"' not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        said = "".join(lines) + process.communicate("\n", timeout=300)[1]
    assert process.returncode == 75, said
    names = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert names == ["started", "forwarded", "preempted", "ended"]
    events = supervise("--", *PROGRAM, tmp_path / "run", 8, "ready@3")
    assert events[-3]["newest"] == {str(tmp_path / "run"): 8}
    assert "resumed from step 3" in events[-1]["text"]


@pytest.mark.parametrize(("given", "seen"), [(None, "90"), ("7", "7")])
def test_torchrun_is_told_how_long_its_workers_may_save(
    given: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    program = [sys.executable, "-c", f"import os, sys; sys.exit(os.environ[{name!r}] != {seen!r})"]
    assert [one["event"] for one in supervise("--grace", "90s", "--", *program)][-3:-1] == ["finished", "ended"]


WITHOUT_PROGRESS = """
import holdfast as hf, sys
run = hf.CheckpointManager(sys.argv[1])
run.acquire()
0 in run.all_steps() or run.save(0, {'w': 1.0})
run.wait_until_finished()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("options", "program", "status", "starts", "why"),
    [
        (["--max-restarts", 1], "raise SystemExit(5)", 5, 2, "1"),  # without a run, progress is unknown
        ([], "raise SystemExit(5)", 93, 3, "3 starts in a row ended within 60 s, before their run began"),
        ([], WITHOUT_PROGRESS, 93, 4, "no new checkpoint in 3 restarts in a row"),
    ],
    ids=["the number of restarts", "before the run begins", "no progress"],
)
def test_when_it_gives_up(
    tmp_path: Path, options: list[object], program: str, status: int, starts: int, why: str
) -> None:
    events = supervise(*options, "--", sys.executable, "-c", program, tmp_path / "run", status=status)
    names = [one["event"] for one in events[:-1]]
    assert names == [*["started", "crashed", "restarting"] * starts][:-1] + ["ended"]
    assert why in events[-2]["why"]


CRASHES_ONCE = 'echo out; echo err >&2; [ -e "$0" ] || { touch "$0"; exit 3; }'


def test_it_outlives_those_who_read_its_output(tmp_path: Path) -> None:
    """The program dies of the line that it prints, and its next start does not."""
    program = '[ -e "$0" ] && echo again && exit; touch "$0"; echo ready; read line; echo lost; exit 3'
    command = [*SUPERVISE, "--events", f"{tmp_path}/log", "--", "sh", "-c", program, f"{tmp_path}/mark"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    events = read_events(tmp_path / "log")[0]
    assert [one["event"] for one in events] == (
        ["started", "crashed", "restarting", "output_lost"] + ["started", "finished", "ended"]
    )
    assert events[3]["streams"] == ["stdout", "stderr"]


def test_it_starts_with_closed_descriptors(tmp_path: Path) -> None:
    command = [*SUPERVISE, "--events", f"{tmp_path}/log", "--", "sh", "-c", CRASHES_ONCE, f"{tmp_path}/mark"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, timeout=60, check=False).returncode == 0
    assert [one["event"] for one in read_events(tmp_path / "log")[0][-3:]] == ["started", "finished", "ended"]


@pytest.mark.parametrize("read", [True, False])
def test_a_fifo_of_events_stops_nothing(tmp_path: Path, read: bool) -> None:
    place = tmp_path / "fifo"
    os.mkfifo(place)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK) if read else None
    done = run(*SUPERVISE[1:], "--events", place, "--", "sh", "-c", CRASHES_ONCE, tmp_path / "mark")
    assert done.returncode == 0
    names = [json.loads(line)["event"] for line in done.stderr.splitlines() if line.startswith("{")]
    assert names[-1] == "ended"
    assert done.stderr.count(f"events are missing in {place}: ") == (not read)
    if reader is not None:
        with open(reader) as lines:
            assert [json.loads(line)["event"] for line in lines] == names


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_shows_words(tmp_path: Path, as_json: bool) -> None:
    master, slave = os.openpty()
    program = ["--", "sh", "-c", CRASHES_ONCE, tmp_path / "mark", "\x1b[2J"]
    assert Program(*SUPERVISE[1:], *["--json"] * as_json, *program, stderr=slave).wait() == 0
    os.close(slave)
    said = os.read(master, 1 << 16).decode().replace("\r\n", "\n")
    os.close(master)
    assert "\x1b" not in said
    lines = [line for line in said.splitlines() if line != "err"]
    if as_json:
        assert [json.loads(line)["event"] for line in lines[-3:]] == ["started", "finished", "ended"]
        return
    assert [re.sub(r"\d+:\d\d:\d\d |\d+\.\d s", "", line) for line in lines[1:3]] == [
        "crashed: status 3 after ",
        "starting again in 0.01 s: crashed, 1 of 10 restarts used",
    ]
    assert re.fullmatch(r"..:..:.. started sh -c .* \(process \d+, start 1\)", lines[0])
    assert lines[-1].endswith("ended with status 0 after 2 starts: the run has finished")


def test_the_workers_that_a_program_leaves_behind_are_ended() -> None:
    """As torchrun leaves them, in a session of their own, when it is killed."""
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = run(*SUPERVISE[1:], "--max-restarts", 0, "--", sys.executable, "-c", program)
    assert done.returncode == 137
    child = int(done.stdout)
    crashed = json.loads(done.stderr.splitlines()[1])
    assert crashed["left_running"] == [child]
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of jax, which another test may have loaded
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "/no/such/program"], "cannot start /no/such/program: No such file or directory"),
        (["--hang-timeout", "soon", "--", "true"], "--hang-timeout='soon' is not a duration"),
    ],
)
def test_mistakes_in_the_arguments(cli: Cli, arguments: list[str], said: str) -> None:
    assert said in cli.error("supervise", *arguments, status=2)
