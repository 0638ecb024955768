"""Saves of one handler in two parts, between which the program continues."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.storage import Location, as_location

Tree = dict[str, Any]


class Saves:
    """Saves with one handler, as a manager has one."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.handler = hf.PyTreeCheckpointHandler(**options)
        self._folders = (directory / str(number) for number in itertools.count())
        self.document = b""  # tree.json of the last save

    def prepare(self, tree: Any, **options: Any) -> Any:
        return self.handler.prepare(tree, snapshot=True, **options)

    def write(self, prepared: Any, **options: Any) -> Any:
        """Write what was prepared; return what another handler restores of it."""
        folder = self.folder()
        prepared.merge(folder, [prepared.write(folder, ProcessInfo())])
        self.document = (folder / "tree.json").read_bytes()
        return hf.PyTreeCheckpointHandler().restore(folder, **options)

    def folder(self) -> Location:
        folder = as_location(next(self._folders))
        folder.path.mkdir(parents=True)
        return folder

    def steps(self, gpu: Any, tree: Tree, *, settled: bool = False) -> Iterator[int]:
        """Save tensors that change in every step, and again once their snapshot is taken; compare what was saved."""
        for step in range(3):
            for number, value in enumerate(tree.values()):
                gpu.launch(lambda value=value, number=number, step=step: value.fill_(10 * step + number))
            if settled:
                gpu.settle()
            prepared = self.prepare(tree)
            for value in tree.values():
                gpu.launch(lambda value=value: value.fill_(-1))
            gpu.settle()
            found = self.write(prepared)
            del prepared
            assert [set(array.reshape(-1).tolist()) for array in found.values()] == [
                {10 * step + number} for number in range(len(tree))
            ]
            yield step


def shared_saves(directory: Path, tree: Tree, handlers: list[Any], members: list[ProcessInfo], spoil: Any) -> Tree:
    """Save a tree as several processes, each of which writes its share; return what is restored."""
    pairs = list(zip(handlers, members, strict=True))
    prepared = [handler.prepare(tree, snapshot=True, member=member) for handler, member in pairs]
    spoil()
    folder = as_location(directory)
    folder.make_directory()
    fragments = [one.write(folder, member) for one, member in zip(prepared, members, strict=True)]
    prepared[0].merge(folder, fragments)
    found: Tree = hf.PyTreeCheckpointHandler().restore(folder)
    return {name: np.asarray(value) for name, value in found.items()}
