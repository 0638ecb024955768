"""What trees of components do, one test for each behaviour, on a small trainer with two torch policies."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.components import Checkpointable, allow
from holdfast.engine.format import decode_document
from holdfast.integrations.components.saving import commit_in

CUSTOM = "learner/rl_module/p1"


class Policy(Checkpointable, torch.nn.Module):
    def __init__(self, size: int, hidden: int = 4, activation: type[torch.nn.Module] = torch.nn.Tanh) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(size, hidden), activation(), torch.nn.Linear(hidden, 2))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(observations)
        return result


class Policies(Checkpointable, torch.nn.Module):
    def __init__(self, names: list[str], size: int) -> None:
        super().__init__()
        self.members = torch.nn.ModuleDict({name: Policy(size) for name in names})

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return list(self.members.items())


class Learner(Checkpointable):
    """Trains all policies with one optimizer."""

    def __init__(self, names: list[str], lr: float) -> None:
        self.rl_module = Policies(names, 3)
        self.optimizer = torch.optim.Adam(self.rl_module.parameters(), lr=lr)
        self.updates = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        losses = [policy(torch.ones(5, 3)).square().sum() for policy in self.rl_module.members.values()]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.optimizer.step()
        self.updates += 1


class Runner(Checkpointable):
    """Collects statistics; its policies are those of the learner."""

    def __init__(self, policies: Policies, seed: int = 0) -> None:
        self.policies = policies
        self.mean = np.zeros(3)
        self.random = np.random.default_rng(seed)


class Trainer(Checkpointable):
    def __init__(self, names: tuple[str, ...] = ("p0", "p1"), lr: float = 0.5) -> None:
        self.lr = lr
        self.learner = Learner(list(names), lr)
        self.runner = Runner(self.learner.rl_module)
        self.iterations = 0

    def train(self) -> None:
        self.runner.mean += self.runner.random.normal(size=3)
        self.learner.step()
        self.iterations += 1

    def policy(self, name: str) -> Policy:
        found = self.learner.rl_module.members[name]
        assert isinstance(found, Policy)
        return found


def trained(iterations: int = 2, **kwargs: Any) -> Trainer:
    trainer = Trainer(**kwargs)
    for _ in range(iterations):
        trainer.train()
    return trainer


def weights(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def everything(trainer: Trainer) -> list[Any]:
    """Returns all that a trainer's future depends on."""
    kept = trainer.learner.optimizer.state_dict()
    slots = [value.tolist() for entry in kept["state"].values() for value in entry.values()]
    values = [value.tolist() for value in weights(trainer.learner.rl_module).values()]
    rest = [trainer.iterations, trainer.learner.updates, trainer.runner.mean.tolist()]
    return [values, slots, rest, trainer.runner.random.bit_generator.state]


# ---- layout, round trip


def test_every_part_has_a_directory_of_its_own(tmp_path: Path) -> None:
    path = Path(trained().save_to_path(tmp_path / "trainer"))
    parts = ["", "learner", "learner/rl_module", "learner/rl_module/p0", CUSTOM, "runner"]
    for part in parts:
        assert {"state", "metadata.json", "checkpoint.json"} <= set(os.listdir(path / part))
        assert (path / part / "state" / "component.json").exists()
    found = {str(file.parent.relative_to(path)).replace(".", "") for file in path.rglob("metadata.json")}
    assert found == set(parts)
    assert set(hf.load(path, item="state")) == {"lr", "iterations"}
    assert '"class": "' in (path / "metadata.json").read_text()


@pytest.mark.parametrize("base", [Trainer, Checkpointable], ids=["its class", "base class"])
def test_new_instances_and_running_ones_continue_bit_for_bit(place: str, base: type[Checkpointable]) -> None:
    trainer = trained(lr=0.25)
    path = trainer.save_to_path(place)
    overridden, found = base.from_checkpoint(path, lr=9.0), base.from_checkpoint(path)
    assert isinstance(overridden, Trainer)
    assert (overridden.lr, overridden.learner.optimizer.param_groups[0]["lr"], overridden.iterations) == (9.0, 9.0, 2)
    assert type(found) is Trainer
    assert found.lr == 0.25
    assert found.runner.policies is found.learner.rl_module

    running = trained(1)
    before = [running.learner, running.runner.mean, *running.learner.rl_module.parameters()]
    report = running.restore_from_path(path, strict=True)
    after = [running.learner, running.runner.mean, *running.learner.rl_module.parameters()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    held = [parameter for group in running.learner.optimizer.param_groups for parameter in group["params"]]
    assert set(map(id, held)) == set(map(id, running.learner.rl_module.parameters()))
    assert set(report.restored) == {"(root)", "learner", "learner/rl_module", "learner/rl_module/p0", CUSTOM, "runner"}
    assert report.complete
    for one in (trainer, found, running):
        one.train()
    assert everything(found) == everything(running) == everything(trainer)


def test_a_part_is_made_alone_wherever_it_is_copied(tmp_path: Path) -> None:
    trainer = trained()
    path = trainer.save_to_path(tmp_path / "trainer")
    assert Learner.from_checkpoint(f"{path}/learner").updates == 2
    assert hf.load(f"{path}/{CUSTOM}")["net"]["0"]["weight"].shape == (4, 3)
    shutil.copytree(Path(path) / CUSTOM, tmp_path / "deployed")
    shutil.rmtree(path)
    assert same(weights(Policy.from_checkpoint(tmp_path / "deployed")), weights(trainer.policy("p1")))
    assert hf.verify(tmp_path / "deployed").ok


class Injected(Checkpointable):
    def __init__(self, first: Policy, others: dict[str, Policy]) -> None:
        self.others = {"one": first, **others}


class Outer(Checkpointable):
    def __init__(self, policy: Policy, inner: Injected | None = None) -> None:
        self.policy = policy
        self.inner = inner if inner is not None else Injected(policy, {"two": Policy(3)})


def test_components_that_were_given_to_the_constructor_stay_shared(place: str) -> None:
    outer = Outer(Policy(3))
    path = outer.save_to_path(place)
    found = Outer.from_checkpoint(path, strict=True)
    assert found.inner.others["one"] is found.policy
    assert same(weights(found.policy), weights(outer.policy))
    assert same(weights(found.inner.others["two"]), weights(outer.inner.others["two"]))
    message = r"pass them by name: first \(it is the component policy, which is not being"
    with pytest.raises(hf.errors.OptionError, match=message):
        Injected.from_checkpoint(f"{path}/inner")
    part = Injected.from_checkpoint(f"{path}/inner", first=found.policy)
    assert same(weights(part.others["two"]), weights(outer.inner.others["two"]))
    for policy in (outer.policy, Policy(3)):  # a component that is an argument itself
        path = Outer(policy, outer.inner).save_to_path(f"{place}/again", overwrite=True)
        found = Outer.from_checkpoint(path, strict=True)
        assert (found.inner.others["one"] is found.policy) is (policy is outer.policy)
        assert same(weights(found.inner.others["one"]), weights(outer.policy))


# ---- restoring into what runs


def test_one_part_is_swapped(place: str) -> None:
    single = trained(names=("default_policy",))
    running = trained(3)
    untouched = weights(running.policy("p0"))
    slots = everything(running)[1]
    path = single.save_to_path(place)
    report = running.restore_from_path(f"{path}/learner/rl_module/default_policy", component=CUSTOM)
    assert report.restored == (CUSTOM,)
    assert same(weights(running.policy("p1")), weights(single.policy("default_policy")))
    assert same(weights(running.policy("p0")), untouched)
    assert (running.iterations, running.learner.updates) == (3, 3)
    assert everything(running)[1] == slots


# ---- parts of states, missing parts, parts born from states


def leaves(state: Any, path: str = "") -> set[str]:
    """Returns the paths of all components in a state, recognised by their values."""
    marks = {"iterations": "", "updates": "learner", "mean": "runner", "net": "policy"}
    found = {marks[key] if key != "net" else path for key in state if key in marks}
    for key, inner in state.items():
        if key in ("learner", "rl_module", "p0", "p1", "runner"):
            found |= leaves(inner, f"{path}/{key}".lstrip("/"))
    return found


@pytest.mark.parametrize(
    ("components", "not_components", "expected"),
    [
        (None, None, {"", "learner", "learner/rl_module/p0", CUSTOM, "runner"}),
        (CUSTOM, None, {"", "learner", CUSTOM}),
        (["runner", "learner"], None, {"", "learner", "learner/rl_module/p0", CUSTOM, "runner"}),
        ("learner/*/p0", None, {"", "learner", "learner/rl_module/p0"}),
        (None, "learner", {"", "runner"}),
        ("learner", CUSTOM, {"", "learner", "learner/rl_module/p0"}),
        ("learner", "learner", {""}),
    ],
    ids=["all", "one below", "two", "pattern", "all but", "one but", "exclusion wins"],
)
def test_a_state_of_some_parts_holds_only_these(components: Any, not_components: Any, expected: set[str]) -> None:
    trainer = trained(0)
    assert leaves(trainer.get_state(components, not_components=not_components)) == expected
    for arguments in ({"components": "leaner"}, {"not_components": ["learner", "typo"]}, {"components": "x/*"}):
        with pytest.raises(hf.TreeMismatchError, match="Trainer has no component"):
            trainer.get_state(**arguments)


def test_a_state_that_is_given_is_what_is_saved(place: str) -> None:
    trainer = trained()
    state = trainer.get_state(components=CUSTOM)
    state["iterations"] = 50
    path = trainer.save_to_path(place, state=state)
    assert set(state) == {"lr", "iterations", "learner"}, "the caller's dictionary is not changed"
    running = Trainer()
    report = running.restore_from_path(path)
    assert running.iterations == 50
    assert set(report.missing) == {"learner/rl_module/p0", "runner"}
    assert hf.load(Trainer().save_to_path(f"{place}/empty", state={})) == {}


def test_a_state_is_a_snapshot_and_one_of_some_parts_leaves_the_others() -> None:
    trainer, other = trained(), trained(1)
    before, after = weights(other.policy("p0")), weights(trainer.policy("p1"))
    state, whole, expected = trainer.get_state(CUSTOM), trainer.get_state(), everything(trainer)
    trainer.train()
    kept = leaves(state)
    other.set_state({"learner": {"rl_module": state["learner"]["rl_module"]}})
    assert leaves(state) == kept, "the caller's dictionary is not changed"
    assert same(weights(other.policy("p1")), after)
    assert same(weights(other.policy("p0")), before)
    assert (other.iterations, other.learner.updates) == (1, 1)
    other.set_state(whole)
    assert everything(other) == expected


def test_missing_and_extra_parts_are_reported(place: str, caplog: pytest.LogCaptureFixture) -> None:
    two = trained()
    running = trained(1, names=("p1", "p2"))
    path = two.save_to_path(place)
    fresh = weights(running.policy("p2"))
    with pytest.raises(hf.TreeMismatchError, match=r"lacks components.*\n.*learner/rl_module/p2"):
        running.restore_from_path(path, strict=True)
    assert running.iterations == 1
    with caplog.at_level(logging.WARNING, "holdfast"):
        report = running.restore_from_path(path)
    assert (report.missing, report.unused) == (("learner/rl_module/p2",), ("learner/rl_module/p0",))
    assert all(name in caplog.text for name in (*report.missing, *report.unused))
    assert same(weights(running.policy("p1")), weights(two.policy("p1")))
    assert same(weights(running.policy("p2")), fresh)
    grown = trained(0, names=("p0", "p1", "p2"))
    assert grown.restore_from_path(path).unused == ()


class League(Checkpointable):
    """Policies that exist because the state says so."""

    def __init__(self, *names: str) -> None:
        self.members = {name: Policy(3) for name in names}

    def get_state(self, components: Any = None, *, not_components: Any = None, **options: Any) -> dict[str, Any]:
        return {**super().get_state(components, not_components=not_components), "names": sorted(self.members)}

    def set_state(self, state: Any) -> None:
        for name in state.get("names", ()):
            self.members.setdefault(name, Policy(3))
        super().set_state({key: value for key, value in state.items() if key != "names"})


def test_parts_born_from_state_are_restored(place: str) -> None:
    league, found = League("a", "b"), League()
    path = league.save_to_path(place)
    report = found.restore_from_path(path, strict=True)
    assert set(report.restored) == {"(root)", "members/a", "members/b"}
    direct = League()
    direct.set_state(league.get_state())
    for one in (found, direct, League.from_checkpoint(path)):
        assert all(same(weights(one.members[name]), weights(league.members[name])) for name in "ab")


# ---- classes, forms of states, safety, replacing


def test_unknown_classes_are_refused(place: str) -> None:
    def saved_by_a_class_that_is_gone() -> str:
        class Gone(Checkpointable):
            def __init__(self, size: int) -> None:
                self.weights = np.full(size, 7.0)

        return Gone(2).save_to_path(f"{place}/gone")

    class Here(Checkpointable):
        def __init__(self, size: int = 2) -> None:
            self.weights = np.zeros(size)

    gone = saved_by_a_class_that_is_gone()
    saved = hf.load(gone)
    assert saved["weights"].tolist() == [7, 7]
    gc.collect()  # the class is only reachable by itself
    with pytest.raises(hf.errors.NotAllowedError, match=r"a_class_that_is_gone.*not allowed: nothing was imported"):
        Here.from_checkpoint(gone)
    here = "test_unknown_classes_are_refused.<locals>"
    full = f"{__name__}:{here}.saved_by_a_class_that_is_gone.<locals>.Gone"
    assert Here.from_checkpoint(gone, renamed={full: Here}).weights.tolist() == [7, 7]
    assert Here.from_checkpoint(gone, fallback=True, size=2).weights.tolist() == [7, 7]


def test_a_damaged_description_is_never_a_fallback(tmp_path: Path) -> None:
    path = Path(Policy(3).save_to_path(tmp_path / "policy"))
    (path / "state" / "component.json").write_text("{}")
    with pytest.raises(hf.DamagedCheckpointError, match=r"component\.json is not what was saved"):
        Policy.from_checkpoint(path, fallback=True, size=3)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(Checkpointable):
        def get_state(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"deep": [1, object()]}

    trainer: Any = Trainer()
    trainer.runner.socket = iter(())
    for component, path in ((trainer, "socket"), (Odd(), "deep/1")):
        with pytest.raises(hf.errors.UnsupportedLeafError, match=path):
            component.save_to_path(tmp_path / "x")
    assert os.listdir(tmp_path) == []


@allow
def scale(value: float) -> float:
    """A function that constructor specs may name."""
    return 2 * value


class Scaled(Checkpointable):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def test_functions_have_to_be_allowed(place: str) -> None:
    assert Scaled.from_checkpoint(Scaled(scale).save_to_path(f"{place}/a")).function is scale
    path = Scaled(os.getcwd).save_to_path(f"{place}/b")
    with pytest.raises(hf.errors.NotAllowedError, match=r"names .*:getcwd, which is not allowed"):
        Scaled.from_checkpoint(path)
    assert Scaled.from_checkpoint(path, allowed=[os.getcwd]).function is os.getcwd
    assert Scaled.from_checkpoint(path, allowed="posix:*" if sys.platform != "win32" else "nt:*").function is os.getcwd
    assert Scaled.from_checkpoint(path, trust=True).function is os.getcwd
    assert Scaled.from_checkpoint(path, function=scale).function is scale


# ---- paths, versions, devices, schedulers


def test_every_form_of_path_is_taken(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trained()
    places: list[str | Path] = [tmp_path / "a", str(tmp_path / "b"), "c", f"file://{tmp_path}/d", place]
    for path in places:
        returned = trainer.save_to_path(path)
        for origin in (path, returned):
            assert Trainer.from_checkpoint(origin).iterations == 2
        part = path / CUSTOM if isinstance(path, Path) else f"{path}/{CUSTOM}"
        assert same(weights(Policy.from_checkpoint(part)), weights(trainer.policy("p1")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = trainer.save_to_path(), trainer.save_to_path()  # each makes a directory
    assert one != other
    assert Trainer.from_checkpoint(one).iterations == 2


def test_metadata_has_the_class_the_versions_and_what_the_class_adds(tmp_path: Path) -> None:
    class Described(Trainer):
        def get_metadata(self) -> dict[str, Any]:
            return {"note": "the good one"}

    path = Path(Described().save_to_path(tmp_path / "x"))
    own, found = (
        decode_document((path / part / "metadata.json").read_bytes(), "component", source="metadata.json")
        for part in ("", "learner")
    )
    assert own["metadata"]["note"] == "the good one"
    assert found["layout"] == "1.0"
    assert found["class"].endswith(":Learner")
    assert {"holdfast", "torch", "numpy", "python"} <= found["metadata"]["versions"].keys()
    assert found["metadata"]["time"].startswith("20")
    assert "commit" in found["metadata"]
    for file in path.rglob("metadata.json"):
        file.unlink()  # it is for people
    assert Described.from_checkpoint(path).iterations == 0


def test_metadata_has_the_commit_of_the_program(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_in(tmp_path / "src") is None
    (tmp_path / ".git" / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert commit_in(tmp_path / "src") == commit


class Counter(Checkpointable):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.array = np.zeros(4, np.float32)


class Counters(Checkpointable):
    def __init__(self, names: list[str]) -> None:
        self.counters = {name: Counter() for name in names}


@pytest.mark.parametrize("form", ["arrays", "msgpack"])
def test_released_versions_load(form: str) -> None:
    path = Path(__file__).parent / "released" / "1.0" / form
    assert hf.verify(path).ok
    with pytest.raises(hf.errors.NotAllowedError, match="__main__:Counters"):
        Checkpointable.from_checkpoint(path)
    renamed = Checkpointable.from_checkpoint(path, renamed={"__main__:Counters": Counters}, strict=True)
    for found in (renamed, Counters.from_checkpoint(path, strict=True)):
        assert isinstance(found, Counters)
        assert [counter.count for counter in found.counters.values()] == [3, 0]
        assert found.counters["a"].array.tolist() == [0, 1, 2, 3]


def test_the_callers_configuration_wins(place: str) -> None:
    path = trained(lr=0.5).save_to_path(place)
    running = Trainer(lr=0.125)
    running.restore_from_path(path, keep=["lr", "**/lr"])
    assert running.lr == 0.125
    assert running.learner.optimizer.param_groups[0]["lr"] == 0.125
    assert running.iterations == 2
    running.restore_from_path(path)
    assert running.learner.optimizer.param_groups[0]["lr"] == 0.5


class OnDevice(Checkpointable):
    def __init__(self, device: Any, other: Any = None) -> None:
        self.given = str(device), str(other)
        self.weights = torch.zeros(2, device=device)

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return []


def test_devices_that_this_machine_lacks_become_its_own(place: str) -> None:
    value = OnDevice("cpu", torch.device("cpu"))
    # As if it had been made on a machine that has what this one lacks.
    value.get_ctor_args_and_kwargs = lambda: (("xpu",), {"other": torch.device("xpu:3")})  # type: ignore[method-assign]
    value.__untracked__ = ()  # type: ignore[attr-defined]
    found = OnDevice.from_checkpoint(value.save_to_path(place))
    assert found.weights.device.type == "cpu"


def test_steps_are_listed_with_their_metrics(place: str) -> None:
    trainer = Trainer()
    for step, loss in ((1, 0.5), (2, np.float32(0.25)), (3, 0.75)):
        trainer.train()
        trainer.save_to_path(f"{place}/{step}", step=step, metrics={"loss": loss})
    listed = hf.list_checkpoints(place)
    assert [(one.step, one.metrics, one.damage) for one in listed] == [
        (1, {"loss": 0.5}, None),
        (2, {"loss": 0.25}, None),
        (3, {"loss": 0.75}, None),
    ]
    best = min(listed, key=lambda one: (one.metrics or {})["loss"])
    assert Trainer.from_checkpoint(best.path).iterations == 2
    assert hf.verify(place).ok
    for wrong in ({"step": -1}, {"step": True}, {"metrics": {"loss": "x"}}):
        with pytest.raises(hf.errors.OptionError):
            trainer.save_to_path(f"{place}/x", **wrong)


def test_options_that_a_restore_overwrites_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that a schedule changes are not: the program has not set them."""
    caplog.set_level(logging.INFO, "holdfast")

    class Trainer(Checkpointable):
        def __init__(self, lr: float, *, scheduled: bool = False) -> None:
            self.model = torch.nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
            self.schedule: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1) if scheduled else None

    Trainer(0.1).save_to_path(tmp_path / "plain")
    trainer = Trainer(0.5)
    for _ in range(2):
        trainer.restore_from_path(tmp_path / "plain")
    text = "as at the save, where the program began otherwise: (root): optimizer/groups/0/lr = 0.1 (program 0.5)"
    assert [one for one in caplog.messages if "began otherwise" in one] == [text]

    caplog.clear()
    trainer = Trainer(0.1, scheduled=True)
    trainer.optimizer.step()
    trainer.schedule.step()
    trainer.save_to_path(tmp_path / "scheduled")
    again = Trainer(0.1, scheduled=True)
    again.restore_from_path(tmp_path / "scheduled")
    assert again.schedule.last_epoch == 1
    assert "began otherwise" not in caplog.text
