"""Loads a model's weights from any checkpoint, after finding the container whose leaf names match the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ..arrays import PartialTree, SavedLeaf, TreeSource, load_tree, without_value
from ..errors import OptionError, TreeMismatchError, difference
from ..pytree import Flattened, compare, describe_template, flatten, format_path, joined_names, unflatten
from ..storage import Location, Place, as_location
from .native import read_checkpoint
from .protocol import TREE, CheckpointSource

_CONTAINERS = (
    ("", "params", "state_dict", "model", "params.params", "model_state_dict", "module")
    + ("state.params", "model.params", "state.model", "state.state_dict")
)  # fmt: skip
"""Containers in which checkpoints usually keep the weights, with keys joined by dots."""


@dataclass
class Misfits:
    """Human-readable differences between a program and a checkpoint, by path."""

    kept: dict[str, str] = field(default_factory=dict)  # how values differ from their saved counterparts, by path
    absent: list[str] = field(default_factory=list)  # values missing from the checkpoint
    moved: dict[str, str] = field(default_factory=dict)  # paths in the checkpoint, keyed by path in the program
    left: list[str] = field(default_factory=list)  # values found only in the checkpoint

    def missing(self, paths: Iterable[str]) -> None:
        """Record values that are missing from the checkpoint, skipping paths that `differs` has already recorded."""
        self.absent += [path for path in paths if path not in self.kept]

    def differs(self, path: str, expected: object, found: object, more: str = "") -> None:
        """Record a value whose counterpart in the checkpoint does not fit."""
        self.kept[path] = difference(path, expected, found) + more

    def surplus(self, paths: Iterable[str]) -> None:
        """Record values that are only in the checkpoint, skipping paths that `differs` has already recorded."""
        self.left += [path for path in paths if path not in self.kept]

    def check(self, what: str) -> None:
        """Raise TreeMismatchError if there are any differences."""
        absent = [f"{path}: in the program, not in the checkpoint" for path in self.absent]
        left = [f"{path}: in the checkpoint, not in the program" for path in self.left]
        if lines := [*self.kept.values(), *absent, *left]:
            raise TreeMismatchError(what, lines)

    def __str__(self) -> str:
        kept = [*self.kept.values(), *(f"{path}: not in the checkpoint" for path in self.absent)]
        moved = [f"{path}, from {origin}" for path, origin in self.moved.items()]
        parts = (("kept as initialized", kept), ("moved", moved), ("left in the checkpoint", self.left))
        return "".join(f"\n  {what}: {line}" for what, lines in parts for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a model, and the checkpoint from which they were loaded."""

    tree: Any  # the weights, in the template's containers
    location: Location  # location of the checkpoint
    format: str  # the library that wrote the checkpoint
    container: str  # container of the weights, such as ``params``; empty if they are the whole checkpoint
    leaves: int  # number of arrays
    bytes: int  # total size of the arrays in bytes

    def __str__(self) -> str:
        inside = f"{self.container} of " if self.container else ""
        arrays = "1 array" if self.leaves == 1 else f"{self.leaves} arrays"
        return f"{inside}{self.location} ({self.format}; {arrays}, {self.bytes} bytes)"


def load_weights(
    place: Place,
    template: Any,
    *,
    ignored: Collection[str] = (),
    containers: Sequence[str] = (),
    misfits: Misfits | None = None,
) -> Weights:
    """Load a model's weights from any checkpoint that holdfast can read.

    Names are compared with their keys joined by dots, so that a module's ``layers.0.weight`` matches the nested
    ``layers/0/weight``. The weights may be the whole checkpoint or a container in it, such as ``params`` or
    ``state_dict``. If ``misfits`` is given, weights that do not fit are added to it and keep the template's values.
    """

    def read(checkpoint: CheckpointSource) -> Weights:
        flat = flatten(template)
        names = dict(zip(joined_names(flat.names), flat.names, strict=True))
        trees = [checkpoint.tree(item) for item, kind in checkpoint.items.items() if kind == TREE]
        candidates = (candidate for tree in trees for candidate in _candidates(tree, names, ignored, containers))
        best = max(candidates, key=itemgetter(0), default=None)
        if best is None:
            raise OptionError(f"{checkpoint.location} holds no tree of arrays to take weights from")
        _, container, source = best
        leaves, templates = list(source.leaves), {*flat.names}
        try:
            if misfits is None:
                tree = load_tree(source, like=template)
            else:
                pairs = [(leaf.name, leaf.name) for leaf in leaves if leaf.name in templates]
                tree, leaves = load_fitting(source, flat, pairs, misfits)
        except TreeMismatchError as error:
            inside = f" in {container}" if container else ""
            what = f"{checkpoint.location}: the weights{inside} are not those of the model:"
            raise TreeMismatchError(what, error.differences) from error
        return Weights(
            tree=tree,
            location=checkpoint.location,
            format=checkpoint.format,
            container=container,
            leaves=len(leaves),
            bytes=sum(leaf.nbytes for leaf in leaves),
        )

    return read_checkpoint(as_location(place), read)


def load_fitting(
    source: TreeSource, flat: Flattened, pairs: Iterable[tuple[str, str]], misfits: Misfits
) -> tuple[Any, list[SavedLeaf]]:
    """Load the saved leaves that fit the leaves of a template; all other leaves keep the template's values.

    ``pairs`` lists the names of corresponding leaves in the checkpoint and the template. Differences are added to
    ``misfits``. Return the complete tree and the leaves that were read; raise TreeMismatchError if no leaf fits.
    """
    leaves = {leaf.name: leaf for leaf in source.leaves}
    templates = dict(zip(flat.names, describe_template(flat.names, flat.values), strict=True))
    taken: dict[str, SavedLeaf] = {}
    kept: dict[str, str] = {}
    for saved, wanted in pairs:
        line = compare(templates[wanted], leaves[saved].saved)
        if line is None:
            taken[wanted] = leaves[saved]
        else:
            kept[wanted] = line
    for name, template in templates.items():
        if name not in taken:
            kept.setdefault(name, f"{format_path(name)}: expected {template} (template), not in the checkpoint")
    if not taken:
        raise TreeMismatchError(f"{source.location}: nothing in the checkpoint fits:", list(kept.values()))
    names = [name for name in flat.names if name in taken]
    values = [value for name, value in zip(flat.names, flat.values, strict=True) if name in taken]
    like = Flattened(names, values, flatten(values).structure)
    loaded = dict(zip(names, load_tree(PartialTree(source, taken, source.tree), like=like), strict=True))
    used = {leaf.name for leaf in taken.values()}
    misfits.kept |= {format_path(name): line for name, line in kept.items()}
    misfits.left += [format_path(name) for name in leaves if name not in used]
    misfits.moved |= {format_path(name): format_path(leaf.name) for name, leaf in taken.items() if name != leaf.name}
    all_values = [loaded.get(name, value) for name, value in zip(flat.names, flat.values, strict=True)]
    return unflatten(flat.structure, all_values), list(taken.values())


def _candidates(
    source: TreeSource, names: Mapping[str, str], ignored: Collection[str], containers: Sequence[str]
) -> Iterator[tuple[tuple[int, int], str, TreeSource]]:
    """For each candidate container in a tree, yield its rank, its path and its leaves, named as in the template."""
    leaves = dict(zip(joined_names([leaf.name for leaf in source.leaves]), source.leaves, strict=True))
    bare = {without_value(name): name for name in names}
    for container in (*_CONTAINERS, *containers):
        prefix = f"{container}." if container else ""
        inside = {joined.removeprefix(prefix): leaf for joined, leaf in leaves.items() if joined.startswith(prefix)}
        inside = {name if name in names else bare.get(without_value(name), name): leaf for name, leaf in inside.items()}
        kept = {name: leaf for name, leaf in inside.items() if name in names or without_value(name) not in ignored}
        if kept:
            shared = len(kept.keys() & names.keys())
            renamed = {names.get(joined, leaf.name): leaf for joined, leaf in kept.items()}
            # Prefer containers with the most names from the template and, if tied, with the fewest other names.
            yield (shared, shared - len(kept)), container, PartialTree(source, renamed, source.tree)
