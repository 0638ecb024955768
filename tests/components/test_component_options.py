"""What a caller asks components for: options of get_state, remote parts, and the part to restore."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.components import Checkpointable
from holdfast.errors import OptionError


class Module(Checkpointable):
    """Gives less of its state for inference, as a module of RLlib does."""

    def __init__(self) -> None:
        self.weight, self.moments = 1.0, 2.0

    def get_state(self, components: Any = None, *, inference_only: bool = False, **_: Any) -> dict[str, Any]:
        return {"weight": self.weight} if inference_only else {"weight": self.weight, "moments": self.moments}


class Modules(Checkpointable):
    def __init__(self) -> None:
        self.p0, self.p1 = Module(), Module()


class Learner(Checkpointable):
    def __init__(self) -> None:
        self.rl_module, self.updates = Modules(), 0


class OwnLearner(Learner):
    def get_state(self, components: Any = None, *, not_components: Any = None, **options: Any) -> dict[str, Any]:
        return {**super().get_state(components, not_components=not_components, **options), "own": 1}


class Plain(Checkpointable):
    updates = 0


@pytest.mark.parametrize("kind", [Learner, OwnLearner])
def test_options_of_get_state_reach_the_components_that_take_them(kind: Any) -> None:
    found = kind().get_state(inference_only=True)
    assert found["rl_module"] == {"p0": {"weight": 1.0}, "p1": {"weight": 1.0}}
    assert kind().get_state()["rl_module"]["p0"] == {"weight": 1.0, "moments": 2.0}
    with pytest.raises(OptionError, match=r"unexpected keyword argument 'inference_only': no component of .*Plain"):
        Plain().get_state(inference_only=True)


class Actor(Checkpointable):
    """Asks another process, which answers when all actors have been asked."""

    __remote__ = True

    def __init__(self, asked: threading.Barrier, broken: bool = False) -> None:
        self.asked, self.broken, self.value = asked, broken, 0

    def get_ctor_args_and_kwargs(self) -> None:
        return None

    def get_state(self, components: Any = None, **_: Any) -> dict[str, Any]:
        self.asked.wait(timeout=20)  # a barrier of one party does not wait
        if self.broken:
            raise ConnectionError("the actor is gone")
        return {"value": self.value}

    def set_state(self, state: Any) -> None:
        self.value = state["value"]


class Local(Actor):
    __remote__ = False

    def get_state(self, components: Any = None, **_: Any) -> dict[str, Any]:
        return {"value": self.value, "thread": threading.current_thread() is threading.main_thread()}


class Group(Checkpointable):
    def __init__(self, *, broken: bool = False, together: int = 4) -> None:
        asked = threading.Barrier(together)
        self.actors = [Actor(asked, broken and number == 2) for number in range(4)]
        self.local = Local(asked)


@pytest.mark.filterwarnings("ignore")
def test_states_of_remote_components_are_asked_for_at_once(tmp_path: Path) -> None:
    group, fresh = Group(), Group()  # a restore asks for the states before it, too
    for number, actor in enumerate(group.actors):
        actor.value = number
    path = group.save_to_path(tmp_path / "group")
    state = group.get_state()
    assert [state[f"actors/{number}"]["value"] for number in range(4)] == [0, 1, 2, 3]
    assert state["local"]["thread"]
    fresh.restore_from_path(path)
    assert [actor.value for actor in fresh.actors] == [0, 1, 2, 3]


def test_the_error_of_a_remote_component_is_that_of_the_save(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the actor is gone"):
        Group(broken=True).save_to_path(tmp_path / "group")
    assert not list(tmp_path.iterdir())


def test_the_directory_of_a_tree_is_not_that_of_its_part(tmp_path: Path) -> None:
    """Both have attributes of the same names, which would be restored without a word."""

    class Member(Checkpointable):
        def __init__(self, updates: int = 0, *, copy: bool = False) -> None:
            self.updates = updates
            if copy:  # a member that was trained with a copy of another of the same name
                self.m1 = Member(updates + 1)

    class League(Checkpointable):
        def __init__(self, updates: int = 0, *, copy: bool = False) -> None:
            self.m1, self.m2, self.updates = Member(updates, copy=copy), Member(), 1

    alone = Member(7, copy=True).save_to_path(tmp_path / "alone")
    whole = League(7, copy=True).save_to_path(tmp_path / "league")
    for path in (alone, f"{whole}/m1"):
        running = League()
        running.updates = 5
        report = running.restore_from_path(path, component="m1")
        assert (running.m1.updates, running.m2.updates, running.updates, report.unused) == (7, 0, 5, ("m1",))
    running = League()
    with pytest.raises(OptionError, match=r"a tree that itself has a component 'm1'.*Pass path='.*league/m1'"):
        running.restore_from_path(whole, component="m1")
    assert running.m1.updates == 0
    for name in ("", "(root)", "/"):
        with pytest.raises(OptionError, match="omit component= to restore all of it"):
            running.restore_from_path(whole, component=name)
