"""One interrupted run, compared bit for bit with the uninterrupted one."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

import holdfast as hf

NEVER = 10_000  # steps between two saves: none

Verdict = Literal["equal", "refused", "differs", "failed"]

GOOD: tuple[Verdict, ...] = ("equal", "refused")


# ---- runs


class InterruptionError(RuntimeError):
    """Ends a program between two steps."""


@dataclass
class Run:
    """One start of a program: where it saves, and what happens to it.

    Attributes:
        directory: The directory of its checkpoints.
        turn: How many starts there were before it.
        every: After how many steps it saves.
        error: The step after which it fails.
        told: The step in which SIGTERM comes.
        total: How many steps it trains.
        stopped: Whether it was asked to stop, and did.
    """

    directory: str
    turn: int = 0
    every: int = NEVER
    error: int = 0
    told: int = 0
    total: int = NEVER
    stopped: bool = False

    def seed(self) -> None:
        """Seed the global generators; each start has another seed, as programs have that set none."""
        seed_all(1 + self.turn)

    def tell(self) -> None:
        """Send SIGTERM to the program."""
        os.kill(os.getpid(), signal.SIGTERM)

    def callback(self, part: str = "") -> Any:
        """Return the callback of the program, or of one of its parts."""
        return hf.CheckpointCallback(f"{self.directory}{part}", save_interval_steps=self.every)

    def report(self, checkpoint: Any, step: int, state: Any, *, before: int = 0, **arguments: Any) -> bool:
        """Report a step, and return whether to leave the loop; ``before`` is the number of steps of earlier loops."""
        if before + step == self.told:
            self.tell()
        self.stopped = checkpoint.on_step(step, state, **arguments).should_stop
        if before + step == self.error:
            raise InterruptionError
        return self.stopped


def difference(start: Callable[..., Any], whole: Any, *interruptions: dict[str, int]) -> str | None:
    """Start a program with each of the interruptions, and then to its end, which has to be that of the whole run.

    ``start`` takes a directory, the number of the start and an interruption. It returns what the program leaves, None
    where it was interrupted.
    """
    directory = new_directory()
    for turn, options in enumerate(interruptions):
        if start(directory, turn, **options) is not None and "total" not in options:
            raise RuntimeError(f"{options} did not happen")
    found = start(directory, len(interruptions))
    if found is None:
        raise RuntimeError("the resumed run ended early")
    return first_difference(found, whole)


class Batches:
    """Batches of rows, shuffled anew in every epoch, with a place that can be saved, unless it ``forgets`` it."""

    def __init__(self, rows: Any, size: int, *, forgets: bool = False) -> None:
        self._rows, self._size, self._forgets = rows, size, forgets
        self._generator = np.random.default_rng(7)
        self._order: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._order:
            self._order = self._generator.permutation(len(self._rows)).tolist()
        chosen, self._order = self._order[: self._size], self._order[self._size :]
        return self._rows[chosen]

    def get_state(self) -> dict[str, Any]:
        return {"order": self._order, "generator": self._generator.bit_generator.state}

    def set_state(self, state: Any) -> None:
        if not self._forgets:
            self._order, self._generator.bit_generator.state = state["order"], state["generator"]


_directories = itertools.count()


def new_directory() -> str:
    """Return the URL of a directory in memory that no run has had."""
    return f"memory://sweep-{os.getpid()}/{next(_directories)}"


def seed_all(seed: int) -> None:
    """Seed the global generators."""
    import torch

    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(seed)


def be_quiet(*modules: str) -> None:
    """Silence what torch and other modules say of every program, and fork data loaders' workers in every process."""
    import torch

    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # on these sizes more threads only wait for each other
    warnings.filterwarnings("ignore", module=rf"(?:{'|'.join(('torch', *modules))})\.")
    logging.getLogger("holdfast").setLevel(logging.WARNING)


# ---- verdicts


@dataclass
class Case:
    """How one case ended.

    Attributes:
        name: Framework, data loader or state, set-up and interruption, with slashes between them.
        verdict: ``equal``; ``refused`` with a message that the set-up expects; ``differs``; or ``failed``.
        detail: What differs, or the message.
        warnings: What holdfast has warned of.
    """

    name: str
    verdict: Verdict = "equal"
    detail: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Listener(logging.Handler):
    """Collects the warnings of holdfast."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def run_cases(
    prefix: str, cases: Mapping[str, Callable[[], str | None]], only: tuple[str, ...], refused: str = ""
) -> Iterator[Case]:
    """Yield the cases of a program, by title, whose names contain one of ``only``."""
    for title, run in cases.items():
        name = f"{prefix}/{title}"
        if not only or any(text in name for text in only):
            yield judge(name, run, refused)


def run_interrupted(
    prefix: str,
    start: Callable[..., Any],
    total: int,
    interruptions: dict[str, list[dict[str, int]]],
    only: tuple[str, ...],
) -> Iterator[Case]:
    """Yield the cases of a program of ``total`` steps: these interruptions, and those that every program meets."""
    found = interruptions | {
        "error after step 2": [{"error": 2, "every": 2}],
        "steps in part again": [{"error": 5, "every": 2}],
        "longer": [{"total": 3}],
        "finished, and started again": [{"total": total}],
    }
    whole = start(new_directory())
    cases = {title: partial(difference, start, whole, *options) for title, options in found.items()}
    yield from run_cases(prefix, cases, only)


def judge(name: str, run: Callable[[], str | None], refused: str = "", *, is_exact: bool = True) -> Case:
    """Run one case.

    ``run`` returns what differs first, and ``refused`` is part of a message that is expected. Where a program
    ``is_exact``, an alarm of the witness is a failure, as it is the second judge.
    """
    logger, listener = logging.getLogger("holdfast"), Listener()
    logger.addHandler(listener)
    logger.propagate = False
    try:
        difference = run()
        case = Case(name) if difference is None else Case(name, "differs", difference)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        case = Case(name, "refused" if refused and refused in detail else "failed", detail)
    finally:
        logger.propagate = True
        logger.removeHandler(listener)
    case.warnings = listener.heard
    alarms = [text for text in listener.heard if text.startswith("not exact")]
    if is_exact and case.verdict == "equal" and alarms:
        return Case(name, "failed", f"equal, but {alarms[0]}", listener.heard)
    return case


# ---- what has to be equal


def bits(value: Any, *, attributes: bool = False) -> Any:
    """Return the bytes of all arrays in a value, and its plain values; of objects those of their state.

    With ``attributes``, the modes and the plain attributes of torch's modules and optimizers are among them.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    of = partial(bits, attributes=attributes)
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    if value is None or isinstance(value, int | float | str | bytes):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): of(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [of(item) for item in value]
    if isinstance(value, np.random.Generator):
        return of(value.bit_generator.state)
    if isinstance(value, random.Random):
        return of(value.getstate())
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if torch is not None and isinstance(value, torch.Generator):
        return of(value.get_state())
    if hasattr(value, "state_dict"):
        return {"state": of(value.state_dict()), **(_attributes(value) if attributes else {})}
    leaves = _of_leaves(value) if jax is not None else {}
    if not leaves and type(value).__module__.startswith("tests.sweep."):
        return of(vars(value))
    return leaves or repr(type(value))


def _of_tensor(value: Any) -> Any:
    import torch

    if value.layout is not torch.strided:
        return str(value.layout), _of_tensor(value.to_dense())
    if value.is_quantized:
        return str(value.dtype), _of_tensor(value.int_repr()), str(value.qscheme())
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype), tuple(value.shape), strides, data


def _attributes(value: Any) -> dict[str, Any]:
    """Return the modes, the plain numbers and the tensors of a module and its parts, or of another object."""
    import torch

    kinds = (int, float, torch.Tensor, torch.optim.Optimizer)
    parts = dict(value.named_modules()) if isinstance(value, torch.nn.Module) else {"": value}
    kept = {
        f"{place}.{name}": bits(one, attributes=True)
        for place, part in parts.items()
        for name, one in vars(part).items()
        if (name == "training" or not name.startswith("_")) and isinstance(one, kinds)
    }
    parameters = value.named_parameters() if isinstance(value, torch.nn.Module) else ()
    return kept | {f"{name} is trained": one.requires_grad for name, one in parameters}


def _of_leaves(value: Any) -> dict[str, Any]:
    """Return the type and the bytes of every leaf of a tree of jax or a module of nnx, by path; {} of other objects."""
    import jax

    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(value, nnx.Module | nnx.Optimizer):
        value = nnx.state(value)
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            weak = getattr(leaf, "weak_type", False)
            found[name] = weak, bits(np.asarray(jax.random.key_data(leaf) if is_key else leaf))
        elif leaf is not value:
            found[name] = leaf if callable(leaf) else bits(leaf)
    return found


def first_difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Return where two trees of plain values differ first, or None."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, found[key], expected[key]) for key in found)
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple) and len(found) == len(expected):
        pairs = ((index, one, other) for index, (one, other) in enumerate(zip(found, expected, strict=True)))
    else:
        return None if found == expected else f"{path or 'all'}: expected {_short(expected)}, found {_short(found)}"
    return next((text for key, one, other in pairs if (text := first_difference(one, other, f"{path}/{key}"))), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
