"""Small leaves together in one file, instead of an array of the database each."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..format import (
    ARRAY_EXTENSION,
    decode_array,
    decode_msgpack,
    dtype_from_name,
    dtype_name,
    encode_arrays,
    storage_dtype,
)

AGGREGATE_LIMIT = 256 << 20  # largest aggregate that is written, in bytes


class AggregateHandler(abc.ABC):
    """Stores many leaves of one tree in one file: those saved with ``SaveArgs(aggregate=True)``.

    Attributes:
        name: Name of this handler in ``tree.json``. Loading the leaves needs a handler of this name.
        filename: Name of the file in the item's folder.
    """

    name: str
    filename: str

    @abc.abstractmethod
    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        """Make the file.

        Args:
            leaves: Arrays on the host by the names of their leaves; Python numbers are arrays without axes.

        Returns:
            The file's content.
        """

    @abc.abstractmethod
    def deserialize(self, content: bytes) -> Mapping[str, NDArray[Any]]:
        """Read the file.

        Args:
            content: What :meth:`serialize` returned. It matches its digest, but the digest does not tell who wrote it:
                the content must not make this method run code, or take memory out of proportion to its size.

        Returns:
            The arrays by the names of their leaves, with the dtypes and shapes that were saved.

        Raises:
            DamagedCheckpointError: The content is not what :meth:`serialize` writes.
        """


class MsgpackHandler(AggregateHandler):
    """Stores leaves in a msgpack file that ``flax.serialization.msgpack_restore`` reads: a dictionary by leaf name.

    The format is https://github.com/msgpack/msgpack/blob/master/spec.md; an array is an extension of type 1 that holds
    the msgpack of its shape, the name of its dtype, and its bytes in C order.
    """

    name = "msgpack"
    filename = "aggregate.msgpack"

    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        """Make the file."""
        return encode_arrays(leaves)

    def deserialize(self, content: bytes) -> dict[str, NDArray[Any]]:
        """Read the file."""
        found = decode_msgpack(content, extension=_array)
        if not isinstance(found, dict) or not all(isinstance(array, np.ndarray) for array in found.values()):
            raise DamagedCheckpointError("this msgpack file does not hold a dictionary of arrays")
        return found


def _array(code: int, data: bytes, _depth: int) -> NDArray[Any]:
    if code != ARRAY_EXTENSION:
        raise DamagedCheckpointError(f"it holds an extension of type {code}, expected arrays only")
    return decode_array(data)


def aggregate_details(array: NDArray[Any], handler: AggregateHandler) -> dict[str, Any]:
    """Return what ``tree.json`` says of a leaf in a handler's file, besides its kind."""
    plain = storage_dtype(array.dtype).extra is None and array.dtype.isnative
    return {"aggregate": handler.name} | ({} if plain else {"dtype": dtype_name(array.dtype)})


def aggregated_array(array: NDArray[Any], details: Mapping[str, Any]) -> NDArray[Any]:
    """Return an array from a handler's file with the dtype that ``tree.json`` says."""
    try:
        storage_dtype(array.dtype)
    except (TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"it holds something that is not an array of numbers: {error}") from error
    dtype = dtype_from_name(details["dtype"]) if "dtype" in details else array.dtype
    if array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        raise DamagedCheckpointError(f"it holds elements of {array.dtype}, and tree.json says {dtype}")
    return array.astype(dtype, copy=False)
