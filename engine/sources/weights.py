"""Weights for a model from any checkpoint, found by their names in whichever container of it they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays import PartialTree, SavedLeaf, TreeSource, load_tree
from ..checkpoint import Place
from ..errors import OptionError, TreeMismatchError
from ..pytree import flatten, split, unwrapped_name
from ..storage import Location, as_location
from .discovery import read_checkpoint
from .protocol import TREE, CheckpointSource

_CONTAINERS = (
    ("", "params", "state_dict", "model", "params.params", "model_state_dict", "module")
    + ("state.params", "model.params", "state.model", "state.state_dict")
)  # fmt: skip
"""Containers in which programs keep the weights in their checkpoints, with keys joined by dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights that were found."""

    tree: Any  # the weights, in the containers of the template
    location: Location  # the checkpoint
    format: str  # what wrote it
    container: str  # the container in it that holds them, such as ``params``; empty if they are all of it
    leaves: int  # the number of arrays
    bytes: int  # bytes of their elements

    def __str__(self) -> str:
        inside = f"{self.container} of " if self.container else ""
        arrays = "1 array" if self.leaves == 1 else f"{self.leaves} arrays"
        return f"{inside}{self.location} ({self.format}; {arrays}, {self.bytes} bytes)"


def load_weights(
    place: Place, template: Any, *, ignored: Collection[str] = (), containers: Sequence[str] = ()
) -> Weights:
    """Load the weights of a model from any checkpoint that holdfast reads.

    Names are compared with their keys joined by dots, so that a module's ``layers.0.weight`` and the nested
    ``layers/0/weight`` are the same. The weights may be all of the checkpoint, or lie in a container such as ``params``
    or ``state_dict``.
    """
    return read_checkpoint(
        as_location(place), lambda checkpoint: _load_weights(checkpoint, template, ignored, containers)
    )


def _load_weights(
    checkpoint: CheckpointSource, template: Any, ignored: Collection[str], containers: Sequence[str]
) -> Weights:
    template_names = flatten(template).names
    names = dict(zip(_joined(template_names), template_names, strict=True))
    found = max(
        (
            candidate
            for item, kind in checkpoint.items.items()
            if kind == TREE
            for candidate in _candidates(checkpoint.tree(item), names, ignored, containers)
        ),
        key=lambda one: one.fitness,
        default=None,
    )
    if found is None:
        raise OptionError(f"{checkpoint.location} holds no tree of arrays to take weights from")
    try:
        tree = load_tree(found, like=template)
    except TreeMismatchError as error:
        inside = f" in {found.container}" if found.container else ""
        raise TreeMismatchError(
            f"{checkpoint.location}: the weights{inside} are not those of the model:", error.differences
        ) from error
    return Weights(
        tree=tree,
        location=checkpoint.location,
        format=checkpoint.format,
        container=found.container,
        leaves=len(found.leaves),
        bytes=sum(leaf.nbytes for leaf in found.leaves),
    )


def _candidates(
    source: TreeSource, names: Mapping[str, str], ignored: Collection[str], containers: Sequence[str]
) -> Iterator[_Candidate]:
    leaves = dict(zip(_joined([leaf.name for leaf in source.leaves]), source.leaves, strict=True))
    for container in (*_CONTAINERS, *containers):
        prefix = f"{container}." if container else ""
        inside = {joined.removeprefix(prefix): leaf for joined, leaf in leaves.items() if joined.startswith(prefix)}
        kept = {joined: leaf for joined, leaf in inside.items() if joined in names or joined not in ignored}
        if kept:
            yield _Candidate(source, container, kept, names)


class _Candidate(PartialTree):
    """The leaves in one container of a tree, under the names of a template."""

    def __init__(
        self, source: TreeSource, container: str, leaves: Mapping[str, SavedLeaf], names: Mapping[str, str]
    ) -> None:
        super().__init__(source, {names.get(joined, leaf.name): leaf for joined, leaf in leaves.items()}, source.tree)
        self.container = container
        shared = leaves.keys() & names.keys()
        # The more names are shared the better, then the fewer are left over.
        self.fitness = (len(shared), len(shared) - len(leaves))


def _joined(names: Sequence[str]) -> list[str]:
    """Return names with all keys joined by dots, and without those of wrappers if all stay different."""
    joined = [".".join(split(name)) for name in names]
    bare = list(map(unwrapped_name, joined))
    return bare if len(set(bare)) == len(set(joined)) else joined
