"""What a transformation is, and which of several applies to a path."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .containers import class_name, expand
from .structure import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PLAIN = re.compile(r"[\w/%-]*")  # what means itself in a regular expression


@dataclass(frozen=True, slots=True)
class Transform:
    r"""Where the value of a key of the new tree comes from.

    ``Transform()`` by itself takes the value from the same key of the original tree.

    Attributes:
        original_key: The key in the original tree, levels separated by ``/``. Where the transformation's own key is a
            regular expression, ``\1`` and ``\g<name>`` stand for its groups. None is the same key.
        use_fallback: Take the value from the tree that `apply_transformations` does not prefer: the new tree if
            ``default_to_original`` is True, the original tree otherwise.
        value_fn: Makes the new value of the one at the key in the original tree.
        multi_value_fn: Makes the new value of the whole original tree. A function of two arguments is given the key in
            the new tree first.

    Raises:
        OptionError: Two of them contradict each other, or one is of a wrong type.

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


@dataclass(slots=True)
class Rule:
    """A transformation under its key.

    Attributes:
        key: The key, levels separated by ``/``.
        transform: What is to be done.
        pattern: The key as a regular expression; None where it can match nothing but itself.
        problem: Why it is no regular expression, if it is not.
    """

    key: str
    transform: Transform
    pattern: re.Pattern[str] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that applies to a path.

    Attributes:
        rule: The rule.
        path: The path that its key matches: the one asked for, or that of a container above it.
        rest: What the path asked for adds to ``path``, such as ``Dense_0/kernel``; empty if they are the same.
        source: Where its value is in the original tree, such as ``params/Dense_0/kernel``.
    """

    rule: Rule
    path: str
    rest: str
    source: str


class Rules:
    """Transformations by their keys.

    A key that is written out goes before one that matches as a pattern; then a longer path goes before those of the
    containers above it; then the transformation that is given first.

    Args:
        transformations: `Transform` objects in a dictionary, or in dictionaries inside dictionaries, whose keys are
            paths and regular expressions; expressions have to match a path from end to end.

    Raises:
        OptionError: Something else than a `Transform` is in it.
    """

    def __init__(self, transformations: Any) -> None:
        self.rules = [_rule(key, transform) for key, transform in _walk(transformations, "", 0)]
        self._patterns = [(rule, rule.pattern) for rule in self.rules if rule.pattern is not None]
        self._literal: dict[str, Rule] = {}
        for rule in self.rules:
            self._literal.setdefault(rule.key, rule)
        self._containers: dict[str, Match | None] = {}

    def find(self, path: str) -> Match | None:
        """Finds what applies to a leaf.

        Args:
            path: Its path in the new tree.

        Raises:
            OptionError: An ``original_key`` refers to a group that its key does not have.
        """
        rule = self._literal.get(path)
        if rule is not None:
            return _match(rule, re.fullmatch(re.escape(path), path), path)
        above = list(_above(path))
        for container in above:
            if (rule := self._literal.get(container)) is not None:
                return self._below(self._container(container, rule), path)
        first = self._first(path)
        if first is not None:
            return _match(*first, path)
        for container in above[:-1]:  # a pattern that can be empty does not mean the tree as a whole
            if (whole := self._container(container)) is not None:
                return self._below(whole, path)
        return None

    def check(self, paths: Iterable[str]) -> None:
        """Makes sure that every transformation is about something.

        Args:
            paths: All paths of the new tree, those of containers included.

        Raises:
            OptionError: A key is no path of the new tree, and no regular expression that matches one.
        """
        known = set(paths)
        for rule in self.rules:
            if rule.key in known:
                continue
            if rule.problem:
                raise OptionError(
                    f"the transformation {rule.key!r} is not a key of the new tree, and no regular expression either: "
                    f"{rule.problem}"
                )
            if rule.pattern is None or not any(map(rule.pattern.fullmatch, known)):
                raise OptionError(
                    f"the transformation {rule.key!r} matches no key of the new tree, which has {_some(known)}"
                )

    def _container(self, container: str, rule: Rule | None = None) -> Match | None:
        if container not in self._containers:
            found = None
            if rule is not None:
                found = _match(rule, re.fullmatch(re.escape(container), container), container)
            else:
                first = self._first(container)
                if first is not None:
                    found = _match(*first, container)
            self._containers[container] = found
        return self._containers[container]

    def _first(self, path: str) -> tuple[Rule, re.Match[str]] | None:
        """Returns the first rule whose pattern matches a path."""
        for rule, pattern in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                return rule, found
        return None

    @staticmethod
    def _below(match: Match | None, path: str) -> Match:
        assert match is not None
        rest = path[len(match.path) + 1 :] if match.path else path
        return Match(match.rule, match.path, rest, "/".join(filter(None, (match.source, rest))))


def arguments_of(function: Callable[..., Any]) -> int:
    """Says how many positional arguments a ``multi_value_fn`` has to be given: 1 or 2."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in positional and one.default is inspect.Parameter.empty]
    return 2 if len(required) == 2 else 1


def _walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, Transform]]:
    if isinstance(node, Transform):
        yield path, node
        return
    contents = expand(node) if depth < MAX_DEPTH else None
    if contents is None:
        where = repr(path) if path else "the whole"
        raise OptionError(
            f"transformations: {where} is a {class_name(node)}; expected a Transform, or a dictionary of such"
        )
    keys = range(len(contents.values)) if contents.keys is None else contents.keys
    for key, child in zip(keys, contents.values, strict=True):
        yield from _walk(child, f"{path}/{key}" if path else str(key), depth + 1)


def _rule(key: str, transform: Transform) -> Rule:
    if _PLAIN.fullmatch(key):
        return Rule(key, transform, None)
    try:
        return Rule(key, transform, re.compile(key))
    except (re.error, RecursionError, OverflowError) as error:
        return Rule(key, transform, None, str(error))


def _match(rule: Rule, found: re.Match[str] | None, path: str) -> Match:
    assert found is not None
    template = rule.transform.original_key
    if template is None:
        return Match(rule, path, "", path)
    try:
        return Match(rule, path, "", found.expand(template))
    except (re.error, IndexError) as error:
        raise OptionError(
            f"the transformation {rule.key!r} has original_key={template!r}, which does not fit its key: {error}"
        ) from error


def _above(path: str) -> Iterator[str]:
    """Generates the paths of the containers above a leaf, the innermost first; the tree as a whole is empty."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _some(paths: Iterable[str]) -> str:
    shown = sorted(filter(None, paths))
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(map(repr, shown[:8])) + more if shown else "none"
