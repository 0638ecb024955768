"""torch tensors for the contenders that save them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..workloads import Array, Shape
    from .base import Tree

PAGE_FLOATS = 1024  # float32 elements on a page of memory


def hold(arrays: Mapping[str, Array]) -> Tree:
    """Copy into a flat state dict of tensors that own their memory."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def empty(shapes: Mapping[str, Shape]) -> Tree:
    """A state dict to load into."""
    return {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}


def as_numpy(tree: Tree) -> Tree:
    """View every tensor as a numpy array."""
    return {name: tensor.numpy() for name, tensor in tree.items()}


def touched(tree: Tree) -> Tree:
    """Read one element of every page, so that a mapped file is in memory and not only mapped."""
    for tensor in tree.values():
        tensor.view(-1)[::PAGE_FLOATS].sum()
    return tree
