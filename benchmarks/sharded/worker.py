"""One process of a program that saves or loads together; prints its measurements as one line of JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..disk import bytes_on_disk, make_cold
from ..memory import PeakMemory
from ..workloads import WORKLOADS, Workload, forget_noise
from . import load_sharded_peer
from .base import Program, ShardedPeer, Tree, part_of

if TYPE_CHECKING:
    from collections.abc import Callable


def measure(peer: ShardedPeer, workload: Workload, operation: str, path: Path) -> dict[str, Any]:
    """Measure one operation, ``save`` or ``load``, from the meeting of all processes until this one is done."""
    _warm_up(peer, path.with_name(f"{path.name}.warm"))
    if operation == "save":
        tree = peer.hold(dict(workload.arrays()))
        forget_noise()
        gc.collect()
        measured = _timed(peer, "save", lambda: peer.save(path, tree))
        if peer.program.index == 0:
            measured["disk_bytes"] = bytes_on_disk(path)
        return measured
    cold = make_cold(path, system_wide=workload.name != "tiny") if peer.program.index == 0 else None
    loaded: list[Tree] = []
    measured = _timed(peer, "load_native", lambda: loaded.append(peer.load(path, workload.shapes)))
    rise = measured["load_native_memory"]
    measured["load_native_memory"] = None if rise is None else rise - workload.nbytes // peer.program.count
    if peer.verified:
        _verify(peer, loaded[0], workload)
    return {**measured, "cold": cold}


def _warm_up(peer: ShardedPeer, folder: Path) -> None:
    workload = WORKLOADS["tiny"]()
    if peer.program.index == 0:
        folder.mkdir()
    peer.meet()
    peer.save(folder / "saved", peer.hold(dict(workload.arrays())))
    peer.meet()
    peer.load(folder / "saved", workload.shapes)
    peer.meet()
    if peer.program.index == 0:
        shutil.rmtree(folder)
        os.sync()


def _timed(peer: ShardedPeer, metric: str, action: Callable[[], object]) -> dict[str, Any]:
    peer.meet()
    memory = PeakMemory()
    began = time.perf_counter()
    action()
    return {f"{metric}_seconds": time.perf_counter() - began, f"{metric}_memory": memory.rise()}


def _verify(peer: ShardedPeer, tree: Tree, workload: Workload) -> None:
    parts = dict(peer.parts(tree))
    for name, expected in workload.arrays():
        if not np.array_equal(parts.pop(name), part_of(expected, peer.program)):
            raise AssertionError(f"{name} did not come back as it was saved")
    if parts:
        raise AssertionError(f"leaves that were never saved: {sorted(parts)[:3]}")


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("peer", "workload", "operation"):
        parser.add_argument(name)
    parser.add_argument("path", type=Path)
    for name in ("index", "count", "port"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    program = Program(index=options.index, count=options.count, port=options.port)
    peer = load_sharded_peer(options.peer)(program)
    try:
        measured = measure(peer, WORKLOADS[options.workload](), options.operation, options.path)
        peer.meet()  # no process leaves while another may still need the services of process 0
    finally:
        peer.close()
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    _main()
