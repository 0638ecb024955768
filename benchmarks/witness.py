"""``python -m benchmarks.witness``: what the records of the steps after a save cost.

A record of 400 and of 10,000 leaves of numpy, torch and jax on the CPU, and on a GPU where there is one: the first of a
process, which searches the state, and the median of later ones, by processor time. Then the mean step of two training
loops with and without the witness, in pairs of runs in one process: a small model, and one whose step is as long as a
real one's. The steps of the larger one vary by more than a record costs, so only the time in ``on_step`` is compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.engine.witness import Recorder, Seen

from .goals import Goal
from .results import add_table_arguments, describe_machine
from .runner import tell
from .table import aligned, goal_rows, markdown

LEAVES = (400, 10_000)
LIMITS = {400: 1.0, 10_000: 10.0}  # milliseconds of a record
FIRST = 500.0  # milliseconds of the first record of a process
STEP = 30.0, 0.001  # microseconds, or the part of a step, that the loop's mean step may take longer
SAVE_EVERY = 100  # steps
WIDTHS = {64: 1, 256: 8}  # features of a layer, and how many times fewer turns the loop runs

States = dict[str, Callable[[int], tuple[Any, Callable[[Any], Any]]]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table; return 1 where ``--check`` was given and a goal was missed."""
    options = _parser().parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    rows, found = [["state", "leaves", "first record", "a record", "without attributes"]], []
    for name, make in states().items():
        for count in options.leaves or LEAVES:
            first, later = records(make, count, options.rounds)
            rows.append([name, f"{count:,}", f"{first:.1f} ms", f"{later[0]:.2f} ms", f"{later[1]:.2f} ms"])
            limit = LIMITS.get(count, LIMITS[max(LIMITS)])
            found += [
                Goal(name=f"a record, {name}, {count:,} leaves", value=max(later), limit=limit, unit=" ms"),
                Goal(name=f"the first record, {name}, {count:,} leaves", value=first, limit=FIRST, unit=" ms"),
            ]
            tell(f"{name}, {count:,} leaves: {later[1]:.2f} ms")
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        for width, fewer in WIDTHS.items():
            without, longer = loop(Path(temporary, str(width)), options.steps // fewer, options.rounds, width)
            limit = max(STEP[0], STEP[1] * without * 1e6)
            name = f"the mean step of {without * 1e3:.3g} ms"
            found.append(Goal(name=name, value=longer * 1e6, limit=limit, unit=" µs"))
        machine = describe_machine(Path(temporary))
    lay_out = markdown if options.markdown else aligned
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    print("\n\n".join([lay_out(rows), f"Medians of {options.rounds}. {facts}", lay_out(goal_rows(found))]))
    return int(options.check and not all(goal.met for goal in found))


def records(
    make: Callable[[int], tuple[Any, Callable[[Any], Any]]], count: int, rounds: int
) -> tuple[float, tuple[float, float]]:
    """Return the milliseconds of the first record, and of later ones at a save and after one."""
    state, step = make(count)
    state = step(state)
    began = time.process_time()
    recorder = Recorder(Seen(step=0, root={"state": state}))
    recorder.take(1, Seen(step=1, root={"state": state}, metrics={"loss": 0.5})).finish()
    first = time.process_time() - began
    taken: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(3 * rounds):
        state = step(state)
        seen = Seen(step=turn, root={"state": state}, metrics={"loss": 0.5})
        for k, times in taken.items():
            began = time.process_time()
            recorder.take(k, seen).finish()
            times.append(time.process_time() - began)
    return 1e3 * first, (1e3 * median(taken[0]), 1e3 * median(taken[1]))


def loop(directory: Path, steps: int, rounds: int, width: int) -> tuple[float, float]:
    """Return the seconds of a mean step without the witness, and by how much it, or its ``on_step``, is longer with it.

    Two runs advance in turn, with one save in each turn, as the pace of a machine changes within a minute by more than
    the witness costs.
    """
    import torch

    torch.manual_seed(0)
    data = torch.randn(8 * width, width)
    turns = max(4, rounds * steps // SAVE_EVERY)

    def run(place: Path, witness: bool) -> Iterator[tuple[float, float]]:
        """Yield the mean seconds of a step and of its on_step in each turn, in the middle of which a step is saved."""
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(34)))
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        with hf.CheckpointCallback(place, save_interval_steps=SAVE_EVERY, max_to_keep=2, witness=witness) as checkpoint:
            state, _ = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
            for first in range(1 + SAVE_EVERY // 2, turns * SAVE_EVERY, SAVE_EVERY):
                began, reported = time.perf_counter(), 0.0
                for number in range(first, first + SAVE_EVERY):
                    loss = model(data).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    reported -= time.perf_counter()
                    checkpoint.on_step(number, state, metrics={"loss": loss})
                    reported += time.perf_counter()
                yield (time.perf_counter() - began) / SAVE_EVERY, reported / SAVE_EVERY

    runs = run(directory / "without", False), run(directory / "with", True)
    pairs = []
    for turn in range(turns):
        pair = [(0.0, 0.0), (0.0, 0.0)]
        for one in (0, 1) if turn % 2 else (1, 0):
            pair[one] = next(runs[one])
        pairs.append(pair)
    pairs = pairs[2:]  # The first ones warm up.
    for rest in runs:
        assert next(rest, None) is None
    part = 0 if width == min(WIDTHS) else 1
    longer = sorted(pair[1][part] - pair[0][part] for pair in pairs)
    middle, error = (
        median(longer),
        1.57 * (longer[len(longer) * 3 // 4] - longer[len(longer) // 4]) / len(longer) ** 0.5,
    )
    tell(f"loop, {len(pairs)} pairs of {SAVE_EVERY} steps: {middle * 1e6:+.0f} µs a step, ±{error * 1e6:.0f} (95 %)")
    return median(pair[0][0] for pair in pairs), middle


# ---- states


def states() -> States:
    """Return what makes a state with so many leaves, and a function that does a step, for each library."""
    found: States = {"numpy": _numpy, "torch": _torch, "jax": _jax}
    import torch

    if torch.cuda.is_available():
        found["torch, cuda"] = lambda count: _torch(count, "cuda")
    return found


def _numpy(count: int) -> tuple[Any, Callable[[Any], Any]]:
    generator = np.random.default_rng(0)
    state = {f"layer{index}": generator.normal(size=(16, 16)).astype(np.float32) for index in range(count)}
    return state, lambda old: {name: value * np.float32(0.99) for name, value in old.items()}


def _torch(count: int, device: str = "cpu") -> tuple[Any, Callable[[Any], Any]]:
    import torch

    # Weight and bias, and for each of them two moments and a counter.
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, device=device) for _ in range(max(1, count // 8))))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step(state: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        return state

    return {"model": model, "optimizer": optimizer}, step


def _jax(count: int) -> tuple[Any, Callable[[Any], Any]]:
    import jax

    state, _ = _numpy(count)
    step = jax.jit(lambda old: {name: value * 0.99 for name, value in old.items()}) if count < 1000 else None

    def ready(old: Any) -> Any:
        new = step(old) if step is not None else {name: value * 0.99 for name, value in old.items()}
        return jax.block_until_ready(new)  # type: ignore[no-untyped-call]

    return jax.device_put(state), ready


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.witness", description=__doc__)
    parser.add_argument("--leaves", type=int, action="append", help="leaves of a state; 400 and 10000 unless given")
    parser.add_argument("--steps", type=int, default=1100, help="steps of a run of the loop; 1100 unless given")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each number; 7 unless given")
    add_table_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
