"""The trees to save: float32 arrays with content that does not compress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Shape = tuple[int, ...]

NOISE_ELEMENTS = 1 << 24  # 64 MiB, further apart than any compressor's window looks back


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A named tree of float32 arrays.

    Attributes:
        name: What ``--workload`` calls it.
        title: What the table's heading says.
        shapes: One shape a leaf; the names join their keys with ``.``.
    """

    name: str
    title: str
    shapes: Mapping[str, Shape] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(4 * math.prod(shape) for shape in self.shapes.values())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield every leaf's name and a fresh array; the content is the same each time."""
        start = 0
        for name, shape in self.shapes.items():
            array = np.empty(shape, np.float32)
            start = _fill(array.reshape(-1), start)
            yield name, array


def _fill(flat: Array, start: int) -> int:
    """Fill an array with the noise from ``start`` on, cyclically; return the position after it."""
    noise, done = _noise(), 0
    while done < flat.size:
        count = min(flat.size - done, noise.size - start)
        flat[done : done + count] = noise[start : start + count]
        done, start = done + count, (start + count) % noise.size
    return start


@cache
def _noise() -> Array:
    return np.random.default_rng(0).standard_normal(NOISE_ELEMENTS, dtype=np.float32)


def forget_noise() -> None:
    """Free the generator's memory, so that it does not count for a contender."""
    _noise.cache_clear()


def transformer(*, layers: int, width: int, vocabulary: int, context: int) -> dict[str, Shape]:
    """Shapes of a decoder-only transformer with twelve leaves for each layer."""
    shapes: dict[str, Shape] = {
        "embedding.token": (vocabulary, width),
        "embedding.position": (context, width),
    }
    for layer in range(layers):
        name = f"layer_{layer:02d}"
        for norm in ("attention_norm", "mlp_norm"):
            shapes |= {f"{name}.{norm}.scale": (width,), f"{name}.{norm}.bias": (width,)}
        for dense, (inputs, outputs) in {
            "attention.qkv": (width, 3 * width),
            "attention.out": (width, width),
            "mlp.up": (width, 4 * width),
            "mlp.down": (4 * width, width),
        }.items():
            shapes |= {f"{name}.{dense}.kernel": (inputs, outputs), f"{name}.{dense}.bias": (outputs,)}
    shapes |= {"norm.scale": (width,), "norm.bias": (width,)}
    return shapes


def _model() -> Workload:
    shapes = transformer(layers=36, width=704, vocabulary=50304, context=1024)
    return Workload(name="model", title="1 GB in 436 leaves (a transformer)", shapes=shapes)


def _leaves() -> Workload:
    shapes = {f"group_{i // 100:02d}.leaf_{i % 100:02d}": (256,) for i in range(10_000)}
    return Workload(name="leaves", title="10,000 leaves of 1 KiB", shapes=shapes)


def _array() -> Workload:
    return Workload(name="array", title="one array of 1 GiB", shapes={"array": (16384, 16384)})


def _tiny() -> Workload:
    shapes = transformer(layers=1, width=16, vocabulary=64, context=16)
    return Workload(name="tiny", title="a tiny tree, to warm up and to try the harness", shapes=shapes)


WORKLOADS: dict[str, Callable[[], Workload]] = {"model": _model, "leaves": _leaves, "array": _array, "tiny": _tiny}
STANDARD = ("model", "leaves", "array")


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Make a tree of dicts from dotted names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def unnest(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Make dotted names from a tree of dicts; the inverse of ``nest``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= unnest(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
