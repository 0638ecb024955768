"""Trees of arrays and other values as items."""

from __future__ import annotations

from typing import Any

from ..item import HostTree, Layout, StagingBuffer, TreeReader, TreeWriter, load_tree, tree_metadata
from ..storage import Location
from ..tree import collection_paused, describe, flatten
from .base import PreparedCheckpointHandler, no_arguments
from .saves import Files, PreparedItem


class PyTreeCheckpointHandler(PreparedCheckpointHandler):
    """Saves trees: containers of arrays of any library, scalars, text and bytes.

    Args:
        layout: Sizes of chunks, segments and data files.
    """

    kind = "pytree"
    collective = True
    verifies = True

    def __init__(self, *, layout: Layout | None = None) -> None:
        self._layout = layout or Layout()
        self._staging = StagingBuffer()

    def prepare(self, item: Any, *, snapshot: bool, layout: Layout | None = None, **kwargs: Any) -> PreparedItem:
        """Makes a tree ready to be written.

        Args:
            item: The tree.
            snapshot: Whether to copy arrays that can change. Those that cannot, such as jax's, are held, not copied.
            layout: Sizes of chunks, segments and data files, instead of the handler's own.
            **kwargs: None are known.

        Returns:
            What writes the tree into a folder.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved; names every such leaf.
        """
        no_arguments(self, kwargs)
        flat = flatten(item)
        leaves = describe(flat.names, flat.values)
        if snapshot:
            leaves = self._staging.snapshot(leaves)
        return TreeWriter(HostTree(flat.names, leaves, flat.structure), layout or self._layout)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads a tree.

        Args:
            directory: The folder.
            item: The template: its containers, array libraries, dtypes and shardings decide what is returned. None
                returns the saved containers with numpy arrays.
            files: What the commit record says about the folder.
            **kwargs: ``select``: patterns of paths; only matching leaves are read.

        Returns:
            The tree.

        Raises:
            TreeMismatchError: Template and checkpoint differ; lists every leaf that does.
            DamagedCheckpointError: What is stored does not verify.
        """
        with collection_paused():
            return load_tree(TreeReader(directory, files), like=item, **kwargs)

    def structure(self, directory: Location, *, files: Files | None = None) -> Any:
        """Returns the tree with a description of every leaf in its place; no data is read."""
        return tree_metadata(TreeReader(directory, files))
