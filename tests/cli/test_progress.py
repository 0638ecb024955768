"""How far long commands are, and what an interrupt leaves behind."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests import starts
from tests.cli.commands import Cli
from tests.clocks import FakeClock
from tests.manager.runs import saved

import holdfast as hf
from holdfast.cli.progress import Meter

pytestmark = pytest.mark.xdist_group("programs")

MEGABYTE = 1_000_000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- what is shown


def shown(stream: io.StringIO, what: str, *, megabytes: int, each: int, times: int, seconds: float = 1) -> str:
    """Lets a meter see some work, and returns what it shows, before it ends."""
    clock = FakeClock()
    meter = Meter(what, stream, clock.monotonic)
    meter.expect(megabytes * MEGABYTE)
    for _ in range(times):
        clock.sleep(seconds)
        meter.advance(each * MEGABYTE)
        meter.tick()
    text = stream.getvalue()
    meter.close()
    return text


def test_short_work_shows_nothing_and_what_does_not_move_has_no_time_left() -> None:
    stream = Terminal()
    assert shown(stream, "copy", megabytes=1, each=0, times=1, seconds=0.9) == stream.getvalue() == ""
    text = shown(io.StringIO(), "verify", megabytes=1, each=0, times=1, seconds=31)
    assert text == "holdfast: verify: 0 B of 1.0 MB, 0 B/s\n"


@pytest.mark.parametrize(("columns", "least"), [(100, 8), (80, 8), (60, 0)])
def test_a_terminal_shows_a_bar_where_it_has_room_and_then_nothing(
    monkeypatch: pytest.MonkeyPatch, columns: int, least: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    text = shown(stream, "verify", megabytes=100_000, each=10_000, times=4)
    bar = sum(text.rpartition("verify")[2].count(char) for char in "━╸╺")
    assert (bar >= least) if least else (bar == 0)
    for part in ("verify", "40%", "40.0/100.0 GB", "10.0 GB/s", "0:00:06"):  # the last is what is left
        assert part in text
    ending = stream.getvalue()[len(text) :]
    assert "\x1b[2K" in ending, "the line is erased"
    assert "\x1b[?25h" in ending, "the cursor is shown again"


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")], ids=["file", "dumb"])
def test_anything_else_gets_a_line_every_so_often(
    stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    shown(stream, "verify", megabytes=3600, each=10, times=65)
    assert stream.getvalue().splitlines() == [
        "holdfast: verify: 300.0 MB of 3.6 GB, 10.0 MB/s, 5 min 30 s left",
        "holdfast: verify: 600.0 MB of 3.6 GB, 10.0 MB/s, 5 min 00 s left",
    ]


LONG: dict[str, str] = {  # commands with their arguments
    "verify": "run",
    "diff": "run/1 run/2",
    "show": "run --stats",
    "cp": "run other",
    "import": "w.safetensors other",
    "export": "run x.safetensors",
    "rm": "run 1 --yes",
}


@pytest.mark.parametrize("command", LONG)
@pytest.mark.parametrize("as_json", [False, True])
def test_commands_that_take_long_show_how_far_they_are(
    command: str, as_json: bool, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters: list[Meter] = []
    ticks: list[bool] = []

    class Watched(Meter):
        def __init__(self, what: str) -> None:
            super().__init__(what)
            meters.append(self)

        def tick(self) -> None:
            ticks.append(True)

        def close(self) -> None:  # called only where it is shown
            ticks.append(True)

    monkeypatch.setattr("holdfast.cli.progress.Meter", Watched)
    monkeypatch.chdir(tmp_path)
    saved("run", 1, 2, items=lambda step: {"w": np.arange(1000.0)})
    safetensors.numpy.save_file({"w": np.arange(1000.0)}, "w.safetensors")

    text = cli.output(command, *LONG[command].split(), *(["--json"] if as_json else []))

    [meter] = meters
    assert meter._done == meter._expected > 0
    assert bool(ticks) != as_json
    assert not as_json or isinstance(json.loads(text), dict)


# ---- an interrupt: a real process, and a real signal at a byte that is chosen

INTERRUPTED = """
import os, signal, sys
from holdfast.cli import progress
from holdfast.cli.main import main

class Meter(progress.Meter):
    def advance(self, nbytes):
        before = self._done
        super().advance(nbytes)
        if before < LIMIT <= self._done:
            os.kill(os.getpid(), signal.SIGINT)

LIMIT = int(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
progress.Meter = Meter
sys.exit(main(sys.argv[2:]))
"""


def interrupt(after: int, *arguments: object, said: str = "") -> None:
    """Run the command until so many bytes are done, and press Ctrl-C."""
    ended = starts.run("-c", INTERRUPTED, after, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", f"{said}holdfast: interrupted\n")


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "work" / "run"
    saved(run, 1, 2, items=lambda step: {name: np.full(700_000, step, np.float32) for name in "abcd"})
    return run


def test_an_interrupted_verify_leaves_everything_as_it_was(run: Path) -> None:
    before = files(run.parent)
    interrupt(3 * MEGABYTE, "verify", run)
    assert files(run.parent) == before


def test_an_interrupted_copy_goes_on(run: Path, cli: Cli) -> None:
    copy = run.parent / "copy"

    said = f"holdfast: {copy}: what was copied is kept; the same command continues it\n"
    interrupt(16 * MEGABYTE, "cp", run, copy, said=said)  # in the second step

    assert [one.step for one in hf.list_checkpoints(copy)] == [1], "half a step is none"
    found = cli.json("cp", run, copy)["checkpoints"]
    assert [one["step"] for one in found] == [1, 2]
    assert found[0]["sent"] == 0
    assert hf.verify(copy).ok
    assert {path.name for path in run.parent.iterdir()} == {"run", "copy"}
    assert files(copy / "2").keys() == files(run / "2").keys()


@pytest.mark.parametrize("to", ["safetensors", "orbax", "dcp", None], ids=lambda to: to or "import")
def test_an_interrupted_conversion_leaves_nothing(to: str | None, run: Path, cli: Cli) -> None:
    source, target = run / "1", run.parent / "converted"
    command = ["export", source, target, "--to", to]
    if to is None:
        source = run.parent / "w.safetensors"
        safetensors.numpy.save_file({name: np.arange(9_000_000, dtype=np.float32) for name in "abc"}, source)
        command = ["import", source, target]

    interrupt((40 if to is None else 2) * MEGABYTE, *command)

    assert {path.name for path in run.parent.iterdir()} == {"run", *([source.name] if to is None else [])}
    cli.output(*command)
    assert to is not None or hf.verify(target).ok


def test_an_interrupted_conversion_of_a_run_leaves_nothing(run: Path, cli: Cli) -> None:
    orbax, back = run.parent / "orbax", run.parent / "back"

    interrupt(14 * MEGABYTE, "export", run, orbax, "--to", "orbax")  # in the second step
    assert {path.name for path in run.parent.iterdir()} == {"run"}
    cli.output("export", run, orbax, "--to", "orbax")

    interrupt(3 * sum(map(len, files(orbax / "1").values())) // 2, "import", orbax, back)  # in the second step
    assert {path.name for path in run.parent.iterdir()} == {"run", "orbax"}
    cli.output("import", orbax, back)
    assert [one.step for one in hf.list_checkpoints(back)] == [1, 2]
    assert hf.verify(back).ok
