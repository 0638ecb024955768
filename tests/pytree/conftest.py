"""Saves and loads trees in memory, without files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from holdfast.engine.pytree import (
    ArrayLeaf,
    Saved,
    compare,
    describe,
    describe_template,
    flatten,
    from_document,
    materialize,
    to_document,
    unflatten,
)


@dataclass
class Memory:
    """A saved tree."""

    document: str
    dtypes: list[Any]
    shapes: list[Any]
    contents: list[bytes | None]

    def load(self, like: Any = None, *, template: bool = False) -> Any:
        """Loads with a template (None is one, with `template`), or without."""
        names, details, containers = from_document(json.loads(self.document))
        saved = [Saved(*facts) for facts in zip(details, self.dtypes, self.shapes, strict=True)]
        arrays = [
            None if content is None else np.frombuffer(bytearray(content), dtype).reshape(shape)
            for content, dtype, shape in zip(self.contents, self.dtypes, self.shapes, strict=True)
        ]
        if like is None and not template:
            return containers.build(materialize([None] * len(names), saved, arrays, names))
        wanted = flatten(like)
        targets = describe_template(wanted.names, wanted.values)
        order = [names.index(name) for name in wanted.names]
        assert len(order) == len(names)
        differences = [
            line for target, index in zip(targets, order, strict=True) if (line := compare(target, saved[index]))
        ]
        if differences:
            raise AssertionError("\n".join(differences))
        values = materialize(
            list(targets), [saved[index] for index in order], [arrays[index] for index in order], wanted.names
        )
        return unflatten(wanted.structure, values)


def assemble(leaf: ArrayLeaf) -> np.ndarray[Any, Any]:
    """Puts the pieces together, and checks that they cover the array exactly once."""
    whole = np.zeros(leaf.shape, leaf.dtype)
    covered = np.zeros(leaf.shape, np.int64)
    for piece in leaf.pieces:
        assert piece.array.dtype == leaf.dtype
        part = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.array.shape, strict=True))
        whole[part] = piece.array
        covered[part] += 1
    assert (covered == 1).all()
    return whole


@pytest.fixture(scope="session")
def save() -> Callable[[Any], Memory]:
    """Saves a tree in memory."""

    def save_tree(tree: Any) -> Memory:
        flattened = flatten(tree)
        leaves = describe(flattened.names, flattened.values)
        document = to_document(flattened.structure, [leaf.details for leaf in leaves])
        memory = Memory(json.dumps(document, allow_nan=False), [], [], [])
        assert from_document(json.loads(memory.document))[0] == flattened.names
        for leaf in leaves:
            is_array = isinstance(leaf, ArrayLeaf)
            memory.dtypes.append(leaf.dtype if isinstance(leaf, ArrayLeaf) else None)
            memory.shapes.append(leaf.shape if isinstance(leaf, ArrayLeaf) else None)
            memory.contents.append(assemble(leaf).tobytes() if isinstance(leaf, ArrayLeaf) else None)
            assert is_array or "value" in leaf.details or "base64" in leaf.details or leaf.details["kind"] == "none"
        return memory

    return save_tree
