"""Checkpoints of other libraries made into our own, and our own made into files of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..checkpointer import Place
from ..clock import SystemClock
from ..coordination import Coordinator
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    OptionError,
    UnsupportedLeafError,
)
from ..handlers import JsonCheckpointHandler
from ..record import CheckpointRecord
from ..saving import ItemToSave, Save
from ..storage import Location, as_location
from ..tree import EXTERNAL, PLACEHOLDER, display
from .native import NativeCheckpoint
from .once import done_once
from .places import find_checkpoint, is_foreign, open_at, open_checkpoint, step_locations
from .rewriting import TreeSourceHandler
from .source import JSON, METRICS, TREE, CheckpointSource, TreeSource
from .templates import OPTIONAL, without_placeholders

ExportFormat = Literal["safetensors", "orbax", "torch"]

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One checkpoint that was converted.

    Attributes:
        source: Where it came from.
        path: Where it is now.
        format: What wrote the source, or what can read the result.
        step: Its step, if it has one.
        leaves: Leaves of all its trees, without what may be a container that is empty.
        bytes: Bytes of its arrays' elements.
        left_out: What the source holds and the result does not, one line each, with the reason.
    """

    source: str
    path: str
    format: str
    step: int | None
    leaves: int
    bytes: int
    left_out: tuple[str, ...]


def import_checkpoint(
    source: Place, destination: Place, *, overwrite: bool = False, coordinator: Coordinator | None = None
) -> list[Conversion]:
    """Makes checkpoints of another library into checkpoints of holdfast: atomic, checksummed, verified when it returns.

    A directory of steps becomes one, with the metrics and times of its steps; anything else a single checkpoint. Of
    the arrays, only some are in memory at a time.

    In a program of several processes that all call this, process 0 does it and the others wait.

    Args:
        source: What another library wrote: Orbax, safetensors, torch, Lightning, torch.distributed.checkpoint, Flax,
            TensorFlow.
        destination: Where to; nothing may be there yet.
        overwrite: Replace a checkpoint that is there, or the steps that are.
        coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of them is
            initialized; ``hf.Alone()`` does it in this process alone.

    Returns:
        What was done, one entry for each checkpoint, in the order of the steps.

    Raises:
        CheckpointNotFoundError: There is nothing at the source that is known.
        CheckpointExistsError: There is something at the destination.
        DamagedCheckpointError: The source is damaged, or what was written does not verify. What was finished before is
            whole.
        UnsupportedLeafError: The source holds objects that cannot be read without running code.
        OptionError: The source is one of holdfast's own.
        PeerFailedError: It failed on process 0; raised on the others.
    """
    origin, target = as_location(source), as_location(destination)
    about = [origin.url, target.url, overwrite]
    return _once("import_checkpoint", about, lambda: _imports(origin, target, overwrite), coordinator)


def _imports(origin: Location, target: Location, overwrite: bool) -> list[Conversion]:
    if not overwrite and (target.exists() and (not target.is_directory() or target.entries())):
        raise CheckpointExistsError(f"{target} exists already; choose another path, or pass overwrite=True")
    steps = {} if is_foreign(origin) or not origin.is_directory() else step_locations(origin)
    if not steps:
        return [_import(open_checkpoint(origin), target, None, overwrite)]
    return [_import(open_at(place), target / str(step), step, overwrite) for step, place in steps.items()]


def export_checkpoint(
    source: Place,
    destination: Place,
    to: ExportFormat,
    *,
    step: int | None = None,
    item: str | None = None,
    overwrite: bool = False,
    coordinator: Coordinator | None = None,
) -> list[Conversion]:
    """Writes a checkpoint in the format of another library.

    In a program of several processes that all call this, process 0 does it and the others wait.

    Args:
        source: A checkpoint, of holdfast or of another library, or a directory of steps.
        destination: Where to: a file for safetensors and torch, a directory for Orbax; nothing may be there yet.
        to: ``"safetensors"``: one file; leaves are called by the keys of their paths, joined by dots.
            ``"torch"``: one file for ``torch.load(path, weights_only=True)``; needs torch. ``"orbax"``: a directory
            that orbax-checkpoint restores, with all steps unless one is given.
        step: Which step of a directory of steps; None is the newest, and for Orbax all of them.
        item: Which item, if the checkpoint has several trees; for Orbax None is all of them.
        overwrite: Replace a file that is there.
        coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of them is
            initialized; ``hf.Alone()`` does it in this process alone.

    Returns:
        What was written, one entry for each checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, step or item.
        CheckpointExistsError: There is something at the destination.
        UnsupportedLeafError: Leaves do not fit into the format; all of them are named, and nothing was written.
        OptionError: It has several trees, and no item is named; or the format is not known.
        DamagedCheckpointError: What is read does not verify.
        PeerFailedError: It failed on process 0; raised on the others.
    """
    if to not in get_args(ExportFormat):
        raise OptionError(f"to={to!r} is not one of {', '.join(map(repr, get_args(ExportFormat)))}")
    if to == "orbax" and overwrite:
        raise OptionError("overwrite does not apply to Orbax: remove what is there, or choose another path")
    origin, target = as_location(source), as_location(destination)

    def work() -> list[Conversion]:
        if to == "orbax":
            return _export_orbax(origin, target, step, item)
        return _export_file(origin, target, to, step, item, overwrite)

    return _once("export_checkpoint", [origin.url, target.url, to, step, item, overwrite], work, coordinator)


def _once(
    what: str, about: list[Any], work: Callable[[], list[Conversion]], coordinator: Coordinator | None
) -> list[Conversion]:
    found = done_once(what, about, lambda: [asdict(done) for done in work()], coordinator)
    return [Conversion(**{**fields, "left_out": tuple(fields["left_out"])}) for fields in found]


def _export_file(
    origin: Location, target: Location, to: ExportFormat, step: int | None, item: str | None, overwrite: bool
) -> list[Conversion]:
    checkpoint = open_at(find_checkpoint(origin, step))
    tree, left_out = without_placeholders(_only_tree(checkpoint, item))
    external = [display(leaf.name) for leaf in tree.leaves if leaf.saved.kind == EXTERNAL]
    if external:
        raise UnsupportedLeafError(
            f"{tree.location}: {', '.join(external[:8])} cannot be exported: only their handlers know these leaves; "
            "leave them out of the tree. Nothing was written"
        )
    if to == "torch":
        from .torch_export import export_torch as write
    else:
        from .safetensors_export import export_safetensors as write
    write(tree, target, overwrite=overwrite)
    _warn(checkpoint, left_out)
    return [_conversion(checkpoint, target, to, step if step is not None else checkpoint.step, [tree], left_out)]


def _import(checkpoint: CheckpointSource, target: Location, step: int | None, overwrite: bool) -> Conversion:
    if isinstance(checkpoint, NativeCheckpoint):
        raise OptionError(f"{checkpoint.location} is a checkpoint of holdfast already: copy it, it may lie anywhere")
    items: dict[str, ItemToSave] = {}
    trees: list[TreeSource] = []
    left_out: list[str] = []
    for name, kind in checkpoint.items.items():
        if kind == TREE:
            tree = checkpoint.tree(name)
            left_out += getattr(tree, "left_out", ())
            tree, lines = without_placeholders(tree)
            left_out += lines
            trees.append(tree)
            items[name] = ItemToSave(TreeSourceHandler(), trees[-1])
        elif kind == JSON:
            items[name] = ItemToSave(JsonCheckpointHandler(), checkpoint.value(name))
        elif kind != METRICS:
            left_out.append(f"{name} (an item of the kind {kind}, which holdfast does not read)")
    if not items:
        raise OptionError(f"{checkpoint.location}: none of its items can be read: {', '.join(left_out)}")
    metrics, written = checkpoint.metrics, checkpoint.time
    save = Save(
        target,
        items,
        overwrite=overwrite,
        record=lambda saved: CheckpointRecord(
            items=saved,
            time=SystemClock().now() if written is None else written,
            step=step,
            reason=f"imported from {checkpoint.format}",
            metrics=metrics,
        ),
    )
    save.complete()
    _verify(target)
    _warn(checkpoint, left_out)
    return _conversion(checkpoint, target, checkpoint.format, step, trees, left_out)


def _warn(checkpoint: CheckpointSource, left_out: Sequence[str]) -> None:
    for line in left_out:
        logger.warning("%s: left out: %s", checkpoint.location, line)


def _verify(target: Location) -> None:
    """Reads what was just written."""
    checkpoint = NativeCheckpoint(target)
    problems = [
        f"{name}: {problem.leaf or problem.file}: {problem.what}"
        for name, kind in checkpoint.items.items()
        if kind == TREE
        for problem in checkpoint.tree(name).verify()
    ]
    if problems:
        raise DamagedCheckpointError("\n  ".join([f"{target} does not read as it was written:", *problems[:20]]))


def _export_orbax(origin: Location, target: Location, step: int | None, item: str | None) -> list[Conversion]:
    from .orbax_export import export_orbax

    found = []
    for path in export_orbax(origin, target, step=step, item=item):
        number = None if path == target else int(path.name)
        checkpoint = open_at(find_checkpoint(origin, number))
        names = [name for name, kind in checkpoint.items.items() if kind == TREE and item in (None, name)]
        found.append(_conversion(checkpoint, path, "orbax", number, [checkpoint.tree(name) for name in names], ()))
    return found


def _only_tree(checkpoint: CheckpointSource, item: str | None) -> TreeSource:
    trees = [name for name, kind in checkpoint.items.items() if kind == TREE]
    if item is None and len(trees) != 1:
        raise OptionError(
            f"{checkpoint.location} has the trees {', '.join(sorted(trees))}: name one with item="
            if trees
            else f"{checkpoint.location} has no tree of arrays"
        )
    wanted = trees[0] if item is None else item
    if wanted not in trees:
        raise CheckpointNotFoundError(
            f"{checkpoint.location}: no tree {wanted!r}; it has {', '.join(sorted(trees)) or 'none'}"
        )
    return checkpoint.tree(wanted)


def _conversion(
    checkpoint: CheckpointSource,
    target: Location,
    format_: str,
    step: int | None,
    trees: list[TreeSource],
    left_out: Sequence[str],
) -> Conversion:
    # What stands for an empty container, or has no data, is no leaf: the result may lack it, and none is counted.
    found = (leaf for tree in trees for leaf in tree.leaves)
    leaves = [leaf for leaf in found if leaf.saved.kind != PLACEHOLDER and OPTIONAL not in leaf.saved.details]
    return Conversion(
        source=str(checkpoint.location),
        path=str(target),
        format=format_,
        step=step,
        leaves=len(leaves),
        bytes=sum(leaf.nbytes for leaf in leaves),
        left_out=tuple(left_out),
    )
