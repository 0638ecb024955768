"""Runs one operation of one contender in its own process, and prints the measurements as one line of JSON.

Every process first saves and loads a tiny tree, so that no import, thread pool or first touch of a code path is timed.
When it is about to begin it prints ``ready`` and waits for a line, upon which the runner frees memory for it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .disk import bytes_on_disk, make_cold, remove
from .memory import PeakMemory
from .peers import PEERS, load_peer
from .workloads import WORKLOADS, Workload, forget_noise, unnest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .peers.base import Peer, Tree

READY = "ready"
MEMCPY_REPEATS = 5
ASYNC_SAVES = 2  # the second one is reported: the first may still have to allocate its staging memory


def measure(peer_name: str, workload_name: str, operation: str, path: Path) -> dict[str, Any]:
    """Measure one operation: ``save``, ``load_numpy`` or ``load_native``.

    A save leaves its last checkpoint at ``path``, where a load expects it.
    """
    peer, workload = load_peer(peer_name), WORKLOADS[workload_name]()
    try:
        _warm_up(peer, PEERS[peer_name].loads, path.with_name(f"{path.name}.warm"))
        return (
            _measure_save(peer, workload, path)
            if operation == "save"
            else _measure_load(peer, workload, path, operation)
        )
    finally:
        peer.close()


def _warm_up(peer: Peer, loads: tuple[str, ...], folder: Path) -> None:
    workload = WORKLOADS["tiny"]()
    tree = peer.hold(dict(workload.arrays()))
    folder.mkdir()
    peer.save(folder / "saved", tree)
    if peer.asynchronous:
        peer.save_async(folder / "saved_async", tree)()
    for load in loads:
        getattr(peer, load)(folder / "saved", workload.shapes)
    shutil.rmtree(folder)


def _measure_save(peer: Peer, workload: Workload, path: Path) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    tree = peer.hold(dict(workload.arrays()))
    forget_noise()
    if peer.library == "torch" and peer.asynchronous:
        measured["memcpy_seconds"] = _memcpy_seconds(tree, workload.nbytes)
    gc.collect()
    os.sync()
    wait_for_start()
    memory = PeakMemory()
    measured["save_seconds"] = _seconds(lambda: peer.save(path, tree))
    measured["save_memory"] = memory.rise()
    measured["disk_bytes"] = bytes_on_disk(path)
    if peer.asynchronous:
        memory = PeakMemory()
        for _ in range(ASYNC_SAVES):
            remove(path)
            gc.collect()
            began = time.perf_counter()
            wait = peer.save_async(path, tree)
            measured["blocked_seconds"] = time.perf_counter() - began
            wait()
            measured["async_seconds"] = time.perf_counter() - began
        measured["async_memory"] = memory.rise()
    return measured


def _measure_load(peer: Peer, workload: Workload, path: Path, operation: str) -> dict[str, Any]:
    load: Callable[[Path, Mapping[str, Any]], Tree] = getattr(peer, operation)
    loaded: list[Tree] = []
    measured: dict[str, Any] = {"cold": make_cold(path, system_wide=workload.name != "tiny")}
    wait_for_start()
    memory = PeakMemory()
    measured[f"{operation}_seconds"] = _seconds(lambda: loaded.append(load(path, workload.shapes)))
    rise = memory.rise()
    measured[f"{operation}_memory"] = None if rise is None else rise - workload.nbytes
    if peer.verified:
        _verify(loaded[0], workload)
    return measured


def wait_for_start() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _memcpy_seconds(tree: Tree, nbytes: int) -> float:
    """Seconds to copy every leaf into warm memory, the least that a snapshot of mutable tensors costs."""
    staging = np.zeros(nbytes, np.uint8)
    leaves = [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in tree.values()]

    def copy() -> None:
        end = 0
        for leaf in leaves:
            staging[end : end + leaf.size] = leaf
            end += leaf.size

    copy()
    return sorted(_seconds(copy) for _ in range(MEMCPY_REPEATS))[MEMCPY_REPEATS // 2]


def _verify(tree: Tree, workload: Workload) -> None:
    loaded = unnest(tree)
    for name, expected in workload.arrays():
        found = np.asarray(loaded.pop(name))
        if found.dtype != expected.dtype or not np.array_equal(found, expected):
            raise AssertionError(f"{name} did not come back as it was saved")
    if loaded:
        raise AssertionError(f"leaves that were never saved: {sorted(loaded)[:3]}")


if __name__ == "__main__":
    _, peer, workload, operation, path = sys.argv
    print(json.dumps(measure(peer, workload, operation, Path(path))), flush=True)
