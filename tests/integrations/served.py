"""One process that has imported torch and Lightning, which takes seconds; the programs of tests are forked from it.

It is a fork of the launcher of processes that torch connects.

A request is a line of JSON: the kind of the program (``KINDS``), and the arguments of the function that runs it. The
answer is a line of JSON: what the function returns, the exit statuses of its processes, negative for signals.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.processes.harness import launcher
from tests.processes.launcher import warm_up

KINDS = {
    "program": ("tests.integrations.lightning.program", "serve"),
    "several": ("tests.integrations.lightning.several", "launch"),
    "job": ("tests.integrations.jobs", "serve"),
    "processes": ("tests.processes.launcher", "launch"),
}
IMPORTS = [
    *(module for module, _ in KINDS.values()),
    # What their processes would import one by one: optimizers, trainers, and strategies of several processes.
    "grain",
    "omegaconf",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.agent.server.api",
    "torch.profiler._cupti_monitor",
    "torchdata.stateful_dataloader",
]


@dataclass(frozen=True)
class Server:
    """The process, as tests see it: what it reads and writes, and what all its programs write to standard error."""

    requests: IO[str]
    answers: IO[str]
    errors: Path

    def send(self, *request: Any) -> None:
        """Sends a line of JSON, or an empty line."""
        print(json.dumps(request) if request else "", file=self.requests, flush=True)

    def receive(self) -> str:
        return self.answers.readline()

    def launch(self, request: dict[str, Any]) -> list[int]:
        """Runs processes that nothing connects, for `run_outcomes` of ``tests/processes/harness.py``."""
        self.send("processes", "none", request)
        statuses: list[int] = json.loads(self.receive())
        return statuses


@contextmanager
def started(errors: Path) -> Iterator[Server]:
    """Starts the process, for as long as the context lasts."""
    errors.touch()  # also where a test reads it before the process writes
    requests, answers = launcher("torch").fork(__name__, str(errors))
    with answers:
        yield Server(requests, answers, errors)
        requests.close()
        answers.read()  # until it has ended


def serve(errors: str) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ["PYTHONWARNINGS"] = "ignore"
    warnings.simplefilter("ignore")
    os.environ.pop("PL_GLOBAL_SEED", None)  # of lightning.seed_everything: with it, all processes have one seed
    warm_up(IMPORTS)
    for line in iter(sys.stdin.readline, ""):
        kind, *arguments = json.loads(line)
        module, function = KINDS[kind]
        print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)), flush=True)
