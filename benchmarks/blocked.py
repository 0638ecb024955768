"""How long a loop waits for a save of many small arrays, compared with copying them: ``python -m benchmarks.blocked``.

A manager saves in the background, a tree of torch tensors (a state dict and the states of Adam) or a nested dict of jax
arrays. Before each save, the same arrays are copied as plainly as can be: ``[x.clone() for x in tensors]``, which is
what a snapshot of tensors has to do, or ``[np.asarray(x) for x in arrays]``, which is what one of jax arrays does.

``--device cuda`` measures something else: large arrays on a GPU, beside torch.distributed.checkpoint and orbax
(``benchmarks/devices.py``).
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
from typing import TYPE_CHECKING, Any

import numpy as np

import holdfast as hf

from . import devices
from .results import describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ELEMENTS = 256
"""Elements of each array, of four bytes."""

WARM_UP = 2
"""Saves after the first that are not counted: torch's and the allocator's first uses of a size take longer."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The measurements for one library and number of leaves.

    Attributes:
        library: "torch" or "jax".
        leaves: How many arrays the tree has.
        copy_seconds: The median of the bare copies.
        first_seconds: How long the first save blocked.
        later_seconds: The median of the later saves.
    """

    library: str
    leaves: int
    copy_seconds: float
    first_seconds: float
    later_seconds: float

    @property
    def ratio(self) -> float:
        """A later save, divided by a bare copy."""
        return self.later_seconds / self.copy_seconds


def torch_tree(leaves: int) -> tuple[Any, Callable[[], object]]:
    """Return a training state of torch, of four tensors for each parameter, and its bare copy."""
    import torch

    count = max(1, leaves // 4)
    model = {f"layers.{number}.weight": torch.randn(ELEMENTS) for number in range(count)}
    states = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.randn(ELEMENTS), "exp_avg_sq": torch.rand(ELEMENTS)}
        for number in range(count)
    }
    tensors = [*model.values(), *(tensor for state in states.values() for tensor in state.values())]
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(count))}]
    return (
        {"model": model, "optimizer": {"state": states, "param_groups": groups}, "step": 1},
        lambda: [x.clone() for x in tensors],
    )


def jax_tree(leaves: int) -> tuple[Any, Callable[[], object]]:
    """Return a nested dict of jax arrays, and their bare copy."""
    import jax.numpy as jnp

    layers = {
        f"layer_{number}": {"kernel": jnp.full(ELEMENTS, number), "bias": jnp.zeros(ELEMENTS)}
        for number in range(max(1, leaves // 2))
    }
    arrays = [array for layer in layers.values() for array in layer.values()]
    return {"params": layers, "step": 1}, lambda: [np.asarray(x) for x in arrays]


TREES = {"torch": torch_tree, "jax": jax_tree}


def measure(library: str, leaves: int, rounds: int, directory: Path) -> Blocked:
    """Save one tree again and again, and copy it before each save.

    Args:
        library: "torch" or "jax".
        leaves: How many arrays.
        rounds: How many saves are counted, after the first and ``WARM_UP`` others.
        directory: Where to save.

    Returns:
        What it took.
    """
    tree, copy = TREES[library](leaves)
    copies: list[float] = []
    saves: list[float] = []
    with hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(max_to_keep=1)) as manager:
        for step in range(1 + WARM_UP + rounds):
            began = time.perf_counter()
            kept = copy()
            copies.append(time.perf_counter() - began)
            del kept
            began = time.perf_counter()
            manager.save(step, tree)
            saves.append(time.perf_counter() - began)
            manager.wait_until_finished()
    later = statistics.median(saves[1 + WARM_UP :])
    return Blocked(library, leaves, statistics.median(copies[1 + WARM_UP :]), saves[0], later)


def measure_apart(library: str, leaves: int, rounds: int, directory: Path) -> Blocked:
    """Measure in a new process, which has nothing else in memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, library, leaves, rounds, directory).result()


def table(results: Sequence[Blocked]) -> str:
    """Return the measurements as a table in Markdown."""
    rows = [("", "leaves", "bare copy", "first save", "later saves", "later / copy"), ("---", *["---:"] * 5)]
    rows += [
        (
            one.library,
            f"{one.leaves:,}",
            *(f"{1000 * seconds:.0f} ms" for seconds in (one.copy_seconds, one.first_seconds, one.later_seconds)),
            f"{one.ratio:.2f}",
        )
        for one in results
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure each library with each number of leaves, and show the results.

    Args:
        arguments: Of the command line.
        write: Where the text goes.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocked", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--library", choices=list(TREES), action="append", help="only this one; may be repeated")
    parser.add_argument("--leaves", type=int, action="append", help="10,000 and 100,000 unless given; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="saves that are counted; 7 unless given")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where to save; ./runs unless given")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each measurement")
    parser.add_argument("--device", help="measure large arrays on a device instead: cuda, or cpu to try that")
    parser.add_argument(
        "--gigabytes", type=float, action="append", help="of arrays on the device: 1, 8 and 20 unless given; repeatable"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="with --device: for all contenders together; an hour unless given"
    )
    parser.add_argument(
        "--lines", type=Path, metavar="FILE", help="with --device: append each save to this file as a JSON object"
    )
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.device is not None:
        devices.main(options, write)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        machine = describe_machine(Path(temporary))
        for library in options.library or list(TREES):
            for leaves in options.leaves or [10_000, 100_000]:
                place = Path(temporary) / f"{library}-{leaves}"
                results.append(measure_apart(library, leaves, options.rounds, place))
                if options.json:
                    write(json.dumps(asdict(results[-1])))
    if not options.json:
        write(", ".join(f"{name}: {value}" for name, value in machine.items()))
        write(table(results))


if __name__ == "__main__":
    main()
