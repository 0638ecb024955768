"""Forks processes that have imported a framework already; started by ``harness.py``.

Reads one request as a line of JSON, runs its processes, answers with a line of their exit statuses, and so on until
its input ends. The launcher of a framework is a fork of the one with the engine, which is imported once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import tests.endings  # noqa: F401 - before what registers functions of atexit
from tests.processes.harness import Process

# All of these are packages of modules that import no framework.
PACKAGES = ("holdfast.engine", "holdfast.integrations.loop", "holdfast.integrations.graph")
# What processes would import one by one when they first use it, such as optimizers and FSDP in a second and a half.
IMPORTS = {
    "none": [
        "numpy",
        "pytest",
        "tensorstore",
        "backports.zstd",
        "packaging.version",
        "encodings.idna",
        "holdfast.graph",
    ],
    "jax": ["jax", "jax.numpy", "jax.experimental.multihost_utils"],
    "torch": [
        "torch",
        "torch.distributed",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
    ],
}


def serve(backend: str, *imports: str) -> None:
    warm_up([*IMPORTS[backend], *imports])
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        print(json.dumps(fork(*request["fork"]) if "fork" in request else launch(backend, request)), flush=True)


def fork(module: str, arguments: Sequence[str], folder: str) -> list[int]:
    """Forks a process that calls the function ``serve`` of a module; its input and output are pipes in a folder."""
    if os.fork() == 0:
        os.close(0)
        os.open(os.path.join(folder, "requests"), os.O_RDONLY)
        os.close(1)
        os.open(os.path.join(folder, "answers"), os.O_WRONLY)
        importlib.import_module(module).serve(*arguments)
        os._exit(0)
    return []


def warm_up(names: Iterable[str] = ()) -> None:
    """Imports all of the engine and some more, and leaves it out of the garbage collections of each process."""
    for name in [*IMPORTS["none"], *names]:
        with contextlib.suppress(ImportError):  # not all of them are in all versions
            importlib.import_module(name)
    for package in PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(found.name)
    gc.freeze()


def launch(backend: str, request: dict[str, Any]) -> list[int]:
    """Runs the processes of one request; returns their exit statuses, negative for signals."""
    wait, go = os.pipe()
    children = []
    for index in range(request["count"]):
        child = os.fork()
        if child == 0:
            os.close(go)
            run(backend, request, index, wait)
        children.append(child)
    os.close(wait)
    statuses = [os.waitpid(child, 0)[1] for child in children[1:]]
    os.close(go)  # process 0 runs what the others are connected by, and ends last
    statuses.insert(0, os.waitpid(children[0], 0)[1])
    return [os.waitstatus_to_exitcode(status) for status in statuses]


def run(backend: str, request: dict[str, Any], index: int, wait: int) -> None:
    """Is one process. Never returns."""
    folder = Path(request["folder"])
    log = os.open(folder / f"{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    status = 1
    try:
        faulthandler.enable()
        faulthandler.dump_traceback_later(request["timeout"], exit=True)
        value, error = None, None
        try:
            connect(backend, request, index)
            function, arguments = pickle.loads((folder / "work").read_bytes())
            kill = request["kill"]
            process = Process(index, request["count"], kill[1] if kill and kill[0] == index else None)
            value = function(process, *arguments)
            status = 0
        except BaseException as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        partial = folder / f"{index}.partial"
        partial.write_bytes(pickle.dumps((value, error)))
        partial.rename(folder / f"{index}.result")
        if index == 0:
            os.read(wait, 1)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Frameworks would wait at their exit for processes that have died.
        os._exit(status)


def connect(backend: str, request: dict[str, Any], index: int) -> None:
    """Connects this process with the others."""
    count, port = request["count"], request["port"]
    if backend == "jax":
        import jax

        os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={request['devices']}"
        configure: Any = jax.config.update
        initialize: Any = jax.distributed.initialize
        reach: dict[str, Any] = {
            "coordinator_bind_address": f"127.0.0.1:{port}",
            "cluster_detection_method": "deactivate",
        }
        if hasattr(jax.config, "jax_enable_recoverability"):  # since jax 0.6
            configure("jax_enable_recoverability", request["recoverable"])
            reach["heartbeat_timeout_seconds"] = 10  # until the others notice that a process is gone
        initialize(f"127.0.0.1:{port}", count, index, **reach)
    elif backend == "torch":
        import torch.distributed

        patience = timedelta(seconds=request["timeout"])
        # A process that ends while another still opens its connections fails that one.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        if request["store"] == "file":
            place = f"file://{request['folder']}/store"
            torch.distributed.init_process_group("gloo", place, patience, rank=index, world_size=count)
        else:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count)}
            torch.distributed.init_process_group("gloo", timeout=patience)


if __name__ == "__main__":
    serve(sys.argv[1])
