"""How long a loop on a GPU waits for saves in the background: ``python -m benchmarks.blocked --device cuda``.

After a save, the next step changes every array in place (torch) or donates it (jax). The *call* is the time until the
save returned. The *delay* is the time from the call until such a step is done on the device, less the time of a step
without a save: also what the device waits for, and what a program has to wait for before it may change arrays. In every
other save the loop runs on until the checkpoint is durable: *late* is by how much the slowest of those steps was slower
than a step without a save. In the others it waits: *durable* is the time from the call until the checkpoint is.

Each contender is one process, which takes the sizes in turn and reports each save, so that a run that is cut leaves
what it has measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import holdfast as hf

from .goals import Goal
from .peers import raw_disk
from .results import describe_machine
from .table import goal_rows, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LARGE = 64 << 20
"""Bytes of most arrays; for each there are four of 1 KiB."""

STEPS_ALONE = 5
"""Steps without a save, of which the median is taken."""

SETTLED_ON = 256 << 20
"""Bytes that are written to find out how the disk is written fastest."""

NUMBERS = ("call", "delay", "late", "durable")
LIMIT_OF_LATE = 2.0  # milliseconds

Round = dict[str, Any]
"""One save: contender, gigabytes, round (0 is the first), and ``NUMBERS`` in seconds; or an error in their place."""


class Saving(NamedTuple):
    """A save that was begun.

    Attributes:
        may_change: Waits until the arrays may change.
        is_durable: Whether it is done.
        wait: Waits until it is done.
    """

    may_change: Callable[[], object]
    is_durable: Callable[[], bool]
    wait: Callable[[], object]


class Contender(Protocol):
    """One way to save arrays of one library from a device."""

    durable: bool
    """Whether it saves; a bare copy does not."""

    def step(self) -> None:
        """Change all arrays, and wait until the device has done so."""
        ...

    def save(self, path: Path) -> Saving:
        """Begin to save."""
        ...

    def close(self) -> None:
        """End all work, and let go of all memory."""
        ...


def _shapes(gigabytes: float) -> list[tuple[int, int]]:
    nbytes = int(gigabytes * 1e9)
    large = min(LARGE, nbytes)
    return [(large // 4096, 1024)] * (nbytes // large) + [(1, 256)] * 4 * (nbytes // large)


class Arrays:
    """Arrays of one library on a device."""

    durable = True

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        self.device = device
        self.tree: Any = {}

    def close(self) -> None:
        """Let go of the arrays."""
        self.tree = {}


class Disk(Arrays):
    """The disk itself: as many bytes, through O_DIRECT, from warm memory."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        self._nbytes = int(gigabytes * 1e9)
        taken: dict[tuple[int, int], float] = {}
        for setting in raw_disk.SETTINGS:
            path = directory / "settle"
            began = time.perf_counter()
            raw_disk.write(path, min(self._nbytes, SETTLED_ON), *setting)
            taken[setting] = time.perf_counter() - began
            path.unlink()
        self._setting = min(taken, key=taken.__getitem__)

    def step(self) -> None:
        """There are no arrays."""

    def save(self, path: Path) -> Saving:
        """Write one file."""
        path.mkdir()
        raw_disk.write(path / "all", self._nbytes, *self._setting)
        return Saving(_nothing, lambda: True, _nothing)


class Managed(Arrays):
    """A manager, as programs use it."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        self._manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(max_to_keep=1))

    def save(self, path: Path) -> Saving:
        """Save the next step."""
        self._manager.save(int(path.name), self.tree)
        manager = self._manager
        return Saving(_nothing, lambda: not manager.is_saving_in_progress(), manager.wait_until_finished)

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()
        del self._manager
        super().close()


class TorchTensors(Arrays):
    """Tensors, which an optimizer changes in place."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        import torch

        super().__init__(device, gigabytes, directory)
        self.torch: Any = torch
        if device == "cuda":
            free = torch.cuda.mem_get_info()[0]
            _check("memory of the GPU", free, 1.2 * gigabytes)
        self.tree = {
            f"layer {number}": torch.rand(shape, device=device) for number, shape in enumerate(_shapes(gigabytes))
        }

    def step(self) -> None:
        """Change all tensors in place."""
        self.torch._foreach_add_(list(self.tree.values()), 1.0)
        if self.device != "cpu":
            getattr(self.torch, self.device).synchronize()

    def close(self) -> None:
        """Give the memory of the device back, and what torch keeps pinned."""
        super().close()
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()
            getattr(self.torch._C, "_host_emptyCache", _nothing)()


class TorchCopy(TorchTensors):
    """Copies into pinned memory that is kept, and no save: the least that any save has to do."""

    durable = False

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        pin = device != "cpu"
        self._copies = [self.torch.empty_like(x, device="cpu", pin_memory=pin) for x in self.tree.values()]

    def save(self, path: Path) -> Saving:
        """Start all copies."""
        for copy, tensor in zip(self._copies, self.tree.values(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        return Saving(_nothing, lambda: True, _nothing)

    def close(self) -> None:
        """Free the copies."""
        self._copies = []
        super().close()


class HoldfastTorch(Managed, TorchTensors):
    """A manager, with tensors."""


class TorchDcp(TorchTensors):
    """``async_save`` with pinned memory and a stream of its own; on the CPU, torch refuses both."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on = device != "cpu"
        options = StagingOptions(
            use_pinned_memory=on, use_shared_memory=False, use_async_staging=on, use_non_blocking_copy=on
        )
        self._stager = DefaultStager(options)

    def save(self, path: Path) -> Saving:
        """Begin an asynchronous save."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        found: Any = async_save(
            dict(self.tree), storage_writer=FileSystemWriter(path), async_stager=self._stager, no_dist=True
        )
        if not hasattr(found, "staging_completion"):
            return Saving(_nothing, found.done, found.result)
        return Saving(found.staging_completion.result, found.upload_completion.done, found.upload_completion.result)

    def close(self) -> None:
        """Free the pinned memory."""
        self._stager.close()
        super().close()


class JaxArrays(Arrays):
    """Arrays of jax, whose memory the next step takes over."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        import jax

        super().__init__(device, gigabytes, directory)
        self.jax: Any = jax
        self.place = jax.devices("gpu" if device == "cuda" else device)[0]
        facts = self.place.memory_stats() or {}
        if "bytes_limit" in facts:
            _check("memory of jax on the GPU", facts["bytes_limit"] - facts.get("bytes_in_use", 0), 1.2 * gigabytes)
        with jax.default_device(self.place):
            keys = jax.random.split(jax.random.key(0), len(_shapes(gigabytes)))
            self.tree = {
                f"layer {number}": jax.device_put(jax.random.uniform(key, shape), self.place)
                for number, (key, shape) in enumerate(zip(keys, _shapes(gigabytes), strict=True))
            }
        self._add = jax.jit(lambda tree: jax.tree.map(lambda array: array + 1, tree), donate_argnums=0)

    def step(self) -> None:
        """Replace all arrays."""
        self.tree = self.jax.block_until_ready(self._add(self.tree))


class JaxCopy(JaxArrays):
    """Copies into pinned memory, which jax keeps for the next ones, and no save."""

    durable = False

    def save(self, path: Path) -> Saving:
        """Copy all arrays, and wait: the next step donates them."""
        self._copies: Any = None
        kinds = {memory.kind for memory in self.place.addressable_memories()}
        kind = "pinned_host" if "pinned_host" in kinds else None
        sharding = self.jax.sharding.SingleDeviceSharding(self.place, memory_kind=kind)
        self._copies = self.jax.block_until_ready(self.jax.device_put(self.tree, sharding))
        return Saving(_nothing, lambda: True, _nothing)

    def close(self) -> None:
        """Free the copies."""
        self._copies = None
        super().close()


class HoldfastJax(Managed, JaxArrays):
    """A manager, with arrays of jax."""


class Orbax(JaxArrays):
    """``StandardCheckpointer``, as documented."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # ships no types

        super().__init__(device, gigabytes, directory)
        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, path: Path) -> Saving:
        """Begin an asynchronous save; the directory gets its name when all is there."""
        self._checkpointer.save(path, self.tree)
        return Saving(_nothing, path.exists, self._checkpointer.wait_until_finished)

    def close(self) -> None:
        """Close the checkpointer."""
        self._checkpointer.close()
        super().close()


DISK = "the disk"
COPY_TORCH, COPY_JAX = "bare copy (torch)", "bare copy (jax)"
OURS = {"holdfast (torch)": COPY_TORCH, "holdfast (jax)": COPY_JAX}
CONTENDERS: dict[str, Callable[[str, float, Path], Contender]] = {
    DISK: Disk,
    COPY_TORCH: TorchCopy,
    "holdfast (torch)": HoldfastTorch,
    COPY_JAX: JaxCopy,
    "holdfast (jax)": HoldfastJax,
    "torch dcp": TorchDcp,
    "orbax": Orbax,
}


def _nothing() -> None:
    """Nothing is left to do."""


def _check(what: str, free: float, gigabytes: float) -> None:
    if free < gigabytes * 1e9:
        raise MemoryError(f"{what}: {gigabytes:.3g} GB are needed, {free / 1e9:.3g} GB are free")


def _check_host(gigabytes: float, directory: Path) -> None:
    """Raise MemoryError if two checkpoints do not fit on the disk, or two copies of the arrays into memory."""
    _check(f"disk of {directory}", shutil.disk_usage(directory).free, 2.1 * gigabytes)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    _check("memory of the machine", available, 2.2 * gigabytes)


@dataclass(frozen=True, slots=True)
class Series:
    """Saves of one contender.

    Attributes:
        name: The contender.
        device: As torch calls it: "cuda", or "cpu" to try the harness.
        sizes: Sizes of all arrays, in units of 1e9 bytes.
        rounds: How many saves of each size are counted, after the first; fewer where time runs out.
        directory: Where to save.
        seconds: The time for all sizes. A size that is done early leaves its time to the next.
    """

    name: str
    device: str
    sizes: Sequence[float]
    rounds: int
    directory: Path
    seconds: float


def measure(series: Series, report: Callable[[Round], object]) -> None:
    """Save again and again, each time followed by a step; call ``report`` with each round."""
    name, sizes = series.name, series.sizes
    deadline = time.perf_counter() + series.seconds
    for number, gigabytes in enumerate(sizes):
        ends = time.perf_counter() + (deadline - time.perf_counter()) / (len(sizes) - number)
        place = series.directory / f"{gigabytes:g}"
        place.mkdir(parents=True)
        try:
            _check_host(gigabytes, place)
            contender = CONTENDERS[name](series.device, gigabytes, place)
            for found in _rounds(contender, series.rounds, place, ends, deadline):
                report({"contender": name, "gigabytes": gigabytes, **found})
        except Exception as error:  # the others continue
            text = str(error).strip().partition("\n")[0]
            report({"contender": name, "gigabytes": gigabytes, "error": f"{type(error).__name__}: {text}"})
        shutil.rmtree(place)


def _rounds(contender: Contender, rounds: int, directory: Path, ends: float, deadline: float) -> Iterator[Round]:
    longest = 0.0
    try:
        contender.step()
        for number in range(rounds + 1):
            began = time.perf_counter()
            if began + longest > (ends if number > 2 else deadline):
                break
            yield {"round": number, **_save(contender, directory / str(number), beside=number > 0 and number % 2 == 0)}
            if number and (before := directory / str(number - 1)).exists():
                shutil.rmtree(before)  # those that no manager deletes
            longest = max(longest, time.perf_counter() - began)
    finally:
        contender.close()


def _save(contender: Contender, path: Path, *, beside: bool) -> dict[str, float | None]:
    """Save once; continue with steps until that is durable, or wait for it."""
    alone = statistics.median(_seconds(contender.step) for _ in range(STEPS_ALONE))
    called = time.perf_counter()
    saving = contender.save(path)
    call = time.perf_counter() - called
    saving.may_change()
    contender.step()
    delay = max(0.0, time.perf_counter() - called - alone)
    late: float | None = None
    while beside and not saving.is_durable():
        late = max(late or 0.0, _seconds(contender.step) - alone)
    saving.wait()
    durable = time.perf_counter() - called if contender.durable and late is None else None
    return dict(zip(NUMBERS, (call, delay, late, durable), strict=True))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_apart(series: Series, report: Callable[[Round], object]) -> None:
    """Measure in a new process, which has nothing else in memory, and is killed when its time is over."""
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, replace(series, seconds=0.9 * series.seconds)))
    deadline = time.perf_counter() + series.seconds
    process.start()
    sender.close()
    try:
        while results.poll(max(0.0, deadline - time.perf_counter())):
            report(results.recv())
        report({"contender": series.name, "error": f"stopped after {series.seconds:.0f} s"})
    except EOFError:
        process.join(max(1.0, deadline - time.perf_counter()))
        if process.exitcode:
            report({"contender": series.name, "error": f"ended with the status {process.exitcode}"})
    finally:
        process.kill()
        process.join()
        shutil.rmtree(series.directory, ignore_errors=True)


def _child(sender: Any, series: Series) -> None:
    measure(series, sender.send)
    sender.close()


def main(options: argparse.Namespace, write: Callable[[str], object]) -> None:
    """Measure each contender with each size, in a process of its own, and show the results.

    Args:
        options: ``device``, ``gigabytes``, ``rounds``, ``directory``, ``seconds``, ``lines`` and ``json`` of the
            command line.
        write: Where the text goes.
    """
    found: list[Round] = []

    def report(one: Round) -> None:
        found.append(one)
        line = json.dumps(one)
        if options.lines is not None:
            with options.lines.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        if options.json:
            write(line)
        elif "error" in one:
            size = f", {one['gigabytes']:g} GB" if "gigabytes" in one else ""
            write(f"{one['contender']}{size}: not measured: {one['error']}")

    sizes = options.gigabytes or [1.0, 8.0, 20.0]
    deadline = time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        machine = describe_machine(Path(temporary))
        for number, name in enumerate(CONTENDERS):
            seconds = (deadline - time.perf_counter()) / (len(CONTENDERS) - number)
            place = Path(temporary) / str(number)
            measure_apart(Series(name, options.device, sizes, options.rounds, place, seconds), report)
            os.sync()
            if not options.json:
                saves = sum(one["contender"] == name and "round" in one for one in found)
                write(f"{name}: {saves} saves, {deadline - time.perf_counter():.0f} s are left")
    if not options.json:
        write(", ".join(f"{name}: {value}" for name, value in machine.items()))
        write(f"device: {_device_name(options.device)}")
        write(table(found))
        write(markdown(goal_rows(goals(found))))


def _device_name(device: str) -> str:
    with contextlib.suppress(ImportError):
        import torch

        return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
    return device


def _number(
    found: Sequence[Round], contender: str, gigabytes: float, number: str, *, first: bool = False
) -> float | None:
    """Return a number of the first save, or the median of those of the later ones; of *late*, the greatest."""
    values = [
        one[number]
        for one in found
        if "round" in one
        and (one["contender"], one["gigabytes"], one["round"] == 0) == (contender, gigabytes, first)
        and one[number] is not None
    ]
    if not values:
        return None
    return float(max(values) if number == "late" else statistics.median(values))


def _measured(found: Sequence[Round]) -> list[tuple[str, float]]:
    """Return contenders with sizes, by size, in the order of the contenders."""
    pairs = dict.fromkeys((one["contender"], one["gigabytes"]) for one in found if "round" in one)
    return sorted(pairs, key=lambda pair: (pair[1], list(CONTENDERS).index(pair[0])))


def goals(found: Sequence[Round]) -> list[Goal]:
    """Return what must be reached, for each size that was measured."""
    result = []
    for name, gigabytes in _measured(found):
        if name not in OURS:
            continue

        def ratio(number: str, other: str, name: str = name, size: float = gigabytes) -> float | None:
            own, others = (_number(found, one, size, number) for one in (name, other))
            return None if own is None or not others else own / others

        what = f"{gigabytes:g} GB, {name}"
        late = _number(found, name, gigabytes, "late")
        result += [
            Goal(name=f"{what}: delay / {OURS[name]}", value=ratio("delay", OURS[name]), limit=1.1),
            Goal(
                name=f"{what}: the latest step",
                value=None if late is None else 1000 * late,
                limit=LIMIT_OF_LATE,
                unit=" ms",
            ),
            Goal(name=f"{what}: durable / {DISK}", value=ratio("durable", DISK), limit=1.1),
        ]
    return result


def table(found: Sequence[Round]) -> str:
    """Return the measurements as a table in Markdown."""
    columns = ("first call", "first delay", "call", "delay", "late", "durable")
    rows = [("", "GB", *columns, "saves"), ("---", *["---:"] * (2 + len(columns)))]
    for name, gigabytes in _measured(found):
        numbers = [_number(found, name, gigabytes, number, first=True) for number in NUMBERS[:2]]
        numbers += [_number(found, name, gigabytes, number) for number in NUMBERS]
        count = sum(one.get("gigabytes") == gigabytes and one["contender"] == name and "round" in one for one in found)
        cells = ["-" if each is None else f"{1000 * each:.1f} ms" for each in numbers]
        rows.append((name, f"{gigabytes:g}", *cells, str(count)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
