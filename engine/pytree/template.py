"""Describes the leaves that a template or the caller requests, and checks whether the saved leaves fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import DamagedCheckpointError, OptionError, difference
from . import jax_leaves, torch_leaves
from .codec import loaded_object
from .containers import class_name
from .flattening import Flattened, TreeDef
from .host_leaves import check_storable, is_python_value, number_kind
from .leaves import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    NUMBER_TYPES,
    NUMBERS,
    STATIC,
    ArrayLeaf,
    Details,
    LeafMetadata,
    LeafProblem,
    Saved,
    StaticLeaf,
    ValueLeaf,
    for_each_leaf,
    is_jax_abstract,
    library_of,
    metadata_of,
    required,
    spell,
)
from .names import escape_key, format_path

TemplateFacts = tuple[Any, ...]  # the fields of `LeafTemplate` after the name
_VALUES = NUMBER_KINDS | {"str"}
_ARRAYS = frozenset({"jax", "numpy", "torch"})
_SAVED_ARRAYS = _ARRAYS | {"numpy_scalar"}


@dataclass(slots=True)
class LeafTemplate:
    """The array or value that a leaf of the template requests."""

    name: str
    # "jax", "key", "torch", "numpy", "numpy_scalar", "bool", "int", "float", "complex", "str", "bytes", "none", "set",
    # "frozenset", "numbers" for a packed sequence that stays packed, or "any" to restore the leaf unchanged.
    kind: str
    shape: tuple[int, ...] | None  # shape of the stored array (for keys, of the key data); None if not requested
    dtype: np.dtype[Any] | None  # dtype of the stored array; None if not requested
    leaf: Any  # the template's own leaf; None if there is no template
    variant: str | None = None  # see `Saved.variant`
    weak: bool = False  # whether a jax array is weakly typed
    sharding: Any = None  # sharding of a jax array; None leaves the choice to jax
    cast: bool = False  # whether elements of another dtype are cast to ``dtype``
    resize: bool = False  # whether other shapes are zero-padded or truncated to ``shape``, at the end of each axis
    origin: str = "template"  # "template" or "request", for messages

    def __str__(self) -> str:
        return spell(self.kind, self.dtype, self.shape, self.variant)


def describe_template(names: Sequence[str], values: Sequence[Any]) -> list[LeafTemplate]:
    """Describe the leaves of a template, or raise one error for all leaves that cannot be loaded."""
    # One function per leaf type, because there are few types.
    by_type = {kind: _facts_of(value) for kind, value in dict(zip(map(type, values), values, strict=True)).items()}
    summary = "these leaves of the template cannot be loaded"
    facts = for_each_leaf(names, values, lambda value: by_type[type(value)](value), summary)
    return [LeafTemplate(name, *fact) for name, fact in zip(names, facts, strict=True)]


def _facts_of(value: Any) -> Callable[[Any], TemplateFacts]:
    library = "jax" if is_jax_abstract(value) else library_of(value)
    of_libraries = {"numpy": _numpy_facts, "jax": jax_leaves.template_facts, "torch": torch_leaves.template_facts}
    return of_libraries.get(library or "", _python_facts)


def _numpy_facts(value: Any) -> TemplateFacts:
    check_storable(value.dtype)
    return "numpy" if isinstance(value, np.ndarray) else "numpy_scalar", value.shape, value.dtype, value


def _python_facts(value: Any) -> TemplateFacts:
    if isinstance(value, StaticLeaf):
        return STATIC, None, None, value, value.name
    if value is ... or isinstance(value, LeafMetadata):
        return "any", None, None, value
    if value is None:
        return "none", None, None, value
    if not is_python_value(value):
        raise LeafProblem(
            f"is of type {class_name(value)}; templates are arrays, jax.ShapeDtypeStruct and Python values"
        )
    kinds = (*NUMBER_TYPES.values(), str, bytes, set, frozenset)
    return next(kind.__name__ for kind in kinds if isinstance(value, kind)), None, None, value


def compare(template: LeafTemplate, saved: Saved, path: str | None = None) -> str | None:
    """Return how a template leaf differs from the saved leaf, or None if the two match. Nothing is cast silently.

    NumPy, JAX and torch arrays match each other if their shapes and dtypes are equal. A Python number matches a 0-d
    array or numpy scalar of the same kind; whether its value fits is checked after it has been read.
    """
    if template.kind == "any":
        wanted = template.leaf
        return compare_metadata(template.name, wanted, saved) if isinstance(wanted, LeafMetadata) else None
    reason = ""
    is_new = template.cast or (template.leaf is None and template.variant is None)
    if template.dtype is not None:
        if template.kind == "jax" and (actual := jax_leaves.narrowed(template.dtype)) is not None:
            reason = f"; jax would convert it to {actual}: set jax_enable_x64, or ask for a numpy array"
        elif template.kind == "torch" and is_new and not torch_leaves.torch_name(template.dtype):
            reason = "; torch has no such dtype"
    if not reason and _fits(template, saved):
        return None
    where = format_path(template.name) if path is None else path
    return difference(where, template, saved, template.origin) + reason


def compare_metadata(name: str, wanted: LeafMetadata, saved: Saved) -> str | None:
    """Like `compare`, but for a template leaf that is a `LeafMetadata`."""
    metadata = metadata_of(saved)
    is_alike = wanted.kind == metadata.kind or {wanted.kind, metadata.kind} <= ARRAY_KINDS - {"key"}
    # The shape and dtype of text, bytes and numbers are not compared, because both depend on the value.
    is_free = wanted.kind in {"str", "bytes", NUMBERS} or wanted.kind in NUMBER_KINDS
    if is_alike and (is_free or (wanted.shape, wanted.dtype) == (metadata.shape, metadata.dtype)):
        return None
    expected = wanted.kind if is_free else str(wanted)
    return difference(format_path(name), expected, saved, "template")


def _fits(template: LeafTemplate, saved: Saved) -> bool:
    wanted, kind = template.kind, saved.kind
    if wanted in NUMBER_KINDS or kind in NUMBER_KINDS:
        asked, number = _number_of(template), _number_of(saved)
        return asked is not None and (number == asked or (template.cast and _castable(number, asked)))
    if template.dtype is None:
        return wanted == kind and (wanted != STATIC or template.variant == saved.variant)
    if kind not in ARRAY_KINDS and kind != "numpy_scalar" and not saved.is_number_array:
        return False
    if saved.dtype is None or template.variant != saved.variant or (wanted == "key") != (kind == "key"):
        return False
    if template.shape != saved.shape and not (template.resize and len(template.shape or ()) == len(saved.shape or ())):
        return False
    cast = template.cast and _castable(number_kind(saved.dtype), number_kind(template.dtype))
    return cast or _same_dtype(template.dtype, saved.dtype)


def castable(template: LeafTemplate, saved: Saved | None) -> LeafTemplate:
    """Return the template; enable casting if the dtypes differ but are of the same kind (int, float or complex)."""
    if saved is None or saved.dtype is None or template.dtype is None or template.kind == "key":
        return template
    number = number_kind(saved.dtype)
    alike = number in {"int", "float", "complex"} and number == number_kind(template.dtype)
    casts = alike and template.variant is saved.variant is None and not _same_dtype(template.dtype, saved.dtype)
    return replace(template, cast=True) if casts else template


def _castable(saved: str | None, wanted: str | None) -> bool:
    """True if numbers of one kind may be cast to another; a complex number is not cast to a real one."""
    return saved is not None and wanted is not None and (saved != "complex" or wanted == "complex")


def _same_dtype(left: np.dtype[Any], right: np.dtype[Any]) -> bool:
    """True if two dtypes differ at most in byte order."""
    return left == right or left.newbyteorder("=") == right.newbyteorder("=")


def _number_of(leaf: LeafTemplate | Saved) -> str | None:
    """Return the kind of Python number that a leaf holds or can be converted to; None for other leaves."""
    if leaf.kind in NUMBER_KINDS:
        return leaf.kind
    is_plain = leaf.kind in _SAVED_ARRAYS and leaf.shape == () and leaf.variant is None
    return number_kind(leaf.dtype) if is_plain and leaf.dtype is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """The properties that the caller requests for a leaf, which override its template and the saved leaf."""

    # "jax", "numpy", "torch", "int", "float", "bool", "complex" or "str"; "numbers" leaves a packed sequence packed;
    # None lets the template decide.
    kind: str | None = None
    dtype: np.dtype[Any] | None = None  # dtype to cast the elements to; None for no cast
    shape: tuple[int, ...] | None = None  # shape of the whole array; None for the saved shape
    # Whether a saved array of another shape is zero-padded or truncated to ``shape``, at the end of each axis. If
    # False, an array of another shape is an error.
    resize: bool = False
    sharding: Any = None  # a `jax.sharding.Sharding`, or None
    weak: bool = False  # whether a jax array becomes weakly typed


def with_request(name: str, request: LeafRequest, saved: Saved, template: LeafTemplate | None) -> LeafTemplate:
    asked = _kind(name, request)
    if asked in _VALUES:
        leaf = template.leaf if template is not None and template.kind == asked else None
        return LeafTemplate(name, asked, None, None, leaf, cast=True, origin="request")
    if template is not None and template.dtype is not None:
        return _changed(template, asked or template.kind, request)
    if template is not None and template.kind != "any" and asked is None:
        return template  # a Python value
    return made_like(name, replace(request, kind=asked), saved)


def _kind(name: str, request: LeafRequest) -> str | None:
    kind, sharding = request.kind, request.sharding
    if kind is not None and kind not in _VALUES | _ARRAYS:
        expected = ", ".join(sorted(_VALUES | _ARRAYS))
        raise OptionError(f"{format_path(name)}: kind={kind!r} is not known; expected one of {expected}")
    if kind in {"jax", "torch"}:
        required(kind)
    if sharding is None:
        return kind
    if kind not in {None, "jax"}:
        raise OptionError(f"{format_path(name)}: sharding= is for jax arrays, but kind={kind!r} asks for another kind")
    if not isinstance(sharding, required("jax").sharding.Sharding):
        raise OptionError(f"{format_path(name)}: sharding={sharding!r:.80} must be a jax.sharding.Sharding")
    return "jax"


def made_like(name: str, request: LeafRequest, saved: Saved) -> LeafTemplate:
    """Return a template with the requested properties for a saved leaf that has no array in the given template."""
    kind = request.kind or "any"
    anything = LeafTemplate(name, "any", None, None, None, origin="request")
    no_array = saved.kind in {"str", "bytes"} or (saved.kind == NUMBERS and not saved.is_number_array)
    if saved.dtype is None or saved.shape is None or no_array:  # a value that is not a number
        return anything if saved.kind == "none" else replace(anything, kind=kind)
    variant = saved.variant
    if kind == "any" or (kind == "numpy" and variant is not None):
        if request.dtype is None and request.shape is None:
            return anything
        number = None if request.dtype is None else number_kind(request.dtype)
        if saved.kind in NUMBER_KINDS and number is not None:
            return LeafTemplate(name, number, None, None, None, cast=True, origin="request")
        kind = "numpy_scalar" if saved.kind == "numpy_scalar" and request.shape is None else "numpy"
    dtype = saved.dtype
    if kind == "jax" and saved.kind in NUMBER_KINDS:
        # jax may convert a number to a narrower dtype, which must then represent the value exactly.
        dtype = jax_leaves.narrowed(dtype) or dtype
    if kind == "jax" and saved.kind == "key":
        kind = "key"
    like_saved = LeafTemplate(name, kind, saved.shape, dtype, None, variant, request.weak, origin="request")
    return _changed(like_saved, kind, request)


def _changed(template: LeafTemplate, kind: str, request: LeafRequest) -> LeafTemplate:
    assert template.shape is not None
    if kind == "jax" and template.kind == "key":
        kind = "key"
    shape, dtype, cast = template.shape, template.dtype, False
    if request.shape is not None:
        inner = 1 if template.kind == "key" or (template.variant or "").startswith("complex") else 0
        shape = (*request.shape, *shape[len(shape) - inner :])
    if request.dtype is not None:
        # Keys and torch-only dtypes are not cast.
        dtype, cast = request.dtype, template.kind != "key" and template.variant is None
    return replace(
        template,
        kind=kind,
        shape=shape,
        dtype=dtype,
        leaf=template.leaf if kind == template.kind else None,
        variant=template.variant if kind in {"torch", "key"} else None,
        weak=template.weak and request.dtype is None,
        sharding=template.sharding if request.sharding is None else request.sharding,
        cast=cast,
        resize=request.resize and request.shape is not None and kind != "key",
        origin="request",
    )


# ---- leaf types of the initial state of a run, and their effect when the run resumes
#
# Leaf types may change during training: the first jitted step turns a Python number into a weakly typed jax array, an
# optimizer turns an int into float32, or a list grows. After a restart, the program creates a fresh state, whose types
# may differ from the saved types. Therefore, a checkpoint also records the types of the first fresh state. If the new
# fresh state has the same types, the program is unchanged, and every leaf is restored as it was saved: as an array or a
# number, weakly typed or not, with its dtype and shape. If the types differ, the program has changed.

_DETAILED = NUMBER_KINDS | _SAVED_ARRAYS | {"key"}  # leaves of these kinds are also compared by dtype and shape
_PLAIN = frozenset({"dict", "list", "tuple"})  # containers that can be rebuilt without their class
_PLAIN_WITH_LABEL = frozenset({"deque", "default_dict", "ordered_dict", "counter"})


class LeafType(NamedTuple):
    """The type of a leaf as the program sees it: everything except its value."""

    kind: str  # see `LeafTemplate.kind`
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    variant: str | None = None
    weak: bool = False

    @classmethod
    def of(cls, leaf: LeafTemplate | Saved) -> LeafType:
        if leaf.kind not in _DETAILED or leaf.kind in NUMBER_KINDS or leaf.dtype is None:
            return cls(leaf.kind)
        return cls(leaf.kind, str(leaf.dtype.newbyteorder("=")), leaf.shape, leaf.variant, leaf.weak)

    @classmethod
    def from_json(cls, stored: Any) -> LeafType:
        kind, dtype, shape, variant, weak = stored
        axes = None if shape is None else tuple(map(int, shape))
        return cls(str(kind), None if dtype is None else str(np.dtype(dtype)), axes, variant, weak is True)

    def to_json(self) -> list[Any]:
        return [self.kind, self.dtype, None if self.shape is None else list(self.shape), self.variant, self.weak]

    def is_like(self, other: LeafType) -> bool:
        """True if jit treats both types alike, for example a numpy and a jax array, or a float and a weak scalar."""
        return self == other or (self._traced is not None and self._traced == other._traced)

    @property
    def _traced(self) -> tuple[Any, ...] | None:
        """The leaf type as jit sees it; None if jit does not accept it."""
        if self.kind in NUMBER_KINDS:
            return self.kind, (), self.kind != "bool"
        if self.kind not in _SAVED_ARRAYS:
            return None
        if self.shape == () and (self.weak or self.dtype == "bool"):
            return number_kind(np.dtype(self.dtype)), (), self.weak
        return self.dtype, self.shape, self.variant, self.weak

    def __str__(self) -> str:
        if self.dtype is None:
            return spell(self.kind, None, None)
        text = f"{self.variant or self.dtype}{list(self.shape or ())}"
        kind = "" if self.kind in {"jax", "key"} else f"{self.kind} ".replace("_", " ")
        return f"{'weak ' if self.weak else ''}{kind}{text}"


class FreshTypes:
    """The leaf types of a fresh state. ``roots`` lists the state's root keys if the saved tree may have more."""

    def __init__(
        self,
        templates: Sequence[LeafTemplate],
        roots: Collection[str] | None = None,
        structure: TreeDef | None = None,
    ) -> None:
        self._structure = structure
        self._types = {template.name: LeafType.of(template) for template in templates if template.kind != "any"}
        self._others = frozenset(template.name for template in templates if template.kind == "any")
        self._roots = None if roots is None else sorted(map(escape_key, roots))

    def document(self, names: Sequence[str], leaves: Sequence[ArrayLeaf | ValueLeaf]) -> Details:
        """Return, as JSON, the differences between the leaf types of the fresh state and of a saved tree."""
        types: dict[tuple[int, str, Any], LeafType] = {}  # cached, because many leaves share a few descriptions
        grouped: dict[LeafType, list[str]] = {}
        new: list[str] = []
        for name, leaf in zip(names, leaves, strict=True):
            fresh = self._types.get(name)
            if fresh is None:
                if name not in self._others and _is_within(name, self._roots):
                    new.append(name)
                continue
            key = id(leaf.details), *((str(leaf.dtype), leaf.shape) if isinstance(leaf, ArrayLeaf) else ("", None))
            saved = types.get(key) or types.setdefault(key, LeafType.of(Saved.of(leaf)))
            if fresh != saved:
                grouped.setdefault(fresh, []).append(name)
        for name in self._types.keys() - set(names):
            grouped.setdefault(self._types[name], []).append(name)
        document: Details = {"types": [[kind.to_json(), sorted(alike)] for kind, alike in grouped.items()]}
        if new:
            document["new"] = new
        return document if self._roots is None else {**document, "roots": self._roots}

    def covers(self, name: str) -> bool:
        """True if a leaf of a later state, or the container directly above it, was a leaf of the fresh state."""
        return not {name, name.rpartition(".")[0]}.isdisjoint(self._types.keys() | self._others)

    def refused(self, tree: Flattened) -> list[str]:
        """Return a one-element list with the reason why a resume cannot rebuild a grown tree, or ``[]`` if it can."""
        try:
            if {*tree.names} != self._types.keys() | self._others:
                regrown(self._structure, tree.structure)
        except GrowthProblem as problem:
            return [str(problem)]
        return []


def _is_within(name: str, roots: Collection[str] | None) -> bool:
    return roots is None or name.partition(".")[0] in roots


def recorded_types(document: Any, saved: Mapping[str, Saved], where: object) -> dict[str, LeafType]:
    """Return the leaf types of a fresh state from its `FreshTypes.document`, which is untrusted input."""
    try:
        new, roots = set(document.get("new", ())), document.get("roots")
        types = {name: LeafType.of(leaf) for name, leaf in saved.items() if name not in new and _is_within(name, roots)}
        for kind, names in document["types"]:
            types |= dict.fromkeys(map(str, names), LeafType.from_json(kind))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{where}: the types of the fresh state cannot be decoded ({error!r:.200})"
        ) from error
    return types


def as_saved(template: LeafTemplate, saved: Saved, began: LeafType | None) -> LeafTemplate | str:
    """Return a template that restores a leaf of the fresh state; if the program changed, return the difference as text.

    ``began`` is the type that the leaf had in the fresh state when the run began.
    """
    now, then = LeafType.of(template), LeafType.of(saved)
    if template.kind == "any" or now == then or began is None or saved.kind == STATIC:
        return template
    if now.is_like(began):
        return _like_saved(template, saved, keeps_kind=now.kind != began.kind)
    if now.is_like(then):
        return template
    changed = difference(format_path(template.name), now, then, "the fresh state")
    return f"{changed}, in a run that began with {began}"


def _like_saved(template: LeafTemplate, saved: Saved, *, keeps_kind: bool) -> LeafTemplate:
    kind = template.kind if keeps_kind and {template.kind, saved.kind} <= _SAVED_ARRAYS else saved.kind
    is_alike = {template.kind, kind} <= {"jax", "key"} or template.kind == kind == "torch"
    if not is_alike or template.shape is None or saved.shape is None or template.variant != saved.variant:
        return new_leaf(template.name, saved, kind)
    # Sharding and device come from the template.
    sharding = template.sharding if len(template.shape) == len(saved.shape) else None
    cast = kind == "torch" and template.dtype != saved.dtype
    like_saved = replace(template, kind=kind, shape=saved.shape, dtype=saved.dtype, weak=saved.weak)
    return replace(like_saved, sharding=sharding, cast=cast)


def new_leaf(name: str, saved: Saved, kind: str | None = None) -> LeafTemplate:
    """Return a template that restores a leaf as it was saved; ``kind``, if given, replaces the saved kind."""
    kind = kind or saved.kind
    if kind == STATIC:
        raise GrowthProblem(f"{format_path(name)}: {saved} (checkpoint), which the fresh state lacks: create it there")
    if kind not in {"jax", "key", "torch"}:
        return LeafTemplate(name, "any", None, None, None)
    return made_like(name, LeafRequest(kind="jax" if kind == "key" else kind, weak=saved.weak), saved)


class GrowthProblem(ValueError):  # noqa: N818 - becomes one line of an error
    """Raised for a container or function that a resume cannot rebuild because the fresh state lacks it."""


def regrown(wanted: TreeDef | None, saved: TreeDef | None, name: str = "") -> TreeDef | None:
    """Return the containers of a saved tree, using the template's classes for containers that exist in both trees."""
    if saved is None:
        return None
    segments = saved.segments
    fresh = {} if wanted is None else dict(zip(wanted.segments, wanted.children, strict=True))
    prefix = f"{name}." if name else ""
    if wanted is not None and wanted.kind == saved.kind and fresh.keys() == set(segments):
        below = dict(zip(segments, saved.children, strict=True))
        children = [regrown(child, below[segment], prefix + segment) for segment, child in fresh.items()]
        return TreeDef(wanted.kind, wanted.keys, children, wanted.build, wanted.label)
    build = _maker(saved)
    if build is None and not (saved.kind in _PLAIN and saved.label is None) and saved.kind not in _PLAIN_WITH_LABEL:
        raise GrowthProblem(
            f"{format_path(name)}: {saved.label or saved.kind} with the keys {', '.join(segments)[:80]} (checkpoint), "
            "which the fresh state lacks and which cannot be built without its class: create it in the fresh state"
        )
    pairs = zip(segments, saved.children, strict=True)
    children = [regrown(fresh.get(segment), child, prefix + segment) for segment, child in pairs]
    return TreeDef(saved.kind, saved.keys, children, build or saved.build, saved.label)


def in_saved_order(wanted: TreeDef | None, saved: TreeDef | None) -> TreeDef | None:
    """Return the containers of a template, with dictionary keys in the order of a saved tree."""
    if wanted is None or saved is None or {*wanted.segments} != {*saved.segments}:
        return wanted
    below = dict(zip(saved.segments, saved.children, strict=True))
    children = {name: in_saved_order(child, below[name]) for name, child in wanted.named_children("")}
    if [*children] == [*below] or wanted.kind not in _ORDERED:
        return replace(wanted, children=[*children.values()])
    named = dict(zip(children, wanted.keys or (), strict=True))
    keys, make = [named[segment] for segment in below], _ORDERED[wanted.kind]
    ordered = [children[segment] for segment in below]
    return TreeDef(wanted.kind, keys, ordered, lambda values: make(zip(keys, values, strict=True)))


_ORDERED: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered_dict": OrderedDict}
_MAPPINGS = ("flax.core.frozen_dict.FrozenDict", "flax.nnx.statelib.State")


def _maker(saved: TreeDef) -> Callable[[list[Any]], Any] | None:
    """Return a function that builds a named tuple or flax container if its class is loaded; otherwise None."""
    label, keys = saved.label or "", saved.keys
    module, _, name = label.rpartition(".")
    kind = loaded_object(f"{module}:{name}")
    if not isinstance(kind, type) or keys is None:
        return None
    if issubclass(kind, tuple) and getattr(kind, "_fields", None) == tuple(keys):
        return partial(tuple.__new__, kind)
    if label in _MAPPINGS:
        return lambda values: kind(dict(zip(keys, values, strict=True)))
    is_variable = module == "flax.nnx.variablelib" and keys == ["value"]
    return (lambda values: kind(*values)) if is_variable else None


def leaf_names(structure: TreeDef | None, name: str = "") -> list[str]:
    """Return the names of all leaves below a container, in tree order."""
    if structure is None:
        return [name]
    return [leaf for below, child in structure.named_children(name) for leaf in leaf_names(child, below)]
