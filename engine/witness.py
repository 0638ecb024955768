"""The witness: records of the steps after a save, for comparison with the steps that a resumed run repeats.

A resume is exact if the batch, random generators, metrics, state and counters agree, even if other objects of the
program differ. A record is taken at the save itself (k = 0), at the 1st, 2nd, 4th, 8th, ... step report after it, and
at the next save. Records are stored in ``witness.jsonl`` in the step's folder. The commit record does not list this
file, which may be missing, damaged or written by another version without causing an error.

The layers ``batch``, ``generators``, ``metrics``, ``state`` (samples of leaves), ``gradients`` and ``counters`` decide
whether a resume is exact. Opaque positions, and the structure and attributes of objects, only help explain differences.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import HoldfastError, shortened
from .forks import Lock
from .format import WITNESS, WITNESS_LIMIT
from .generators import checksums
from .pytree import MISSING, Sampler, Samples, Ways, full_sum, leaves_of, loaded, size_of
from .storage import Location, append_line

VERSION = 3
LIMIT = 64 << 10  # size limit in bytes of a witness file
_LEAVES = 128
_GRADIENTS = 4  # number of gradients to record; a few suffice, because losing accumulated gradients changes all of them
_NUMBERS = 768  # number of elements whose values are recorded to measure differences
_FULL = 32 << 20  # maximum total size in bytes of the leaves that are summed in full
# Metrics whose names contain these words describe the machine rather than the training, and are not compared.
_TIMES = {"time", "times", "elapsed", "duration", "seconds", "secs", "sec", "s", "ms", "hz", "timestamp", "eta", "wall"}
_TIMES |= {"speed", "fps", "throughput", "memory"}
_LOSS, _UPDATE = 1e-4, 1e-2  # largest relative differences of metrics and of updates that rounding may explain
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The observable values of a program at a step."""

    step: int
    root: Any  # the state, and the arrays and numbers that are saved with it, keyed by name
    objects: Mapping[str, Any] = field(default_factory=dict)  # objects whose attributes may explain a difference
    generators: Mapping[str, Any] = field(default_factory=dict)  # snapshots of random generator states, by name
    positions: Mapping[str, Any] = field(default_factory=dict)  # snapshots of opaque states, such as positions, by name
    batch: Any = None
    checksums: Mapping[str, int] = field(default_factory=dict)  # checksum of each loader's latest batch
    metrics: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)  # numbers that must agree, such as the epoch


Record = dict[str, Any]
"""One line of the file, without its checksum: ``k``, ``step`` and the layers."""


class Recorder:
    """Records the steps of a run by sampling leaves, which are chosen at the start and again at some saves."""

    def __init__(self, seen: Seen, names: tuple[str, ...] | None = None) -> None:
        self._names = names  # names of the leaves that a resumed run compares until its next save
        self._sampler = Sampler()
        self._ways = Ways(seen.root, _LEAVES, names)
        self._saves = 0
        self._generators: dict[str, tuple[Any, int]] = {}  # last state of each Python generator, with its checksum
        self._begun = self.attributes = self._attributes(seen)  # attributes at the start and at the last save

    def take(self, k: int, seen: Seen, same: Pending | None = None) -> Pending:
        """Begin the record of a step (k = 0 for a save). ``same``, a record of this step, may supply the samples."""
        leaves = self._ways.follow(seen.root)
        self._saves += k == 0
        # Choose leaves again: the first steps create new leaves, such as optimizer state; later steps rarely do.
        if k == 0 and (self._saves & (self._saves - 1) == 0 or any(leaf is MISSING for leaf in leaves)):
            self._ways = Ways(seen.root, _LEAVES, self._names if self._saves == 1 else None)
            leaves = self._ways.follow(seen.root)
        ways = self._ways
        generators = self._checksums(seen.generators) if same is None else same.record["generators"]
        record: Record = {"k": k, "step": seen.step, "generators": generators}
        state = dict(zip(ways.names, leaves, strict=True))
        gradients = _gradients(state, ways.trained(seen.root)) if k else {}
        sparse = {name: state[name] for name, gradient in gradients.items() if gradient.is_sparse}
        full = _leaves_to_sum(sparse if seen.metrics else state, k)
        layers: dict[str, Mapping[Any, Any]] = {"state": state, "full": full}
        if k:
            record |= {"positions": checksums(seen.positions), "counters": {**seen.counters}}
            record["batch"] = {**seen.checksums}
            layers["metrics"] = _named_numbers(seen.metrics or {})
            layers["gradients"] = dict(islice(gradients.items(), _GRADIENTS))
            if seen.batch is not None:
                batch, text = leaves_of(seen.batch)
                record["batch"]["batch"] = zlib.crc32(text.encode())
                layers["batch"] = dict(enumerate(batch))
        else:
            # Keep only attributes that have changed since the start, and note whether they keep changing.
            before, self.attributes = self.attributes, self._attributes(seen)
            moves = before != self._begun
            record["attributes"] = {
                name: [text, moves and before.get(name) != text]
                for name, text in self.attributes.items()
                if self._begun.get(name) != text
            }
        if same is not None and same.names == ways.names and (not full or same.layers["full"] == [*full]):
            samples = same.samples
        else:
            sums = {name: full_sum(leaf) for name, leaf in full.items()}
            layers["full"] = {name: total for name, total in sums.items() if total is not None}
            passing = chain.from_iterable(values.values() for layer, values in layers.items() if layer != "state")
            samples = self._sampler.take(leaves, [*passing])
        return Pending(record, ways.names, ways.total, samples, {layer: [*names] for layer, names in layers.items()})

    def _checksums(self, generators: Mapping[str, Any]) -> dict[str, int]:
        """Return checksums of generator states, reusing those of Python generators, which rarely change."""
        # Only states of random.Random are tuples that contain a tuple; the tuple of a RandomState contains an array.
        tuples = {name: state for name, state in generators.items() if type(state) is tuple and type(state[1]) is tuple}
        last = self._generators
        sums = {name: last[name][1] for name, state in tuples.items() if name in last and state == last[name][0]}
        sums |= checksums({name: state for name, state in generators.items() if name not in sums})
        self._generators = {name: (state, sums[name]) for name, state in tuples.items()}
        return sums

    def _attributes(self, seen: Seen) -> dict[str, str]:
        """Return the plain attributes of the program's objects as text, by name."""
        return self._ways.attributes(seen.root) | Ways(seen.objects, 0).attributes(seen.objects)


class RecordFile:
    """The file in a step's folder that holds the records of the steps after its save."""

    def __init__(
        self, step: int, process: int, key: Mapping[str, Any], first: Pending | None, records: Records | None = None
    ) -> None:
        records = records or Records()  # if the run resumed from this step, ``records`` is given and ``first`` is None
        self.step = step
        self._name = file_name(process)
        self._key = key
        self._lock = Lock()
        # The file is None until the step is committed.
        self._file = None if records.place is None else records.place / self._name
        self._waiting = [] if first is None else [first]
        self._lines = [*records.lines]
        self._written = len(self._lines)  # number of lines in the file
        self._known = {0, *records.by_k}  # k of each record that was added or read

    def add(self, pending: Pending) -> None:
        """Add the record of a later step; if the file is local, write all records that are ready."""
        with self._lock:
            if pending.record["k"] not in self._known:
                self._known.add(pending.record["k"])
                self._waiting.append(pending)
                if self._file is not None and self._file.is_local:
                    self._flush(self._file, wait=False)

    def commit(self, folder: Location, checkpoint: str) -> None:
        """Write the records taken so far to the step's folder; called after the step has been committed."""
        with self._lock:
            if self._file is None:
                first, self._file = self._waiting[0], folder / self._name
                header = {"version": VERSION, "checkpoint": checkpoint, "names": first.names, "total": first.total}
                key = {**self._key, "devices": first.samples.devices(len(first.names))}
                self._lines.append(_line({**header, "key": key}))
                self._flush(self._file, wait=True)

    def finish(self) -> None:
        """Write the remaining records; called at the next save and at the end of the run."""
        with self._lock:
            if self._file is not None:
                self._flush(self._file, wait=True)

    def _flush(self, file: Location, *, wait: bool) -> None:
        """Write records in order, ignoring storage errors because the checkpoint does not depend on this file."""
        while self._waiting and (wait or self._waiting[0].samples.is_ready):
            with contextlib.suppress(RuntimeError):  # raised if a computation on the device failed
                lines = [*self._lines, _line(self._waiting.pop(0).finish())]
                if sum(map(len, lines)) + len(lines) <= LIMIT:
                    self._lines = lines
        written, self._written = self._written, len(self._lines)
        with contextlib.suppress(OSError, HoldfastError):
            # The step may have been deleted in the meantime, so do not recreate its folder for this file.
            if written == len(self._lines):
                return
            if written and file.is_local:
                append_line(file.path, "\n".join(self._lines[written:]), create=False)
            elif not written or file.is_there():
                file.write_bytes(("\n".join(self._lines) + "\n").encode(), atomic=False)


@dataclass
class Pending:
    """A record whose samples may not have arrived from a device yet."""

    record: Record
    names: tuple[str, ...]
    total: int
    samples: Samples
    layers: Mapping[str, Sequence[Any]]  # for each layer, the keys of its samples, in the order of ``samples``
    _finished: bool = False

    def finish(self) -> Record:
        """Wait for the samples, and return the complete record."""
        if not self._finished:
            self._finished, record, begin = True, self.record, 0
            digests, values = self.samples.fetch(max(1, min(16, _NUMBERS // max(1, len(self.names)))))
            for layer, keys in self.layers.items():
                part = slice(begin, begin := begin + len(keys))
                if layer == "state":
                    record[layer] = [_packed(digests[part]), _packed(values[part])]
                elif layer == "batch":
                    record[layer][layer] ^= zlib.crc32(digests[part].tobytes()) if len(keys) else 0
                else:
                    entries = zip(keys, digests[part].tolist(), values[part, 0].tolist(), strict=True)
                    record[layer] = {name: [digest, value] for name, digest, value in entries if digest}
        return self.record


@dataclass(frozen=True)
class Records:
    """The records that belong to the checkpoint from which a run resumes."""

    names: tuple[str, ...] = ()  # names of the sampled leaves
    total: int = 0  # number of leaves in the state
    by_k: Mapping[int, Record] = field(default_factory=dict)  # records, keyed by number of step reports after the save
    why: str = ""  # reason why there are no records
    key: Mapping[str, Any] = field(default_factory=dict)  # the processor, and settings that must match for a comparison
    lines: tuple[str, ...] = ()
    place: Location | None = None


def file_name(process: int) -> str:
    return WITNESS if process == 0 else f"witness-{process}.jsonl"


def read_records(folder: Location, process: int, checkpoint: str) -> Records:
    """Read the records of a checkpoint. The result is empty if they are missing, damaged or from another checkpoint."""
    try:
        content = (folder / file_name(process)).read_own(WITNESS_LIMIT)
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
        return Records(names, total, by_k, "", header["key"], tuple(lines), folder)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Records(why="its record is damaged")


def compare(saved: Record, now: Record, names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return the layers in which two records of a step agree, and descriptions of the differences in the others."""
    same: list[str] = []
    differs: dict[str, str] = {}
    for layer in ("batch", "generators", "counters", "metrics", "gradients"):
        both, changed = _compared(saved, now, layer)
        if changed and layer in ("counters", "metrics"):
            values = [f"{name} {_value(saved[layer][name])}, now {_value(now[layer][name])}" for name in changed]
            differs[layer] = shortened(values, _SHOWN)
        elif changed:
            differs[layer] = shortened(map(shown_name, changed), _SHOWN)
        elif both:
            same.append(layer)
    if "batch" in differs:  # if positions differ as well, the loaders have moved; if not, their states are incomplete
        loaders, moved = _compared(saved, now, "positions")
        as_well = f", and so is the state of {shortened(moved, _SHOWN)}"
        differs["batch"] = as_well if moved else f", with the same state of {shortened(loaders)}" if loaders else ""
    first, second = (_unpacked(record.get("state", [""])[0], np.uint32) for record in (saved, now))
    comparable = (first != 0) & (second != 0) if len(first) == len(second) == len(names) else np.zeros(0, bool)
    leaves = [names[index] for index in np.flatnonzero(comparable & (first != second))] if comparable.any() else []
    if leaves := list(dict.fromkeys([*leaves, *_compared(saved, now, "full")[1]])):
        before, after = _values(saved), _values(now)
        with np.errstate(all="ignore"):
            apart = np.abs(before - after) / np.maximum(np.abs(before), 1e-30)
        size = max(apart[np.isfinite(apart)], default=0.0)
        text = f"{len(leaves)} of {int(comparable.sum())} leaves: {shortened(map(shown_name, leaves), _SHOWN)}"
        differs["state"] = text + (f"; relative difference {size:.1g}" if size else "")
    elif comparable.any():
        same.append("state")
    return same, differs


def _compared(saved: Record, now: Record, layer: str) -> tuple[list[str], list[str]]:
    """Return the names common to both records of a layer, and the names with different values; skip machine metrics."""
    before, after = saved.get(layer) or {}, now.get(layer) or {}
    both = sorted(name for name in before.keys() & after.keys() if layer != "metrics" or not is_time(name))
    # Entries that consist of a digest and a value are compared by their digests.
    bits = [[entry[0] if isinstance(entry, list) else entry for entry in (before[name], after[name])] for name in both]
    return both, [name for name, (first, second) in zip(both, bits, strict=True) if first != second]


def _value(entry: Any) -> str:
    return f"{entry[1]:.6g}" if isinstance(entry, list) else str(entry)


def is_rounding(saved: Record, now: Record, first: Record) -> float | None:
    """Return the largest relative difference in metrics and updates at k = 1; None if rounding cannot explain it."""
    pairs = [(saved["metrics"][name][1], now["metrics"][name][1]) for name in _compared(saved, now, "metrics")[1]]
    differences = [abs(value - new) / max(abs(value), 1e-30) for value, new in pairs]
    before, old, new = (_values(record) for record in (first, saved, now))
    if not all(size <= _LOSS for size in differences) or not len(before) == len(old) == len(new):
        return None
    with np.errstate(all="ignore"):
        moved, apart = (float(np.linalg.norm(np.nan_to_num(change))) for change in (old - before, new - old))
    size = apart / max(moved, 1e-300)
    return max([*differences, size]) if size <= _UPDATE else None


def changed_attributes(saved: Record, current: Mapping[str, str]) -> dict[str, tuple[str, str, bool]]:
    """Return the attributes that differ from the record, with both values and whether the attribute keeps changing."""
    # Ignore a missing attribute unless it keeps changing: like a cache, it may be set once during the first steps.
    return {
        shown_name(name): (text, current.get(name, "not there"), bool(moves))
        for name, (text, moves) in (saved.get("attributes") or {}).items()
        if current.get(name) != text and (name in current or moves)
    }


def shown_name(name: str) -> str:
    return name.removeprefix("state.")


def _named_numbers(metrics: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested metrics to a dictionary keyed by path; entries that are not numbers are dropped later."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers |= _named_numbers(value, f"{path}{name}/")
        else:
            numbers[f"{path}{name}"] = value
    return numbers


def is_time(name: str) -> bool:
    """Return whether a metric's name suggests that it describes the machine; comparisons ignore such metrics."""
    return not _TIMES.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _gradients(leaves: Mapping[str, Any], trained: Collection[int] | None) -> dict[str, Any]:
    """Return the gradients of the trained leaves (all leaves if there is no optimizer), keyed by name."""
    torch: Any = loaded("torch")
    if torch is None:
        return {}
    return {
        name: gradient
        for name, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        if trained is None or id(leaf) in trained
        if (gradient := leaf.grad) is not None
    }


def _leaves_to_sum(leaves: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Return the leaves that a record sums in full. If their total size is too large, the selection rotates with k."""
    sizes = {name: size_of(leaf) for name, leaf in leaves.items()}
    first = k.bit_length() * 7 % len(leaves) if sum(sizes.values()) > _FULL else 0
    chosen, left = {}, _FULL
    for name in [*islice(leaves, first, None), *islice(leaves, first)]:
        if 512 < sizes[name] <= left:
            chosen[name], left = leaves[name], left - sizes[name]
    return chosen


def _values(record: Record) -> NDArray[np.float64]:
    return _unpacked(record["state"][1], np.float32).astype(np.float64)


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpacked(text: str, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)


_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _line(record: Mapping[str, Any]) -> str:
    text = _text(record)
    return f'{{"crc":{zlib.crc32(text.encode())},"record":{text}}}'
