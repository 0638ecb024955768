"""Small leaves together in one file, instead of one array of the database each."""

from __future__ import annotations

import abc
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, HoldfastError
from ..format import ArrayMetadata, dtype_from_name, dtype_name, storage_dtype
from ..tree import display

AGGREGATE_LIMIT = 256 << 20
"""Bytes of the largest aggregate that is written."""

_EXTENSION = 1  # what flax.serialization calls an array in its msgpack files
_AXES = 64  # more axes than numpy allows make no array


class AggregateHandler(abc.ABC):
    """Keeps many leaves of one tree in one file: those that were saved with ``SaveArgs(aggregate=True)``.

    Attributes:
        name: How ``tree.json`` calls this handler. To load the leaves, one of this name has to be there.
        filename: The file's name in the item's folder.
    """

    name: str
    filename: str

    @abc.abstractmethod
    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        """Makes the file.

        Args:
            leaves: Arrays on the host by the names of their leaves; Python numbers are arrays without axes.

        Returns:
            The file's content.
        """

    @abc.abstractmethod
    def deserialize(self, content: bytes) -> Mapping[str, NDArray[Any]]:
        """Reads the file.

        Args:
            content: What :meth:`serialize` returned. It has been compared with its digest, which says nothing about who
                wrote it: it must not make this method run code, or take memory that it does not account for.

        Returns:
            The arrays by the names of their leaves, with the dtypes and shapes that they had.

        Raises:
            DamagedCheckpointError: It makes no sense.
        """


class MsgpackHandler(AggregateHandler):
    """Keeps leaves in a msgpack file, as ``flax.serialization.msgpack_restore`` reads it: a dictionary by leaf name.

    The format is https://github.com/msgpack/msgpack/blob/master/spec.md; an array is an extension of type 1 that holds
    the msgpack of its shape, the name of its dtype, and its bytes in C order.
    """

    name = "msgpack"
    filename = "aggregate.msgpack"

    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        """Makes the file."""
        msgpack: Any = importlib.import_module("msgpack")
        packed = {}
        for name, array in leaves.items():
            content = (array.shape, dtype_name(array.dtype), _little(array).tobytes())
            packed[name] = msgpack.ExtType(_EXTENSION, msgpack.packb(content))
        return bytes(msgpack.packb(packed))

    def deserialize(self, content: bytes) -> dict[str, NDArray[Any]]:
        """Reads the file."""
        msgpack: Any = importlib.import_module("msgpack")

        def extension(code: int, data: bytes) -> NDArray[Any]:
            if code != _EXTENSION:
                raise ValueError(f"an extension of type {code}")
            return _array(msgpack.unpackb(data, max_array_len=_AXES, max_map_len=0))

        try:
            # Lists could be nested so that each claims as many elements as there are bytes: there are none out here.
            found = msgpack.unpackb(content, ext_hook=extension, max_array_len=0)
        except HoldfastError:
            raise
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise DamagedCheckpointError(f"this is no msgpack file of arrays: {error!r:.200}") from error
        if not isinstance(found, dict) or not all(isinstance(array, np.ndarray) for array in found.values()):
            raise DamagedCheckpointError("this msgpack file does not hold a dictionary of arrays")
        return found


def aggregated(
    names: Sequence[str],
    details: Sequence[Mapping[str, Any]],
    read: Callable[[str], bytes],
    handler: AggregateHandler,
) -> dict[str, tuple[ArrayMetadata, bytes]]:
    """Reads those leaves of a tree that lie in a handler's file.

    Args:
        names: The names of all leaves.
        details: What ``tree.json`` says of each of them.
        read: Reads a file of the item, and compares it with the commit record.
        handler: What knows the file.

    Returns:
        For each of these leaves how its array would be stored among the others, and its bytes.

    Raises:
        DamagedCheckpointError: The file is missing, not what was saved, or makes no sense.
    """
    wanted = [name for name, leaf in zip(names, details, strict=True) if leaf.get("aggregate") == handler.name]
    if not wanted:
        return {}
    content = read(handler.filename)
    try:
        arrays = handler.deserialize(content)
        missing = [display(name) for name in wanted if name not in arrays]
        if missing:
            raise DamagedCheckpointError(f"it does not hold the leaf {missing[0]}, which tree.json says it does")
        return {name: _stored(arrays[name]) for name in wanted}
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{handler.filename}: {error}") from error


def aggregate_details(array: NDArray[Any], handler: AggregateHandler) -> dict[str, Any]:
    """Returns what ``tree.json`` has to say of a leaf besides its kind when it lies in a handler's file."""
    plain = storage_dtype(array.dtype).extra is None and array.dtype.isnative
    return {"aggregate": handler.name} | ({} if plain else {"dtype": dtype_name(array.dtype)})


def _stored(array: NDArray[Any]) -> tuple[ArrayMetadata, bytes]:
    try:
        stored = storage_dtype(array.dtype)
    except (TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"it holds something that is no array of numbers: {error}") from error
    shape = array.shape if stored.extra is None else (*array.shape, stored.extra)
    form = ArrayMetadata(shape, stored.data_type, tuple(max(1, size) for size in shape), "little", False)
    return form, (array.astype(stored.numpy, copy=False) if stored.extra is None else array).tobytes()


def _array(content: Any) -> NDArray[Any]:
    shape, name, data = content
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"the shape {shape!r:.80}")
    dtype = dtype_from_name(name)
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {name}{shape} in {len(data)} bytes")
    if not dtype.itemsize:
        return np.zeros(shape, dtype)
    array = np.frombuffer(data, dtype.newbyteorder("<") if dtype.isnative else dtype).reshape(shape)
    return array.astype(dtype, copy=False)


def _little(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array with its elements in the byte order that does not have to be named."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.isnative else array
