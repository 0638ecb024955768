"""Weights for a model from whatever checkpoint holds them, found by their names wherever in it they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..checkpointer import Place
from ..errors import OptionError, TreeMismatchError
from ..item import Problem, SavedLeaf, load_tree
from ..storage import Location, as_location
from ..tree import Skeleton, flatten, split
from .places import open_checkpoint
from .source import TREE, TreeSource, as_reader

_CONTAINERS = (
    ("", "params", "state_dict", "model", "params.params", "model_state_dict", "module")
    + ("state.params", "model.params", "state.model", "state.state_dict")
)  # fmt: skip
"""Where programs keep the weights in their checkpoints, written as names joined by dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights that were found.

    Attributes:
        tree: The weights, in the containers of the template.
        location: The checkpoint.
        format: What wrote it.
        container: Where in it they lie, such as ``params``; empty if they are all of it.
        leaves: How many arrays they are.
        bytes: Bytes of their elements.
    """

    tree: Any
    location: Location
    format: str
    container: str
    leaves: int
    bytes: int

    def __str__(self) -> str:
        inside = f"{self.container} of " if self.container else ""
        arrays = "1 array" if self.leaves == 1 else f"{self.leaves} arrays"
        return f"{inside}{self.location} ({self.format}; {arrays}, {self.bytes} bytes)"


def load_weights(
    place: Place, template: Any, *, ignored: Collection[str] = (), containers: Sequence[str] = ()
) -> Weights:
    """Loads the weights of a model from any checkpoint that holdfast reads.

    Names are compared with their keys joined by dots, so that a module's ``layers.0.weight`` and the nested
    ``layers/0/weight`` are the same. The weights may be all of the checkpoint, or lie in a container such as ``params``
    or ``state_dict``.

    Args:
        place: A checkpoint, or a directory of steps, of which the newest is taken.
        template: The weights that the model has: containers, shapes, dtypes and devices of what is returned.
        ignored: Names, joined by dots, that the checkpoint may have beside the template's.
        containers: Where the weights may lie, beside the usual places, with keys joined by dots.

    Returns:
        The weights.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        TreeMismatchError: Names, shapes or dtypes differ; lists every difference.
        OptionError: The checkpoint holds no tree of arrays.
    """
    checkpoint = open_checkpoint(as_location(place))
    names = {_joined(name): name for name in flatten(template).names}
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
        tree = load_tree(as_reader(found), like=template)
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
) -> Iterator[_Part]:
    leaves = {_joined(leaf.name): leaf for leaf in source.leaves}
    for container in (*_CONTAINERS, *containers):
        prefix = f"{container}." if container else ""
        inside = {joined.removeprefix(prefix): leaf for joined, leaf in leaves.items() if joined.startswith(prefix)}
        kept = {joined: leaf for joined, leaf in inside.items() if joined in names or joined not in ignored}
        if kept:
            yield _Part(source, container, kept, names)


class _Part:
    """The leaves of a tree that lie in one of its containers, under the names of a template; a `TreeSource`."""

    def __init__(
        self, source: TreeSource, container: str, leaves: Mapping[str, SavedLeaf], names: Mapping[str, str]
    ) -> None:
        self._source = source
        self.container = container
        self.location = source.location
        shared = leaves.keys() & names.keys()
        # The more names are shared the better, then the fewer are left over.
        self.fitness = (len(shared), len(shared) - len(leaves))
        self._originals = {names.get(joined, leaf.name): leaf for joined, leaf in leaves.items()}
        self.leaves = [SavedLeaf(name, leaf.saved) for name, leaf in self._originals.items()]
        self.skeleton: Skeleton = source.skeleton
        read_boxes = getattr(source, "read_boxes", None)
        if read_boxes is not None:  # what reads only the parts of arrays that this process needs
            self.read_boxes = lambda leaves, boxes: read_boxes(self._own(leaves), boxes)

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._source.read(self._own(leaves))

    def verify(self) -> list[Problem]:
        return self._source.verify()

    def _own(self, leaves: Sequence[SavedLeaf]) -> list[SavedLeaf]:
        return [self._originals[leaf.name] for leaf in leaves]


def _joined(name: str) -> str:
    return ".".join(split(name))
