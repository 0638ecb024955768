"""Determines which library a leaf belongs to, and defines how leaves are described for storage and in checkpoints."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, lt, sub
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, UnsupportedLeafError
from .names import format_path

T = TypeVar("T")

# JSON facts about a leaf for ``tree.json``, including at least its "kind". Leaves share these dicts; never modify them.
Details = dict[str, Any]

PLAIN = (type(None), bool, int, float, complex, str, bytes)  # types of plain values that contain no other values
ARRAY_KINDS = frozenset({"numpy", "jax", "torch", "key"})  # kinds of leaves that are arrays in the program
# Python number types, keyed by kind, narrowest first. Leaves of these kinds are stored as 0-d arrays.
NUMBER_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "complex": complex}
NUMBER_KINDS = frozenset(NUMBER_TYPES)
NUMBERS = "numbers"  # kind of packed number sequences (`PackedNumbers`)
MIXED = "mixed"  # element type of packed sequences that mix bool, int and float
EXTERNAL = "external"  # kind of leaves whose values a type handler stores
WEAK = "weak"  # key in the details of weakly typed jax arrays
STATIC = "static"  # kind of functions in jax-registered objects, stored by name
PLACEHOLDER = "placeholder"  # kind of leaves that another library saved by name only; their value is ``...``
NAME_ONLY = frozenset({PLACEHOLDER, STATIC})  # kinds of leaves without data

_LANDMARKS = {  # modules that `loaded` looks up, each with a name that it defines only once fully imported
    "flax.nnx": "Variable",
    "flax.training.train_state": "TrainState",
    "jax": "ShapeDtypeStruct",
    "torch": "Tensor",
    "torchmetrics": "Metric",
}


def loaded(name: str) -> Any | None:
    """Return a module listed in `_LANDMARKS` if the program has imported it, else None.

    Classifying a leaf requires no imports, because a program can only have leaves of frameworks that it has imported.
    """
    module = sys.modules.get(name)
    # A module that another thread is still importing may lack the name.
    return module if module is not None and hasattr(module, _LANDMARKS[name]) else None


def required(name: str) -> Any:
    """Import a module that the caller requested by name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(f"{name} arrays were requested, but {name} cannot be imported: {error}") from error


class _Framework:
    """A framework that is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that inspects arbitrary objects looks up special names
            raise AttributeError(name)
        value = getattr(sys.modules.get(self._name) or required(self._name), name)
        if not isinstance(value, types.FunctionType):  # functions are not cached, because a program may patch them
            setattr(self, name, value)
        return value


jax: Any = _Framework("jax")
ml_dtypes: Any = _Framework("ml_dtypes")  # lazy as well, because numpy's own dtypes do not need it
nnx: Any = _Framework("flax.nnx")
torch: Any = _Framework("torch")


def is_torch_tensor(value: object) -> bool:
    """True if the value is a torch tensor, including parameters and other subclasses."""
    return loaded("torch") is not None and isinstance(value, torch.Tensor)


def is_jax_array(value: object) -> bool:
    """True if the value is a jax array, a typed PRNG key, or a tracer of either."""
    return loaded("jax") is not None and isinstance(value, jax.Array)


def library_of(value: object) -> str | None:
    """Return the library of an array or scalar: "numpy", "jax" (also for keys and tracers), "torch" or None."""
    if isinstance(value, np.ndarray | np.generic):
        return "numpy"
    if is_torch_tensor(value):
        return "torch"
    return "jax" if is_jax_array(value) else None


def is_jax_abstract(value: object) -> bool:
    """True if the value is a `jax.ShapeDtypeStruct`: a shape, a dtype and perhaps a sharding, without data."""
    return loaded("jax") is not None and isinstance(value, jax.ShapeDtypeStruct)


class Box(NamedTuple):
    """A box of array elements, from start to stop (exclusive) along each axis, with start <= stop."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        return cls(tuple(start), tuple(map(add, start, shape)))

    def with_axis(self, size: int) -> Box:
        """Return the box extended by an additional last axis."""
        return Box((*self.start, 0), (*self.stop, size))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from an array of the elements of ``other``, an enclosing box."""
        return tuple(map(slice, map(sub, self.start, other.start), map(sub, self.stop, other.start)))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(slots=True)
class Piece:
    """A part of an array in host memory."""

    start: tuple[int, ...]  # index of the piece's first element in the whole array, along each axis
    array: NDArray[Any]  # elements, with any strides; may be read-only

    @property
    def box(self) -> Box:
        return Box.at(self.start, self.array.shape)


class Part(NamedTuple):
    """A box of an array, and the processes that hold it."""

    start: tuple[int, ...]  # index of the box's first element, along each axis
    shape: tuple[int, ...]  # number of elements along each axis
    holders: tuple[int, ...]  # processes that hold the entire box, in ascending order

    @property
    def box(self) -> Box:
        return Box.at(self.start, self.shape)

    def with_axis(self, size: int) -> Part:
        return Part((*self.start, 0), (*self.shape, size), self.holders)


def joined_parts(held: Iterable[tuple[int, Box]]) -> tuple[Part, ...]:
    """Group (process, box) pairs into parts: the distinct boxes in ascending order, each with all of its holders."""
    holders: dict[Box, set[int]] = {}
    for process, box in held:
        holders.setdefault(box, set()).add(process)
    return tuple(Part(box.start, box.shape, tuple(sorted(held_by))) for box, held_by in sorted(holders.items()))


@dataclass(slots=True)
class ArrayLeaf:
    dtype: np.dtype[Any]  # element type, including byte order
    shape: tuple[int, ...]  # shape of the whole array
    # Host views that cover this process's share of the array exactly once, or the whole array if `parts` is None.
    pieces: list[Piece]
    volatile: bool  # whether other code may still modify the pieces' memory; if so, they must be copied
    # For ``tree.json``: "kind" ("numpy", "numpy_scalar", "jax", "key", "torch", "bool", "int", "float", "complex") and
    # facts specific to the kind, but neither dtype nor shape.
    details: Details
    # Parts that cover the array exactly once, each with the processes that hold it; identical in all processes. None if
    # every process has the whole array.
    parts: tuple[Part, ...] | None = None

    @classmethod
    def of(cls, array: NDArray[Any], details: Details, *, volatile: bool = False) -> ArrayLeaf:
        """Return a leaf for a single array that every process holds entirely."""
        return cls(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], volatile, details)

    def copy(self) -> NDArray[Any]:
        """Assemble the pieces, which must cover the whole array, into a new array."""
        array = np.empty(self.shape, self.dtype)
        for piece in self.pieces:
            array[piece.box.within(whole(self.shape))] = piece.array
        return array


@dataclass(slots=True)
class PinnedLeaf(ArrayLeaf):
    """A leaf whose pieces are jax arrays in pinned host memory that have yet to be converted to numpy arrays."""

    def to_numpy(self) -> None:
        """Copy the pieces to numpy arrays; called in the background."""
        with jax.transfer_guard("allow"):
            for piece in self.pieces:
                piece.array = np.asarray(piece.array)


@dataclass(slots=True)
class ValueLeaf:
    """A leaf stored in ``tree.json`` itself, as "kind" ("int", "str", "bytes", "none", "set", ...) and "value"."""

    details: Details


class LeafProblem(TypeError):  # noqa: N818 - collected by `for_each_leaf`, users never see it
    """Raised for a leaf that cannot be saved or used as a template; the message gives the reason."""


def for_each_leaf(names: Sequence[str], values: Sequence[Any], function: Callable[[Any], T], summary: str) -> list[T]:
    """Call a function with each leaf; raise one error for all leaves for which it raises LeafProblem."""
    results: list[T] = []
    problems: list[tuple[str, str]] = []
    for name, value in zip(names, values, strict=True):
        try:
            results.append(function(value))
        except LeafProblem as problem:
            problems.append((name, str(problem)))
    report_problems(problems, summary)
    return results


def report_problems(problems: list[tuple[str, str]], summary: str) -> None:
    if problems:
        lines = "\n".join(f"  {format_path(name)}: {problem}" for name, problem in problems)
        raise UnsupportedLeafError(f"{summary}:\n{lines}")


@dataclass(slots=True)
class Saved:
    """The description of a leaf in a checkpoint."""

    details: Details  # `ArrayLeaf.details` or `ValueLeaf.details`, read from ``tree.json``: untrusted input
    dtype: np.dtype[Any] | None = None  # logical element type, as in `ArrayLeaf.dtype`; None for a value leaf
    shape: tuple[int, ...] | None = None  # shape of the stored array; None for a value leaf
    stored: object = field(default=None, repr=False, compare=False)  # how the array is stored; used only by its reader
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.kind = self.details["kind"]

    @classmethod
    def of(cls, leaf: ArrayLeaf | ValueLeaf) -> Saved:
        """Describe a leaf as if it had been read from a checkpoint."""
        return cls(leaf.details) if isinstance(leaf, ValueLeaf) else cls(leaf.details, leaf.dtype, leaf.shape)

    @property
    def variant(self) -> str | None:
        """Type information that the dtype does not contain: PRNG implementation, torch dtype, or function name."""
        if self.kind == STATIC:
            return str(self.details.get("value"))
        variant = self.details.get("impl" if self.kind == "key" else "torch_dtype")
        return None if variant is None else str(variant)

    @property
    def weak(self) -> bool:
        return self.kind == "jax" and self.details.get(WEAK) is True

    @property
    def is_number_array(self) -> bool:
        """True for a packed number sequence whose elements are stored as a plain array."""
        return self.kind == NUMBERS and self.details.get("elements") != MIXED

    @property
    def sharding_text(self) -> str:
        """The array's saved sharding as text for users, or ``""``."""
        sharding = self.details.get("sharding")
        if not isinstance(sharding, dict):
            return ""
        if sharding.get("type") == "NamedSharding":
            try:
                axes = ", ".join(f"{name}={size}" for name, size in sharding["mesh"]["axes"])
            except (KeyError, TypeError, ValueError):  # no save writes such a mesh
                axes = ""
            return f"{json.dumps(sharding.get('spec'))} over ({axes})"
        return str(sharding.get("device") or sharding.get("type") or "")

    def __str__(self) -> str:
        return spell(self.kind, self.dtype, self.shape, self.variant)


def spell(kind: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, variant: str | None = None) -> str:
    """Format dtype and shape for messages: ``float32[10, 3]``, ``key<threefry2x32>[4]``, ``int``, ``None``."""
    if kind == "none":
        return "None"
    if kind == PLACEHOLDER:
        return "a placeholder, saved without data"
    if kind == STATIC:
        return f"the function {variant}"
    if dtype is None or shape is None or kind in NUMBER_KINDS or kind in {"str", "bytes"}:
        return kind
    if kind == NUMBERS:
        return f"{shape[0] if shape else 0} numbers"
    if kind == "key":
        return f"key{'' if variant is None else f'<{variant}>'}{list(shape[:-1])}"
    if variant is not None and variant.startswith("complex"):
        return f"{variant}{list(shape[:-1])}"
    text = f"{variant or dtype}{list(shape)}"
    return f"numpy scalar {text}" if kind == "numpy_scalar" else text


@dataclass(frozen=True, slots=True)
class LeafMetadata:
    """The kind, shape and dtype of a saved leaf, which are known without reading the leaf.

    A template leaf of this type requires this shape and dtype, and is restored as a numpy array or Python value.

    Attributes:
        kind: The kind of the saved leaf: ``"numpy"``, ``"jax"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: The shape of the leaf; ``()`` for a value that is not an array.
        dtype: The name of the element type, or None for a value that is not an array.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str | None

    def __str__(self) -> str:
        return self.kind if self.dtype is None else f"{self.dtype}{list(self.shape)}"


class StaticLeaf:
    """A function in a jax-registered object: only its name is saved, and the template provides the function."""

    __slots__ = ("function", "name")

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.name = name

    @classmethod
    def of(cls, value: Any) -> StaticLeaf | None:
        """Wrap a function that captures only constants; return None for any other value."""
        name = _name_of_code(value, 0) if callable(value) else None
        return None if name is None else cls(value, name)


_CONSTANTS = (*PLAIN, type, np.dtype, types.ModuleType)
_DEEPEST = 8  # maximum depth to which wrapped functions and captured values are followed


def _name_of_code(value: Any, depth: int) -> str | None:
    wrapped = getattr(value, "__wrapped__", None)
    if type(value).__module__.partition(".")[0] in {"jax", "jaxlib"} and wrapped is not None and depth < _DEEPEST:
        return _name_of_code(wrapped, depth + 1)  # a wrapped function, as returned by jax.jit and jax.custom_jvp
    is_ufunc = isinstance(value, np.ufunc) or type(value).__module__ == "jax.numpy"
    is_builtin = isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if not all(_is_constant(constant, depth + 1) for constant in held):
            return None
    elif not (is_ufunc or is_builtin or isinstance(value, type)):
        return None
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    # Omit private modules, which may change between versions of a library.
    module = (getattr(value, "__module__", None) or type(value).__module__).partition("._")[0]
    return f"{module}:{name}"


def _is_constant(value: Any, depth: int) -> bool:
    if depth > _DEEPEST:
        return False
    if isinstance(value, tuple | frozenset):
        return all(_is_constant(element, depth + 1) for element in value)
    return isinstance(value, _CONSTANTS) or _name_of_code(value, depth + 1) is not None


def metadata_of(saved: Saved) -> LeafMetadata:
    return LeafMetadata(saved.kind, saved.shape or (), None if saved.dtype is None else str(saved.dtype))


class ExternalLeaf:
    """A placeholder in a loaded tree for a value that a type handler has yet to read; `details` is untrusted input."""

    __slots__ = ("details", "handler", "name")

    def __init__(self, name: str, details: Details) -> None:
        self.name = name
        self.details = details
        self.handler = str(details.get("handler"))

    def __repr__(self) -> str:
        return f"<{format_path(self.name)}, stored by the handler {self.handler!r:.80}>"
