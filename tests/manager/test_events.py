"""The events of a run: what is written when, and that nothing depends on the file."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, opened, reading, saved, train

import holdfast as hf
from holdfast.engine.checkpoint import PendingCheckpoint
from holdfast.engine.manager import events, note_resume, read_events
from holdfast.engine.manager.ownership import Ownership

TREE = {"w": np.arange(3.0)}


def events_in(directory: Path) -> list[dict[str, Any]]:
    return read_events(directory / "events.jsonl")[0]


def names_in(directory: Path) -> list[str]:
    return [event["event"] for event in events_in(directory)]


def test_the_life_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a mistake"):
        train(tmp_path, 9, every=2, error=3)
    train(tmp_path, 9, every=2, told=5)
    train(tmp_path, 8, every=2)
    train(tmp_path, 8, every=2)
    with pytest.raises(hf.TreeMismatchError), hf.CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize({"w": np.zeros(4)})

    found = [(event["event"], event.get("step", event.get("newest"))) for event in events_in(tmp_path)]
    assert sorted(found[:3], key=str) == sorted([("started", None), ("failed", 3), ("saved", 2)], key=str)
    assert found[3:] == [
        *(("started", 2), ("restored", 2), ("witness", 3), ("saved", 4), ("saved", 5), ("preempted", 5)),
        *(("started", 5), ("restored", 5), ("witness", 6), ("saved", 6), ("saved", 8), ("finished", 8)),
        *(("started", 8), ("restored", 8), ("finished", 8)),
        *(("started", 8), ("failed", None)),  # before its first step
    ]
    facts = next(event for event in events_in(tmp_path) if event["event"] == "saved").keys()
    assert {"reason", "bytes", "blocked_seconds", "total_seconds", "time", "run"} <= facts
    assert len({event["run"] for event in events_in(tmp_path)}) == 5


def test_damaged_steps_that_a_run_passes_over(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "2" / "state" / "manifest.ocdbt").unlink()
    with hf.CheckpointManager(tmp_path) as manager:
        manager.restore_latest()  # before the run owns the directory: the event waits until it does
        manager.save(3, TREE)
    assert names_in(tmp_path) == ["started", "saved", "saved", "closed", "started", "restored", "saved", "closed"]
    restored = events_in(tmp_path)[5]
    assert restored["step"] == 1
    assert [one["step"] for one in restored["skipped"]] == [2]


def refused(*arguments: object, **options: object) -> None:
    raise hf.errors.StorageFullError("full")


def test_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = hf.CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "check", refused)
        with pytest.raises(hf.errors.StorageFullError):
            manager.save(1, TREE)
    manager.close()
    with hf.CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(PendingCheckpoint, "commit", refused)
        manager.save(1, TREE)
        with pytest.raises(hf.SaveFailedError):
            manager.wait_until_finished()
    manager = hf.CheckpointManager(tmp_path)
    manager.save(1, TREE)
    with pytest.raises(hf.SaveFailedError):
        manager.close()
    names = ["started", "closed", "started", "save_failed", "closed", "started", "save_failed", "failed"]
    assert names_in(tmp_path) == names
    assert events_in(tmp_path)[3]["error"] == "StorageFullError: full"


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (None, "closed"),
        (SystemExit(), "closed"),
        (SystemExit(0), "closed"),
        (SystemExit(75), "preempted"),
        (SystemExit(143), "preempted"),
        (SystemExit("no data"), "failed"),
        (KeyboardInterrupt(), "failed"),
        (ValueError("no data"), "failed"),
    ],
    ids=repr,
)
def test_how_a_manager_without_a_callback_is_left(error: BaseException | None, last: str, tmp_path: Path) -> None:
    with contextlib.suppress(*([type(error)] if error else [])), hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, TREE)
        if error is not None:
            raise error
    assert names_in(tmp_path) == ["started", "saved", last]
    found = events_in(tmp_path)[-1]
    assert found["step"] == 3
    assert found.get("error") == (f"{type(error).__name__}: {error}" if last == "failed" else None)


@pytest.mark.parametrize(
    ("last", "finished"),
    [
        (["finished"], True),
        (["finished", "ended finished"], True),
        (["ended finished"], True),
        (["finished", "started", "closed"], True),
        (["finished", "started", "restored"], False),
        (["preempted", "ended preempted"], False),
        (["closed"], False),
        ([], False),
    ],
    ids=str,
)
def test_whether_training_has_finished(last: list[str], finished: bool, tmp_path: Path) -> None:
    names = [name.split() for name in ["started", "saved", *last]]
    lines = [json.dumps({"event": name, **({"how": how[0]} if how else {})}) for name, *how in names]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert events.has_finished(tmp_path / "events.jsonl") is finished


def test_readers_and_stores_write_no_events(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    heard: list[str] = []
    with hf.CheckpointManager("memory://events/run") as manager:
        manager.events.add_listener(lambda event: heard.append(event["event"]))
        manager.save(1, TREE)
    for place in (tmp_path, "memory://events/run"):
        with reading(place) as reader:
            reader.events.add_listener(lambda event: heard.append("read"))
            reader.restore()
    assert names_in(tmp_path) == heard == ["started", "saved", "closed"]
    assert "events.jsonl" not in {entry.name for entry in hf.storage.as_location("memory://events/run").entries()}


def test_a_torn_line_is_removed_and_a_spoilt_one_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n\0\0\0\n[1]\n{"event": "b"}\n{"event": "tor')
    found, offset = read_events(path)
    assert [event["event"] for event in found] == ["a", "b"]
    assert path.read_bytes()[offset:] == b'{"event": "tor'
    with hf.CheckpointManager(tmp_path) as manager:
        manager.acquire()
    assert names_in(tmp_path) == ["a", "b", "started", "closed"]
    assert [event["event"] for event in read_events(path, offset)[0]] == ["started", "closed"]


def test_a_large_file_begins_anew(tmp_path: Path) -> None:
    limit = 8 << 20
    line = json.dumps({"event": "noted", "text": "x" * 1000}).encode() + b"\n"
    (tmp_path / "events.jsonl").write_bytes(line * ((limit - 2000) // len(line)))
    saved(tmp_path, *range(40))
    files = {path.name: path.stat().st_size for path in tmp_path.glob("events*")}
    assert files.keys() == {"events.jsonl", "events.1.jsonl"}
    assert limit - 4000 < files["events.1.jsonl"] < limit + 400
    assert files["events.jsonl"] < 40_000
    assert events_in(tmp_path)[-1]["step"] == 39
    assert hf.CheckpointManager(tmp_path).latest_step() == 39


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with caplog.at_level(logging.INFO, "holdfast"):
        assert saved(tmp_path, 0, 1, 2) == [0, 1, 2]
    assert [record.levelname for record in caplog.records if "lacks events" in record.message] == ["INFO"]


def test_what_saves_and_late_metrics_say(tmp_path: Path) -> None:
    many = {f"m{number}": float(number) for number in range(100)}
    with hf.CheckpointManager(tmp_path) as manager:
        for step in range(3):
            commit(manager, step, {"w": np.arange(600_000)}, metrics={"loss": step} if step else many)
        manager.record_metrics(2, {"accuracy": 0.5})
        manager.restore(2)
        note_resume(manager, 2)  # a step that a run goes on from is named once
    first, *_, last, late, restored, _ = events_in(tmp_path)[1:]
    assert list(first["metrics"]) == list(many)[:64]
    assert (last["metrics"], late["event"], late["metrics"]) == ({"loss": 2}, "metrics", {"accuracy": 0.5})
    assert (first["shared_bytes"], last["shared_bytes"] > last["bytes"]) == (0, True)
    assert restored["seconds"] > 0


@pytest.mark.parametrize("call", [lambda run: run.save(2, {"w": 1}), lambda run: run.wait_until_finished()])
def test_a_listener_on_the_thread_of_a_save_cannot_wait_for_it(call: Any, tmp_path: Path) -> None:
    said: list[str] = []

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "saved" and not said:
            with pytest.raises(hf.errors.StateError, match=r"step 1 .* saved on this thread") as raised:
                call(manager)
            said.append(str(raised.value))

    with hf.CheckpointManager(tmp_path) as manager:
        manager.events.add_listener(listener)
        commit(manager, 1, {"w": 1})
        assert len(said) == 1
        manager.save(3, {"w": 1})
    assert hf.CheckpointManager(tmp_path).all_steps() == [1, 3]


def test_listeners_hear_what_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[dict[str, Any]] = []
    spoilt: list[str] = []

    def fails(event: Any) -> None:
        spoilt.append(event["event"])
        event["event"] = "spoilt"
        raise ConnectionError("no answer")

    with caplog.at_level(logging.INFO, "holdfast"), hf.CheckpointManager(tmp_path) as manager:
        manager.events.add_listener(fails)
        manager.events.add_listener(heard.append)
        for step, reason in ((1, None), (2, "why not")):
            manager.save(step, TREE, reason=reason)
    assert hf.CheckpointManager(tmp_path).all_steps() == [1, 2]
    assert heard == events_in(tmp_path)
    assert [event["event"] for event in heard] == spoilt == ["started", "saved", "saved", "closed"]
    assert [(event["step"], event["reason"]) for event in heard[1:3]] == [(1, "every step"), (2, "why not")]
    for event in heard[1:3]:
        assert event["bytes"] > 24
        assert 0 < event["blocked_seconds"] <= event["total_seconds"]
    assert [line for line in caplog.messages if line.startswith("saved step 2 (why not): ")]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the listener test_listeners_hear_what_is_written.<locals>.fails failed" in said
    assert said.endswith("ConnectionError: no answer")


def test_copies_to_and_from_a_mirror(tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    saved(tmp_path / "one", 1, mirror=mirror)
    with opened(tmp_path / "two", mirror=mirror) as manager:
        manager.restore(1)
    (copied,) = (event for event in events_in(tmp_path / "one") if event["event"] == "mirrored")
    (fetched,) = (event for event in events_in(tmp_path / "two") if event["event"] == "fetched")
    assert (copied["step"], fetched["step"]) == (1, 1)
    assert copied["mirror"] == fetched["mirror"] == mirror
    assert fetched["bytes"] == copied["bytes"] > 24


def test_numbers_that_json_lacks_and_an_event_after_the_death_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with hf.CheckpointManager(tmp_path) as manager:
        manager.acquire()
        manager.events.write("of the program", loss=float("nan"), place=tmp_path, more=[float("inf")])
        manager.events.write("finished", step=3)
    assert names_in(tmp_path) == ["started", "of the program", "finished"], "the program notes its end itself"
    last = json.loads(path.read_text().splitlines()[1])
    assert (last["loss"], last["place"], last["more"]) == (None, str(tmp_path), [None])
    path.write_bytes(b'{"event": "a"}\n{"event": "tor')
    events.append_after_death(path, {"event": "ended", "how": "crashed", "seconds": float("inf")})
    assert events_in(tmp_path) == [{"event": "a"}, {"event": "ended", "how": "crashed", "seconds": None}]


@pytest.mark.parametrize(
    ("event", "numbers"),
    [
        ({"event": "saved", "bytes": 5, "shared_bytes": 0}, {"bytes": 5, "shared_bytes": 0}),
        ({"event": "restored", "seconds": None, "skipped": [{}, {}]}, {"skipped": 2}),
        ({"event": "preempted", "step": 7}, {"preempted": 1}),
        ({"event": "save_failed", "error": "x"}, {"save_failed": 1}),
        ({"event": "started", "pid": 5}, {}),
    ],
)
def test_numbers_for_loggers(event: dict[str, Any], numbers: dict[str, float]) -> None:
    assert hf.event_scalars(event) == {f"checkpoint/{name}": value for name, value in numbers.items()}
