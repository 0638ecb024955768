"""Describes all leaves of a tree for storage, or raises one error for all leaves that cannot be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .containers import class_name
from .flatten import collection_paused
from .host_leaves import describe_numpy, describe_python, is_python_value
from .jax_leaves import JaxDescriber, is_key, is_tracer
from .leaves import (
    ArrayLeaf,
    LeafMetadata,
    LeafProblem,
    ValueLeaf,
    is_jax_abstract,
    is_jax_array,
    is_torch_tensor,
    report_problems,
)
from .packing import PackedNumbers
from .torch_leaves import TorchDescriber, is_dtensor

_Describe = Callable[[Any], ArrayLeaf | ValueLeaf]


def describe(names: Sequence[str], values: Sequence[Any]) -> list[ArrayLeaf | ValueLeaf]:
    """Describe leaves for storage. All copies from devices start before the first is waited for."""
    classifier = _Classifier()
    leaves: list[ArrayLeaf | ValueLeaf] = []
    problems: list[tuple[str, str]] = []
    with collection_paused():
        describers: list[_Describe] = [classifier.prepare(value) for value in values]
        for index, (describer, value) in enumerate(zip(describers, values, strict=True)):
            try:
                leaves.append(describer(value))
            except LeafProblem as problem:
                problems.append((names[index], str(problem)))
    report_problems(problems, "these leaves cannot be saved, and nothing was written")
    return leaves


class _Classifier:
    """Finds the describer of each value. A tree has few types, and they take a while to tell apart."""

    def __init__(self) -> None:
        self._jax: JaxDescriber | None = None
        self._torch: TorchDescriber | None = None
        self._known: dict[type, tuple[Callable[[Any], None] | None, _Describe]] = {}

    def prepare(self, value: Any) -> _Describe:
        """Start the copy of a value to the host, where one is needed, and return its describer."""
        kind = type(value)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = self._classify(value)
        prepare, describer = found
        if prepare is not None:
            prepare(value)
        return describer

    def _classify(self, value: Any) -> tuple[Callable[[Any], None] | None, _Describe]:
        if isinstance(value, np.ndarray | np.generic):
            return None, describe_numpy
        if is_python_value(value):
            return None, describe_python
        if isinstance(value, PackedNumbers):
            return None, PackedNumbers.describe
        if is_jax_array(value) and not is_tracer(value):
            self._jax = self._jax or JaxDescriber()
            prepare = self._jax.prepare if self._jax.prefetches else None
            return prepare, self._jax.describe_key if is_key(value) else self._jax.describe
        if is_torch_tensor(value):
            self._torch = self._torch or TorchDescriber()
            return self._torch.prepare, self._torch.describe_distributed if is_dtensor(value) else self._torch.describe
        return None, _refuse


def _refuse(value: Any) -> ArrayLeaf:
    kind = class_name(value)
    if is_jax_array(value):
        raise LeafProblem(f"is a tracer ({type(value).__name__}); save outside of jax.jit, jax.grad and the like")
    if is_jax_abstract(value):
        raise LeafProblem("is a jax.ShapeDtypeStruct, which has no values; it can only be a template")
    if isinstance(value, LeafMetadata):
        raise LeafProblem("is a LeafMetadata, which has no values; it can only be a template")
    if hasattr(value, "state_dict"):
        raise LeafProblem(f"is of type {kind}; store its state_dict()")
    if hasattr(value, "get_state"):
        raise LeafProblem(f"is of type {kind}; store its get_state()")
    if callable(value):
        raise LeafProblem(f"is of type {kind}, which is code; leave it out of the tree")
    raise LeafProblem(f"is of type {kind}; leaves are arrays, numbers, strings, bytes and None")
