"""Writes a tree as a file that ``torch.load(path, weights_only=True)`` opens."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from ..errors import OptionError, UnsupportedLeafError
from ..item import SavedLeaf, load_tree
from ..storage import TEMPORARY_PREFIX, Location
from ..storage.statuses import os_errors
from ..tree import display
from .files import check_destination
from .source import TreeSource, as_reader

_NUMBERS = ("bool", "int", "float", "complex")


def export_torch(source: TreeSource, destination: Location, *, overwrite: bool = False) -> int:
    """Writes a tree with ``torch.save``, atomically and durably; all of it is in memory meanwhile.

    Arrays become tensors, of whatever library they were; Python's values stay what they are. Containers become
    dictionaries, lists and tuples.

    Args:
        source: The tree.
        destination: The file.
        overwrite: Whether to replace a file that is there.

    Returns:
        Bytes of the file.

    Raises:
        CheckpointExistsError: Something is there already.
        UnsupportedLeafError: Leaves have dtypes that torch lacks; all of them are named, and nothing was written.
        OptionError: torch is not installed.
    """
    check_destination(destination, overwrite=overwrite)
    torch = _torch()
    template = source.skeleton.build(_templates(torch, source))
    tree = _plain(torch, load_tree(as_reader(source), like=template))
    destination.parent.make_directory()
    if not destination.is_local:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        destination.write_bytes(buffer.getvalue())
        return buffer.tell()
    with _replacing(destination) as file:
        torch.save(tree, file)
        return file.tell()


@contextlib.contextmanager
def _replacing(destination: Location) -> Iterator[IO[bytes]]:
    """Opens a file that gets its name once it is whole and durable."""
    partial = destination.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with os_errors(str(destination), "write"), open(partial, "xb") as file:
            try:
                yield file
            except RuntimeError as error:  # torch's archive, closed after the file has failed
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
        partial.rename(destination.name)
    except BaseException:
        partial.remove()
        raise


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise OptionError("exporting for torch needs torch: pip install torch, or export safetensors") from error
    return torch


def _templates(torch: Any, source: TreeSource) -> list[Any]:
    """Returns a tensor without memory for every array, and ``...`` for every other leaf."""
    problems: list[str] = []
    templates = [_template(torch, leaf, problems) for leaf in source.leaves]
    if problems:
        headline = f"{source.location} does not fit into a file of torch, and nothing was written:"
        raise UnsupportedLeafError("\n  ".join([headline, *problems]))
    return templates


def _template(torch: Any, leaf: SavedLeaf, problems: list[str]) -> Any:
    saved = leaf.saved
    if saved.dtype is None or saved.shape is None or saved.kind in (*_NUMBERS, "str", "bytes", "key"):
        return ...
    name = saved.details.get("torch_dtype") or saved.dtype.newbyteorder("=").name
    dtype = getattr(torch, str(name), None)
    # Torch has names for integers of less than a byte, and nothing that could be done with them.
    if not isinstance(dtype, torch.dtype) or re.fullmatch("u?int[1-7]", str(name)):
        problems.append(f"{display(leaf.name)}: torch has no {name}")
        return ...
    shape: Sequence[int] = saved.shape[:-1] if name == "complex32" else saved.shape
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _plain(torch: Any, value: Any) -> Any:
    """Returns what ``weights_only`` takes: no factories of dictionaries, and no arrays of numpy."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)  # the data of keys
    if isinstance(value, dict):
        kind: Any = dict if isinstance(value, defaultdict) else type(value)
        return kind({key: _plain(torch, item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)([_plain(torch, item) for item in value])
    return value
