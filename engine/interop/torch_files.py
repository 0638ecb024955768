"""Reads files of ``torch.save``, Lightning's ``.ckpt`` among them, without torch and without running anything.

Containers come back as they are, tensors as arrays; a module's state dict keeps its keys, such as ``layers.0.weight``,
whole. Objects of other classes cannot be had without running their code. In a Lightning checkpoint they are left out,
and named, wherever its weights and its optimizers' states do not lie; anywhere else, loading them is an error.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError
from ..item import Problem
from ..storage import Location
from ..tree.structure import MAX_DEPTH
from .pickled import Inert, Name, shown
from .source import SingleTree, StepDirectories
from .stored import StoredTree
from .stored_array import StoredArray, Unreadable
from .torch_archive import ZIP_MAGIC, TorchArchive, check_records
from .torch_objects import BUILDERS, form_of, plain_array, storage_finder
from .unpickling import unpickle

FORMAT = "torch"
LIGHTNING = "Lightning"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LIGHTNING_VERSION = "pytorch-lightning_version"
_NEEDED = ("state_dict", "optimizer_states")  # what a Lightning checkpoint is for
_VISITS = 200_000  # nodes of a tree, and as many again as its pickle has bytes: shared containers count each time
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    """Opens a file that ``torch.save`` wrote; see `source.Format`."""
    if names or not location.exists() or location.is_directory():
        return None
    with location.open_data() as reader:
        magic = reader.read(0, min(reader.size, len(_LEGACY_MAGIC))).tobytes()
        if magic == _LEGACY_MAGIC:
            raise DamagedCheckpointError(
                f"{location} is in the format of torch before 1.6; load it with torch.load and save it again"
            )
        if not magic.startswith(ZIP_MAGIC):
            return None
        size = reader.size
        try:
            archive = TorchArchive(reader)
            tree = read_object(archive)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{location} cannot be read as a file of torch.save: {error}") from error
    is_lightning = isinstance(tree, dict) and _LIGHTNING_VERSION in tree and "state_dict" in tree
    left: list[str] = []
    tree = without_objects(tree, left, len(archive.pickle), _NEEDED if is_lightning else None)

    def check() -> list[Problem]:
        with location.open_data() as reader:
            return [Problem(location.name, "", f"{name}: {what}") for name, what in check_records(reader, archive)]

    source = StoredTree.of(location, tree, size, check=check, left_out=left)
    step = tree.get("global_step") if is_lightning else None
    return SingleTree(
        format=LIGHTNING if is_lightning else FORMAT,
        location=location,
        source=source,
        nbytes=size,
        step=step if type(step) is int and step >= 0 else None,
    )


def recognise_steps(_location: Location, _names: frozenset[str]) -> StepDirectories | None:
    """There are no directories of steps in this format."""
    return None


def read_object(archive: TorchArchive, file: str = "") -> Any:
    """Reads the object of an archive: containers of :class:`StoredArray`, plain values, and what stands for others.

    Args:
        archive: The archive.
        file: The path of its file inside the tree's location.

    Raises:
        DamagedCheckpointError: It cannot be read.
    """
    return unpickle(archive.pickle, BUILDERS, storage_finder(archive.records, file, archive.byte_order))


def without_objects(tree: Any, left_out: list[str], pickle_bytes: int, needed: tuple[str, ...] | None = None) -> Any:
    """Replaces or leaves out what is no data.

    Args:
        tree: What a pickle described.
        left_out: One line is added for each entry that is left out.
        pickle_bytes: Length of the pickle, which limits how often shared containers are looked into.
        needed: Keys of the tree below which nothing may be left out; None if that is nowhere.

    Returns:
        The tree, with :class:`Unreadable` where an object stood that must not be left out.

    Raises:
        DamagedCheckpointError: It is nested too deeply, or far larger than its pickle.
    """
    walk = _Walk(left_out, _VISITS + pickle_bytes)
    if needed is None or not isinstance(tree, dict):
        return walk.visit(tree, "", 0)
    found = {}
    for key, value in tree.items():
        if not _is_key(key):
            left_out.append(f"an entry with the key {shown(key)}")
        elif key in needed:
            found[key] = walk.visit(value, str(key), 1)
        elif (kept := walk.prune(walk.visit(value, str(key), 1), str(key))) is not _GONE:
            found[key] = kept
    return found


_GONE = object()


class _Walk:
    def __init__(self, left_out: list[str], visits: int) -> None:
        self.left_out = left_out
        self.visits = visits

    def visit(self, value: Any, path: str, depth: int) -> Any:
        """Returns the same tree of plain containers, with `Unreadable` for what is no data."""
        self.visits -= 1
        if depth > MAX_DEPTH or self.visits < 0:
            raise DamagedCheckpointError(f"the tree is nested too deeply, or repeats itself too often, at {path:.200}")
        kind = type(value)
        if kind in _SCALARS or kind is StoredArray:
            return value
        if kind is dict or kind is OrderedDict:
            odd = next((key for key in value if not _is_key(key)), None)
            if odd is not None:
                return Unreadable(f"a dictionary with the key {shown(odd)}")
            return kind((key, self.visit(item, f"{path}/{key}", depth + 1)) for key, item in value.items())
        if kind in (list, tuple):
            return kind([self.visit(item, f"{path}/{index}", depth + 1) for index, item in enumerate(value)])
        if kind in (set, frozenset):
            return value if all(type(item) in _SCALARS for item in value) else Unreadable("a set of objects")
        if isinstance(value, np.generic):
            return value
        return _leaf(plain_array(value))

    def prune(self, value: Any, path: str) -> Any:
        """Leaves out the entries of dictionaries that are, or hold, no data; a sequence goes as a whole."""
        if isinstance(value, Unreadable):
            self.left_out.append(f"{path.lstrip('/')} ({value.what})")
            return _GONE
        if isinstance(value, dict):
            pairs = ((key, self.prune(item, f"{path}/{key}")) for key, item in value.items())
            return type(value)((key, item) for key, item in pairs if item is not _GONE)
        if isinstance(value, list | tuple) and (what := _object_in(value)) is not None:
            self.left_out.append(f"{path.lstrip('/')} (it holds {what})")
            return _GONE
        return value


def _object_in(value: Any) -> str | None:
    if isinstance(value, Unreadable):
        return value.what
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((what for item in inner if (what := _object_in(item)) is not None), None)


def _is_key(key: Any) -> bool:
    return type(key) in (str, bool) or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def _leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Name):
        try:
            form_of(value)
        except DamagedCheckpointError:
            return Unreadable(f"the class or function {value}")
        return str(value)  # a dtype
    return Unreadable(f"an object of {_described(value)}")


def _described(value: Any) -> str:
    if isinstance(value, Inert):
        return str(value.name)
    return type(value).__name__.lower().lstrip("_")
