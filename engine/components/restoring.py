"""A saved tree of components restored into a running one, or into a part of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..checkpointer import Place
from ..errors import OptionError, TreeMismatchError
from ..graph import PathFilter, Patterns
from ..item import SavedLeaf
from ..tree import flatten
from .live import LiveComponent, live_tree
from .names import Path, find, written
from .reading import SavedComponent, all_components, open_component
from .report import ComponentReport
from .states import Keep, OwnReport, ask, own_state, set_own_state

_logger = logging.getLogger("holdfast")


def restore(
    root: Any, path: Place, *, component: str | None = None, keep: Patterns | None = None, strict: bool = False
) -> ComponentReport:
    """Restores a component and all below it, in place.

    Args:
        root: The running component.
        path: What to restore from: the directory of a tree of components, or of one of its parts.
        component: Restores only this component of the running one, such as ``"learner/p1"``, from what was saved at
            ``path``, whatever that was called there.
        keep: Patterns of paths such as ``"**/lr"``: values that match stay as they are in the program. A path is that
            of the component and that of the value within it: ``learner/optimizer/groups/0/lr``.
        strict: Whether components and values that only the program or only the checkpoint has are errors.

    Returns:
        What was restored and what was not.

    Raises:
        CheckpointNotFoundError: Nothing was saved there.
        DamagedCheckpointError: A state does not verify; nothing was changed.
        TreeMismatchError: The running component has none that is called ``component``; or a state does not fit.
    """
    live = live_tree(root)
    target = live if component is None else locate(live, component)
    saved = open_component(path)
    return restore_saved(target, saved, strict=strict, keep=None if keep is None else Keeping(keep))


class Keeping:
    """Tells of the paths of values whether they stay as they are in the program.

    Args:
        patterns: One or more patterns; paths that match one stay.

    Raises:
        OptionError: A pattern is no text.
    """

    def __init__(self, patterns: Patterns) -> None:
        texts = patterns if isinstance(patterns, Sequence) and not isinstance(patterns, str) else [patterns]
        try:
            self._filters = {str(text): PathFilter(text) for text in texts}
        except (OptionError, TypeError) as error:
            raise OptionError(f"keep={patterns!r} must be a pattern such as '**/lr', or a list of such") from error
        self._unused = set(self._filters)

    def __call__(self, path: Path, leaf: SavedLeaf | None) -> bool:
        """Tells whether a value stays."""
        matched = {text for text, chosen in self._filters.items() if chosen.chooses(path)}
        self._unused -= matched
        return bool(matched)

    def check(self) -> None:
        """Makes sure that every pattern has matched something.

        Raises:
            TreeMismatchError: One has not.
        """
        if self._unused:
            raise TreeMismatchError(
                f"keep: {', '.join(map(repr, sorted(self._unused)))} matches no value that was saved, and nothing was "
                "changed. A path is that of the component and that of the value in it, such as 'learner/optimizer/**'; "
                "a component that has a set_state of its own takes all of its state"
            )


def locate(live: LiveComponent, component: str) -> LiveComponent:
    """Finds a component by the path that a person gave."""
    known = {one.path: one for one in live.walk()}
    by_path = {one.path: one for one in known.values()}
    for one in known.values():
        by_path.update({path: known[target] for path, target in one.same.items()})
    return by_path[find(component, by_path, type(live.value).__qualname__)]


def restore_saved(
    target: LiveComponent, saved: SavedComponent, *, strict: bool, keep: Keep | None = None, fresh: bool = False
) -> ComponentReport:
    """Restores a live component from one that has been opened; see :func:`restore`.

    Args:
        target: The component.
        saved: What was saved.
        strict: Whether components and values that only the program or only the checkpoint has are errors.
        keep: Tells which values stay as they are.
        fresh: Whether nobody else knows the component yet, so that it need not get back what it had after an error.
    """
    restoring = _Restoring(target, saved, keep, strict=strict, fresh=fresh)
    report = restoring.run()
    for line in report.problems():
        _logger.warning("%s: %s", saved.location, line.strip())
    return report


class _Restoring:
    """One restore: every state is read, and so verified, before anything is changed."""

    def __init__(
        self, target: LiveComponent, saved: SavedComponent, keep: Keep | None, *, strict: bool, fresh: bool
    ) -> None:
        self._target = target
        self._keep = keep
        self._saved = saved
        self._strict = strict
        self._fresh = fresh
        self._origins = self._match(target)
        if strict:
            self._refuse_missing()
        self._states = {path: origin.state() for path, origin in self._origins.items()}
        if isinstance(keep, Keeping):
            self._check(keep)
        self._done: dict[Path, OwnReport] = {}
        self._before: list[tuple[LiveComponent, Any]] = []

    def _match(self, target: LiveComponent) -> dict[Path, SavedComponent]:
        """Returns what to restore each component from, by its path; those first that are below others."""
        found: dict[Path, SavedComponent] = {}

        def visit(one: LiveComponent, saved: SavedComponent) -> None:
            for child in one.children:
                origin = saved.children.get(one.relative(child)) or self._same(saved, one.relative(child))
                if origin is not None:
                    visit(child, origin)
            found[one.path] = saved

        visit(target, self._saved)
        return found

    def _same(self, saved: SavedComponent, path: Path) -> SavedComponent | None:
        """Finds a component that was saved under another path of the tree, as it was the same object."""
        goal = saved.description.same.get(path)
        start = self._saved.description.path
        if goal is None or goal[: len(start)] != start:
            return None
        return descend(self._saved, goal[len(start) :])

    def _refuse_missing(self) -> None:
        """Raises an error if components of the program are not in the checkpoint."""
        missing = [_shown(one.path) for one in self._target.walk() if one.path not in self._origins]
        if missing:
            raise TreeMismatchError(
                f"{self._saved.location} does not have all components of the program (strict=True); nothing was "
                "changed:",
                missing,
            )

    def _check(self, keep: Keeping) -> None:
        """Raises an error if a pattern matches nothing that was saved, also of components that are yet to be made."""
        live = {one.path: one for one in self._target.walk()}
        for path, origin in self._origins.items():
            ask(live[path], self._states[path], origin.location, self._within(path) or keep)
        matched = {origin.path for origin in self._origins.values()}
        for saved in all_components(self._saved):
            if saved.path not in matched:
                path = (*self._target.path, *saved.path[len(self._saved.path) :])
                for name in flatten(saved.state()).names:
                    keep((*path, *name.split(".")), None)
        keep.check()

    def run(self) -> ComponentReport:
        """Gives every component its state; then those that only exist since another has got its own."""
        try:
            live = {one.path: one for one in self._target.walk()}
            for path, origin in self._origins.items():
                self._set(live[path], self._states.pop(path), origin, last=not self._states)
            while new := self._born():
                live = {one.path: one for one in self._target.walk()}
                for path, origin in new.items():
                    self._set(live[path], origin.state(), origin, last=False)
        except BaseException:
            self._take_back()
            raise
        report = self._report()
        if self._strict and not report.complete:
            raise TreeMismatchError(
                f"{self._saved.location} and the program do not match (strict=True); what both have was restored:",
                report.problems(),
            )
        return report

    def _born(self) -> dict[Path, SavedComponent]:
        """Returns what components are to be restored from that exist only by now."""
        self._target = _again(self._target)
        new = {path: origin for path, origin in self._match(self._target).items() if path not in self._done}
        self._origins.update(new)
        return new

    def _set(self, one: LiveComponent, state: Any, origin: SavedComponent, *, last: bool) -> None:
        if not last and not self._fresh:
            self._before.append((one, own_state(one, snapshot=True)))
        self._done[one.path] = set_own_state(one, state, origin.location, self._within(one.path))

    def _within(self, above: Path) -> Keep | None:
        """Tells of paths within a component whether their values stay."""
        keep = self._keep
        return None if keep is None else lambda path, leaf: keep((*above, *path), leaf)

    def _take_back(self) -> None:
        """Gives components the states that they had: one that does not fit leaves the others as they were."""
        for one, state in reversed(self._before):
            try:
                if state or not isinstance(state, dict):
                    set_own_state(one, state)
            except Exception:  # the error that led here is the one to tell
                _logger.warning("%s: its state could not be taken back", _shown(one.path), exc_info=True)

    def _report(self) -> ComponentReport:
        """Says what was done."""
        used = {origin.path for origin in self._origins.values()}
        return ComponentReport(
            checkpoint=str(self._saved.location),
            restored=tuple(map(_shown, self._done)),
            missing=tuple(_shown(one.path) for one in self._target.walk() if one.path not in self._done),
            unused=tuple(_shown(path) for path in _unused(self._saved, used)),
            missing_values=_values(self._done, "missing"),
            unused_values=_values(self._done, "unused"),
        )


def _again(target: LiveComponent) -> LiveComponent:
    """Finds the components below one anew."""
    found = live_tree(target.value)
    for one in list(found.walk()):
        one.path = (*target.path, *one.path)
        one.same = {(*target.path, *path): (*target.path, *owner) for path, owner in one.same.items()}
    found.name = target.name
    return found


def descend(saved: SavedComponent, path: Path) -> SavedComponent | None:
    """Finds a saved component below another, or None."""
    if not path:
        return saved
    for below, child in saved.children.items():
        if path[: len(below)] == below:
            return descend(child, path[len(below) :])
    return None


def _unused(saved: SavedComponent, used: set[Path]) -> list[Path]:
    found = []
    for child in saved.children.values():
        if child.path not in used:
            found.append(child.path)
        found += _unused(child, used)
    return found


def _values(done: dict[Path, OwnReport], which: str) -> tuple[str, ...]:
    return tuple(f"{_shown(path)}: {value}" for path, one in done.items() for value in getattr(one, which))


def _shown(path: Path) -> str:
    return written(path) or "(root)"
