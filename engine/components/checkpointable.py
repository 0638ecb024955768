"""What a component offers: a mixin that does all of it, and the protocol behind it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from ..checkpointer import Place
from ..coordination import Coordinator
from ..errors import TreeMismatchError
from ..graph import Patterns
from ..item import Layout
from .building import build
from .live import RECIPE, LiveComponent, discovered, live_tree
from .names import Names, Selection, written
from .permissions import Permissions
from .preparing import kept_arguments
from .reading import open_component
from .recipes import CtorArguments
from .report import ComponentReport
from .restoring import restore
from .saving import save
from .states import call_get_state, default_state, inherited, overrides, set_default_state

_logger = logging.getLogger("holdfast")


@runtime_checkable
class Component(Protocol):
    """What anything needs to be a component of a tree: a state, and the components below it."""

    def get_state(self) -> Any:
        """Returns the state, with or without those of the components below, which are saved by themselves."""
        ...

    def set_state(self, state: Any) -> None:
        """Takes a state, or a part of it: what is not in it stays as it is."""
        ...

    def get_checkpointable_components(self) -> Iterable[tuple[str, Any]]:
        """Returns the components below by name: objects like this one, modules, optimizers, or any other objects."""
        ...


class Checkpointable:
    """Base of components: objects that are saved into a directory, restored from it, and made anew from it.

    As it is, a component's state is what can be reached from its attributes (tensors, arrays, modules, optimizers,
    numbers, text, containers, random generators, other objects), and its components are the attributes that are
    `Checkpointable` themselves, also inside of lists and dictionaries. Its constructor's arguments are kept when it is
    made. Each method may be overridden. Names in a class's ``__untracked__`` are not part of the state.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102 - keeps the arguments; also called for copies
        parent = super().__new__
        found: Self = parent(cls) if parent is object.__new__ else parent(cls, *args, **kwargs)
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__qualname__}() takes no arguments")
        if hasattr(found, "__dict__"):
            vars(found)[RECIPE] = CtorArguments(args, kwargs)
        return found

    # ---- to and from a path

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
    ) -> str:
        """Saves this component and all below it, each into a directory of its own; one atomic checkpoint.

        In a program of several processes it is process 0 that saves. The others may call this, too, with the same path:
        they wait until that is done.

        Args:
            path: Where: a path or a URL (``memory://``, ``s3://``, ``gs://``); None makes a new temporary directory.
            state: What to save in the place of ``get_state()``; of the components below only those that are in it.
            overwrite: Replace a tree of components that is there; a crash leaves the old one or the new one, whole.
            layout: Sizes of chunks and data files, and how chunks are compressed: ``hf.Layout(compression=3)``.
            use_msgpack: Keep a component's arrays in one msgpack file, rather than in a database.
            step: The number of the step, for ``holdfast ls`` on a directory of several: ``runs/x/1200`` for step 1200.
            metrics: Metrics to keep with it: numbers by name.
            coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of
                them is initialized; ``hf.Alone()`` saves what this process has, whichever it is.

        Returns:
            The path or URL, which can be given to everything that restores.

        Raises:
            UnsupportedLeafError: A state cannot be saved; names what. Nothing was written.
            CheckpointExistsError: Something is there already.
            StorageConflictError: Another save to the same path has begun since.
            StorageError: The storage refused; what was there before is whole.
            PeerFailedError: Process 0 of several could not save.
        """
        return save(
            self,
            path,
            state=state,
            overwrite=overwrite,
            layout=layout,
            use_msgpack=use_msgpack,
            step=step,
            metrics=metrics,
            coordinator=coordinator,
        )

    def restore_from_path(
        self, path: Place, *, component: str | None = None, keep: Patterns | None = None, strict: bool = False
    ) -> ComponentReport:
        """Restores this component and all below it, in place: objects stay the objects they are.

        Args:
            path: The directory of a tree of components, or of one of its parts.
            component: Restores only this one of the components below, such as ``"learner/p1"``, from what was saved at
                ``path``, whatever that was called there.
            keep: Patterns of paths such as ``"**/lr"``: values that match stay as they are. A path is that of the
                component and that of the value within it: ``learner/optimizer/groups/0/lr``. One that matches nothing
                is an error.
            strict: Whether components and values that only the program or only the checkpoint has are errors.

        Returns:
            What was restored and what was not.

        Raises:
            CheckpointNotFoundError: Nothing was saved there.
            DamagedCheckpointError: A state does not verify; nothing was changed.
            TreeMismatchError: There is no such component; or a state does not fit, and nothing was changed. Or, as
                ``strict`` asks, that there are values which only one side has; those of both were restored.
        """
        return restore(self, path, component=component, keep=keep, strict=strict)

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
        **overrides: Any,
    ) -> Self:
        """Makes a component from its directory: of the class and with the arguments that were saved, and their state.

        The saved class may be this one or one that derives from it. Classes of components that are loaded need no
        permission; whatever else a checkpoint names has to be allowed, or nothing is imported and nothing is made.

        Args:
            path: The directory of a tree of components, or of one of its parts.
            trust: Import whatever the checkpoint names. Only for checkpoints from a place that you trust as your code.
            allowed: Classes and functions that the checkpoint may name, or patterns of import paths such as
                ``"mygame.*"``; besides those of :func:`~holdfast.components.allow`. A pattern allows what is defined
                in such modules, and nothing that they import from others.
            renamed: For import paths in the checkpoint the class, or its import path, that they stand for now.
            fallback: Make one of this class, with the overrides alone, where the saved class is not known any more.
            strict: Whether components and values that only one side has are errors.
            **overrides: Constructor arguments by name, in the place of the saved ones. They win over plain values of
                the same name in the state, too: attributes, and options of optimizers.

        Returns:
            The component.

        Raises:
            NotAllowedError: The checkpoint names what is not allowed; nothing was imported.
            OptionError: The saved class does not derive from this one; or an override is none of its arguments.
            CheckpointNotFoundError: Nothing was saved there.
            DamagedCheckpointError: What is there does not verify.
        """
        permissions = Permissions(trust=trust, allowed=allowed, renamed=renamed, base=Checkpointable)
        saved = open_component(path)
        found = build(cls, saved, permissions=permissions, fallback=fallback, strict=strict, overrides=overrides)
        assert isinstance(found, cls)
        return found

    # ---- what may be overridden

    @inherited
    def get_state(self, components: Names | None = None, *, not_components: Names | None = None) -> dict[str, Any]:
        """Takes the state: a snapshot, which later changes do not touch.

        Args:
            components: Only these of the components below, such as ``"learner/p0"``, a list of such paths, or a pattern
                such as ``"learner/*"``; None is all. What is on the way to them comes without the rest below it.
            not_components: None of these; this wins over ``components``.

        Returns:
            The component's own state, and under their names the states of the components below.

        Raises:
            TreeMismatchError: There is no such component; names those that there are.
        """
        live = live_tree(self)
        known = [one.path for one in live.walk()]
        selection = Selection(components, not_components, known, type(self).__qualname__)
        return _taken(live, selection)

    @inherited
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes a state that :meth:`get_state` returned, or a part of it: what is not in it stays as it is.

        Args:
            state: The state.

        Raises:
            TreeMismatchError: Shapes or dtypes do not fit, or nothing fits at all.
        """
        _give(live_tree(self), state)

    def get_checkpointable_components(self) -> Sequence[tuple[str, Any]]:
        """Returns the components below by name: attributes that are components, also in lists and dictionaries."""
        return discovered(self)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the arguments that make such an object anew, or None where they are not known."""
        kept = kept_arguments(self)
        return None if kept is None else (kept.args, dict(kept.kwargs))

    def get_metadata(self) -> dict[str, Any]:
        """Returns facts for people, as JSON, that go into ``metadata.json`` beside versions, commit and time."""
        return {}


def _taken(one: LiveComponent, selection: Selection) -> dict[str, Any]:
    """Takes the state of a component in the way that all do that have no other, and those of the components below."""
    state = default_state(one, snapshot=True)
    for child in one.children:
        if not selection.leads_to(child.path):
            continue
        if overrides(child.value, "get_state"):
            state[child.name] = call_get_state(child.value, *selection.below(child.path, written))
        else:
            state[child.name] = _taken(child, selection)
    return state


def _give(one: LiveComponent, state: Any) -> None:
    """Gives states to the components below one, to itself, and to those that exist only since then."""
    if not isinstance(state, Mapping):
        raise TreeMismatchError(f"{type(one.value).__qualname__}: expected a dictionary, found {type(state).__name__}")
    known = {child.name for child in one.children}
    _give_children(one, state, frozenset())
    own = {key: value for key, value in state.items() if key not in known}
    if own:
        report = set_default_state(one, own)
        born = live_tree(one.value)
        names = {child.name for child in born.children}
        _give_children(born, state, known)
        unused = [name for name in report.unused if name.split("/")[0] not in names]
        if unused:
            _logger.warning("%s has no place for these values: %s", type(one.value).__qualname__, ", ".join(unused))


def _give_children(one: LiveComponent, state: Mapping[str, Any], but: Collection[str]) -> None:
    for child in one.children:
        if child.name in state and child.name not in but:
            if overrides(child.value, "set_state"):
                child.value.set_state(state[child.name])
            else:
                _give(child, state[child.name])
