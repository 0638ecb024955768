"""What every test needs, set before anything imports a framework: jax on four CPU devices, torch on one thread, and
property tests that try the same examples every time, so that a test that passes here passes elsewhere.

Torch's threads wait for each other busily: beside other work on two cores, that takes many times as long as one thread.

Tests run in parallel. Programs of several processes run one after the other, on one worker: beside each other they take
each other's processor until their timeouts pass. Programs that are alone run on others.
"""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import os
import pkgutil
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.versions import older

os.environ["JAX_PLATFORMS"] = os.environ.get("HOLDFAST_TESTS_JAX_PLATFORMS", "cpu")  # others only with `-m gpu`
# XLA's optimizations cost more than the small programs of the tests take to run, and so do its compiler of fusions and
# compiling one program in many parts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
if not older("jax", "0.10"):
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if older("jax", "0.11"):  # jax 0.12 ends the process at a flag that it does not know, such as this one
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of programs import holdfast: the first of them compiles its modules for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import settings  # after the environment is set

import holdfast.engine

pytest_plugins = ["tests.fixtures"]

# Temporary directories are in memory where there is enough: tests sync files thousands of times. Packages that write
# and read files are tested on a disk, which is stricter (direct I/O); with PYTEST_DEBUG_TEMPROOT=/tmp, everything is.
MEMORY = "/dev/shm"
ON_DISK = ("arrays", "checkpoint", "storage")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

ROOT = Path(__file__).parents[1]

# What jax compiles for a test is compiled once, also for other workers and the programs that tests start.
# What jax 0.5.3 reads from this cache writes to memory that is not its own.
if "PYTEST_XDIST_WORKER" not in os.environ and not older("jax", "0.8"):
    COMPILED = tempfile.TemporaryDirectory(prefix="holdfast-tests-jax-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# A package keeps an object when its name is first used: it must not be one that a test has replaced for a while.
for package in pkgutil.iter_modules(holdfast.engine.__path__):
    module = importlib.import_module(f"holdfast.engine.{package.name}")
    for name in getattr(module, "__all__", ()):
        getattr(module, name)

settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects with the garbage collector off, and leaves what was collected out of its later searches.

    Tests and what they import are millions of objects that stay: searching them takes as long as collecting them.
    Later searches are fewer than usual, too: jax and torch make many objects, and hardly any cycles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Leaves what a module and its imports have made out of later searches, too: loops look through all objects."""
    global _modules
    try:
        return (yield)
    finally:
        if nextitem is not None and (nextitem.path != item.path or len(sys.modules) > _modules + 100):
            _modules = len(sys.modules)
            gc.collect()
            gc.freeze()


_modules = 0  # those that were imported when the objects were last left out


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    """Lets each worker begin with another folder: what one has compiled in a new checkout, the others only read."""
    report = yield
    if collector.path == ROOT / "tests" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        first = len(report.result) * int(worker[2:]) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the groups that take longest first, and skips tests for newer versions of a package than the installed one.

    At the end, no worker is left with a minute of programs while the others have nothing to do.
    """
    leave_to_the_sweep(items)
    ranked = {
        path: (rank_of(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else 4, path)
        for path in {item.path for item in items}
    }
    items.sort(key=lambda item: ranked[item.path])
    for item in items:
        for package, needed in (mark.args for mark in item.iter_markers("needs")):
            if older(package, needed):
                item.add_marker(pytest.mark.skip(f"{package} {version(package)} is installed, {needed} is needed"))


def leave_to_the_sweep(items: list[pytest.Item]) -> None:
    """Marks cases of tests with ``one_in``: those that stay are spread evenly over the values of each parameter."""
    positions: collections.Counter[str] = collections.Counter()
    for item in items:
        chosen = item.get_closest_marker("one_in")
        if chosen is not None and item.get_closest_marker("sweep") is None:
            test = item.nodeid.partition("[")[0]
            if positions[test] * 0.618034 % 1 >= 1 / chosen.args[0]:
                item.add_marker(pytest.mark.sweep)
            positions[test] += 1


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.path.parent.name not in ON_DISK:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-tests-", ignore_cleanup_errors=True) as found:
        yield Path(found)


# How modules name what starts connected processes, or takes seconds to start for the first of them.
STARTED = re.compile(r"\b(run_process|run_processes|run_outcomes|run_together|job: Job)\b")
MARKED = re.compile(r'xdist_group\("(\w+)"\)')


@functools.cache
def group_of(module: str) -> str:
    """Returns the group of a module, by its path: all tests of a group run on one worker."""
    text = (ROOT / module).read_text(encoding="utf-8")
    marked = MARKED.search(text)
    return marked[1] if marked else "processes" if STARTED.search(text) else module


PROGRAMS = re.compile(r"^(import subprocess|from tests\.starts import)", re.MULTILINE)


@functools.cache
def rank_of(module: str) -> int:
    """Returns when a module's turn is: connected processes first, then other groups, then programs of their own."""
    group = group_of(module)
    if group == "processes":
        return 0
    if group != module:
        return 1
    return 2 if PROGRAMS.search((ROOT / module).read_text(encoding="utf-8")) else 3


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Asks for two workers more than there are processors: tests wait for others, for programs or for a disk."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives workers whole modules, whose servers, compiled functions and reference runs are then made once.

    The marks for ``--dist=loadgroup`` of pytest-xdist 3.8 have no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda test: group_of(test.partition("::")[0])
    return scheduler if config.getvalue("dist") == "loadgroup" else None
