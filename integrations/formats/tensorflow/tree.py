"""Read the files of a TensorFlow checkpoint, and build a tree from the values and the object graph.

A checkpoint is identified by a prefix, such as ``dir/ckpt-5``. Its files are the index ``dir/ckpt-5.index`` and
numbered data files, such as ``dir/ckpt-5.data-00000-of-00001``, in the format of
``tensorflow/core/util/tensor_bundle`` ("V2").

The graph is a ``TrackableObjectGraph`` message (``tensorflow/core/protobuf/trackable_object_graph.proto``). Values are
named by the shortest path to their object, as in ``net/l1/kernel/.ATTRIBUTES/VARIABLE_VALUE`` or, for optimizer slots,
``net/l1/kernel/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE``. In edge names, ``.`` is escaped as ``..`` and ``/``
as ``.S``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....engine.arrays import NamedVariables, SavedLeaf, naming, read_checked
from ....engine.errors import DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ....engine.forks import cached_property
from ....engine.format import Cursor, crc32c, extend
from ....engine.pytree import MAX_DEPTH, escape_key, join
from ....engine.sources import StoredArray, StoredPart, StoredTree, entry_size, nested
from ....engine.storage import Location
from .index import (
    STRING,
    VARIANT,
    BundleEntry,
    box_of,
    content,
    decode_entry,
    decode_header,
    fields,
    masked,
    read_table,
    signed,
    slice_key,
    text,
)

MOST_LEAVES = 1 << 16  # maximum number of elements in a string tensor that is split into leaves
_CHECKSUM_BYTES = 4
_PADDING = 4  # maximum size of a padded bytes array, as a multiple of the text size
_SMALL = 1 << 20  # padded size, in bytes, that is allowed in addition to this multiple


def as_leaves(texts: list[bytes], entry: BundleEntry) -> Any:
    """Return text as one leaf; variants, and text that does not fit in a numpy bytes array, become lists of leaves."""
    shape = entry.shape
    if not shape:
        return texts[0]
    longest = max(map(len, texts), default=0)
    fits = max(longest, 1) * len(texts) <= _PADDING * sum(map(len, texts)) + _SMALL
    if not texts or (entry.kind != VARIANT and fits and not any(text.endswith(b"\0") for text in texts)):
        return np.array(texts, f"S{max(longest, 1)}").reshape(shape)
    if len(texts) > MOST_LEAVES:
        raise UnsupportedLeafError(f"{len(texts)} pieces of text that no numpy array can hold")
    return np.fromiter(texts, object, len(texts)).reshape(shape).tolist()


def _texts(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    """Decode a string tensor (lengths, their checksum, and text), and verify the checksums in it and in ``entry``."""
    if not data and not entry.count:
        return []
    cursor = Cursor(data, "its text")
    lengths = cursor.wide_varints(entry.count)
    noted = cursor.take(_CHECKSUM_BYTES)
    if any(lengths >> np.uint64(32)):
        fixed = b"".join(int(length).to_bytes(8 if length >> 32 else 4, order) for length in lengths.tolist())
    else:
        fixed = lengths.astype(np.dtype(np.uint32).newbyteorder(order)).tobytes()
    crc = crc32c(fixed)
    if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
        raise DamagedCheckpointError("the lengths of its text do not match the checksum in the file")
    if masked(extend(extend(crc, noted), data[cursor.position :])) != entry.checksum:
        raise DamagedCheckpointError("its text does not match the checksum in the file")
    texts = [cursor.take(length) for length in lengths.tolist()]
    cursor.finish()
    return texts


def _variants(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    """Decode serialized variants. Each variant is preceded by its length and followed by a running checksum."""
    cursor, crc = Cursor(data, "its text"), 0
    messages: list[bytes] = []
    for _ in range(entry.count):
        length = cursor.varint()
        messages.append(cursor.take(length))
        noted = cursor.take(_CHECKSUM_BYTES)
        crc = extend(extend(crc, length.to_bytes(8, order)), messages[-1])
        if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
            raise DamagedCheckpointError("a variant does not match the checksum in the file")
        crc = extend(crc, noted)
    if cursor.remaining or (data and masked(crc) != entry.checksum):
        raise DamagedCheckpointError("its variants do not match the checksum in the file")
    return messages


INDEX = ".index"
_INDEX_LIMIT = 1 << 30  # maximum size, in bytes, of an index file
_SLICES = b"\0"  # first byte of slice keys


class Bundle:
    """A checkpoint whose index has been read; ``tensors`` maps tensor names to index entries."""

    def __init__(self, prefix: Location) -> None:
        self.prefix = prefix
        self.tensors: dict[str, BundleEntry] = {}
        self._slices: dict[bytes, BundleEntry] = {}
        file = prefix.parent / f"{prefix.name}{INDEX}"
        content = read_checked(file, None, limit=_INDEX_LIMIT)
        with naming(file):
            entries = read_table(content)
            if not entries or entries[0][0]:
                raise DamagedCheckpointError("it has no header")
            self._header = decode_header(entries[0][1])
            for key, value in entries[1:]:
                self._add(key, value)
        self._index_bytes = len(content)

    @property
    def files(self) -> list[Location]:
        return [self.prefix.parent / name for name in (f"{self.prefix.name}{INDEX}", *self._sizes)]

    @cached_property
    def nbytes(self) -> int:
        return self._index_bytes + sum(self._sizes.values())

    def data_file(self, number: int) -> str:
        return f"{self.prefix.name}.data-{number:05d}-of-{self._header.shards:05d}"

    def array(self, name: str) -> StoredArray:
        """Return a numeric tensor as a lazy array, without reading its data."""
        entry = self.tensors[name]
        if entry.dtype is None:
            raise UnsupportedLeafError(unknown_type(entry.kind))
        return StoredArray(entry.dtype, entry.shape, {"kind": "numpy"}, lambda: self._parts(name, entry))

    def is_text(self, name: str) -> bool:
        """True if the elements of a tensor are bytes: strings, or serialized variants."""
        return self.tensors[name].kind in (STRING, VARIANT)

    def check_texts(self) -> None:
        """Reject string tensors that claim more bytes than the files contain. Call this before reading any text."""
        texts = [entry for name, entry in self.tensors.items() if self.is_text(name)]
        files = [self._sizes.get(self.data_file(entry.shard), 0) for entry in texts]
        sizes = [entry.size for entry, size in zip(texts, files, strict=True) if entry.offset + entry.size <= size]
        if sum(sizes) > self.nbytes:
            raise DamagedCheckpointError(f"{self.prefix}: its text claims {sum(sizes)} of {self.nbytes} bytes")

    def texts(self, name: str) -> list[bytes]:
        entry = self.tensors[name]
        with naming(self.prefix.parent / self.data_file(entry.shard), f": tensor {name!r:.200}"):
            if entry.slices:
                raise DamagedCheckpointError("text cannot be stored in slices")
            decode = _variants if entry.kind == VARIANT else _texts
            return decode(self._bytes(entry), entry, "big" if self._header.big_endian else "little")

    def _add(self, key: bytes, value: bytes) -> None:
        try:
            entry = decode_entry(value, self._header)
            if key.startswith(_SLICES):
                self._slices[key] = entry
            else:
                self.tensors[key.decode("utf-8")] = entry
        except UnicodeDecodeError as error:
            raise DamagedCheckpointError(f"{key!r:.200} is not the name of a tensor: {error}") from error
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"tensor {key.decode('utf-8', 'replace')!r:.200}: {error}") from error

    def _parts(self, name: str, entry: BundleEntry) -> list[StoredPart]:
        parts = [] if entry.slices else [self._part(entry, (0,) * len(entry.shape))]
        for extents in entry.slices:
            start, shape = box_of(extents, entry.shape)
            stored = self._slices.get(slice_key(name.encode(), extents))
            if stored is None or stored.slices or (stored.kind, stored.shape) != (entry.kind, shape):
                raise DamagedCheckpointError(f"its slice at {list(start)} of shape {list(shape)} is missing")
            parts.append(self._part(stored, start))
        return parts

    def _part(self, entry: BundleEntry, start: tuple[int, ...]) -> StoredPart:
        dtype = entry.dtype
        assert dtype is not None
        self._check_range(entry)
        return StoredPart(
            start=start,
            shape=entry.shape,
            file=self.data_file(entry.shard),
            offset=entry.offset,
            length=entry.size,
            dtype=dtype.newbyteorder(">" if self._header.big_endian else "<"),
            finish=_check_bools if dtype.kind == "b" else None,
            is_intact=lambda data: masked(crc32c(data)) == entry.checksum,
        )

    def _bytes(self, entry: BundleEntry) -> bytes:
        self._check_range(entry)
        if not entry.size:
            return b""
        with (self.prefix.parent / self.data_file(entry.shard)).open_data() as reader:
            return reader.read(entry.offset, entry.size).tobytes()

    def _check_range(self, entry: BundleEntry) -> None:
        file = self.data_file(entry.shard)
        size = self._sizes.get(file)
        if size is None and entry.size:
            raise DamagedCheckpointError(f"{file} is missing: the checkpoint is incomplete")
        if entry.size and entry.offset + entry.size > (size or 0):
            raise DamagedCheckpointError(
                f"{file} is cut off: expected {entry.size} bytes at offset {entry.offset}, but the file has {size}"
            )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the existing data files, in bytes."""
        folder = self.prefix.parent
        names = {self.data_file(entry.shard) for entry in (*self.tensors.values(), *self._slices.values())}
        entries = [entry for entry in folder.entries() if entry.name in names and not entry.is_directory]
        return {entry.name: entry_size(folder, entry) for entry in entries}


def unknown_type(number: int) -> str:
    return f"elements of TensorFlow's type {number}, which holdfast does not read"


def _check_bools(elements: NDArray[Any]) -> NDArray[Any]:
    if np.any(elements.view(np.uint8) > 1):
        raise DamagedCheckpointError("its elements are neither true nor false")
    return elements


GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"  # name of the tensor that holds the object graph
ATTRIBUTES = ".ATTRIBUTES"
VALUE = "VARIABLE_VALUE"  # attribute name of an object with a single value
_SLOTS = "slots"  # parent key of optimizer slots, as in graphs saved by holdfast
_SHARING = 16  # maximum number of objects per value, on average; two are typical
_ESCAPED = re.compile(r"\.(?:\.|S)")


@dataclass(slots=True)
class ObjectNode:
    """An object in the object graph."""

    children: dict[str, int] = field(default_factory=dict)  # node indices of child objects, keyed by edge name
    # Pairs (attribute name, tensor name); for several tensors, the second item is the common prefix of their names.
    attributes: list[tuple[str, str]] = field(default_factory=list)
    # Optimizer slots as tuples (node index of the variable, slot name, node index of the value).
    slots: list[tuple[int, str, int]] = field(default_factory=list)


def decode_objects(message: bytes) -> list[ObjectNode]:
    nodes = [_node(content(value)) for number, value in fields(message) if number == 1]
    for node in nodes:
        numbers = [*node.children.values(), *(number for first, _, last in node.slots for number in (first, last))]
        if any(not 0 <= number < len(nodes) for number in numbers):
            raise DamagedCheckpointError(
                f"the object graph has an edge to an object that is not among its {len(nodes)}"
            )
    return nodes


def object_path(key: str) -> tuple[str, ...]:
    """Convert the name of a tensor in an object graph to the path of its leaf in the tree.

    >>> object_path("net/l1/kernel/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE")
    ('adam', 'slots', 'net', 'l1', 'kernel', 'm')
    >>> object_path("odd/a.Sb/.ATTRIBUTES/VARIABLE_VALUE"), object_path("table/.ATTRIBUTES/table-keys")
    (('odd', 'a/b'), ('table', '.ATTRIBUTES', 'table-keys'))
    """
    head, mark, attribute = key.partition(f"/{ATTRIBUTES}/")
    if not mark:
        return tuple(key.split("/"))
    variable, mark, slot = head.partition("/.OPTIMIZER_SLOT/")
    path = [*_segments(slot)[:-1], _SLOTS, *_segments(variable), _segments(slot)[-1]] if mark else _segments(head)
    return tuple(path) if attribute == VALUE and path else (*path, ATTRIBUTES, attribute)


def graph_document(nodes: Sequence[ObjectNode], names: Mapping[str, str]) -> dict[str, Any]:
    """Convert an object graph to a holdfast document. Values are in ``.ATTRIBUTES``, except in single-value objects."""
    keys = sorted(names)
    documents: list[dict[str, Any]] = [{} for _ in nodes]
    owners: dict[str, int] = {}
    same = list(range(len(nodes)))  # canonical index of each node; objects that share a value are merged
    budget = _SHARING * (len(keys) + len(nodes))
    for number, node in enumerate(nodes):
        values = [(key, names[key]) for _, beginning in node.attributes for key in _matching(keys, beginning, budget)]
        budget -= len(values)
        is_value = number > 0 and not node.children and [name for name, _ in node.attributes] == [VALUE]
        if is_value and len(values) == 1:
            same[number] = owner = owners.setdefault(values[0][1], number)
            documents[number] = {"value": values[0][1]} if owner == number else {}
            continue
        documents[number] = {"edges": {escape_key(name): child for name, child in node.children.items()}}
        inner: dict[str, int] = {}
        for key, value in values:
            if value not in owners:
                owners[value] = inner[escape_key(key.rpartition(f"/{ATTRIBUTES}/")[2])] = len(documents)
                documents.append({"value": value})
        if inner:
            documents[number]["edges"].setdefault(escape_key(ATTRIBUTES), len(documents))
            documents.append({"edges": inner})
        if node.slots:
            documents[number][_SLOTS] = [[variable, escape_key(name), value] for variable, name, value in node.slots]
    same += range(len(same), len(documents))
    for entry in documents:
        if "edges" in entry:
            entry["edges"] = {segment: same[child] for segment, child in entry["edges"].items()}
        if _SLOTS in entry:
            entry[_SLOTS] = [[same[variable], segment, same[value]] for variable, segment, value in entry[_SLOTS]]
    return {"nodes": documents}


def _node(message: bytes) -> ObjectNode:
    node = ObjectNode()
    for number, value in fields(message):
        if number not in (1, 2, 3):
            continue
        parts = dict(fields(content(value)))  # if a field is repeated, the last value wins
        if number == 1:
            node.children[text(parts.get(2, b""))] = signed(parts.get(1, 0))
        elif number == 2:
            node.attributes.append((text(parts.get(1, b"")), text(parts.get(3, b""))))
        else:
            node.slots.append((signed(parts.get(1, 0)), text(parts.get(2, b"")), signed(parts.get(3, 0))))
    return node


def _matching(keys: Sequence[str], beginning: str, limit: int) -> Iterator[str]:
    """Yield the tensor names of an attribute: an exact match or, for a lookup table, all names with the prefix."""
    index = bisect_left(keys, beginning)
    if index < len(keys) and keys[index] == beginning:
        yield beginning
        return
    while f"/{ATTRIBUTES}/" in f"/{beginning}" and index < len(keys) and keys[index].startswith(beginning):
        if limit <= 0:
            raise DamagedCheckpointError("in the object graph, too many objects share each value")
        yield keys[index]
        index, limit = index + 1, limit - 1


def _segments(path: str) -> list[str]:
    names = path.split("/") if path else []
    return [_ESCAPED.sub(lambda match: "." if match[0] == ".." else "/", name) for name in names]


Path = tuple[str, ...]


class BundleTree(StoredTree, NamedVariables):
    """The values and object graph of a checkpoint. Values are accessible as a tree or by TensorFlow name."""

    variables: NamedVariables  # the tree itself, because it also provides access by TensorFlow name
    _bundle: Bundle
    _objects: Sequence[ObjectNode] | None
    _tensor_names: Mapping[str, str]
    _leaves: Mapping[str, SavedLeaf]

    @classmethod
    def open(cls, prefix: Location) -> BundleTree:
        bundle = Bundle(prefix)
        bundle.check_texts()
        objects = _objects(bundle)
        names = [name for name in bundle.tensors if name != GRAPH_KEY or objects is None]
        values: dict[str, Any] = {}
        left_out: list[str] = []
        for name in names:
            try:
                values[name] = _value(bundle, name)
            except UnsupportedLeafError as error:
                left_out.append(f"{name!r:.200} ({error})")
        paths = _arranged({name: object_path(name) if objects else tuple(name.split("/")) for name in values})
        tree = nested(((path, values[name]) for name, path in paths.items()), root_is_dict=True, number=str)
        bundle_tree = cls.of(prefix, tree, bundle.nbytes, left_out=left_out)
        bundle_tree.files_read = bundle.files
        bundle_tree._bundle, bundle_tree._objects = bundle, objects
        bundle_tree._tensor_names = {name: join(path) for name, path in paths.items()}
        bundle_tree._leaves = {leaf.name: leaf for leaf in bundle_tree.leaves}
        bundle_tree.variables = bundle_tree
        return bundle_tree

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(entry.shape) for name, entry in self._bundle.tensors.items()}

    def dtypes(self) -> dict[str, np.dtype[Any] | None]:
        tensors, is_text = self._bundle.tensors, self._bundle.is_text
        return {name: np.dtype(object) if is_text(name) else entry.dtype for name, entry in tensors.items()}

    def read_value(self, name: str) -> Any:
        entry = self._bundle.tensors.get(name)
        if entry is None:
            raise ObjectNotFoundError(f"{self.location} has no tensor {name!r:.200}")
        if self._bundle.is_text(name):
            texts = self._bundle.texts(name)
            return np.fromiter(texts, object, len(texts)).reshape(entry.shape) if entry.shape else texts[0]
        if name not in self._tensor_names:
            raise UnsupportedLeafError(f"{self.location}: tensor {name!r:.200} has {unknown_type(entry.kind)}")
        (array,) = self.read_leaves([self._leaves[self._tensor_names[name]]])
        return array

    def graph_document(self) -> Any:
        return None if self._objects is None else graph_document(self._objects, self._tensor_names)

    def file(self, path: str) -> Location:
        return self.location.parent / path if path else self.location


def _objects(bundle: Bundle) -> list[ObjectNode] | None:
    """Read the object graph; None if the checkpoint has none."""
    entry = bundle.tensors.get(GRAPH_KEY)
    if entry is None or not bundle.is_text(GRAPH_KEY) or entry.shape:
        return None
    with naming(bundle.prefix, ": its object graph cannot be read"):
        return decode_objects(bundle.texts(GRAPH_KEY)[0]) or None


def _value(bundle: Bundle, name: str) -> Any:
    if not bundle.is_text(name):
        return bundle.array(name)
    entry = bundle.tensors[name]
    try:
        return as_leaves(bundle.texts(name), entry)
    except DamagedCheckpointError as error:
        problem = str(error)

    def refuse() -> Any:
        raise DamagedCheckpointError(problem)

    return StoredArray(np.dtype("S1"), entry.shape, {"kind": "numpy"}, refuse)


def _arranged(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Change the paths of values that lie below other values, such as TensorFlow 1's slot ``w/Adam`` below ``w``."""
    values = set(paths.values())
    arranged = {name: _beside(path, values) for name, path in paths.items()}
    taken = set(arranged.values())
    is_deep = any(len(path) >= MAX_DEPTH for path in taken)
    if len(taken) < len(arranged) or is_deep or any(_beside(path, taken) != path for path in taken):
        return {name: (name,) for name in paths}
    return arranged


def _beside(path: Path, values: Collection[Path]) -> Path:
    """If a path passes through a value, join the keys from the value onward into a single key."""
    for length in range(1, min(len(path), MAX_DEPTH)):
        if path[:length] in values:
            return (*path[: length - 1], "/".join(path[length - 1 :]))
    return path
