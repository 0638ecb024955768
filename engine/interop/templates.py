"""Trees of other libraries without some leaves: those that a template of ours has not, those that have no data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..item import Problem, SavedLeaf
from ..storage import Location
from ..tree import PLACEHOLDER, Skeleton, display, flatten
from .source import TreeSource
from .stored import StoredTree

OPTIONAL = "optional"
"""Member of a leaf's details: that it is a None, where the writer may have meant a container without leaves."""


def under_template(source: TreeSource, template: Any) -> TreeSource:
    """Gives leaves the names of the template, and leaves out what may be empty containers where it has none.

    Args:
        source: The saved tree.
        template: What the caller asks for, or None.

    Returns:
        The tree for `load_tree`.
    """
    if template is not None and isinstance(source, StoredTree):
        return source.named_like(flatten(template).names)
    if template is None or not any(OPTIONAL in leaf.saved.details for leaf in source.leaves):
        return source
    names = set(flatten(template).names)
    left_out = {leaf.name for leaf in source.leaves if OPTIONAL in leaf.saved.details and leaf.name not in names}
    return _Without(source, left_out) if left_out else source


def without_placeholders(source: TreeSource) -> tuple[TreeSource, list[str]]:
    """Leaves out the leaves that were saved by their names alone.

    Args:
        source: The saved tree.

    Returns:
        The tree, and one line for each leaf that it lacks, with the reason.

    Raises:
        UnsupportedLeafError: Nothing is left, as the tree is one such leaf and no container.
    """
    left_out = {leaf.name for leaf in source.leaves if leaf.saved.kind == PLACEHOLDER}
    if not left_out:
        return source, []
    if source.skeleton.structure is None:
        raise UnsupportedLeafError(f"{source.location}: this was saved as a placeholder: it has no data")
    lines = [f"{display(name)} (saved as a placeholder: it has no data)" for name in sorted(left_out)]
    return _Without(source, left_out), lines


class _Without:
    """A tree without some of its leaves."""

    def __init__(self, source: TreeSource, left_out: Collection[str]) -> None:
        self._source = source
        chosen = [leaf.name not in left_out for leaf in source.leaves]
        self.location: Location = source.location
        self.leaves: Sequence[SavedLeaf] = [leaf for leaf, stays in zip(source.leaves, chosen, strict=True) if stays]
        self.skeleton: Skeleton = source.skeleton.select(chosen)
        read_boxes = getattr(source, "read_boxes", None)
        if read_boxes is not None:
            self.read_boxes = read_boxes

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._source.read(leaves)

    def verify(self) -> list[Problem]:
        return self._source.verify()
