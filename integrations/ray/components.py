"""Components that are constructed, saved, and restored in Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.stateful import answer_of_actor
from ..components import Checkpointable


class RemoteComponent(Checkpointable):
    """A component of :mod:`holdfast.components` that lives in a Ray actor.

    The actor holds the state and performs saves and restores. The states of all remote components in a tree are
    requested concurrently. ``from_checkpoint`` starts a new actor with the same class, arguments, and options.

    ::

        class Team(Checkpointable):
            def __init__(self, size: int) -> None:
                self.runners = [RemoteComponent(Runner, seed) for seed in range(size)]


        steps = ray.get([runner.actor.step.remote() for runner in team.runners])
        team.save_to_path("runs/team")

    Args:
        kind: The class to instantiate in the actor, such as a component class. It must have the methods ``get_state()``
            and ``set_state(state)``, and must not be wrapped by ``ray.remote``.
        *args: Positional arguments for the constructor.
        options: Ray actor options, such as ``{"num_cpus": 1}``.
        **kwargs: Keyword arguments for the constructor.

    Attributes:
        actor: The actor handle.
    """

    __remote__ = True
    __untracked__ = ("actor",)

    def __init__(self, kind: type, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        import ray

        remote: Any = ray.remote(kind)
        self.actor: Any = remote.options(**(options or {})).remote(*args, **kwargs)

    def get_state(self, components: Any = None, *, not_components: Any = None, **options: Any) -> Any:
        """Return the state of the object in the actor.

        Args:
            components: As in ``Checkpointable.get_state``; passed to the object unless it is None.
            not_components: As in ``Checkpointable.get_state``; passed to the object unless it is None.
            **options: Further options to pass to the object.
        """
        given = {"components": components, "not_components": not_components}
        options |= {name: names for name, names in given.items() if names is not None}
        return answer_of_actor(self.actor, self.actor.get_state.remote(**options))

    def set_state(self, state: Any) -> None:
        """Set the state of the object in the actor.

        Args:
            state: A state returned by ``get_state``.
        """
        answer_of_actor(self.actor, self.actor.set_state.remote(state))
