"""Per-leaf arguments that control how a leaf is saved and restored."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arrays import AGGREGATE_LIMIT, AggregateHandler, aggregate_details, check_level, check_size
from ..errors import OptionError, UnsupportedLeafError
from ..foreign_arguments import explains_arguments
from ..format import storage_dtype
from ..pytree import (
    NUMBER_KINDS,
    NUMBERS,
    ArrayLeaf,
    CastProblem,
    LeafRequest,
    Piece,
    TreeDef,
    ValueLeaf,
    cast_checked,
    class_name,
    expand,
    format_path,
    key_segments,
    leaf_names,
    loaded,
    number_kind,
    report_problems,
)

T = TypeVar("T")

Leaf = ArrayLeaf | ValueLeaf


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """Options for saving one leaf.

    Attributes:
        aggregate: Store the leaf in one file with all other aggregated leaves, not as a separate array. This is useful
            for small leaves. Strings, bytes, None and long integers are always stored in ``tree.json``.
        dtype: Cast the elements, including Python numbers, to this dtype before they are saved. Strings, bytes, None
            and PRNG keys are not cast. Precision may be lost, but the save fails if the dtype cannot represent a value,
            such as a fraction or NaN in an integer dtype, or a finite number that would become infinite.
        compression: The zstd level, 1 to 22; 0 stores the bytes uncompressed, and None uses the handler's setting.
        chunk_bytes: The maximum chunk size of the array in bytes; None uses the handler's setting.
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


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class RestoreArgs:
    """Options for restoring one leaf.

    Attributes:
        restore_type: ``jax.Array``, ``np.ndarray``, ``torch.Tensor``, ``int``, ``float``, ``bool``, ``complex`` or
            ``str``; None uses the template's type, or the saved type if there is no template.
        dtype: Cast the elements to this dtype; None does not cast. Precision may be lost, but it is an error if the
            dtype cannot represent a value, as in :class:`SaveArgs`.
    """

    restore_type: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", number_dtype(self.dtype))
        _kind(self.restore_type)


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class ArrayRestoreArgs(RestoreArgs):
    """Options for restoring one leaf as a jax array, which may be sharded over devices.

    Attributes:
        restore_type: As in :class:`RestoreArgs`; None means ``jax.Array``.
        mesh: The `jax.sharding.Mesh` on which to place the array; requires ``mesh_axes``.
        mesh_axes: The mesh axes over which each axis of the array is sharded, as a `jax.sharding.PartitionSpec` or
            a tuple.
        sharding: A `jax.sharding.Sharding`, as an alternative to ``mesh`` and ``mesh_axes``.
        global_shape: The global shape of the array; None means the saved shape.
        global_shapes: An alias of ``global_shape``.
        strict: Whether a saved shape that differs from ``global_shape`` is an error. If False, the array is padded
            with zeros or truncated at the end of each axis.
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
            raise OptionError("mesh= and mesh_axes= go together: give both, or neither")
        if self.mesh is not None and self.sharding is not None:
            raise OptionError("sharding= excludes the others; leave out mesh= and mesh_axes=")
        shapes = [_shape(shape) for shape in (self.global_shape, self.global_shapes) if shape is not None]
        if len(set(shapes)) > 1:
            raise OptionError(f"global_shape={shapes[0]} and global_shapes={shapes[1]} mean the same; give one of them")
        shape = shapes[0] if shapes else None
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "global_shapes", shape)
        if not self.strict and shape is None:
            raise OptionError("strict=False pads or truncates to global_shape=, which is missing; give it")


def leaf_request(name: str, args: RestoreArgs) -> LeafRequest:
    """Convert the RestoreArgs of a leaf to a LeafRequest."""
    if not isinstance(args, ArrayRestoreArgs):
        return LeafRequest(kind=_kind(args.restore_type), dtype=args.dtype)
    return LeafRequest(
        kind=_kind(args.restore_type) or "jax",
        dtype=args.dtype,
        shape=None if args.global_shape is None else tuple(args.global_shape),
        resize=not args.strict,
        sharding=_sharding(name, args),
    )


def _sharding(name: str, args: ArrayRestoreArgs) -> Any:
    if args.mesh is None:
        return args.sharding
    shardings: Any = importlib.import_module("jax").sharding  # already imported, because the mesh is a jax object
    axes = args.mesh_axes
    if not isinstance(axes, shardings.PartitionSpec):
        axes = shardings.PartitionSpec(*((axes,) if isinstance(axes, str) else axes))
    try:
        return shardings.NamedSharding(args.mesh, axes)
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{format_path(name)}: mesh_axes={axes} must name axes of the mesh, each at most once; the mesh has the "
            f"axes {', '.join(map(str, args.mesh.axis_names))} ({str(error).splitlines()[0]:.200})"
        ) from error


def broadcast_prefix(given: Any, node: TreeDef | None, cls: type[T], argument: str, name: str = "") -> list[T | None]:
    """Return each leaf's argument or None. ``given`` is an argument for all leaves or a prefix that may omit keys."""
    if given is None or isinstance(given, cls):
        return [given] * len(leaf_names(node))
    contents = expand(given)
    if contents is None:
        raise OptionError(f"{argument}: expected {cls.__name__} at {format_path(name)}, found {class_name(given)}")
    values = dict(zip(key_segments(contents.keys, len(contents.values)), contents.values, strict=True))
    if node is None and values:
        raise OptionError(
            f"{argument}: expected {cls.__name__} at the leaf {format_path(name)}, found {class_name(given)}"
        )
    if node is None:  # jax converts a container without leaves to None
        return [None]
    segments = key_segments(node.keys, len(node.children))
    prefix = f"{name}." if name else ""
    unknown = [segment for segment in values if segment not in set(segments)]
    if unknown:
        raise OptionError(f"{argument}: the tree has no {format_path(prefix + unknown[0])}")
    pairs = zip(segments, node.children, strict=True)
    lists = [broadcast_prefix(values.get(key), child, cls, argument, prefix + key) for key, child in pairs]
    return list(chain.from_iterable(lists))


def number_dtype(given: Any) -> np.dtype[Any]:
    """Return the numpy dtype for a dtype or scalar type from numpy, jax or torch."""
    import ml_dtypes  # registers its dtype names with numpy; imported lazily because few programs need them

    name = str(given).removeprefix("torch.")
    try:
        dtype = np.dtype(given if name == str(given) else getattr(ml_dtypes, name, name))
    except TypeError:
        raise OptionError(f"dtype={given!r} is not a dtype of numpy, jax or torch") from None
    if number_kind(dtype) is None:
        raise OptionError(f"dtype={given!r} is not a dtype of numbers or bool; arrays can be cast to those only")
    return dtype


def _kind(restore_type: Any) -> str | None:
    if restore_type is None:
        return None
    if restore_type is np.ndarray:
        return "numpy"
    if restore_type in (bool, int, float, complex, str):
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
        sizes = tuple(size.__index__() for size in shape)
    except (TypeError, AttributeError):
        raise OptionError(f"global_shape={shape!r} must be a tuple of whole numbers") from None
    if any(size < 0 for size in sizes):
        raise OptionError(f"global_shape={shape!r} must not hold negative numbers")
    return sizes


def cast(name: str, leaf: Leaf, dtype: np.dtype[Any]) -> Leaf:
    if isinstance(leaf, ValueLeaf) or leaf.details["kind"] in {"key", "str", "bytes", NUMBERS} or leaf.dtype == dtype:
        return leaf
    kind = number_kind(leaf.dtype)
    if kind is None or "torch_dtype" in leaf.details:
        return leaf
    if kind == "complex" and number_kind(dtype) != "complex":
        raise UnsupportedLeafError(
            f"{format_path(name)}: {leaf.dtype} cannot be cast to {dtype}, which has no imaginary part; "
            "nothing was written"
        )
    details = leaf.details
    if details["kind"] in NUMBER_KINDS:
        details = {**details, "kind": number_kind(dtype)}
    pieces, volatile = leaf.pieces, leaf.volatile
    if storage_dtype(dtype).extra is not None:
        # Cast now only if the new dtype is stored as bytes; otherwise, each chunk is cast while it is written.
        pieces, volatile = [Piece(piece.start, _checked(name, piece.array, dtype)) for piece in pieces], False
    return ArrayLeaf(dtype, leaf.shape, pieces, volatile, details, leaf.parts)


def _checked(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        return cast_checked(array, dtype)
    except CastProblem as problem:
        raise UnsupportedLeafError(f"{format_path(name)}: {problem}; nothing was written") from None


def aggregate(
    names: Sequence[str], leaves: Sequence[Leaf], args: Sequence[SaveArgs | None], handler: AggregateHandler
) -> tuple[list[Leaf], dict[str, bytes]]:
    """Pack leaves with ``aggregate=True`` into a file; return all leaves (packed ones as `ValueLeaf`) and the file."""
    kept = list(leaves)
    arrays: dict[str, NDArray[Any]] = {}
    problems: list[tuple[str, str]] = []
    size = 0
    for index, (name, leaf, arg) in enumerate(zip(names, leaves, args, strict=True)):
        if arg is None or not arg.aggregate or isinstance(leaf, ValueLeaf):
            continue  # plain values are always stored in tree.json
        if leaf.parts is not None or len(leaf.pieces) != 1 or leaf.pieces[0].array.shape != leaf.shape:
            problems.append((name, "is sharded over devices; leave out aggregate=True"))
            continue
        array = leaf.pieces[0].array
        size += array.size * leaf.dtype.itemsize
        if size > AGGREGATE_LIMIT:
            problems.append((name, f"makes the aggregate larger than {AGGREGATE_LIMIT} bytes; it is for small leaves"))
            break
        arrays[name] = array if array.dtype == leaf.dtype else _checked(name, array, leaf.dtype)
        kept[index] = ValueLeaf({**leaf.details, **aggregate_details(arrays[name], handler)})
    report_problems(problems, "these leaves cannot be aggregated, and nothing was written")
    return kept, {handler.filename: handler.serialize(arrays)} if arrays else {}
