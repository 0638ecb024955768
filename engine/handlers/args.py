"""What a caller asks for leaf by leaf: how it is saved, and what it becomes when it is restored."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from ..errors import OptionError
from ..item.plan import check_level, check_size
from ..tree import LeafRequest, Node, display
from ..tree.containers import class_name, expand
from ..tree.frameworks import loaded
from ..tree.numpy_leaves import number_kind
from ..tree.structure import key_segments

T = TypeVar("T")

_PLAIN_TYPES: tuple[type, ...] = (bool, int, float, complex, str)


@dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """How one leaf is saved.

    Attributes:
        aggregate: Put it into the one file that all such leaves share, instead of among the arrays; for small leaves.
            Text, bytes, None and long integers stand in ``tree.json`` in any case.
        dtype: Cast its elements to this before they are saved. Python numbers are cast, too; what holds no numbers
            (text, bytes, None, PRNG keys) stays as it is. Precision may be lost; a value that the dtype cannot hold
            (a fraction or NaN in an integer, a finite number that would become infinite) fails the save.
        compression: Level of zstd, 1 to 22; 0 stores the bytes as they are; None leaves it to the handler.
        chunk_bytes: Largest chunk of the array, in bytes; None leaves it to the handler.
    """

    aggregate: bool = False
    dtype: Any = None
    compression: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.compression != 0:
            check_level("compression", self.compression)
        if self.chunk_bytes is not None:
            check_size("chunk_bytes", self.chunk_bytes)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", number_dtype(self.dtype))


@dataclass(frozen=True, kw_only=True)
class RestoreArgs:
    """What one leaf becomes when it is restored.

    Attributes:
        restore_type: ``jax.Array``, ``np.ndarray``, ``torch.Tensor``, ``int``, ``float``, ``bool``, ``complex`` or
            ``str``; None leaves it to the template, or else to what was saved.
        dtype: Cast its elements to this; None never casts. Precision may be lost; a value that the dtype cannot hold
            (a fraction or NaN in an integer, a finite number that would become infinite) is an error.
    """

    restore_type: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", number_dtype(self.dtype))
        _kind(self.restore_type)

    def request(self, name: str | None = None) -> LeafRequest:
        """Returns the same, as what loads trees is told it.

        Args:
            name: The leaf's name, for errors.
        """
        return LeafRequest(kind=_kind(self.restore_type), dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class ArrayRestoreArgs(RestoreArgs):
    """How one leaf becomes an array of jax, perhaps spread over devices.

    Attributes:
        restore_type: As in :class:`RestoreArgs`; None is ``jax.Array``.
        mesh: The `jax.sharding.Mesh` to put it on; needs ``mesh_axes``.
        mesh_axes: Along which axes of the mesh each of its axes is spread: a `jax.sharding.PartitionSpec` or a tuple.
        sharding: A `jax.sharding.Sharding`, instead of ``mesh`` and ``mesh_axes``.
        global_shape: The shape it must have as a whole; None is the shape that was saved.
        global_shapes: Another name for ``global_shape``.
        strict: Whether a saved shape that differs from ``global_shape`` is an error. Otherwise the array is padded
            with zeros or truncated, at the end of each axis.
    """

    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: Sequence[int] | None = None
    global_shapes: Sequence[int] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mesh is None) != (self.mesh_axes is None):
            raise OptionError("mesh= and mesh_axes= go together: say which axes of the mesh the array is spread over")
        if self.mesh is not None and self.sharding is not None:
            raise OptionError("sharding= says everything; leave out mesh= and mesh_axes=")
        shapes = [_shape(shape) for shape in (self.global_shape, self.global_shapes) if shape is not None]
        if len(set(shapes)) > 1:
            raise OptionError(f"global_shape={shapes[0]} and global_shapes={shapes[1]} mean the same; give one of them")
        shape = shapes[0] if shapes else None
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "global_shapes", shape)
        if not self.strict and shape is None:
            raise OptionError("strict=False pads or truncates to global_shape=; say what that is")

    def request(self, name: str | None = None) -> LeafRequest:
        """Returns the same, as what loads trees is told it.

        Args:
            name: The leaf's name, for errors.
        """
        return LeafRequest(
            kind=_kind(self.restore_type) or "jax",
            dtype=self.dtype,
            shape=None if self.global_shape is None else tuple(self.global_shape),
            resize=not self.strict,
            sharding=self._sharding(name),
        )

    def _sharding(self, name: str | None) -> Any:
        if self.mesh is None:
            return self.sharding
        shardings: Any = importlib.import_module("jax").sharding  # whoever has a mesh has jax
        axes = self.mesh_axes
        if not isinstance(axes, shardings.PartitionSpec):
            axes = shardings.PartitionSpec(*((axes,) if isinstance(axes, str) else axes))
        try:
            return shardings.NamedSharding(self.mesh, axes)
        except (ValueError, TypeError) as error:
            where = "" if name is None else f"{display(name)}: "
            raise OptionError(
                f"{where}mesh_axes={axes} must name axes of the mesh, each at most once; it has the axes "
                f"{', '.join(map(str, self.mesh.axis_names))} ({str(error).splitlines()[0]:.200})"
            ) from error


def spread(given: Any, structure: Node | None, kind: type[T], what: str) -> list[T | None]:
    """Gives every leaf of a tree what a caller has given for it.

    Args:
        given: One value for all leaves; or a tree like the other one, which may end early with a value for all leaves
            below, and may leave out keys; or None.
        structure: The containers of the tree, None if it is one bare leaf.
        kind: The type of the values.
        what: How the caller knows them, for errors.

    Returns:
        For every leaf, in the order of the tree, what is given for it; None where that is nothing.

    Raises:
        OptionError: The values hang on no leaf of the tree, or are of another type.
    """
    found: list[T | None] = []
    _spread(given, structure, kind, what, "", found)
    return found


def _spread(given: Any, node: Node | None, kind: type[T], what: str, name: str, found: list[T | None]) -> None:
    if given is None or isinstance(given, kind):
        found.extend(given for _ in _leaves(node))
        return
    contents = expand(given)
    if contents is None:
        raise OptionError(f"{what}: expected {kind.__name__} at {display(name)}, found {class_name(given)}")
    values = dict(zip(_segments(contents.keys, len(contents.values)), contents.values, strict=True))
    if node is None:
        if not values:  # what jax makes of a container that has no leaves
            found.append(None)
            return
        raise OptionError(
            f"{what}: {display(name)} is a leaf of the tree; expected {kind.__name__}, found {class_name(given)}"
        )
    segments = _segments(node.keys, len(node.children))
    prefix = f"{name}." if name else ""
    unknown = [segment for segment in values if segment not in set(segments)]
    if unknown:
        raise OptionError(f"{what}: the tree has no {display(prefix + unknown[0])}")
    for segment, child in zip(segments, node.children, strict=True):
        _spread(values.get(segment), child, kind, what, prefix + segment, found)


def _segments(keys: Sequence[object] | None, count: int) -> list[str]:
    return [str(index) for index in range(count)] if keys is None else key_segments(keys)


def _leaves(node: Node | None) -> Iterator[None]:
    if node is None:
        yield None
        return
    for child in node.children:
        yield from _leaves(child)


def number_dtype(given: Any) -> np.dtype[Any]:
    """Returns the numpy dtype that a caller means, who may have named it by a type of numpy, jax or torch.

    Raises:
        OptionError: It is none, or its elements are no numbers.
    """
    name = str(given)
    try:
        if name.startswith("torch."):
            name = name.removeprefix("torch.")
            dtype = np.dtype(getattr(ml_dtypes, name, name))
        else:
            dtype = np.dtype(given)
    except TypeError:
        raise OptionError(f"dtype={given!r} is not a dtype of numpy, jax or torch") from None
    if number_kind(dtype) is None:
        raise OptionError(f"dtype={given!r}: arrays can be cast to numbers and bool only")
    return dtype


def _kind(restore_type: Any) -> str | None:
    """Returns how the tree calls leaves of a type; None for None."""
    if restore_type is None:
        return None
    if restore_type is np.ndarray:
        return "numpy"
    if restore_type in _PLAIN_TYPES:
        return str(restore_type.__name__)
    jax, torch = loaded("jax"), loaded("torch")
    if jax is not None and restore_type is jax.Array:
        return "jax"
    if torch is not None and isinstance(restore_type, type) and issubclass(restore_type, torch.Tensor):
        return "torch"
    raise OptionError(
        f"restore_type={restore_type!r} is not known; expected jax.Array, np.ndarray, torch.Tensor, int, float, bool, "
        "complex, str or None"
    )


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        found = tuple(size.__index__() for size in shape)
    except (TypeError, AttributeError):
        raise OptionError(f"global_shape={shape!r} must be a tuple of whole numbers") from None
    if any(size < 0 for size in found):
        raise OptionError(f"global_shape={shape!r} must not hold negative numbers")
    return found
