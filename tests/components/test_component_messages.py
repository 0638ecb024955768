"""Common mistakes and their messages: what was expected, what was found, and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler


class Policy(Checkpointable, nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.l1 = nn.Linear(size, 2)


class Learner(Checkpointable):
    def __init__(self, names: tuple[str, ...] = ("p0", "p1"), rate: float = 0.1) -> None:
        self.policies = {name: Policy() for name in names}
        self.rate = rate
        self.updates = 0


class Brain(Checkpointable, nn.Module):
    """A policy under its new name, with another constructor."""

    def __init__(self, *, act: Callable[..., Any]) -> None:
        super().__init__()
        self.l1 = nn.Linear(3, 2)


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory of all that one may be taken for another."""
    place = tmp_path_factory.mktemp("things")
    learner = Learner()
    learner.updates = 7
    learner.save_to_path(place / "run")
    learner.save_to_path(place / "many" / "7")
    hf.save(place / "tree", {"a": np.ones(3)})
    torch.save(Policy().state_dict(), place / "policy.pt")
    (place / "fails_here.py").write_text("raise ValueError('no such device')")
    with hf.CheckpointManager(place / "managed", {"learner": hf.Checkpointer(ComponentCheckpointHandler())}) as manager:
        manager.save(7, {"learner": learner})
    return place


@pytest.fixture(autouse=True)
def _here(things: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(things)
    monkeypatch.syspath_prepend(things)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def restored(path: str, into: Any = None, **arguments: Any) -> Any:
    return (into or Learner()).restore_from_path(path, **arguments)


def made(kind: Any, path: str, **arguments: Any) -> Any:
    return kind.from_checkpoint(path, **arguments)


POLICY = f"{Policy.__module__}:Policy"
# What is done, and what the error says of it, for each class of errors.
NOT_FOUND: dict[str, tuple[Callable[[], Any], str]] = {
    "path of a component": (lambda: restored("run/p0"), "~/run has no such component; it has policies/p0, policies/p1"),
    "directory between": (lambda: restored("run/policies"), "no such component; below it are policies/p0, policies/p1"),
    "state": (
        lambda: restored("run/policies/p0/state"),
        "this folder holds a component's state; give the component's directory, one level up",
    ),
    "file of it": (lambda: restored("run/metadata.json"), "this is a file, but a component is a directory"),
    "file of torch": (lambda: restored("policy.pt", Policy()), "Read files of other libraries with hf.load"),
    "nothing": (lambda: restored("ru"), "there is nothing at this path"),
    "nothing in memory": (lambda: restored("memory://test_messages/none"), "there is nothing at this path"),
    "tree of arrays": (lambda: restored("tree"), "is not a component tree, its items are state; read it with hf.load"),
    "directory of trees": (lambda: restored("many"), "there is one at ~/many/7"),
    "directory of a manager": (lambda: restored("managed"), "there is one at ~/managed/7/learner"),
    "step of a manager": (lambda: made(Learner, "managed/7"), "is a tree of components: give ~/managed/7/learner"),
}
MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "component": (
        lambda: restored("run", component="p0"),
        "Learner has no component 'p0'; it has 'policies/p0', 'policies/p1'",
    ),
    "shape": (
        lambda: restored("run/policies/p0", Policy(5)),
        "these values do not fit Policy; nothing was changed. Change the program, or name values to keep "
        "with restore_from_path(keep=...):\n  l1/weight: expected float32[2, 5] (program), "
        "found float32[2, 3] (checkpoint)",
    ),
    "shape of a state": (
        lambda: Policy().set_state({"l1": {"bias": torch.zeros(9)}}),
        "the state: these values do not fit Policy; nothing was changed. Change the program, or leave them out:",
    ),
    "a state of another": (
        lambda: Policy().set_state({"typo": 1}),
        "the state: nothing in it matches Policy.*It has 'typo'",
    ),
    "a number as a state": (lambda: Policy().set_state(5), "expected a dictionary, found int"),  # type: ignore[arg-type]
    "another component": (
        lambda: restored("run", Policy()),
        "nothing in it matches Policy, and nothing was changed. It has 'rate', 'updates'; the component has 'l1/bias'",
    ),
    "keep": (
        lambda: restored("run", keep=["**/rate", "**/learning_rate"]),
        "keep='../learning_rate' matches no leaf; the checkpoint has .*; nothing was changed. A path is the ",
    ),
    "keep of nothing": (lambda: restored("run", keep=""), "keep='' matches no leaf"),
}
NOT_VALID: dict[str, tuple[Callable[[], Any], str]] = {
    "keep of another kind": (lambda: restored("run", keep=5), "keep=5 must be a pattern"),
    "another class": (
        lambda: made(Policy, "run"),
        "run holds a tests.components.test_component_messages:Learner, which is not a .*:Policy: call from_check",
    ),
    "override": (
        lambda: made(Learner, "run", learning_rate=1),
        "Learner takes no argument 'learning_rate'; it takes names, rate",
    ),
    "import path": (
        lambda: made(Brain, "run/policies/p0", renamed={"game.Policy": Brain}),
        "'game.Policy' is not an import path; write 'package.module:Name'",
    ),
    "module that is gone": (
        lambda: made(Checkpointable, "run/policies/p0", renamed={POLICY: "no_such_module:Brain"}, trust=True),
        "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'. If its name has changed, pass",
    ),
    "module that fails": (
        lambda: made(Checkpointable, "run/policies/p0", renamed={POLICY: "fails_here:Brain"}, trust=True),
        "fails_here:Brain, which cannot be imported: ValueError: no such device",
    ),
    "new argument": (
        lambda: made(Brain, "run/policies/p0", renamed={POLICY: Brain}),
        "Brain cannot be created from the saved arguments: missing a required .*argument: 'act'; pass it by name",
    ),
    "allowed class": (
        lambda: made(Learner, "run", allowed=Policy),
        "Policy'> must be a list of classes, functions and patterns of import paths",
    ),
    "allowed number": (
        lambda: made(Learner, "run", allowed=[5]),
        "allowed=5 is not a class, a function or a pattern of import paths",
    ),
    "state of another kind": (
        lambda: Learner().save_to_path("new", state=[1]),  # type: ignore[arg-type]
        r"state= must be a dictionary like that of get_state\(\), found list",
    ),
    "filesystem": (lambda: Policy().save_to_path("new", filesystem=5), "filesystem=builtins.int is neither"),
    "filesystem of a restore": (lambda: restored("run", filesystem=5), "filesystem=builtins.int is neither"),
}
TAKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "over a tree": (lambda: Learner().save_to_path("run"), "~/run.*overwrite=True"),
    "over a part": (
        lambda: Policy().save_to_path("run/policies/p0", overwrite=True),
        "run/policies/p0 is a part of the tree at ~/run, which this save would break; save to another path",
    ),
    "over an item": (
        lambda: Learner().save_to_path("managed/7/learner", overwrite=True),
        "~/managed/7/learner is an item of the checkpoint at ~/managed/7, which this save would break",
    ),
    "over another checkpoint": (
        lambda: Learner().save_to_path("tree", overwrite=True),
        "the checkpoint there is not a tree of components; choose another path",
    ),
}
OTHERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lost slash": (lambda: restored("s3:/bucket/run"), hf.errors.InvalidLocationError, "pass URLs as str"),
    "scheme": (lambda: Learner().save_to_path("s4://bucket/run"), hf.errors.InvalidLocationError, "s3://bucket/name"),
    "renamed to a class that is not allowed": (
        lambda: made(Checkpointable, "run/policies/p0", renamed={POLICY: "no_such_module:Brain"}),
        hf.errors.NotAllowedError,
        ":Policy, now no_such_module:Brain, which is not allowed: nothing was imported",
    ),
    "no component": (
        lambda: hf.Checkpointer(ComponentCheckpointHandler()).save("new", {"a": 1}),
        hf.errors.UnsupportedLeafError,
        "the component is a dict, which has no attributes that could be restored in place",
    ),
}
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{name: (work, hf.CheckpointNotFoundError, says) for name, (work, says) in NOT_FOUND.items()},
    **{name: (work, hf.TreeMismatchError, says) for name, (work, says) in MISFITS.items()},
    **{name: (work, hf.errors.OptionError, says) for name, (work, says) in NOT_VALID.items()},
    **{name: (work, hf.CheckpointExistsError, says) for name, (work, says) in TAKEN.items()},
    **OTHERS,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, things: Path) -> None:
    work, error, message = MISTAKES[mistake]
    before = sorted(things.rglob("*"))
    with pytest.raises(error) as raised:
        work()
    said = str(raised.value).replace(str(things), "~")
    assert message in said or re.search(message, said), said
    assert sorted(things.rglob("*")) == before


class Part(Checkpointable):
    def __init__(self) -> None:
        self.value = 1


class Around(Checkpointable):
    def __init__(self, part: Part) -> None:
        self.part = part


class Loud(Checkpointable):
    def __init__(self) -> None:
        raise ValueError("there is no display") from OSError("x11")


@pytest.mark.parametrize("kind", [Part, Around], ids=["the component", "an argument of it"])
def test_a_constructor_that_raises_says_whose_it_was(kind: Any, tmp_path: Path) -> None:
    path = (Around(Part()) if kind is Around else Part()).save_to_path(tmp_path / "x")
    with pytest.raises(ValueError, match="there is no display") as raised:
        Checkpointable.from_checkpoint(path, allowed=[Around], renamed={f"{Part.__module__}:Part": Loud})
    assert raised.value.__notes__[0].startswith("raised by the constructor of Loud, called with the arguments in ")
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("keep", ["**/nothing", ["updates", "nothing"]], ids=str)
def test_what_is_refused_changes_nothing(keep: Any) -> None:
    learner = Learner()
    weight = learner.policies["p0"].l1.weight.detach().clone()
    with pytest.raises(hf.TreeMismatchError, match="nothing was changed"):
        learner.restore_from_path("run", keep=keep)
    assert learner.updates == 0
    assert torch.equal(learner.policies["p0"].l1.weight, weight)


def test_what_is_kept_and_what_is_strict() -> None:
    learner: Any = Learner(names=("p0",))
    report = learner.restore_from_path("run", keep="policies/p1/**")  # which is yet to be made
    assert (report.unused, learner.updates) == (("policies/p1",), 7)

    policy = Policy(5)
    bias = policy.l1.bias.detach().clone()
    report = policy.restore_from_path("run/policies/p0", keep="**/weight")  # which does not fit
    assert report.restored == ("(root)",)
    assert policy.l1.weight.shape == (2, 5)
    assert not torch.equal(policy.l1.bias, bias)

    learner = Learner()
    learner.fresh = 5  # which the checkpoint does not have
    with pytest.raises(hf.TreeMismatchError, match=r"strict=True\); what both have was restored:\n.*fresh"):
        learner.restore_from_path("run", strict=True)
    assert learner.updates == 7
