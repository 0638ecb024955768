"""``python -m benchmarks.late_resume``: how long a resume late in an epoch takes to its first batch.

An epoch of many images, which each take some work to decode, is left after most of its batches. A second loader of the
same kind gets the state, and the time from there to its first batch counts: ``hf.resumable`` with both ways to draw the
earlier batches again, and torchdata's ``StatefulDataLoader``. Each of them must give the batch that would have come.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.engine.stateful import restore_state, state_of

from .results import describe_machine
from .runner import tell
from .table import aligned, markdown

SIZE = (3, 64, 64)
BATCH = 32
STORED = 256  # images that are different


class Images(Dataset[Any]):
    """Images that are stored compressed; many of them are the same."""

    def __init__(self, count: int) -> None:
        self.count = count
        ramp = torch.arange(SIZE[0] * SIZE[1] * SIZE[2])
        pixels = [bytes(ramp.mul(one + 1).div(97).to(torch.uint8).tolist()) for one in range(STORED)]
        self.stored = [zlib.compress(one) for one in pixels]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        content = bytearray(zlib.decompress(self.stored[index % STORED]))
        return torch.frombuffer(content, dtype=torch.uint8).view(SIZE).float().div(255), index


def kinds(workers: int) -> dict[str, Callable[[Images], Any]]:
    """Return the loaders that are compared, by name."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
    return {
        "hf.resumable": lambda images: hf.resumable(DataLoader(images, **options)),
        "hf.resumable, redraw='indices'": lambda images: hf.resumable(DataLoader(images, **options), redraw="indices"),
        "torchdata": lambda images: StatefulDataLoader(images, **options),
    }


def first_batch(make: Callable[[Images], Any], images: Images, taken: int) -> float:
    """Return the seconds to the first batch of a loader that continues after so many."""
    torch.manual_seed(0)
    batches = iter(loader := make(images))
    for _ in range(taken):
        next(batches)
    state = state_of(loader)
    expected = next(batches)[1]
    torch.manual_seed(1)
    again = make(images)
    begin = time.perf_counter()
    restore_state(again, state)
    found = next(iter(again))[1]
    seconds = time.perf_counter() - begin
    if not found.equal(expected):
        raise RuntimeError("the resumed loader gives another batch")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.late_resume", description=__doc__)
    parser.add_argument("--images", type=int, default=100_000, help="How many images an epoch has.")
    parser.add_argument("--taken", type=int, default=3000, help="How many batches of 32 were taken.")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="The numbers of workers to measure.")
    parser.add_argument("--rounds", type=int, default=1, help="How often to measure; the median counts.")
    parser.add_argument("--markdown", action="store_true", help="Print the table as Markdown.")
    options = parser.parse_args(arguments)
    images = Images(options.images)
    rows = [["loader", *(f"{count} workers" for count in options.workers)]]
    measured: dict[str, list[str]] = {}
    for workers in options.workers:
        for name, make in kinds(workers).items():
            seconds = median(first_batch(make, images, options.taken) for _ in range(options.rounds))
            measured.setdefault(name, []).append(f"{seconds:.2f} s")
            tell(f"{name}, {workers} workers: {seconds:.2f} s")
    rows += [[name, *values] for name, values in measured.items()]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        facts = ", ".join(f"{key} {value}" for key, value in describe_machine(Path(temporary)).items())
    print("\n\n".join([(markdown if options.markdown else aligned)(rows), facts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
