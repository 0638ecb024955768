"""Components that share a policy: in every layout, with every library, a restored training continues bit for bit."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it has no types
import pytest
import torch
from flax import nnx
from tests.versions import nnx_update

import holdfast as hf
from holdfast.components import Checkpointable
from holdfast.engine.storage import as_location

# ---- policies, and how each library trains one: the optimizer is the attribute `optimizer` of some component


def layers(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class PlainPolicy(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = layers(seed)


class TorchPolicy(Checkpointable, PlainPolicy):
    """A module that is one."""


class TorchHolder(Checkpointable):
    def __init__(self, seed: int) -> None:
        self.net = layers(seed)


class NnxPolicy(Checkpointable, nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)  # whose random stream is a part of the state
        self.second = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, inputs: Any) -> Any:
        return self.second(self.drop(jnp.tanh(self.first(inputs))))


class OptaxPolicy(Checkpointable):
    def __init__(self, seed: int) -> None:
        first, second = jax.random.split(jax.random.key(seed))
        self.params = {"first": jax.random.normal(first, (3, 4)), "second": jax.random.normal(second, (4, 1))}


class Library(Protocol):
    def policy(self, seed: int) -> Any: ...

    def optimizer(self, policy: Any) -> Any: ...

    def update(self, policy: Any, holder: Any, inputs: Any) -> None: ...

    def values(self, policy: Any, optimizer: Any) -> list[Any]: ...


class Torch:
    def __init__(self, policy: Callable[[int], Any]) -> None:
        self.policy = policy

    def optimizer(self, policy: Any) -> Any:
        return torch.optim.Adam(policy.net.parameters(), lr=0.01)

    def update(self, policy: Any, holder: Any, inputs: Any) -> None:
        holder.optimizer.zero_grad()
        policy.net(torch.from_numpy(inputs)).square().mean().backward()
        holder.optimizer.step()

    def values(self, policy: Any, optimizer: Any) -> list[Any]:
        parameters = list(policy.net.parameters())
        moments = [value for one in parameters for value in optimizer.state[one].values()]
        return [one.detach().numpy().copy() for one in parameters + moments]


class Nnx:
    policy = NnxPolicy

    def optimizer(self, policy: Any) -> Any:
        return nnx.Optimizer(policy, optax.adam(0.01), wrt=nnx.Param)

    def update(self, policy: Any, holder: Any, inputs: Any) -> None:
        gradients = nnx.grad(lambda one: (one(inputs) ** 2).mean())(policy)
        nnx_update(holder.optimizer, policy, gradients)

    def values(self, policy: Any, optimizer: Any) -> list[Any]:
        found = [*jax.tree.leaves(nnx.state(policy)), *jax.tree.leaves(nnx.state(optimizer))]
        is_key = [jnp.issubdtype(one.dtype, jax.dtypes.prng_key) for one in found]
        return [np.asarray(jax.random.key_data(one) if key else one) for one, key in zip(found, is_key, strict=True)]


class Optax:
    policy = OptaxPolicy
    tx = optax.adam(0.01)

    def optimizer(self, policy: Any) -> Any:
        return self.tx.init(policy.params)

    def update(self, policy: Any, holder: Any, inputs: Any) -> None:
        def loss(params: Any) -> Any:
            return ((jnp.tanh(inputs @ params["first"]) @ params["second"]) ** 2).mean()

        updates, holder.optimizer = self.tx.update(jax.grad(loss)(policy.params), holder.optimizer)
        policy.params = optax.apply_updates(policy.params, updates)

    def values(self, policy: Any, optimizer: Any) -> list[Any]:
        return [np.asarray(one) for one in jax.tree.leaves((policy.params, optimizer))]


LIBRARIES: dict[str, Library] = {
    "torch": Torch(TorchPolicy),
    "torch_holder": Torch(TorchHolder),
    "torch_plain": Torch(PlainPolicy),
    "nnx": Nnx(),
    "optax": Optax(),
}


# ---- layouts


class Actor(Checkpointable):
    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.plays = 0


class Learner(Checkpointable):
    def __init__(self, library: str, policy: Any) -> None:
        self.policy = policy
        self.optimizer = LIBRARIES[library].optimizer(policy)


class Alone(Checkpointable):
    def __init__(self, library: str, policy: Any) -> None:
        self.optimizer = LIBRARIES[library].optimizer(policy)


class Deep(Checkpointable):
    def __init__(self, library: str, policy: Any) -> None:
        self.inner = Alone(library, policy)


# The attributes of trainers, in the order in which a layout makes them.
PARTS: dict[str, Callable[[str, Any], Any]] = {
    "policy": lambda library, policy: policy,
    "behaviour": lambda library, policy: policy,
    "league": lambda library, policy: [policy],
    "actor": lambda library, policy: Actor(policy),
    "learner": Learner,
    "alone": Alone,
    "deep": Deep,
    "optimizer": lambda library, policy: LIBRARIES[library].optimizer(policy),
}
# The parts of a trainer, all attributes that are the policy, and the holder of the optimizer.
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "parent and learner": (("policy", "learner"), ("policy", "learner.policy"), "learner"),
    "learner and parent": (("learner", "policy"), ("policy", "learner.policy"), "learner"),
    "alias": (("policy", "behaviour", "optimizer"), ("policy", "behaviour"), "itself"),
    "alias in a list": (("league", "policy", "learner"), ("policy", "first", "learner.policy"), "learner"),
    "siblings": (("actor", "learner"), ("actor.policy", "learner.policy"), "learner"),
    "optimizer alone": (("alone", "policy"), ("policy",), "alone"),
    "optimizer beside an actor": (("actor", "deep"), ("actor.policy",), "deep.inner"),
    "optimizer in the parent": (("actor", "optimizer"), ("actor.policy",), "itself"),
    "optimizer as a component": (("policy", "optimizer"), ("policy",), "itself"),
    "actor first": (("actor", "policy", "alone"), ("actor.policy", "policy"), "alone"),
    "policy first": (("policy", "actor", "alone"), ("actor.policy", "policy"), "alone"),
}


class Trainer(Checkpointable):
    policy: Any
    learner: Any
    itself = property(lambda self: self)
    first = property(lambda self: self.league[0])

    def __init__(self, layout: str, library: str, seed: int = 0) -> None:
        self.layout, self.library, self.steps = layout, library, 0
        policy = LIBRARIES[library].policy(seed)
        for name in LAYOUTS[layout][0]:
            setattr(self, name, PARTS[name](library, policy))

    def train(self, steps: int) -> list[Any]:
        library, (_, policies, holder) = LIBRARIES[self.library], LAYOUTS[self.layout]
        for _ in range(steps):
            inputs = np.random.default_rng(self.steps).normal(size=(5, 3)).astype(np.float32)
            library.update(attrgetter(policies[-1])(self), attrgetter(holder)(self), inputs)
            self.steps += 1
        found = [attrgetter(path)(self) for path in policies]
        assert all(policy is found[0] for policy in found)
        return library.values(found[0], attrgetter(holder)(self).optimizer)


class Naming(Trainer):
    """Names its optimizer as a component."""

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in ("policy", "optimizer")]


CASES = [
    pytest.param(layout, library, marks=[] if library == "torch" or layout == "optimizer alone" else pytest.mark.sweep)
    for layout, library in itertools.product(list(LAYOUTS)[:-2], LIBRARIES)
    if (layout, library) != ("optimizer as a component", "optax")  # a tuple is no component
]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(("layout", "library"), CASES)
def test_training_goes_on_bit_for_bit(layout: str, library: str, place: str) -> None:
    kind = Naming if layout == "optimizer as a component" else Trainer
    trainer = kind(layout, library)
    trainer.train(2)
    path = trainer.save_to_path(place)
    state = trainer.get_state()
    expected = trainer.train(1)
    fresh, used, given = (kind(layout, library, seed) for seed in (1, 2, 3))
    used.train(1)
    for running in (fresh, used):
        report = running.restore_from_path(path, strict=True)
        assert report.complete
    given.set_state(state)
    for running in (fresh, used, given, kind.from_checkpoint(path, strict=True)):
        assert same(running.train(1), expected)


# ---- parts of such trees


def test_a_learner_saved_alone_goes_on_within_a_trainer(place: str) -> None:
    trainer = Trainer("parent and learner", "torch")
    trainer.train(2)
    path = trainer.learner.save_to_path(place)  # where the policy is a component of the learner's
    expected = trainer.train(1)
    running = Trainer("parent and learner", "torch", seed=1)
    running.steps = 2
    assert running.restore_from_path(path, component="learner", strict=True).complete
    assert same(running.train(1), expected)


def test_a_part_without_its_policy_is_not_complete_and_takes_one(place: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer("parent and learner", "torch")
    trainer.train(2)
    path = trainer.save_to_path(place)
    running = Trainer("parent and learner", "torch", seed=1)
    with pytest.raises(hf.TreeMismatchError, match=r"nothing was changed:\n  learner/policy"):
        running.restore_from_path(f"{path}/learner", component="learner", strict=True)
    assert not running.learner.optimizer.state
    report = running.restore_from_path(f"{path}/learner", component="learner")
    assert report.missing == ("learner/policy",)
    assert "in the program, not in the checkpoint (1): learner/policy" in caplog.text
    assert len(running.learner.optimizer.state) == 4

    policy = TorchPolicy.from_checkpoint(f"{path}/policy")
    learner = Learner.from_checkpoint(f"{path}/learner", policy=policy)
    found = LIBRARIES["torch"].values(policy, learner.optimizer)
    assert same(found, LIBRARIES["torch"].values(trainer.policy, trainer.learner.optimizer))


def test_a_policy_that_the_program_no_longer_shares(place: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer("parent and learner", "torch")
    path = trainer.save_to_path(place)
    running = Trainer("parent and learner", "torch", seed=1)
    running.policy = TorchPolicy(2)
    with pytest.raises(hf.TreeMismatchError, match="one object in the checkpoint, two in the program"):
        running.restore_from_path(path, strict=True)
    report = running.restore_from_path(path)
    assert report.separate == (("learner/policy", "policy"),)
    for policy in (running.policy, running.learner.policy):
        assert torch.equal(policy.net[0].weight, trainer.policy.net[0].weight)
    assert "two in the program (1): learner/policy and policy" in caplog.text


class Showing(Checkpointable):
    def __init__(self, value: Any) -> None:
        self.value, self.process = value, iter(())

    def get_state(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"value": self.value}

    def set_state(self, state: Any) -> None:
        self.value = state["value"]


class Around(Checkpointable):
    """Holds the same value as its part, under a longer path."""

    def __init__(self, value: Any) -> None:
        self.part = Showing(value)
        self.deep = {"a": {"b": {"value": value}}}


def test_a_value_that_a_part_has_too(place: str) -> None:
    path = Around(jnp.ones(2)).save_to_path(place)
    running = Around(jnp.zeros(2))
    assert running.restore_from_path(path, strict=True).complete
    assert running.part.value.tolist() == running.deep["a"]["b"]["value"].tolist() == [1, 1]


def test_a_save_that_would_lose_moments_is_an_error(place: str) -> None:
    policy = TorchPolicy(0)  # which no component holds
    learner = Alone("torch", policy)
    message = r"optimizer: 4 of its parameters, of shapes \[4, 3\], "
    for act in (lambda: learner.save_to_path(place), learner.get_state):
        with pytest.raises(hf.errors.UnsupportedLeafError, match=message) as error:
            act()
        assert all(advice in str(error.value) for advice in ("attribute of a component", "__untracked__"))
    assert not as_location(place).exists()

    class Knowing(Alone):
        __untracked__ = ("optimizer",)

    Knowing("torch", policy).save_to_path(place)


class Held(Checkpointable):
    def __init__(self, seed: int = 0) -> None:
        self.holder = types.SimpleNamespace(policy=TorchHolder(seed))  # which is no component


def test_a_component_inside_of_another_object_is_not_left_out_silently(place: str) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match="Held: holder/policy: a component inside an object"):
        Held().save_to_path(place)
    assert not as_location(place).exists()

    class Named(Held):
        def get_checkpointable_components(self) -> list[tuple[str, Any]]:
            return [("policy", self.holder.policy)]

    path = Named().save_to_path(place)
    running = Named(1)
    assert running.restore_from_path(path, strict=True).complete
    assert torch.equal(running.holder.policy.net[0].weight, Named().holder.policy.net[0].weight)


def test_a_checkpoint_of_an_earlier_version_that_lacks_moments_is_not_complete(place: str) -> None:
    trainer = Trainer("parent and learner", "torch")
    trainer.train(1)
    state = trainer.get_state()
    own = state["learner"]
    graph = json.loads(own["__graph__"])
    for node in graph["nodes"]:
        node.pop("slots", None)
        node["groups"] = [[] for _ in node.get("groups", ())]
    path = trainer.save_to_path(place, state=state | {"learner": {**own, "__graph__": json.dumps(graph)}})
    with pytest.raises(hf.TreeMismatchError, match=r"in the program, not in the checkpoint .*: optimizer/slots"):
        Trainer("parent and learner", "torch").restore_from_path(path, strict=True)
    running = Trainer("parent and learner", "torch", seed=1)
    report = running.restore_from_path(path)
    assert report.missing_values[0] == "learner: optimizer/slots"
    assert torch.equal(running.policy.net[0].weight, trainer.policy.net[0].weight)


# ---- the first path, and all others


def test_a_shared_component_is_saved_under_its_first_path_and_known_by_all(tmp_path: Path) -> None:
    one = Trainer("actor first", "torch", seed=1)
    one.save_to_path(tmp_path / "one")
    assert (tmp_path / "one/actor/policy/checkpoint.json").exists()
    assert not (tmp_path / "one/policy").exists()
    for name in ("policy", "actor/policy"):
        made = TorchPolicy.from_checkpoint(tmp_path / "one" / name, seed=5)
        assert all(map(torch.equal, made.parameters(), one.policy.parameters()))
        assert list(one.get_state(components=name)["actor"]["policy"]) == ["net"]
        again = Trainer("actor first", "torch", seed=2)
        again.restore_from_path(tmp_path / "one" / name, component=name)
        assert all(map(torch.equal, again.policy.parameters(), one.policy.parameters()))
    with pytest.raises(hf.CheckpointNotFoundError, match="has no such component"):
        TorchPolicy.from_checkpoint(tmp_path / "one" / "other")


@pytest.mark.parametrize(("before", "after"), [("actor first", "policy first"), ("policy first", "actor first")])
def test_the_first_path_may_be_another_one_later(place: str, before: str, after: str) -> None:
    one, again = Trainer(before, "torch", seed=1), Trainer(after, "torch", seed=2)
    one.train(1)
    again.train(1)
    assert again.restore_from_path(one.save_to_path(place), strict=True).complete
    assert same(again.train(1), one.train(1))
