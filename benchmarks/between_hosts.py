"""``python -m benchmarks.between_hosts``: how fast a host gets the file of a local step from another one.

Two processes of this machine, connected by its loopback interface: one has a file, and the other one reads it into
memory. The contenders take turns: the stream of bytes that ``hf.Local`` uses, the store of torch.distributed, and the
coordination service of jax. The stores have their server in a third process, as in a program whose process 0 has
neither part: all that two hosts exchange passes through it. Values of stores are at most ``--piece`` large: a message
of gRPC, which jax's service uses, has 4 MiB at most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from holdfast.engine.manager.peers import Peer, PeerServer

_TOKEN = "benchmark"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _serve_torch(port: int, ready: Any) -> None:
    import torch.distributed

    kept: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    ready.send(True)
    ready.recv()
    del kept


def _serve_jax(port: int, ready: Any) -> None:
    from jax._src.lib import _jax  # type: ignore[attr-defined]  # Only the benchmark needs the service without the rest of jax.distributed.

    kept = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", 2)
    ready.send(True)
    ready.recv()
    kept.shutdown()


def _torch_client(port: int) -> tuple[Callable[[str, bytes], Any], Callable[[str], bytes]]:
    import torch.distributed

    store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False, wait_for_workers=False
    )
    return store.set, store.get


def _jax_client(port: int, number: int) -> tuple[Callable[[str, bytes], Any], Callable[[str], bytes]]:
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    client = _jax.get_distributed_runtime_client(f"127.0.0.1:{port}", number, init_timeout=60)
    client.connect()
    return client.key_value_set_bytes, lambda key: client.blocking_key_value_get_bytes(key, 60_000)


_CLIENTS: dict[str, Callable[[int, int], Any]] = {
    "torch's store": lambda port, _: _torch_client(port),
    "jax's coordination service": _jax_client,
}


def _give(name: str, port: int, path: str, piece: int, pipe: Any) -> None:
    """Run in the process that has the file: put it into the store, piece by piece, each time that it is asked."""
    put, _ = _CLIENTS[name](port, 0)
    pipe.send(True)
    while (turn := pipe.recv()) is not None:
        content = memoryview(Path(path).read_bytes())
        for start in range(0, len(content), piece):
            put(f"{turn}/{start}", bytes(content[start : start + piece]))


_SERVERS: dict[str, Callable[[int, Any], None]] = {
    "torch's store": _serve_torch,
    "jax's coordination service": _serve_jax,
}


def _serve_peers(root: str, pipe: Any) -> None:
    server = PeerServer(root, _TOKEN, "127.0.0.1")
    pipe.send(server.address)
    pipe.recv()
    server.close()


def _through_store(name: str, path: Path, size: int, piece: int, rounds: int) -> list[float]:
    context, port = multiprocessing.get_context("spawn"), _free_port()
    server_end, served = context.Pipe()
    giver_end, given = context.Pipe()
    server = context.Process(target=_SERVERS[name], args=(port, served), daemon=True)
    server.start()
    server_end.recv()
    giver = context.Process(target=_give, args=(name, port, str(path), piece, given), daemon=True)
    giver.start()
    answer, answers = context.Pipe(duplex=False)
    taker = context.Process(target=_take, args=(name, port, giver_end, size, piece, rounds, answers), daemon=True)
    taker.start()
    seconds: list[float]
    seconds, content = answer.recv()
    for process in (taker, giver, server):  # A client of jax ends its process when the service has gone.
        process.kill()
    if content != path.read_bytes():
        raise RuntimeError(f"{name}: other bytes came back")
    return seconds


def _take(name: str, port: int, giver: Any, size: int, piece: int, rounds: int, answers: Any) -> None:
    """Run in the process that gets the file, and send the seconds of each time, and what it got."""
    _, get = _CLIENTS[name](port, 1)
    giver.recv()
    memory, seconds = np.empty(size, np.uint8), []
    for turn in range(rounds):
        began = time.perf_counter()
        giver.send(turn)
        for start in range(0, size, piece):
            value = get(f"{turn}/{start}")
            memory[start : start + len(value)] = np.frombuffer(value, np.uint8)
        seconds.append(time.perf_counter() - began)
    answers.send((seconds, memory.tobytes()))


def _through_stream(path: Path, size: int, rounds: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    end, served = context.Pipe()
    server = context.Process(target=_serve_peers, args=(str(path.parent), served), daemon=True)
    server.start()
    peer = Peer("the other host", end.recv(), _TOKEN)
    memory, seconds = np.empty(size, np.uint8), []
    for _ in range(rounds):
        began = time.perf_counter()
        peer.read(path.name, 0, memory.data)
        seconds.append(time.perf_counter() - began)
    if memory.tobytes() != path.read_bytes():
        raise RuntimeError("the stream: other bytes came back")
    peer.close()
    server.kill()
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.between_hosts", description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="MiB of the file (default: 128)")
    parser.add_argument("--piece", type=int, default=2 << 20, help="bytes of a value of a store (default: 2 MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    size = options.mib << 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(np.random.default_rng(0).bytes(size))
        found = {"holdfast's stream": _through_stream(path, size, options.rounds)}
        for name in _CLIENTS:
            found[name] = _through_store(name, path, size, options.piece, options.rounds)
    best = median(found["holdfast's stream"])
    for name, seconds in found.items():
        middle = median(seconds)
        print(f"{name:28} {options.mib / middle:8.0f} MiB/s {middle / best:8.1f} times the stream's time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
