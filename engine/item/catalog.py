"""What every process knows of the arrays of a tree: how each is stored, cut and held. No array's values are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..format import Stored, dtype_name, encode_array_metadata, key_order, storage_dtype
from ..tree import ArrayLeaf, Part, ValueLeaf, display
from .grid import Holders, chunk_holders, chunk_shape, common_cuts
from .plan import CHECKSUM_BYTES, CHUNK_ALIGNMENT, ArraySpec, Layout
from .spread import Alike, Spread

HostLeaf = ArrayLeaf | ValueLeaf

Chunks = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Some chunks: the number of the array of each, and its number within the array."""

_CHUNKS_LIMIT = 1 << 20
_TINY = 1024  # bytes; a million chunks that are smaller than this are a mistake


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What arrays that are alike have in common.

    Attributes:
        spec: How they are stored.
        stored: Their element type as it is stored.
        metadata: Their ``zarr.json``.
        compression: The level that their chunks are compressed with, or None.
        facts: What ``tree.json`` has to say of them, as their own metadata cannot.
        parts: Which processes hold what, along the stored axes; None where all hold all.
        text: All of this for people, and to compare it between processes.
    """

    spec: ArraySpec
    stored: Stored
    metadata: bytes
    compression: int | None
    facts: dict[str, Any]
    parts: Sequence[Part] | None
    text: str


class Catalog:
    """The arrays of a tree, numbered in the order of their keys in the index, which is the same on every process.

    Args:
        names: The names of the tree's leaves.
        leaves: The leaves.
        layout: Sizes, and how chunks are compressed unless something else is said.
        compression: The level of compression of some leaves, by name; None for leaves that are not compressed.
        chunk_bytes: The largest chunk of some leaves, by name.

    Raises:
        UnsupportedLeafError: An array is divided among processes in a way that no chunks fit.

    Attributes:
        names: The names of the arrays.
        positions: Where each is among the leaves.
        forms: How each is stored; arrays that are alike share one.
        starts: The number of the first chunk of each array, counted over all arrays, and the number of all chunks.
        documents: What ``tree.json`` says of every leaf, in the order of the tree.
    """

    def __init__(
        self,
        names: Sequence[str],
        leaves: Sequence[HostLeaf],
        layout: Layout,
        compression: Mapping[str, int | None] | None = None,
        chunk_bytes: Mapping[str, int] | None = None,
    ) -> None:
        compression, chunk_bytes = compression or {}, chunk_bytes or {}
        known: dict[tuple[Any, ...], Form] = {}
        arrays: list[str] = []
        positions: list[int] = []
        forms: list[Form] = []
        self.documents: list[dict[str, Any]] = []
        for position, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if isinstance(leaf, ValueLeaf):
                self.documents.append(leaf.details)
                continue
            level = compression.get(name, layout.compression)
            limit = chunk_bytes.get(name, layout.chunk_bytes)
            # Leaves that are divided alike share their parts: comparing thousands of these would take longer than all
            # the rest.
            key = (leaf.shape, leaf.dtype, limit, level, id(leaf.parts))
            form = known.get(key)
            if form is None:
                form = known[key] = _form(name, leaf, limit, level)
            arrays.append(name)
            positions.append(position)
            forms.append(form)
            self.documents.append({**leaf.details, **form.facts} if form.facts else leaf.details)
        order = key_order(arrays)
        self.names = [arrays[i] for i in order]
        self.positions: NDArray[np.int64] = np.array([positions[i] for i in order], np.int64)
        self.forms = [forms[i] for i in order]
        self.starts: NDArray[np.int64] = np.zeros(len(order) + 1, np.int64)
        np.cumsum([form.spec.chunks for form in self.forms], out=self.starts[1:])
        self._others = [name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, ValueLeaf)]

    def everything(self) -> Chunks:
        """Returns all chunks."""
        arrays = np.repeat(np.arange(len(self.names)), np.diff(self.starts))
        return arrays, np.arange(len(arrays)) - self.starts[arrays]

    def ordered(self, arrays: NDArray[np.int64], numbers: NDArray[np.int64]) -> Chunks:
        """Sorts chunks by where their leaf is in the tree, which is how they are to lie in the data files."""
        order = np.lexsort((numbers, self.positions[arrays]))
        return arrays[order], numbers[order]

    def spread(self, processes: int) -> Spread:
        """Decides which process writes which chunks.

        Args:
            processes: How many processes there are.

        Returns:
            The decision.

        Raises:
            UnsupportedLeafError: A leaf is held by processes that there are not, or a part of it by none.
        """
        alike: dict[int, list[int]] = {}
        for number, form in enumerate(self.forms):
            alike.setdefault(id(form), []).append(number)
        kinds = []
        for numbers in alike.values():
            spec, parts = self.forms[numbers[0]].spec, self.forms[numbers[0]].parts
            space = -(-(spec.chunk_nbytes + CHECKSUM_BYTES) // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
            holders: Holders | None = None
            if parts is None and not spec.shape:
                # Numbers may differ from process to process, as the time does: then all of them are process 0's.
                holders = Holders(((0,),), np.zeros(1, np.int32))
            elif parts is not None and spec.chunks:
                try:
                    holders = chunk_holders(spec.shape, spec.chunk_shape, parts, processes)
                except ValueError as error:
                    raise UnsupportedLeafError(
                        f"the leaf {display(self.names[numbers[0]])} cannot be saved: {error}"
                    ) from error
            kinds.append(Alike(np.array(numbers, np.int64), spec.chunks, space, holders))
        return Spread(kinds, processes)

    def lines(self) -> list[str]:
        """Describes every leaf in one line: its name, a tab, and all that has to be the same on every process."""
        found = [f"{name}\t{form.text}" for name, form in zip(self.names, self.forms, strict=True)]
        return found + [f"{name}\ta value" for name in sorted(self._others)]


def _form(name: str, leaf: ArrayLeaf, limit: int, level: int | None) -> Form:
    stored = storage_dtype(leaf.dtype)
    shape, parts = leaf.shape, leaf.parts
    if stored.extra is not None:
        shape = (*shape, stored.extra)
        parts = parts and tuple(Part((*p.start, 0), (*p.shape, stored.extra), p.holders) for p in parts)
    chunks = chunk_shape(shape, stored.numpy.itemsize, limit, common_cuts(shape, parts))
    spec = ArraySpec(shape, chunks, stored.numpy.itemsize)
    if spec.chunks > _CHUNKS_LIMIT and spec.chunk_nbytes < _TINY:
        raise UnsupportedLeafError(
            f"the leaf {display(name)} of shape {list(leaf.shape)} cannot be saved: the places where its parts begin "
            f"have so few divisors in common that it would be cut into {spec.chunks} chunks of {spec.chunk_nbytes} "
            "bytes; divide it more evenly, or save it from one process"
        )
    dtype = dtype_name(leaf.dtype)
    text = f"{dtype}{list(leaf.shape)} in chunks of {list(chunks)}"
    if level is not None:
        text += f", compressed with level {level}"
    if parts is not None:
        digest = hashlib.blake2b(repr(tuple(parts)).encode(), digest_size=8).hexdigest()
        text += f", divided into {len(parts)} parts ({digest})"
    plain = stored.extra is None and leaf.dtype.isnative
    return Form(
        spec,
        stored,
        encode_array_metadata(shape, stored.data_type, chunks, level),
        level,
        {} if plain else {"dtype": dtype},
        parts,
        text,
    )
