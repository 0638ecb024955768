"""Read a tree that Orbax saved as arrays, plus JSON files with the structure, shardings, and strings.

The formats of orbax-checkpoint 0.5 to 0.12 are supported. If a JSON member is missing, the tree is read as if saved by
an older version that did not write the member.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.arrays import MANIFEST, TREE, Problem, SavedLeaf, TreeSource, damaged_leaves, naming
from ....engine.errors import DamagedCheckpointError, UnsupportedLeafError, itemized, shortened
from ....engine.progress import NULL
from ....engine.pytree import PLACEHOLDER, Box, Details, Saved, format_path, number_kind, whole
from ....engine.sources import (
    OPTIONAL,
    OtherTree,
    Path,
    SingleTree,
    described,
    nested_tree,
    not_read,
    read_object,
    read_optional,
    storage_name,
    total_bytes,
    without_leaves,
)
from ....engine.storage import Location
from ..flax import decode_file
from .arrays import OpenedArrays, ProcessDatabases, Wanted, cut, directory_spec, gather, missing_files, read_database

TREE_FILE = "_METADATA"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
STRINGS_FILE = "_strings.json"
SHARDING_FILE = "_sharding"
ARRAYS_FOLDER = "array_metadatas"
PROCESS_FOLDER = "ocdbt.process_"  # name prefix of a folder that contains the database of one process

# Maps each value type of an empty container to the container to create.
_EMPTY: dict[str, Any] = {"Dict": {}, "List": [], "Tuple": (), "NamedTuple": {}}
_EMPTY_TYPES: dict[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}
NONE = "None"
STRING = "string"
WITHOUT_DATA = "placeholder"
SCALAR = "scalar"
_SEQUENCE_KEY = 1
AGGREGATE_FILE = "checkpoint"  # msgpack file of early versions, with small leaves and placeholders for the others
# Value types that Orbax itself stores as arrays. Entries without a recorded type have the type "unknown".
_OWN_TYPES = frozenset({"jax.Array", "np.ndarray", "scalar", "unknown"})
_NO_ARRAYS = frozenset({NONE, STRING, WITHOUT_DATA})
_PLACEHOLDER = re.compile("(?:PLACEHOLDER|AGGREGATED)://(.*)", re.DOTALL)
_ARRAY_FILES = (".zarray", "zarr.json")
_ARRAY = b"zarr.json"
_KEY_KINDS = {2: "threefry2x32", 4: "rbg"}  # PRNG implementations, keyed by the length of the key data


class Parameter(NamedTuple):
    """An entry of the tree, which is a leaf or an empty container."""

    path: Path  # the keys of the entry, with int for list and tuple indices
    value_type: str  # Orbax value type, such as ``"jax.Array"``, ``"np.ndarray"``, ``"scalar"`` or ``"string"``

    @property
    def name(self) -> str:
        """The name under which Orbax stores the entry. It is not necessarily unique."""
        return ".".join(map(str, self.path))


class TreeMetadata(NamedTuple):
    """The parsed contents of a ``_METADATA`` file."""

    parameters: list[Parameter]  # the entries of the tree, in file order
    use_zarr3: bool  # whether arrays use zarr version 3 instead of 2
    complete: bool  # whether every chunk is stored, even if it contains only the fill value
    uses_ocdbt: bool = False  # whether all arrays share one OCDBT database


def read_tree(folder: Location) -> TreeMetadata:
    file = folder / TREE_FILE
    document = read_object(file)
    entries = document.get("tree_metadata")
    if not isinstance(entries, dict):
        raise DamagedCheckpointError(f"{file} is damaged: expected the member tree_metadata, found none")
    parameters = []
    for text, entry in entries.items():
        value_type = _member(entry, "value_metadata", "value_type")
        path = _path(_member(entry, "key_metadata"), text)
        if path is None:
            raise DamagedCheckpointError(f"{file} is damaged: the keys of entry {text:.200} are not a path")
        parameters.append(Parameter(path, value_type if isinstance(value_type, str) else "unknown"))
    complete = document.get("store_array_data_equal_to_fill_value") is True
    return TreeMetadata(parameters, document.get("use_zarr3") is True, complete, document.get("use_ocdbt") is True)


def _member(value: Any, *names: str) -> Any:
    """Return a member of nested JSON objects; None if a level is missing or is not an object."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _path(keys: Any, text: str) -> Path | None:
    """Parse an entry's path from its key list or else from its name (the repr of a tuple); return None if invalid."""
    if keys is None:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            parsed = ast.literal_eval(text)
            if isinstance(parsed, tuple) and all(isinstance(key, str | int) for key in parsed):
                return tuple(map(str, parsed))
        return None
    path: list[str | int] = []
    for key in keys if isinstance(keys, list) else [None]:
        name = _member(key, "key")
        if not isinstance(name, str | int) or isinstance(name, bool):
            return None
        is_index = _member(key, "key_type") == _SEQUENCE_KEY and re.fullmatch("[0-9]{1,9}", str(name))
        path.append(int(name) if is_index else str(name))
    return tuple(path)


def read_key_kinds(folder: Location) -> dict[str, str]:
    """Map the array names of typed keys to their PRNG implementations."""
    entries = [entry for entry in (folder / ARRAYS_FOLDER).entries() if entry.name.startswith("process_")]
    kinds: dict[str, str] = {}
    for file in (entry.name for entry in entries if not entry.is_directory):
        listed = read_optional(folder / ARRAYS_FOLDER / file).get("array_metadatas")
        for item in listed if isinstance(listed, list) else ():
            implementation = _member(item, "array_metadata", "ext_metadata", "random_key_impl")
            name = _member(item, "array_metadata", "param_name")
            if isinstance(implementation, str) and isinstance(name, str):
                kinds[name] = implementation
    return kinds


def read_shardings(folder: Location) -> dict[str, Details]:
    """Return the shardings, keyed by array name. They are used only for display, so invalid ones are skipped."""
    shardings: dict[str, Details] = {}
    for encoded, text in read_optional(folder / SHARDING_FILE).items():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            shardings[base64.urlsafe_b64decode(encoded).decode("utf-8")] = _sharding(json.loads(text))
    return shardings


def _sharding(fields: Any) -> Details:
    details: Details = {"type": str(fields["sharding_type"])}
    if details["type"] == "NamedSharding":
        axes = [[str(name), size] for name, size in zip(fields["axis_names"], fields["shape"], strict=True)]
        return {**details, "mesh": {"axes": axes}, "spec": fields.get("partition_spec")}
    device = fields.get("device_str")
    return {**details, "device": device} if isinstance(device, str) else details


class OrbaxTree(OtherTree):
    """An Orbax tree in a folder. Namedtuples and custom nodes are read as dictionaries, and tuples as lists."""

    # ``bare`` means that the tree is a single array, which Orbax saves as a tree with one entry. If each process saved
    # to its local disk, ``processes`` is the number of processes; the folder holds the shards that were copied to it.

    def __init__(self, location: Location, *, bare: bool = False, typed_key: bool = False, processes: int = 0) -> None:
        self.location = location
        entries_here = location.entries()
        names = {entry.name for entry in entries_here if not entry.is_directory}
        self._processes = processes
        indices = [entry.name.removeprefix(PROCESS_FOLDER) for entry in entries_here if processes]
        self._present = sorted(int(index) for index in indices if index.isdecimal())
        folders = [location / f"{PROCESS_FOLDER}{index}" for index in self._present]
        self._databases = ProcessDatabases(folders) if folders else None
        self._typed_key = typed_key
        self._aggregated: dict[Path, Any] = {}
        decoded = [*_entries(decode_file(location / AGGREGATE_FILE))] if AGGREGATE_FILE in names else None
        self._metadata = self._read_structure(decoded, names)
        self._ocdbt = MANIFEST in names
        entries = self._metadata.parameters
        parameters = [p for p in entries if p.value_type not in _EMPTY]
        empties = [(p.path, _EMPTY[p.value_type]) for p in entries if p.value_type in _EMPTY]
        if bare and [p.path for p in parameters] == [(AGGREGATE_FILE,)]:
            parameters = [parameters[0]._replace(path=())]
        self._names = {storage_name(p.path): p.name or (AGGREGATE_FILE if bare else "") for p in parameters}
        arrays = [p for p in parameters if p.value_type not in _NO_ARRAYS and p.path not in self._aggregated]
        if arrays and self._metadata.uses_ocdbt and not self._ocdbt:  # a tree without arrays needs no database
            raise DamagedCheckpointError(f"{location / MANIFEST} is missing: it says where the arrays are")
        with naming(location):
            self.tree, order = nested_tree([*((p.path, number) for number, p in enumerate(parameters)), *empties])
            stored = [self._names[storage_name(p.path)] for p in arrays]
            self._arrays = OpenedArrays(location, {name: self._spec(name) for name in stored})
            self._keys = read_key_kinds(location)
            self._shardings = read_shardings(location)
            has_strings = any(p.value_type == STRING for p in parameters)
            self._strings = read_optional(location / STRINGS_FILE) if has_strings else {}
            self.unreadable: dict[str, str] = {}
            self._values: dict[str, Any] = {}  # values of the leaves in the aggregate file, keyed by leaf name
            self._foreign: set[str] = set()  # leaves that require a custom handler from the program that saved them
            self.leaves = [self._leaf(parameters[index]) for index in order]
        counts = Counter(self._names[storage_name(p.path)] for p in parameters if p.value_type not in _NO_ARRAYS)
        self._shared = {name for name, count in counts.items() if count > 1}

    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        arrays: dict[int, NDArray[Any]] = {}
        self._refuse(self._read_parts(wanted, arrays.__setitem__))
        return [arrays.get(index) for index in range(len(wanted))]

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        regions = [gather(wanted) for wanted in boxes]
        read = zip(leaves, boxes, regions, super().read_boxes(leaves, regions), strict=True)
        return [[cut(box, around, parts, leaf.saved.dtype) for box in wanted] for leaf, wanted, around, parts in read]

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        return super().chunks(leaf) if leaf.name in self._values else self._arrays.chunks(self._names[leaf.name])

    def verify(self, advance: Callable[[int], None] = NULL.advance) -> list[Problem]:
        parts = [(leaf, None) for leaf in self.leaves if leaf.name not in self._foreign]
        return self._read_parts(parts, lambda _index, array: advance(array.nbytes))

    def for_template(self, names: Sequence[str]) -> TreeSource:
        """Drop leaves that may be empty containers, unless the template has leaves with the same names."""
        kept = set(names)
        optional = {leaf.name for leaf in self.leaves if OPTIONAL in leaf.saved.details}
        return TreeSource.for_template(without_leaves(self, optional - kept), names)

    def _refuse(self, problems: Sequence[Problem]) -> None:
        if not problems:
            return
        lines = [f"{p.leaf}: {p.what}" for p in problems]
        if {p.leaf for p in problems} <= set(map(format_path, self._foreign)):
            headline = f"{self.location}: these leaves need code from the program; load the others with select=PATTERN:"
            raise UnsupportedLeafError(itemized(headline, lines))
        if len(self._present) < self._processes:
            headline = (
                f"{self.location} has the parts that {len(self._present)} of {self._processes} processes saved "
                f"({shortened(list(map(str, self._present)))}), but others are missing: each process saved to the disk "
                f"of its host. Copy {self.location.parent.name} from the other hosts into the same folder (rsync -a "
                f"HOST:DIRECTORY/{self.location.parent.name} {self.location.parent.parent}), or load a step from the "
                "persistent directory"
            )
            raise DamagedCheckpointError(itemized(headline, lines))
        raise damaged_leaves(self.location, [(p.leaf, f"{p.file}: {p.what}" if p.file else p.what) for p in problems])

    def _read_parts(
        self, parts: Sequence[tuple[SavedLeaf, Box | None]], use: Callable[[int, NDArray[Any]], None]
    ) -> list[Problem]:
        wanted: dict[int, Wanted] = {}
        problems: list[Problem] = []
        failed: dict[str, str] = {}  # reasons why leaves cannot be read, keyed by leaf name
        for index, (leaf, box) in enumerate(parts):
            if leaf.name in self.unreadable:
                failed[leaf.name] = self.unreadable[leaf.name]
            elif leaf.saved.dtype is None:
                continue
            elif leaf.name in self._values:
                array: NDArray[Any] = np.array(self._values[leaf.name])
                use(index, array if box is None else array[box.within(whole(array.shape))])
            elif self._names[leaf.name] in self._shared:
                name = self._names[leaf.name]
                paths = " and ".join(format_path(other) for other, stored in self._names.items() if stored == name)
                problem = f"{paths} have the same name {name!r} in Orbax's files, so only one of them was kept, "
                problems.append(Problem("", format_path(leaf.name), f"{problem}and the files do not say which"))
            else:
                wanted[index] = Wanted(self._names[leaf.name], box)
        self._arrays.check_sizes(wanted.values(), total_bytes(self.location), filled=not self._metadata.complete)
        leaves = {name: parts[index][0].name for index, (name, _) in wanted.items()}
        for name, problem in self._arrays.read(wanted, use):
            failed[leaves[name]] = problem
        is_joined = self._ocdbt and self._databases is None
        missing = missing_files(self.location, {self._names[leaf] for leaf in failed}) if is_joined else {}
        for leaf_name, problem in failed.items():
            files = missing.get(self._names[leaf_name]) or [("", problem)]
            problems += [Problem(file, format_path(leaf_name), why) for file, why in files]
        return problems

    def _read_structure(self, decoded: Sequence[tuple[Path, Any]] | None, files: set[str]) -> TreeMetadata:
        if TREE_FILE in files:
            metadata = read_tree(self.location)
            values = {tuple(map(str, path)): value for path, value in decoded or ()}
            for parameter in metadata.parameters:
                value = values.get(tuple(map(str, parameter.path)))
                if value is not None and type(value) not in _EMPTY_TYPES and _placeholder(value) is None:
                    self._aggregated[parameter.path] = value
            return metadata
        if decoded is not None:
            return self._from_aggregate(decoded)
        folders = [entry.name for entry in self.location.entries() if entry.is_directory]
        candidates = [Parameter(tuple(name.split(".")), "unknown") for name in folders]
        parameters = [p for p in candidates if any((self.location / p.name / file).exists() for file in _ARRAY_FILES)]
        if not parameters:
            raise DamagedCheckpointError(
                f"{self.location / TREE_FILE} is missing: without it, the arrays in this folder have no names"
            )
        zarr3 = (self.location / parameters[0].name / _ARRAY_FILES[1]).exists()
        return TreeMetadata(parameters, zarr3, complete=False)

    def _from_aggregate(self, decoded: Sequence[tuple[Path, Any]]) -> TreeMetadata:
        parameters = []
        for path, value in decoded:
            parameters.append(Parameter(path, NONE if value is None else _EMPTY_TYPES.get(type(value), "unknown")))
            if parameters[-1].value_type != "unknown":
                continue
            name = _placeholder(value)
            if name is None:
                self._aggregated[path] = value
            elif name != parameters[-1].name:
                leaf = format_path(storage_name(path))
                raise DamagedCheckpointError(
                    f"{self.location / AGGREGATE_FILE}: leaf {leaf} has the name of another leaf, {name!r:.200}"
                )
        return TreeMetadata(parameters, use_zarr3=False, complete=False)

    def _spec(self, name: str) -> dict[str, Any]:
        base = directory_spec(self.location)
        if self._databases is not None:
            kvstore = self._databases.spec(name)
        elif self._ocdbt:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else ""}
        else:
            if (name and any(part in ("", ".", "..") for part in name.split("/"))) or "\0" in name:
                raise DamagedCheckpointError(f"a leaf is called {name!r:.200}, which is not a valid folder name")
            kvstore = {**base, "path": f"{base['path']}{name}/" if name else base["path"]}
        driver, fill = "zarr3" if self._metadata.use_zarr3 else "zarr", not self._metadata.complete
        return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": fill}

    def _leaf(self, parameter: Parameter) -> SavedLeaf:
        name = storage_name(parameter.path)
        if parameter.path in self._aggregated:
            saved, self._values[name] = described(name, self._aggregated[parameter.path])
            return SavedLeaf(name, saved)
        return SavedLeaf(name, self._saved(name, self._names[name], parameter.value_type))

    def _saved(self, name: str, stored: str, value_type: str) -> Saved:
        """Describe a leaf with this Orbax value type; if it cannot be read, record the reason in ``unreadable``."""
        if value_type == NONE:
            # Orbax also writes an empty namedtuple, such as the state of an optax transformation, as None.
            return Saved({"kind": "none", OPTIONAL: True})
        if value_type == WITHOUT_DATA:
            return Saved({"kind": PLACEHOLDER})
        if value_type == STRING:
            # Interpret the name as a JSON pointer, as Orbax does.
            text = _member(self._strings, *(key.replace("~1", "/").replace("~0", "~") for key in stored.split("/")))
            if isinstance(text, str):
                return Saved({"kind": "str", "value": text})
            why = f"{STRINGS_FILE} has no text for leaf {format_path(name)}: it is missing, or another has its name"
            self.unreadable[name] = why
            return not_read("damaged")
        if stored in self._arrays.failed and value_type in _OWN_TYPES:
            self.unreadable[name] = self._arrays.failed[stored]
            return not_read("damaged")
        if stored in self._arrays.failed:
            self._foreign.add(name)
            description = f"a {value_type!r:.40} of the program"
            self.unreadable[name] = f"{description}, which only its handler reads"
            return not_read(description)
        dtype, shape = self._arrays.dtypes[stored], self._arrays.shapes[stored]
        implementation = self._keys.get(stored)
        if self._typed_key and dtype == np.uint32 and shape and shape[-1] in _KEY_KINDS:
            implementation = _KEY_KINDS[shape[-1]]
        if implementation is None and value_type == SCALAR and shape == ():
            return Saved({"kind": number_kind(dtype) or "numpy_scalar"}, dtype, shape)
        details: Details = {"kind": "jax" if value_type == "jax.Array" else "numpy"}
        if implementation is not None:
            details = {"kind": "key", "impl": implementation}
        if stored in self._shardings:
            details["sharding"] = self._shardings[stored]
        return Saved(details, dtype, shape)


def _entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves and empty containers of a tree, each with its path."""
    if type(value) not in _EMPTY_TYPES or not value:
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _entries(inner, (*path, key))


def _placeholder(value: Any) -> str | None:
    """Return the name of the leaf that a placeholder stands for, or None if the value is not a placeholder."""
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else match[1]


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if MANIFEST not in names or TREE in names:  # a tree.json indicates an item of a holdfast checkpoint
        return None
    return SingleTree("TensorStore", location, ArrayFolder(location), total_bytes(location))


class ArrayFolder(OrbaxTree):
    """The arrays in a database that TensorStore wrote without Orbax, read as one dictionary keyed by array name."""

    for_template = OtherTree.for_template  # a flat tree has no leaves that may be empty containers

    def _read_structure(self, decoded: Sequence[tuple[Path, Any]] | None, files: set[str]) -> TreeMetadata:
        with naming(self.location):
            folders = [key.removesuffix(_ARRAY) for key in read_database(self.location).keys if key.endswith(_ARRAY)]
        decoded_names = [folder.decode(errors="backslashreplace") for folder in folders]
        names = [name.removesuffix("/") for name in decoded_names if name.endswith("/") or not name]
        parameters = [Parameter((name,), "unknown") for name in names]
        return TreeMetadata(parameters, use_zarr3=True, complete=False, uses_ocdbt=True)
