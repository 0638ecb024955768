"""Leaves that are torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .frameworks import loaded
from .leaves import ArrayLeaf, Details, LeafProblem, Piece
from .numpy_leaves import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COPIED_TYPES = {"uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"} | {
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip
_PAIRED = {"complex32": "float16"}  # stored as real and imaginary part, in one more axis


class TorchDescriber:
    """Describes torch tensors, one after the other, of one tree.

    Construct it, `prepare` every tensor, then `describe` every tensor: all copies from devices are under way before
    they are waited for, once.
    """

    def __init__(self) -> None:
        self._torch: Any = loaded("torch")
        self._copies: dict[int, Any] = {}
        self._devices: set[Any] = set()

    def prepare(self, value: Any) -> None:
        """Starts the copy to the host, where there is one to make."""
        torch = self._torch
        if value.device.type not in {"cpu", "meta"} and _why_not(torch, value) is None:
            self._copies[id(value)] = value.detach().to("cpu", non_blocking=True)
            self._devices.add(value.device)

    def describe(self, value: Any) -> ArrayLeaf:
        """Describes one tensor.

        Raises:
            LeafProblem: Sparse, quantized, nested, meta and other tensors that have no plain memory of numbers.
        """
        torch = self._torch
        problem = _why_not(torch, value)
        if problem is not None:
            raise LeafProblem(problem)
        self._synchronize()
        copied = self._copies.pop(id(value), None)
        source = value.detach() if copied is None else copied
        tensor = source.resolve_conj().resolve_neg()
        details: Details = {"kind": "torch"}
        if value.requires_grad:
            details["requires_grad"] = True
        name = dtype_name(value.dtype)
        try:
            array = _to_numpy(torch, tensor, name)
        except (RuntimeError, TypeError) as error:
            raise LeafProblem(f"is a {type(value).__name__} that cannot be turned into an array: {error}") from error
        if name in _PAIRED or stored_dtype(value.dtype) is None:
            details["torch_dtype"] = name
        volatile = copied is None and tensor.data_ptr() == value.data_ptr()
        return ArrayLeaf(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], volatile, details)

    def _synchronize(self) -> None:
        for device in self._devices:
            getattr(self._torch, device.type).synchronize(device)
        self._devices.clear()


def dtype_name(dtype: Any) -> str:
    """Gives a torch dtype's name without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Gives the numpy dtype that means the same as a torch dtype, or None where there is none."""
    name = dtype_name(dtype)
    if name in _COPIED_TYPES:
        return np.dtype(name)
    extended: Any = getattr(ml_dtypes, name, None)
    if extended is None or name.startswith(("int", "uint")):
        return None  # torch's integers of less than 8 bits are bytes without operations
    found: np.dtype[Any] = np.dtype(extended)
    return found


def _why_not(torch: Any, value: Any) -> str | None:
    if value.is_sparse or value.layout != torch.strided:
        return f"is a tensor of layout {value.layout}; store its indices and values, or value.to_dense()"
    if value.is_quantized:
        return "is a quantized tensor; store value.int_repr(), its scale and its zero point"
    if value.is_nested:
        return "is a nested tensor; store value.unbind()"
    if value.is_meta:
        return "is on the meta device, it has no values"
    if type(value).__name__ == "DTensor":
        return "is a DTensor; store value.full_tensor()"
    if type(value).__name__.startswith("Uninitialized"):
        return "is not initialized yet; run the module once"
    return None


def _to_numpy(torch: Any, tensor: Any, name: str) -> NDArray[Any]:
    if name in _COPIED_TYPES:
        return np.asarray(tensor.numpy())
    if name in _PAIRED:
        return np.asarray(torch.view_as_real(tensor).numpy())
    carrier = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.dtype.itemsize]
    array: NDArray[Any] = np.asarray(tensor.view(carrier).numpy())
    dtype = stored_dtype(tensor.dtype)
    return array if dtype is None else array.view(dtype)


def abstract_facts(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str | None]:
    """Says what a template asks for.

    Args:
        value: A tensor; one on the meta device will do.

    Returns:
        "torch", dtype and shape as stored, and the torch dtype's name where numpy has no such dtype.

    Raises:
        LeafProblem: A tensor that has no plain memory of numbers.
    """
    torch: Any = loaded("torch")
    problem = None if value.is_meta else _why_not(torch, value)
    if problem is not None:
        raise LeafProblem(problem)
    name, shape = dtype_name(value.dtype), tuple(value.shape)
    if name in _PAIRED:
        return "torch", np.dtype(_PAIRED[name]), (*shape, 2), name
    dtype = stored_dtype(value.dtype)
    if dtype is None:
        return "torch", np.dtype(f"uint{8 * value.dtype.itemsize}"), shape, name
    return "torch", dtype, shape, None


def put(array: NDArray[Any], template: Any) -> Any:
    """Makes one tensor like a template: on its device (the CPU for meta tensors), requiring gradients as it does.

    Memory of the array is taken over without a copy where the device is the CPU.

    Args:
        array: The values; of the dtype and shape that `abstract_facts` gave for the template.
        template: A tensor or parameter.
    """
    torch: Any = loaded("torch")
    array = native(array)
    if not array.flags.writeable:
        array = array.copy()
    name = dtype_name(template.dtype)
    if name in _PAIRED:
        tensor = torch.view_as_complex(torch.from_numpy(np.ascontiguousarray(array)))
    elif name in _COPIED_TYPES:
        tensor = torch.from_numpy(array)
    else:
        tensor = torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}")).view(template.dtype)
    if template.device.type not in {"cpu", "meta"}:
        tensor = tensor.to(template.device)
    if isinstance(template, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=template.requires_grad)
    return tensor.requires_grad_(template.requires_grad)
