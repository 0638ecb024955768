"""How a save grows with the number of processes: ``python -m benchmarks.scale``.

First, planning and merging, without a save and without arrays: a tree of many leaves, each of them divided among all
processes, is planned as every process would; process 0 then merges the fragments of all and encodes the index. What is
measured is what process 0 does and the memory that it takes, fragments included.

Then, opening the checkpoint of such a tree and reading one leaf of it, whose chunks lie in the files of all processes.

Then, the commit: a small tree is saved by the real code, with a thread for each process, to a store in memory whose
requests take 30 ms, in simulated time (`benchmarks.protocol`). Up to 64 replicas restore one tree from the same store
(`benchmarks.replicas`). At the end, one of 16 processes dies, is slow or is cut
off from process 0, at each call of a save (`benchmarks.faults`), and a run of up to 64 hosts with local steps loses one
of them with its memory (`benchmarks.lost_host`).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import resource
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import holdfast as hf
from holdfast.engine.arrays.assignment import write_assignment
from holdfast.engine.arrays.fragments import Fragment, make_fragment, merge_fragments
from holdfast.engine.arrays.plan import Catalog, Layout, chunk_table, plan_files
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.format import CheckpointRecord, FileRecord, ItemRecord, crc32c, encode_document
from holdfast.engine.pytree import ArrayLeaf, Part, flatten, to_document

from .faults import Outcome, outcomes
from .lost_host import MOST as MOST_HOSTS
from .lost_host import LostHost, lose_a_host
from .protocol import Protocol, Simulation
from .replicas import MOST, restore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNKS = 10 << 20
"""Chunks of a tree in all; as many as 1,024 processes have of 10,000 leaves."""

SHAPES = 40
"""Different shapes of leaves, as a model has them."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The measurements for one number of processes.

    Attributes:
        processes: How many there are.
        leaves: How many leaves the tree has.
        chunks: How many chunks all of them have.
        plan_seconds: For describing the tree and deciding who writes what.
        fragment_seconds: For one process's share and fragment.
        merge_seconds: For merging all fragments.
        index_seconds: For encoding the index.
        fragments_bytes: All fragments together.
        index_bytes: The index.
        peak_bytes: The most memory that the process had.
    """

    processes: int
    leaves: int
    chunks: int
    plan_seconds: float
    fragment_seconds: float
    merge_seconds: float
    index_seconds: float
    fragments_bytes: int
    index_bytes: int
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """The time of all work of process 0."""
        return self.plan_seconds + self.fragment_seconds + self.merge_seconds + self.index_seconds


def make_tree(processes: int, leaves: int, kind: str = "jax") -> tuple[list[str], list[ArrayLeaf]]:
    """Describe a tree; every process holds a shard of every leaf.

    Args:
        processes: How many processes there are.
        leaves: How many leaves.
        kind: What they are.

    Returns:
        Their names, and the leaves, which have no pieces.
    """
    divided = []
    for width in range(1, SHAPES + 1):
        rows, columns = 4, 64 * width
        parts = tuple(Part((rows * p, 0), (rows, columns), (p,)) for p in range(processes))
        divided.append(((rows * processes, columns), parts))
    names, found = [], []
    for number in range(leaves):
        shape, parts = divided[number % SHAPES]
        names.append(f"params.layers_{number // SHAPES}.block_{number % SHAPES}.kernel")
        found.append(ArrayLeaf(np.dtype(np.float32), shape, [], False, {"kind": kind}, parts))
    return names, found


def measure(processes: int, leaves: int) -> Scale:
    """Plan and merge for a number of processes.

    Args:
        processes: How many.
        leaves: How many leaves the tree has.

    Returns:
        What it took.
    """
    names, described = make_tree(processes, leaves)
    layout, token = Layout(), uuid.uuid4().hex[:8]
    began = time.perf_counter()
    catalog = Catalog(names, described, layout)
    assignment = write_assignment(catalog, processes)
    planned = time.perf_counter()

    def fragment_of(process: int) -> bytes:
        arrays, numbers = catalog.in_tree_order(*assignment.chunks_of(process))
        files = plan_files(catalog.lengths, layout, (arrays, numbers))
        table = chunk_table(files, np.zeros(len(arrays), np.uint32))
        table[:, 5] = table[:, 3] % (1 << 32)  # any checksums
        sizes = [file.size for file in files]
        return make_fragment(catalog, ProcessInfo(process, processes, token), token, table, sizes).encode()

    fragments = [fragment_of(0)]
    told = time.perf_counter()
    fragments += [fragment_of(process) for process in range(1, processes)]
    received = time.perf_counter()
    decoded = (Fragment.decode(data, process) for process, data in enumerate(fragments))
    index, _ = merge_fragments(catalog, decoded, processes)
    put_together = time.perf_counter()
    _, encoded_index = index.encode(node_file="d/index", database_id=bytes(16), created_ns=0)
    encoded = time.perf_counter()
    return Scale(
        processes=processes,
        leaves=leaves,
        chunks=int(catalog.starts[-1]),
        plan_seconds=planned - began,
        fragment_seconds=told - planned,
        merge_seconds=put_together - received,
        index_seconds=encoded - put_together,
        fragments_bytes=sum(map(len, fragments)),
        index_bytes=len(encoded_index),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def write_checkpoint(folder: Path, processes: int, leaves: int) -> str:
    """Write the checkpoint of such a tree, all of zeros; the data files are sparse, and hold one leaf only.

    Args:
        folder: Where it is written.
        processes: How many processes have saved it.
        leaves: How many leaves the tree has.

    Returns:
        The leaf that can be read, as ``select=`` takes it.
    """
    names, described = make_tree(processes, leaves, kind="numpy")
    layout, token = Layout(), uuid.uuid4().hex[:8]
    catalog = Catalog(names, described, layout)
    assignment = write_assignment(catalog, processes)
    zeros = catalog.column(lambda encoding: crc32c(bytes(encoding.spec.chunk_nbytes)), np.uint32)
    chosen = len(names) // 2 // SHAPES * SHAPES  # a small one
    checksum = int(zeros[chosen]).to_bytes(4, "little")
    (folder / "state" / "d").mkdir(parents=True)

    def fragment_of(process: int) -> Fragment:
        arrays, numbers = catalog.in_tree_order(*assignment.chunks_of(process))
        files = plan_files(catalog.lengths, layout, (arrays, numbers))
        table = chunk_table(files, zeros[arrays])
        made = make_fragment(
            catalog, ProcessInfo(process, processes, token), token, table, [file.size for file in files]
        )
        ends = made.offsets + made.lengths - len(checksum)
        for number, (path, size) in enumerate(zip(made.paths, made.sizes, strict=True)):
            with (folder / "state" / path).open("wb") as file:
                file.truncate(size)
                for end in ends[(made.files == number) & (table[:, 0] == chosen)].tolist():
                    file.seek(end)
                    file.write(checksum)
        return made

    index, files = merge_fragments(catalog, map(fragment_of, range(processes)), processes)
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=0)
    # Any array will do: what is wanted is the structure of a dictionary.
    structure = flatten(nested(names, np.zeros(1))).structure
    tree = encode_document("tree", {"tree": to_document(structure, catalog.documents(described))})
    for path, content in {"d/index": nodes, "manifest.ocdbt": manifest, "tree.json": tree}.items():
        (folder / "state" / path).write_bytes(content)
        files[path] = FileRecord(len(content), crc32c(content))
    record = CheckpointRecord(items={"state": ItemRecord("state", "pytree", files)}, time=0.0)
    (folder / "checkpoint.json").write_bytes(record.encode())
    return catalog.names[chosen].replace(".", "/")


def nested(names: Sequence[str], value: object) -> dict[str, Any]:
    """Return nested dictionaries whose leaves have these names."""
    tree: dict[str, Any] = {}
    for name in names:
        *above, last = name.split(".")
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


@dataclass(frozen=True, slots=True)
class Opened:
    """What it takes to open a checkpoint of many processes and to read one leaf.

    Attributes:
        open_cpu_seconds: Of this process, without imports.
        open_bytes: Bytes that it has read.
        open_memory_bytes: Memory that it has taken in addition to what was there before.
    """

    open_cpu_seconds: float
    open_bytes: int
    open_memory_bytes: int


def open_one(folder: Path, name: str) -> Opened:
    """Read one leaf of a checkpoint in this process, which has read nothing of it before."""
    with tempfile.TemporaryDirectory() as small:  # what a first load imports is no part of it
        hf.save(f"{small}/one", {"a": np.zeros(3)})
        hf.load(f"{small}/one", select="a")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak of memory
    memory, read = memory_bytes("VmRSS"), bytes_read()
    began = time.process_time()
    found = hf.load(folder, select=name)
    seconds = time.process_time() - began
    assert found
    return Opened(seconds, bytes_read() - read, memory_bytes("VmHWM") - memory)


def memory_bytes(kind: str) -> int:
    """Return the memory of this process: ``VmRSS`` is what it has, ``VmHWM`` the most that it has had."""
    facts = Path("/proc/self/status").read_text(encoding="ascii")
    return int(facts.split(f"{kind}:", 1)[1].split("kB", 1)[0]) << 10


def bytes_read() -> int:
    """Return how many bytes this process has read, from files or the cache of the system."""
    facts = Path("/proc/self/io").read_text(encoding="ascii")
    return int(facts.split("rchar: ", 1)[1].split("\n", 1)[0])


def open_apart(processes: int, leaves: int) -> Opened:
    """Write a checkpoint and read a leaf of it, each in a new process."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "checkpoint"
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            name = pool.submit(write_checkpoint, folder, processes, leaves).result()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(open_one, folder, name).result()


def measure_apart(processes: int, leaves: int) -> Scale:
    """Measure in a new process, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, processes, leaves).result()


def table(results: Sequence[Scale]) -> str:
    """Return the measurements, one line for each number of processes."""
    head = (
        "processes",
        "leaves",
        "chunks",
        "plan",
        "fragment",
        "merge",
        "index",
        "all",
        "fragments",
        "index file",
        "peak memory",
    )
    rows = [
        (
            f"{r.processes:,}",
            f"{r.leaves:,}",
            f"{r.chunks:,}",
            *(f"{s:.2f} s" for s in (r.plan_seconds, r.fragment_seconds, r.merge_seconds, r.index_seconds, r.seconds)),
            f"{r.fragments_bytes / 1e6:.1f} MB",
            f"{r.index_bytes / 1e6:.1f} MB",
            f"{r.peak_bytes / 2**30:.2f} GiB",
        )
        for r in results
    ]
    return aligned(head, rows)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, its columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join("  ".join(line) for line in lines)


def commit_table(results: Sequence[Protocol]) -> str:
    """Return the simulated commits, one line for each number of processes, and how the figures grow with it."""
    head = (
        "processes",
        "save",
        "commit",
        "bytes out of process 0",
        "requests to it",
        "values in it",
        "requests to the store",
        "files",
        "record",
    )
    figures = [
        (
            r.save_seconds,
            r.commit_seconds,
            r.primary_bytes_out,
            r.coordinator_requests,
            r.coordinator_bytes,
            r.store_requests,
            r.files,
            r.record_bytes,
        )
        for r in results
    ]
    rows: list[Sequence[str]] = [
        (
            f"{r.processes:,}",
            f"{r.save_seconds:.2f} s",
            f"{r.commit_seconds:.2f} s",
            f"{r.primary_bytes_out / 1e6:.2f} MB",
            f"{r.coordinator_requests:,}",
            f"{r.coordinator_bytes / 1e6:.2f} MB",
            f"{r.store_requests:,}",
            f"{r.files:,}",
            f"{r.record_bytes / 1e3:.0f} kB",
        )
        for r in results
    ]
    counts = [r.processes for r in results]
    if len(set(counts)) > 1:
        powers = [power(counts, column) for column in zip(*figures, strict=True)]
        rows.append(("grows as", *(f"P^{found:.2f}" for found in powers)))
        rows.append((f"P log P: P^{power(counts, [p * math.log(p) for p in counts]):.2f}", *[""] * len(powers)))
    return aligned(head, rows)


def power(counts: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent with which values grow, from the smallest number of processes to the largest."""
    (fewest, first), (most, last) = min(zip(counts, values, strict=True)), max(zip(counts, values, strict=True))
    return math.nan if 0 in (first, last) else math.log(last / first) / math.log(most / fewest)


def fault_table(found: Sequence[Outcome]) -> str:
    """Return what came of the saves in which something happened to processes, a line for each kind of outcome."""
    rows = [
        (
            one.what,
            f"{one.points}",
            f"{one.first} ... {one.last}" if one.last != one.first else one.first,
            one.told or "nothing",
            f"{one.seconds:.1f} s",
            "yes" if one.committed else "no",
        )
        for one in found
    ]
    return aligned(("what happens", "calls", "from the call on", "the others are told", "after", "committed"), rows)


def lost_host_table(found: Sequence[LostHost]) -> str:
    """Return what came of the loss of one host, a line for each number of hosts."""
    rows = [
        (
            f"{one.hosts}",
            f"{one.lost_host_store_step}",
            f"{one.lost_host_local_step}",
            f"{one.lost_host_resumed}",
            f"{one.lost_host_store_bytes:,}",
            f"{one.lost_host_peer_bytes:,}",
        )
        for one in found
    ]
    head = ("hosts", "newest in the store", "newest local", "resumed", "bytes from the store", "bytes from other hosts")
    return aligned(head, rows)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure for each number of processes and show the results.

    Args:
        arguments: Of the command line.
        write: Where the text goes.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--processes", type=int, action="append", help="the number of processes; may be repeated")
    parser.add_argument(
        "--leaves", type=int, default=10_000, help=f"leaves of the tree, at most {CHUNKS:,} chunks in all"
    )
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that processes wait for each other")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each number of processes")
    options = parser.parse_args(arguments)
    plans, opened, commits, restored, lost = [], [], [], [], []
    for count in options.processes or [64, 256, 1024, 4096]:
        leaves = min(options.leaves, CHUNKS // count)
        plans.append(measure_apart(count, leaves))
        opened.append(open_apart(count, leaves))
        commits.append(Simulation(count).save()[0])
        restored.append(restore(min(count, MOST)))
        hosts = min(count, MOST_HOSTS)
        lost.append(lose_a_host(hosts, hosts // 2))
        if options.json:
            found = (plans[-1], opened[-1], commits[-1], restored[-1], lost[-1])
            write(json.dumps({name: value for one in found for name, value in asdict(one).items()}))
    if options.json:
        return
    write("The work of process 0 for a tree whose leaves are each divided among all processes")
    write(table(plans))
    write("\nReading one leaf of such a tree")
    rows = [
        (
            f"{plan.processes:,}",
            f"{plan.leaves:,}",
            f"{one.open_cpu_seconds:.3f} s",
            f"{one.open_bytes / 1e6:.2f} MB",
            f"{one.open_memory_bytes / 1e6:.0f} MB",
        )
        for plan, one in zip(plans, opened, strict=True)
    ]
    write(aligned(("processes", "leaves", "processor time", "bytes read", "memory"), rows))
    write("\nThe commit of a small tree with a generator of each process; the store takes 30 ms for a request")
    write(commit_table(commits))
    write("\nA restore of replicas; what all of them read from the store, as a multiple of the checkpoint")
    shown = [(f"{r.replicas}", f"{r.restore_store_ratio:.2f}x", f"{r.restore_seconds:.2f} s") for r in restored]
    write(aligned(("replicas", "read", "restore"), shown))
    write(
        f"\nSomething happens to one of 16 processes at each of its calls; the others wait for {options.patience:g} s"
    )
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # the warnings of saves that are meant to fail
    write(fault_table(list(outcomes(timeout=options.patience))))
    write("After each of them, the checkpoint was whole or did not exist, and the next save was committed.")
    write("\nA host is lost with its memory; the others have local steps, and the run is started again")
    write(lost_host_table(lost))


if __name__ == "__main__":
    main()
