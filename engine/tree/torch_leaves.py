"""Leaves that are torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .frameworks import loaded
from .leaves import ArrayLeaf, Details, LeafProblem, Part, Piece
from .torch_layouts import layout_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMMON_TYPES = {"uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"} | {
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip
_PAIRED = {"complex32": "float16"}  # stored as real and imaginary part, in one more axis
_ASYNCHRONOUS = {"cuda", "xpu"}  # devices whose copies to the host go on in the background


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
        if value.device.type not in {"cpu", "meta"} and _why_not(self._torch, value) is None:
            overlaps = value.device.type in _ASYNCHRONOUS
            own = self._own(value) if is_dtensor(value) else value.detach()
            self._copies[id(value)] = own.to("cpu", non_blocking=overlaps)
            if overlaps:
                self._devices.add(value.device)

    def describe(self, value: Any) -> ArrayLeaf:
        """Describes one tensor that is no DTensor.

        Raises:
            LeafProblem: Sparse, quantized, nested, meta and other tensors that have no plain memory of numbers.
        """
        array, volatile, form = self._array(value, value)
        details = form.details if not value.requires_grad else {**form.details, "requires_grad": True}
        return ArrayLeaf(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], volatile, details)

    def describe_distributed(self, value: Any) -> ArrayLeaf:
        """Describes one DTensor: what this process holds of it, and who holds what.

        Raises:
            LeafProblem: As `describe`, and placements that do not say which process holds what.
        """
        layout = layout_of(value)
        array, volatile, form = self._array(value, self._own(value))
        shape, parts = layout.shape, layout.parts()
        share = layout.share(self._rank)
        pieces = []
        if share is not None:
            found = array.shape[: len(shape)]
            if found != share.shape:
                raise LeafProblem(
                    f"is a DTensor whose own part has shape {found}, where its placements say {share.shape}"
                )
            pieces = [Piece(start, array[place]) for start, place in share.boxes]
        if form.paired:
            shape = (*shape, 2)
            parts = tuple([Part((*part.start, 0), (*part.shape, 2), part.holders) for part in parts])
            pieces = [Piece((*piece.start, 0), piece.array) for piece in pieces]
        details: Details = {**form.details, "sharding": layout.describe()}
        if value.requires_grad:
            details["requires_grad"] = True
        return ArrayLeaf(array.dtype, shape, pieces, volatile, details, parts if self._count > 1 else None)

    @cached_property
    def _rank(self) -> int:
        return int(self._torch.distributed.get_rank())

    @cached_property
    def _count(self) -> int:
        return int(self._torch.distributed.get_world_size())

    def _array(self, value: Any, own: Any) -> tuple[NDArray[Any], bool, TensorForm]:
        """Gives the numbers of a tensor, or of this process's own part of it, and whether they can still change."""
        problem = _why_not(self._torch, value)
        if problem is not None:
            raise LeafProblem(problem)
        if self._devices:
            self._synchronize()
        tensor = self._copies.get(id(value))  # kept there: the same tensor may be two leaves
        volatile = tensor is None
        if tensor is None:
            tensor = own.detach() if own.requires_grad else own
        if tensor.is_conj() or tensor.is_neg():
            tensor, volatile = tensor.resolve_conj().resolve_neg(), False
        form = tensor_form(value.dtype)
        try:
            return form.to_numpy(tensor), volatile, form
        except (RuntimeError, TypeError) as error:
            raise LeafProblem(f"is a {type(value).__name__} that cannot be turned into an array: {error}") from error

    def _own(self, value: Any) -> Any:
        """Gives the tensor in this process's memory that belongs to a DTensor."""
        with self._torch.no_grad():
            own = value.to_local().detach()
        # The result of a collective operation may still be on its way.
        return own.trigger_wait() if hasattr(own, "trigger_wait") else own

    def _synchronize(self) -> None:
        for device in self._devices:
            getattr(self._torch, device.type).synchronize(device)
        self._devices.clear()


@dataclass(frozen=True, slots=True)
class TensorForm:
    """How tensors of one dtype are stored.

    Attributes:
        dtype: The torch dtype.
        stored: The numpy dtype of the same bytes.
        carrier: The torch dtype of that size which numpy knows as well; None where numpy knows the dtype itself.
        paired: Whether an element is stored as two, real and imaginary part.
        variant: The torch dtype's name where the numpy dtype does not mean the same, or None.
        details: For the leaf.
    """

    dtype: Any
    stored: np.dtype[Any]
    carrier: Any
    paired: bool
    variant: str | None
    details: Details

    def to_numpy(self, tensor: Any) -> NDArray[Any]:
        """Gives a view of a tensor that has neither gradient nor conjugate nor negative bit."""
        torch: Any = loaded("torch")
        if self.paired:
            return np.asarray(torch.view_as_real(tensor).numpy())
        if self.carrier is None:
            return np.asarray(tensor.numpy())
        return np.asarray(tensor.view(self.carrier).numpy()).view(self.stored)

    def to_tensor(self, array: NDArray[Any]) -> Any:
        """Makes a tensor of writable memory in native byte order."""
        torch: Any = loaded("torch")
        if self.paired:
            return torch.view_as_complex(torch.from_numpy(np.ascontiguousarray(array)))
        if self.carrier is None:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}")).view(self.dtype)


@lru_cache(maxsize=128)
def tensor_form(dtype: Any) -> TensorForm:
    """Says how tensors of a torch dtype are stored."""
    torch: Any = loaded("torch")
    name = str(dtype).removeprefix("torch.")
    if name in _PAIRED:
        details = {"kind": "torch", "torch_dtype": name}
        return TensorForm(dtype, np.dtype(_PAIRED[name]), None, True, name, details)
    if name in _COMMON_TYPES:
        return TensorForm(dtype, np.dtype(name), None, False, None, {"kind": "torch"})
    carrier = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[dtype.itemsize]
    extended: Any = getattr(ml_dtypes, name, None)
    if extended is not None and name.startswith(("float", "bfloat")):
        return TensorForm(dtype, np.dtype(extended), carrier, False, None, {"kind": "torch"})
    # Integers of less than 8 bits, packed numbers and the like: for torch they are bytes without operations.
    details = {"kind": "torch", "torch_dtype": name}
    return TensorForm(dtype, np.dtype(f"uint{8 * dtype.itemsize}"), carrier, False, name, details)


def _why_not(torch: Any, value: Any) -> str | None:
    if value.layout is not torch.strided:
        return f"is a tensor of layout {value.layout}; store its indices and values, or value.to_dense()"
    if value.is_quantized:
        return "is a quantized tensor; store value.int_repr(), its scale and its zero point"
    if value.is_nested:
        return "is a nested tensor; store value.unbind()"
    if value.is_meta:
        return "is on the meta device, it has no values"
    name = type(value).__name__
    if name == "ShardedTensor":
        return "is a ShardedTensor; have DTensors in its place: with FSDP2, or with a device mesh given to FSDP"
    if name.startswith("Uninitialized"):
        return "is not initialized yet; run the module once"
    return None


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is a DTensor, spread over processes."""
    return type(value).__name__ == "DTensor"


def abstract_facts(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str | None]:
    """Says what a template asks for.

    Args:
        value: A tensor; one on the meta device will do. Of a DTensor, the whole counts.

    Returns:
        "torch", dtype and shape as stored, and the torch dtype's name where numpy has no such dtype.

    Raises:
        LeafProblem: A tensor that has no plain memory of numbers.
    """
    torch: Any = loaded("torch")
    problem = None if value.is_meta else _why_not(torch, value)
    if problem is not None:
        raise LeafProblem(problem)
    form = tensor_form(value.dtype)
    shape = (*value.shape, 2) if form.paired else tuple(value.shape)
    return "torch", form.stored, shape, form.variant
