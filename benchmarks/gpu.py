"""``python -m benchmarks.gpu``: tests and measurements on a machine with an NVIDIA GPU that has no network.

``wheels`` runs where there is a network. It fills a folder with the packages that an environment with torch, jax, flax
and lightning may lack. ``run`` takes that folder along: it unpacks what is missing to a temporary folder, runs the
tests that need a GPU and ``benchmarks.blocked --device cuda``, each part for a limited time, and shows the tables.
Where ``OUT`` is set, or ``--out`` given, that folder gets what was printed, and each measurement as a line of JSON as
soon as it is there.
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
import threading
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
LIMIT = 60_000_000  # bytes of all wheels

WITH_FRAMEWORKS = {"numpy", "ml_dtypes"}  # these come with jax and torch, whose versions must not be replaced
FOR_TESTS = ("hypothesis", "pytest")  # of the extra "dev"
THEIR_NEEDS = ("iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers", "typing_extensions")
GLIBC = (17, 24, 26, 27, 28, 31)  # minor versions of glibc 2 that wheels are built for

SECONDS = 470
RESERVE = 15.0  # seconds in which the measurements show their tables
MARK = "pytest.mark.gpu"
# By whether there is a GPU. One process has arrays of torch and of jax there, which by itself takes most of the memory.
TEST_ENVIRONMENT: dict[bool, dict[str, str]] = {
    False: {},
    True: {"HOLDFAST_TESTS_JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def requirements() -> list[str]:
    """Return what the tests and the measurements need beside the frameworks, with the ranges of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for each in project["dependencies"] if _name(each) not in WITH_FRAMEWORKS]
    needed += [each for each in project["optional-dependencies"]["dev"] if _name(each) in FOR_TESTS]
    return [*needed, *THEIR_NEEDS]


def _name(requirement: str) -> str:
    return "".join(each if each.isalnum() or each in "._-" else " " for each in requirement).split()[0]


def load_wheels(folder: Path, python: str) -> int:
    """Fill a folder with wheels for Linux on x86-64; return their size in bytes.

    Args:
        folder: What is in there is deleted.
        python: The version of Python, such as "3.12".
    """
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    command = ["download", "--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    _pip(*command, *platforms, f"--constraint={ROOT / 'constraints.txt'}", f"--dest={folder}", *requirements())
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 1e6:6.1f} MB  {name}")
    return sum(sizes.values())


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def missing(folder: Path, needed: Sequence[str]) -> list[str]:
    """Return the requirements that pip would install from a folder, each with its version; installed ones suffice.

    Raises:
        subprocess.CalledProcessError: One is neither installed nor in the folder.
    """
    told = _pip("install", "--dry-run", "--report=-", "--no-index", f"--find-links={folder}", *needed)
    chosen = [each["metadata"] for each in json.loads(told)["install"]]
    return [f"{each['name']}=={each['version']}" for each in chosen]


def unpack(wheels: Path, site: Path) -> None:
    """Install what this Python lacks into a folder, and say what that is, and what is nowhere."""
    try:
        chosen = missing(wheels, requirements())
    except subprocess.CalledProcessError:
        chosen = []
        for each in requirements():  # find out which
            try:
                chosen += missing(wheels, [each])
            except subprocess.CalledProcessError:
                print(f"{each}: neither installed nor in {wheels}")
    print(f"carried along: {', '.join(chosen) or 'nothing'}")
    if chosen:
        offline = ["--no-index", f"--find-links={wheels}", "--no-deps", "--no-compile", "--no-cache-dir"]
        _pip("install", *offline, f"--target={site}", *dict.fromkeys(chosen))


def run(options: argparse.Namespace) -> int:
    """Run all parts; return 1 where a test failed or a part could not end."""
    ends = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "results.jsonl"
    python = [sys.executable, "-m"]
    failed = False
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as site, (options.out / "output.txt").open("wb") as output:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT / "src", ROOT))),
            "PYTHONUNBUFFERED": "1",
        }
        wheels = [f"--wheels={options.wheels}", "unpack", f"--site={site}"]
        parts: tuple[tuple[str, float, list[str], dict[str, str]], ...] = (
            ("packages", 0.1, [*python, "benchmarks.gpu", *wheels], {}),
            ("tests", 0.3, [*python, "pytest", *tests(options.device)], TEST_ENVIRONMENT[options.device == "cuda"]),
            ("measurements", 1.0, [*python, "benchmarks.blocked", *_measured(options), f"--lines={lines}"], {}),
        )
        for name, share, command, more in parts:
            seconds = max(1.0, min(share * options.seconds, ends - time.monotonic()))
            if name == "measurements":
                command.append(f"--seconds={max(1.0, seconds - RESERVE):.0f}")
            _tell(output, f"== {name}, at most {seconds:.0f} s: {' '.join(command[1:])}\n".encode())
            began = time.monotonic()
            status = _run(command, environment | more, seconds, output)
            fact = {"part": name, "status": status, "seconds": round(time.monotonic() - began, 1)}
            with lines.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(fact)}\n")
            _tell(output, f"== {name}: {json.dumps(fact)}\n\n".encode())
            failed = failed or status != 0
    return int(failed)


def tests(device: str) -> list[str]:
    """Return the arguments for pytest: the tests that need a GPU, or the same modules without one."""
    modules = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    marked = "gpu" if device == "cuda" else "not gpu and not sweep"
    # A GPU's packages may be older or newer than those that the tests are developed with, and warn of other things.
    return [
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        *(str(each.relative_to(ROOT)) for each in modules),
    ]


def _measured(options: argparse.Namespace) -> list[str]:
    sizes = [f"--gigabytes={size}" for size in options.gigabytes or ()]
    return [f"--device={options.device}", f"--directory={options.directory}", f"--rounds={options.rounds}", *sizes]


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float, output: BinaryIO) -> int | None:
    """Run a command, with what it starts, for a limited time; return its status, or None where it was stopped."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            _tell(output, line)
    process.wait()
    timer.cancel()
    return None if stopped.is_set() else process.returncode


def _tell(output: BinaryIO, text: bytes) -> None:
    for file in (output, sys.stdout.buffer):
        file.write(text)
        file.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the status of the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="the folder of wheels; build/gpu-wheels unless given"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="fill the folder; needs a network")
    wheels.add_argument("--python", default="3.12", help="the version of Python on that machine; 3.12 unless given")
    commands.add_parser("unpack", help="install what this Python lacks into a folder").add_argument("--site", type=Path)
    runs = commands.add_parser("run", help="test and measure")
    runs.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    runs.add_argument("--gigabytes", type=float, action="append", help="1, 8 and 20 unless given; may be repeated")
    runs.add_argument(
        "--rounds", type=int, default=5, help="saves of each size that are counted, at most; 5 unless given"
    )
    runs.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything; {SECONDS} unless given")
    runs.add_argument("--directory", type=Path, default=Path("runs"), help="the disk to measure; ./runs unless given")
    runs.add_argument("--out", type=Path, default=os.environ.get("OUT", "runs/gpu"), help="the folder of the results")
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        size = load_wheels(options.wheels, options.python)
        print(f"{size / 1e6:6.1f} MB in {options.wheels}, of {LIMIT / 1e6:.0f} MB")
        return int(size > LIMIT)
    if options.command == "unpack":
        unpack(options.wheels, options.site)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
