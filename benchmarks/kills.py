"""``python -m benchmarks.kills``: kills a saving run at random moments; the next run checks the directory.

With ``--processes``, it signals runs of several connected processes instead: see ``kills_cases.py``.

The run saves asynchronously, keeps the newest three steps and every tenth, and replaces every third step by another
edition of it. One process that has everything imported forks each life and ends it with SIGKILL: most of them while
they save, some while they open the directory and clean up.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .kills_cases import run_connected
from .kills_life import KEEP_NEWEST, KEEP_PERIOD, Life, warm_up
from .kills_member import TRAIN

KILLS = 2000
CONNECTED_KILLS = 150
LIVES_A_DIRECTORY = 50  # checking takes longer with every step that is kept
EARLY_SHARE = 0.2  # of the kills happen while a life looks, takes over and checks
EARLY_SECONDS = 0.03
SHARING_SHARE = 0.3  # of the others happen after a step has shared files with an earlier one
LATE_SAVES = 4  # the others happen after less than this many commits, within a save
TIMEOUT_SECONDS = 120.0


@dataclass
class Ledger:
    """The reports of the lives on one directory.

    Attributes:
        committed: The newest edition of every step that was reported committed or seen whole.
        counts: How often each kind of line was said.
        problems: Promises that were broken.
    """

    committed: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def hear(self, line: str) -> None:
        """Record one line of a life."""
        word, _, rest = line.partition(" ")
        self.counts[f"{word} {rest}" if word == "leftover" else word] += 1
        if word in ("committed", "listed"):
            step, edition = map(int, rest.split())
            self.committed[step] = max(edition, self.committed.get(step, 0))
        elif word == "problem":
            self.problems.append(rest)

    def kept(self) -> dict[int, int]:
        """The steps that retention must have kept, with their editions."""
        newest = sorted(self.committed)[-KEEP_NEWEST:]
        return {s: edition for s, edition in self.committed.items() if s in newest or s % KEEP_PERIOD == 0}


def live_and_die(directory: Path, ledger: Ledger, generator: random.Random, save_seconds: float) -> None:
    """Fork one life, kill it at a random moment, and record its reports."""
    assert threading.active_count() == 1, "a process with threads must not fork"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            Life(directory, ledger.kept(), writing).run()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        text = b""
        if generator.random() < EARLY_SHARE:
            time.sleep(generator.uniform(0, EARLY_SECONDS))
        else:
            text = _read_until(reading, b"checked\n")
            if b"checked\n" not in text:
                ledger.problems.append("the run did not get as far as saving")
            if generator.random() < SHARING_SHARE:
                text += _read_until(reading, b"shared\n")
                if b"shared\n" not in text:
                    ledger.problems.append("no step shared a file with an earlier one")
            text += _read_until(reading, b"committed ", generator.randrange(LATE_SAVES))
            time.sleep(generator.uniform(0, save_seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        text += _read_until(reading, None)
    finally:
        os.close(reading)
    for line in text.decode().splitlines():
        ledger.hear(line)
    if not os.WIFSIGNALED(status):
        ledger.problems.append(f"the run ended by itself with status {status}")


def _read_until(pipe: int, end: bytes | None, times: int = 1) -> bytes:
    """Read until a text has arrived so many times, or the pipe is closed."""
    text = b""
    while end is None or text.count(end) < times:
        if not select.select([pipe], [], [], TIMEOUT_SECONDS)[0]:
            break
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        text += part
    return text


def run(kills: int, directory: Path, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill a run many times, in several directories.

    Returns:
        The counts of the outputs of the runs, and the promises that were broken; their directories are left.
    """
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    save_seconds = warm_up(directory / "warm_up")
    for start in range(0, kills, LIVES_A_DIRECTORY):
        place, ledger = directory / f"run_{start}", Ledger()
        place.mkdir()
        for turn in range(start, min(start + LIVES_A_DIRECTORY, kills)):
            live_and_die(place, ledger, generator, save_seconds)
            if ledger.problems:
                problems = [f"{place}, kill {turn + 1}: {problem}" for problem in ledger.problems]
                return counts + ledger.counts, problems
        counts += ledger.counts
        shutil.rmtree(place)
    return counts, []


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 where a promise was broken, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", "--count", type=int, help="how often to kill; 2000 unless given, 150 of several")
    parser.add_argument("--processes", type=int, nargs="+", help="how many connected processes the runs have, as 2 4")
    parser.add_argument("--framework", choices=sorted(TRAIN), nargs="+", default=["torch"], help="what connects them")
    parser.add_argument("--barrier", type=float, default=8.0, help="their barrier timeout, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="how many of these runs there are at a time")
    parser.add_argument("--local", action="store_true", help="they have local steps and a mirror, and lose hosts")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where to save; ./runs unless given")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the random moments; by default a new one each time"
    )
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    options.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="kills-", dir=options.directory))
    if options.processes:
        kills = options.kills or CONNECTED_KILLS
        broken = run_connected(
            options.framework,
            options.processes,
            kills,
            seed,
            options.barrier,
            directory,
            is_local=options.local,
            jobs=options.jobs,
        )
        if not broken:
            shutil.rmtree(directory)
        return broken
    began = time.perf_counter()
    kills = options.kills or KILLS
    counts, problems = run(kills, directory, seed)
    seconds = time.perf_counter() - began
    for problem in problems:
        print(problem)
    print(
        f"{kills} kills in {seconds:.0f} s (seed {seed}): {counts['committed']} commits reported "
        f"({counts['shared']} with shared files), "
        f"{counts['checked']} times checked, {counts['leftover partial']} interrupted saves and "
        f"{counts['leftover deleted']} interrupted deletions found, {len(problems)} promises broken"
    )
    if not problems:
        shutil.rmtree(directory)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
