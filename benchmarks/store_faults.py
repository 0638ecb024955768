"""``python -m benchmarks.store_faults``: faults of an object store, and whether a checkpoint is lost by any of them.

A run saves, replaces, copies, reads and deletes steps in a fake S3 on this machine. During each operation, one to four
requests in a row go wrong: connections are reset, bodies end half-way, the service fails or is busy, errors and pages
of a proxy have the status of success, or a write that was done is called a conflict. The operation has to succeed or
to raise an error of holdfast. Then every step that was reported saved must be there, with the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from tests.object_stores.lying_server import LyingServer
from tests.object_stores.s3_server import KEY_ID, REGION, SECRET

import holdfast as hf

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = 1000
BUCKET = "bucket"
SIZES = (1000, 100_000)  # elements of a tree that becomes a zip file, and of one that becomes a folder
STEPS = 6  # at most, before one is deleted
MOST_IN_A_ROW = 4
LATEST_REQUEST = 15  # most operations make fewer requests

KINDS: dict[str, Callable[[LyingServer], dict[str, Any]]] = {
    "reset": lambda _: {"how": "reset"},
    "truncated body": lambda _: {"how": "cut"},
    "500": lambda server: {"answer": server.error(500, "InternalError")},
    "503 slow down": lambda server: {"answer": server.error(503, "SlowDown")},
    "<Error> with 200": lambda server: {"answer": server.error(200, "InternalError")},
    "page of a proxy": lambda server: {"answer": server.page_of_a_proxy},
    "done, called a conflict": lambda server: {
        "after_doing": server.error(409, "ConditionalRequestConflict"),
        "when": lambda request: "if-none-match" in request.headers or "if-match" in request.headers,
        "skip": 0,  # few requests have conditions
    },
}

LIES = ("<Error> with 200", "page of a proxy")  # a deletion that was not done looks like one that was


class Run:
    """A run of which it is known what each step may hold."""

    def __init__(self, server: LyingServer, generator: random.Random) -> None:
        self.server = server
        self.generator = generator
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = f"s3://{BUCKET}/run"
        self._manager = hf.CheckpointManager(self._url)
        self._number = 0  # of the tree that was saved last
        self._steps: dict[int, set[int | None]] = {}  # the trees that each step may hold; None: it may be missing
        self._deleted = 0  # the step that was deleted last
        self._operations: tuple[Callable[[], None], ...] = (
            *(self._save, self._save, self._replace, self._delete),
            *(self._restore, self._load, self._copy),
        )

    def operate(self) -> None:
        """Do one thing while requests fail, and check the run."""
        operation, kind = self.generator.choice(self._operations), self.generator.choice(list(KINDS))
        times, skip = self.generator.randint(1, MOST_IN_A_ROW), self.generator.randrange(LATEST_REQUEST)
        fault = self.server.fail("", **{"times": times, "skip": skip, **KINDS[kind](self.server)})
        what = f"{operation.__name__.strip('_')}, {kind}, {times} times after {skip} requests"
        try:
            operation()
            outcome = "succeeded"
        except hf.HoldfastError:
            outcome = "raised an error"
        except Exception as error:
            outcome = "raised an error"
            self.problems.append(f"{what}: {type(error).__name__}: {error}")
        happened = times - fault.times
        self.counts[kind] += happened
        self.counts["faults"] += happened
        self.counts[outcome] += happened > 0
        self.server.reset()
        try:
            self._check(kind)
        except (AssertionError, hf.HoldfastError) as error:
            self.problems.append(f"{what}: {type(error).__name__}: {error}")

    def _check(self, kind: str) -> None:
        """Compare each step, and take the directory again, which removes what is left over."""
        self._manager.close()
        self._manager = hf.CheckpointManager(self._url)
        self._manager.acquire()
        listed = self._manager.all_steps()
        for step, allowed in list(self._steps.items()):
            try:
                found = self._found(self._manager.restore(step)) if step in listed else None
            except hf.DamagedCheckpointError:
                if step != self._deleted or kind not in LIES:
                    raise
                found = None
                listed.remove(step)  # the store only claimed to have deleted its record
            assert found in allowed, f"step {step} holds {found}, expected one of {allowed}"
            self._steps[step] = {found}
            if found is None:
                del self._steps[step]
        assert listed == sorted(self._steps), f"found the steps {listed}, expected {sorted(self._steps)}"
        known = {"owner.json", "options.json", *map(str, listed)}
        left = [key for key in self.server.keys(BUCKET, "run/") if key.split("/")[1] not in known]
        assert not left or kind in LIES, f"found {left} in a run of the steps {listed}"
        self.counts["left over"] += len(left)
        for key in left:
            del self.server.buckets[BUCKET][key]

    def _tree(self) -> dict[str, Any]:
        self._number += 1
        return {"w": np.full(self.generator.choice(SIZES), self._number, np.float32), "number": self._number}

    def _found(self, tree: Any) -> int:
        number = int(tree["number"])
        assert len(tree["w"]) in SIZES
        assert (tree["w"] == number).all()
        return number

    def _saved(self, step: int, allowed: set[int | None]) -> None:
        tree = self._tree()
        self._steps[step] = {*allowed, self._number}
        self._manager.save(step, tree, force=True)
        self._manager.wait_until_finished()
        self._steps[step] = {self._number}

    def _save(self) -> None:
        if len(self._steps) >= STEPS:
            return self._delete()
        return self._saved(max(self._steps, default=0) + 1, {None})

    def _replace(self) -> None:
        if self._steps:
            step = self.generator.choice(list(self._steps))
            self._saved(step, self._steps[step])

    def _delete(self) -> None:
        if len(self._steps) > 1:
            step = min(self._steps)
            self._steps[step] = {*self._steps[step], None}
            self._deleted = step
            self._manager.delete(step)
            self._steps[step] = {None}

    def _restore(self) -> None:
        restored = self._manager.restore_latest()
        if restored is not None:
            assert self._found(restored.items) in self._steps[restored.step]

    def _load(self) -> None:
        if self._steps:
            assert self._found(hf.load(self._url)) in self._steps[max(self._steps)]

    def _copy(self) -> None:
        if self._steps:
            target = f"s3://{BUCKET}/copy{self._number}"
            hf.copy_checkpoint(f"{self._url}/{max(self._steps)}", target, overwrite=True)
            assert self._found(hf.load(target)) in self._steps[max(self._steps)]
            hf.storage.as_location(target).remove_tree()


def run(faults: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Let a number of requests fail; return the count of each outcome, and the promises that were broken."""
    with LyingServer() as server, mock.patch.dict(os.environ):
        server.buckets[BUCKET] = {}
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ |= {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        one = Run(server, random.Random(seed))
        while one.counts["faults"] < faults and not one.problems:
            one.operate()
        return one.counts, one.problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 if a promise was broken, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_faults", description=__doc__)
    parser.add_argument("--faults", "--count", type=int, default=FAULTS, help="how many requests fail; 1000 if omitted")
    parser.add_argument("--seed", type=int, help="the seed of the random choices; by default a new one each time")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    began = time.perf_counter()
    counts, problems = run(options.faults, seed)
    for problem in problems:
        print(problem)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(
        f"{counts['faults']} faults in {time.perf_counter() - began:.0f} s (seed {seed}): {kinds}. Of the operations "
        f"that met them, {counts['succeeded']} succeeded and {counts['raised an error']} raised an error; "
        f"{counts['left over']} objects were left over, whose deletion the store only claimed; "
        f"{len(problems)} promises broken"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
