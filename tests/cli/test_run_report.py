"""``holdfast report``: what events say as tables, and the page of runs, parsed; a browser looks at it elsewhere."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.commands import Cli
from tests.manager import runs

import holdfast as hf
from holdfast.cli.report import duration
from holdfast.cli.run_report import charts, facts, page
from holdfast.cli.run_report.history import History, read_history
from holdfast.engine.manager import Experience, read_events

HOSTILE = "</script><!--<script>"
LEAF = HOSTILE.replace("/", "%2F")  # as a path shows this key


class Page(HTMLParser):
    """A page as a list of elements: tag, attributes, and the text directly inside; every element has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.comments: list[str] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, [self.elements[one][0] for one in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in {"meta", "link", "input"}:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.elements[self._open[-1]][2].append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def texts(self, tag: str, kind: str | None = None) -> list[str]:
        """Returns the text directly inside of all elements with a tag, and a class."""
        return ["".join(text) for name, found, text in self.elements if name == tag and _has(found, kind)]

    def values(self, tag: str, attribute: str, kind: str | None = None) -> list[str | None]:
        return [
            found[attribute]
            for name, found, _ in self.elements
            if name == tag and attribute in found and _has(found, kind)
        ]


def _has(attributes: dict[str, str | None], kind: str | None) -> bool:
    return kind is None or kind in (attributes.get("class") or "").split()


def event(name: str, time: float, run: str = "a", **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "run": run, **facts}


def saved(time: float, step: int, run: str = "a", **facts: Any) -> dict[str, Any]:
    numbers = {"bytes": 10, "shared_bytes": 0, "blocked_seconds": 0.5, "total_seconds": 1.0, "reason": "every step"}
    return event("saved", time, run, step=step, **{**numbers, **facts})


def report(cli: Cli, *arguments: object, output: Path) -> Page:
    assert cli.output("report", *arguments, "-o", output).startswith(f"{output}: ")
    return Page(output.read_text())


def page_of(*runs: facts.RunFacts, now: float = 0.0) -> str:
    return page.draw_page(runs, now=now, version="1")


# ---- what events say


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([event("started", 1), event("finished", 2, step=5)], ["finished"]),
        ([event("started", 1), event("preempted", 2, step=5)], ["preempted"]),
        ([saved(1, 5), event("closed", 2, step=5)], ["closed"]),
        ([event("restored", 1, step=5), event("closed", 2, step=5), event("ended", 3, how="crashed")], ["crashed"]),
        ([saved(1, 5), event("closed", 2, step=5), event("ended", 3, how="finished")], ["finished"]),
        ([saved(1, 5), event("finished", 2), event("started", 3, "b"), event("closed", 4, "b")], ["finished"]),
        (
            [saved(1, 5), event("finished", 2), event("closed", 4, "b"), event("ended", 5, "b", how="finished")],
            ["finished"],
        ),
        ([event("started", 1), event("failed", 2, error="ValueError: no")], ["failed"]),
        ([event("started", 1), event("started", 5, "b"), event("finished", 6, "b")], ["lost", "finished"]),
        ([event("started", 1), event("ended", 2, how="crashed", status=137)], ["crashed"]),
        ([event("started", 1), event("ended", 2, how="hung", status=137, why="no step")], ["hung"]),
        ([event("started", 1), event("failed", 2, error="x"), event("ended", 3, how="crashed", status=1)], ["failed"]),
        ([event("started", 1), event("preempted", 2, step=5), event("ended", 3, how="hung")], ["hung"]),
        ([event("started", 1), event("ended", 3, how="preempted", status=75)], ["preempted"]),
        ([event("started", 1, pid=os.getpid(), host=socket.gethostname())], ["running"]),
        ([event("started", 1, pid=os.getpid(), host="another")], ["open"]),
        ([event("started", 1, host="another"), event("started", 2, "b", host="another")], ["lost", "open"]),
        ([event("started", 1, pid=2**40, host=socket.gethostname())], ["lost"]),
        ([event("saved", 1), event("saved", True), {"event": "saved"}, event("of the program", 3)], ["lost"]),
        ([], []),
    ],
)
def test_how_starts_have_ended(events: list[dict[str, Any]], ends: list[str]) -> None:
    assert [attempt.how for attempt in read_history(events).attempts] == ends


def test_a_killed_start_hides_its_last_steps() -> None:
    """SIGKILL leaves no event: what is known to be trained again is the least."""
    events = [event("started", 0), saved(10, 4), event("metrics", 20, step=13), event("started", 30, "b")]
    events += [event("restored", 31, "b", step=4), event("finished", 40, "b", step=20)]
    assert (read_history(events).hides_steps, read_history(events).redone_steps) == (True, 0)
    compared = [*events[:-1], event("witness", 32, "b", step=8, saved_step=4, exact=True, layers=["batch"])]
    assert read_history(compared).redone_steps == 4, "the steps that the resume was compared with"
    assert not read_history([*events[:2], event("failed", 21, step=13, error="x"), *events[3:]]).hides_steps


def test_what_was_lost_between_two_starts() -> None:
    history = read_history(
        [event("started", 0), saved(10, 4), saved(20, 8), event("ended", 26, how="crashed", status=1, step=11)]
        + [event("started", 30, "b"), event("restored", 31, "b", step=8, seconds=0.25, skipped=[])]
        + [event("restored", 31, "b", step=8, seconds=None, skipped=[])]  # noted once more by a callback
        + [saved(40, 12, "b"), event("preempted", 41, "b", step=12)]
        + [event("started", 50, "c"), event("restored", 51, "c", step=12), event("finished", 52, "c", step=12)]
    )
    assert (history.redone_steps, history.redone_seconds) == (3, 6)
    assert [(one.restored, one.restore_seconds, one.last_step) for one in history.attempts] == [
        (None, None, 11),
        (8, 0.25, 12),
        (12, None, 12),
    ]
    assert history.attempts[0].blocked == 1.0


def test_metrics_come_from_saves_and_later_events() -> None:
    more = {"b": {"c": 2}, "two": [3, 4], "text": "x", "flag": True, "none": None}
    history = read_history([saved(1, 5, metrics={"a": 1.5, **more}), event("metrics", 2, step=5, metrics={"a": 2.5})])
    assert history.metrics == {"a": {5: 2.5}, "b/c": {5: 2.0}, "two/0": {5: 3.0}, "two/1": {5: 4.0}}


def test_what_happened_is_told() -> None:
    skipped = [{"step": 9, "damage": "missing"}, {"step": "x"}, 7]
    history = read_history(
        [event("started", 1), event("restored", 2, step=8, skipped=skipped)]
        + [event("save_failed", 3, step=9, error="StorageFullError: full")]
        + [event("mirror_failed", 4, mirror="s3://b/r", error="no answer")]
        + [event("fetched", 5, step=8, bytes=2, seconds=1)]
        + [event("started", 6, "b"), event("restored", 7, "b", step=8, local=True, peer_bytes=5)]
        + [event("saved_locally", 8, "b", step=12, saves=4)]
        + [event("local_failed", 9, "b", step=14, error="host b: full")]
        + [event("started", 10, "c"), event("restored", 11, "c", step=12, local=True, peer_bytes=0)]
    )
    assert (history.fallbacks, history.failures) == (1, 1)
    marks = ["start", "fallback", "failed save", "mirror failed", "lost", "fetched", "start", "lost", "start", "lost"]
    assert [note.mark for note in history.notes if note.mark] == marks
    assert {note.title for note in history.notes} > {
        "Fell back to step 8: 1 step damaged (9)",
        "Step 8 came from local steps of the hosts",
        "The local save of step 14 failed",
    }
    assert history.attempts[1].last_step == 12


def test_how_resumes_proved() -> None:
    history = read_history(
        [event("started", 0), saved(1, 4), event("started", 5, "b"), event("restored", 6, "b", step=4)]
        + [event("witness", 7, "b", step=6, saved_step=4, exact=True, layers=["state"])]
        + [event("started", 10, "c"), event("restored", 11, "c", step=4)]
        + [event("witness", 12, "c", step=6, saved_step=4, exact=True, layers=["state"])]
        + [event("witness", 13, "c", step=8, saved_step=4, exact=False, layers=["batch", "state"])]
        + [event("started", 20, "d"), event("restored", 21, "d", step=4)]
        + [event("witness", 22, "d", step=5, saved_step=4, exact=None, layers=["state"])]
        + [event("started", 30, "e"), event("restored", 31, "e", step=4), event("finished", 32, "e", step=9)]
    )
    assert [one.proof for one in history.attempts] == [None, "exact", "inexact", "rounding", None]
    words = ["exact", "not exact", "exact up to rounding"]
    texts = [note.text for note in history.notes if note.title == "Started again"]
    assert [text.rpartition(", restored")[2] for text in texts] == [*(f": {word}" for word in words), ""]
    (note,) = (note for note in history.notes if note.mark == "inexact")
    said = (note.tone, note.title, note.text)
    assert said == ("bad", "The resume from step 4 is not exact", "different from before the stop: batch, state")
    shown = Page(page_of(facts.RunFacts("run", "place", [], history, has_events=True), now=40.0))
    assert "1 resume was not exact, the last one from step 4: batch, state differ" in shown.texts("li", "bad")
    assert "1 exact, 1 not exact, 1 exact up to rounding, 1 not compared" in shown.texts("span")
    assert [one for one in shown.texts("span", "badge") if "exact" in one] == words


WHOLE = [
    event("started", 1e9, newest=None, pid=5, host="h"),
    event("restored", 1e9 + 1, step=3, seconds=1.0, skipped=[{"step": 4, "damage": "x"}]),
    event("witness", 1e9 + 1, step=5, saved_step=3, exact=False, layers=["batch"]),
    saved(1e9 + 2, 5, metrics={"loss": 1.0}),
    event("metrics", 1e9 + 2, step=5, metrics={"acc": 1.0}),
    event("save_failed", 1e9 + 3, step=6, error="e"),
    event("fetched", 1e9 + 3, step=6, mirror="m", bytes=3, seconds=1.0),
    event("mirror_failed", 1e9 + 3, step=6, mirror="m", error="e"),
    event("preempted", 1e9 + 4, step=6),
    event("started", 1e9 + 5, "b", newest=5, pid=6, host="h"),
    event("failed", 1e9 + 7, "b", step=8, error="x"),
    event("closed", 1e9 + 7, "b", step=8),
    event("finished", 1e9 + 7, "b", step=8),
    event("ended", 1e9 + 8, "b", how="crashed", status=1, seconds=3.0, step=9, why="w"),
]
HUGE = 10**400


@pytest.mark.parametrize(
    "value",
    [None, True, "\ud800", "\x1b[31m\n\u202e", -1, 10**30, HUGE, -HUGE, 1e308, math.nan, math.inf, [], {}, -math.inf]
    + [{"step": HUGE}, [{"step": HUGE, "damage": []}], {"loss": HUGE, "b": {"c": math.inf}}, {"\ud800": 1}, 5e-324],
    ids=lambda value: str(value)[:8],
)
def test_any_value_of_any_event(tmp_path: Path, value: Any) -> None:
    for name in sorted({key for one in WHOLE for key in one}):
        for number, one in enumerate(WHOLE):
            if name in one:
                events = [*WHOLE[:number], {**one, name: value}, *WHOLE[number + 1 :]]
                (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in events))
                found = read_history(read_events(tmp_path / "events.jsonl")[0])
                assert found.attempts
        page_of(facts.RunFacts("run", "place", [], found, has_events=True))


def test_any_line_of_the_events(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = (run / "events.jsonl").read_bytes()
    nested = b'{"event":"metrics","time":1,"step":1,"metrics":'
    lines = [
        b"[" * 100_000,
        nested + b'{"a":' * 900 + b"1" + b"}" * 901,
        nested + b'{"a":' * 50_000,
        b'{"event":"saved","step":7,"time":' + b"1" * 5000 + b"}",
        b"\xff\xfe\0",
        b"null",
        b'{"event":1}',
        b"\0" * 100,
        b"x" * (1 << 20),
    ]
    (run / "events.jsonl").write_bytes(b"\n".join([*lines, whole]))
    cli.output("report", run, "-o", tmp_path / "page.html")
    expected = len(read_history([json.loads(line) for line in whole.splitlines()]).saves)
    assert len(read_history(read_events(run / "events.jsonl")[0]).saves) == expected > 0


def test_times_keep_their_order_and_long_pauses_are_short() -> None:
    scale = charts.TimeScale([(0, 10), (1000, 1010), (1005, 1012), (1012.1, 1013)])
    places = [scale.place(time) for time in (-5, 0, 5, 10, 500, 1000, 1012, 1013, 2000)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    ((where, width, pause),) = scale.pauses
    assert (round(where, 3), pause) == (round(scale.place(10), 3), 990)
    assert width < 0.05
    assert scale.time(scale.place(1003)) == pytest.approx(1003)
    assert charts.TimeScale([(3, 3)]).place(3) == 0.0


@pytest.mark.parametrize(
    ("values", "dots"),
    [({}, 0), ({5: 1.0}, 1), ({5: math.nan}, 0), ({1: 0.0, 2: math.inf, 3: -1e300}, 2), ({1: 7.0, 2: 7.0}, 2)],
)
def test_lines_of_any_values(values: dict[int, float], dots: int) -> None:
    markup = charts.line_chart("x", values, [1], best=2)
    places = [float(place) for place, _ in readings(markup)]
    assert len(places) == dots
    assert "nan" not in markup.replace("not finite", "")
    assert all(0 <= place <= 1 for place in places)


def test_long_lines_keep_their_extremes() -> None:
    values = {step: math.sin(step) for step in range(50_000)}
    values[31_234] = 9.0
    markup = charts.line_chart("x", values)
    texts = [text for _, text in readings(markup)]
    assert len(texts) <= 700
    assert "step 31234: 9" in texts
    assert len(markup.replace("\n".join("\t".join(one) for one in readings(markup)), "")) < 20_000


def readings(markup: str) -> list[list[str]]:
    """Returns the points of a chart as the page's script reads them: their place, and their text."""
    (found,) = Page(markup).values("div", "data-readings")
    return [line.split("\t") for line in (found or "").splitlines()]


# ---- the page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a fallback and a failure, hostile names, and leaves with NaN."""
    directory = tmp_path / f"run <b>&{chr(0x2028)}"
    options = hf.CheckpointManagerOptions(max_to_keep=3, best_fn="loss", best_mode="min")
    for begin in (0, 3):
        with hf.CheckpointManager(directory, options=options, metadata={"name": HOSTILE}) as manager:
            manager.restore_latest()
            for step in range(begin + 1, begin + 4):
                tree = {"a": np.full(5, step, np.float32), HOSTILE: np.array([1.0, np.nan, np.inf]), "text": "<i>"}
                manager.save(step, tree, metrics={"loss": 1 / step, HOSTILE: step}, reason="<b>why</b>")
            manager.wait_until_finished()
            manager.events.write("failed", step=begin + 3, error=f"ValueError: {HOSTILE}")
    return directory


def test_the_page_of_a_run(cli: Cli, run: Path, tmp_path: Path) -> None:
    found = report(cli, run, output=tmp_path / "report.html")
    (title,) = found.texts("h1")
    assert title.rstrip(" ") == run.name
    assert found.texts("span", "pill") == ["failed"]
    # Names are text everywhere.
    assert found.comments == []
    assert LEAF in found.texts("code")
    assert HOSTILE in found.texts("b")
    (script,) = found.texts("script")
    assert script.strip().startswith('"use strict"')
    assert found.texts("b").count("Failed after step 3") == 1
    assert any("NaN or Inf in step 6: state/" in text for text in found.texts("li", "bad"))
    # Why each step is kept, and its state.
    cells = found.texts("td")
    assert {"<b>why</b>", "whole", "newest, best loss (0.166667)", "2nd best loss (0.2)"} <= set(cells)
    assert [name for name in found.texts("summary") if name.strip()] == ["What happened", "Facts about the run"]
    assert found.texts("pre") == [json.dumps({"name": HOSTILE}, indent=2)]
    tables = ["Other intervals", "Kept steps", "Values by leaf", "Starts of the program"]
    assert found.values("div", "aria-label", "table") == tables
    # It asks for nothing.
    policy = found.values("meta", "content")[1]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    links = [url for _, attributes, _ in found.elements for name, url in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert "url(" not in "".join(found.texts("style"))


def saved_run(run: Path, *steps: int, events: list[dict[str, Any]] | None = None) -> Path:
    """Makes a run with some steps, which may be said to have had other events."""
    runs.saved(run, *steps, items=lambda step: {"w": np.ones(2, np.float32)})
    if events is not None:
        (run / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    return run


def test_what_other_intervals_would_have_cost(cli: Cli, tmp_path: Path) -> None:
    """A run that saves every minute, whose saves cost a second, and that crashes every twelve hours."""
    events = []
    for number in range(10):
        began, name = 43_210 * number, str(number)
        events += [event("started", began, name), event("restored", began + 5, name, step=1, seconds=5.0)]
        events += [saved(began + place, place, name, blocked_seconds=1.0) for place in (43_080, 43_140, 43_200)]
        events += [event("ended", began + 43_200, name, how="crashed", status=1, step=43_200)]
    events += [event("started", 432_100, "last"), event("of the program", 432_200, "last")]
    run = saved_run(tmp_path / "run", 1, events=events)

    best = Experience(events).best()
    line = "run: saves every 1 min 00 s are expected to lose 25 min 31 s a day, and every 4 min 56 s 10 min 16 s: "
    assert duration(best) == "4 min 56 s"
    target = tmp_path / "report.html"
    assert cli.output("report", run, "-o", target).split("\n", 1)[1] == (
        f'{line}save_interval_secs="auto" chooses automatically\n'
    )
    found = Page(target.read_text())
    place = found.texts("td").index("1,440")
    row = ["1 min 00 s ", "1,440", "24 min 00 s", "1 min 31 s", "25 min 31 s"]
    assert found.texts("td")[place - 1 : place + 4] == row
    assert found.texts("span", "badge")[:4] == ["half", "used", "double", "loses least"]
    (text,) = (text for text in found.texts("p") if text.startswith("What saving at each interval"))
    assert "A save costs 1.0 s of training and is durable after 1.0 s" in text
    assert "The events show 10 failures in 5 d 0 h" in text
    assert "the next one is expected in 12 h 09 min. Each loses half an interval" in text
    assert text.endswith("and 15.0 s to resume.")
    document = cli.json("report", run, "-o", target)
    (choices,) = document["intervals"].values()
    assert [(one["name"], one["seconds"]) for one in choices[:3]] == [("half", 30), ("used", 60), ("double", 120)]
    assert choices[3]["seconds"] == pytest.approx(best)
    assert min(sum(one["loss"].values()) for one in choices) == pytest.approx(sum(choices[3]["loss"].values()))


def test_a_run_that_learns_its_interval(cli: Cli, tmp_path: Path) -> None:
    """The command gives no advice, and the page says in which bounds it learns."""
    told = event("interval", 250, seconds=280.0, least=60.0, greatest=3600.0, why="a save costs 1s")
    run = saved_run(
        tmp_path / "run", 1, events=[event("started", 1), saved(100, 1), told, saved(200, 2), saved(300, 3)]
    )
    target = tmp_path / "report.html"
    assert cli.output("report", run, "-o", target).count("\n") == 1
    found = Page(target.read_text())
    (text,) = (text for text in found.texts("p") if text.startswith("What saving at each interval"))
    assert text.endswith("The run learns its interval, between 1 min 00 s and 1 h 00 min.")
    assert "Saves every 4 min 40 s from here on, as learned" in found.texts("b")
    assert "a save costs 1s" in found.texts("span")
    for step in (1, 2):  # a save of each start shows no interval
        saved_run(tmp_path / "other", step)
    assert "Other intervals" not in report(cli, tmp_path / "other", output=target).texts("h3")


def test_values_are_those_of_show(cli: Cli, run: Path, tmp_path: Path) -> None:
    found = report(cli, run, output=tmp_path / "report.html")
    shown = cli.json("show", run, "--stats")["leaves"]
    (numbers,) = [leaf["statistics"] for leaf in shown if leaf["path"] == "a"]
    place = found.texts("code").index("a")
    assert place > 0
    assert f"{numbers['norm']:.4g}" in found.texts("td", "n")
    assert charts.number_text(numbers["norm"]) in "".join(found.texts("span"))
    assert "Norm of a" in found.texts("b")
    without = report(cli, run, "--no-stats", output=tmp_path / "quick.html")
    assert "Values by leaf" not in without.values("div", "aria-label")
    assert "Norm of a" not in without.texts("b")
    few = report(cli, run, "--norm-steps", 2, output=tmp_path / "few.html")
    assert "Norm from step 4 to 6" in few.texts("button")
    one = report(cli, run, "--norm-steps", 1, output=tmp_path / "one.html")
    assert not any("Norm from step" in text for text in one.texts("button"))
    reading = facts.Reading(earlier_bytes=hf.list_checkpoints(run)[0].bytes + 1)
    bounded = Page(page_of(facts.read_run(hf.storage.as_location(run), reading)))
    assert any("1 of 2 chosen earlier" in text and "--norm-steps 3 reads all" in text for text in bounded.texts("p"))
    assert "Norm from step 5 to 6" in bounded.texts("button")


def test_a_damaged_newest_step(cli: Cli, run: Path, tmp_path: Path) -> None:
    (run / "6" / "state" / "tree.json").unlink()
    found = report(cli, run, output=tmp_path / "report.html")
    assert [text.partition(":")[0] for text in found.texts("li", "bad")][:1] == ["Step 6 is damaged"]
    for folder in ("5", "4", "6/state"):
        shutil.rmtree(run / folder)
    report(cli, run, output=tmp_path / "report.html")


def test_several_runs_and_folders_of_runs(cli: Cli, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "sweep" / "one")
    shutil.copytree(run, tmp_path / "sweep" / "two" / "checkpoints")
    store = "memory://report/run"
    runs.saved(store, 7)
    found = report(cli, tmp_path / "sweep", store, run / "5", output=tmp_path / "report.html")
    assert found.texts("h1") == ["4 runs"]
    assert found.texts("a") == ["one", "two", "run", "5"]
    assert found.values("section", "id") == ["run-0", "run-1", "run-2", "run-3"]
    assert [text.strip() for text in found.texts("h2")] == ["one", "two", "run", "5"]
    assert sum("No events" in text for text in found.texts("li", "plain")) == 2
    np.savez(tmp_path / "weights.npz", w=np.arange(3.0))  # a checkpoint of another library
    assert "w" in report(cli, tmp_path / "weights.npz", output=tmp_path / "report.html").texts("code")


def test_the_file_that_is_written(cli: Cli, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    report(cli, run, output=target)
    report(cli, run, output=target)  # an earlier report is replaced
    (tmp_path / "notes.html").write_text("mine")
    for wrong, said in (
        (tmp_path / "notes.html", "is not a holdfast report"),
        (tmp_path, "this is a directory"),
        (tmp_path / "no" / "report.html", "there is no directory"),
    ):
        assert said in cli.error("report", run, "-o", wrong, status=2)
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert "no such directory" in cli.error("report", tmp_path / "nowhere", "-o", target, status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes.html", "report.html", run.name])


def test_how_a_run_stands(cli: Cli, tmp_path: Path) -> None:
    """Only the program knows whether training has finished; what changes the run afterwards is no start."""
    for step in (1, 2):
        closed = saved_run(tmp_path / "closed", step)
    with hf.CheckpointCallback(tmp_path / "finished", save_interval_steps=1) as checkpoint:
        checkpoint.restore_or_initialize({"w": np.ones(2)})
        checkpoint.on_step(1, {"w": np.ones(2)})
    for run in (closed, tmp_path / "finished"):
        assert cli.output("pin", run, 1) == "pinned 1\n"
    (tmp_path / "no checkpoints").mkdir()
    elsewhere, lost = (saved_run(tmp_path / name, 1) / "events.jsonl" for name in ("running or lost", "lost"))
    text = elsewhere.read_text().replace(socket.gethostname(), "node-7")
    elsewhere.write_text(text.replace('"closed"', '"of the program"'))
    lines = lost.read_text().replace(f'"pid": {os.getpid()}', '"pid": -1').splitlines(keepends=True)
    lost.write_text("".join(line for line in lines if '"closed"' not in line))  # the program never closes its manager

    found = {
        path.name: report(cli, path, output=tmp_path / "report.html") for path in tmp_path.iterdir() if path.is_dir()
    }
    for name in ("closed", "finished", "no checkpoints", "running or lost"):
        assert found[name].texts("span", "pill") == [name]
        assert found[name].texts("li", "bad") == []
    assert found["closed"].texts("li", "warn") == []
    assert "no interruption" in found["closed"].texts("span")
    assert found["lost"].texts("li", "bad") == []
    assert found["lost"].texts("li", "warn")[0].startswith("The last start ended without a record after")
    assert "1 without a record" in found["lost"].texts("span")
    said = found["running or lost"].texts("li", "plain")[0]
    assert said.startswith("The last start runs on node-7, or was lost there; its last event was ")


def test_norms_with_nan_are_not_finite(tmp_path: Path) -> None:
    values = {1: 1.0, 2: np.nan}
    runs.saved(
        tmp_path, 1, 2, items=lambda step: {"a": {"w": np.full(4, values[step])}, "b": np.ones(9), "count": step}
    )
    found = facts.read_run(hf.storage.as_location(tmp_path), facts.Reading()).statistics
    assert found is not None
    assert found.steps == [1, 2]
    assert str(found.groups) == str({"a": [2.0, math.nan], "b": [3.0, 3.0]})


# ---- large runs


def summary(step: int, **others: Any) -> hf.reports.CheckpointSummary:
    return hf.reports.CheckpointSummary(step=step, path=f"/run/{step}", time=float(step), **others)


def leaf(path: str, item: str = "state") -> hf.reports.LeafSummary:
    return hf.reports.LeafSummary(item=item, path=path, kind="numpy", dtype="f4")


def test_a_long_run_and_a_large_tree_make_a_small_file() -> None:
    metrics = {"loss": 1.0, "other": 2}
    summaries = [summary(step, bytes=10**6, metrics=metrics, kept=("x",)) for step in range(10_000)]
    events = [
        one
        for start in range(400)
        for one in [event("started", 1e4 * start, str(start))]
        + [saved(1e4 * start + step, 25 * start + step, str(start), metrics={"loss": 1.0}) for step in range(25)]
    ]
    leaves = [leaf(f"block_{n // 100}/layer_{n % 100 // 10}/w{n % 10}") for n in range(99_000)]
    leaves += [leaf(f"leaf {n}", "flat") for n in range(1000)]
    text = page_of(facts.RunFacts("run", "/run", summaries, read_history(events), newest=summaries[-1], leaves=leaves))
    assert len(text) < 2 << 20
    for said in (
        "9500 of 10000 steps are left out",
        "of 100000 leaves are left out",
        "600 more, with 600 leaves",
        "590 more, with 59000 leaves",
    ):
        assert said in text


def test_many_damaged_steps_shared_files_and_deep_leaves_are_told() -> None:
    damage = [*["cut short"] * 12, None, None]
    summaries = [summary(step, bytes=10, shared_bytes=4, damage=one) for step, one in enumerate(damage)]
    deep = "/".join("abcdefghijklmnopqrstuvwxyz" * 4)
    run = facts.RunFacts("run", "/run", summaries, History(), newest=summaries[-1], leaves=[leaf(deep)])
    found = Page(page_of(run, now=20.0))
    assert found.texts("li", "bad")[9:11] == [
        "Step 9 is damaged: cut short",
        "2 more steps are damaged; holdfast verify lists them",
    ]
    assert sum("of which 4 B shared" in "".join(text) for _, _, text in found.elements) == 2 * len(summaries)
    assert len([text for text in found.texts("code") if "/" in text and deep.endswith(text)]) == 1


def test_statistics_of_many_leaves_are_bounded(tmp_path: Path) -> None:
    tree = {f"w{n}": np.full(n + 1, np.nan if n == 3 else 1.0, np.float32) for n in range(1530)}
    runs.saved(tmp_path, 1, items=lambda step: tree)
    found = facts.read_run(hf.storage.as_location(tmp_path), facts.Reading()).statistics
    assert found is not None
    assert (found.number, found.damaged, found.examples) == (1530, 1, ["state/w3"])
    assert {leaf.path for leaf in found.leaves} == {"w3", *(f"w{n}" for n in range(31, 1530))}
    assert "30 of 1530 leaves are left out" in found.notes[0]
