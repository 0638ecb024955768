"""The `Component` protocol, and the `Checkpointable` base class that implements it."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Never, Protocol, Self, runtime_checkable

from ...engine.arrays import Layout
from ...engine.distributed import Coordinator, run_on_primary
from ...engine.errors import BarrierTimeoutError, OptionError, TreeMismatchError
from ...engine.foreign_arguments import refuse_unknown
from ...engine.manager import plain_metrics
from ...engine.pytree import Patterns
from ...engine.storage import Place, as_location
from ..graph import RestoreReport
from .constructor_spec import CtorArguments
from .live import ARGUMENTS, LiveComponent, discovered, live_tree, paths_of
from .names import Names, Selection, format_component_path
from .permissions import Permissions
from .reading import SavedComponent, descend, open_component
from .restoring import TreeConstruction, TreeRestore, kept_values, locate
from .saving import prepare
from .states import (
    call_get_state,
    copied,
    default_state,
    divided,
    fetched,
    inherited,
    overrides,
    prepare_state,
    stored_state,
    takes,
)

_logger = logging.getLogger("holdfast")


@runtime_checkable
class Component(Protocol):
    """An object with state that can be part of a component tree and can have child components."""

    def get_state(self) -> Any:
        """Return the state. It may include the states of child components, although these are saved separately."""

    def set_state(self, state: Any) -> None:
        """Restore a complete or partial state; values that are not in it are left unchanged."""

    def get_checkpointable_components(self) -> Iterable[tuple[str, Any]]:
        """Return the child components with their names; a child can be any object, such as a module or an optimizer."""


class Checkpointable:
    """Base class for components that can be saved to, restored from and constructed from a directory.

    By default, the state of a component is everything reachable from its attributes (tensors, arrays, modules,
    optimizers, numbers, strings, containers, random generators, other objects), and the components below it are the
    `Checkpointable` objects among its attributes, including those in lists and dictionaries. The constructor arguments
    are recorded when the component is created. All methods may be overridden. Attributes that the class lists in
    ``__untracked__`` are not part of the state.

    >>> import tempfile, numpy as np
    >>> class Policy(Checkpointable):
    ...     def __init__(self, size, rate=0.1):
    ...         self.weights, self.rate = np.zeros(size), rate
    >>> policy = Policy(3)
    >>> policy.weights += 1
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = policy.save_to_path(f"{directory}/policy")
    ...     Policy.from_checkpoint(path).weights
    array([1., 1., 1.])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        parent = super().__new__
        component: Self = parent(cls) if parent is object.__new__ else parent(cls, *args, **kwargs)
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__qualname__}() takes no arguments")
        if hasattr(component, "__dict__"):
            vars(component)[ARGUMENTS] = CtorArguments(args, kwargs)
        return component

    def save_to_path(
        self,
        path: Place | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        layout: Layout | None = None,
        use_msgpack: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        coordinator: Coordinator | None = None,
        filesystem: Any = None,
        **unknown: Never,
    ) -> str:
        """Save this component and all components below it, each to its own directory, as one atomic checkpoint.

        With several processes, process 0 saves. The others may also call this method with the same path, in which case
        they wait until process 0 is done.

        Args:
            path: A path or URL (``memory://``, ``s3://``, ``gs://``, ``az://``, ...); None creates a new
                temporary directory.
            state: The state to save instead of the result of ``get_state()``; components missing from it are left out.
            overwrite: Replace an existing component tree. After a crash, either the old or the new tree is intact.
            layout: Sizes of chunks and data files, and the compression of chunks, as in ``hf.Layout(compression=3)``.
            use_msgpack: Store the arrays of each component in a single msgpack file instead of a database.
            step: The step number that ``holdfast ls runs/x`` shows if ``path`` is a directory like ``runs/x/1200``.
            metrics: Metrics to store with the checkpoint, as a mapping from name to number.
            coordinator: The coordinator of the processes. None uses jax.distributed or torch.distributed if either is
                initialized; ``hf.processes.Alone()`` saves the components of this process alone.
            filesystem: The fsspec or pyarrow file system that contains ``path``. The returned URL is valid in all
                processes that have passed an equal file system.

        Returns:
            The path or URL, to pass to ``restore_from_path`` or ``from_checkpoint``.

        Raises:
            UnsupportedLeafError: A state cannot be saved; the message names the value. Nothing was written.
            CheckpointExistsError: Something already exists at the path.
            StorageConflictError: Another save to the same path has started in the meantime.
            StorageError: The storage rejected the write; the previous tree is intact.
            PeerFailedError: With several processes, process 0 failed to save.
        """
        refuse_unknown("save_to_path", unknown, Checkpointable.save_to_path)
        location = None if path is None else as_location(path, filesystem=filesystem, writes=True)
        where = "a temporary directory" if location is None else location.url
        numbers = None if metrics is None else plain_metrics(metrics)
        if step is not None and (type(step) is not int or step < 0):
            raise OptionError(f"step={step!r} must be a whole number, 0 or more")

        def work() -> str:
            temporary = f"{tempfile.gettempdir()}/holdfast-{uuid.uuid4().hex}"
            target = as_location(temporary, writes=True) if location is None else location
            prepared = prepare(self, state=state, use_msgpack=use_msgpack, layout=layout)
            prepared.commit(target, overwrite=overwrite, step=step, metrics=numbers)
            return target.url

        try:
            return str(run_on_primary(f"saving components to {where}", [], work, coordinator))
        except BarrierTimeoutError as error:
            advice = "Also call it on process 0, or save from this process alone, with coordinator=hf.processes.Alone()"
            raise BarrierTimeoutError(f"{error}. {advice}", error.missing) from None

    def restore_from_path(
        self,
        path: Place,
        *,
        component: str | None = None,
        keep: Patterns | None = None,
        strict: bool = False,
        filesystem: Any = None,
        **unknown: Never,
    ) -> RestoreReport:
        """Restore this component and all components below it in place, so that objects keep their identity.

        Args:
            path: The directory of a component tree, or of a component in it.
            component: Restore only the component at this path in the program, such as ``"learner/p1"``. In this case,
                ``path`` must be the directory of the saved component, such as ``<tree>/learner/p0``, not of the tree.
            keep: Path patterns such as ``"**/lr"``; matching values are left unchanged. The path of a value is the path
                of its component followed by its path in the component, such as ``learner/optimizer/groups/0/lr``. A
                pattern that matches nothing is an error.
            strict: Raise an error if a component or value exists only in the program or only in the checkpoint.
            filesystem: The fsspec or pyarrow file system that contains ``path``.

        Returns:
            A report on the restored and unrestored components and values.

        Raises:
            CheckpointNotFoundError: There is no saved component at the path.
            DamagedCheckpointError: A state fails verification; nothing was changed.
            TreeMismatchError: There is no such component, or a state does not fit; nothing was changed. With
                ``strict``, also raised after the restore if program and checkpoint do not match.
        """
        refuse_unknown("restore_from_path", unknown, Checkpointable.restore_from_path)
        live = live_tree(self)
        target = live if component is None else locate(live, component)
        kept = kept_values(keep)
        saved = open_component(as_location(path, filesystem=filesystem))
        if component is not None:
            _refuse_tree_above(target, saved)
        return TreeRestore(target, saved, strict=strict, keep=kept).run()

    @classmethod
    def from_checkpoint(
        cls,
        path: Place,
        *,
        trust: bool = False,
        allowed: Iterable[Any] | str = (),
        renamed: Mapping[str, Any] | None = None,
        fallback: bool = False,
        strict: bool = False,
        filesystem: Any = None,
        **overrides: Any,
    ) -> Self:
        """Construct a component from its directory, with the saved class, arguments and state.

        The saved class must be this class or a subclass. Component classes that are already imported need no
        permission. All other classes and functions that the checkpoint names must be allowed; otherwise, nothing is
        imported or constructed.

        Args:
            path: The directory of a component tree, or of a component in it.
            trust: Import everything that the checkpoint names. Use only if you trust the checkpoint like your own code.
            allowed: Classes and functions that the checkpoint may name, or patterns of import paths such as
                ``"mygame.*"``, in addition to any given to :func:`~holdfast.components.allow`. A pattern allows objects
                that are defined in matching modules, but not objects that these modules import from elsewhere.
            renamed: Maps import paths in the checkpoint to the current classes or their import paths.
            fallback: Construct a component of this class from the overrides alone if the saved class no longer exists.
            strict: Raise an error if a component or value exists only in the program or only in the checkpoint.
            filesystem: The fsspec or pyarrow file system that contains ``path``.
            **overrides: Constructor arguments by name, which replace the saved ones. They also take precedence over
                plain values of the same name in the state, such as attributes and optimizer options.

        Returns:
            The component.

        Raises:
            NotAllowedError: The checkpoint names a class or function that is not allowed; nothing was imported.
            OptionError: The saved class does not derive from this one, or its constructor does not accept an override.
            CheckpointNotFoundError: There is no saved component at the path.
            DamagedCheckpointError: The component at the path fails verification.
        """
        permissions = Permissions(trust=trust, allowed=allowed, renamed=renamed, base=Checkpointable)
        saved = open_component(as_location(path, filesystem=filesystem))
        component = TreeConstruction(saved, cls, permissions, fallback).run(overrides, strict=strict)
        assert isinstance(component, cls)
        return component

    # ---- methods to override

    @inherited
    def get_state(
        self, components: Names | None = None, *, not_components: Names | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return a snapshot of the state; later changes do not affect it.

        Args:
            components: The components below this one to include: a path such as ``"learner/p0"``, a pattern such as
                ``"learner/*"``, or a list; None includes all. Parents of selected components add only their own state.
            not_components: The components to exclude; takes precedence over ``components``.
            **options: Arguments such as ``inference_only=True``. Each component below this one that has its own
                ``get_state`` receives the arguments that it accepts.

        Returns:
            The component's own state and, under their names, the states of the components below it.

        Raises:
            TreeMismatchError: There is no such component; the message lists the existing ones.
            OptionError: No component accepts one of the options.
        """
        live, own_name = live_tree(self), type(self).__qualname__
        saved_under = {path: component.path for path, component in paths_of(live).items()}
        selection = Selection(components, not_components, saved_under, own_name)
        with_own_state = [component.value for component in live.walk() if overrides(component.value, "get_state")]
        for name in options if not overrides(self, "get_state") else ():
            if not any(takes(component, name) for component in with_own_state):
                raise OptionError(
                    f"get_state() got an unexpected keyword argument {name!r}: no component of {own_name} has a "
                    "get_state() of its own that takes it"
                )
        return _take(live, selection, options)

    @inherited
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a complete or partial state from :meth:`get_state`; values that are not in it are left unchanged.

        Args:
            state: The state to restore.

        Raises:
            TreeMismatchError: A shape or dtype does not match, or no value in the state matches.
        """
        _give(live_tree(self), state)

    def get_checkpointable_components(self) -> Sequence[tuple[str, Any]]:
        """Return the components among the attributes, including those in lists and dictionaries, with their names."""
        return discovered(self)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the constructor arguments for recreating this object, or None if they are unknown."""
        kept = getattr(self, "__dict__", {}).get(ARGUMENTS)
        return (kept.args, dict(kept.kwargs)) if isinstance(kept, CtorArguments) else None

    def get_metadata(self) -> dict[str, Any]:
        """Return JSON data to add to ``metadata.json``, which also contains the versions, git commit and time."""
        return {}


def _refuse_tree_above(target: LiveComponent, saved: SavedComponent) -> None:
    """Raise OptionError if the path of a whole tree was passed instead of the path of the component."""
    there = descend(saved, target.path)
    own_names = {path[:1] for path, _ in target.named()}
    names = [type(component.value).__qualname__ for component in (target, target.root)]
    is_part = bool(saved.description.path) or (saved.description.type.rpartition(":")[2] == names[0] != names[1])
    if there is not None and target.path[:1] not in own_names and not is_part:
        name = format_component_path(target.path)
        raise OptionError(
            f"{saved.location} is a tree that itself has a component {name!r}, but component= names the part of the "
            f"program that gets the state at path. Pass path={there.location.url!r}, or omit component= to "
            "restore the whole tree; nothing was changed"
        )


def _take(live: LiveComponent, selection: Selection, options: Mapping[str, Any]) -> dict[str, Any]:
    def ask(component: LiveComponent) -> Any:
        chosen, excluded = selection.below(component.path)
        return call_get_state(component.value, components=chosen, not_components=excluded, **options)

    def selected(component: LiveComponent) -> list[LiveComponent]:
        return [child for child in component.children if selection.leads_to(child.path)]

    def owned(component: LiveComponent) -> Iterator[LiveComponent]:
        for child in selected(component):
            yield from (child,) if overrides(child.value, "get_state") else owned(child)

    def take(component: LiveComponent) -> dict[str, Any]:
        state: dict[str, Any] = copied(default_state(component))
        for child in selected(component):
            state[child.name] = of_own(child) if overrides(child.value, "get_state") else take(child)
        return state

    with fetched(owned(live), ask) as of_own:
        return take(live)


def _give(component: LiveComponent, state: Any) -> None:
    """Set the children's states, then the component's own state, then the states of newly created children."""
    name = type(component.value).__qualname__
    if not isinstance(state, Mapping):
        raise TreeMismatchError(f"{name}: expected a dictionary, found {type(state).__name__}")
    own_state, below = divided(component, state)
    _give_all(below)
    if own_state:
        report = prepare_state(component, stored_state(own_state))()
        now = live_tree(component.value, component.path, component.name, component.above)
        _give_all(divided(now, own_state)[1])
        names = {child.name for child in now.children}
        unused = [path for path in report.unused if path.split("/")[0] not in names]
        if unused:
            _logger.warning("%s has no place for these values: %s", name, ", ".join(unused))


def _give_all(states: list[tuple[LiveComponent, Any]]) -> None:
    for component, state in states:
        if overrides(component.value, "set_state"):
            component.value.set_state(state)
        else:
            _give(component, state)
