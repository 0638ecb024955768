"""Loads a checkpoint into another structure than the one it was saved in."""

from __future__ import annotations

from typing import Any

from .checkpointer import Place
from .errors import CheckpointNotFoundError, OptionError
from .handlers.external import resolve
from .handlers.type_handlers import DEFAULT_REGISTRY
from .interop.native import NativeCheckpoint
from .interop.places import open_checkpoint
from .interop.source import TREE, as_reader
from .item.transformed import load_transformed_tree
from .storage import as_location
from .tree import EXTERNAL, collection_paused


def load_transformed(
    path: Place,
    transformations: Any,
    new_tree: Any,
    *,
    default_to_original: bool = True,
    item: str | None = None,
) -> Any:
    r"""Loads what :func:`apply_transformations` would take from a checkpoint, and reads nothing else of it.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded; also of another library.
        transformations: :class:`Transform` objects by their keys. ``value_fn`` is given a numpy array or a Python
            value. ``multi_value_fn`` is given the saved tree as mappings and sequences that read a leaf when it is
            indexed. Arrays that functions are given are read-only; what they return has to fit the new tree.
        new_tree: The template: its containers, array libraries and shardings decide what is returned, and its dtypes
            and shapes are checked. ``...`` takes what there is. Leaves that are kept need values; all others may be
            abstract, such as ``jax.ShapeDtypeStruct``.
        default_to_original: Whether keys that no transformation names come from the checkpoint where it has them (True)
            or from the new tree (False).
        item: Which item, if the checkpoint has several trees.

    Returns:
        A tree of the new tree's containers.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or no such item.
        DamagedCheckpointError: What is needed does not verify.
        OptionError: A transformation makes no sense, or there are several items and none is named.
        TreeMismatchError: Keys cannot be filled from the checkpoint; names all of them.

    >>> import tempfile, numpy as np
    >>> from holdfast import Transform, save
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"layer": {"w": np.arange(3)}, "step": 7})
    ...     load_transformed(f"{directory}/ckpt", {"dense": Transform(original_key="layer")}, {"dense": {"w": ...}})
    {'dense': {'w': array([0, 1, 2])}}
    """
    checkpoint = open_checkpoint(as_location(path))
    trees = [name for name, kind in checkpoint.items.items() if kind == TREE]
    if item is not None and item not in trees:
        raise CheckpointNotFoundError(
            f"{checkpoint.location}: no tree {item!r}; it has {', '.join(sorted(trees)) or 'none'}"
        )
    if item is None and len(trees) != 1:
        raise OptionError(
            f"{checkpoint.location} has {len(trees)} trees ({', '.join(sorted(trees))}): name one with item="
        )
    name = trees[0] if item is None else item
    reader = as_reader(checkpoint.tree(name))
    with collection_paused():
        tree = load_transformed_tree(reader, transformations, new_tree, default_to_original=default_to_original)
    kept = {leaf.name: number for number, leaf in enumerate(reader.leaves) if leaf.saved.kind == EXTERNAL}
    if kept and isinstance(checkpoint, NativeCheckpoint):
        files = checkpoint.parts[name].files
        return resolve(tree, reader.location, files, kept, DEFAULT_REGISTRY, {})
    return tree
