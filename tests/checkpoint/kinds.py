"""The kinds of checkpoint that are committed, alike for the tests: saved in editions, found whole or not at all."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.components import Checkpointable, read_state

_TOKENS = re.compile(r"(?<=/d/)[0-9a-f]{8}(?=\.)|(?<=state)\.[0-9a-f]{8}(?=/)")
STEP = 7


class Kind(ABC):
    """One kind of checkpoint.

    Attributes:
        name: What the tests call it.
    """

    name: str

    def path(self, place: str) -> str:
        """Returns the directory of the checkpoint itself, where its record is."""
        return place

    @abstractmethod
    def save(self, place: str, edition: int) -> None:
        """Saves an edition in the place of what is there."""

    @abstractmethod
    def load(self, place: str) -> int:
        """Loads all that is there and returns its edition; every value of a whole checkpoint belongs to that."""

    def find(self, place: str) -> int | None:
        """Returns the edition that is there, which is whole; None if there is no checkpoint."""
        try:
            edition = self.load(place)
        except hf.CheckpointNotFoundError:
            return None
        assert hf.verify(self.path(place)).ok
        return edition

    def files(self, place: str) -> list[str]:
        """Returns the paths of all files but the events, without what tells those of one save from those of another."""
        paths = _paths(hf.storage.as_location(place), "")
        return sorted(_TOKENS.sub("", path) for path in paths if path != "events.jsonl")


def _paths(location: hf.storage.Location, prefix: str) -> list[str]:
    found: list[str] = []
    for entry in location.entries():
        path = f"{prefix}{entry.name}"
        found += _paths(location / entry.name, f"{path}/") if entry.is_directory else [path]
    return found


def tree(edition: int) -> dict[str, Any]:
    """Returns a tree whose leaves all tell the edition; trees of different editions have different leaves."""
    return {"edition": edition, "weights": np.full(1500, edition), f"only {edition}": np.full(3, edition)}


def edition_of(found: dict[str, Any]) -> int:
    """Returns the edition of a tree that was loaded, after comparing all of it."""
    edition: int = found["edition"]
    assert found.keys() == tree(edition).keys()
    assert all(np.all(value == edition) for value in found.values())
    return edition


class Tree(Kind):
    name = "tree"

    def save(self, place: str, edition: int) -> None:
        hf.save(place, tree(edition), overwrite=True)

    def load(self, place: str) -> int:
        return edition_of(hf.load(place))


class Step(Kind):
    """A step of a manager, which saves in the background."""

    name = "step"

    def path(self, place: str) -> str:
        return f"{place}/{STEP}"

    def save(self, place: str, edition: int) -> None:
        with hf.CheckpointManager(place) as manager:
            manager.save(STEP, tree(edition), force=True)
            manager.wait_until_finished()

    def load(self, place: str) -> int:
        reader = hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(read_only=True))
        assert reader.all_steps() in ([], [STEP])
        return edition_of(reader.restore())


class Part(Checkpointable):
    def __init__(self, edition: int = 0) -> None:
        self.values = np.full(20, edition)


class Whole(Checkpointable):
    """A tree of components; one of them is there in some editions only, as is a directory between two."""

    def __init__(self, edition: int = 0) -> None:
        self.edition = edition
        self.parts = {name: Part(edition) for name in _names(edition)}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return list(self.parts.items())


def _names(edition: int) -> list[str]:
    return ["a", "b/c"] if edition % 2 else ["a", "b/d"]


class Components(Kind):
    name = "components"

    def save(self, place: str, edition: int) -> None:
        Whole(edition).save_to_path(place, overwrite=True)

    def load(self, place: str) -> int:
        found = read_state(place)
        edition: int = found.pop("edition")
        assert found.keys() == set(_names(edition))
        for name in _names(edition):
            assert set(found[name]["values"].tolist()) == {edition}
            assert set(read_state(f"{place}/{name}")["values"].tolist()) == {edition}
        return edition


KINDS: dict[str, Kind] = {kind.name: kind for kind in (Tree(), Components(), Step())}


class TextFiles(hf.handlers.CheckpointHandler):
    """A handler of a user: ordinary files in ordinary folders, which it neither checks nor syncs."""

    def save(self, directory: hf.storage.Location, item: Any, *, suffix: str = ".txt", **kwargs: Any) -> None:
        for name, text in item.items():
            path = os.path.join(directory, name + suffix)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.write(descriptor, text.encode())
            os.close(descriptor)

    def restore(self, directory: hf.storage.Location, item: Any = None, *, suffix: str = ".txt", **kwargs: Any) -> Any:
        root = Path(directory)
        found = {str(path.relative_to(root))[: -len(suffix)]: path for path in root.rglob(f"*{suffix}")}
        return {name: path.read_text() for name, path in sorted(found.items()) if item is None or name in item}
