"""What Orbax needs to know of a tree before it can restore it: the JSON files that stand beside the arrays."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..format import storage_dtype
from ..item import SavedLeaf
from ..tree import PLACEHOLDER, Node, Saved, display, materialize
from .orbax_metadata import (
    ARRAYS_FOLDER,
    CHECKPOINT_FILE,
    NONE,
    SCALAR,
    STRING,
    STRINGS_FILE,
    TREE_FILE,
    WITHOUT_DATA,
)
from .source import TreeSource

TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
COMMITTED_FILE = "commit_success.txt"
_SEQUENCE, _MAPPING = 1, 2  # kinds of keys
# Not "jax.Array": such a leaf can only be restored onto devices that are named, unless there is a template. Either kind
# can be restored as the other.
_ARRAY = "np.ndarray"
_EMPTY = {"list": "List", "tuple": "Tuple", "namedtuple": NONE, "dataclass": NONE, "node": NONE}
_NUMBERS = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}
_SCALARS = frozenset({"bool", "int", "float"})
_ARRAYS = frozenset({"numpy", "jax", "torch", "key", "numpy_scalar", "complex"})


@dataclass(slots=True)
class OrbaxPlan:
    """How a tree looks to Orbax.

    Attributes:
        entries: The member ``tree_metadata`` of ``_METADATA``.
        arrays: The leaves that are stored as arrays, by the names that Orbax looks for.
        numbers: Those leaves that have no array in the source, as a number that stands in their description.
        strings: The content of ``_strings.json``.
        keys: The implementation of typed PRNG keys, by the names of their arrays.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, SavedLeaf] = field(default_factory=dict)
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)
    strings: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """Returns the files to write, by their path in the item's folder; ``_METADATA`` comes last."""
        found: dict[str, bytes] = {}
        if self.strings:
            found[STRINGS_FILE] = _json(self.strings)
        if self.keys:
            arrays = [self._key_metadata(name, implementation) for name, implementation in self.keys.items()]
            found[f"{ARRAYS_FOLDER}/process_0"] = _json({"array_metadatas": arrays})
        found[TREE_FILE] = _json(
            {
                "tree_metadata": self.entries,
                "use_ocdbt": True,
                "use_zarr3": True,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        )
        return found

    def _key_metadata(self, name: str, implementation: str) -> dict[str, Any]:
        shape = list(self.arrays[name].saved.shape or ())
        array = {"param_name": name, "write_shape": shape, "chunk_shape": shape}
        return {"array_metadata": {**array, "ext_metadata": {"random_key_impl": implementation}}}


def plan_orbax(source: TreeSource, *, in_place: bool) -> OrbaxPlan:
    """Finds out how a tree looks to Orbax, or what keeps it from being restored by Orbax.

    Args:
        source: The tree.
        in_place: Whether the arrays stay where they are, under their own names.

    Returns:
        The plan.

    Raises:
        UnsupportedLeafError: Leaves that Orbax cannot have; every one of them is named.
    """
    planner = _Planner(source, in_place)
    planner.visit(source.skeleton.structure, ())
    if not planner.plan.entries:
        planner.problems.append("(root): Orbax does not save a tree with nothing in it")
    if planner.problems:
        lines = "\n".join(f"  {problem}" for problem in planner.problems)
        raise UnsupportedLeafError(
            f"{source.location} cannot be exported to Orbax, and nothing was written; leave these leaves out of the "
            f"tree:\n{lines}"
        )
    return planner.plan


class _Planner:
    def __init__(self, source: TreeSource, in_place: bool) -> None:
        self.plan = OrbaxPlan()
        self.problems: list[str] = []
        self._source = source
        self._in_place = in_place
        self._leaves = iter(source.leaves)
        self._taken: dict[str, str] = {}

    def visit(self, node: Node | None, path: tuple[tuple[str, int], ...]) -> None:
        if node is None:
            self._leaf(next(self._leaves), path)
            return
        if not node.children and path:
            self._entry(path, _EMPTY.get(node.kind, "Dict"), skip=True)
        keys = range(len(node.children)) if node.keys is None else node.keys
        kind = _SEQUENCE if node.keys is None else _MAPPING
        for key, child in zip(keys, node.children, strict=True):
            self.visit(child, (*path, (str(key), kind)))

    def _leaf(self, leaf: SavedLeaf, path: tuple[tuple[str, int], ...]) -> None:
        name = ".".join(key for key, _ in path)
        problem = self._take(leaf, name) or self._add(leaf, name, path)
        if problem:
            self.problems.append(f"{display(leaf.name)}: {problem}")

    def _take(self, leaf: SavedLeaf, name: str) -> str | None:
        """Makes sure of a name that no other leaf has."""
        other = self._taken.setdefault(name, leaf.name)
        if other != leaf.name:
            return f"Orbax would give it the name {name!r}, which {display(other)} has"
        return None

    def _add(self, leaf: SavedLeaf, name: str, path: tuple[tuple[str, int], ...]) -> str | None:
        saved = leaf.saved
        if saved.kind == "none":
            self._entry(path, NONE, skip=True)
            return None
        if saved.kind == PLACEHOLDER:
            self._entry(path, WITHOUT_DATA)
            return None
        if saved.kind == "str":
            self._entry(path, STRING)
            return self._string(leaf, name)
        if saved.kind not in _SCALARS and saved.kind not in _ARRAYS:
            return f"Orbax has no leaves of kind {saved.kind}"
        if saved.dtype is None:
            return self._number(leaf, name, path)
        if storage_dtype(saved.dtype).extra is not None or "torch_dtype" in saved.details:
            return f"Orbax cannot read elements of type {saved.details.get('torch_dtype', saved.dtype)}"
        if self._in_place and name != leaf.name:
            return (
                f"it is stored as {leaf.name!r} and Orbax would look for {name!r}; export a copy instead, or save it "
                "under keys that are free of '.', '/', '%' and control characters"
            )
        if self._in_place and "aggregate" in saved.details:
            return "it lies in one file with other leaves, which Orbax does not read; export a copy instead"
        if saved.kind == "key":
            self.plan.keys[name] = str(saved.details.get("impl"))
        self._entry(path, SCALAR if saved.kind in _SCALARS else _ARRAY)
        self.plan.arrays[name] = leaf
        return None

    def _string(self, leaf: SavedLeaf, name: str) -> str | None:
        (text,) = self._values(leaf)
        *outer, last = name.split("/")
        place = self.plan.strings
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                return "Orbax would keep it inside another text"
        if "~" in name or "\0" in name or isinstance(place.get(last), dict):
            return f"Orbax cannot keep a text under the name {name!r}"
        if any("\ud800" <= character <= "\udfff" for character in text):
            return "its text has lone surrogates, which JSON files cannot hold"
        place[last] = text
        return None

    def _number(self, leaf: SavedLeaf, name: str, path: tuple[tuple[str, int], ...]) -> str | None:
        dtype = _NUMBERS.get(leaf.saved.kind)
        if dtype is None:
            return f"a leaf of kind {leaf.saved.kind} has no array"
        (value,) = self._values(leaf)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return f"{value:#x} does not fit 64 bits"
        if self._in_place:
            return "it is not stored as an array; export a copy instead"
        array: NDArray[Any] = np.array(value, dtype)
        self._entry(path, SCALAR if leaf.saved.kind in _SCALARS else _ARRAY)
        self.plan.arrays[name] = SavedLeaf(leaf.name, Saved({"kind": leaf.saved.kind}, array.dtype, ()))
        self.plan.numbers[name] = array
        return None

    def _values(self, leaf: SavedLeaf) -> list[Any]:
        return materialize([None], [leaf.saved], self._source.read([leaf]), [leaf.name])

    def _entry(self, path: tuple[tuple[str, int], ...], kind: str, *, skip: bool = False) -> None:
        keys = tuple(key for key, _ in path)
        self.plan.entries[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in path],
            "value_metadata": {"value_type": kind, "skip_deserialize": skip},
        }


def checkpoint_document(handlers: str | Mapping[str, str], committed: float | None) -> dict[str, bytes]:
    """Returns the files of a checkpoint as a whole, by their name; the mark that it is finished comes last.

    Args:
        handlers: The handler of every item, or that of the only one.
        committed: When the checkpoint was committed, in seconds since 1970-01-01 UTC; None is now.
    """
    nanoseconds = int((time.time() if committed is None else committed) * 1e9)
    document = {
        "item_handlers": handlers if isinstance(handlers, str) else dict(handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": nanoseconds,
        "commit_timestamp_nsecs": nanoseconds,
        "custom_metadata": {},
    }
    return {CHECKPOINT_FILE: _json(document), COMMITTED_FILE: b"Exported by holdfast\n"}


def json_file(value: Any) -> bytes:
    """Returns the content of a file that Orbax reads as JSON."""
    return _json(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8")
