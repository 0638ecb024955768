"""What a caller asks for one leaf, on top of what the template says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """How one leaf is to be loaded, where that differs from how it was saved or from its template.

    Attributes:
        kind: What it becomes: "jax", "numpy", "torch", "int", "float", "bool", "complex", "str"; None leaves that to
            the template.
        dtype: Its elements are cast to this; None never casts.
        shape: Its shape as a whole; None is the shape that was saved.
        resize: Whether a saved shape that differs from ``shape`` is padded with zeros or truncated, at the end of each
            axis; otherwise that is an error.
        sharding: Where its parts shall lie: a `jax.sharding.Sharding`, or None.
    """

    kind: str | None = None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    resize: bool = False
    sharding: Any = None
