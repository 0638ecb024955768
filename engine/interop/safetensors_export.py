"""Writes a tree as one safetensors file: one leaf after the other, so that memory holds some of them at a time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..item import SavedLeaf
from ..storage import TEMPORARY_PREFIX, Location, Segment
from ..tree import display, to_document
from .batches import batches
from .files import check_destination
from .safetensors import TREE_NOTE, tensor_name
from .safetensors_header import dtype_name, encode_header
from .source import TreeSource

_BATCH = 64 << 20  # bytes of leaves that are read together
_STEP = 1 << 20  # bytes handed on at a time
_PT = {"format": "pt"}  # what other libraries expect to find in the metadata


def export_safetensors(source: TreeSource, destination: Location, *, overwrite: bool = False) -> int:
    """Writes a tree as a safetensors file, atomically and durably.

    A leaf's tensor is called by the keys of its path, joined by dots. Python's numbers become tensors without axes.
    Text, bytes, None and the containers themselves are noted in the file's metadata, which only holdfast reads.

    Args:
        source: The tree.
        destination: The file.
        overwrite: Whether to replace a file that is there.

    Returns:
        Bytes of the file.

    Raises:
        CheckpointExistsError: Something is there already.
        UnsupportedLeafError: Leaves have dtypes that the format lacks, or names that are the same once they are
            joined; all of them are named, and nothing was written.
    """
    check_destination(destination, overwrite=overwrite)
    arrays = [leaf for leaf in source.leaves if leaf.saved.dtype is not None]
    _check(source, arrays)
    note = to_document(source.skeleton.structure, [leaf.saved.details for leaf in source.leaves])
    begin, lengths = encode_header(
        [(tensor_name(leaf.name), _dtype(leaf), leaf.saved.shape or ()) for leaf in arrays],
        {**_PT, TREE_NOTE: json.dumps(note, separators=(",", ":"))},
    )

    def parts() -> Iterator[NDArray[np.uint8]]:
        yield np.frombuffer(begin, np.uint8)
        for batch in batches(arrays, _BATCH):
            for array in source.read(batch):
                assert array is not None
                flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
                for start in range(0, len(flat), _STEP):
                    yield flat[start : start + _STEP]

    size = len(begin) + sum(lengths)
    destination.parent.make_directory()
    if not destination.is_local:
        destination.write_data(size, [Segment(0, size, parts)])
        return size
    partial = destination.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        partial.write_data(size, [Segment(0, size, parts)])
        partial.rename(destination.name)
    except BaseException:
        partial.remove()
        raise
    return size


def _dtype(leaf: SavedLeaf) -> np.dtype[Any]:
    assert leaf.saved.dtype is not None
    return leaf.saved.dtype


def _check(source: TreeSource, leaves: Sequence[SavedLeaf]) -> None:
    problems = []
    taken: dict[str, str] = {}
    for leaf in leaves:
        name = tensor_name(leaf.name)
        if name in taken:
            problems.append(f"{display(leaf.name)}: would be called {name!r}, as {display(taken[name])}")
        taken.setdefault(name, leaf.name)
        try:
            if (variant := leaf.saved.details.get("torch_dtype")) is not None:
                raise UnsupportedLeafError(f"safetensors has no {variant}")
            dtype_name(_dtype(leaf))
        except UnsupportedLeafError as error:
            problems.append(f"{display(leaf.name)}: {error}")
    if problems:
        raise UnsupportedLeafError(
            "\n  ".join(
                [f"{source.location} does not fit into a safetensors file, and nothing was written:", *problems]
            )
        )
