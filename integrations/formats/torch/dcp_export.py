"""Folders of torch.distributed.checkpoint, written by torch and read back to verify them.

The plan is made of tensors without memory, and the planner reads an array when torch asks for its data. Torch keeps the
arrays of a file until it has written all of it. So only a small tree becomes one file, and of a large one, each array
does: then, two arrays are in memory at most.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from ....engine.arrays import PartialTree, TreeSource, leaf_values, load_tree
from ....engine.errors import CheckpointExistsError, DamagedCheckpointError, OptionError, UnsupportedLeafError, itemized
from ....engine.pytree import Flattened, TreeDocument
from ....engine.sources import replacing
from ....engine.storage import Location, os_errors
from . import dcp
from .files import plain, templates

_ONE_FILE = 256 << 20  # bytes of the arrays of one file, at most


def export_dcp(source: TreeSource, destination: Location) -> None:
    """Write a tree with ``torch.distributed.checkpoint.save``, in this process alone; it appears when it is whole."""
    if destination.exists():
        raise CheckpointExistsError(f"{destination} exists already; choose another destination")
    if not destination.is_local:
        raise OptionError(f"{destination}: torch writes its checkpoints to local directories only; copy it from there")
    try:
        import torch
        import torch.distributed.checkpoint
    except ImportError as error:
        raise OptionError("exporting for torch.distributed.checkpoint needs torch: pip install torch") from error
    library: Any = torch.distributed.checkpoint
    options = {}
    if "no_dist" in inspect.signature(library.save).parameters:
        options["no_dist"] = True
    elif torch.distributed.is_initialized():
        raise OptionError("this version of torch would wait for all processes: export with the holdfast command")
    structure = source.tree.structure
    if structure is None or structure.keys is None:
        raise UnsupportedLeafError(f"{source.location}: torch.distributed.checkpoint stores dictionaries only")
    values = templates(source)
    leaves = {id(value): leaf for value, leaf in zip(values, source.leaves, strict=True) if value is not ...}
    plain_leaves = [leaf for value, leaf in zip(values, source.leaves, strict=True) if value is ...]
    others = iter(leaf_values(source, plain_leaves))
    tree = plain(torch, source.tree.build([next(others) if value is ... else value for value in values]))

    class Planner(library.DefaultSavePlanner):  # type: ignore[misc]  # the module does not list its names
        def lookup_object(self, index: Any) -> Any:
            template = super().lookup_object(index)
            leaf = leaves.get(id(template))
            if leaf is None:
                return template
            like = Flattened([leaf.name], [template], None)
            return load_tree(PartialTree(source, {leaf.name: leaf}, TreeDocument(None)), like=like)

    with replacing(destination) as partial, os_errors(str(destination), "write"):
        is_small = sum(leaf.nbytes for leaf in source.leaves) <= _ONE_FILE
        writer = library.FileSystemWriter(partial.path, single_file_per_rank=is_small, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that it saves without other processes
                library.save(tree, storage_writer=writer, planner=Planner(), **options)
        except library.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            # Closing torch's archive hides the error of the file.
            raise (cause.__context__ if isinstance(cause.__context__, OSError) else cause) from error
        written = dcp.recognise(partial, frozenset(entry.name for entry in partial.entries()))
        problems = ["it is not recognised"] if written is None else written.source.verify()
        if problems:
            raise DamagedCheckpointError(
                itemized(f"{destination} does not read as it was written:", list(map(str, problems)))
            )
        partial.sync_directory()
