"""One tree that Orbax saved, opened for reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..item import MANIFEST, Problem, SavedLeaf, naming
from ..storage import Location
from ..tree import PLACEHOLDER, Box, Details, Saved, Skeleton, display, whole
from ..tree.numpy_leaves import number_kind
from .containers import Path, nested_skeleton, storage_name
from .files import total_bytes
from .flax_msgpack import Decoded, decode_file, leaf_of
from .ocdbt_damage import explain
from .orbax_metadata import (
    EMPTY_KINDS,
    NONE,
    SCALAR,
    STRING,
    STRINGS_FILE,
    TREE_FILE,
    WITHOUT_DATA,
    Parameter,
    TreeMetadata,
    find_string,
    read_key_kinds,
    read_shardings,
    read_strings,
    read_tree,
)
from .regions import cut, gather
from .templates import OPTIONAL
from .tensorstore_arrays import OpenedArrays, Wanted, damaged, directory_spec

AGGREGATE_FILE = "checkpoint"
"""The msgpack file of early versions: small leaves, and names in the place of the others."""
_NO_ARRAYS = frozenset({NONE, STRING, WITHOUT_DATA})
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")


class OrbaxTree:
    """A tree in a folder.

    Args:
        location: The folder.
        bare: The path of the one leaf that is the whole item, for items that are no trees to Orbax.
        typed_key: Whether that leaf is a typed PRNG key; of which kind is not noted, and its length tells.

    Raises:
        DamagedCheckpointError: Its structure cannot be read, or the description of an array is missing.

    Attributes:
        location: The folder.
        skeleton: The containers; namedtuples and other nodes are dictionaries, tuples are lists.
        leaves: The leaves.
    """

    def __init__(self, location: Location, *, bare: Path | None = None, typed_key: bool = False) -> None:
        self.location = location
        names = {entry.name for entry in location.entries() if not entry.is_directory}
        self._typed_key = typed_key
        self._aggregated: dict[Path, Any] = {}
        decoded = decode_file(location / AGGREGATE_FILE) if AGGREGATE_FILE in names else None
        self._metadata = self._read_structure(decoded, names)
        self._ocdbt = MANIFEST in names
        entries = self._metadata.parameters
        parameters = [p for p in entries if p.value_type not in EMPTY_KINDS]
        empties = [(p.path, EMPTY_KINDS[p.value_type]) for p in entries if p.value_type in EMPTY_KINDS]
        if bare is not None and [p.path for p in parameters] == [bare]:
            parameters = [parameters[0]._replace(path=())]
        self._stored = {p.path: ".".join(map(str, bare)) if bare and not p.path else p.name for p in parameters}
        arrays = [p for p in parameters if p.value_type not in _NO_ARRAYS and p.path not in self._aggregated]
        if arrays and self._metadata.uses_ocdbt and not self._ocdbt:  # without arrays, Orbax makes no database
            raise DamagedCheckpointError(f"{location / MANIFEST} is missing: without it nobody finds the arrays")
        with naming(location):
            self.skeleton: Skeleton
            self.skeleton, order = nested_skeleton([p.path for p in parameters], empties)
            self._arrays = self._open([self._stored[p.path] for p in arrays])
            self.leaves = self._describe([parameters[index] for index in order])
        self._names = {storage_name(p.path): self._stored[p.path] for p in parameters}
        self._values = {storage_name(path): value for path, value in self._aggregated.items()}
        counts = Counter(self._stored[p.path] for p in parameters if p.value_type not in _NO_ARRAYS)
        self._shared = {name for name, count in counts.items() if count > 1}

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Reads leaves; see :class:`~holdfast.engine.interop.source.TreeSource`."""
        results: list[NDArray[Any] | None] = [None] * len(leaves)
        self._refuse(self._read([(leaf, None) for leaf in leaves], results.__setitem__))
        return results

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        """Reads parts of leaves, as far as possible only the chunks that hold something of them.

        Args:
            leaves: Some of :attr:`leaves`, all of them arrays.
            boxes: For each the boxes that are wanted, inside its shape.

        Returns:
            For each leaf an array for every box.

        Raises:
            DamagedCheckpointError: Something is missing or does not verify; names the leaf and the file.
        """
        regions = [gather(wanted) for wanted in boxes]
        flat = [(leaf, region) for leaf, found in zip(leaves, regions, strict=True) for region in found]
        arrays: dict[int, NDArray[Any]] = {}
        self._refuse(self._read(flat, arrays.__setitem__))
        results = []
        start = 0
        for leaf, wanted, found in zip(leaves, boxes, regions, strict=True):
            assert leaf.saved.dtype is not None
            read = [arrays[start + index] for index in range(len(found))]
            results.append([cut(box, found, read, leaf.saved.dtype) for box in wanted])
            start += len(found)
        return results

    def verify(self) -> list[Problem]:
        """Reads all leaves and keeps nothing."""
        return self._read([(leaf, None) for leaf in self.leaves], lambda _index, _array: None)

    def _refuse(self, problems: Sequence[Problem]) -> None:
        if problems:
            raise damaged(self.location, [(p.leaf, f"{p.file}: {p.what}" if p.file else p.what) for p in problems])

    def _read(
        self, parts: Sequence[tuple[SavedLeaf, Box | None]], use: Callable[[int, NDArray[Any]], None]
    ) -> list[Problem]:
        wanted: dict[int, Wanted] = {}
        problems: list[Problem] = []
        for index, (leaf, box) in enumerate(parts):
            if leaf.saved.dtype is None:
                continue
            if leaf.name in self._values:
                array: NDArray[Any] = np.array(self._values[leaf.name], leaf.saved.dtype)
                use(index, array if box is None else array[box.within(whole(array.shape))])
            elif self._names[leaf.name] in self._shared:
                problems.append(Problem("", display(leaf.name), self._collision(self._names[leaf.name])))
            else:
                wanted[index] = Wanted(self._names[leaf.name], box)
        places = list(wanted)
        self._arrays.check_sizes(wanted.values(), total_bytes(self.location), filled=not self._metadata.complete)
        failed = self._arrays.read(list(wanted.values()), lambda position, array: use(places[position], array))
        shown = {name: display(parts[index][0].name) for index, (name, _) in wanted.items()}
        for name, what in dict(failed).items():
            files = explain(self.location, name) if self._ocdbt else []
            problems += [Problem(file, shown[name], why) for file, why in files] or [Problem("", shown[name], what)]
        return problems

    def _collision(self, name: str) -> str:
        paths = [display(leaf) for leaf, stored in self._names.items() if stored == name]
        return (
            f"{' and '.join(paths)} have the same name {name!r} in Orbax's files, so that only one of them was kept, "
            "and nobody can tell which"
        )

    def _read_structure(self, decoded: Decoded | None, files: set[str]) -> TreeMetadata:
        if TREE_FILE in files:
            metadata = read_tree(self.location)
            known = {tuple(map(str, path)): value for path, value in decoded.values} if decoded else {}
            for parameter in metadata.parameters:
                value = known.get(tuple(map(str, parameter.path)))
                if value is not None and _placeholder(value) is None:
                    self._aggregated[parameter.path] = value
            return metadata
        if decoded is not None:
            return self._from_aggregate(decoded)
        found = [_named(entry.name) for entry in self.location.entries() if entry.is_directory]
        parameters = [p for p in found if any((self.location / p.name / file).exists() for file in _ARRAY_FILES)]
        if not parameters:
            raise DamagedCheckpointError(
                f"{self.location / TREE_FILE} is missing: nothing says what the arrays in this folder are"
            )
        zarr3 = (self.location / parameters[0].name / _ARRAY_FILES[1]).exists()
        return TreeMetadata(parameters, zarr3, complete=False)

    def _from_aggregate(self, decoded: Decoded) -> TreeMetadata:
        kinds = {kind: name for name, kind in EMPTY_KINDS.items() if name != "NamedTuple"}
        parameters = [Parameter(path, kinds[kind]) for path, kind in decoded.empties]
        for path, value in decoded.values:
            if value is None:
                parameters.append(Parameter(path, NONE))
                continue
            name = _placeholder(value)
            if name is None:
                self._aggregated[path] = value
            elif name != ".".join(map(str, path)):
                leaf = display(storage_name(path))
                raise DamagedCheckpointError(
                    f"{self.location / AGGREGATE_FILE}: leaf {leaf} is said to be stored as {name!r:.200}"
                )
            parameters.append(Parameter(path, "unknown"))
        return TreeMetadata(parameters, use_zarr3=False, complete=False)

    def _open(self, names: list[str]) -> OpenedArrays:
        return OpenedArrays(self.location, {name: self._spec(name) for name in names})

    def _spec(self, name: str) -> dict[str, Any]:
        base = directory_spec(self.location)
        if self._ocdbt:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else ""}
        else:
            if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise DamagedCheckpointError(f"a leaf is called {name!r:.200}, which is no name inside a folder")
            kvstore = {**base, "path": f"{base['path']}{name}/"}
        return {
            "driver": "zarr3" if self._metadata.use_zarr3 else "zarr",
            "kvstore": kvstore,
            "fill_missing_data_reads": not self._metadata.complete,
        }

    def _describe(self, parameters: Sequence[Parameter]) -> list[SavedLeaf]:
        keys = read_key_kinds(self.location)
        shardings = read_shardings(self.location)
        strings = read_strings(self.location) if any(p.value_type == STRING for p in parameters) else {}
        return [self._leaf(parameter, keys, shardings, strings) for parameter in parameters]

    def _leaf(
        self, parameter: Parameter, keys: Mapping[str, str], shardings: Mapping[str, Details], strings: dict[str, Any]
    ) -> SavedLeaf:
        name, stored = storage_name(parameter.path), self._stored[parameter.path]
        if parameter.path in self._aggregated:
            return leaf_of(parameter.path, self._aggregated[parameter.path])
        if parameter.value_type == NONE:
            # Orbax writes empty namedtuples, such as the states of many optax transformations, in the same way.
            return SavedLeaf(name, Saved({"kind": "none", OPTIONAL: True}))
        if parameter.value_type == WITHOUT_DATA:
            return SavedLeaf(name, Saved({"kind": PLACEHOLDER}))
        if parameter.value_type == STRING:
            text = find_string(strings, stored)
            if text is None:
                raise DamagedCheckpointError(
                    f"{self.location / STRINGS_FILE}: there is no text for leaf {display(name)}: it is missing, or "
                    "another leaf has taken its name"
                )
            return SavedLeaf(name, Saved({"kind": "str", "value": text}))
        dtype, shape = self._arrays.dtypes[stored], self._arrays.shapes[stored]
        if self._typed_key and dtype == np.uint32 and shape and shape[-1] in _KEY_KINDS:
            keys = {stored: _KEY_KINDS[shape[-1]]}
        return SavedLeaf(name, Saved(_details(parameter, stored, dtype, shape, keys, shardings), dtype, shape))


_ARRAY_FILES = (".zarray", "zarr.json")
_KEY_KINDS = {2: "threefry2x32", 4: "rbg"}  # by the length of a key's data


def _details(
    parameter: Parameter,
    stored: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    keys: Mapping[str, str],
    shardings: Mapping[str, Details],
) -> Details:
    if stored in keys:
        details: Details = {"kind": "key", "impl": keys[stored]}
    elif parameter.value_type == SCALAR and shape == ():
        return {"kind": number_kind(dtype) or "numpy_scalar"}
    else:
        details = {"kind": "jax" if parameter.value_type == "jax.Array" else "numpy"}
    if stored in shardings:
        details["sharding"] = shardings[stored]
    return details


def _named(name: str) -> Parameter:
    return Parameter(tuple(name.split(".")), "unknown")


def _placeholder(value: Any) -> str | None:
    """Returns the name that stands in the place of a leaf that is stored elsewhere."""
    if isinstance(value, str):
        for prefix in _PLACEHOLDERS:
            if value.startswith(prefix):
                return value[len(prefix) :]
    return None
