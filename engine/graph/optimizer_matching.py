"""What torch optimizers keep, matched: values and options belong to parameters, as far as both sides know those."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ..tree import unescape_key
from ..tree.frameworks import is_torch_tensor
from .bindings import Bindings
from .cells import Assignment
from .paths import Path
from .saved import SavedGraph
from .slots import OptimizerView
from .torch_objects import is_optimizer
from .walk import GROUPS, SLOTS

_TORCH = "torch.optim."
_SCHEDULED = "initial_lr"
"""An option that schedulers give to groups of any optimizer."""


class OptimizerMatching:
    """The values and options of a checkpoint's optimizers, and where they belong.

    Args:
        graph: The graph of the checkpoint.
        bindings: Which objects stand for its nodes.
        unused: Takes the values for which there is an object that cannot take them, with its path.
    """

    def __init__(self, graph: SavedGraph, bindings: Bindings, unused: dict[int, Path]) -> None:
        self._graph = graph
        self._bindings = bindings
        self._unused = unused
        self._slots: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._group_of: dict[tuple[int, int], int] = {}
        self._parameters_of: dict[int, dict[int, None]] = {}
        self._optimizers_of: dict[int, dict[int, None]] = {}
        for number, node in enumerate(graph.nodes):
            for parameter, segment, value in node.slots:
                self._slots.setdefault((number, parameter), []).append((segment, value))
                self._pair(number, parameter)
            for group, parameters in enumerate(node.groups):
                for parameter in parameters:
                    self._group_of[number, parameter] = group
                    self._pair(number, parameter)
        self._known: dict[int, _Known] = {}

    def _pair(self, number: int, parameter: int) -> None:
        self._parameters_of.setdefault(number, {})[parameter] = None
        self._optimizers_of.setdefault(parameter, {})[number] = None

    def everything(self) -> Iterator[Assignment]:
        """Generates all that is known to belong somewhere."""
        self._known.clear()
        for number in self._parameters_of:
            yield from self._parts(number, self._parameters_of[number])

    def of(self, fresh: Iterable[int]) -> Iterator[Assignment]:
        """Generates what belongs somewhere by what has turned up.

        Args:
            fresh: The nodes that objects have turned up for.
        """
        turned_up = dict.fromkeys(fresh)
        for number in turned_up:
            if number in self._parameters_of:
                yield from self._parts(number, self._parameters_of[number])
        for parameter in turned_up:
            for number in self._optimizers_of.get(parameter, ()):
                if number not in turned_up:
                    yield from self._parts(number, [parameter])

    def _parts(self, number: int, parameters: Iterable[int]) -> Iterator[Assignment]:
        """Generates what an optimizer has kept for parameters, and the options of the groups that they are in."""
        for optimizer, path in self._bindings.objects(number):
            if not is_optimizer(optimizer):
                continue
            known = self._known.get(id(optimizer))
            if known is None or known.outdated(optimizer):
                known = self._known[id(optimizer)] = _Known(optimizer, self._graph, number)
            view = OptimizerView(optimizer)
            touched: dict[int, Any] = {}
            for parameter in parameters:
                live, live_path = self._live(parameter)
                if live is None:
                    continue
                place = known.places.get(id(live))
                for segment, value in self._slots.get((number, parameter), ()):
                    where = (*path, SLOTS, *live_path, segment)
                    name = unescape_key(segment)
                    if place is None or not (known.related or name in view.slots(live)):
                        self._unused[value] = where
                        continue
                    likeness = (live, name, optimizer.param_groups[place])
                    yield Assignment(value, view.slot_cell(live, name), where, likeness)
                if place is not None and (number, parameter) in self._group_of:
                    known.origins.setdefault(place, set()).add(self._group_of[number, parameter])
                    touched[place] = live
            for place, live in touched.items():
                yield from self._options(known, view, place, (*path, GROUPS, str(place)), live)

    def _options(self, known: _Known, view: OptimizerView, place: int, path: Path, live: Any) -> Iterator[Assignment]:
        """Generates the options of a group: it is known by its parameters, not by its number."""
        if len(known.origins[place]) != 1:
            return  # it was made of several: its options stay as they are
        (group,) = known.origins[place]
        options = view.optimizer.param_groups[place]
        for segment, value in known.saved_options(group).items():
            name = unescape_key(segment)
            if known.related or name in options or name == _SCHEDULED:
                yield Assignment(value, view.option_cell(place, name), (*path, segment), (live, name, options))
            else:
                self._unused[value] = (*path, segment)

    def _live(self, number: int) -> tuple[Any, Path]:
        return next(((one, path) for one, path in self._bindings.objects(number) if is_torch_tensor(one)), (None, ()))


class _Known:
    """What is known of an optimizer of the program that stands for one of the checkpoint.

    Attributes:
        places: The numbers of the groups that parameters are in, by the parameters' ids.
        related: Whether it is one of the same kind as was saved.
        origins: The groups of the checkpoint that its own are made of, as far as their parameters are known.
    """

    def __init__(self, optimizer: Any, graph: SavedGraph, number: int) -> None:
        groups = OptimizerView(optimizer).groups()
        self.places = {id(parameter): place for place, group in enumerate(groups) for parameter in group}
        self.origins: dict[int, set[int]] = {}
        self._reference = weakref.ref(optimizer)
        self._sizes = [len(group) for group in groups]
        holder = graph.nodes[number].edges.get(GROUPS)
        options = {} if holder is None else graph.nodes[holder].edges
        self._options = {int(group): graph.nodes[node].edges for group, node in options.items() if group.isdecimal()}
        self.related = self._is_related(optimizer, graph.nodes[number].type)

    def outdated(self, optimizer: Any) -> bool:
        """Whether this is of another optimizer, or of what it was before parameters were added to it."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return self._reference() is not optimizer or self._sizes != sizes

    def saved_options(self, group: int) -> dict[str, int]:
        """Returns the values of the options that a group of the checkpoint has."""
        return self._options.get(group, {})

    def _is_related(self, optimizer: Any, saved: str) -> bool:
        """Whether what was saved is of the same class, of one above or below it, or has the same options at least."""
        kind = type(optimizer)
        if not (saved.startswith(_TORCH) and kind.__module__.startswith(_TORCH)):
            return True  # classes of the program's own, which may have been moved or renamed
        kinds = [*kind.__mro__, *_derived(kind)]
        if saved in {f"{one.__module__}.{one.__qualname__}" for one in kinds}:
            return True
        return bool(self._options) and self._options.get(0, {}).keys() == OptimizerView(optimizer).options(0).keys()


def _derived(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    for one in found:
        found += one.__subclasses__()
    return found
