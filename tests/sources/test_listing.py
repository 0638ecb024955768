"""Which checkpoints are in a directory, and which is the newest: every front has the same answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.clocks import TickingClock

import holdfast as hf
from holdfast import graph
from holdfast.cli.main import main
from holdfast.engine.sources import find_checkpoint

Fill = Callable[[Path], None]  # adds something to a directory


def steps(prefix: str | None, *numbers: int, time: float = 1000.0) -> Fill:
    """Saves steps, in a directory of their own first: a manager does not begin beside the steps of another prefix."""

    def fill(place: Path) -> None:
        options = hf.CheckpointManagerOptions(step_prefix=prefix)
        beside = place / "beside"
        with hf.CheckpointManager(beside, hf.PyTreeCheckpointer(), options, clock=TickingClock(time)) as manager:
            for step in numbers:
                start = "" if prefix is None else prefix if prefix.endswith("-") else f"{prefix}_"
                manager.save(step, {"name": f"{start}{step}"}, force=True)
        for one in beside.iterdir():
            one.replace(place / one.name)
        beside.rmdir()

    return fill


def spoiled(name: str) -> Fill:
    def fill(place: Path) -> None:
        record = place / name / "checkpoint.json"
        record.write_bytes(record.read_bytes()[:-20])

    return fill


def folder(name: str) -> Fill:
    return lambda place: (place / name).mkdir()


def saved_by_name(place: Path) -> None:
    for number in (1, 2, 12):
        hf.save(place / str(number), {"name": str(number)})


def numbered_by_a_graph(place: Path) -> None:
    checkpoint = graph.Checkpoint(name=graph.Value(""))
    for name in ("run-1", "run-2"):
        checkpoint.name = name
        checkpoint.save(place / "run")


def foreign(place: Path) -> None:
    serialization: Any = pytest.importorskip("flax.serialization")
    for name in ("checkpoint_5", "checkpoint_30"):
        (place / name).write_bytes(serialization.msgpack_serialize({"name": name}))


@dataclass(frozen=True)
class Case:
    """A directory, and what is in it."""

    fill: list[Fill]
    names: str  # all checkpoints in it; those that are damaged end in ``!``
    newest: str | None  # the newest whole one
    refused: str | None = None  # the damaged one that is refused by what does not go back to an older one

    def all(self) -> list[str]:
        return [name.removesuffix("!") for name in self.names.split()]

    def damage(self) -> list[str]:
        return [name.removesuffix("!") for name in self.names.split() if name.endswith("!")]


TWO_PREFIXES = [steps("a-", 1, 7), steps("b-", 1, 2, time=2000)]
CASES = {
    "own": Case([steps(None, 2, 10, 9), folder("11"), folder("notes")], "2 9 10", "10"),
    "prefixed": Case([steps("my_run", 3, 20)], "my_run_3 my_run_20", "my_run_20"),
    "two prefixes": Case(TWO_PREFIXES, "a-1 a-7 b-1 b-2", "b-2"),
    "two prefixes and none": Case([steps(None, 4, time=3000), steps("x", 100, time=2000)], "4 x_100", "4"),
    "saved by name": Case([saved_by_name], "1 2 12", "12"),
    "numbered by a graph": Case([numbered_by_a_graph], "run-1 run-2", "run-2"),
    "damaged": Case([steps(None, 1, 2, 3), spoiled("3")], "1 2 3!", "2", refused="3"),
    "damaged within": Case([steps(None, 1, 2, 3), spoiled("2")], "1 2! 3", "3"),
    "damaged head of one": Case([*TWO_PREFIXES, spoiled("b-2")], "a-1 a-7 b-1 b-2!", "b-1", refused="b-2"),
    "all damaged": Case([steps(None, 1), spoiled("1")], "1!", None, refused="1"),
    "foreign": Case([foreign], "checkpoint_5 checkpoint_30", "checkpoint_30"),
    "foreign beside own": Case([foreign, steps(None, 1)], "1", "1"),
    "empty": Case([], "", None),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def directory(case: Case, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    for fill in case.fill:
        fill(tmp_path / "run")
    return tmp_path / "run"


def named(path: object) -> str:
    return str(path).rpartition("/")[2]


def in_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Mapping[str, Any]:
    capsys.readouterr()
    main([*map(str, arguments), "--json"])
    found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_listing_and_verifying(case: Case, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = hf.list_checkpoints(directory)
    assert [named(one.path) for one in listed] == case.all()
    assert [named(one.path) for one in listed if one.damage] == case.damage()
    shown = in_json(capsys, "ls", directory)["checkpoints"]
    assert [named(one["path"]) for one in shown] == case.all()
    if not case.names:
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.verify(directory)
        return
    verified = hf.verify(directory).checkpoints
    assert [named(one.path) for one in verified] == case.all()
    assert [named(one.path) for one in verified if one.problems] == case.damage()
    shown = in_json(capsys, "verify", directory)["checkpoints"]
    assert [named(one["path"]) for one in shown if not one["ok"]] == case.damage()


def newest_of(name: str, directory: Path, capsys: pytest.CaptureFixture[str], target: Path) -> str:
    if name == "hf.load":
        return str(hf.load(directory)["name"])
    if name == "describe":
        [leaf] = [leaf for leaf in hf.describe(directory) if leaf.path == "name"]
        return str(leaf.value).strip("'")
    if name == "show":
        found = in_json(capsys, "show", directory)
        if "error" in found:
            raise hf.CheckpointNotFoundError(found["error"])
        return named(found["path"])
    hf.export_checkpoint(directory, target, "safetensors")
    return str(hf.load(target)["name"])


@pytest.mark.parametrize("front", ["hf.load", "describe", "show", "export"])
def test_the_newest(
    case: Case, directory: Path, front: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """These refuse a damaged checkpoint, rather than to go back to an older one."""
    if case.refused is not None:
        if front == "show":
            assert main(["show", str(directory)]) != 0
            assert f"/{case.refused}" in capsys.readouterr().err
            return
        with pytest.raises(hf.DamagedCheckpointError, match=f"/{case.refused}/"):
            newest_of(front, directory, capsys, tmp_path / "out.safetensors")
    elif case.newest is None:
        with pytest.raises((hf.CheckpointNotFoundError, SystemExit, json.JSONDecodeError)):
            newest_of(front, directory, capsys, tmp_path / "out.safetensors")
    elif case.fill == [numbered_by_a_graph] and front in ("hf.load", "export"):
        assert named(find_checkpoint(hf.storage.as_location(directory))) == case.newest
    else:
        assert newest_of(front, directory, capsys, tmp_path / "out.safetensors") == case.newest


def test_the_newest_whole_one_of_graphs(case: Case, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Graphs go back to an older checkpoint, and say so."""
    found = graph.latest_checkpoint(directory)
    assert (None if found is None else named(found)) == case.newest
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [name for name in case.all() if any(f"/{name} is damaged" in text for text in warned)] == case.damage()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("series", ["", "a-", "b-", "my_run_", "x_", "run-"])
def test_managers_see_the_steps_of_their_prefix(case: Case, directory: Path, series: str) -> None:
    prefix = series.removesuffix("_") or None
    options = hf.CheckpointManagerOptions(step_prefix=prefix, read_only=True)
    manager = hf.CheckpointManager(directory, options=options)
    whole = [name for name in case.all() if name not in case.damage()]
    steps = [int(name[len(series) :]) for name in whole if name.startswith(series) and name[len(series) :].isdigit()]
    assert manager.all_steps() == steps
    assert manager.latest_step() == max(steps, default=None)


def test_a_number_that_two_names_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fill in TWO_PREFIXES:
        fill(tmp_path)
    assert named(find_checkpoint(hf.storage.as_location(tmp_path), 7)) == "a-7"
    for ask in (hf.describe, hf.verify):
        with pytest.raises(hf.errors.OptionError, match=r"step 1 exists more than once \(a-1, b-1\); give the path"):
            ask(tmp_path, 1)
    with pytest.raises(hf.errors.OptionError, match=r"step 1 exists more than once"):
        hf.export_checkpoint(tmp_path, tmp_path.parent / "orbax", "orbax")
    assert hf.load(tmp_path / "a-1") == {"name": "a-1"}
    main(["ls", str(tmp_path)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["STEP", "a-1", "a-7", "b-1", "b-2"]
    main(["verify", str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[:-1]] == ["a-1", "a-7", "b-1", "b-2"]
