"""Build the objects in torch pickles: tensors (views of storages), and a few other classes that contain plain data.

The builders follow the definitions in `torch._utils` and `torch._weights_only_unpickler`.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.errors import DamagedCheckpointError
from ....engine.format import dtype_from_name
from ....engine.pytree import COMMON_DTYPES, TorchDType, torch_dtype
from ....engine.sources import StoredArray, StoredPart, Unreadable, is_contiguous
from .pickles import Builder, Inert, Name, Stateful, shown

ByteOrder = Literal["<", ">"]
_LARGEST = 1 << 62
_AXES = 64
# Supported dtype names. The last line lists quantized and packed dtypes, which are read as bytes.
_DTYPES = COMMON_DTYPES | {
    *("complex32", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "quint8", "qint8", "quint4x2", "quint2x4"),
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}


def named_dtype(dtype: object) -> TorchDType:
    """Return the torch dtype for a name in a pickle."""
    name = dtype.attribute if isinstance(dtype, Name) and dtype.module == "torch" else ""
    if name in _DTYPES:
        return torch_dtype(name)
    raise DamagedCheckpointError(f"{shown(dtype)} is not a torch dtype that holdfast knows")


class Record(NamedTuple):
    """A record in an archive: its offset in the file, its length in bytes, and its CRC-32 (None if unknown)."""

    offset: int
    length: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A torch storage: a contiguous block of memory that tensors are views of."""

    record: Record
    file: str
    elements: TorchDType
    byte_order: ByteOrder

    def tensor(
        self,
        offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any = False,
        _hooks: Any = None,
        metadata: Any = None,
        *,
        elements: TorchDType | None = None,
    ) -> StoredArray:
        """Check the offset, shape, and strides of a tensor, and return it as a view of this storage."""
        elements = elements or self.elements
        shape, strides = sizes(size), sizes(stride)
        if len(shape) != len(strides) or type(offset) is not int or not 0 <= offset <= _LARGEST:
            raise DamagedCheckpointError("a tensor has strides that do not fit its shape")
        if elements.paired:
            shape, strides, offset = (*shape, 2), (*(2 * step for step in strides), 1), 2 * offset
        count = math.prod(shape)
        if count > _LARGEST:
            raise DamagedCheckpointError(f"a tensor of shape {shape} is too large for any memory")
        last = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) if count else -1
        itemsize = elements.dtype.itemsize
        if (offset + last + 1) * itemsize > self.record.length and count:
            raise DamagedCheckpointError(
                f"a tensor of shape {shape} takes {(offset + last + 1) * itemsize} bytes of a storage of "
                f"{self.record.length}"
            )
        length = (last + 1) * itemsize
        details = {**elements.details, "requires_grad": True} if requires_grad is True else elements.details
        crc32, is_whole = self.record.crc32, length == self.record.length
        part = StoredPart(
            start=(0,) * len(shape),
            shape=shape,
            file=self.file,
            offset=self.record.offset + offset * itemsize,
            length=length,
            dtype=elements.dtype.newbyteorder(self.byte_order),
            strides=None if is_contiguous(shape, strides) else strides,
            is_intact=(lambda data: zlib.crc32(data.data) == crc32) if is_whole and crc32 is not None else None,
            finish=_finish(metadata),
            surrounding=None if is_whole or crc32 is None else (self.record.offset, self.record.length, crc32),
        )
        return StoredArray(elements.dtype, shape, details, lambda: [part])


def storage_finder(records: Mapping[str, Record], file: str, byte_order: ByteOrder) -> Callable[[Any], Storage]:
    """Return a function that maps a persistent id in a pickle to the storage that it refers to."""

    def find(identity: Any) -> Storage:
        if type(identity) is not tuple or len(identity) < 5 or identity[0] != "storage":
            raise DamagedCheckpointError("the pickle refers to an object that is not a storage")
        _, storage_type, key, _, count = identity[:5]
        record = records.get(f"data/{key}") if type(key) is str else None
        if record is None:
            raise DamagedCheckpointError(f"storage {shown(key)} is missing")
        name = _STORAGES.get(storage_type.attribute) if isinstance(storage_type, Name) else None
        elements = torch_dtype(name or "uint8")
        if type(count) is not int or (name and count * elements.dtype.itemsize > record.length):
            raise DamagedCheckpointError(
                f"storage {shown(key)} has {record.length} bytes, too few for {shown(count)} elements"
            )
        return Storage(record, file, elements, byte_order)

    return find


def _parameter(data: Any, requires_grad: Any, *_: Any) -> Any:
    if isinstance(data, StoredArray):
        details = {key: value for key, value in data.details.items() if key != "requires_grad"}
        data.details = {**details, "requires_grad": True} if requires_grad is True else details
    return data


def sizes(value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, tuple | list) else None
    if numbers is None or len(numbers) > _AXES or any(type(n) is not int or not 0 <= n <= _LARGEST for n in numbers):
        raise DamagedCheckpointError(f"{shown(value)} is not a shape or an offset")
    return numbers


def _finish(metadata: Any) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """Return a function that applies the deferred conjugation or negation, or None if neither was deferred."""
    marks = metadata if isinstance(metadata, dict) else {}
    conjugate, negate = marks.get("conj") is True, marks.get("neg") is True
    if not conjugate and not negate:
        return None

    def finish(array: NDArray[Any]) -> NDArray[Any]:
        elements = np.conjugate(array) if conjugate else array
        return -elements if negate else elements

    return finish


class _Array(Stateful):
    """A numpy array in a pickle. It is created empty, and the opcode ``BUILD`` then fills it."""

    def __init__(self, *_: Any) -> None:
        self.value: NDArray[Any] | Unreadable | None = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        shape = sizes(shape)
        if isinstance(dtype, _DType) and dtype.value is None:
            self.value = Unreadable(f"an array of {dtype.elements}")
            return
        if not isinstance(dtype, _DType) or type(data) is not bytes:
            raise ValueError("a numpy array has elements that are not plain data")
        if math.prod(shape) * dtype.value.itemsize != len(data):
            raise ValueError(f"a numpy array of shape {shape} has {len(data)} bytes")
        self.value = np.frombuffer(data, dtype.value).reshape(shape, order="F" if fortran is True else "C").copy()


class _DType(Stateful):
    """A numpy dtype in a pickle. ``value`` is None unless the type is numeric (including ml_dtypes), text, or bytes."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.value: Any = None
        self.elements = "Python objects" if code == "O8" else f"elements of type {shown(code)}"
        if isinstance(code, Name):
            self.value = dtype_from_name(code.attribute) if code.module == "ml_dtypes" else None
        elif type(code) is not str or len(code) > 12 or not code[:1].isalpha() or not code[1:].isdecimal():
            raise ValueError(f"{shown(code)} is not a dtype")
        elif code[0] in "biufcSU":
            self.value = np.dtype(code)

    def set_state(self, state: Any) -> None:
        order = state[1]
        if order in ("<", ">") and self.value is not None:
            self.value = self.value.newbyteorder(order)


def _scalar(dtype: Any, data: Any = None) -> Any:
    if isinstance(dtype, _DType) and dtype.value is None:
        return Unreadable(f"a number of {dtype.elements}")
    if not isinstance(dtype, _DType) or type(data) is not bytes or len(data) != dtype.value.itemsize:
        raise ValueError("a numpy scalar has a value that is not plain data")
    return np.frombuffer(data, dtype.value)[0]


def _encode(text: Any, encoding: Any = None) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes are written in an unknown encoding")
    return text.encode("latin1")


def plain_array(value: Any) -> Any:
    """If the value is an unpickled array, return the numpy array that it wraps; otherwise return it unchanged."""
    if isinstance(value, _Array):
        if value.value is None:
            raise DamagedCheckpointError("a numpy array has no elements")
        return value.value
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{shown(value)} is not text")
    return value


def _device(device_type: Any, index: Any = None) -> str:
    return _text(device_type) if index is None else f"{_text(device_type)}:{shown(index)}"


def _typed(function: Any, tensor_type: Any, arguments: Any, state: Any) -> Any:
    """Rebuild a tensor that was saved with attributes. Plain tensors lose them; a subclass becomes an inert object."""
    builder = BUILDERS.get(function) if isinstance(function, Name) else None
    if builder is None or tensor_type not in _TENSOR_TYPES:
        return Inert(tensor_type if isinstance(tensor_type, Name) else Name("torch", "Tensor"), (arguments, state))
    return builder(*arguments)


_TENSOR_TYPES = {Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter"), Name("torch.nn.parameter", "Buffer")}
BUILDERS: Mapping[Name, Builder] = {
    Name("torch._utils", "_rebuild_tensor"): Storage.tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): Storage.tensor,
    Name("torch._utils", "_rebuild_tensor_v3"): lambda storage, offset, size, stride, grad, hooks, dtype, *more: (
        storage.tensor(offset, size, stride, grad, hooks, *more, elements=named_dtype(dtype))
    ),
    Name("torch._utils", "_rebuild_parameter"): _parameter,
    Name("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    Name("torch._tensor", "_rebuild_from_type_v2"): _typed,
    Name("torch", "Size"): lambda numbers=(): sizes(numbers),
    Name("torch", "device"): _device,
    Name("torch.serialization", "_get_layout"): _text,
    Name("collections", "OrderedDict"): lambda pairs=(): OrderedDict(_pairs(pairs)),
    Name("collections", "defaultdict"): lambda *_: {},
    Name("builtins", "dict"): lambda pairs=(): dict(_pairs(pairs)),
    Name("builtins", "set"): lambda items=(): set(_scalars(items)),
    Name("builtins", "frozenset"): lambda items=(): frozenset(_scalars(items)),
    Name("builtins", "bytearray"): lambda text=b"", encoding=None: (
        text if type(text) is bytes else _encode(text, encoding.replace("-", "") if encoding else None)
    ),
    Name("builtins", "complex"): lambda real, imaginary: complex(float(real), float(imaginary)),
    Name("_codecs", "encode"): _encode,
    Name("numpy", "dtype"): _DType,
    **{Name(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{Name(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{
        Name(module, "AttributeDict"): lambda _state=None: {}
        for module in (
            "lightning.fabric.utilities.data",
            "lightning_fabric.utilities.data",
            "lightning.pytorch.utilities.parsing",
            "pytorch_lightning.utilities.parsing",
        )
    },
}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    pairs = [(key, item) for key, item in value]
    _scalars([key for key, _ in pairs])
    return pairs


def _scalars(items: Any) -> list[Any]:
    values = list(items) if isinstance(items, list | tuple | set | frozenset) else None
    if values is None or any(isinstance(value, tuple | frozenset) for value in values):
        raise ValueError("a key or element is a container")
    return values
