"""One start of a program that may hide state: what happens to it, and what each of its steps has given."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast as hf

from .cases import NEVER, InterruptionError, Listener

TOTAL = 20  # steps
_NAMED = re.compile(r"^not exact from step (\d+)")


@dataclass
class Run:
    """One start of a program: where it saves, what happens to it, and what is known of it afterwards.

    Attributes:
        directory: The directory of its checkpoints.
        files: A directory for what the program itself writes, which outlives the process.
        every: After how many steps it saves.
        error: The step after which it fails.
        told: The step in which SIGTERM comes.
        total: How many steps it trains.
        ends: What a new process would not have, and is undone at the end.
        seen: What each step gave: state, metrics, batch, generators, counters and gradients, by name.
        stopped: Whether it was asked to stop, and did.
        start: The step that it resumed from.
        checkpoint: Its callback.
    """

    directory: str
    files: str
    every: int = NEVER
    error: int = 0
    told: int = 0
    total: int = TOTAL
    ends: ExitStack = field(default_factory=ExitStack)
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    stopped: bool = False
    start: int = 0
    checkpoint: Any = None

    def callback(self) -> hf.CheckpointCallback:
        """Return the callback of the program."""
        self.checkpoint = hf.CheckpointCallback(self.directory, save_interval_steps=self.every)
        return self.checkpoint  # type: ignore[no-any-return]

    def tell(self) -> None:
        """Send SIGTERM to the program."""
        os.kill(os.getpid(), signal.SIGTERM)

    def note(self, step: int, state: Any, loss: Any, batch: Any = None, epoch: int = 0, **extras: Any) -> None:
        """Note what a step has given, before anything is told of it."""
        handed = {name: extra for name, extra in extras.items() if is_generator(extra)}
        generators = [random.getstate(), np.random.get_state(), torch.get_rng_state(), handed]
        parts = {"state": state, "metrics": float(loss), "batch": batch, "generators": generators, "counters": epoch}
        parts |= {"gradients": _gradients(state)}
        self.start = self.start if self.seen else step - 1
        self.seen[step] = {name: bits(part) for name, part in parts.items()}

    def report(self, checkpoint: Any, step: int, state: Any, loss: Any, **extras: Any) -> bool:
        """Report a step with its loss, and return whether to leave the loop."""
        self.note(step, state, loss, **extras)
        if step == self.told:
            self.tell()
        self.stopped = checkpoint.on_step(step, state, metrics={"loss": loss}, **extras).should_stop
        if step == self.error:
            raise InterruptionError
        return self.stopped


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator of numpy, Python or torch."""
    return isinstance(value, np.random.Generator | random.Random | torch.Generator)


def bits(value: Any) -> Any:
    """Return the bytes of all arrays in a value, and its plain values; for objects, those of their public state."""
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, np.random.Generator):
        return bits(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if hasattr(value, "state_dict"):
        return bits(value.state_dict())
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if type(value).__module__.endswith(("public_programs", "public_torch_programs")):
        return bits(vars(value))
    return value if isinstance(value, int | float | str | bytes | None) else bits(_leaves(value))


def _gradients(state: Any) -> dict[str, Any]:
    """Return the gradients of the modules in a state, by name."""
    parts = state if isinstance(state, dict) else {}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = {f"{name}.{path}": one for name, part in modules.items() for path, one in part.named_parameters()}
    return {name: one.grad for name, one in named.items() if one.grad is not None}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """Return the parts in which two runs of a step differ; a gradient that only one of them has is no difference."""
    both = found.get("gradients", {}).keys() & expected.get("gradients", {}).keys()
    parts = {part for part in found if part != "gradients" and found[part] != expected[part]}
    return parts | {"gradients" for name in both if found["gradients"][name] != expected["gradients"][name]}


def _leaves(value: Any) -> list[Any]:
    # Imported lazily: a program of torch in a process of its own needs neither.
    import jax
    import jax.numpy as jnp
    from flax import nnx

    tree = nnx.state(value) if isinstance(value, nnx.Module | nnx.Optimizer) else value
    leaves = jax.tree.leaves(tree)
    keys = [isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(leaves, keys, strict=True)]


@dataclass(frozen=True)
class Program:
    """A program of the sweep.

    Attributes:
        train: Trains once.
        is_exact: Whether it hands over all that its next steps depend on.
        in_process: Whether each start needs a process of its own.
    """

    train: Callable[[Run], None]
    is_exact: bool = False
    in_process: bool = False


PROGRAMS: dict[str, Program] = {}


def program(name: str, **options: bool) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a function into the table of programs."""

    def enter(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS[name] = Program(train, **options)
        return train

    return enter


# ---- one start of a program


@dataclass
class Trace:
    """What one start of a program leaves.

    Attributes:
        start: The step that it has resumed from.
        seen: What each of its steps gave, by the name of the part.
        proof: What its witness says: ``exact``, ``steps`` and ``differs``; None where it has none.
        warnings: What holdfast has warned of.
    """

    start: int = 0
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    proof: tuple[bool | None, tuple[int, ...], tuple[str, ...]] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def named(self) -> int | None:
        """The step that a warning names as the first that is not exact."""
        return next((int(found[1]) for text in self.warnings if (found := _NAMED.match(text))), None)


def start(name: str, directory: str, files: str, **options: int) -> Trace:
    """Start a program: in a process of its own if it needs one."""
    if PROGRAMS[name].in_process:
        return _start_process(name, PROGRAMS[name].train.__module__, directory, files, options)
    return _start_here(PROGRAMS[name], directory, files, options)


def _start_here(program: Program, directory: str, files: str, options: dict[str, Any]) -> Trace:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    logger, listener = logging.getLogger("holdfast"), Listener()
    trace = Trace(warnings=listener.heard)
    logger.addHandler(listener)
    run = Run(directory, files, **options)
    try:
        with run.ends:
            program.train(run)
    except InterruptionError:
        pass
    finally:
        logger.removeHandler(listener)
    proof = run.checkpoint.proof
    if proof is not None:
        trace.proof = proof.exact, tuple(proof.steps), tuple(proof.differs)
    trace.start, trace.seen = run.start, run.seen
    return trace


def _start_process(name: str, module: str, directory: str, files: str, options: dict[str, int]) -> Trace:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    program = f"import sys; from {__name__} import serve; serve(*sys.argv[1:])"
    with tempfile.NamedTemporaryFile() as file:
        arguments = [name, module, directory, files, json.dumps(options), file.name]
        subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=True)
        return pickle.load(file)  # type: ignore[no-any-return]


def serve(name: str, module: str, directory: str, files: str, options: str, file: str) -> None:
    """Start a program in this process, and write what it leaves to a file."""
    importlib.import_module(module)
    logging.getLogger("holdfast").setLevel(logging.WARNING)
    Path(file).write_bytes(pickle.dumps(_start_here(PROGRAMS[name], directory, files, json.loads(options))))
