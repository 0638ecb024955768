"""A saved tree loaded into another structure: only what is needed is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import TreeMismatchError
from ..storage import Location
from ..tree import (
    ArrayLeaf,
    Call,
    Computed,
    Flattened,
    Kept,
    LeafMetadata,
    LeafRequest,
    Origin,
    OriginalTree,
    Saved,
    Skeleton,
    Taken,
    compare,
    describe,
    describe_template,
    display,
    flatten,
    has_values,
    join,
    parts,
    plan_transformations,
    split,
    transformed,
    unfilled,
    unflatten,
)
from .database import Problem
from .lazy import LeafCache, own, plain
from .loading import load_tree
from .reader import SavedLeaf, TreeReader


def load_transformed_tree(
    reader: TreeReader,
    transformations: Any,
    new_tree: Any,
    *,
    default_to_original: bool = True,
    requests: Mapping[str, LeafRequest] | None = None,
) -> Any:
    """Reads what `apply_transformations` would take from a saved tree, and nothing else of it.

    Args:
        reader: The saved tree.
        transformations: `Transform` objects by their keys. ``value_fn`` is given numpy arrays and Python values, as
            `load` returns them without a template; ``multi_value_fn`` is given the saved tree as mappings and sequences
            that read a leaf when it is indexed. Arrays are read-only.
        new_tree: The template. Its leaves decide the array library and the sharding of the result, and its dtypes and
            shapes are checked, for what functions return as well; ``...`` takes what there is. A leaf that is kept has
            to have values.
        default_to_original: As in `apply_transformations`.
        requests: What is asked for leaves on top of what the new tree says, by their names there; see `load_tree`.

    Returns:
        A tree of the new tree's containers.

    Raises:
        OptionError: A transformation makes no sense.
        TreeMismatchError: Keys cannot be filled from the checkpoint; names all of them.
        DamagedCheckpointError: What is needed does not verify.
    """
    new = flatten(new_tree)
    known = OriginalTree(
        [leaf.name for leaf in reader.leaves],
        reader.skeleton.structure,
        [leaf.saved.kind == "none" for leaf in reader.leaves],
        str(reader.location),
    )
    origins = plan_transformations(known, transformations, new, default_to_original)
    values = _Loader(reader, new, origins, requests or {}).load()
    return unflatten(new.structure, values)


class _Loader:
    """Fills the leaves of a new tree.

    What functions ask for, and what several leaves take, is read whole and once. The other leaves go through
    `load_tree`, with the new tree's leaves as a template.
    """

    def __init__(
        self, reader: TreeReader, new: Flattened, origins: Sequence[Origin], requests: Mapping[str, LeafRequest]
    ) -> None:
        self._reader = reader
        self._requests = requests
        self._new = new
        self._origins = origins
        self._cache = LeafCache(reader)
        needed = [number for number, origin in enumerate(origins) if not isinstance(origin, Kept)]
        described = describe_template(
            [new.names[number] for number in needed], [new.values[number] for number in needed]
        )
        self._targets = dict(zip(needed, described, strict=True))

    def load(self) -> list[Any]:
        """Returns a value for each leaf of the new tree."""
        self._check()
        returned = self._call()
        direct = self._direct()
        results = list(self._new.values)
        for number, value in self._loaded(direct):
            results[number] = value
        made = self._made([number for number in self._targets if number not in direct], returned)
        for number, value in self._fitted(made):
            results[number] = value
        return results

    def _check(self) -> None:
        """Compares what is handed on with the template, before anything is read."""
        differences = []
        for number, origin in enumerate(self._origins):
            name, value = self._new.names[number], self._new.values[number]
            if isinstance(origin, Kept) and not has_values(value):
                differences.append(f"{display(name)}: expected a value, found only its shape and dtype in the new tree")
            elif isinstance(origin, Taken) and not (origin.function or origin.container or self._asks(number)):
                path, leaf = display(name), self._reader.leaves[origin.start]
                where = path if path == origin.path else f"{path} (saved as {display(leaf.name)})"
                difference = compare(self._targets[number], leaf.saved, where)
                if difference is not None:
                    differences.append(difference)
        self._raise(differences)

    def _call(self) -> dict[Call, dict[str, Any]]:
        """Returns what the functions of the whole tree make."""
        returned: dict[Call, dict[str, Any]] = {}
        for old, origin in zip(self._new.values, self._origins, strict=True):
            if isinstance(origin, Computed) and origin.call not in returned:
                result = plain(origin.call.run(self._cache.tree()))
                returned[origin.call] = parts(origin.call, result, old is ...)
        return returned

    def _direct(self) -> dict[int, SavedLeaf]:
        """Returns the saved leaves that are still to be read, as they are, for just one leaf of the new tree."""
        takers: dict[int, list[int]] = {}
        for number, origin in enumerate(self._origins):
            if isinstance(origin, Taken) and origin.container is None:
                takers.setdefault(origin.start, []).append(number)
        found = {}
        for start, numbers in takers.items():
            leaf, origin = self._reader.leaves[start], self._origins[numbers[0]]
            single = len(numbers) == 1 and isinstance(origin, Taken) and origin.function is None
            # "1" beside 1 has a name that a dictionary with just one of them does not give.
            if single and start not in self._cache and join(split(leaf.name)) == leaf.name:
                found[numbers[0]] = leaf
        return found

    def _loaded(self, direct: Mapping[int, SavedLeaf]) -> Iterator[tuple[int, Any]]:
        """Generates leaves that are loaded as they are."""
        source = _Part(self._reader, list(direct.values()))
        return self._through(source, {number: leaf.name for number, leaf in direct.items()})

    def _through(self, source: Any, names: Mapping[int, str]) -> Iterator[tuple[int, Any]]:
        """Loads a tree whose leaves become some of the new tree's.

        Args:
            source: What `load_tree` takes.
            names: The name there of each leaf of the new tree.
        """
        if not names:
            return
        template: Any = {}
        for number, name in names.items():
            template = _put(template, split(name), self._new.values[number])
        asked = {name: self._requests[self._new.names[number]] for number, name in names.items() if self._asks(number)}
        more: dict[str, Any] = {"requests": asked} if asked else {}
        flat = flatten(load_tree(cast("TreeReader", source), like=template, **more))
        found = dict(zip(flat.names, flat.values, strict=True))
        for number, name in names.items():
            yield number, found[name]

    def _asks(self, number: int) -> bool:
        return self._new.names[number] in self._requests

    def _made(self, numbers: Sequence[int], returned: Mapping[Call, Mapping[str, Any]]) -> dict[int, Any]:
        """Returns values, as yet of any kind, for leaves that are not simply loaded."""
        taken = [origin for number in numbers if isinstance(origin := self._origins[number], Taken)]
        self._cache.arrays([leaf for origin in taken for leaf in range(origin.start, origin.stop)])
        values: dict[int, Any] = {}
        for number in numbers:
            origin, old = self._origins[number], self._new.values[number]
            if isinstance(origin, Computed):
                values[number] = returned[origin.call][origin.name]
            elif isinstance(origin, Taken):
                value = unflatten(origin.container, self._cache.values(range(origin.start, origin.stop)))
                values[number] = plain(transformed(origin, value, self._new.names[number], old))
        return values

    def _fitted(self, made: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Generates values made into what the template asks for, as if they had been saved."""
        differences: list[str] = []
        saved: dict[int, SavedLeaf] = {}
        arrays: dict[str, NDArray[Any] | None] = {}
        for number, value in made.items():
            target, origin = self._targets[number], self._origins[number]
            free = target.kind == "any" and not self._asks(number)
            compared = isinstance(origin, Taken) and not (origin.function or origin.container)
            if free and (compared or not isinstance(target.template, LeafMetadata)):
                yield number, own(value)
                continue
            if compared:
                assert isinstance(origin, Taken)
                [array] = self._cache.arrays([origin.start])
                described, array = self._reader.leaves[origin.start].saved, None if array is None else array.copy()
            else:
                described, array = _described(self._new.names[number], value)
                difference = None if self._asks(number) else compare(target, described)
                if difference is not None:
                    what = "multi_value_fn" if isinstance(origin, Computed) else "value_fn"
                    differences.append(difference.replace("(checkpoint)", f"(returned by {what})"))
            if free:
                yield number, own(value)
                continue
            name = join(split(self._new.names[number]))
            name = name if name not in arrays else f"{name}~{number}"  # "1" beside 1
            saved[number], arrays[name] = SavedLeaf(name, described), array
        self._raise(differences)
        source = _InMemory(self._reader.location, list(saved.values()), arrays)
        yield from self._through(source, {number: leaf.name for number, leaf in saved.items()})

    def _raise(self, differences: Sequence[str]) -> None:
        if differences:
            raise unfilled(str(self._reader.location), len(self._new.names), differences)


class _Part:
    """Some leaves of a saved tree, as a tree of their own; all else is that of the whole.

    Args:
        reader: The saved tree.
        leaves: The leaves.
    """

    def __init__(self, reader: TreeReader, leaves: Sequence[SavedLeaf]) -> None:
        self._reader = reader
        self.leaves = leaves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class _InMemory:
    """Values that look like those of a saved tree.

    Args:
        location: Where the tree lies that they were made of, for errors.
        leaves: What is said of them.
        arrays: Their arrays by name, None for plain values; they are given away.
    """

    skeleton = Skeleton(None)

    def __init__(
        self, location: Location, leaves: Sequence[SavedLeaf], arrays: Mapping[str, NDArray[Any] | None]
    ) -> None:
        self.location = location
        self.leaves = leaves
        self._arrays = arrays

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return [self._arrays[leaf.name] for leaf in leaves]

    def verify(self) -> list[Problem]:
        return []


def _put(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """Puts a leaf into a tree of dictionaries; returns the tree."""
    if not keys:
        return value
    above = tree
    for key in keys[:-1]:
        above = above.setdefault(key, {})
    above[keys[-1]] = value
    return tree


def _described(name: str, value: Any) -> tuple[Saved, NDArray[Any] | None]:
    """Describes a value as if it had been saved; its array is a copy."""
    [leaf] = describe([name], [value])
    if not isinstance(leaf, ArrayLeaf):
        return Saved(leaf.details), None
    if sum(piece.array.size for piece in leaf.pieces) != math.prod(leaf.shape):
        raise TreeMismatchError(
            f"{display(name)}: its function returned an array of which other processes hold a part; return a numpy "
            "array, which is placed as the new tree says"
        )
    array = np.empty(leaf.shape, leaf.dtype)
    for piece in leaf.pieces:
        box = zip(piece.start, piece.array.shape, strict=True)
        array[tuple(slice(start, start + size) for start, size in box)] = piece.array
    return Saved(leaf.details, leaf.dtype, leaf.shape), array
