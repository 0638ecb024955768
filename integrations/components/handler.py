"""A checkpoint handler that saves component trees, either immediately or in the background."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ...engine.arrays import Layout, WrittenSteps, read_checked
from ...engine.errors import OptionError
from ...engine.format import COMPONENTS, DOCUMENT_LIMIT, RECORD, CheckpointRecord
from ...engine.handlers import Files, PreparedCheckpointHandler, PreparedItem, PyTreeCheckpointHandler, refuse_arguments
from ...engine.pytree import Patterns
from ...engine.sources import Misfits
from ...engine.steps import read_record
from ...engine.storage import Location
from ..graph import Path
from .component import Checkpointable
from .live import live_tree
from .permissions import Permissions
from .reading import NativeComponent, full_state, of_record
from .restoring import TreeConstruction, TreeRestore, kept_values
from .saving import prepare


class ComponentCheckpointHandler(PreparedCheckpointHandler):
    """Saves a component and all components below it, and restores a running component in place.

    The item's folder is a component tree as written by ``save_to_path``. The folder, or the directory of any component
    in it, can be passed to ``restore_from_path`` and ``from_checkpoint``.

    With several processes, a save writes the components of process 0, and all processes restore them.

    Args:
        layout: Sizes of chunks and data files, and the compression of chunks.
        compression: The zstd compression level for chunks; overrides the level in ``layout``.
        use_msgpack: Store the arrays of each component in a single msgpack file instead of a database.

    >>> import tempfile, numpy as np
    >>> from holdfast import AsyncCheckpointer, CheckpointManager
    >>> from holdfast.components import Checkpointable
    >>> class Policy(Checkpointable):
    ...     def __init__(self, size):
    ...         self.weights = np.zeros(size)
    >>> policy = Policy(2)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointManager(directory, AsyncCheckpointer(ComponentCheckpointHandler())) as manager:
    ...         for step in range(3):
    ...             policy.weights += 1
    ...             _ = manager.save(step, policy)
    ...         manager.restore(1, policy).weights
    array([2., 2.])
    """

    kind = COMPONENTS
    reuses = True
    verifies = True

    def __init__(
        self, *, layout: Layout | None = None, compression: int | None = None, use_msgpack: bool = False
    ) -> None:
        if compression is not None:
            layout = dataclasses.replace(layout or Layout(), compression=compression)
        self.layout = layout or Layout()
        self._use_msgpack = use_msgpack
        self._handlers: dict[Path, PyTreeCheckpointHandler] = {}

    def prepare(
        self,
        item: Any,
        *,
        snapshot: bool,
        state: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        reuse: WrittenSteps | None = None,
        **kwargs: Any,
    ) -> PreparedItem:
        """Capture the states of a component and all components below it.

        Args:
            item: The component.
            snapshot: Whether the component may change between this call and the write.
            state: The state to save instead of the component's own; components that are not in it are left out.
            layout: Sizes of chunks and data files; overrides the handler's layout.
            reuse: The data files of earlier steps; unchanged data is not written again.
            **kwargs: No other arguments are accepted.

        Returns:
            The tree, ready to be written to a folder.

        Raises:
            UnsupportedLeafError: A state cannot be saved; the message names the value.
        """
        refuse_arguments(self, kwargs, self.prepare)
        layout, handlers = layout or self.layout, self._handlers if snapshot else None
        return prepare(item, state=state, use_msgpack=self._use_msgpack, layout=layout, handlers=handlers, reuse=reuse)

    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        files: Files | None = None,
        strict: bool = True,
        misfits: Misfits | None = None,
        modes: bool = False,
        keep: Patterns | None = None,
        overrides: Mapping[str, Any] | None = None,
        trust: bool = False,
        allowed: Iterable[Any] | str = (),
        renamed: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Restore a running component, or construct a new one.

        Args:
            directory: The item's folder.
            item: The running component to restore. For a new component: its class, or None for the saved class.
            files: The folder's files, from the commit record.
            strict: Raise an error if a component or value exists only in the program or only in the checkpoint.
            misfits: For a running component: records the values that do not fit; these are left unchanged.
            modes: For a running component: whether to restore the training or evaluation mode of modules and the
                ``requires_grad`` flags of parameters.
            keep: For a running component: path patterns such as ``"**/lr"``; matching values are left unchanged.
            overrides: For a new component: constructor arguments by name, which replace the saved ones.
            trust: For a new component: import everything that the checkpoint names.
            allowed: For a new component: classes, functions and import path patterns that the checkpoint may name.
            renamed: For a new component: maps import paths in the checkpoint to the current classes.
            **kwargs: No other arguments are accepted.

        Returns:
            The component.

        Raises:
            DamagedCheckpointError: The stored data fails verification.
            TreeMismatchError: Program and checkpoint do not match.
            NotAllowedError: The checkpoint names a class or function that is not allowed.
        """
        refuse_arguments(self, kwargs, self.restore)
        saved = _opened(directory, files)
        if item is not None and not isinstance(item, type):
            if overrides or trust or allowed or renamed:
                raise OptionError(
                    "overrides=, trust=, allowed= and renamed= apply to a new component, but a running one was given"
                )
            strict = strict and misfits is None
            kept = kept_values(keep)
            TreeRestore(live_tree(item), saved, strict=strict, keep=kept, misfits=misfits, modes=modes).run()
            return item
        if keep is not None:
            raise OptionError("keep= applies to a running component, but none was given; name values in overrides=")
        permissions = Permissions(trust=trust, allowed=allowed, renamed=renamed, base=Checkpointable)
        return TreeConstruction(saved, item or object, permissions).run(overrides or {}, strict=strict)

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Return the state with a description in place of each leaf, without reading any data."""
        return full_state(_opened(directory, files), NativeComponent.structure)


def _opened(directory: Location, files: Files | None) -> NativeComponent:
    if files is None or RECORD not in files:
        return of_record(directory, read_record(directory))
    content = read_checked(directory / RECORD, files[RECORD], limit=DOCUMENT_LIMIT)
    return of_record(directory, CheckpointRecord.decode(content, source=str(directory / RECORD)))
