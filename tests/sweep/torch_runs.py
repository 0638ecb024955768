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
from .cases import Case, InterruptionError, Run, bits, run_interrupted
from .torch_loops import LOOPS, TOTAL, train
from .torch_programs import STEPS, Program, State

be_quiet = partial(cases.be_quiet, "torchdata", "pytorch_optimizer")


# ---- the same program with each interface


def _with_callback(program: Program, run: Run) -> Any:
    make, step = program
    run.seed()
    return train(run, make(), step)


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
    trainer = Trainer()
    trainer.objects = make()
    return train(run, trainer, lambda trainer, number: step(trainer.objects, number)).objects


INTERFACES: dict[str, Callable[[Program, Run], Any]] = {
    "callback": _with_callback,
    "graph": _with_graph,
    "components": _with_components,
}
LOOP = "loop"

# What a graph leaves to the program, as its page says: the modes of modules, arrays that lists lack.
NOT_IN_GRAPHS = ("frozen and thawed", "a replay buffer")


# ---- cases


def groups() -> list[tuple[str, str]]:
    """Return pairs of an interface and a program, and the loops."""
    pairs = [
        pair for pair in itertools.product(INTERFACES, STEPS) if pair[0] != "graph" or pair[1] not in NOT_IN_GRAPHS
    ]
    return [*pairs, *((LOOP, name) for name in LOOPS)]


def run_group(interface: str, program: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of one program whose names contain one of ``only``."""
    # Only the callback saves the generators of numpy and Python by itself, and knows signals.
    is_graph = interface == "graph"

    def start(directory: str, turn: int = 0, *, total: int = TOTAL, **options: Any) -> Any:
        """Run a program, and return what it leaves, with what it would draw next; None where it was interrupted."""
        if multiprocessing.active_children():
            gc.collect()  # iterators of interrupted runs, in whose place forked workers would end others
        run = Run(directory, turn, total=total, **options)
        try:
            found = LOOPS[program](run) if interface == LOOP else INTERFACES[interface](STEPS[program](), run)
        except (InterruptionError, SystemExit):  # A loop that ends in the steps after a signal ends the program.
            return None
        drawn = [torch.rand(2).tolist(), *([] if is_graph else [np.random.rand(), random.random()])]
        return None if run.stopped else {"found": bits(found, attributes=True), "drawn": drawn}

    signals = {
        "SIGTERM at the end of an epoch": [{"told": 4}],
        "SIGTERM in the second epoch": [{"told": 7}],
        "SIGTERM in steps 1 and 6": [{"told": 1}, {"told": 6}],
        "SIGTERM at the ends of two epochs": [{"told": 4}, {"told": 8}],
    }
    errors = {
        "error at the end of an epoch": [{"error": 4, "every": 4}],
        "error in the second epoch": [{"error": 6, "every": 3}],
    }
    interruptions = errors if is_graph else errors | signals
    yield from run_interrupted(f"torch/{interface}/{program}", start, TOTAL, interruptions, only)
