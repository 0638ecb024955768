"""The witness of a run, which records steps, compares the steps of a resumed run, and reports differences."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from ...engine.errors import StateError, shortened
from ...engine.format import CheckpointRecord
from ...engine.manager import CheckpointManager, on_commit, whole_step
from ...engine.pytree import loaded
from ...engine.sources import Misfits
from ...engine.storage import Location
from ...engine.witness import (
    Pending,
    Record,
    Recorder,
    RecordFile,
    Records,
    Seen,
    changed_attributes,
    compare,
    is_rounding,
    is_time,
    read_records,
)
from ..options import OnInexact, ProgramOptions
from .announce import announce
from .first_steps import cause_in_shardings, cause_in_state, cause_in_sums, shardings_of

logger = logging.getLogger("holdfast")

_SAVES = 5  # maximum number of earlier saves, to the directory or local storage, that may still be in progress
_LAST = 4  # number of step reports before the summary of the comparison is logged


@dataclass(frozen=True)
class Proof:
    """The current result of comparing a resumed run with the steps before the stop.

    Attributes:
        exact: True if all compared steps are identical to the same steps before the stop; False if any step differs;
            None if no step has been compared, if no step can be compared, or if only rounding differs.
        steps: The compared steps that are identical to the same steps before the stop.
        differs: The layers that differ, such as ``batch``, ``generators``, ``metrics``, ``state`` and ``counters``.
        rounding: The largest relative difference that was attributed to rounding, or None.
        why: The reason why no steps can be compared, or an empty string.
    """

    exact: bool | None = None
    steps: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    rounding: float | None = None
    why: str = ""


class HandingOver(NamedTuple):
    """An integration's advice to users on how to pass missing state to the callback."""

    data: str
    generator: str
    counter: str
    attribute: str
    state: Callable[[Seen | None], str]  # returns the advice about a differing state


IN_LOOPS = HandingOver(
    data="pass the iterator or loader to restore_or_initialize and on_step (data=...), with a state of its own or "
    "through hf.skip_to; a batch that was fetched ahead is state",
    generator="pass it as an extra, such as rng=generator. A global one is saved, but a loader that shuffles without a "
    "place draws from it again: data=hf.resumable(loader). What draws after on_step, such as a validation, is left out "
    "by a resume: call on_step after it",
    counter="pass the counter as an extra",
    attribute="hand it over as an extra",
    state=cause_in_state,
)
_HOOKS = "in on_save_checkpoint of the module or data module, and set it in on_load_checkpoint"
IN_TRAINERS = HandingOver(
    data="give the loader state_dict and load_state_dict (such as StatefulDataLoader of torchdata), or save the place "
    "in on_save_checkpoint of the data module, and set it in on_load_checkpoint",
    generator=f"save its state {_HOOKS}",
    counter=f"save the counter {_HOOKS}",
    attribute=f"save it {_HOOKS}",
    state=lambda _: (
        "The steps depend on something that no checkpoint has. Register what a module holds (register_buffer), give a "
        f"callback state_dict and load_state_dict, or save the rest {_HOOKS}"
    ),
)

_LEFT = (
    "Earlier steps have left these gradients, and no checkpoint has them. If the program sets them to zero before an "
    "optimizer uses them, do so before the first backward of each step. Otherwise, end each step with an optimizer "
    "that uses its gradients"
)


class Witness:
    """Observes the resume, the step reports and the saves of a run if ``enabled``."""

    def __init__(
        self, manager: CheckpointManager, *, enabled: bool, on_inexact: OnInexact, handing_over: HandingOver = IN_LOOPS
    ) -> None:
        self.proof = Proof()
        self._handing_over = handing_over
        self._manager = manager
        self._processes = manager.processes
        self._whose = "" if self._processes.alone else f" in process {self._processes.index}"
        self._on_inexact = on_inexact
        self._enabled = enabled
        self._key: Mapping[str, Any] = {}
        self._recorder: Recorder | None = None
        self._k = 0  # number of step reports since the last save
        self._mark: Any = None  # the epochs at the last report
        self._last: Pending | None = None  # the record of the latest reported step; None if it was not recorded
        self._files: list[RecordFile] = []  # record files of the recent saves, oldest first; may be incomplete
        self._records = Records()  # records stored with the step from which the run resumed
        self._resumed: int | None = None
        self._waiting: list[Pending] = []  # records that have yet to be compared
        self._left: Callable[[], None] | None = None  # reports a step whose gradients alone differ
        self._shardings: Mapping[str, tuple[Any, int]] = {}  # shardings of the restored jax arrays
        self._layers: dict[str, str] = {}  # descriptions of the identical layers, keyed by layer
        self._compares = False  # whether steps are being compared after a resume
        self._has_said = True  # whether the summary of the comparison has been logged
        self.error: StateError | None = None  # set if on_inexact='raise' and a step differs; no step is saved then
        if enabled:
            on_commit(manager, self._committed)

    @property
    def watches(self) -> bool:
        """True while steps after a save are recorded or steps after a resume are compared."""
        return self._recorder is not None and bool(self._files)

    # ---- in the order of a run

    def begin(self, seen: Seen, step: int | None = None, why_not: str = "") -> None:
        """Start observing a run. Compare a resumed run with the saved records unless ``why_not`` is set."""
        with self._only_logged():
            if not self._enabled:
                return
            self.forget()
            self._key, self._resumed = key_of(self._processes.count), step
            if step is None:
                self._recorder = Recorder(seen)
                return
            saved = whole_step(self._manager, step)
            records = Records(why="the step is not in the directory of the run")
            if saved is not None:
                records = read_records(saved[0], self._processes.index, saved[1].fingerprint)
            self._recorder = Recorder(seen, None if records.why or why_not else records.names)
            now = self._recorder.take(0, seen)
            key = {**self._key, "devices": now.samples.devices(len(now.names))}
            why = records.why or why_not or not_comparable(records.key, key)
            self.proof = Proof(why=why)
            if why:
                if not records.why:
                    text = "not witnessed: %s, so the steps after step %d are not comparable with those before"
                    self._say(text, why, step)
                return
            self._records, self._compares, self._has_said = records, True, False
            self._shardings = shardings_of(seen.root) if " x " in records.key["devices"] else {}
            self._files = [RecordFile(step, self._processes.index, records.key, None, records)]
            self._compare_restored(records.by_k.get(0, {}), now.finish(), key["devices"])

    def forget(self) -> None:
        """Stop recording and comparing steps until the next save or resume: the program returns to an earlier step."""
        with self._only_logged():
            for file in self._files:
                file.finish()
            self._files, self._waiting, self._last, self._mark, self._k = [], [], None, None, 0
            self._compares, self._has_said, self._left = False, True, None

    def note(self, look: Callable[[], Seen], mark: Any = None) -> None:
        """Record and compare a step report before the step is saved. Raise StateError if ``on_inexact`` requires it."""
        # ``look`` is called only if the step is recorded or compared. ``mark`` holds the epochs of the step: the
        # first step of each epoch is always recorded.
        if self.error is not None:
            raise self.error
        self._k += 1
        k, self._last = self._k, None
        is_new, self._mark = mark != self._mark and self._mark is not None, mark
        is_due = k & (k - 1) == 0 or is_new or (self._compares and k in self._records.by_k)
        if not is_due and not self._waiting and self._has_said:
            return
        with self._only_logged():
            if is_due:
                self._take(look())
            if self._waiting:
                self._compare_arrived(look, wait=self._on_inexact == "raise")
            if k >= _LAST and not self._waiting:
                self._conclude()

    def _take(self, seen: Seen) -> Pending:
        assert self._recorder is not None
        self._last = self._recorder.take(self._k, seen)
        if self._compares and self._k in self._records.by_k:
            self._waiting.append(self._last)
        # A step that differs from the same step before the stop must not become a record of the restored checkpoint.
        if self._files and (self.proof.exact is not False or self._files[-1].step != self._resumed):
            self._files[-1].add(self._last)
        return self._last

    def save(self, step: int, look: Callable[[], Seen], *, reported: bool = False, moved: bool = False) -> None:
        """Record the save of a step, and end the comparison. Raise StateError if ``on_inexact`` requires it."""
        # If the step was just ``reported``, its record is reused, because no value has changed since.
        with self._only_logged():
            if self._recorder is None:
                return
            seen, same = look(), self._last if reported else None
            if self._k and self._last is None and self.watches and not moved:  # if moved, a new epoch may have begun
                same = self._take(seen)
            self._compare_arrived(look, wait=True)
            self._conclude()
            self._compares = False
            first = self._recorder.take(0, seen, same)
            self._files = [*self._files[-_SAVES:], RecordFile(step, self._processes.index, self._key, first)]
            self._k = 0

    def _committed(self, directory: Location, record: CheckpointRecord) -> None:
        """Write the records of a committed step; called on the save thread."""
        with self._only_logged():
            files = self._files
            for file in files[:-1]:
                file.finish()
            for file in files:
                if file.step == record.step:
                    file.commit(directory, record.fingerprint)

    def close(self) -> None:
        """Finish all comparisons and record files at the end of the run, without raising exceptions."""
        self._on_inexact = "warn" if self._on_inexact == "raise" else self._on_inexact
        with self._only_logged():
            self._compare_arrived(None, wait=True)
            self._conclude()
            for file in self._files:
                file.finish()

    @contextlib.contextmanager
    def _only_logged(self) -> Iterator[None]:
        """If the witness or code that it calls fails, log the error, disable the witness, and let training continue."""
        try:
            yield
        except Exception as error:
            if error is self.error:
                raise
            self._recorder, self._files, self._compares, self._has_said = None, self._files[:-1], False, True
            self._waiting.clear()
            text = "the steps are no longer recorded and compared (witness): %s: %s. Nothing else depends on it"
            logger.warning(text, type(error).__name__, error)

    # ---- comparisons

    def _compare_restored(self, saved: Record, now: Record, devices: str) -> None:
        same, differs = compare(saved, now, self._records.names)
        if self._processes.index or " x " in devices:
            # All processes restore the same plain arrays. Some arrays, such as buffers that DistributedDataParallel
            # broadcasts before each step, may have differed between processes at the save. Arrays on several devices
            # are sampled on one device, and may be sharded differently until the first step. Ignore such differences.
            differs.pop("state", None)
        assert self._recorder is not None
        attributes = changed_attributes(saved, self._recorder.attributes)
        if attributes:
            shown = [f"{name} ({was}, now {is_now})" for name, (was, is_now, _) in attributes.items()]
            moves = self._processes.index == 0 and any(moves for _, _, moves in attributes.values())
            text = "resumed from step %d: as saved, except %s, which steps before the stop had changed and no save has"
            if moves and self._on_inexact != "ignore":
                text += f". If later steps depend on it, {self._handing_over.attribute}"
                logger.warning(text, self._resumed, shortened(shown))
            else:
                self._say(text, self._resumed, shortened(shown))
        if differs:
            self._found(self._resumed or 0, 0, same, differs, None)

    def _compare_arrived(self, look: Callable[[], Seen] | None, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0].samples.is_ready):
            now = self._waiting.pop(0).finish()
            saved = self._records.by_k[k := now["k"]]
            same, differs = compare(saved, now, self._records.names)
            if not differs:
                if self.proof.exact is not False:
                    steps = (*self.proof.steps, int(now["step"]))
                    exact = None if self.proof.rounding is not None else True
                    self.proof = dataclasses.replace(self.proof, exact=exact, steps=steps)
                self._layers |= {layer: self._in_words(layer, saved) for layer in same}
                self._left = None
                continue
            if (rounding := self._rounding(k, saved, now, differs)) is not None:
                self.proof = dataclasses.replace(self.proof, exact=None, rounding=rounding)
                self._compares, self._has_said = False, True
                self._event(tuple(differs))
                logger.info(
                    "step %d differs from before the stop by at most %.1g (relative), as another processor rounds",
                    now["step"],
                    rounding,
                )
                self._waiting.clear()
                return
            if self._left is None and [*differs] == ["gradients"]:
                # Left over by earlier steps, as in a GAN that trains one part at a time. If the next compared step is
                # the same, the program has set them to zero unused.
                self._left = partial(self._found, int(now["step"]), k, same, differs, look)
                continue
            self._report_left()
            self._found(int(now["step"]), k, same, differs, look)

    def _report_left(self) -> None:
        report, self._left = self._left, None
        if report is not None:
            report()

    def _rounding(self, k: int, saved: Record, now: Record, differs: Mapping[str, str]) -> float | None:
        """Return the relative difference if rounding on another processor can explain it; otherwise, return None."""
        bitwise = {"batch", "generators", "counters"}
        is_other = self._records.key.get("processor") != self._key.get("processor")
        devices = str(self._records.key.get("devices") or "cpu")  # empty if all arrays are numpy arrays
        on_cpu = all(device.startswith("cpu") for device in devices.split(", "))
        if k != 1 or bitwise & differs.keys() or (on_cpu and not is_other) or 0 not in self._records.by_k:
            return None
        return is_rounding(saved, now, self._records.by_k[0])

    def _found(
        self, step: int, k: int, same: list[str], differs: Mapping[str, str], look: Callable[[], Seen] | None
    ) -> None:
        """Record that a step differs from the same step before the stop, and report the first such step."""
        is_first = self.proof.exact is not False
        layers = tuple(dict.fromkeys([*self.proof.differs, *differs]))
        self.proof = dataclasses.replace(self.proof, exact=False, differs=layers)
        if not is_first:
            return
        self._compares, self._has_said = False, True
        self._event(layers)
        parts = (
            f"the batch differs{why}" if layer == "batch" else f"{layer} ({why})" for layer, why in differs.items()
        )
        where = f"not exact from step {step} on" if k else f"not exact: step {step} was not restored as it was saved"
        where += self._whose
        agrees = f". The same as before the stop: {', '.join(same)}" if same else ""
        text = f"{where}: {'; '.join(parts)}{agrees}. {advice(differs, look, self._handing_over, self._shardings)}"
        if self._on_inexact == "raise":
            self.error = StateError(f"{text} (on_inexact='raise': nothing is saved after this)")
            raise self.error
        if self._on_inexact == "warn":
            logger.warning("%s", text)

    def _conclude(self) -> None:
        """Log a one-line summary of the comparison, at most once."""
        self._report_left()
        if self._has_said:
            return
        self._has_said = True
        steps = self.proof.steps
        if not steps and self._k:
            why = "no step was recorded after it" if not max(self._records.by_k, default=0) else "no step was compared"
            self._say("not witnessed: step %d was restored as it was saved, and %s", self._resumed, why)
        if not steps:
            return
        *others, last = dict.fromkeys(steps)  # with gradient accumulation, several batches belong to one step
        listed = f"steps {', '.join(map(str, others))} and {last} are those" if others else f"step {last} is that"
        self._event(tuple(self._layers))
        self._say("exact: %s of before the stop%s (%s)", listed, self._whose, ", ".join(self._layers.values()))

    def _in_words(self, layer: str, saved: Record) -> str:
        if layer == "state":
            count, total = len(self._records.names), self._records.total
            return f"{count} of {total} leaves" if total > 1 else "its leaf"
        if layer == "generators":
            count = len(saved["generators"])
            return f"{count} generators" if count > 1 else "a generator"
        if layer == "counters":  # an integration's counter of batches is not the batch, which is a layer of its own
            return shortened(["batch index" if name == "batch" else name for name in saved[layer]], 3)
        if layer == "metrics":
            return shortened([name for name in saved[layer] if not is_time(name)], 3)
        return layer

    def _event(self, layers: tuple[str, ...]) -> None:
        exact = self.proof.exact
        step = self._resumed if not self.proof.steps else self.proof.steps[-1]
        self._manager.events.write("witness", step=step, saved_step=self._resumed, exact=exact, layers=list(layers))

    def _say(self, text: str, *args: object) -> None:
        announce(text, *args, shown=self._processes.is_primary and self._on_inexact != "ignore")


def advice(
    differs: Mapping[str, str],
    look: Callable[[], Seen] | None,
    how: HandingOver,
    shardings: Mapping[str, tuple[Any, int]],
) -> str:
    """Explain the likely cause of a difference, suggest what to pass to the callback, and list reachable state."""
    from ...engine.fingerprints import not_handed_over  # imported lazily, because few runs need it

    if "batch" in differs:
        cause = f"The data does not continue where it stopped: {how.data}"
    elif "generators" in differs:
        cause = f"A random generator was drawn from or seeded in another way: {how.generator}"
    elif "counters" in differs:
        cause = f"The run counts its steps or epochs in another way: {how.counter}"
    else:
        summed = look is not None and "metrics" not in differs  # equal metrics imply an equal forward pass
        cause = "" if look is None else cause_in_shardings(shardings, look().root)
        left = _LEFT if [*differs] == ["gradients"] else ""
        cause = cause or (cause_in_sums() if summed else "") or left or how.state(look and look())
    held = not_handed_over()
    reach = f" In reach of the program: {shortened(held, 4)}." if held else ""
    return f"{cause}. Or the program or its data have changed.{reach} `holdfast drill` looks for the cause"


# ---- conditions under which two runs can be compared


def why_not_comparable(options: ProgramOptions, misfits: Misfits | None) -> str:
    """Return why the options rule out a comparison with the steps before the stop, or an empty string."""
    if options.resume == "best" or type(options.resume) is int:
        return f"resume={options.resume!r} chose the step"
    if options.hyperparameters == "program":
        return "hyperparameters='program' takes those of the program"
    if misfits is not None and str(misfits):
        return "the checkpoint lacks a part of the state, which was initialized"
    return ""


def not_comparable(key: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the change since the recorded run that makes a comparison impossible, or return ""."""
    for name, description in _KEYS.items():
        if key.get(name) != now.get(name):
            were_several, are_several = (" x " in str(devices) for devices in (key.get(name), now.get(name)))
            advice = _ON_ALL if were_several and not are_several else ""
            return f"{description} changed ({key.get(name)}, now {now.get(name)}{advice})"
    return ""


_ON_ALL = "; put the state on all of them before restore_or_initialize"
_KEYS = {"processes": "the number of processes", "devices": "the devices", "versions": "the versions of libraries"}


def key_of(processes: int) -> dict[str, Any]:
    """Return the values that comparable runs must share, and the processor, which may explain rounding differences."""
    names = ("torch", "jax", "numpy", "lightning")
    modules = {name: sys.modules[name] for name in names if hasattr(sys.modules.get(name), "__version__")}
    versions = [f"{name} {module.__version__}" for name, module in modules.items()]
    torch: Any = loaded("torch")
    threads = [os.cpu_count(), None if torch is None else torch.get_num_threads()]
    return {"processes": processes, "versions": ", ".join(versions), "processor": [_processor(), *threads]}


@cache
def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return f"{platform.machine()} {sys.platform}"
