"""Tree transformations, which rename, merge, split and compute leaves.

A plan determines the source of each leaf of the new tree before any value is read. `apply_transformations` executes the
plan for trees in memory, and `holdfast.load_transformed` for saved trees.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError, TreeMismatchError, shortened
from .containers import class_name, expand
from .flattening import MAX_DEPTH, Flattened, TreeDef, flatten, unflatten
from .leaves import is_jax_abstract, library_of
from .names import format_path

_PLAIN = re.compile(r"[\w/%-]*")  # keys without regular expression syntax


@dataclass(frozen=True, slots=True)
class Transform:
    r"""Defines where the value of a key in the new tree comes from.

    ``Transform()`` without arguments takes the value from the same key of the original tree.

    Attributes:
        original_key: The key in the original tree, with levels separated by ``/``. If the transformation's key is a
            regular expression, ``\1`` and ``\g<name>`` refer to its groups. None means the same key.
        use_fallback: Take the value from the tree that `apply_transformations` does not prefer: the new tree if
            ``default_to_original`` is True, the original tree otherwise.
        value_fn: Computes the new value from the value at the key in the original tree.
        multi_value_fn: Computes the new value from the whole original tree. If the function takes two arguments, the
            first is the key in the new tree.

    Raises:
        OptionError: Two arguments contradict each other, or one has the wrong type.

    >>> Transform(original_key="b")
    Transform(original_key='b', use_fallback=False, value_fn=None, multi_value_fn=None)
    """

    original_key: str | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.original_key is not None and not isinstance(self.original_key, str):
            raise OptionError(
                f"original_key={self.original_key!r} must be text such as 'params/Dense_0', or None for the same key"
            )
        if not isinstance(self.use_fallback, bool):
            raise OptionError(f"use_fallback={self.use_fallback!r} must be True or False")
        for name in ("value_fn", "multi_value_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise OptionError(f"{name}={getattr(self, name)!r} must be a function, or None")
        given = [name for name in ("original_key", "value_fn", "multi_value_fn") if getattr(self, name) is not None]
        if self.use_fallback and given:
            raise OptionError(f"use_fallback=True and {given[0]}= contradict each other: give one of them")
        if self.multi_value_fn is not None and len(given) > 1:
            raise OptionError(
                f"multi_value_fn= and {given[0]}= contradict each other: multi_value_fn sees the whole original tree"
            )


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool = True
) -> Any:
    r"""Build a tree with the new tree's structure and the original tree's values.

    The value of each key is determined as follows:

    - If the key of a `Transform` matches, this `Transform` determines the value. Its key is a path such as
      ``params/Dense_0``, written with ``/`` or as nested dictionaries, or a regular expression that matches a whole
      path. Keys are matched against the paths of the new tree, as printed in errors and by ``holdfast show``. A key
      that matches a container applies to all leaves below it; ``original_key`` then names the corresponding container,
      and ``multi_value_fn`` returns a tree with these leaves. If several keys match a leaf, a literal key takes
      precedence over a pattern, a longer path over a shorter one, and an earlier key over later ones.
    - Any other key that is in both trees takes its value from the original tree, or from the new tree if
      ``default_to_original`` is False.
    - A key that is only in the new tree keeps its value. A key that is only in the original tree is dropped.

    Leaves of the new tree may be the placeholder ``...``, which may also be filled with a whole container. None does
    not count as a value: it stays None in the new tree, and is never taken from the original tree.

    Values are not cast, compared or copied; if two keys take the same value, they share it.

    Args:
        original_tree: Any tree. Its container types may differ from those in the new tree; dictionaries loaded
            without a template are fine.
        transformations: Dictionary that maps keys to `Transform` objects.
        new_tree: The structure of the result; its values matter only if they are kept.
        default_to_original: Whether the original tree is preferred, as described above. Transformations with
            ``use_fallback`` take values from the tree that is not preferred.

    Returns:
        A tree with the new tree's containers.

    Raises:
        OptionError: An entry is not a `Transform`, matches no key of the new tree, or refers to a missing group.
        TreeMismatchError: A key has no value, or a value whose structure does not fit; the error names all such keys.

    >>> renamed = {"x": Transform(original_key="b/c")}
    >>> apply_transformations({"a": 1, "b": {"c": 2}}, renamed, {"a": ..., "x": ..., "y": 5})
    {'a': 1, 'x': 2, 'y': 5}
    """
    original = flatten(original_tree)
    new = flatten(new_tree)
    source = OriginalTree(original.names, original.structure, [value is None for value in original.values])
    origins = plan_transformations(source, transformations, new, default_to_original)
    made = evaluate(
        new,
        dict(enumerate(origins)),
        run=lambda call: call.run(original_tree),
        take=lambda taken: unflatten(taken.container, original.values[taken.start : taken.stop]),
    )
    values = dict(enumerate(new.values)) | dict(made)
    return unflatten(new.structure, list(values.values()))


@dataclass(slots=True)
class OriginalTree:
    """The information about the original tree that a plan needs: everything but the values."""

    names: Sequence[str]  # leaf names
    structure: TreeDef | None  # the containers; None if the tree is a bare leaf
    empty: Sequence[bool]  # whether each leaf is None, which does not count as a value
    where: str = ""  # location shown in errors; empty for a tree in memory


@dataclass(frozen=True, slots=True)
class Taken:
    """A leaf of the new tree that is taken from a leaf or container of the original tree."""

    path: str  # path in the original tree
    start: int  # index of the first leaf at this path in the original tree
    stop: int  # index after the last leaf at this path
    container: TreeDef | None  # None for a leaf
    function: Callable[[Any], Any] | None  # converts the value; None takes it unchanged

    @property
    def is_leaf(self) -> bool:
        """True for a leaf that is taken unchanged."""
        return self.container is None and self.function is None

    def apply(self, value: Any, name: str, old: Any) -> Any:
        """Return the new value of a leaf, converted from the value in the original tree."""
        function = self.function
        if function is None:
            return value
        path = _path_of(name)
        result = _explained(lambda: function(value), "value_fn", path)
        _check_leaf(result, path, old is ..., "value_fn")
        return result


@dataclass(eq=False, slots=True)
class Call:
    """A call to a ``multi_value_fn`` with the whole original tree, made only once for all leaves that it computes."""

    path: str  # path of the leaf or container in the new tree that the call computes
    function: Callable[..., Any]
    # Leaf names relative to ``path``; a single empty name if the path is a leaf.
    names: list[str] = field(default_factory=list)

    def run(self, original: Any) -> Any:
        arguments = (self.path, original) if _argument_count(self.function) == 2 else (original,)
        return _explained(lambda: self.function(*arguments), "multi_value_fn", self.path)

    def leaves(self, result: Any, placeholder: bool) -> dict[str, Any]:
        if self.names == [""]:
            _check_leaf(result, self.path, placeholder, "multi_value_fn")
            return {"": result}
        flat = flatten(result)
        returned = dict(zip(flat.names, flat.values, strict=True))
        missing = [f"{_path_of(name)}: not returned" for name in self.names if name not in returned]
        if missing:
            raise TreeMismatchError(
                f"multi_value_fn of the transformation for {self.path or '(root)'} must return a tree with the keys "
                "that the new tree has there:",
                missing,
            )
        return returned


@dataclass(frozen=True, slots=True)
class Computed:
    """A leaf of the new tree that is taken, by its name, from the result of a `Call`."""

    call: Call
    name: str


Origin = Taken | Computed | None  # where a leaf of the new tree comes from; None if it keeps its value


def evaluate(
    new: Flattened, origins: Mapping[int, Origin], *, run: Callable[[Call], Any], take: Callable[[Taken], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield the index and value of each leaf to replace; ``run`` and ``take`` read from the original tree."""
    returned: dict[Call, dict[str, Any]] = {}
    for number, origin in origins.items():
        old = new.values[number]
        if isinstance(origin, Taken):
            yield number, origin.apply(take(origin), new.names[number], old)
        elif isinstance(origin, Computed):
            if origin.call not in returned:
                returned[origin.call] = origin.call.leaves(run(origin.call), old is ...)
            yield number, returned[origin.call][origin.name]


def plan_transformations(
    original: OriginalTree, transformations: Any, new: Flattened, default_to_original: bool
) -> list[Origin]:
    planner = _Planner(original, _Rules(transformations), default_to_original)
    origins = [planner.origin(name, value) for name, value in zip(new.names, new.values, strict=True)]
    planner.rules.check([*map(_path_of, new.names), *(path for path, _ in _containers(new.structure, "", [0]))])
    if planner.problems:
        raise unfilled_error(original.where, len(new.names), planner.problems)
    return origins


def unfilled_error(where: str, count: int, problems: Sequence[str]) -> TreeMismatchError:
    prefix = f"{where}: " if where else ""
    return TreeMismatchError(f"{prefix}{len(problems)} of {count} keys of the new tree cannot be filled:", problems)


class _Planner:
    def __init__(self, original: OriginalTree, rules: _Rules, default_to_original: bool) -> None:
        self.rules = rules
        self.problems: list[str] = []
        self._empty = original.empty
        self._default_to_original = default_to_original
        self._calls: dict[str, Call] = {}
        self._original: dict[str, tuple[int, int, TreeDef | None]] = dict(_containers(original.structure, "", [0]))
        self._original.update((_path_of(name), (index, index + 1, None)) for index, name in enumerate(original.names))

    def origin(self, name: str, value: Any) -> Origin:
        """Determine where one leaf of the new tree comes from, and record a problem if it cannot be filled."""
        path = _path_of(name)
        match = self.rules.find(path)
        if value is None:
            if match is not None and match.rule.key == path and not match.rule.transform.use_fallback:
                self._problem(path, "expected a leaf to fill, found None, which stays None; write ... instead", match)
            return None
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

    def _find(self, path: str, value: Any) -> tuple[int, int, TreeDef | None] | None:
        """Find a leaf's source in the original tree, even if only one tree has the ``value`` keys of nnx variables."""
        part, below = self._original.get(path), self._original.get(f"{path}/value")
        if part is None and path.endswith("/value"):
            above = self._original.get(path.removesuffix("/value"))
            return above if above is not None and above[2] is None else None
        if value is ... or part is None or part[2] is None or part[2].keys != ["value"]:
            return part
        return part if below is None or below[2] is not None else below

    def _is_there(self, path: str, value: Any) -> bool:
        if (part := self._find(path, value)) is None:
            return False
        start, stop, container = part
        return value is ... or (not self._empty[start] if container is None else stop > start)

    def _kept(self, path: str, value: Any, why: str, match: _Match | None = None) -> Origin:
        if value is ...:
            self._problem(path, f"expected a value, found only a placeholder in the new tree, but {why}", match)
        return None

    def _taken(self, path: str, source: str, value: Any, match: _Match | None) -> Origin:
        function = None if match is None else match.rule.transform.value_fn
        part = self._find(source, value) if function is None else self._original.get(source)
        if part is None:
            why = "not in the original tree" if source == path else f"{source!r} is not in the original tree"
            if function is not None and source == path:
                why += "; value_fn receives the value at this key: add original_key=, or use multi_value_fn"
            self._problem(path, f"expected a value, {why}", match)
            return None
        start, stop, container = part
        if value is not ... and container is not None and function is None:
            self._problem(
                path,
                f"expected one value, found a container of {stop - start} leaves at {source or '(root)'!r} in the "
                "original tree; write ... in the new tree to take it as is",
                match,
            )
        elif value is not ... and container is None and self._empty[start]:
            self._problem(path, f"expected a value, found None at {source!r} in the original tree", match)
        return Taken(source, start, stop, container, function)

    def _computed(self, match: _Match, name: str, function: Callable[..., Any]) -> Origin:
        call = self._calls.setdefault(match.path, Call(match.path, function))
        above = match.path.count("/") + 1 if match.path else 0
        part = name.split(".", above)[-1] if match.rest else ""
        call.names.append(part)
        return Computed(call, part)

    def _problem(self, path: str, problem: str, match: _Match | None = None) -> None:
        because = "" if match is None else f" (transformation {match.rule.key!r})"
        self.problems.append(f"{path or '(root)'}: {problem}{because}")


def _containers(node: TreeDef | None, name: str, counter: list[int]) -> Iterator[tuple[str, tuple[int, int, TreeDef]]]:
    """Yield each container's path and (first leaf's index, index after the last leaf, definition), innermost first."""
    if node is None:
        return
    start = counter[0]
    for below, child in node.named_children(name):
        if child is None:
            counter[0] += 1
        else:
            yield from _containers(child, below, counter)
    yield _path_of(name), (start, counter[0], node)


def _check_leaf(result: Any, path: str, placeholder: bool, function: str) -> None:
    if not placeholder and flatten(result).structure is not None:
        raise TreeMismatchError(
            f"{function} of the transformation for {path or '(root)'} returned a {type(result).__name__}: expected "
            "one value, because the new tree has a leaf there; write ... in the new tree to take the result as is"
        )


def has_values(leaf: Any) -> bool:
    """True if a template leaf has values, unlike abstract and deleted arrays."""
    if is_jax_abstract(leaf):
        return False
    library = library_of(leaf)
    if library == "jax":
        return not leaf.is_deleted()
    return library != "torch" or not leaf.is_meta


def _explained(function: Callable[[], Any], option: str, path: str) -> Any:
    """Call a user function; if it fails, add a note with the transformation's key to the exception."""
    try:
        return function()
    except Exception as error:
        error.add_note(f"raised by {option} of the transformation for {path or '(root)'}")
        raise


def _path_of(name: str) -> str:
    """Return the path that a transformation matches: ``params/w`` for ``params.w``, empty for a bare leaf."""
    return format_path(name) if name else ""


@dataclass(slots=True)
class _Rule:
    key: str  # levels separated by ``/``
    transform: Transform
    pattern: re.Pattern[str] | None  # the key as a regular expression; None if it matches only literally
    problem: str = ""  # why the key is not a valid regular expression; empty if it is valid


@dataclass(frozen=True, slots=True)
class _Match:
    rule: _Rule
    path: str  # path of the leaf or of a container above it, whichever matches the rule's key
    rest: str  # the leaf's path relative to ``path``, such as ``Dense_0/kernel``; empty if ``path`` is the leaf
    source: str  # path of the leaf's value in the original tree, such as ``params/Dense_0/kernel``


class _Rules:
    """Finds the transformation for a path, in the order that `apply_transformations` documents."""

    def __init__(self, transformations: Any) -> None:
        self.rules = [_rule(key, transform) for key, transform in _transforms(transformations, "", 0)]
        self._literal: dict[str, _Rule] = {}
        for rule in self.rules:
            self._literal.setdefault(rule.key, rule)
        self._first: dict[str, tuple[_Rule, re.Match[str]] | None] = {}

    def find(self, path: str) -> _Match | None:
        paths = [path, *_above(path)]
        for target in paths:
            if (rule := self._literal.get(target)) is not None:
                return _match(rule, None, target, path)
        for target in paths[:-1] or paths:  # skip the root, even if a pattern matches its empty path
            if target not in self._first:
                matches = ((rule, rule.pattern.fullmatch(target)) for rule in self.rules if rule.pattern is not None)
                self._first[target] = next(((rule, match) for rule, match in matches if match is not None), None)
            if (first := self._first[target]) is not None:
                return _match(*first, target, path)
        return None

    def check(self, paths: Iterable[str]) -> None:
        every = set(paths)
        for rule in self.rules:
            if rule.key in every:
                continue
            if rule.problem:
                raise OptionError(
                    f"the transformation {rule.key!r} is neither a key of the new tree nor a regular expression: "
                    f"{rule.problem}"
                )
            if rule.pattern is None or not any(map(rule.pattern.fullmatch, every)):
                raise OptionError(
                    f"the transformation {rule.key!r} matches no key of the new tree, which has "
                    f"{shortened([repr(path) for path in sorted(every) if path]) or 'none'}"
                )


def _argument_count(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a ``multi_value_fn`` takes: 1 or 2."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no introspectable signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in positional and each.default is inspect.Parameter.empty]
    return 2 if len(required) == 2 else 1


def _transforms(node: Any, path: str, depth: int) -> Iterator[tuple[str, Transform]]:
    if isinstance(node, Transform):
        yield path, node
        return
    contents = expand(node) if depth < MAX_DEPTH else None
    if contents is None:
        where = repr(path) if path else "the whole"
        raise OptionError(
            f"transformations: {where} is a {class_name(node)}; expected a Transform or a dictionary of them"
        )
    keys = range(len(contents.values)) if contents.keys is None else contents.keys
    for key, child in zip(keys, contents.values, strict=True):
        yield from _transforms(child, f"{path}/{key}" if path else str(key), depth + 1)


def _rule(key: str, transform: Transform) -> _Rule:
    if _PLAIN.fullmatch(key):
        return _Rule(key, transform, None)
    try:
        return _Rule(key, transform, re.compile(key))
    except (re.error, RecursionError, OverflowError) as error:
        return _Rule(key, transform, None, str(error))


def _match(rule: _Rule, match: re.Match[str] | None, target: str, path: str) -> _Match:
    """Match the leaf at ``path`` to a rule whose key matches ``target``: the leaf itself or a container above it."""
    source, original_key = target, rule.transform.original_key
    if original_key is not None:
        match = match or re.fullmatch(re.escape(target), target)
        assert match is not None
        try:
            source = match.expand(original_key)
        except (re.error, IndexError) as error:
            raise OptionError(
                f"the transformation {rule.key!r} has original_key={original_key!r}, which does not fit its key: "
                f"{error}"
            ) from error
    rest = path.removeprefix(target).removeprefix("/")
    return _Match(rule, target, rest, "/".join(filter(None, (source, rest))))


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the containers above a leaf, innermost first, ending with the empty path of the root."""
    while path:
        path = path.rpartition("/")[0]
        yield path
