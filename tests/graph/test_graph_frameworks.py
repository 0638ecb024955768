"""Torch and flax: optimizer slots by the parameter's path, lazy modules, modules that are built later."""

from __future__ import annotations

import gc
import logging
import os
import re
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from flax.training.train_state import TrainState
from tests.versions import nnx_assign, nnx_update

import holdfast as hf
from holdfast import graph
from holdfast.engine.errors import UnsupportedLeafError

create_state: Any = TrainState.create  # which has no types


class Net(torch.nn.Module):
    """Layers of the same shape, made in the order of their names as given."""

    a: torch.nn.Linear
    b: torch.nn.Linear

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(2, 2))


def trained(net: torch.nn.Module, groups: Any = None, kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
    """An optimizer that has made a step in which every parameter had another gradient."""
    optimizer: torch.optim.Optimizer = kind(net.parameters() if groups is None else groups, lr=0.1)
    for number, (_, parameter) in enumerate(sorted(net.named_parameters())):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def moments(net: torch.nn.Module, optimizer: torch.optim.Optimizer, slot: str = "exp_avg") -> dict[str, Any]:
    return {name: optimizer.state[parameter][slot].tolist() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("order", "saved", "live", "rates"),
    [
        ("ba", ["ab"], ["ba"], ["a"]),
        ("ab", ["a", "b"], ["b", "a"], ["b", "a"]),
        ("ab", ["ab"], ["a", "b"], ["a", "a"]),
        ("ab", ["a", "b"], ["ab"], []),
    ],
    ids=["modules in another order", "groups in another order", "a group divided", "groups that became one"],
)
def test_moments_and_options_follow_the_parameters(
    place: str, order: str, saved: list[str], live: list[str], rates: list[str]
) -> None:
    def groups(net: torch.nn.Module, parts: list[str]) -> list[dict[str, Any]]:
        layers = [[net.get_submodule(name) for name in part] for part in parts]
        found = [[one for layer in group for one in layer.parameters()] for group in layers]
        return [{"params": one, "lr": 0.1 * ord(part[0])} for one, part in zip(found, parts, strict=True)]

    net, other = Net("a", "b"), Net(*order)
    optimizer, fresh = trained(net, groups(net, saved)), trained(other, groups(other, live))
    for group in fresh.param_groups:
        group["lr"] = 9.0
    path = graph.Checkpoint(net=net, optimizer=optimizer).save(f"{place}/ckpt")
    status = graph.Checkpoint(net=other, optimizer=fresh).restore(path)
    assert moments(other, fresh) == moments(net, optimizer)
    assert [group["lr"] for group in fresh.param_groups] == ([0.1 * ord(name) for name in rates] or [9.0])
    if rates:
        status.assert_consumed()
    else:  # Options of several groups do not become those of one.
        assert "optimizer/groups/0/lr" in status.report.missing
    status.expect_partial()


def test_slots_are_saved_with_their_parameters_only(place: str, caplog: pytest.LogCaptureFixture) -> None:
    net, other = Net("a", "b"), Net("a", "b")
    checkpoint = graph.Checkpoint(part=net.a, optimizer=trained(net))
    with caplog.at_level(logging.WARNING, "holdfast"):
        path = checkpoint.save(f"{place}/ckpt")
    paths = {leaf.path for leaf in hf.describe(path)}
    assert "optimizer/slots/part/weight/exp_avg" in paths
    assert sum(path.endswith("exp_avg") for path in paths) == 2
    (reason,) = checkpoint.unsaved().values()
    assert reason.startswith("2 of its parameters are not part of the checkpoint, so what it keeps for them is lost")
    assert "optimizer/slots" in caplog.text
    alone = graph.Checkpoint(net=net).save(f"{place}/alone")
    assert not any("slots" in leaf.path for leaf in hf.describe(alone))

    path = graph.Checkpoint(net=net, optimizer=trained(net)).save(f"{place}/both")
    slots = [leaf.path.partition("/slots/net/a/")[2] for leaf in hf.describe(path) if "/slots/net/a/" in leaf.path]
    assert slots == [f"{name}/{slot}" for name in ("weight", "bias") for slot in ("step", "exp_avg", "exp_avg_sq")]
    loaded = hf.load(path, select="optimizer/slots/net/a/bias/exp_avg")["optimizer"]["slots"]["net"]["a"]
    assert loaded["bias"]["exp_avg"].tolist() == pytest.approx([0.1, 0.1])
    some = torch.optim.Adam(other.a.parameters())
    status = graph.Checkpoint(net=other, optimizer=some).restore(path)
    assert all("/b/" in path for path in status.report.unused)
    assert len(status.report.unused) == 6
    status.assert_existing_objects_matched().expect_partial()


@pytest.mark.parametrize("saved", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_another_kind_of_optimizer_takes_what_it_has(place: str, saved: Any, kind: Any) -> None:
    net, other = Net("a"), Net("a")
    more = {"momentum": 0.9} if saved is not torch.optim.Adam else {}
    optimizer = trained(net, kind=lambda parameters, lr: saved(parameters, lr=lr, **more))
    optimizer.param_groups[0]["initial_lr"] = 0.7  # as schedulers do
    path = graph.Checkpoint(net=net, optimizer=optimizer).save(f"{place}/ckpt")
    fresh = kind(other.parameters(), lr=9.0)
    options = set(fresh.param_groups[0])
    status = graph.Checkpoint(net=other, optimizer=fresh).restore(path)
    assert set(fresh.param_groups[0]) == options | {"initial_lr"}
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["initial_lr"]) == (0.1, 0.7)
    if {saved, kind} in ({torch.optim.Adam, torch.optim.AdamW}, {kind}):
        status.assert_existing_objects_matched()
        assert fresh.state.keys() == set(other.parameters())
        assert not any("slots" in path for path in status.report.unused)
    else:
        assert not fresh.state
        assert any("optimizer/slots/net/a/weight" in path for path in status.report.unused)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
    status.expect_partial()


def test_slots_of_many_parameters_that_are_attached_late(place: str) -> None:
    def make() -> tuple[list[Any], Any]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(100)]
        return parameters, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    parameters, optimizer = make()
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    path = graph.Checkpoint(listed=parameters, optimizer=optimizer).write(f"{place}/x")
    late, fresh = make()
    checkpoint = graph.Checkpoint(listed=graph.TrackedList(), optimizer=fresh)
    status = checkpoint.read(path)
    looks = []

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            looks.append(self)
            return super().__iter__()

    fresh.param_groups[0]["params"] = Counted(late)
    for parameter in late:
        checkpoint.listed.append(parameter)
    assert len(looks) < 5  # not once for every parameter
    status.assert_consumed()
    assert [float(fresh.state[one]["momentum_buffer"]) for one in late] == list(map(float, range(100)))


@pytest.mark.parametrize("first", ["net", "optimizer"])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop", "Adagrad", "LBFGS"])
def test_every_kind_of_optimizer_resumes_whatever_is_attached_first(place: str, kind: str, first: str) -> None:
    def program(rate: float, **options: Any) -> dict[str, Any]:
        net = Net("a")
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=rate, **options)
        return {"net": net, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def step(program: dict[str, Any]) -> None:
        def closure() -> torch.Tensor:
            program["optimizer"].zero_grad()
            loss = torch.stack([(parameter**2).sum() for parameter in program["net"].parameters()]).sum()
            torch.autograd.backward(loss)
            return loss

        program["optimizer"].step(closure)
        program["scheduler"].step()

    # How an optimizer computes is up to the program, all else comes from the checkpoint.
    how = {"foreach": kind != "SGD"} if kind != "LBFGS" else {}
    state = {"momentum": 0.9} if kind == "SGD" else {}
    saved, fresh = program(0.1, **how, **state), program(0.5, **{name: not value for name, value in how.items()})
    step(saved)
    path = graph.Checkpoint(**saved).save(f"{place}/ckpt")
    checkpoint = graph.Checkpoint()
    status = checkpoint.restore(path)
    for name in sorted(fresh, key=lambda name: name != first):
        setattr(checkpoint, name, fresh[name])
    status.assert_consumed()
    group = fresh["optimizer"].param_groups[0]
    assert (group["lr"], fresh["scheduler"].last_epoch) == (pytest.approx(0.01), 1)
    assert {name: group[name] for name in how} == {name: not value for name, value in how.items()}
    for one in (saved, fresh):
        step(one)
    assert all(map(torch.equal, saved["net"].parameters(), fresh["net"].parameters()))


class Flax(nnx.Module):
    a: nnx.Linear
    b: nnx.Linear

    def __init__(self, seed: int, names: tuple[str, ...] = ("a", "b")) -> None:
        for name in names:
            setattr(self, name, nnx.Linear(2, 2, rngs=nnx.Rngs(seed)))


def nnx_trained(net: nnx.Module) -> Any:
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    leaves, structure = jax.tree.flatten(nnx.state(net, nnx.Param))  # in the order of their names
    gradients = [jnp.full_like(leaf, number + 1) for number, leaf in enumerate(leaves)]
    nnx_update(optimizer, net, jax.tree.unflatten(structure, gradients))
    return optimizer


def test_moments_of_nnx_have_the_paths_of_their_parameters(place: str) -> None:
    net, other = Flax(0), Flax(1, ("b", "a"))
    optimizer, fresh = nnx_trained(net), nnx.Optimizer(other, optax.adam(0.1), wrt=nnx.Param)
    path = graph.Checkpoint(net=net, optimizer=optimizer).save(f"{place}/ckpt")
    assert "optimizer/opt_state/0/mu/a/kernel" in {leaf.path for leaf in hf.describe(path)}
    graph.Checkpoint(net=other, optimizer=fresh).restore(path).assert_consumed()
    for name in "ab":
        moments = [one.opt_state[0].mu[name]["kernel"][...] for one in (fresh, optimizer)]
        np.testing.assert_array_equal(*moments)
        np.testing.assert_array_equal(getattr(other, name).kernel[...], getattr(net, name).kernel[...])
    assert int(fresh.step[...]) == 1

    opt_state = optax.adam(0.1).init({"w": jnp.ones(3)})
    opt_state = (opt_state[0]._replace(mu={"w": jnp.ones(3)}), *opt_state[1:])
    path = graph.Checkpoint(optimizer=optimizer, opt_state=opt_state).save(f"{place}/without_parameters")
    fresh = nnx.Optimizer(Flax(1), optax.adam(0.1), wrt=nnx.Param)
    checkpoint = graph.Checkpoint(optimizer=fresh, opt_state=optax.adam(0.1).init({"w": jnp.zeros(3)}))
    checkpoint.restore(path).assert_consumed()
    moments = [one.opt_state[0].mu["a"]["kernel"][...] for one in (fresh, optimizer)]
    np.testing.assert_array_equal(*moments)
    assert checkpoint.opt_state[0].mu["w"].tolist() == [1, 1, 1]
    assert isinstance(checkpoint.opt_state[0], optax.ScaleByAdamState)


def test_a_train_state_is_replaced_wherever_it_hangs(place: str) -> None:
    def make(value: float) -> Any:
        params = {"kernel": jnp.full(2, value)}
        return create_state(apply_fn=lambda x: x, params=params, tx=optax.sgd(0.1, momentum=0.9))

    saved = make(1.0).apply_gradients(grads={"kernel": jnp.ones(2)})
    path = graph.Checkpoint(one=saved, states=[saved], key=jax.random.key(3)).write(f"{place}/ckpt")
    paths = [leaf.path for leaf in hf.describe(path)]
    assert paths == ["one/step", "one/params/kernel", "one/opt_state/0/trace/kernel", "key"]
    first = make(0.0)
    checkpoint = graph.Checkpoint(one=first, states=[first], key=jax.random.key(0))
    checkpoint.read(path).assert_consumed()
    assert first.params["kernel"].tolist() == [0, 0]
    for found in (checkpoint.one, *checkpoint.states):
        assert found.tx is first.tx
        assert int(found.step) == 1
        for one, other in ((found.params, saved.params), (found.opt_state[0].trace, saved.opt_state[0].trace)):
            np.testing.assert_array_equal(one["kernel"], other["kernel"])
    assert jax.random.key_data(checkpoint.key).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_lazy_modules_of_torch(place: str) -> None:
    net: Any = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    net(torch.randn(4, 2))
    path = graph.Checkpoint(net=net, optimizer=trained(net)).save(f"{place}/ckpt")
    lazy: Any = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    weight = lazy[0].weight
    unborn = graph.Checkpoint(net=lazy)
    assert unborn.unsaved()["net/0/weight"] == "has no shape yet; run the module once"
    with pytest.raises(UnsupportedLeafError, match=r"net/0/weight, net/0/bias, .* no shape yet.* Run the module once"):
        unborn.save(f"{place}/unborn")
    assert not os.path.exists(f"{place}/unborn-1")
    optimizer = torch.optim.Adam(lazy.parameters())
    graph.Checkpoint(net=lazy, optimizer=optimizer).restore(path).assert_consumed()
    assert lazy[0].weight is weight
    assert torch.equal(lazy[0].weight, net[0].weight)
    x = torch.randn(4, 2)
    assert torch.equal(lazy(x), net(x))
    assert moments(lazy, optimizer).keys() == moments(net, trained(net)).keys()


def test_a_loop_whose_module_has_not_run_learns_it_from_the_save(place: str) -> None:
    state = {"net": torch.nn.LazyLinear(3)}
    refused = pytest.raises(UnsupportedLeafError, match="net/weight, net/bias: no shape yet")
    with refused, hf.CheckpointCallback(place, save_interval_steps=2) as callback:
        callback.restore_or_initialize(state)
        callback.on_step(1, state)
        callback.on_step(2, state)


@pytest.mark.parametrize("choice", ["try_complete", "assert_existing_objects_matched", "expect_partial", "restore"])
def test_a_save_overwrites_nothing_that_was_built_since(
    place: str, choice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A net is restored, and its second layer built and trained where no restore can see it."""
    saved, net = Net("a", "b"), Net("a")
    path = graph.Checkpoint(net=saved, optimizer=trained(saved)).save(f"{place}/ckpt")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    checkpoint = graph.Checkpoint(net=net, optimizer=optimizer)
    status = checkpoint.restore(path)
    net.b = torch.nn.Linear(2, 2)
    optimizer.add_param_group({"params": net.b.parameters(), "lr": 0.5})
    net.b.weight.grad = torch.ones(2, 2)
    optimizer.step()
    before = net.b.weight.tolist()
    message = r"(?s)created since the restore.*net/b(?!.*would lose)"
    for _ in range(2):
        with pytest.raises(hf.errors.StateError, match=message) as error:
            checkpoint.save(f"{place}/ckpt")
        assert all(method in str(error.value) for method in ("try_complete", "expect_partial"))
        assert net.b.weight.tolist() == before != saved.b.weight.tolist()
    if choice == "restore":
        checkpoint.restore(path).assert_consumed()
    else:
        getattr(status, choice)()
    caplog.clear()
    assert checkpoint.save(f"{place}/ckpt") == f"{place}/ckpt-2"
    assert net.b.weight.tolist() == (before if choice == "expect_partial" else saved.b.weight.tolist())
    assert not caplog.records  # the error has said it


def test_a_partial_restore_warns_of_objects_built_since(place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = graph.Checkpoint(net=Flax(0), step=1).save(f"{place}/ckpt")
    net = Flax(1, ("a",))
    checkpoint = graph.Checkpoint(net=net)
    status = checkpoint.restore(path, partial=True)
    net.b = nnx.Linear(2, 2, rngs=nnx.Rngs(5))
    before, trained_since = net.b.kernel[...].tolist(), net.a.kernel[...] + 1
    nnx_assign(net.a.kernel, trained_since)
    for _ in range(2):
        checkpoint.save(f"{place}/ckpt")
    (record,) = caplog.records
    assert re.search(r"created since.*keep the values.*net/b/kernel, net/b/bias", record.getMessage(), re.DOTALL)
    assert net.b.kernel[...].tolist() == before
    status.try_complete()
    assert net.b.kernel[...].tolist() == Flax(0).b.kernel[...].tolist() != before
    assert (net.a.kernel[...] == trained_since).all()


def test_modules_that_torch_does_not_see(place: str, caplog: pytest.LogCaptureFixture) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(1, 1)]
            self.count = 3
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("passing", torch.ones(1), persistent=False)

    with caplog.at_level(logging.INFO, "holdfast"):
        path = graph.Checkpoint(net=Holder()).write(f"{place}/ckpt")
    assert [leaf.path for leaf in hf.describe(path)] == ["net/kept", "net/layers/0/weight", "net/layers/0/bias"]
    assert "state_dict() does not include" in caplog.text


def test_objects_that_are_no_longer_needed_are_freed_and_the_asserts_stay(place: str) -> None:
    path = graph.Checkpoint(net=Net("a")).save(f"{place}/ckpt")
    net = Net("a")
    watch = weakref.ref(net.a.weight)
    checkpoint = graph.Checkpoint(net=net)
    status = checkpoint.restore(path)
    del net, checkpoint
    gc.collect()
    status.assert_consumed()
    del status
    gc.collect()
    assert watch() is None


def test_an_immutable_object_that_holds_itself(place: str) -> None:
    def make(value: float) -> Any:
        loop: list[Any] = [jnp.full(2, value)]
        pair = (loop, 1)
        loop.append(pair)
        return pair

    path = graph.Checkpoint(pair=make(1.0)).write(f"{place}/x")
    checkpoint = graph.Checkpoint(pair=make(0.0))
    status = checkpoint.read(path)
    assert checkpoint.pair[0][0].tolist() == [1, 1]
    with pytest.raises(AssertionError, match="pair/0/1/0/0"):  # the old one is still in there, and cannot be reached
        status.assert_existing_objects_matched()


@pytest.mark.needs("flax", "0.12")
def test_containers_of_nnx(place: str) -> None:
    class Holder(nnx.Module):
        def __init__(self, value: float) -> None:
            self.blocks = nnx.List([nnx.Param(jnp.full(2, value)), nnx.Param(jnp.full(3, value))])
            self.named = nnx.Dict(a=nnx.Param(jnp.full(4, value)))
            self.raw = jnp.full(5, value)
            self.pair = nnx.data((jnp.full(6, value), jnp.full(7, value)))
            self.size = 3

    live = Holder(1.0)
    path = graph.Checkpoint(net=live).write(f"{place}/x")
    paths = ["blocks/0", "blocks/1", "named/a", "raw", "pair/0", "pair/1"]
    assert {leaf.path: leaf.shape for leaf in hf.describe(path)} == {f"net/{p}": (n,) for n, p in enumerate(paths, 2)}
    other = Holder(0.0)
    graph.Checkpoint(net=other).read(path).assert_consumed()
    for one, two in zip(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(nnx.state(live)), strict=True):
        np.testing.assert_array_equal(one, two)
