"""Which components of a tree a resume could not restore into the tree that the program has at its start."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ...engine.stateful import adapted
from ..graph import FreshObjects, Path
from .component import Checkpointable
from .constructor_spec import encode_spec, is_plain_spec
from .live import LiveComponent, live_tree
from .names import format_component_path
from .states import overrides, own_graph


class FreshComponents:
    """An outline of those components that have no ``get_state`` of their own; calls nothing of theirs."""

    def __init__(self, root: Any) -> None:
        """Raise UnsupportedLeafError if a component holds what no save can take."""
        own = [one for one in live_tree(root).walk() if not overrides(one.value, "get_state")]
        self._known = {one.path: FreshObjects(own_graph(one)) for one in own}

    def refused(self, root: Any) -> Iterator[str]:
        """Generate a line for each part of the later tree that a restore into this one would refuse."""
        live, later = live_tree(root), FreshComponents(root)._known
        known = {id(one.value) for one in live.walk()}
        made: set[Path] = set()
        for one in live.walk():
            where, now, fresh = format_component_path(one.path), later.get(one.path), self._known.get(one.path)
            if one.path in made or now is None:
                continue
            if fresh is None:
                yield f"{where}: not in the fresh state"
                continue
            names = [one.relative(child) for child in one.children if self._is_made(child, one, known)]
            made |= {inner.path for child in one.children if one.relative(child) in names for inner in child.walk()}
            yield from (f"{where}: {line}" for line in fresh.refused(now, ignore=names))

    def _is_made(self, child: LiveComponent, above: LiveComponent, known: Collection[int]) -> bool:
        """Whether a restore constructs a component, because the fresh tree has None in its place."""
        name, fresh = "/".join(above.relative(child)), self._known[above.path]
        if child.path in self._known or not fresh.is_none(name) or not isinstance(child.value, Checkpointable):
            return False
        given = child.value.get_ctor_args_and_kwargs()
        if given is None:
            return False
        spec, problems = encode_spec(*given, lambda other: "" if id(adapted(other)) in known else None, lambda _: None)
        return not problems and is_plain_spec(spec)
