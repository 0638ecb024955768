"""The types of the state that a run began with, and what they decide when the run resumes.

A state may change its types while it trains: a Python number becomes a weakly typed jax array in the first jitted step,
an optimizer makes float32 of an int, a list grows. A program that is started again makes a new fresh state, which does
not show the types at the save. So a checkpoint records the types of the first fresh state, too. Where the new fresh
state has the same types, the program is unchanged, and the leaf is restored as it was saved: array or number, weak or
strong, with its dtype and shape. Where they differ, the program has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError
from .flatten import TreeDef, key_segments
from .host_leaves import number_kind
from .leaves import NUMBER_KINDS, STATIC, ArrayLeaf, Details, Saved, ValueLeaf, spell
from .names import escape_key, format_path
from .template import LeafRequest, LeafTemplate, made_like

_ARRAYS = frozenset({"numpy", "numpy_scalar", "jax", "torch"})
_KNOWN = NUMBER_KINDS | _ARRAYS | {"key"}  # kinds whose dtype and shape count; of the others, the kind alone
_PLAIN = frozenset({"dict", "list", "tuple"})  # containers that can be made without their class
_PLAIN_WITH_LABEL = frozenset({"deque", "default_dict", "ordered_dict", "counter"})


@dataclass(frozen=True, slots=True)
class LeafType:
    """What distinguishes a leaf for a program, apart from its value."""

    kind: str  # see `LeafTemplate.kind`
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    variant: str | None = None
    weak: bool = False

    @classmethod
    def of(cls, leaf: LeafTemplate | Saved) -> LeafType:
        if leaf.kind not in _KNOWN or leaf.kind in NUMBER_KINDS or leaf.dtype is None:
            return cls(leaf.kind)
        return cls(leaf.kind, str(leaf.dtype.newbyteorder("=")), leaf.shape, leaf.variant, leaf.weak)

    @classmethod
    def from_json(cls, found: Any) -> LeafType:
        kind, dtype, shape, variant, weak = found
        axes = None if shape is None else tuple(map(int, shape))
        return cls(str(kind), None if dtype is None else str(np.dtype(dtype)), axes, variant, weak is True)

    def to_json(self) -> list[Any]:
        return [self.kind, self.dtype, None if self.shape is None else list(self.shape), self.variant, self.weak]

    def is_like(self, other: LeafType) -> bool:
        """Whether jit makes the same of both: a Python float is a weakly typed scalar, a numpy array a jax array."""
        return self == other or (self._traced is not None and self._traced == other._traced)

    @property
    def _traced(self) -> tuple[Any, ...] | None:
        """What distinguishes the leaf for jit; None where jit does not take it."""
        if self.kind in NUMBER_KINDS:
            return self.kind, (), self.kind != "bool"
        if self.kind not in _ARRAYS:
            return None
        if self.shape == () and (self.weak or self.dtype == "bool"):
            return number_kind(np.dtype(self.dtype)), (), self.weak
        return self.dtype, self.shape, self.variant, self.weak

    def __str__(self) -> str:
        if self.dtype is None:
            return spell(self.kind, None, None)
        text = f"{self.variant or self.dtype}{list(self.shape or ())}"
        where = "" if self.kind in {"jax", "key"} else f"{self.kind} ".replace("_", " ")
        return f"{'weak ' if self.weak else ''}{where}{text}"


class FreshTypes:
    """The types of the leaves of a fresh state, by name; ``roots`` are its keys, if the tree has others, too."""

    def __init__(self, templates: Sequence[LeafTemplate], roots: Collection[str] | None = None) -> None:
        self._types = {template.name: LeafType.of(template) for template in templates if template.kind != "any"}
        self._others = frozenset(template.name for template in templates if template.kind == "any")
        self._roots = None if roots is None else sorted(map(escape_key, roots))

    def document(self, names: Sequence[str], leaves: Sequence[ArrayLeaf | ValueLeaf]) -> Details:
        """Return as JSON how the types of the fresh state differ from those of a saved tree."""
        known: dict[tuple[int, str, Any], LeafType] = {}  # many leaves share a few descriptions
        grouped: dict[LeafType, list[str]] = {}
        new: list[str] = []
        for name, leaf in zip(names, leaves, strict=True):
            fresh = self._types.get(name)
            if fresh is None:
                if name not in self._others and _is_within(name, self._roots):
                    new.append(name)
                continue
            key = id(leaf.details), *((str(leaf.dtype), leaf.shape) if isinstance(leaf, ArrayLeaf) else ("", None))
            saved = known.get(key)
            if saved is None:
                saved = known[key] = LeafType.of(Saved.of(leaf))
            if fresh != saved:
                grouped.setdefault(fresh, []).append(name)
        for name in self._types.keys() - set(names):
            grouped.setdefault(self._types[name], []).append(name)
        document: Details = {"types": [[kind.to_json(), sorted(each)] for kind, each in grouped.items()]}
        if new:
            document["new"] = new
        return document if self._roots is None else {**document, "roots": self._roots}


def _is_within(name: str, roots: Collection[str] | None) -> bool:
    return roots is None or name.partition(".")[0] in roots


def recorded_types(document: Any, saved: Mapping[str, Saved], where: object) -> dict[str, LeafType]:
    """Return the types of a fresh state from its `FreshTypes.document`, which is not trusted."""
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
    """Return the template for a leaf of the fresh state, or the difference that shows that the program has changed.

    ``began`` is the type of the leaf in the fresh state that the run began with.
    """
    now, then = LeafType.of(template), LeafType.of(saved)
    if template.kind == "any" or now == then or began is None or saved.kind == STATIC:
        return template
    if now.is_like(began):
        return _like_saved(template, saved, keeps_kind=now.kind != began.kind)
    if now.is_like(then):
        return template
    return (
        f"{format_path(template.name)}: expected {now} (the fresh state), found {then} (checkpoint), of a run that "
        f"began with {began}"
    )


def _like_saved(template: LeafTemplate, saved: Saved, *, keeps_kind: bool) -> LeafTemplate:
    kind = template.kind if keeps_kind and {template.kind, saved.kind} <= _ARRAYS else saved.kind
    own = {template.kind, kind} <= {"jax", "key"} or template.kind == kind == "torch"
    if not own or template.shape is None or saved.shape is None or template.variant != saved.variant:
        return new_leaf(template.name, saved, kind)
    # The template decides its sharding or device.
    sharding = template.sharding if len(template.shape) == len(saved.shape) else None
    cast = kind == "torch" and template.dtype != saved.dtype
    found = replace(template, kind=kind, shape=saved.shape, dtype=saved.dtype, weak=saved.weak)
    return replace(found, sharding=sharding, cast=cast)


def new_leaf(name: str, saved: Saved, kind: str | None = None) -> LeafTemplate:
    """Return the template of a leaf that is restored as it was saved, by the library that it had."""
    kind = kind or saved.kind
    if kind == STATIC:
        raise GrowthProblem(f"{format_path(name)}: {saved} (checkpoint), which the fresh state lacks: make it there")
    if kind not in {"jax", "key", "torch"}:
        return LeafTemplate(name, "any", None, None, None)
    return made_like(name, LeafRequest(kind="jax" if kind == "key" else kind, weak=saved.weak), saved)


class GrowthProblem(ValueError):  # noqa: N818 - becomes one line of an error
    """A container that cannot be made again, because its class is not known."""


def regrown(wanted: TreeDef | None, saved: TreeDef | None, name: str = "") -> TreeDef | None:
    """Return the containers of a saved tree, with the classes of a template where it has the same containers."""
    if saved is None:
        return None
    segments = key_segments(saved.keys, len(saved.children))
    known: dict[str, TreeDef | None] = {}
    if wanted is not None:
        known = dict(zip(key_segments(wanted.keys, len(wanted.children)), wanted.children, strict=True))
    prefix = f"{name}." if name else ""
    if wanted is not None and wanted.kind == saved.kind and known.keys() == set(segments):
        found = dict(zip(segments, saved.children, strict=True))
        children = [regrown(child, found[segment], prefix + segment) for segment, child in known.items()]
        return TreeDef(wanted.kind, wanted.keys, children, wanted.build, wanted.label)
    if not (saved.kind in _PLAIN and saved.label is None) and saved.kind not in _PLAIN_WITH_LABEL:
        raise GrowthProblem(
            f"{format_path(name)}: {saved.label or saved.kind} with the keys {', '.join(segments)[:80]} (checkpoint), "
            "which the fresh state lacks, and which cannot be made without its class: make it in the fresh state"
        )
    children = [
        regrown(known.get(segment), child, prefix + segment)
        for segment, child in zip(segments, saved.children, strict=True)
    ]
    return TreeDef(saved.kind, saved.keys, children, saved.build, saved.label)


def leaf_names(structure: TreeDef | None, name: str = "") -> list[str]:
    """Return the names of the leaves below a container, in their order."""
    if structure is None:
        return [name]
    prefix = f"{name}." if name else ""
    segments = key_segments(structure.keys, len(structure.children))
    return [
        found
        for segment, child in zip(segments, structure.children, strict=True)
        for found in leaf_names(child, prefix + segment)
    ]
