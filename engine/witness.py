"""The witness: records of the steps after a save, which a resume compares with the steps that it does again.

The running program knows what the steps after a save have given, and a resumed one does them again. If batch, random
generators, metrics, state and counters agree, the resume is exact, whatever the program holds. A record is taken at the
save itself (k = 0), at the reports 1, 2, 4, 8, ... after it and at the next save, and lies beside the step's files in
``witness.jsonl``, outside of the commit record: a file that is missing, damaged or of another version is no error.

Layers that decide: ``batch``, ``generators``, ``metrics``, ``state`` (samples of leaves), ``gradients`` and
``counters``. Opaque positions, the structure and plain attributes of objects only explain.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import HoldfastError, shortened
from .format import WITNESS, WITNESS_LIMIT
from .pytree import MISSING, Sampler, Samples, Ways, full_sum, is_jax_array, is_torch_tensor, leaves_of, loaded, size_of
from .storage import Location, append_line

VERSION = 1
LIMIT = 64 << 10  # bytes of a file
_LEAVES = 128
_GRADIENTS = 16  # what is accumulated shows in each of them
_NUMBERS = 768  # elements whose values are recorded, so that a difference has a size
_FULL = 32 << 20  # bytes of leaves whose elements are all added up
# Metrics with these words in their names measure the machine, and not the run.
_TIMES = {"time", "times", "elapsed", "duration", "seconds", "secs", "sec", "s", "ms", "hz", "timestamp", "eta", "wall"}
_TIMES |= {"speed", "fps", "throughput", "memory"}
_LOSS, _UPDATE = 1e-4, 1e-2  # relative differences that rounding explains where another kind of processor computes
_SHOWN = 3

Layers = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a program shows at a step.

    Attributes:
        step: The number of the step.
        root: The state, and all that is saved with it whose values lie in arrays and numbers, by name.
        objects: Other objects that were handed over, such as loaders, whose plain attributes explain a difference.
        generators: Snapshots of the states of random generators, by name.
        positions: Snapshots of opaque states, such as places in the data, by name.
        batch: The batch of the step, or None where it is not visible.
        checksums: Checksums of batches that were taken already, by name of the loader.
        metrics: The metrics as they were reported.
        counters: Numbers that must agree, such as the epoch.
    """

    step: int
    root: Any
    objects: Mapping[str, Any] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, Any] = field(default_factory=dict)
    batch: Any = None
    checksums: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


Record = dict[str, Any]
"""One line of the file, without its checksum: ``k``, ``step`` and the layers."""


class Recorder:
    """Takes records of steps; the leaves that it samples are chosen once.

    Args:
        seen: What the program shows as the run begins: its state, of which records have samples.
        names: The leaves that a resume is compared in; None chooses them.
    """

    def __init__(self, seen: Seen, names: tuple[str, ...] | None = None) -> None:
        self._names = names
        self._sampler = Sampler()
        self._ways = Ways(seen.root, _LEAVES, names)
        self._saves = 0
        self._begun = self._before = self._attributes(seen)

    @property
    def attributes(self) -> Mapping[str, str]:
        """The plain attributes of all objects as the run began, or at the last save, as texts by name."""
        return self._before

    def release(self) -> None:
        """Choose other leaves at the next save, as nothing is compared any more."""
        self._names = None

    def take(self, k: int, seen: Seen, same: Pending | None = None) -> Pending:
        """Begin the record of a step, with k = 0 of a save; what lies on a device arrives later.

        ``same`` is the record of a step that is saved, as one of those after the save before: its samples serve twice.
        """
        leaves = self._ways.follow(seen.root)
        self._saves += k == 0
        # The first steps of a run make leaves, such as the state of an optimizer; later ones hardly do.
        if k == 0 and (self._saves & (self._saves - 1) == 0 or any(leaf is MISSING for leaf in leaves)):
            self._ways = Ways(seen.root, _LEAVES, self._names)
            leaves = self._ways.follow(seen.root)
        ways = self._ways
        record: Record = {"k": k, "step": seen.step, "generators": _checksums(seen.generators)}
        layers: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {"state": (ways.names, leaves)}
        sparse = []
        if k:
            record |= {"positions": _checksums(seen.positions), "counters": {**seen.counters}}
            record["batch"] = {**seen.checksums}
            metrics = _named_numbers(seen.metrics or {})
            layers["metrics"] = [*metrics], [*metrics.values()]
            gradients = _gradients(leaves)
            sparse = [place for place, gradient in gradients if gradient.is_sparse]
            held = gradients[:_GRADIENTS]
            layers["gradients"] = [place for place, _ in held], [gradient for _, gradient in held]
            if seen.batch is not None:
                batch, text = leaves_of(seen.batch)
                record["batch"]["batch"] = zlib.crc32(text.encode())
                layers["batch"] = batch, batch
        else:
            # Only attributes that steps have changed are kept, and whether the steps before changed them as well.
            before, self._before = self._before, self._attributes(seen)
            changed = {name: text for name, text in self._before.items() if self._begun.get(name) != text}
            moves = before != self._begun
            record["attributes"] = {name: [text, moves and before.get(name) != text] for name, text in changed.items()}
        full = _full_sums(ways.names, leaves, sparse if seen.metrics else _in_turn(len(leaves), k))
        if same is not None and same.names == ways.names and not full:
            samples, layers = same.samples, {"state": layers["state"]}
        else:
            layers["full"] = [*full], [*full.values()]
            samples = self._sampler.take([value for _, values in layers.values() for value in values])
        return Pending(record, ways.names, ways.total, samples, {layer: keys for layer, (keys, _) in layers.items()})

    def _attributes(self, seen: Seen) -> dict[str, str]:
        """Return the plain attributes of the objects that a program shows as texts, by name."""
        return self._ways.attributes(seen.root) | Ways(seen.objects, 0).attributes(seen.objects)


class RecordFile:
    """The records of the steps after one save, in a file beside that of the step.

    Args:
        step: The step of the save.
        process: The index of this process, which has a file of its own.
        key: What a comparison needs to be alike: the number of processes, versions, devices.
        first: The record of the save; None for the file of a step that the run has resumed from.
    """

    def __init__(self, step: int, process: int, key: Mapping[str, Any], first: Pending | None) -> None:
        self.step = step
        self._name = file_name(process)
        self._key = key
        self._lock = threading.Lock()
        self._place: Location | None = None  # where the step is, once it is committed
        self._first = first
        self._waiting = [] if first is None else [first]
        self._lines: list[str] = []
        self._size = 0
        self.known = {0}  # which records there are, by their k

    @classmethod
    def of(cls, step: int, process: int, place: Location, records: Records) -> RecordFile:
        """Return the file of a step that the run has resumed from; its lines stay as they are."""
        found = cls(step, process, records.key, None)
        found._place, found._size, found.known = place, records.size, {*records.by_k}
        found._lines = [*records.lines]
        return found

    def add(self, pending: Pending) -> None:
        """Add a later record, and write what has arrived."""
        with self._lock:
            if pending.record["k"] not in self.known:
                self.known.add(pending.record["k"])
                self._waiting.append(pending)
                if self._place is not None and self._place.is_local:
                    self._flush(wait=False)

    def commit(self, place: Location, checkpoint: str) -> None:
        """Write the records that there are, now that the commit of the step is known."""
        with self._lock:
            if (first := self._first) is None:
                return
            header = {"version": VERSION, "checkpoint": checkpoint, "names": first.names, "total": first.total}
            self._lines = [_line({**header, "key": {**self._key, "devices": first.devices}})]
            self._size = len(self._lines[0]) + 1
            self._place, self._first = place, None
            self._flush(wait=True, new=True)

    def finish(self) -> None:
        """Write what is left, as the next step is saved or the run ends; in a store, the object is replaced."""
        with self._lock:
            if self._place is not None and self._waiting:
                self._flush(wait=True)

    def _flush(self, *, wait: bool, new: bool = False) -> None:
        """Write records in their order; nothing depends on the file, so no error goes further."""
        lines = []
        while self._waiting and (wait or self._waiting[0].is_ready):
            with contextlib.suppress(RuntimeError):  # The computation on the device has failed.
                line = _line(self._waiting[0].finish())
                if self._size + len(line) < LIMIT:
                    self._size += len(line) + 1
                    lines.append(line)
            self._waiting.pop(0)
        place, self._lines = self._place, self._lines + lines
        assert place is not None
        with contextlib.suppress(OSError, HoldfastError):
            # The step may have been deleted since, and must not come back as a folder with this file alone.
            if new or (lines and not place.is_local and (place / self._name).is_there()):
                (place / self._name).write_bytes(("\n".join(self._lines) + "\n").encode(), atomic=False)
            elif lines and place.is_local:
                append_line(place.path / self._name, "\n".join(lines), create=False)


@dataclass
class Pending:
    """A record whose samples may still be on their way from a device."""

    record: Record
    names: tuple[str, ...]
    total: int
    samples: Samples
    layers: Mapping[str, Sequence[Any]]  # what the samples are of, in their order: a name or place of each
    _finished: bool = False

    @property
    def devices(self) -> str:
        """The kinds of devices that hold the state."""
        return self.samples.devices(len(self.names))

    @property
    def is_ready(self) -> bool:
        return self.samples.is_ready

    def finish(self) -> Record:
        """Return the whole record; waits for what has not arrived."""
        if not self._finished:
            self._finished, record, begin = True, self.record, 0
            digests, values = self.samples.fetch(max(1, min(16, _NUMBERS // max(1, len(self.names)))))
            for layer, keys in self.layers.items():
                found, numbers = digests[begin : begin + len(keys)], values[begin : begin + len(keys)]
                begin += len(keys)
                if layer == "state":
                    record[layer] = [_packed(found), _packed(numbers)]
                elif layer == "gradients" and len(keys):
                    every = np.zeros(len(self.names), np.uint32)
                    every[[*keys]] = found
                    record[layer] = [_packed(every)]
                elif layer == "batch" and len(keys):
                    record[layer]["batch"] ^= zlib.crc32(found.tobytes())
                elif layer == "full":
                    record[layer] = dict(zip(keys, found.tolist(), strict=True))
                elif layer == "metrics":
                    pairs = zip(keys, found.tolist(), numbers[:, 0].tolist(), strict=True)
                    record[layer] = {name: [digest, value] for name, digest, value in pairs if digest}
        return self.record


@dataclass(frozen=True)
class Records:
    """The records of a save that a run resumes from."""

    names: tuple[str, ...] = ()  # of the leaves whose samples they have
    total: int = 0  # leaves of the state
    by_k: Mapping[int, Record] = field(default_factory=dict)  # by the number of reports since the save
    size: int = 0  # bytes of the file
    why: str = ""  # why there are none
    key: Mapping[str, Any] = field(default_factory=dict)  # what has to be alike in the run that resumes
    lines: tuple[str, ...] = ()


def file_name(process: int) -> str:
    return WITNESS if process == 0 else f"witness-{process}.jsonl"


def read_records(place: Location, process: int, checkpoint: str) -> Records:
    """Read the records beside a checkpoint; none if there is no whole file that belongs to it."""
    try:
        content = (place / file_name(process)).read_own(WITNESS_LIMIT)
    except (OSError, HoldfastError):
        return Records(why="it has no record")
    entries, lines = [], []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            if entry["crc"] == zlib.crc32(_text(entry["record"]).encode()):
                entries.append(entry["record"])
                lines.append(line.decode())
    try:
        header, *records = entries
        if header["version"] != VERSION or header["checkpoint"] != checkpoint:
            return Records(why="its record is of another checkpoint or version")
        by_k = {int(record["k"]): record for record in reversed(records)}
        names, total = tuple(header["names"]), int(header["total"])
        return Records(names, total, by_k, len(content), "", header["key"], tuple(lines))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Records(why="its record is damaged")


def compare(saved: Record, now: Record, names: tuple[str, ...]) -> tuple[list[str], Layers]:
    """Return the layers in which two records of a step agree, and those that differ with their differences."""
    same: list[str] = []
    differs: Layers = {}
    for layer in ("batch", "generators", "counters", "metrics"):
        one, other = saved.get(layer) or {}, now.get(layer) or {}
        both = {name for name in one.keys() & other.keys() if layer != "metrics" or not is_time(name)}
        if changed := sorted(name for name in both if _bits(one[name]) != _bits(other[name])):
            has_values = layer in ("counters", "metrics")
            shown = [f"{name} {_value(one[name])}, now {_value(other[name])}" for name in changed]
            differs[layer] = shortened(shown if has_values else changed, _SHOWN)
        elif both:
            same.append(layer)
    for layer in ("state", "gradients"):
        first, second = (_unpacked(record.get(layer, [""])[0], np.uint32) for record in (saved, now))
        known = (first != 0) & (second != 0) if len(first) == len(second) == len(names) else np.zeros(0, bool)
        leaves = [names[index] for index in np.flatnonzero(known & (first != second))] if known.any() else []
        if layer == "state":
            sums, others = saved.get("full") or {}, now.get("full") or {}
            unsampled = sorted(name for name in sums.keys() & others.keys() if sums[name] != others[name])
            leaves = list(dict.fromkeys([*leaves, *unsampled]))
        if leaves:
            size = _difference(saved, now) if layer == "state" else None
            text = f"{len(leaves)} of {int(known.sum())} leaves: {shortened(map(shown_name, leaves), _SHOWN)}"
            differs[layer] = text + (f"; relative difference {size:.1g}" if size else "")
        elif known.any():
            same.append(layer)
    return same, differs


def _bits(entry: Any) -> Any:
    """Return the part of an entry that has to be equal: metrics have a digest and a value, other layers a number."""
    return entry[0] if isinstance(entry, list) else entry


def _value(entry: Any) -> str:
    return f"{entry[1]:.6g}" if isinstance(entry, list) else str(entry)


def is_rounding(saved: Record, now: Record, first: Record) -> float | None:
    """Return the greatest relative difference of metrics and update at k = 1 if rounding explains it, or None."""
    found = [0.0]
    for name, (digest, value) in (saved.get("metrics") or {}).items():
        other = (now.get("metrics") or {}).get(name, [digest, value])
        if digest != other[0] and not is_time(name):
            size = abs(value - other[1]) / max(abs(value), 1e-30)
            if not size <= _LOSS:
                return None
            found.append(size)
    before, one, other = (_unpacked(record["state"][1], np.float32) for record in (first, saved, now))
    if not len(before) == len(one) == len(other):
        return None
    with np.errstate(all="ignore"):
        moved = one.astype(np.float64) - before
        apart = np.linalg.norm(np.nan_to_num(other.astype(np.float64) - one))
        size = float(apart / max(float(np.linalg.norm(np.nan_to_num(moved))), 1e-300)) if apart else 0.0
    return max(found + [size]) if size <= _UPDATE else None


def changed_attributes(saved: Record, own: Mapping[str, str]) -> dict[str, tuple[str, str, bool]]:
    """Return the attributes that steps had changed before a save, and that are other ones now.

    By name: the value at the save, the value now, and whether two saves showed that steps change it.
    """
    found = {}
    for name, (text, moves) in (saved.get("attributes") or {}).items():
        # What first steps make once, such as a cache, is not there yet; what steps change again and again is missed.
        if own.get(name) != text and (name in own or moves):
            found[shown_name(name)] = (text, own.get(name, "not there"), bool(moves))
    return found


def shown_name(name: str) -> str:
    return name.removeprefix("state.")


def _named_numbers(metrics: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the metrics, which may be nested, by names; what is no number or array is left out later."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= _named_numbers(value, f"{path}{name}/")
        else:
            found[f"{path}{name}"] = value
    return found


def is_time(name: str) -> bool:
    """Return whether a metric measures the machine, by a word in its name; it is recorded, and decides nothing."""
    return not _TIMES.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _checksums(states: Mapping[str, Any]) -> dict[str, int]:
    """Return checksums of snapshots of states: of all their plain values and of all bytes of their arrays."""
    found = {}
    for name, state in states.items():
        arrays, text = leaves_of(state)
        total = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        for array in arrays:
            if is_jax_array(array) and not array.is_ready():
                continue  # It would have to be waited for.
            with contextlib.suppress(Exception):  # one on a device, or of an unknown kind
                array = array.numpy() if is_torch_tensor(array) else np.asarray(array)
                total = zlib.crc32(array.tobytes(), total)
        found[name] = total
    return found


def _gradients(leaves: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return the gradients of parameters of torch, each with the place of its leaf."""
    torch: Any = loaded("torch")
    trained = [] if torch is None else [(n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    found = [(n, leaf.grad) for n, leaf in trained if leaf.requires_grad and leaf.is_leaf]
    return [(n, gradient) for n, gradient in found if gradient is not None]


def _in_turn(count: int, k: int) -> list[int]:
    """Return all places, from another one on at each k."""
    first = k.bit_length() * 7 % max(1, count)
    return [*range(first, count), *range(first)]


def _full_sums(names: Sequence[str], leaves: Sequence[Any], places: Sequence[int]) -> dict[str, Any]:
    """Return sums of all bits of the leaves at some places, as many as a record may look at."""
    found, left = {}, _FULL
    for place in places:
        size = size_of(leaves[place])
        if 512 < size <= left and (total := full_sum(leaves[place])) is not None:
            found[names[place]], left = total, left - size
    return found


def _difference(saved: Record, now: Record) -> float | None:
    one, other = (_unpacked(record["state"][1], np.float32).astype(np.float64) for record in (saved, now))
    with np.errstate(all="ignore"):
        apart = np.abs(one - other) / np.maximum(np.abs(one), 1e-30)
    known = apart[np.isfinite(apart)]
    return float(known.max()) if known.size else None


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpacked(text: str, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _line(record: Mapping[str, Any]) -> str:
    text = _text(record)
    return f'{{"crc":{zlib.crc32(text.encode())},"record":{text}}}'
