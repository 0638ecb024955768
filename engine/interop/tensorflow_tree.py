"""The values of a TensorFlow checkpoint as a tree, the objects that they belong to, and the names TensorFlow has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ..storage import Location
from ..tree import join
from ..tree.structure import MAX_DEPTH
from .stored import StoredTree
from .stored_array import StoredArray
from .tensorflow_bundle import Bundle, unknown_type
from .tensorflow_objects import GRAPH_KEY, ObjectNode, decode_objects, graph_document, object_path
from .tensorflow_text import as_leaves, as_objects

Path = tuple[str, ...]


class BundleVariables:
    """The tensors of a checkpoint by the names that TensorFlow has for them.

    Args:
        bundle: The checkpoint.
        tree: Its values.
        names: For every tensor that is in the tree its name there.
    """

    def __init__(self, bundle: Bundle, tree: StoredTree, names: Mapping[str, str]) -> None:
        self._bundle = bundle
        self._tree = tree
        leaves = {leaf.name: leaf for leaf in tree.leaves}
        self._leaves = {name: leaves.get(ours) for name, ours in names.items()}

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shape of every tensor."""
        return {name: list(entry.shape) for name, entry in self._bundle.tensors.items()}

    def dtypes(self) -> dict[str, np.dtype[Any] | None]:
        """Returns the dtype of every tensor: of objects for text, None where it is not known."""
        return {
            name: np.dtype(object) if self._bundle.is_text(name) else entry.dtype
            for name, entry in self._bundle.tensors.items()
        }

    def read(self, name: str) -> Any:
        """Reads a tensor.

        Args:
            name: What TensorFlow calls it.

        Returns:
            An array. Of text: bytes, or an array of objects that are bytes.

        Raises:
            ObjectNotFoundError: There is none.
            UnsupportedLeafError: Its elements are of a type that is not known.
            DamagedCheckpointError: It does not verify.
        """
        if name not in self._bundle.tensors:
            raise ObjectNotFoundError(f"{self._bundle.prefix} has no tensor {name!r:.200}")
        if self._bundle.is_text(name):
            return as_objects(self._bundle.texts(name), self._bundle.tensors[name].shape)
        leaf = self._leaves.get(name)
        if leaf is None:
            kind = self._bundle.tensors[name].kind
            raise UnsupportedLeafError(f"{self._bundle.prefix}: tensor {name!r:.200} has {unknown_type(kind)}")
        (array,) = self._tree.read([leaf])
        return array


class BundleTree(StoredTree):
    """The values of a checkpoint.

    Attributes:
        variables: The same by TensorFlow's names.
    """

    variables: BundleVariables
    _objects: Sequence[ObjectNode] | None
    _tensor_names: Mapping[str, str]

    @classmethod
    def open(cls, prefix: Location) -> BundleTree:
        """Opens a checkpoint.

        Args:
            prefix: The place of its files without what their names end in.

        Raises:
            DamagedCheckpointError: Its index or its graph of objects does not verify.
            FormatVersionError: It is of a version that is not known.
        """
        bundle = Bundle(prefix)
        bundle.check_texts()
        objects = _objects(bundle)
        known = [name for name in bundle.tensors if name != GRAPH_KEY or objects is None]
        values: dict[str, Any] = {}
        left_out: list[str] = []
        for name in known:
            try:
                values[name] = _value(bundle, name)
            except UnsupportedLeafError as error:
                left_out.append(f"{name!r:.200} ({error})")
        paths = _arranged(
            {name: object_path(name) if objects is not None else tuple(name.split("/")) for name in values}
        )
        root: dict[str, Any] = {}
        for name, path in paths.items():
            branch = root
            for key in path[:-1]:
                branch = branch.setdefault(key, _Branch())
            branch[path[-1]] = values[name]
        found = cls.of(prefix, _with_lists(root), bundle.nbytes, left_out=left_out)
        assert isinstance(found, cls)
        found._objects = objects
        found._tensor_names = {name: join(path) for name, path in paths.items()}
        found.variables = BundleVariables(bundle, found, found._tensor_names)
        return found

    def graph_document(self) -> Any:
        """Returns which objects there were, as holdfast would have written it; None if nobody noted them."""
        return None if self._objects is None else graph_document(self._objects, self._tensor_names)

    def _file(self, path: str) -> Location:
        return self.location.parent / path if path else self.location


class _Branch(dict[str, Any]):
    """A container of the tree, not yet known to be a list."""


def _objects(bundle: Bundle) -> list[ObjectNode] | None:
    """Reads the graph of objects, if there is one."""
    entry = bundle.tensors.get(GRAPH_KEY)
    if entry is None or not bundle.is_text(GRAPH_KEY) or entry.shape:
        return None
    try:
        return decode_objects(bundle.texts(GRAPH_KEY)[0]) or None
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{bundle.prefix}: its graph of objects cannot be read: {error}") from error


def _value(bundle: Bundle, name: str) -> Any:
    if not bundle.is_text(name):
        return bundle.array(name)
    entry = bundle.tensors[name]
    try:
        return as_leaves(bundle.texts(name), entry)
    except DamagedCheckpointError as error:
        what = str(error)

    def refuse() -> Any:
        raise DamagedCheckpointError(what)

    return StoredArray(np.dtype("S1"), entry.shape, {"kind": "numpy"}, refuse)


def _arranged(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Sees to it that no value lies below another one.

    TensorFlow 1 calls what an optimizer keeps for ``w`` ``w/Adam``: that lies beside ``w`` then, as one key.
    """
    values = set(paths.values())
    found = {name: _beside(path, values) for name, path in paths.items()}
    taken = set(found.values())
    if len(taken) < len(found) or any(len(path) >= MAX_DEPTH or _is_below(path, taken) for path in taken):
        return {name: (name,) for name in paths}
    return found


def _beside(path: Path, values: Iterable[Path]) -> Path:
    for length in range(1, min(len(path), MAX_DEPTH)):
        if path[:length] in values:
            return (*path[: length - 1], "/".join(path[length - 1 :]))
    return path


def _is_below(path: Path, values: Iterable[Path]) -> bool:
    return any(path[:length] in values for length in range(1, len(path)))


def _with_lists(branch: dict[str, Any]) -> Any:
    """Makes lists of the containers whose keys are the numbers from 0 on."""
    found = {key: _with_lists(value) if isinstance(value, _Branch) else value for key, value in branch.items()}
    if isinstance(branch, _Branch) and found.keys() == {str(index) for index in range(len(found))}:
        return [found[str(index)] for index in range(len(found))]
    return found
