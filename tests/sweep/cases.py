"""One interrupted run, compared bit for bit with the uninterrupted one."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NEVER = 10_000  # steps between two saves: none

Verdict = Literal["equal", "refused", "differs", "failed"]

GOOD: tuple[Verdict, ...] = ("equal", "refused")


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


class InterruptionError(RuntimeError):
    """Ends a program between two steps."""


class Listener(logging.Handler):
    """Collects the warnings of holdfast."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


_directories = itertools.count()


def new_directory() -> str:
    """Return the URL of a directory in memory that no run has had."""
    return f"memory://sweep-{os.getpid()}/{next(_directories)}"


def be_quiet(*modules: str) -> None:
    """Silence what torch and other modules say of every program, and fork data loaders' workers in every process."""
    import torch

    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # on these sizes more threads only wait for each other
    warnings.filterwarnings("ignore", module=rf"(?:{'|'.join(('torch', *modules))})\.")
    logging.getLogger("holdfast").setLevel(logging.WARNING)


def run_cases(
    prefix: str, cases: dict[str, Callable[[], str | None]], only: tuple[str, ...], refused: str = ""
) -> Iterator[Case]:
    """Yield the cases of a program, by title, whose names contain one of ``only``."""
    for title, run in cases.items():
        name = f"{prefix}/{title}"
        if not only or any(text in name for text in only):
            yield judge(name, run, refused)


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
