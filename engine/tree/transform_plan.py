"""Decides, before any value is touched, where each leaf of a transformed tree comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import TreeMismatchError
from .names import display
from .structure import Node, key_segments
from .transform import Match, Rules, arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .flatten import Flattened


@dataclass(frozen=True, slots=True)
class Kept:
    """The value of the new tree stays."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A value of the original tree.

    Attributes:
        path: Its path there.
        start: Its first leaf, as a number in the original tree's order.
        stop: The number after its last leaf.
        container: The container that it is; None for a leaf.
        function: What makes the new value of it; None hands it on.
    """

    path: str
    start: int
    stop: int
    container: Node | None
    function: Callable[[Any], Any] | None


@dataclass(eq=False, slots=True)
class Call:
    """A function of the whole original tree, called once.

    Attributes:
        path: The key in the new tree that it makes: a leaf's or a container's.
        function: The function.
        names: Of the leaves below that key, relative to it; a leaf itself has the empty name.
    """

    path: str
    function: Callable[..., Any]
    names: list[str] = field(default_factory=list)

    def run(self, original: Any) -> Any:
        """Calls the function.

        Args:
            original: The original tree.
        """
        arguments = (self.path, original) if arguments_of(self.function) == 2 else (original,)
        return explained(lambda: self.function(*arguments), "multi_value_fn", self.path)


@dataclass(frozen=True, slots=True)
class Computed:
    """A part of what a function of the whole original tree returns.

    Attributes:
        call: The function.
        name: The part: a leaf's name relative to the key that the function makes.
    """

    call: Call
    name: str


Origin = Kept | Taken | Computed
"""Where a leaf of the new tree comes from."""


@dataclass(slots=True)
class OriginalTree:
    """What a plan has to know of the original tree: nothing of it has to be read.

    Attributes:
        names: Of its leaves.
        structure: Its containers; None for a bare leaf.
        empty: For each leaf, whether it is None, which counts as no value.
        where: Where it lies, for errors; empty for a tree in memory.
    """

    names: Sequence[str]
    structure: Node | None
    empty: Sequence[bool]
    where: str = ""


def plan(original: OriginalTree, transformations: Any, new: Flattened, default_to_original: bool) -> list[Origin]:
    """Decides where each leaf of the new tree comes from.

    Args:
        original: The original tree.
        transformations: As in `apply_transformations`.
        new: The new tree.
        default_to_original: As in `apply_transformations`.

    Returns:
        The origin of each leaf, in the order of ``new``.

    Raises:
        OptionError: A transformation makes no sense.
        TreeMismatchError: Leaves have no value; names all of them.
    """
    planner = _Planner(original, Rules(transformations), default_to_original)
    origins = [planner.origin(name, value) for name, value in zip(new.names, new.values, strict=True)]
    planner.rules.check([*map(path_of, new.names), *(path for path, *_ in _containers(new.structure, "", [0]))])
    if planner.problems:
        raise unfilled(original.where, len(new.names), planner.problems)
    return origins


def unfilled(where: str, count: int, problems: Sequence[str]) -> TreeMismatchError:
    """Makes the error about keys that have no value, or a wrong one.

    Args:
        where: Where the original tree lies; empty for one in memory.
        count: How many keys the new tree has.
        problems: A line for each key.
    """
    prefix = f"{where}: " if where else ""
    return TreeMismatchError(f"{prefix}{len(problems)} of {count} keys of the new tree cannot be filled:", problems)


def path_of(name: str) -> str:
    """Gives the path that a transformation has to match: ``params/w`` for ``params.w``; a bare leaf's is empty."""
    return display(name) if name else ""


def explained(function: Callable[[], Any], what: str, path: str) -> Any:
    """Calls a function of the user's own; what it raises says which key it was for."""
    try:
        return function()
    except Exception as error:
        error.add_note(f"raised by {what} of the transformation for {path or '(root)'}")
        raise


class _Planner:
    def __init__(self, original: OriginalTree, rules: Rules, default_to_original: bool) -> None:
        self.rules = rules
        self.problems: list[str] = []
        self._empty = original.empty
        self._default_to_original = default_to_original
        self._calls: dict[str, Call] = {}
        self._places: dict[str, tuple[int, int, Node | None]] = {
            path: (start, stop, node) for path, start, stop, node in _containers(original.structure, "", [0])
        }
        self._places.update((path_of(name), (index, index + 1, None)) for index, name in enumerate(original.names))

    def origin(self, name: str, value: Any) -> Origin:
        """Decides about one leaf of the new tree; what stands in the way is noted."""
        path = path_of(name)
        match = self.rules.find(path)
        if value is None:
            if match is not None and match.rule.key == path and not match.rule.transform.use_fallback:
                self._problem(path, "expected a place for a value, found None, which stays; write ... instead", match)
            return Kept()
        if match is None:
            if self._default_to_original and self._is_there(path, value):
                return self._taken(path, path, value, None)
            missing = "the original tree has no such key"
            return self._kept(path, value, missing if self._default_to_original else "default_to_original is False")
        transform = match.rule.transform
        if transform.multi_value_fn is not None:
            return self._computed(match, name, transform.multi_value_fn)
        if transform.use_fallback and self._default_to_original:
            return self._kept(path, value, "use_fallback takes it from there", match)
        return self._taken(path, match.source, value, match)

    def _is_there(self, path: str, value: Any) -> bool:
        if path not in self._places:
            return False
        start, stop, container = self._places[path]
        return value is ... or (not self._empty[start] if container is None else stop > start)

    def _kept(self, path: str, value: Any, why: str, match: Match | None = None) -> Origin:
        if value is ...:
            self._problem(path, f"expected a value, found only a placeholder in the new tree, and {why}", match)
        return Kept()

    def _taken(self, path: str, source: str, value: Any, match: Match | None) -> Origin:
        place = self._places.get(source)
        function = None if match is None else match.rule.transform.value_fn
        if place is None:
            why = "not in the original tree" if source == path else f"{source!r} is not in the original tree"
            if function is not None and source == path:
                why += "; value_fn is given the value at this key: add original_key=, or use multi_value_fn"
            self._problem(path, f"expected a value, {why}", match)
            return Kept()
        start, stop, container = place
        if value is not ... and container is not None and function is None:
            self._problem(
                path,
                f"expected one value, found a container of {stop - start} leaves at {source or '(root)'!r} in the "
                "original tree; write ... in the new tree to take it as it is",
                match,
            )
        elif value is not ... and container is None and self._empty[start]:
            self._problem(path, f"expected a value, found None at {source!r} in the original tree", match)
        return Taken(source, start, stop, container, function)

    def _computed(self, match: Match, name: str, function: Callable[..., Any]) -> Origin:
        call = self._calls.get(match.path)
        if call is None:
            call = self._calls[match.path] = Call(match.path, function)
        above = match.path.count("/") + 1 if match.path else 0
        part = name.split(".", above)[-1] if match.rest else ""
        call.names.append(part)
        return Computed(call, part)

    def _problem(self, path: str, what: str, match: Match | None = None) -> None:
        because = "" if match is None else f" (transformation {match.rule.key!r})"
        self.problems.append(f"{path or '(root)'}: {what}{because}")


def _containers(node: Node | None, name: str, counter: list[int]) -> Iterator[tuple[str, int, int, Node]]:
    """Generates path, first leaf, end of leaves and node of each container, inner ones first."""
    if node is None:
        return
    start = counter[0]
    segments = [str(index) for index in range(len(node.children))] if node.keys is None else key_segments(node.keys)
    prefix = f"{name}." if name else ""
    for segment, child in zip(segments, node.children, strict=True):
        if child is None:
            counter[0] += 1
        else:
            yield from _containers(child, prefix + segment, counter)
    yield path_of(name), start, counter[0], node
