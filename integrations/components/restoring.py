"""Restore saved component trees into running components, or into new ones built from their constructor specs."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ...engine.errors import DamagedCheckpointError, NotAllowedError, OptionError, TreeMismatchError, shortened
from ...engine.pytree import ARRAY_KINDS, PathFilter, Patterns, escape_key, import_path, loaded
from ...engine.sources import Misfits
from ..graph import Path, RestoreReport, StoredGraph, current_name
from .constructor_spec import ConstructorFailed, Missing, SpecDecoder, available, check_spec, construct
from .live import LiveComponent, live_tree, paths_of, refreshed
from .names import find, format_component_path
from .permissions import Permissions, was_main
from .reading import SavedComponent, all_components, descend
from .states import OwnReport, forget_moments, is_remote, overrides, own_states, prepare_state, stored_state

_logger = logging.getLogger("holdfast")
_KEPT = (
    "; nothing was changed. A path is the component's path followed by the value's, such as "
    "'learner/optimizer/**'; a component with its own set_state takes all of its state"
)


def kept_values(patterns: Patterns | None) -> PathFilter | None:
    return None if patterns in (None, [], ()) else PathFilter(exclude=patterns, option="keep")


@dataclass(eq=False)
class TreeRestore:
    """Restores a live component and the components below it. All states are read and verified before any change."""

    target: LiveComponent
    saved: SavedComponent
    _: KW_ONLY
    strict: bool
    keep: PathFilter | None = None  # excludes the values that the program keeps
    overridden: Collection[str] | None = None  # constructor arguments by the program; None if not just constructed
    misfits: Misfits | None = None  # records values that do not fit; these are left unchanged
    modes: bool = False  # whether to restore module modes and ``requires_grad`` flags as well

    def __post_init__(self) -> None:
        self._origins = self._match(self.target)
        missing = self._missing()
        if self.strict and missing:
            headline = "lacks components of the program (strict=True); nothing was changed:"
            raise TreeMismatchError(f"{self.saved.location} {headline}", missing)
        live = paths_of(self.target.root)
        opened = {path: _opened(origin, live[path]) for path, origin in self._origins.items()}
        if self.strict and (left_out := self._left_out()):
            headline = "has values that cannot be restored (strict=True); nothing was changed:"
            raise TreeMismatchError(f"{self.saved.location} {headline}", left_out)
        if self.keep is not None:
            self.keep.check(self._saved_paths(opened), _KEPT)
        self._states = {path: self._prepared(live[path], state) for path, state in opened.items()}
        self._done: dict[Path, OwnReport] = {}
        self._before: list[tuple[LiveComponent, Any]] = []
        self._asked: dict[Path, Any] = {}  # states of remote components for undoing a failed restore

    def _left_out(self) -> tuple[str, ...]:
        return _lines((path, origin.left_out) for path, origin in self._origins.items())

    def _lines(self, of: Callable[[OwnReport], Iterable[str]]) -> tuple[str, ...]:
        """Return lines from the reports on restored components, each prefixed with the component's path."""
        return _lines((path, of(report)) for path, report in self._done.items())

    def _match(self, target: LiveComponent) -> dict[Path, SavedComponent]:
        """Return saved components, keyed by the paths of their live counterparts; children come before parents."""
        origins: dict[Path, SavedComponent] = {}
        elsewhere: dict[Path, SavedComponent] = {}  # components saved under an additional path, keyed by primary path

        def visit(live: LiveComponent, saved: SavedComponent) -> None:
            for child in live.children:
                if (origin := descend(saved, live.relative(child))) is not None:
                    visit(child, origin)
            for path, goal in live.same.items():
                if (origin := descend(saved, path[len(live.path) :])) is not None:
                    elsewhere.setdefault(goal, origin)
            origins[live.path] = saved

        visit(target, self.saved)
        by_path = paths_of(target.root)
        for goal, origin in elsewhere.items():
            if goal not in origins and goal in by_path:
                visit(by_path[goal], origin)
        return origins

    def _missing(self) -> list[str]:
        """Return the paths of components in the program that are missing from the checkpoint."""
        here = list(self.target.walk())
        within = {component.path for component in here}
        every = [(component.path, component.path) for component in here]
        every += [(path, goal) for component in here for path, goal in component.same.items() if goal not in within]
        return [format_component_path(path) for path, goal in every if goal not in self._origins]

    def _saved_paths(self, opened: Mapping[Path, Any]) -> Iterator[Path]:
        """Yield the paths of saved values that patterns may match, even in components that do not exist yet."""
        matched = {origin.path for origin in self._origins.values()}
        others = [saved for saved in all_components(self.saved) if saved.path not in matched]
        below = {(*self.target.path, *saved.path[len(self.saved.path) :]): saved.graph() for saved in others}
        for path, state in (*opened.items(), *below.items()):
            for number, _ in state.graph.values() if isinstance(state, StoredGraph) else ():
                yield (*path, *state.graph.path(number))

    def _prepared(self, live: LiveComponent, state: Any) -> Callable[[], OwnReport]:
        """Prepare an opened state; return a function that restores it."""
        if isinstance(state, StoredGraph):
            kept = self._kept(live.path, state)
            return prepare_state(live, state, ignore=kept, fitting=self.misfits is not None, modes=self.modes)

        def apply() -> OwnReport:
            live.value.set_state(state)
            return OwnReport()

        return apply

    def run(self) -> RestoreReport:
        """Restore all components, including those that are created during the restore."""
        try:
            live = paths_of(self.target.root)
            if self.overridden is None:
                # The last component needs no snapshot, because nothing can fail after its restore.
                remote = [live[path] for path in [*self._origins][:-1] if is_remote(live[path].value)]
                self._asked = own_states(remote, snapshot=True)
            for path in self._origins:
                self._set(live[path], self._states.pop(path), last=not self._states)
            while new := self._new_origins():
                live = paths_of(self.target.root)
                for path, origin in new.items():
                    self._set(live[path], self._prepared(live[path], _opened(origin, live[path])), last=False)
            self._forget_moments()
        except BaseException:
            self._undo()
            raise
        report = self._report()
        if self.strict and not report.complete:
            raise TreeMismatchError(
                f"{self.saved.location} and the program do not match (strict=True); what both have was restored:",
                report.problems(),
            )
        if changed := self._lines(lambda report: report.modes):
            _logger.info("as at the save, where the program began otherwise: %s", shortened(changed))
        if self.misfits is not None:
            for path, own in self._done.items():
                where = format_component_path(path)
                self.misfits.kept |= {f"{where}: {name}": f"{where}: {line}" for name, line in own.different.items()}
            report._note(self.misfits)
            report = RestoreReport(checkpoint=report.checkpoint, restored=report.restored, separate=report.separate)
        for line in report.problems():
            _logger.warning("%s: %s", self.saved.location, line.strip())
        return report

    def _new_origins(self) -> dict[Path, SavedComponent]:
        """Return the saved counterparts of live components that were created since the last match."""
        self.target = refreshed(self.target)
        new = {path: origin for path, origin in self._match(self.target).items() if path not in self._done}
        self._origins.update(new)
        return new

    def _set(self, live: LiveComponent, change: Callable[[], OwnReport], *, last: bool) -> None:
        if not last and self.overridden is None:
            before = self._asked if live.path in self._asked else own_states([live], snapshot=True)
            self._before.append((live, before[live.path]))
        self._done[live.path] = change()

    def _kept(self, above: Path, stored: StoredGraph) -> list[Path]:
        """Return the paths of values that a component keeps instead of restoring them."""
        values = [(stored.graph.path(number), str(node.value)) for number, node in stored.graph.values()]
        if self.keep is not None:
            return [path for path, _ in values if not self.keep.chooses((*above, *path))]
        # Overrides take precedence over plain values of the same name in the state, such as optimizer options.
        named = [(path, stored.leaves.get(name)) for path, name in values if path[-1] in (self.overridden or ())]
        return [path for path, leaf in named if leaf is not None and leaf.saved.kind not in ARRAY_KINDS]

    def _undo(self) -> None:
        for live, state in reversed(self._before):
            try:
                self._prepared(live, state if overrides(live.value, "set_state") else stored_state(state))()
            except Exception:  # only logged, so that the caller gets the original error
                _logger.warning("%s: its state could not be reverted", format_component_path(live.path), exc_info=True)

    def _forget_moments(self) -> None:
        """Throughout the tree, remove restored optimizer values of parameters whose own saved values did not fit."""
        fresh = [tensor for own in self._done.values() for tensor in own.fresh]
        if fresh:
            live = paths_of(self.target.root)
            for path, own in self._done.items():
                own.different.update((line, line) for line in forget_moments(live[path], fresh))

    def _report(self) -> RestoreReport:
        used = {origin.path for origin in self._origins.values()}
        _, *below = all_components(self.saved)
        return RestoreReport(
            checkpoint=str(self.saved.location),
            restored=tuple(map(format_component_path, self._done)),
            missing=tuple(self._missing()),
            unused=tuple(format_component_path(component.path) for component in below if not _is_used(component, used)),
            missing_values=self._lines(lambda report: report.missing),
            unused_values=(*self._lines(lambda report: report.unused), *self._left_out()),
            separate=tuple(self._separate()),
        )

    def _separate(self) -> Iterator[tuple[str, str]]:
        start, by_path = self.saved.description.path, paths_of(self.target.root)
        for path, origin in self._origins.items():
            for relative, goal in origin.description.same.items():
                other = (*self.target.path, *goal[len(start) :])
                pair = by_path.get((*path, *relative)), by_path.get(other)
                if goal[: len(start)] == start and None not in pair and pair[0] is not pair[1]:
                    yield format_component_path((*path, *relative)), format_component_path(other)


def _is_used(saved: SavedComponent, used: Collection[Path]) -> bool:
    """True if a saved component was restored, or if its own state is empty and a component below it was restored."""
    return saved.path in used or (any(path[: len(saved.path)] == saved.path for path in used) and saved.state() == {})


def _opened(origin: SavedComponent, component: LiveComponent) -> Any:
    """Return the state if the component has its own ``set_state``; otherwise, return the opened graph."""
    return origin.state(component.value) if overrides(component.value, "set_state") else origin.graph()


def locate(live: LiveComponent, component: str) -> LiveComponent:
    if component in ("", "(root)", ".", "/"):
        raise OptionError(f"component={component!r} is not a part of the tree; omit component= to restore all of it")
    by_path = paths_of(live)
    return by_path[find(component, by_path, type(live.value).__qualname__)]


def _lines(by_component: Iterable[tuple[Path, Iterable[str]]]) -> tuple[str, ...]:
    return tuple(f"{format_component_path(path)}: {line}" for path, lines in by_component for line in lines)


@dataclass(eq=False)
class TreeConstruction:
    """Constructs a component tree and restores it. A component that several specs refer to is built only once."""

    saved: SavedComponent
    base: type
    permissions: Permissions
    fallback: bool = False
    made: dict[Path, Any] = field(default_factory=dict)
    under_way: set[Path] = field(default_factory=set)

    def run(self, overrides: Mapping[str, Any], *, strict: bool) -> Any:
        if was_main(self.saved.description.type, self.base):
            self.permissions.main = self.base.__module__
        try:
            value = self.make(self.saved, self.base, overrides)
        except ConstructorFailed as failed:
            (error,) = failed.args
            raise error from error.__cause__
        overridden = {escape_key(name) for name in overrides}
        TreeRestore(live_tree(value), self.saved, strict=strict, overridden=overridden).run()
        return value

    def make(self, saved: SavedComponent, base: type, overrides: Mapping[str, Any]) -> Any:
        description, where = saved.description, str(saved.location)
        if saved.path in self.under_way:
            raise DamagedCheckpointError(f"{where}: its constructor spec depends on itself, directly or indirectly")
        self.under_way.add(saved.path)
        cls = self._class(description.type, base, where)
        if cls is not None and description.constructor is not None:
            value = self._construct(cls, description.constructor, overrides, where)
            self.under_way.discard(saved.path)
            return value
        if cls is not None and not overrides and not self.fallback:
            raise OptionError(
                f"{where}: the constructor arguments of {description.type} were not saved: {description.obstacle}. "
                "Create it yourself and call restore_from_path, or pass them by name"
            )
        return construct(cls or base, (), overrides, where)

    def _class(self, path: str, base: type, where: str) -> Any | None:
        if current_name(path) == import_path(base) or was_main(path, base):
            return base
        try:
            cls = self.permissions.resolve(path, where, made=True)
        except (NotAllowedError, OptionError):
            if self.fallback and base is self.base:
                _logger.warning("%s: %s is unknown; fallback=True creates a %s", where, path, base.__qualname__)
                return None
            raise
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise OptionError(
                f"{where} holds a {path}, which is not a {import_path(base)}: call from_checkpoint on one of its "
                "base classes, or point it at another component"
            )
        return cls

    def _construct(self, cls: Any, spec: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Any:
        decoder = SpecDecoder(self.permissions, self._component, self._nested, where)
        signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
        with contextlib.suppress(TypeError, ValueError):
            of_init = inspect.signature(cls.__init__)
            signature = of_init.replace(parameters=list(of_init.parameters.values())[1:])
        try:
            bound = signature.bind_partial(*spec["args"], **spec["kwargs"])
        except TypeError as error:
            raise OptionError(
                f"{where}: the constructor of {cls.__qualname__} no longer takes the saved arguments: {error}. "
                "Create the object yourself and call restore_from_path"
            ) from error
        last_of = {parameter.kind: name for name, parameter in signature.parameters.items()}
        unnamed = last_of.get(inspect.Parameter.VAR_POSITIONAL, "")  # name of the *args parameter
        others = last_of.get(inspect.Parameter.VAR_KEYWORD, "")  # name of the **kwargs parameter
        names = [name for name in signature.parameters if name not in (unnamed, others)]
        unknown = [name for name in overrides if name not in names]
        if unknown and not others:
            raise OptionError(
                f"{cls.__qualname__} takes no argument {', '.join(map(repr, unknown))}; it takes "
                f"{', '.join(signature.parameters) or 'none'}"
            )
        saved = bound.arguments
        rest = tuple(decoder.decode(value) for value in saved.pop(unnamed, ()))
        saved |= saved.pop(others, {})
        decoded = {name: decoder.decode(value) for name, value in saved.items() if name not in overrides}
        for name, value in decoded.items():
            if name.endswith("device") and isinstance(value, str) and loaded("torch") is not None:
                decoded[name] = available(value)
        given = {**decoded, **overrides}
        every = given | {f"*{index}": value for index, value in enumerate(rest)}
        if missing := [f"{name} ({value.reason})" for name, value in every.items() if isinstance(value, Missing)]:
            problem = f"these arguments of {cls.__qualname__} were not saved; pass them by name"
            raise OptionError(f"{where}: {problem}: {', '.join(missing)}")
        bound.arguments = {name: given.pop(name) for name in names if name in given}
        bound.arguments |= {name: value for name, value in ((unnamed, rest), (others, given)) if value}
        try:
            signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise OptionError(
                f"{where}: {cls.__qualname__} cannot be created from the saved arguments: {error}; pass it by name"
            ) from error
        return construct(cls, bound.args, bound.kwargs, where)

    def _component(self, reference: str) -> Any:
        """Return the component at a path in the saved tree, or a `Missing` if it was not loaded."""
        goal = tuple(segment for segment in reference.split("/") if segment)
        start = self.saved.description.path
        saved = descend(self.saved, goal[len(start) :]) if goal[: len(start)] == start else None
        if saved is None:
            return Missing(f"it is the component {format_component_path(goal)}, which is not being loaded")
        if saved.path not in self.made:
            self.made[saved.path] = self.make(saved, object, {})
        return self.made[saved.path]

    def _nested(self, content: Any) -> Any:
        spec = check_spec(content.get("constructor") if isinstance(content, dict) else content)
        where = str(self.saved.location)
        cls = self.permissions.resolve(content.get("class"), where, made=True)
        if not isinstance(cls, type):
            raise TypeError(f"{content.get('class')!r:.80} is not a class")
        return self._construct(cls, spec, {}, where)
