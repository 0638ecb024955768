"""Programs of several processes that write and read the same number of bytes without any format."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from ..peers.raw_disk import READ_SETTING, WRITE_SETTING, huge_pages, read, setting, write
from .base import Program, ShardedPeer, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..workloads import Array, Shape


class RawDisk(ShardedPeer):
    """Each process writes from and reads into warm memory, a file for each process in one directory."""

    verified: ClassVar[bool] = False

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._others: list[socket.socket] = []  # of process 0: every other process; of the others: process 0
        address = ("127.0.0.1", program.port)
        if program.index:
            self._others.append(_connected(address))
            return
        with socket.create_server(address) as server:
            self._others.extend(server.accept()[0] for _ in range(program.count - 1))

    @override
    def meet(self) -> None:
        if self.program.index:
            self._others[0].sendall(b".")
            self._others[0].recv(1)
            return
        for other in self._others:
            other.recv(1)
        for other in self._others:
            other.sendall(b".")

    @override
    def hold(self, arrays: Mapping[str, Array]) -> Tree:
        return {"nbytes": sum(array.nbytes for array in arrays.values()) // self.program.count}

    @override
    def save(self, path: Path, tree: Tree) -> None:
        path.mkdir(exist_ok=True)
        write(self._file(path), tree["nbytes"], *setting(WRITE_SETTING))
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        read(self._file(path), *setting(READ_SETTING))
        return {}

    def _file(self, path: Path) -> Path:
        return path / str(self.program.index)

    @override
    def parts(self, tree: Tree) -> Mapping[str, NDArray[np.float32]]:
        return {}

    @override
    def close(self) -> None:
        for other in self._others:
            other.close()


class RawDiskNewMemory(RawDisk):
    """Each process reads into memory that is new to it and all kept: the least that any load does."""

    @override
    def load(self, path: Path, shapes: Mapping[str, Shape]) -> Tree:
        memory = huge_pages(self._file(path).stat().st_size)
        read(
            self._file(path),
            *setting(READ_SETTING),
            memory=lambda _, start, count: memory[start : start + count],
        )
        return {"memory": memory}


def _connected(address: tuple[str, int]) -> socket.socket:
    while True:  # until process 0 listens; the runner ends a program that takes too long
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.01)
