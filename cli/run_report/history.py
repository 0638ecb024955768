"""Build the history of a run from its event log: its attempts and how they ended, its saves, and its lost steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...engine.clock import format_size
from ...engine.errors import shortened_steps
from ...engine.manager import number_in_event
from ..report import count, duration, proof_text

How = Literal["finished", "closed", "preempted", "crashed", "hung", "failed", "lost", "running", "open"]
"""How an attempt ended. ``closed``: no callback recorded whether training finished. ``failed``: with an exception.
``crashed``: with a signal or a nonzero exit status. ``lost``: without a final event. ``open``: the attempt may still
be running on another machine."""

_CHARTED = 16  # maximum number of elements to chart for a list-valued metric

WORDS: Mapping[How, str] = {how: how for how in get_args(How)} | {
    "lost": "ended without a record",
    "open": "running or lost",
}
PROOFS: Mapping[str, str] = {"exact": "exact", "inexact": "not exact", "rounding": "exact up to rounding"}
_LATEST = 253402300799  # latest valid time, in seconds since 1970-01-01 UTC: the end of the year 9999
_DEEPEST = 32  # maximum nesting depth of metrics


@dataclass(frozen=True, slots=True)
class Save:
    time: float  # time at which the save became durable
    step: int
    bytes: int  # number of bytes written
    blocked: float  # time that the training loop waited, in seconds
    total: float  # time until the save was durable, in seconds


@dataclass(slots=True)
class Attempt:
    """One attempt to run the program. It begins when the program acquires the checkpoint directory."""

    began: float
    newest: int | None = None  # newest step in the directory when the attempt began
    host: str = ""
    pid: int | None = None
    restored: int | None = None
    restore_seconds: float | None = None
    proof: str | None = None  # verdict on the resume, a key of `PROOFS`
    compared: int = 0  # last step that was compared with the same step before the interruption; 0 for none
    differs: str = ""  # names of the layers that differ
    saves: list[Save] = field(default_factory=list)
    ended: float = 0.0  # time of the last event
    last_step: int | None = None  # last step known to have been reached
    how: How | None = None
    status: int | None = None
    why: str = ""

    @property
    def blocked(self) -> float:
        """Total time that the training loop waited for saves, in seconds."""
        return sum(save.blocked for save in self.saves)


Tone = Literal["good", "bad", "warn", "info", "plain"]


@dataclass(frozen=True, slots=True)
class Note:
    """An entry in the list of events, with an optional mark on the timeline."""

    time: float
    tone: Tone
    title: str
    text: str = ""
    mark: str = ""  # kind of timeline mark; empty for none


@dataclass(slots=True)
class History:
    attempts: list[Attempt] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)  # values keyed by name, then by step
    failures: int = 0  # number of failed saves
    fallbacks: int = 0  # number of restores that skipped damaged steps
    redone_steps: int = 0  # number of steps that were lost in interruptions and trained again
    redone_seconds: float = 0.0
    hides_steps: bool = False  # whether an attempt was killed, which leaves its last steps unknown

    @property
    def saves(self) -> list[Save]:
        """All committed saves, in the order of their events."""
        return [save for attempt in self.attempts for save in attempt.saves]

    @property
    def blocked(self) -> float:
        return sum(attempt.blocked for attempt in self.attempts)

    def ended(self, *how: How) -> int:
        """Return the number of attempts that ended in any of the given ways."""
        return sum(attempt.how in how for attempt in self.attempts)


def read_history(events: Iterable[Mapping[str, Any]]) -> History:
    """Build a run's history from its events in file order, ignoring invalid events."""
    history = History()
    by_run: dict[str, Attempt] = {}
    for event in events:
        when = number_in_event(event.get("time"))
        run = str(event.get("run", ""))
        if when is None or when > _LATEST:
            continue
        attempt = by_run.get(run)
        if attempt is None:  # the attempt's first event may have been in a deleted file
            attempt = by_run[run] = Attempt(when)
            history.attempts.append(attempt)
        attempt.began, attempt.ended = min(attempt.began, when), max(attempt.ended, when)
        _take(history, attempt, event, when)
    # Drop attempts that did not train, such as those recorded by `holdfast pin` and by the start of `holdfast run`.
    history.attempts = [attempt for attempt in history.attempts if attempt.how != "closed" or _has_trained(attempt)]
    _end_all(history)
    history.notes = sorted([*_notes_of(history), *history.notes], key=lambda note: note.time)
    return history


def add_metrics(
    history: History, step: int, metrics: Mapping[str, Any] | None, prefix: str = "", depth: int = 0
) -> None:
    """Record the metrics of a step, joining the names of nested metrics with ``/``."""
    for name, value in (metrics or {}).items():
        if isinstance(value, list):
            value = {str(index): inner for index, inner in enumerate(value[:_CHARTED])}
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                add_metrics(history, step, value, f"{prefix}{name}/", depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                history.metrics.setdefault(f"{prefix}{name}", {})[step] = float(value)


_AT_STEPS = ("saved", "saved_locally", "preempted", "finished", "failed", "closed", "ended", "restored")


def _take(history: History, attempt: Attempt, event: Mapping[str, Any], when: float) -> None:
    name, step = event["event"], _count(event.get("step"))
    seconds, error = number_in_event(event.get("seconds")), str(event.get("error", ""))
    mirror = event.get("mirror", "the mirror")

    def note(tone: Tone, title: str, text: str, mark: str = "") -> None:
        history.notes.append(Note(when, tone, title, text, mark))

    def size(key: str) -> str:
        return format_size(int(number_in_event(event.get(key)) or 0))

    if step is not None and name in _AT_STEPS:
        attempt.last_step = step if name == "restored" else max(step, attempt.last_step or 0)
    match name:
        case "started":
            attempt.newest, attempt.pid = _count(event.get("newest")), _count(event.get("pid"))
            attempt.host = str(event.get("host", ""))
        case "restored":
            attempt.restored = step
            attempt.restore_seconds = attempt.restore_seconds if seconds is None else seconds
            if skipped := _skipped(event.get("skipped")):
                history.fallbacks += 1
                steps = ", ".join(str(number) for number, _ in skipped)
                title = f"Fell back to step {step}: {count(len(skipped), 'step')} damaged ({steps})"
                note("bad", title, "; ".join(f"step {number}: {damage}" for number, damage in skipped), "fallback")
            if event.get("local"):
                text = f"Process 0 read {size('peer_bytes')} from other hosts."
                note("info", f"Step {step} came from local steps of the hosts", text)
        case "witness":
            attempt.proof, attempt.compared = proof_text(event), step or 0
            if attempt.proof == "inexact":
                layers = event.get("layers")
                attempt.differs = ", ".join(map(str, layers)) if isinstance(layers, list) else ""
                title = f"The resume from step {_count(event.get('saved_step'))} is not exact"
                note("bad", title, f"different from before the stop: {attempt.differs}", "inexact")
        case "saved" | "metrics" if step is not None:
            if name == "saved":
                keys = ("bytes", "blocked_seconds", "total_seconds")
                written, blocked, total = (number_in_event(event.get(key)) or 0.0 for key in keys)
                attempt.saves.append(Save(when, step, int(written), blocked, total))
            metrics = event.get("metrics")
            add_metrics(history, step, metrics if isinstance(metrics, Mapping) else None)
        case "interval" if seconds is not None:
            note("plain", f"Saves every {duration(seconds)} from here on, as learned", str(event.get("why", "")))
        case "save_failed":
            history.failures += 1
            note("bad", f"The save of step {step} failed", error, "failed save")
        case "local_failed":
            note("warn", f"The local save of step {step} failed", error)
        case "mirror_failed":
            note("warn", f"The mirror {mirror} failed", error, "mirror failed")
        case "fetched":
            text = f"{mirror}: {size('bytes')} in {duration(seconds or 0.0)}"
            note("info", f"Fetched step {step} from the mirror", text, "fetched")
        case "closed":
            attempt.how = attempt.how or "closed"
        case "finished":
            attempt.how = "finished"
        case "preempted" | "failed":
            attempt.how, attempt.why = name, error
        case "ended":
            _take_end(attempt, event)


def _skipped(skipped: Any) -> list[tuple[int, str]]:
    """Return the damaged steps that a restore skipped, each with a description of its damage."""
    return [
        (number, str(step.get("damage", "")))
        for step in (skipped if isinstance(skipped, Sequence) else ())
        if isinstance(step, Mapping) and (number := _count(step.get("step"))) is not None
    ]


def _take_end(attempt: Attempt, event: Mapping[str, Any]) -> None:
    """Apply the supervisor's ``ended`` event to an attempt. The run's own report takes precedence, except for hangs."""
    how = event.get("how")
    attempt.status = _whole(event.get("status"))
    if how == "hung":
        attempt.how, attempt.why = "hung", str(event.get("why") or "")
    elif how == "crashed" and attempt.how in (None, "closed"):
        attempt.how = "crashed"
    elif attempt.how is None or (attempt.how == "closed" and _has_trained(attempt)):
        attempt.how = "finished" if how == "finished" else "preempted" if how == "preempted" else attempt.how


def _has_trained(attempt: Attempt) -> bool:
    return bool(attempt.saves) or attempt.restored is not None


def _end_all(history: History) -> None:
    """Determine how attempts without a final event ended, and count the steps that were trained again."""
    for attempt, after in itertools.zip_longest(history.attempts, history.attempts[1:]):
        if attempt.how is None:
            elsewhere = attempt.host not in ("", socket.gethostname())
            attempt.how = "lost" if after else "open" if elsewhere else "running" if _is_alive(attempt) else "lost"
        history.hides_steps |= attempt.how == "lost" and after is not None
        if after is None or after.restored is None or attempt.last_step is None:
            continue
        lost = max(attempt.last_step, after.compared) - after.restored
        if lost > 0:
            saved = [save.time for save in attempt.saves if save.step == after.restored]
            since = saved[-1] if saved else attempt.began
            history.redone_steps += lost
            history.redone_seconds += max(0.0, attempt.ended - since)


def _is_alive(attempt: Attempt) -> bool:
    if not attempt.pid:
        return False
    try:
        os.kill(attempt.pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True


def _notes_of(history: History) -> Iterator[Note]:
    """Yield notes about the beginning, the saves and the end of each attempt."""
    for number, attempt in enumerate(history.attempts):
        yield _beginning(number, attempt)
        if attempt.saves:
            yield _saves(attempt.saves)
        if attempt.how not in ("running", "open"):
            yield _end(attempt)


def _beginning(number: int, attempt: Attempt) -> Note:
    if attempt.restored is not None:
        took = "" if attempt.restore_seconds is None else f" in {duration(attempt.restore_seconds)}"
        proof = "" if attempt.proof is None else f": {PROOFS[attempt.proof]}"
        text = f"resumed from step {attempt.restored}, restored{took}{proof}"
    elif attempt.newest is not None:
        text = f"found step {attempt.newest}, but restored nothing"
    else:
        text = "from the beginning: the directory was empty"
    where = f" on {attempt.host}, process {attempt.pid}" if attempt.host else ""
    return Note(attempt.began, "info", "Started again" if number else "Started", f"{text}{where}", "start")


def _saves(saves: Sequence[Save]) -> Note:
    steps = shortened_steps([save.step for save in saves])
    written, blocked = sum(save.bytes for save in saves), sum(save.blocked for save in saves)
    title = "Saved step" if len(saves) == 1 else f"Saved {len(saves)} steps:"
    text = f"{format_size(written)} written, the loop waited {duration(blocked)} for them"
    return Note(saves[-1].time, "plain", f"{title} {steps}", text)


def _end(attempt: Attempt) -> Note:
    after = "" if attempt.last_step is None else f" after step {attempt.last_step}"
    saved = attempt.saves[-1].step if attempt.saves else attempt.restored
    status = "" if attempt.status is None else f"status {attempt.status}"
    why = "; ".join(filter(None, [attempt.why, status]))
    failed = f"{why}{' (killed)' * (attempt.status == 137)}"
    closed = "the program has closed its manager; only a callback notes whether training has finished"
    lost = "killed, or its machine was lost; or the program ended without closing its manager"
    preempted = f"step {saved} was saved" if saved is not None and saved == attempt.last_step else ""
    ends: dict[str, tuple[Tone, str, str, str]] = {
        "finished": ("good", "Finished", "", "finished"),
        "closed": ("info", "Closed", closed, "finished"),
        "preempted": ("info", "Preempted", preempted, "preempted"),
        "hung": ("bad", "Hung", why, "hung"),
        "lost": ("warn", "Ended without a record", lost, "lost"),
        "failed": ("bad", "Failed", failed, "crash"),
        "crashed": ("bad", "Crashed", failed, "crash"),
    }
    tone, title, text, mark = ends[attempt.how or "lost"]
    return Note(attempt.ended, tone, f"{title}{after}", text, mark)


def _count(value: Any) -> int | None:
    return number if (number := _whole(value)) is not None and number >= 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and type(value) is not bool and abs(value) < 2**63 else None
