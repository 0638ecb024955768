"""Places host arrays where torch tensors are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .frameworks import loaded
from .numpy_leaves import native
from .torch_leaves import tensor_form

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    tensor = tensor_form(template.dtype).to_tensor(array)
    if template.device.type not in {"cpu", "meta"}:
        tensor = tensor.to(template.device)
    if isinstance(template, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=template.requires_grad)
    return tensor.requires_grad_(template.requires_grad)
