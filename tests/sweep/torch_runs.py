"""Plain torch loops that are interrupted: saved by the callback, as graphs, and as components."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast import components, graph

from . import cases
from .cases import Case, InterruptionError, first_difference, new_directory, run_cases
from .torch_loops import LOOPS, TOTAL, Loop, Run
from .torch_programs import STEPS, Program, State

be_quiet = partial(cases.be_quiet, "torchdata", "pytorch_optimizer")


# ---- the same program with each interface


def _with_callback(program: Program, run: Run) -> Any:
    make, step = program
    run.seed()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(make())
        for number in range(start + 1, run.total + 1):
            step(state, number)
            if run.report(checkpoint, number, state):
                break
    return state


def _with_graph(program: Program, run: Run) -> Any:
    make, step = program
    run.seed()
    state, done = make(), graph.Value(0)
    saved = graph.Checkpoint(rng=torch.default_generator, done=done, **state)
    with graph.CheckpointManager(saved, run.directory, max_to_keep=2) as manager:
        manager.restore_or_initialize()
        for number in range(int(done.value) + 1, run.total + 1):
            step(state, number)
            done.assign(number)
            if number % run.every == 0 or number == run.total:
                manager.save()
            if number == run.error:
                raise InterruptionError
    return state


class Trainer(components.Checkpointable):
    """A program as a component: its objects are attributes."""

    objects: State


def _with_components(program: Program, run: Run) -> Any:
    make, step = program
    run.seed()
    with run.callback() as checkpoint:
        trainer = Trainer()
        trainer.objects = make()
        _, start = checkpoint.restore_or_initialize(trainer)
        for number in range(start + 1, run.total + 1):
            step(trainer.objects, number)
            if run.report(checkpoint, number, trainer):
                break
    return trainer.objects


INTERFACES: dict[str, Callable[[Program, Run], Any]] = {
    "callback": _with_callback,
    "graph": _with_graph,
    "components": _with_components,
}
LOOP = "loop"

# What a graph leaves to the program, as its page says: the modes of modules, arrays that lists lack.
NOT_IN_GRAPHS = ("frozen and thawed", "a replay buffer")


# ---- what has to be equal


def bits(value: Any) -> Any:
    """Return everything that the next steps depend on, as values to compare."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.nn.Module):
        parts = {name: (part.training, _numbers(part)) for name, part in value.named_modules()}
        trained = {name: one.requires_grad for name, one in value.named_parameters()}
        return {"values": bits(dict(value.state_dict())), "parts": parts, "trained": trained}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, np.random.Generator):
        return bits(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if hasattr(value, "state_dict"):
        inner = {name: bits(one) for name, one in vars(value).items() if isinstance(one, torch.optim.Optimizer)}
        return {"state": bits(value.state_dict()), **inner, **_numbers(value)}
    if type(value).__module__.startswith("benchmarks."):
        return bits(vars(value))
    return value if isinstance(value, int | float | str | None) else repr(type(value))


def _tensor(value: torch.Tensor) -> Any:
    if value.layout is not torch.strided:
        dense = value.to_dense()
        return str(value.layout), _tensor(dense)
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    if value.is_quantized:
        return str(value.dtype), _tensor(value.int_repr()), str(value.qscheme())
    data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype), tuple(value.shape), strides, data


def _numbers(value: Any) -> dict[str, Any]:
    """Return the plain numbers and the tensors among the attributes of an object."""
    kept = {name: one for name, one in vars(value).items() if not name.startswith("_")}
    return {name: bits(one) for name, one in kept.items() if isinstance(one, int | float | torch.Tensor)}


def _finish(loop: Loop, run: Run) -> Any:
    """Run a loop, and return what it leaves, with what the program would draw next; None where it was interrupted."""
    if multiprocessing.active_children():
        gc.collect()  # iterators of interrupted runs, in whose place forked workers would end others
    try:
        found = loop(run)
    except (InterruptionError, SystemExit):  # A loop that ends in the steps after a signal ends the program.
        return None
    drawn = [torch.rand(2).tolist(), np.random.rand(), random.random()]
    return None if run.stopped else {"found": bits(found), "drawn": drawn}


# ---- cases


def groups() -> list[tuple[str, str]]:
    """Return pairs of an interface and a program, and the loops."""
    pairs = [
        pair for pair in itertools.product(INTERFACES, STEPS) if pair[0] != "graph" or pair[1] not in NOT_IN_GRAPHS
    ]
    return [*pairs, *((LOOP, name) for name in LOOPS)]


def run_group(interface: str, program: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of one program whose names contain one of ``only``."""
    loop: Loop
    if interface == LOOP:
        loop = LOOPS[program]
    else:

        def loop(run: Run) -> Any:
            return INTERFACES[interface](STEPS[program](), run)

    whole = _finish(loop, Run(new_directory()))
    # Only the callback saves the generators of numpy and Python by itself, and knows signals.
    drawn = 1 if interface == "graph" else 3

    def interrupted(*interruptions: dict[str, Any]) -> Callable[[], str | None]:
        def run() -> str | None:
            directory = new_directory()
            for turn, options in enumerate(interruptions):
                if _finish(loop, Run(directory, turn, **options)) is not None and "total" not in options:
                    raise RuntimeError(f"{options} did not happen")
            found = _finish(loop, Run(directory, len(interruptions)))
            if found is None:
                raise RuntimeError("the resumed run ended early")
            found["drawn"], expected = found["drawn"][:drawn], {**whole, "drawn": whole["drawn"][:drawn]}
            return first_difference(found, expected)

        return run

    found = {
        "error after step 2": interrupted({"error": 2, "every": 2}),
        "steps in part again": interrupted({"error": 5, "every": 2}),
        "error at the end of an epoch": interrupted({"error": 4, "every": 4}),
        "error in the second epoch": interrupted({"error": 6, "every": 3}),
        "SIGTERM at the end of an epoch": interrupted({"told": 4}),
        "SIGTERM in the second epoch": interrupted({"told": 7}),
        "SIGTERM in steps 1 and 6": interrupted({"told": 1}, {"told": 6}),
        "SIGTERM at the ends of two epochs": interrupted({"told": 4}, {"told": 8}),
        "longer": interrupted({"total": 3}),
        "finished, and started again": interrupted({"total": TOTAL}),
    }
    if interface == "graph":
        found = {title: run for title, run in found.items() if "SIGTERM" not in title}
    yield from run_cases(f"torch/{interface}/{program}", found, only)
