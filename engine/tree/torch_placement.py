"""Places host arrays where torch tensors are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .boxes import Box
from .frameworks import required
from .numpy_leaves import native
from .torch_layouts import boxes, layout_of
from .torch_leaves import TensorForm, is_dtensor, tensor_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def local_boxes(template: Any, shape: tuple[int, ...]) -> list[Box] | None:
    """Says which parts of an array this process has if it is spread like a DTensor.

    Args:
        template: A tensor.
        shape: Of the whole array as it is stored.

    Returns:
        The boxes in the whole array as it is stored; None for other tensors, which every process has all of.
    """
    if not is_dtensor(template):
        return None
    more = (2,) if tensor_form(template.dtype).paired else ()
    held = _held(template, shape)
    return [
        Box((*start, *(0 for _ in more)), (*map(int.__add__, start, size), *more))
        for start, size, _ in ([] if held is None else boxes(held))
    ]


def put(array: NDArray[Any], template: Any, name: str | None = None) -> Any:
    """Makes one tensor like a template: on its device (the CPU for meta tensors), requiring gradients as it does.

    Memory of the array is taken over without a copy where the device is the CPU.

    Args:
        array: The values; of the dtype and shape that `abstract_facts` gave for the template.
        template: A tensor or parameter; None for a plain tensor on the CPU.
        name: Of the torch dtype, where it is not that of the template.
    """
    torch: Any = required("torch")
    dtype = template.dtype if name is None else getattr(torch, name)
    if template is None:
        return _moved(array, dtype, torch.device("cpu"))
    return _finished(_moved(array, dtype, template.device), template)


def put_parts(arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], template: Any, name: str | None = None) -> Any:
    """Makes a DTensor like a template; nothing is sent between processes.

    Args:
        arrays: The elements of each of `local_boxes`.
        shape: Of the whole array as it is stored.
        template: A DTensor or a parameter that is one.
        name: Of the torch dtype, where it is not that of the template.
    """
    torch: Any = required("torch")
    dtype = template.dtype if name is None else getattr(torch, name)
    own = template.to_local()
    device = torch.device(template.device_mesh.device_type) if own.is_meta else own.device
    local = _moved(_joined(arrays, shape, template, tensor_form(dtype)), dtype, device)
    size = torch.Size(shape[: template.ndim])
    stride = template.stride() if size == template.shape else torch.empty(size, device="meta").stride()
    tensor = torch.distributed.tensor.DTensor.from_local(
        local, template.device_mesh, template.placements, run_check=False, shape=size, stride=stride
    )
    return _finished(tensor, template)


def torch_name(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of the torch dtype whose elements are the same, or None if there is none."""
    torch: Any = required("torch")
    name = dtype.name
    found = getattr(torch, name, None)
    if dtype.kind not in "biufcV" or not isinstance(found, torch.dtype) or tensor_form(found).variant is not None:
        return None
    return name if dtype.newbyteorder("=") in (tensor_form(found).stored, getattr(ml_dtypes, name, None)) else None


def _held(template: Any, shape: tuple[int, ...]) -> Any:
    torch: Any = required("torch")
    layout = layout_of(template)._replace(shape=shape[: template.ndim])
    return layout.intervals(torch.distributed.get_rank())


def _joined(arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], template: Any, form: TensorForm) -> NDArray[Any]:
    """Puts the boxes of a process together as they lie in its memory."""
    if len(arrays) == 1:
        return arrays[0]
    held = _held(template, shape)
    if held is None:  # not one of the mesh
        return np.zeros((0,), form.stored)
    size = tuple([sum(high - low for low, high in each) for each in held])
    joined = np.empty((*size, 2) if form.paired else size, form.stored)
    for array, (_, _, place) in zip(arrays, boxes(held), strict=True):
        joined[place] = array
    return joined


def _moved(array: NDArray[Any], dtype: Any, device: Any) -> Any:
    array = native(array)
    if not array.flags.writeable:
        array = array.copy()
    tensor = tensor_form(dtype).to_tensor(array)
    return tensor if device.type in {"cpu", "meta"} else tensor.to(device)


def _finished(tensor: Any, template: Any) -> Any:
    torch: Any = required("torch")
    differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex  # it may have been cast to integers
    needs_gradient = template.requires_grad and differentiable
    if isinstance(template, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=needs_gradient)
    return tensor.requires_grad_(needs_gradient)
