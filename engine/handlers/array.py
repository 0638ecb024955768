"""One array as an item."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedLeafError
from ..storage import Location
from ..tree import flatten
from ..tree.containers import class_name
from .pytree import PyTreeCheckpointHandler
from .saves import Files, PreparedItem


class ArrayCheckpointHandler(PyTreeCheckpointHandler):
    """Saves one array, or one number, and nothing around it.

    It is stored as a tree of one leaf: ``holdfast.load`` and a :class:`~holdfast.PyTreeCheckpointHandler` read it, too.
    All arguments are those of :class:`~holdfast.PyTreeCheckpointHandler`.
    """

    def prepare(self, item: Any, *, snapshot: bool, save_args: Any = None, **kwargs: Any) -> PreparedItem:
        """Makes an array ready to be written.

        Args:
            item: An array of numpy, jax or torch, or a number.
            snapshot: Whether to copy it if it can change.
            save_args: The :class:`~holdfast.SaveArgs` of the array.
            **kwargs: As for a tree.

        Returns:
            What writes it into a folder.

        Raises:
            UnsupportedLeafError: It is no array.
        """
        if flatten(item).structure is not None or item is None or isinstance(item, str | bytes):
            raise UnsupportedLeafError(
                f"ArrayCheckpointHandler saves one array, and this is a {class_name(item)}: use PyTreeCheckpointHandler"
            )
        return super().prepare(item, snapshot=snapshot, save_args=save_args, **kwargs)

    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        files: Files | None = None,
        restore_args: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Reads the array back.

        Args:
            directory: The folder.
            item: The template: its library, dtype and sharding decide what is returned. None returns a numpy array.
            files: What the commit record says about the folder.
            restore_args: The :class:`~holdfast.RestoreArgs` or :class:`~holdfast.ArrayRestoreArgs` of the array.
            **kwargs: As for a tree.

        Returns:
            The array.
        """
        return super().restore(directory, item, files=files, restore_args=restore_args, **kwargs)
