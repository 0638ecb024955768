"""``python -m benchmarks.daily``: everyday operations, compared with other libraries and the disk itself.

Small saves, a few leaves of many, many small leaves, the start of a program, several processes of one machine, sharded
loads, the requests of a small checkpoint in an object store, a tree of medium size, and parts of arrays. Each row is
one program, in which the contenders take turns; a new process runs it, so that nothing of other rows is in memory.
Saves are fsynced, and what is said to be loaded cold is dropped from the page cache before. A row that fails is named,
and the others continue. All rows together take about three minutes on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .goals import Goal
from .results import add_table_arguments, describe_machine
from .runner import tell
from .table import MISSING, aligned, markdown

OURS = "holdfast"
OWN = ("holdfast", "on_step", "bytes", "requests")  # how the names of our own numbers begin
BEST = "best peer"  # in a goal: the one with the lowest median
FLOOR = "floor: page cache, copied and checked"
ROUNDS = 9
ROW_SECONDS = 180  # the longest that a row may take
# Programs start from compiled modules, as installed ones do.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

COMMON = """
import json, os, resource, subprocess, sys, time
from pathlib import Path
import numpy as np
import holdfast as hf

directory, rounds, scale = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
values = {}

def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

def write_one_file(arrays, path):
    "The floor: one file, made durable, and its name."
    with open(f"{path}.tmp", "wb", buffering=0) as file:
        for array in arrays:
            file.write(array)
        os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)
    sync(path.parent)

def make_cold(*paths):
    os.sync()
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

def take_turns(operations, cold=(), clock=time.perf_counter):
    "Time each operation once in each round; the first round is not counted. Operations get the number of the round."
    names = list(operations)
    values.update({name: [] for name in names})
    for turn in range(rounds + 1):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            make_cold(*cold)
            began = clock()
            operations[name](turn)
            taken = clock() - began
            if turn:
                values[name].append(taken)

def many(count):
    return {f"layer{number:06d}.weight": np.full((16,), number, np.float32) for number in range(count)}
"""
SMALL = """
import safetensors.numpy
tree = {f"layer{number}": np.random.default_rng(number).random(16384) for number in range(24)}
def peer(turn):
    path = directory / f"peer{turn}.safetensors"
    safetensors.numpy.save_file(tree, path)
    sync(path)
    sync(directory)
take_turns({
    "one file": lambda turn: write_one_file(tree.values(), directory / f"one{turn}"),
    "safetensors, durable": peer,
    "holdfast": lambda turn: hf.save(directory / f"ours{turn}", tree),
})
"""
MANAGED = """
tree = {f"layer{number}": np.random.default_rng(number).random(16384) for number in range(24)}
options = hf.CheckpointManagerOptions(max_to_keep=2)
manager = hf.CheckpointManager(directory / "run", options=options)
callback = hf.CheckpointCallback(directory / "loop", save_interval_steps=1, max_to_keep=2)
callback.restore_or_initialize(tree)
blocked = []
def save(turn):
    manager.save(turn, tree)
    manager.wait_until_finished()
def step(turn):
    began = time.perf_counter()
    callback.on_step(turn + 1, tree)
    blocked.append(time.perf_counter() - began)
    callback.manager.wait_until_finished()
take_turns({
    "one file": lambda turn: write_one_file(tree.values(), directory / f"one{turn}"),
    "holdfast": save,
    "on_step and wait": step,
})
values["on_step blocks"] = blocked[1:]
manager.close()
callback.close()
"""
FEW = """
import safetensors, safetensors.numpy
tree = many(int(10_000 * scale))
hf.save(directory / "ours", tree)
safetensors.numpy.save_file(tree, directory / "peer.safetensors")
wanted = list(tree)[::len(tree) // 3][:3]
def peer(turn):
    with safetensors.safe_open(directory / "peer.safetensors", "numpy") as file:
        [file.get_tensor(name) for name in wanted]
take_turns({
    "safetensors": peer,
    "holdfast": lambda turn: hf.load(directory / "ours", select=wanted),
}, cold=[directory / "ours", directory / "peer.safetensors"])
"""
FEW_OF_MORE = FEW.replace("10_000", "100_000").replace("cold=", "clock=time.process_time, cold=")
MANY_SAVED = """
import safetensors.numpy
tree = many(int(10_000 * scale))
def peer(turn):
    path = directory / f"peer{turn}.safetensors"
    safetensors.numpy.save_file(tree, path)
    sync(path)
    sync(directory)
take_turns({"safetensors, durable": peer, "holdfast": lambda turn: hf.save(directory / f"ours{turn}", tree)})
"""
MANY_LOADED = """
import safetensors.numpy
tree = many(int(10_000 * scale))
hf.save(directory / "ours", tree)
safetensors.numpy.save_file(tree, directory / "peer.safetensors")
take_turns({
    "safetensors": lambda turn: safetensors.numpy.load_file(directory / "peer.safetensors"),
    "holdfast": lambda turn: hf.load(directory / "ours"),
})
"""
START = """
with hf.CheckpointManager(directory / "run") as manager:
    for step in range(5):
        manager.save(step, {"w": np.arange(10.0)})
        manager.wait_until_finished()
first = "import sys, numpy; import holdfast as hf; hf.save(sys.argv[1], {'w': numpy.arange(10.0)})"
asked = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": "holdfast l", "COMP_CWORD": "1"}
def run(*arguments, **variables):
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **variables})
def command(*words, **variables):
    return lambda turn: run("-m", "holdfast", *words, **variables)
take_turns({
    "numpy": lambda turn: run("-c", "import numpy"),
    "holdfast, first save": lambda turn: run("-c", first, directory / f"first{turn}"),
    "holdfast ls": command("ls", directory / "run"),
    "holdfast show": command("show", directory / "run"),
    "holdfast verify": command("verify", directory / "run"),
    "holdfast completion": command(**asked),
})
pairs = zip(values["holdfast, first save"], values["numpy"])
values["holdfast, first save beyond numpy"] = [ours - numpys for ours, numpys in pairs]
"""
SAME_HOST = """
tree = {f"layer{number}": np.full(int((4 << 20) * scale), number, np.float32) for number in range(15)}
hf.save(directory / "ours", tree)
nbytes = sum(array.nbytes for array in tree.values())
program = '''
import os, sys, time
from pathlib import Path
import google_crc32c
import holdfast as hf
from holdfast.engine.storage import aligned_empty
rank, world, store, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def read_all(path):
    "The floor: each file, read through the page cache into new memory, and its checksum."
    loaded = []
    for place in sorted(Path(path).rglob("*")):
        with open(place, "rb", buffering=0) if place.is_file() else open(os.devnull, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while left := os.fstat(file.fileno()).st_size - file.tell():
                memory = aligned_empty(min(left, 16 << 20))
                file.readinto(memory)
                memory.flags.writeable = False
                google_crc32c.value(memory)
                loaded.append(memory)
    return loaded
load = read_all if store == "floor" else hf.load
if store not in ("", "floor"):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
def bytes_read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])
print("ready", flush=True)
for _ in sys.stdin:
    before, began = bytes_read(), time.perf_counter()
    loaded = load(path)
    print(time.perf_counter() - began, bytes_read() - before, flush=True)
    del loaded
'''
def start(world, store):
    arguments = [str(world), str(store), str(directory / "ours")]
    commands = [[sys.executable, "-c", program, str(rank), *arguments] for rank in range(world)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for command in commands]
    for one in started:
        one.stdout.readline()
    return started
def load(processes):
    make_cold(directory / "ours")
    for one in processes:
        one.stdin.write("go\\n")
        one.stdin.flush()
    found = [one.stdout.readline().split() for one in processes]
    return max(float(taken) for taken, _ in found), sum(int(count) for _, count in found)
contenders = {
    "one process": start(1, ""),
    "floor: page cache, copied and checked": start(4, "floor"),
    "holdfast": start(4, directory / "store"),
    "holdfast, not connected": start(4, ""),
}
for turn in range(rounds):
    for name, processes in contenders.items():
        taken, count = load(processes)
        values.setdefault(name, []).append(taken)
        if name.startswith("holdfast"):
            what = "bytes from the disk, times the checkpoint" + name.removeprefix("holdfast")
            values.setdefault(what, []).append(count / nbytes)
for processes in contenders.values():
    for one in processes:
        one.communicate()
"""
SHARDED = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
tree = {f"layer{number}": np.full((8 * int(768 * scale), 1024), number, np.float32) for number in range(8)}
hf.save(directory / "ours", tree)
mesh = Mesh(jax.devices(), "x")
def like(*spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for name, array in tree.items()}
one = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tree.items()}
take_turns({
    "one device": lambda turn: jax.block_until_ready(hf.load(directory / "ours", like=one)),
    "holdfast": lambda turn: jax.block_until_ready(hf.load(directory / "ours", like=like("x"))),
}, cold=[directory / "ours"])
"""
MEDIUM = """
import safetensors.torch, torch
try:
    import pyarrow
except ImportError:
    pyarrow = None
tree = {f"layer{number}": torch.full((int((1 << 20) * scale),), float(number)) for number in range(60)}
def save_arrow(path):
    with pyarrow.OSFile(str(path), "wb") as file:
        for tensor in tree.values():
            pyarrow.ipc.write_tensor(pyarrow.Tensor.from_numpy(tensor.numpy()), file)
def save_safetensors(path):
    safetensors.torch.save_file(tree, path)
def durable(save, path):
    save(path)
    sync(path)
    sync(directory)
"""
MEDIUM_SAVED = f"""{MEDIUM}
contenders = {{
    "one file": lambda turn: write_one_file(map(torch.Tensor.numpy, tree.values()), directory / f"one{{turn % 2}}"),
    "safetensors, durable": lambda turn: durable(save_safetensors, directory / f"peer{{turn % 2}}.safetensors"),
    "holdfast": lambda turn: hf.save(directory / f"ours{{turn % 2}}", tree, overwrite=True),
}}
if pyarrow:
    contenders["Arrow, durable"] = lambda turn: durable(save_arrow, directory / f"peer{{turn % 2}}.arrow")
take_turns(contenders)
"""
MEDIUM_LOADED = f"""{MEDIUM}
hf.save(directory / "ours", tree)
save_safetensors(directory / "peer.safetensors")
torch.save(tree, directory / "peer.pt")
def read_arrow(turn):
    with pyarrow.OSFile(str(directory / "peer.arrow"), "rb") as file:
        return [torch.from_numpy(pyarrow.ipc.read_tensor(file).to_numpy()) for _ in tree]
def read_safetensors(**options):
    return [t.sum() for t in safetensors.torch.load_file(directory / "peer.safetensors", **options).values()]
contenders = {{
    "safetensors": lambda turn: read_safetensors(),
    "safetensors, pread": lambda turn: read_safetensors(backend="pread"),
    "torch.load": lambda turn: [t.sum() for t in torch.load(directory / "peer.pt").values()],
    "holdfast": lambda turn: [t.sum() for t in hf.load(directory / "ours", like=tree).values()],
}}
if pyarrow:
    save_arrow(directory / "peer.arrow")
    contenders["Arrow"] = lambda turn: [t.sum() for t in read_arrow(turn)]
take_turns(contenders, cold=[path for path in directory.iterdir()])
"""
PARTS = """
import safetensors, safetensors.numpy
tree = {f"layer{number}": np.full((int(32768 * scale), 1024), number, np.float32) for number in range(8)}
hf.save(directory / "ours", tree)
safetensors.numpy.save_file(tree, directory / "peer.safetensors")
rows = int(32768 * scale) // 8
def peer(turn):
    with safetensors.safe_open(directory / "peer.safetensors", "numpy") as file:
        [file.get_slice(name)[:rows].sum() for name in tree]
def parts(turn):
    with hf.open(directory / "ours") as opened:
        [handle[:rows].sum() for handle in opened.values()]
take_turns({
    "all of it": lambda turn: [array.sum() for array in hf.load(directory / "ours").values()],
    "safetensors": peer,
    "holdfast": parts,
}, cold=[directory / "ours", directory / "peer.safetensors"])
"""
REQUESTS = """
from benchmarks.protocol import SimulatedStore
from benchmarks.virtual_time import Timeline
from holdfast.engine.storage import Location
store = SimulatedStore(Timeline(), latency=0)
tree = {f"layer{number}": np.full((20, 50), number, np.float32) for number in range(25)}
place = Location(store, "place")
options = hf.CheckpointManagerOptions(max_to_keep=2)
manager = hf.CheckpointManager(place / "run", options=options)
def count(name, action):
    before = store.requests
    action()
    values.setdefault(name, []).append(store.requests - before)
def save(turn):
    manager.save(turn, tree)
    manager.wait_until_finished()
for turn in range(rounds + 2):
    count("requests of a save", lambda: hf.save(place / str(turn), tree))
    count("requests of a load", lambda: hf.load(place / str(turn)))
    count("requests of a save that deletes a step", lambda: save(turn))
values = {name: found[2:] for name, found in values.items()}
manager.close()
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One everyday operation.

    Attributes:
        number: Of the row, as the page of the benchmarks counts them.
        title: What is done.
        program: Fills ``values`` with the numbers of each contender, one for each round.
        goals: For each goal: the number, the number it is divided by (or None), and the limit; None for a line that
            only informs.
    """

    number: int
    title: str
    program: str
    goals: tuple[tuple[str, str | None, float | None], ...]


ROWS = {
    "small": Row(number=1, title="save 3 MB in 24 leaves", program=SMALL, goals=((OURS, "one file", 2.0),)),
    "managed": Row(
        number=1,
        title="the same with a manager, and at every step",
        program=MANAGED,
        goals=((OURS, "one file", 2.0), ("on_step blocks", None, 0.001)),
    ),
    "few": Row(number=2, title="load 3 of 10,000 leaves, cold", program=FEW, goals=((OURS, None, 0.015),)),
    "few_of_more": Row(
        number=2, title="load 3 of 100,000 leaves, processor time", program=FEW_OF_MORE, goals=((OURS, None, 0.030),)
    ),
    "many_saved": Row(
        number=3, title="save 10,000 leaves", program=MANY_SAVED, goals=((OURS, "safetensors, durable", 1.3),)
    ),
    "many_loaded": Row(
        number=3, title="load 10,000 leaves into numpy", program=MANY_LOADED, goals=((OURS, "safetensors", 1.3),)
    ),
    "start": Row(
        number=4,
        title="start of a program",
        program=START,
        goals=(
            ("holdfast, first save beyond numpy", None, 0.12),
            ("holdfast ls", None, 0.2),
            ("holdfast show", None, 0.2),
            ("holdfast verify", None, 0.2),
            ("holdfast completion", None, 0.2),
        ),
    ),
    "same_host": Row(
        number=5,
        title="four processes of one machine load 240 MiB, cold",
        program=SAME_HOST,
        goals=(
            (OURS, "one process", 1.2),
            (FLOOR, "one process", None),
            (OURS, FLOOR, None),
            ("bytes from the disk, times the checkpoint", None, 1.01),
            ("bytes from the disk, times the checkpoint, not connected", None, 1.5),
        ),
    ),
    "sharded": Row(
        number=6,
        title="load 192 MiB onto 8 local devices of jax, cold",
        program=SHARDED,
        goals=((OURS, "one device", 1.3),),
    ),
    "requests": Row(
        number=7,
        title="100 KB in an object store",
        program=REQUESTS,
        goals=(
            ("requests of a save", None, 5),
            ("requests of a load", None, 2),
            ("requests of a save that deletes a step", None, 10),
        ),
    ),
    "medium_saved": Row(number=8, title="save 250 MB of torch", program=MEDIUM_SAVED, goals=((OURS, BEST, 1.1),)),
    "medium_loaded": Row(
        number=8, title="load 250 MB into torch, cold", program=MEDIUM_LOADED, goals=((OURS, BEST, 1.1),)
    ),
    "parts": Row(
        number=9, title="an eighth of every array of 1 GB, cold", program=PARTS, goals=((OURS, "all of it", 1.3 / 8),)
    ),
}

Values = dict[str, list[float]]
"""The numbers of each contender, one for each round."""

Medians = dict[str, float]


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the table; return 1 where ``--check`` was given and a goal was missed."""
    options = _parser().parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    values: dict[str, Values] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        machine = describe_machine(Path(temporary))
        for name in options.row or ROWS:
            try:
                values[name] = measure(ROWS[name], Path(temporary) / name, options.rounds, options.scale)
            except subprocess.SubprocessError as error:
                tell(f"{ROWS[name].title}: not measured: {_cause(error)}")
                values[name] = {}
            numbers = ", ".join(f"{key} {_text(value, key)}" for key, value in _medians(values[name]).items())
            tell(f"{ROWS[name].title}: {numbers}")
            if options.json is not None:  # after each row: a run that is cut leaves what it has measured
                document = {"rounds": options.rounds, "scale": options.scale, "machine": machine, "values": values}
                options.json.write_text(f"{json.dumps(document, indent=1)}\n", encoding="utf-8")
    found = {name: _medians(each) for name, each in values.items()}
    print(report(found, options.rounds, machine, as_markdown=options.markdown))
    return int(options.check and not all(goal.met for goal in goals(found)))


def measure(row: Row, directory: Path, rounds: int, scale: float = 1.0) -> Values:
    """Run the program of a row; return its numbers.

    Raises:
        subprocess.SubprocessError: The program failed, for example as a peer is not installed, or took too long.
    """
    directory.mkdir()
    program = f"{COMMON}{row.program}\nprint(json.dumps(values))"
    command = [sys.executable, "-c", program, str(directory), str(rounds), str(scale)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, start_new_session=True)
    try:
        printed, said = process.communicate(timeout=ROW_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[:2], printed, said)
    shutil.rmtree(directory)
    values: Values = json.loads(printed.splitlines()[-1])
    return values


def _cause(error: subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return [f"status {error.returncode}", *str(error.stderr).strip().splitlines()][-1]
    return f"stopped after {ROW_SECONDS} s"


def _medians(values: Values) -> Medians:
    return {name: median(found) for name, found in values.items() if found}


def goals(found: dict[str, Medians]) -> list[Goal]:
    """Return what must be reached, by the rows that were measured or should have been."""
    return [
        _goal(found[row], row, number, other, limit)
        for row in found
        for number, other, limit in ROWS[row].goals
        if limit is not None
    ]


def _goal(medians: Medians, row: str, number: str, other: str | None, limit: float) -> Goal:
    own, base = medians.get(number), medians.get(_peer(medians, other)) if other else 1.0
    return Goal(
        name=f"{ROWS[row].title}: {number}{f' / {other}' if other else ''}",
        value=None if own is None or not base else own / base,
        limit=limit,
        unit="x" if other or number.startswith("bytes") else " requests" if number.startswith("requests") else " s",
    )


def _peer(medians: Medians, other: str | None) -> str:
    """Return the name of what a number is compared with, or an empty string."""
    peers = [name for name in medians if not name.startswith(OWN) and name != FLOOR]
    return other if other not in (None, BEST) else min(peers, key=medians.__getitem__, default="")


def report(found: dict[str, Medians], rounds: int, machine: dict[str, str], *, as_markdown: bool) -> str:
    """Return the table: a line for each goal, with the number that it is compared with, or the best peer's."""
    rows = [["row", "what is done", "median", "floor or best peer", "ratio", "goal", "met"]]
    for row, medians in found.items():
        for number, other, limit in ROWS[row].goals:
            goal = None if limit is None else _goal(medians, row, number, other, limit)
            peer = _peer(medians, other) if other or not number.startswith("bytes") else ""
            own, base = medians.get(number), medians.get(peer)
            rows.append(
                [
                    str(ROWS[row].number),
                    ROWS[row].title if number == OURS else f"{ROWS[row].title}: {number}",
                    "not measured" if own is None else _text(own, number),
                    MISSING if base is None else f"{peer} {_text(base)}",
                    MISSING if own is None or not base else f"{own / base:.2f}x",
                    MISSING if goal is None else goal.bound,
                    MISSING if goal is None else "yes" if goal.met else "NO",
                ]
            )
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    return "\n\n".join([(markdown if as_markdown else aligned)(rows), f"Medians of {rounds}. {facts}"])


def _text(value: float, name: str = "") -> str:
    """Write a number: seconds, unless its name says something else."""
    if name.startswith("requests"):
        return f"{value:.0f}"
    if name.startswith("bytes"):
        return f"{value:.2f}x"
    return f"{value * 1000:.1f} ms" if value < 0.9 else f"{value:.2f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daily", description=__doc__)
    parser.add_argument("--row", choices=ROWS, action="append", help="measure only this row; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each row; {ROUNDS} unless given")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number or the size of leaves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number to this file")
    add_table_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
