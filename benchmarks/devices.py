"""How long a loop on a GPU waits for saves in the background: ``python -m benchmarks.blocked --device cuda``.

After a save, the next step changes every array in place (torch) or donates it (jax). The *call* is the time until the
save returned. The *delay* is the time from the call until such a step is done on the device, less the time of a step
without a save: also what the device waits for, and what a program has to wait for before it may change arrays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import holdfast as hf

from .results import describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LARGE = 64 << 20
"""Bytes of most arrays; for each there are four of 1 KiB."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The measurements of one contender: seconds, the first save apart, medians of the later ones."""

    contender: str
    gigabytes: float
    first_call: float
    first_delay: float
    call: float
    delay: float
    durable: float


class Contender(Protocol):
    """One way to save arrays of one library from a device."""

    def step(self) -> None:
        """Change all arrays, and wait until the device has done so."""
        ...

    def save(self, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
        """Begin to save; return what waits until arrays may change, and what waits until the save is durable."""
        ...

    def close(self) -> None:
        """End all work."""
        ...


def _shapes(gigabytes: float) -> list[tuple[int, int]]:
    nbytes = int(gigabytes * 1e9)
    large = min(LARGE, nbytes)
    return [(large // 4096, 1024)] * (nbytes // large) + [(1, 256)] * 4 * (nbytes // large)


class Arrays:
    """Arrays of one library on a device."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        self.device = device
        self.tree: Any = {}

    def close(self) -> None:
        """Nothing is open."""


class Managed(Arrays):
    """A manager, as programs use it."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        self._manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(max_to_keep=1))

    def save(self, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
        """Save the next step."""
        self._manager.save(int(path.name), self.tree)
        return lambda: None, self._manager.wait_until_finished

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


class TorchTensors(Arrays):
    """Tensors, which an optimizer changes in place."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        import torch

        super().__init__(device, gigabytes, directory)
        self.torch: Any = torch
        self.tree = {
            f"layer {number}": torch.rand(shape, device=device) for number, shape in enumerate(_shapes(gigabytes))
        }

    def step(self) -> None:
        """Change all tensors in place."""
        self.torch._foreach_add_(list(self.tree.values()), 1.0)
        if self.device != "cpu":
            getattr(self.torch, self.device).synchronize()


class TorchCopy(TorchTensors):
    """Copies into pinned memory that is kept, and no save: the least that any save has to do."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        pin = device != "cpu"
        self._copies = [self.torch.empty_like(x, device="cpu", pin_memory=pin) for x in self.tree.values()]

    def save(self, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
        """Start all copies."""
        for copy, tensor in zip(self._copies, self.tree.values(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        return lambda: None, lambda: None


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

    def save(self, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
        """Begin an asynchronous save."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        found: Any = async_save(
            dict(self.tree), storage_writer=FileSystemWriter(path), async_stager=self._stager, no_dist=True
        )
        if not hasattr(found, "staging_completion"):
            return lambda: None, found.result
        return found.staging_completion.result, found.upload_completion.result

    def close(self) -> None:
        """Free the pinned memory."""
        self._stager.close()


class JaxArrays(Arrays):
    """Arrays of jax, whose memory the next step takes over."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        import jax

        super().__init__(device, gigabytes, directory)
        self.jax: Any = jax
        place = jax.devices("gpu" if device == "cuda" else device)[0]
        generator = np.random.default_rng(0)
        self.tree = {
            f"layer {number}": jax.device_put(generator.random(shape, np.float32), place)
            for number, shape in enumerate(_shapes(gigabytes))
        }
        self._add = jax.jit(lambda tree: jax.tree.map(lambda array: array + 1, tree), donate_argnums=0)

    def step(self) -> None:
        """Replace all arrays."""
        self.tree = self.jax.block_until_ready(self._add(self.tree))


class HoldfastJax(Managed, JaxArrays):
    """A manager, with arrays of jax."""


class Orbax(JaxArrays):
    """``StandardCheckpointer``, as documented."""

    def __init__(self, device: str, gigabytes: float, directory: Path) -> None:
        super().__init__(device, gigabytes, directory)
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # ships no types

        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
        """Begin an asynchronous save."""
        self._checkpointer.save(path, self.tree)
        return lambda: None, self._checkpointer.wait_until_finished

    def close(self) -> None:
        """Close the checkpointer."""
        self._checkpointer.close()


CONTENDERS: dict[str, Callable[[str, float, Path], Contender]] = {
    "bare copy (torch)": TorchCopy,
    "holdfast (torch)": HoldfastTorch,
    "torch dcp": TorchDcp,
    "holdfast (jax)": HoldfastJax,
    "orbax": Orbax,
}


def measure(name: str, device: str, gigabytes: float, rounds: int, directory: Path) -> Delayed:
    """Save again and again, each time followed by a step.

    Args:
        name: A contender.
        device: As torch calls it: "cuda", or "cpu" to try the harness.
        gigabytes: Size of all arrays, in units of 1e9 bytes.
        rounds: How many saves are counted, after the first.
        directory: Where to save.

    Returns:
        What it took.
    """
    directory.mkdir(parents=True)
    contender = CONTENDERS[name](device, gigabytes, directory)
    calls, delays, durables = [], [], []
    for number in range(rounds + 1):
        contender.step()
        began = time.perf_counter()
        contender.step()
        alone = time.perf_counter() - began
        began = time.perf_counter()
        may_change, finished = contender.save(directory / str(number))
        calls.append(time.perf_counter() - began)
        may_change()
        contender.step()
        delays.append(max(0.0, time.perf_counter() - began - alone))
        finished()
        durables.append(time.perf_counter() - began)
    contender.close()
    later = [statistics.median(each[1:]) for each in (calls, delays, durables)]
    return Delayed(name, gigabytes, calls[0], delays[0], *later)


def main(options: argparse.Namespace, write: Callable[[str], object]) -> None:
    """Measure each contender with each size, in processes of their own, and show the results.

    Args:
        options: ``device``, ``gigabytes``, ``rounds``, ``directory`` and ``json`` of the command line.
        write: Where the text goes.
    """
    results: list[Delayed] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        machine = describe_machine(Path(temporary))
        for gigabytes in options.gigabytes or [1.0, 8.0, 20.0]:
            for number, name in enumerate(CONTENDERS):
                place = Path(temporary) / f"{gigabytes}-{number}"
                try:
                    results.append(measure_apart(name, options.device, gigabytes, options.rounds, place))
                except (RuntimeError, ImportError, AssertionError) as error:
                    write(f"{name}, {gigabytes:g} GB: not measured: {error}")
                    continue
                if options.json:
                    write(json.dumps(asdict(results[-1])))
    if not options.json:
        write(", ".join(f"{name}: {value}" for name, value in machine.items()))
        write(f"device: {_device_name(options.device)}")
        write(table(results))


def measure_apart(name: str, device: str, gigabytes: float, rounds: int, directory: Path) -> Delayed:
    """Measure in a new process, which has nothing else in memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, device, gigabytes, rounds, directory).result()


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def table(results: Sequence[Delayed]) -> str:
    """Return the measurements as a table in Markdown."""
    columns = ("first call", "first delay", "call", "delay", "durable")
    rows = [("", "GB", *columns), ("---", *["---:"] * (1 + len(columns)))]
    for one in results:
        seconds = (one.first_call, one.first_delay, one.call, one.delay, one.durable)
        rows.append((one.contender, f"{one.gigabytes:g}", *(f"{1000 * each:.1f} ms" for each in seconds)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
