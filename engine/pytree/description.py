"""Describes the leaves of a tree for storage, and raises one error that lists all leaves that cannot be stored."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from .containers import class_name
from .flattening import PackedNumbers, collection_paused
from .host_leaves import INT64, describe_numpy, describe_python, is_python_value
from .jax_leaves import JaxDescriber, WholeArrays, is_key, is_tracer, is_whole
from .jax_leaves import template_facts as jax_facts
from .leaves import (
    STATIC,
    ArrayLeaf,
    LeafMetadata,
    LeafProblem,
    StaticLeaf,
    ValueLeaf,
    for_each_leaf,
    is_jax_abstract,
    is_jax_array,
    library_of,
)
from .torch_leaves import TorchDescriber, have_facts, is_dtensor, is_small, small_facts
from .torch_leaves import template_facts as torch_facts

_Describe = Callable[[Any], ArrayLeaf | ValueLeaf]


def describe(names: Sequence[str], values: Sequence[Any], *, pinned_bytes: int = 0) -> list[ArrayLeaf | ValueLeaf]:
    """Describe leaves for storage. Start all device-to-host copies before waiting for the first one.

    If ``pinned_bytes`` is not 0, the caller must take a snapshot of the described leaves. The snapshot then copies
    arrays from accelerators and uses at most ``pinned_bytes`` bytes of pinned memory.
    """
    summary = "these leaves cannot be saved, and nothing was written"
    with collection_paused():
        describers = _describers(values, pinned_bytes)
        return for_each_leaf(names, values, lambda value: describers[type(value)](value), summary)


def _describers(values: Sequence[Any], pinned_bytes: int) -> dict[type, _Describe]:
    """Start the required copies to the host; return, for each type, the function that describes its values."""
    types = dict(zip(map(type, values), values, strict=True))  # one example per type, because a tree has few types
    libraries = {kind: library_of(value) for kind, value in types.items()}
    of_jax = {kind for kind, name in libraries.items() if name == "jax" and not is_tracer(types[kind])}
    of_torch = {kind for kind, name in libraries.items() if name == "torch"}
    describers: dict[type, _Describe] = {}
    if of_jax:
        arrays = JaxDescriber([value for value in values if type(value) in of_jax], pinned_bytes)
        describers = {kind: arrays.describe_key if is_key(types[kind]) else arrays.describe for kind in of_jax}
    if of_torch:
        tensors = TorchDescriber([value for value in values if type(value) in of_torch], later=pinned_bytes > 0)
        for kind in of_torch:
            describers[kind] = tensors.describe_distributed if is_dtensor(types[kind]) else tensors.describe
    return describers | {kind: _describer(value) for kind, value in types.items() if kind not in describers}


def _describer(value: Any) -> _Describe:
    if isinstance(value, np.ndarray | np.generic):
        return describe_numpy
    if is_python_value(value):
        return describe_python
    if isinstance(value, PackedNumbers):
        return PackedNumbers.describe
    if isinstance(value, StaticLeaf):
        return lambda leaf: ValueLeaf({"kind": STATIC, "value": leaf.name})
    return _refuse


_FACTS_OF: dict[str | None, Callable[[Any], Any]] = {"jax": jax_facts, "torch": torch_facts}


def check_leaves(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raise the error that `describe` would raise for these leaves. Nothing is copied; abstract leaves are accepted."""
    for_each_leaf(names, values, _check_leaf, "these leaves cannot be saved")


def _check_leaf(value: Any) -> None:
    if (facts_of := _FACTS_OF.get(library_of(value))) is not None:
        facts_of(value)
    elif not (value is ... or isinstance(value, LeafMetadata | PackedNumbers) or is_jax_abstract(value)):
        _describer(value)(value)


def shared_memory(names: Sequence[str], leaves: Sequence[Any]) -> list[tuple[str, str]]:
    """Return pairs of leaf names: a jax array in host memory, and a volatile leaf whose memory overlaps with it.

    Neither jax nor numpy reports shared memory, so addresses are compared. Only sharing between two leaves is found.
    """
    named = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, ArrayLeaf)]
    if not any(leaf.details["kind"] == "jax" for _, leaf in named):
        return []
    changing = sorted((*_bounds(array), name) for name, leaf in named if leaf.volatile for array in _on_host(leaf))
    if not changing:
        return []
    shared: dict[str, str] = {}
    for name, leaf in named:
        for array in _on_host(leaf) if leaf.details["kind"] == "jax" else ():
            low, high = _bounds(array)
            last = bisect.bisect_left(changing, high, key=itemgetter(0)) - 1  # last array that starts before `high`
            if low < high and last >= 0 and changing[last][1] > low:
                shared[name] = changing[last][2]
    return list(shared.items())


def _on_host(leaf: ArrayLeaf) -> list[NDArray[Any]]:
    return [piece.array for piece in leaf.pieces if isinstance(piece.array, np.ndarray)]


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the address of an array's first byte, and the address after its last byte."""
    start = array.__array_interface__["data"][0]
    if not array.size:
        return start, start
    spans = [stride * (count - 1) for stride, count in zip(array.strides, array.shape, strict=True)]
    low, high = sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans)
    return start + low, start + high + array.itemsize


def _refuse(value: Any) -> ArrayLeaf:
    name = class_name(value)
    if is_jax_array(value):
        raise LeafProblem(f"is a tracer ({type(value).__name__}); save outside of jax.jit, jax.grad and the like")
    if is_jax_abstract(value):
        raise LeafProblem("is a jax.ShapeDtypeStruct, which has no values; it can only be a template")
    if isinstance(value, LeafMetadata):
        raise LeafProblem("is a LeafMetadata, which has no values; it can only be a template")
    if hasattr(value, "state_dict"):
        raise LeafProblem(f"is of type {name}; store its state_dict()")
    if hasattr(value, "get_state"):
        raise LeafProblem(f"is of type {name}; store its get_state()")
    if callable(value):
        raise LeafProblem(
            f"is of type {name}, which is code; leave it out of the tree, as eqx.partition(tree, eqx.is_array) does"
        )
    # Gymnasium environments and similar objects have both a ``step`` and a ``reset`` method.
    if callable(getattr(value, "step", None)) and callable(getattr(value, "reset", None)):
        raise LeafProblem(
            f"is an environment ({name}); leave it out, and after a resume, start an episode with a seed derived from "
            "the step, as in reset(seed=step); or pass an extra whose get_state and set_state save and restore the "
            "state of the environment"
        )
    raise LeafProblem(f"is of type {name}; leaves are arrays, numbers, strings, bytes and None")


# ---- leaves of later trees


class TakenLeaves(NamedTuple):
    """The leaves of a tree that matches an earlier tree. Each list has the order of the positions in `KnownLeaves`."""

    tensors: list[Any]  # tensors in host memory, which have yet to be copied
    arrays: list[Any]  # numpy arrays, which have yet to be copied
    held: list[Any]  # host copies of jax arrays (see `HostCopies`), followed by Python values; not copied again
    others: list[ArrayLeaf | ValueLeaf]


class KnownLeaves:
    """Facts about the leaves of a tree, used to recognize later trees with matching leaves.

    Most leaves belong to a few kinds. Leaves of the same kind are checked together, and their descriptions are reused.
    All other leaves are described again, and match if the new descriptions equal the earlier ones. This object keeps
    no leaves or values alive. ``is_copied`` marks the leaves that are copied in full into one contiguous array.
    """

    def __init__(
        self,
        values: Sequence[Any],
        leaves: Sequence[ArrayLeaf | ValueLeaf],
        is_copied: Sequence[bool],
        pinned_bytes: int = 0,
    ) -> None:
        self._pinned_bytes = pinned_bytes
        self.types = list(map(type, values))
        groups: dict[str, list[int]] = {kind: [] for kind in ("array", "tensor", "jax", "plain", "other")}
        kinds: dict[type, str] = {}
        for position, (value, leaf, copied) in enumerate(zip(values, leaves, is_copied, strict=True)):
            kind = kinds.get(type(value)) or kinds.setdefault(type(value), _kind(value))
            is_alone = (
                (kind == "array" and not copied)
                or (kind == "tensor" and not (copied and is_small(value)))
                or (kind == "jax" and not is_whole(value.sharding))
                or (kind == "plain" and type(value) is int and isinstance(leaf, ValueLeaf))  # int of more than 64 bits
            )
            groups["other" if is_alone else kind].append(position)
        # Positions of numpy arrays; small host tensors; single-device jax arrays; numbers or None; and other leaves.
        self.arrays, self.tensors, self.whole, self.plain, self.others = groups.values()
        self.tensor_facts = small_facts([values[position] for position in self.tensors])
        self._arrays = [_ARRAY_FACTS(values[position]) for position in self.arrays]
        self._whole = WholeArrays([values[position] for position in self.whole])
        self._others = [_facts(leaves[position]) for position in self.others]
        self._held = {position: leaves[position].details for position in self.whole}

    def take(self, values: Sequence[Any]) -> TakenLeaves | None:
        """Return a tree's leaves, to be copied or kept by reference; None if they do not match the earlier tree."""
        if list(map(type, values)) != self.types:
            return None
        get = values.__getitem__
        arrays, tensors = list(map(get, self.arrays)), list(map(get, self.tensors))
        if not all(map(eq, map(_ARRAY_FACTS, arrays), self._arrays)):
            return None
        if tensors and not have_facts(tensors, self.tensor_facts):
            return None
        plain = list(map(get, self.plain))
        if any(type(value) is int and value not in INT64 for value in plain):
            return None
        whole = list(map(get, self.whole))
        copies = self._whole.start(whole, self._pinned_bytes)
        if copies is None:
            return None
        left = max(copies.pinned_bytes, 1) if self._pinned_bytes else 0  # a limit of 0 would change the descriptions
        try:
            others = describe([""] * len(self.others), list(map(get, self.others)), pinned_bytes=left)
        except UnsupportedLeafError:
            return None  # the caller describes all leaves again, so that the error lists every problem
        if list(map(_facts, others)) != self._others:
            return None
        return TakenLeaves(tensors, arrays, [*copies.wait(), *plain], others)

    @property
    def held(self) -> list[int]:
        """The positions of the leaves in `TakenLeaves.held`."""
        return [*self.whole, *self.plain]

    def held_leaf(self, position: int, value: Any) -> ArrayLeaf | ValueLeaf:
        """Describe a leaf from `TakenLeaves.held`, which is kept by reference rather than copied."""
        details = self._held.get(position)
        return describe_python(value) if details is None else ArrayLeaf.of(np.asarray(value), details)


_ARRAY_FACTS = attrgetter("dtype", "shape")


def _kind(value: Any) -> str:
    """Return the group for leaves of this type; `KnownLeaves` moves leaves that need separate checks to "other"."""
    if type(value) is np.ndarray:
        return "array"
    if type(value) in (bool, int, float, complex, type(None)):
        return "plain"
    library = library_of(value)
    if library == "jax" and (is_tracer(value) or is_key(value)):
        return "other"
    return {"jax": "jax", "torch": "tensor"}.get(library or "", "other")


def _facts(leaf: ArrayLeaf | ValueLeaf) -> tuple[Any, ...] | None:
    """Return an array's description without its elements; None for a leaf that is not an array."""
    if isinstance(leaf, ValueLeaf):
        return None
    boxes = [(piece.start, piece.array.shape) for piece in leaf.pieces]
    return leaf.dtype, leaf.shape, leaf.volatile, leaf.details, boxes, leaf.parts
