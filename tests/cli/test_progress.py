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

import holdfast as hf
from holdfast.cli.progress import Meter

pytestmark = pytest.mark.xdist_group("programs")

MEGABYTE = 1_000_000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- what is shown


def test_short_work_shows_nothing() -> None:
    clock, stream = FakeClock(), Terminal()
    meter = Meter("copy", stream, clock.monotonic)
    meter.expect(MEGABYTE)
    clock.sleep(0.9)
    meter.tick()
    meter.close()

    assert stream.getvalue() == ""


@pytest.mark.parametrize(("columns", "least"), [(80, 8), (60, 0)])
def test_a_bar_has_room_or_is_left_out(monkeypatch: pytest.MonkeyPatch, columns: int, least: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    clock, stream = FakeClock(), Terminal()
    meter = Meter("verify", stream, clock.monotonic)
    meter.expect(100_000 * MEGABYTE)
    for _ in range(4):
        clock.sleep(1)
        meter.advance(10_000 * MEGABYTE)
        meter.tick()
    shown = stream.getvalue()
    meter.close()

    bar = sum(shown.rpartition("verify")[2].count(char) for char in "━╸╺")
    assert (bar >= least) if least else (bar == 0)
    assert "40.0/100.0 GB" in shown


def test_a_terminal_shows_a_bar_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    clock, stream = FakeClock(), Terminal()
    meter = Meter("copy", stream, clock.monotonic)
    meter.expect(100 * MEGABYTE)
    for _ in range(4):
        clock.sleep(1)
        meter.advance(10 * MEGABYTE)
        meter.tick()
    shown = stream.getvalue()
    meter.close()

    assert "copy" in shown
    assert "40%" in shown
    assert "40.0/100.0 MB" in shown
    assert "10.0 MB/s" in shown
    assert "0:00:06" in shown  # is left
    ending = stream.getvalue()[len(shown) :]
    assert "\x1b[2K" in ending, "the line is erased"
    assert "\x1b[?25h" in ending, "the cursor is shown again"


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")], ids=["file", "dumb"])
def test_anything_else_gets_a_line_every_so_often(
    stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    clock = FakeClock()
    meter = Meter("verify", stream, clock.monotonic)
    meter.expect(3600 * MEGABYTE)
    for _ in range(65):
        clock.sleep(1)
        meter.advance(10 * MEGABYTE)
        meter.tick()
    meter.close()

    assert stream.getvalue().splitlines() == [
        "holdfast: verify: 300.0 MB of 3.6 GB, 10.0 MB/s, 5 min 30 s left",
        "holdfast: verify: 600.0 MB of 3.6 GB, 10.0 MB/s, 5 min 00 s left",
    ]


def test_work_that_does_not_move_has_no_time_left() -> None:
    clock, stream = FakeClock(), io.StringIO()
    meter = Meter("verify", stream, clock.monotonic)
    meter.expect(MEGABYTE)
    clock.sleep(31)
    meter.tick()

    assert stream.getvalue() == "holdfast: verify: 0 B of 1.0 MB, 0 B/s\n"


@pytest.mark.parametrize("command", ["verify", "diff", "show", "cp", "import", "export", "rm"])
@pytest.mark.parametrize("as_json", [False, True])
def test_commands_that_take_long_show_how_far_they_are(
    command: str, as_json: bool, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters: list[Meter] = []
    shown: list[bool] = []

    class Watched(Meter):
        def __init__(self, what: str) -> None:
            super().__init__(what)
            meters.append(self)

        def tick(self) -> None:
            shown.append(True)

        def close(self) -> None:  # called only where it is shown
            shown.append(True)

    monkeypatch.setattr("holdfast.cli.progress.Meter", Watched)
    with hf.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.arange(1000.0)}, force=True)
    safetensors.numpy.save_file({"w": np.arange(1000.0)}, tmp_path / "w.safetensors")
    run, other = tmp_path / "run", tmp_path / "other"
    table: dict[str, list[object]] = {
        "verify": [run],
        "diff": [run / "1", run / "2"],
        "show": [run, "--stats"],
        "cp": [run, other],
        "import": [tmp_path / "w.safetensors", other],
        "export": [run, tmp_path / "x.safetensors"],
        "rm": [run, "1", "--yes"],
    }

    text = cli.output(command, *table[command], *(["--json"] if as_json else []))

    [meter] = meters
    assert meter._done == meter._expected > 0
    assert bool(shown) != as_json
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
    with hf.CheckpointManager(tmp_path / "work" / "run") as manager:
        for step in (1, 2):
            tree = {name: np.full(700_000, step, np.float32) for name in "abcd"}
            manager.save(step, tree, force=True)
    return tmp_path / "work" / "run"


def test_an_interrupted_verify_leaves_everything_as_it_was(run: Path) -> None:
    before = files(run)

    interrupt(3 * MEGABYTE, "verify", run)

    assert files(run.parent) == {f"run/{path}": content for path, content in before.items()}


def test_an_interrupted_copy_goes_on(run: Path, cli: Cli) -> None:
    copy = run.parent / "copy"

    said = f"holdfast: {copy}: what was copied stays; the same command continues with it\n"
    interrupt(16 * MEGABYTE, "cp", run, copy, said=said)  # in the second step

    assert [one.step for one in hf.list_checkpoints(copy)] == [1], "half a step is none"
    found = cli.json("cp", run, copy)["checkpoints"]
    assert [one["step"] for one in found] == [1, 2]
    assert found[0]["sent"] == 0
    assert hf.verify(copy).ok
    assert {path.name for path in run.parent.iterdir()} == {"run", "copy"}
    assert files(copy / "2").keys() == files(run / "2").keys()


def test_an_interrupted_import_leaves_nothing(run: Path, cli: Cli) -> None:
    source, target = run.parent / "w.safetensors", run.parent / "imported"
    safetensors.numpy.save_file({name: np.arange(9_000_000, dtype=np.float32) for name in "abc"}, source)

    interrupt(40 * MEGABYTE, "import", source, target)

    assert {path.name for path in run.parent.iterdir()} == {"run", "w.safetensors"}
    cli.output("import", source, target)
    assert hf.verify(target).ok


@pytest.mark.parametrize("to", ["safetensors", "orbax", "dcp"])
def test_an_interrupted_export_leaves_nothing(to: str, run: Path, cli: Cli) -> None:
    target = run.parent / "exported"

    interrupt(2 * MEGABYTE, "export", run / "1", target, "--to", to)

    assert {path.name for path in run.parent.iterdir()} == {"run"}
    cli.output("export", run / "1", target, "--to", to)


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
