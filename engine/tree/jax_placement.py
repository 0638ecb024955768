"""Places host arrays where jax arrays are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .frameworks import loaded
from .numpy_leaves import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def put(arrays: Sequence[NDArray[Any]], templates: Sequence[Any], implementations: Sequence[str | None]) -> list[Any]:
    """Makes jax arrays, all in one call.

    Memory that is aligned to 64 bytes is taken over without a copy where the device is the CPU: nobody may write to it
    any more.

    Args:
        arrays: The values; of the dtypes and shapes that `abstract_facts` gave for the templates.
        templates: Arrays, typed keys or `jax.ShapeDtypeStruct`; each says where its array shall lie.
        implementations: For typed keys their implementation, None for others.

    Returns:
        One array for each, with the sharding of its template; uncommitted if the template is uncommitted.
    """
    jax: Any = loaded("jax")
    placements = [_target_sharding(template) for template in templates]
    results = list(jax.device_put([native(array) for array in arrays], placements))
    for index, implementation in enumerate(implementations):
        if implementation is not None:
            results[index] = jax.random.wrap_key_data(results[index], impl=implementation)
    return results


def _target_sharding(template: Any) -> Any:
    # An array that was never put anywhere on purpose may move freely; giving it a device would tie it down.
    return template.sharding if getattr(template, "committed", True) else None
