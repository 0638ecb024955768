"""Loops whose resume would not be exact are told in their first process; loops that are right hear nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from tests.starts import run
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

pytestmark = [
    pytest.mark.usefixtures("default_sigterm"),
    pytest.mark.xdist_group("programs"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", r"ignore:os.fork\(\) was called:RuntimeWarning"),
]

DATA = torch.arange(36.0).reshape(12, 3) / 36


def callback(directory: Path, **options: Any) -> Any:
    return hf.CheckpointCallback(directory, **{"save_interval_steps": 3, **options})


def made(kind: type[Any] = torch.optim.Adam) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, kind(model.parameters(), lr=0.1)


def update(model: Any, optimizer: Any, x: Any = DATA) -> dict[str, float]:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


def trains(directory: Path, state: Any, pairs: list[Any], last: int = 9, later: int = 0, **extras: Any) -> None:
    """Train pairs of a model and an optimizer, and report each step of a state, or what makes it, but the ``later``."""
    with callback(directory) as checkpoint:
        make = state if callable(state) else lambda: state
        checkpoint.restore_or_initialize(make(), **extras)
        for step in range(1, last + later + 1):
            metrics = [update(*pair) for pair in pairs]
            if step <= last:
                checkpoint.on_step(step, make(), metrics=metrics[0], **extras)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


# ---- a loader that is read, and no place in the data


def reads(
    directory: Path, loader: Any, last: int = 5, *, extras: Any = None, beside: Any = None, **options: Any
) -> None:
    """Trains with a loader, with extras, and with other things ``beside`` the model and the optimizer in the state."""
    model, optimizer = made()
    extras = extras or {}
    with callback(directory, **options) as checkpoint:
        state = {"model": model, "optimizer": optimizer, **(beside or {})}
        state, step = checkpoint.restore_or_initialize(state, **extras)
        while step < last:
            for (x,) in loader:
                metrics = update(model, optimizer, x)
                step += 1
                checkpoint.on_step(step, state, metrics=metrics, **extras)
                if step == last:
                    break


def shuffled(**options: Any) -> Any:
    return DataLoader(TensorDataset(DATA), **{"batch_size": 2, "shuffle": True, **options})


class Place:
    """A place in the data that the program finds itself."""

    def state_dict(self) -> dict[str, int]:
        return {"batch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def begun() -> Any:
    reader = iter(shuffled())
    next(reader)
    return reader


def no_place() -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.StepLR(made()[1], 2)
    return {"rng": np.random.default_rng(0), "schedule": schedule, "epoch": 0}


@pytest.mark.parametrize(
    ("make", "extras", "is_told"),
    [
        (shuffled, {}, True),
        (lambda: shuffled(batch_size=None), {}, True),
        (lambda: shuffled(num_workers=1), {}, True),
        (begun, {}, True),
        (shuffled, no_place(), True),
        (shuffled, lambda loader: {"data": hf.resumable(loader)}, True),
        (shuffled, {"data": None}, False),
        (shuffled, {"place": Place()}, False),
        (shuffled, {"progress": {"epoch": 0, "batch": 3}}, False),
        (lambda: shuffled(shuffle=False), {}, False),
        (lambda: shuffled(num_workers=1, persistent_workers=True), {}, False),
    ],
    ids=[
        *("batches", "items", "workers", "an iterator from before", "a generator and a schedule", "another loader"),
        *("data=None", "an object", "numbers", "in order", "persistent workers"),
    ],
)
def test_a_shuffled_loader_without_a_place_is_told_once(
    make: Any, extras: Any, is_told: bool, tmp_path: Path, told: Any
) -> None:
    loader = make()
    last = 11 if isinstance(loader, DataLoader) else 5
    reads(tmp_path, loader, last, extras=extras(loader) if callable(extras) else extras)
    said = told()
    assert len(said) == is_told
    if is_told:
        assert re.search(r"step 3 is saved after batch [34] of \d+ of a DataLoader that shuffles", said[0])
        assert "loader = hf.resumable(loader)" in said[0]


def test_a_run_that_was_saved_without_a_place_goes_on_with_none(tmp_path: Path, told: Any) -> None:
    reads(tmp_path, shuffled())
    assert len(told()) == 1
    for partial in (None, "initialize"):
        with callback(tmp_path, partial=partial) as checkpoint:
            state = dict(zip(("model", "optimizer"), made(), strict=True))
            assert checkpoint.restore_or_initialize(state, data=None)[1] > 0
            assert checkpoint.extras["data"] is None


def test_saves_between_epochs_batches_only_shown_and_a_loader_in_the_state_are_silent(
    tmp_path: Path, told: Any
) -> None:
    shown = iter(shuffled())
    next(shown)
    reads(tmp_path / "ends", shuffled(), last=12, save_interval_steps=6)
    loader = hf.resumable(shuffled())
    reads(tmp_path / "in the state", loader, last=6, beside={"loader": loader})
    model, optimizer = made()
    with callback(tmp_path / "epochs", save_interval_steps=1) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
        for epoch in range(start + 1, 3):
            for (x,) in shuffled():
                update(model, optimizer, x)
            checkpoint.on_step(epoch, state)
    assert told() == []
    next(shown)


# ---- the state that is reported


class Pair(NamedTuple):
    model: Any
    optimizer: Any


def reports(directory: Path, change: Callable[[Any], Any], state: Any = None, **options: Any) -> Any:
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer} if state is None else state(model, optimizer)
    with callback(directory, **options) as checkpoint:
        state, step = checkpoint.restore_or_initialize(state)
        for _ in range(4):
            update(model, optimizer)
            step += 1
            checkpoint.on_step(step, change(state))
    return state


def dicts(model: Any, optimizer: Any) -> Any:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (dicts, "model"),
        (lambda model, optimizer: model.state_dict(), "the state"),
        (lambda model, optimizer: {"optimizer": [optimizer.state_dict()]}, "optimizer.0"),
        (lambda model, optimizer: {"model": model, "optimizer": optimizer.state_dict()}, "optimizer"),
    ],
    ids=["both", "the model", "in a list", "beside the model"],
)
def test_state_dicts_that_are_handed_back_are_refused(state: Any, part: str, tmp_path: Path) -> None:
    with pytest.raises(hf.errors.StateError, match=re.escape(f"the state dict ({part})")) as error:
        reports(tmp_path, lambda state: state, state)
    assert '{"model": model, "optimizer": optimizer}' in str(error.value)
    assert hf.CheckpointManager(tmp_path).all_steps() == []


def test_state_dicts_that_are_made_anew_or_are_a_copy_are_silent(tmp_path: Path, told: Any) -> None:
    model, optimizer = made()
    with callback(tmp_path) as checkpoint:
        begun = {**dicts(model, optimizer), "average": copy.deepcopy(model.state_dict())}
        state, step = checkpoint.restore_or_initialize(begun)
        for now in range(step + 1, 8):
            update(model, optimizer)
            state.update(dicts(model, optimizer))  # The container is that of before, and what is in it is new.
            for name, value in model.state_dict().items():
                state["average"][name].lerp_(value, 0.1)
            checkpoint.on_step(now, state)
    assert told() == []


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda state: None, "model.bias, model.weight"),
        (lambda state: state["model"], "model.bias"),
        (lambda state: tuple(state.values()), "model.bias"),
        (lambda state: {"net": state["model"], "optimizer": state["optimizer"]}, "model.bias, model.weight. Pass"),
        (lambda state: {"model": state["model"]}, "optimizer.param_groups.0"),
        (lambda state: {**state, "model": None}, "model.bias, model.weight. Pass"),
        (lambda state: state, None),
        (dict, None),
        (lambda state: Pair(**state), None),
        (lambda state: {**state, "model": torch.nn.DataParallel(torch.nn.DataParallel(state["model"]))}, None),
    ],
    ids=[
        *("None", "the model", "a tuple", "other names", "a part", "an empty part"),
        *("itself", "made anew", "a named tuple", "wrapped twice"),
    ],
)
def test_another_state_than_came_back_is_refused(change: Any, missing: str | None, tmp_path: Path, told: Any) -> None:
    """The same names in other containers are the same state."""
    if missing is None:
        reports(tmp_path, change)
        assert told() == []
        return
    with pytest.raises(hf.errors.StateError, match=r"on_step\(1\) got a state other") as error:
        reports(tmp_path, change)
    assert missing in str(error.value)
    assert hf.CheckpointManager(tmp_path).all_steps() == []


def test_an_added_name_is_no_other_state(tmp_path: Path, told: Any) -> None:
    reports(tmp_path, lambda state: {**state, "more": torch.zeros(2)})
    (text,) = told()  # of the first save
    assert "more: not in the fresh state" in text
    with pytest.raises(hf.TreeMismatchError, match="more: in the checkpoint, not in the program"):
        reports(tmp_path, lambda state: state)


def lacks(missing: str) -> contextlib.AbstractContextManager[Any]:
    """Expects that a report is refused for the leaves that it lacks, if there are some."""
    if not missing:
        return contextlib.nullcontext()
    return pytest.raises(hf.errors.StateError, match=f"it lacks {missing}\\. Pass")


@pytest.mark.parametrize(
    ("state", "change", "missing"),
    [
        ({"w": np.zeros(2), "n": 0}, FrozenDict, ""),
        ({"w": np.zeros(2), "n": 0}, lambda state: {**state, "more": {"v": np.zeros(1)}}, ""),
        ({"w": np.zeros(2), "old": [1.0]}, lambda state: {**state, "old": []}, ""),
        ({"w": np.zeros(2), "new": None}, lambda state: {**state, "new": np.zeros(1)}, ""),
        ({"w": np.zeros(2), "n": 0}, lambda state: {"w": state["w"]}, "n"),
        ({"w": np.zeros(2), "n": 0}, lambda state: (state["w"], 0), "n, w"),
        ({"params": {"w": np.zeros(2)}, "opt": ()}, lambda state: state["params"], "params.w"),
    ],
    ids=["FrozenDict", "added", "a list", "a None", "a part", "a tuple", "the parameters"],
)
def test_trees_of_arrays(state: Any, change: Any, missing: str, tmp_path: Path) -> None:
    with callback(tmp_path) as checkpoint:
        found, _ = checkpoint.restore_or_initialize(state)
        with lacks(missing):
            checkpoint.on_step(1, change(found))


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda state: state["seen"].clear() or state, ""),
        (lambda state: {**state, "seen": {}}, ""),
        (lambda state: {**state, "seen": {"b": np.ones(1)}}, ""),
        (lambda state: {"w": state["w"]}, "kept.w, seen.a"),
        (lambda state: {**state, "seen": {}, "kept": {}}, "kept.w"),
    ],
    ids=["cleared", "a new one", "another entry", "left out", "one that began with an entry"],
)
def test_a_dictionary_that_begins_empty_may_lose_entries_after_a_resume(
    change: Any, missing: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        with callback(tmp_path) as checkpoint:
            state = {"w": np.zeros(2), "seen": {}, "kept": {"w": np.zeros(1)}}
            found, done = checkpoint.restore_or_initialize(state)
            assert done == step - 1
            if step == 1:
                found["seen"]["a"] = np.ones(1)
                checkpoint.on_step(1, found)
                continue
            with lacks(missing):
                checkpoint.on_step(2, change(found))


def test_objects_of_nnx(tmp_path: Path, told: Any) -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with callback(tmp_path) as checkpoint:
        state, step = checkpoint.restore_or_initialize({"model": model})
        with lacks("model.bias.value, model.kernel.value"):
            checkpoint.on_step(step + 1, model)
        for now in range(step + 1, 4):
            model.kernel[...] = model.kernel[...] + 1
            checkpoint.on_step(now, state)
    assert told() == []


# ---- the numbers of steps


class Loop:
    """A loop of some kind of state, whose updates are counted in it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model, self.optimizer = made(torch.optim.SGD)
        self.state: Any = {"model": self.model, "optimizer": self.optimizer}
        if kind == "numpy":
            self.state = {"w": np.zeros(3, np.float32), "count": 0}
        if kind == "flax":
            create: Any = TrainState.create
            self.state = create(apply_fn=None, params={"w": jnp.zeros(3)}, tx=optax.adam(0.1))

    def update(self) -> None:
        if self.kind == "numpy":
            self.state = {"w": self.state["w"] + 1, "count": self.state["count"] + 1}
        elif self.kind == "flax":
            self.state = apply(self.state)
        else:
            update(self.model, self.optimizer)


@functools.partial(jax.jit, donate_argnums=0)
def apply(state: Any) -> Any:
    return state.apply_gradients(grads={"w": jnp.ones(3)})


def counted(directory: Path, kind: str, numbers: Callable[[int], Iterator[tuple[int, int]]], **options: Any) -> int:
    """Run one process: ``numbers`` gives the updates before each report, and its step."""
    loop = Loop(kind)
    with callback(directory, **options) as checkpoint:
        loop.state, start = checkpoint.restore_or_initialize(loop.state)
        for updates, step in numbers(start):
            for _ in range(updates):
                loop.update()
            checkpoint.on_step(step, loop.state)
    return int(start)


KINDS = pytest.mark.parametrize("kind", ["torch", "numpy", "flax"])


@KINDS
def test_a_loop_that_repeats_an_update_is_told(kind: str, tmp_path: Path, told: Any) -> None:
    for _ in range(2):
        counted(tmp_path, kind, lambda start: ((1, step) for step in range(start, start + 4)))
    assert [re.search(r"on_step\((\d)\) comes after an update", text)[1] for text in told()] == ["0", "3"]  # type: ignore[index]


@KINDS
@pytest.mark.parametrize("every", [1, 10])
def test_a_loop_that_leaves_an_update_out_is_told(kind: str, every: int, tmp_path: Path, told: Any) -> None:
    def numbers(start: int) -> Iterator[tuple[int, int]]:
        yield from ((every, start + 1 + every * index) for index in range(1, 5))

    counted(tmp_path, kind, numbers)
    (text,) = told()
    assert f"the steps after 0 are {1 + every} and {1 + 2 * every}" in text


@KINDS
def test_the_offset_of_steps_is_kept_with_the_run(kind: str, tmp_path: Path, told: Any) -> None:
    begun = [
        counted(tmp_path, kind, lambda start: ((1, step) for step in range(start, start + 4)), **options)
        for options in ({"step_offset": 1}, {}, {"step_offset": 0})
    ]
    assert begun == [0, 4, 7]
    assert told() == [
        "on_step(7) comes after an update, with the step that restore_or_initialize returned: a resume "
        "would repeat it. Write step += 1 before checkpoint.on_step(step, ...), or set step_offset=1 if "
        "step N is the index of an update"
    ]


@pytest.mark.parametrize("kind", ["numpy", "flax"])
@pytest.mark.parametrize(("more", "options"), [(1, {}), (1, {"step_offset": 1}), (1, {"step_offset": 0}), (0, {})])
def test_the_counters_of_another_programs_step_are_compared_at_the_resume(
    kind: str, more: int, options: Any, tmp_path: Path, told: Any
) -> None:
    """A program for Orbax saves step N, from 0, with N + 1 updates in it, and its author adopts the callback."""
    loop = Loop(kind)
    with hf.CheckpointManager(str(tmp_path)) as manager:
        for step in range(3):
            if step or more:
                loop.update()
            manager.save(step, loop.state)
    start = counted(tmp_path, kind, lambda _: iter(()), **options)
    assert start == 2 + options.get("step_offset", 0)
    names = {"numpy": "count", "flax": "step, opt_state.0.count"}
    warning = f"its state has counted 3 updates ({names[kind]}): if step N is the index of an update"
    assert sum(warning in text and "begin with step_offset=1" in text for text in told()) == (more and not options)


@pytest.mark.parametrize("value", [2, -1, True])
def test_other_offsets_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(hf.errors.OptionError, match="step_offset"):
        callback(tmp_path, step_offset=value)


@KINDS
@pytest.mark.parametrize(
    "reported",
    [
        [(1, 1), (1, 2), (1, 3)],
        [(0, 0), (1, 1), (1, 2)],
        [(100, 1), (100, 2), (100, 3)],
        [(1, 33), (1, 65), (1, 97)],
        [(1, 200), (1, 399), (1, 598)],
        [(4, 4), (4, 8), (3, 11)],
        [(0, 1), (0, 2), (0, 3), (1, 4)],
        [(0, 2), (1, 3), (1, 4)],
        [(0, 1), (1, 2), (0, 3), (1, 4)],
    ],
    ids=["updates", "before", "epochs", "samples", "environment", "several", "micro-batches", "warm-up", "scaler"],
)
def test_right_numbers_are_silent(kind: str, reported: Any, tmp_path: Path, told: Any) -> None:
    counted(tmp_path, kind, lambda start: iter(reported), save_interval_steps=1000)
    assert told() == []


# ---- an optimizer that is not saved, a model that is not trained


@pytest.mark.parametrize(
    ("state", "is_made_anew"),
    [
        (lambda model, _: {"model": model}, False),
        (lambda model, _: {"model": [model], "n": torch.ones(1)}, False),
        (lambda model, optimizer: {"model": model, "optimizer": optimizer}, True),
    ],
    ids=["left out", "beside others", "made anew after the restore"],
)
def test_an_optimizer_that_is_left_out_is_told_at_the_second_save(
    state: Any, is_made_anew: bool, tmp_path: Path, told: Any
) -> None:
    model, optimizer = made()
    with callback(tmp_path) as checkpoint:
        state, _ = checkpoint.restore_or_initialize(state(model, optimizer))
        if is_made_anew:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(1, 10):
            update(model, optimizer)
            checkpoint.on_step(step, state)
            assert len(told()) == (step >= 6)
    assert re.search(r"step 6 is saved without the Adam of model\S*bias, model\S*weight, which has a state", told()[0])


class Around(torch.optim.Optimizer):
    """Updates with an optimizer of its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_optimizers_that_are_saved_in_any_way_or_not_used_are_silent(tmp_path: Path, told: Any) -> None:
    first, second = made(), made()
    update(first[0], earlier := torch.optim.Adam(first[0].parameters()))  # of a phase that has ended
    both = {"g": first[0], "d": second[0], "optimizers": [first[1], second[1]]}
    trains(tmp_path / "gan", both, [first, second])
    trains(tmp_path / "as an extra", {"model": first[0]}, [first], optimizer=first[1])
    trains(tmp_path / "state dicts", lambda: dicts(*first), [first])
    plain = made(torch.optim.SGD)
    trains(tmp_path / "without a state", {"model": plain[0]}, [plain])
    around = made()[0]
    outer = Around(torch.optim.Adam(around.parameters()))
    trains(tmp_path / "around another", {"model": around, "optimizer": outer}, [(around, outer)])
    average = copy.deepcopy(first[0])
    trains(tmp_path / "an average", {"model": first[0], "optimizer": first[1], "average": average}, [first])
    assert told() == []
    assert earlier.state


UNCHANGED = """
import copy, gc, sys, torch, holdfast as hf

def train(name, directory):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if name == "a rate of 0" else 0.1, momentum=0.9)
    if name == "frozen":
        model.requires_grad_(False)
        adapter = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    with hf.CheckpointCallback(directory, save_interval_steps=60) as checkpoint:
        state = {"model": model, "optimizer": optimizer} | ({"adapter": adapter} if name == "frozen" else {})
        state, start = checkpoint.restore_or_initialize(state)
        if name == "anew":
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "a copy":
            model = copy.deepcopy(model)
        for step in range(start + 1, 201):
            loss = model(torch.full((1, 3), float(step % 7 - 3)))
            loss = (adapter(loss) if name == "frozen" else loss).square().mean()
            if name not in ("evaluation", "warm-up") or (name == "warm-up" and step > 190):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            checkpoint.on_step(step, state, metrics={"loss": loss.item()})

for name in sys.argv[2:]:
    print("----", name, file=sys.stderr)
    train(name, f"{sys.argv[1]}/{name}")
    gc.collect()
"""
TRAINED_OUTSIDE = {
    **dict.fromkeys(("evaluation", "a rate of 0", "warm-up", "frozen", "training"), False),
    **dict.fromkeys(("anew", "a copy"), True),
}


def test_a_state_that_training_does_not_use_is_told(tmp_path: Path) -> None:
    """In a process that holds no parameters of other programs."""
    done = run("-c", UNCHANGED, tmp_path, *TRAINED_OUTSIDE, backend="torch")
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stderr.split("---- ")[1:])
    text = "the state at step 180 is the same as at step 60, and 2 parameters outside of it are trained"
    assert {name: text in part for name, part in said.items()} == TRAINED_OUTSIDE, done.stderr
    assert "without" not in done.stderr


# ---- parts that are made in training


class Trainer:
    """Keeps the best model, and grows, as many programs do."""

    def __init__(self) -> None:
        self.model, self.optimizer = made(torch.optim.SGD)
        self.best: Any = None
        self.episodes = {"first": torch.zeros(2)}

    def keep_best(self) -> None:
        self.best = copy.deepcopy(self.model)

    def grow(self) -> None:
        self.model.added = torch.nn.Linear(1, 1)

    def prune(self) -> None:
        self.model.weight = torch.nn.Parameter(self.model.weight[:, :2].detach())

    def forget(self) -> None:
        self.episodes.clear()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("keep_best", r"trainer/best: a different object than in the fresh state"),
        ("grow", r"trainer/model/added: not in the fresh state"),
        ("prune", r"trainer/model/weight: expected float32\[1, 3\] \(the fresh state\), found float32\[1, 2\] .*"),
        ("forget", r"trainer/episodes/first: only in the fresh state"),
    ],
)
@pytest.mark.parametrize("peeks", [False, True])
def test_parts_that_no_fresh_state_has_are_named_at_the_first_save(
    change: str, names: str, peeks: bool, tmp_path: Path, told: Any
) -> None:
    trainer = Trainer()
    with callback(tmp_path, save_interval_steps=1) as checkpoint:
        if peeks:
            checkpoint.peek()
        state, _ = checkpoint.restore_or_initialize({"trainer": trainer})
        getattr(trainer, change)()
        for step in (1, 2):
            checkpoint.on_step(step, state)
    said = [text for text in told() if "would be refused" in text]
    assert len(said) == (not peeks)
    assert peeks or re.search(f"refused: {names}. Make", said[0])
    refused = pytest.raises(hf.TreeMismatchError, match=names.partition(":")[0])
    with callback(tmp_path) as again, refused as raised:
        again.restore_or_initialize({"trainer": Trainer()})
    assert any("peek()" in note for note in raised.value.__notes__)


def test_the_plain_callback_names_the_one_for_a_trainer(tmp_path: Path) -> None:
    checkpoint: Any = callback(tmp_path)
    with pytest.raises(AttributeError, match=r"takes holdfast\.integrations\.lightning\.CheckpointCallback"):
        checkpoint.on_train_start(None, None)
    with pytest.raises(AttributeError, match="has no attribute 'on_steps'"):
        checkpoint.on_steps(3)
    assert not hasattr(checkpoint, "model")


# ---- updates that torch does not count


class Own(torch.optim.Optimizer):
    """An optimizer that changes ``p.data``, as many published ones do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch declares two ways
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad, alpha=-group["lr"])


@pytest.mark.parametrize("later", [0, 1], ids=["reported", "after the last report"])
def test_updates_that_torch_does_not_count_are_noticed_by_the_gradients(later: int, tmp_path: Path, told: Any) -> None:
    pair = made(Own)
    trains(tmp_path, {"model": pair[0], "optimizer": pair[1]}, [pair], last=7, later=later)
    lost = (
        "step 7 is not saved at the end: its tensors were changed since; call on_step after every update, and once "
        "more after forward passes at the end, such as those of micro-batches that are left"
    )
    assert told() == [lost] * later
    assert hf.CheckpointManager(tmp_path).all_steps() == [3, 6, 7][: 3 - later]


@pytest.mark.parametrize("given", [{}, {"rng": None}], ids=["nothing", "a plain value"])
def test_an_object_that_only_on_step_gets_is_told(given: Any, tmp_path: Path, told: Any) -> None:
    with callback(tmp_path) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.zeros(2)}, **given)
        for step in range(1, 4):
            rng = None if given and step == 1 else np.random.default_rng(0)
            checkpoint.on_step(step, state, rng=rng, note="plain data that each step has")
    (text,) = told()
    assert text.startswith("on_step was given rng=rng, and restore_or_initialize was not: a resume does not restore")


def test_an_outcome_is_neither_true_nor_false(tmp_path: Path) -> None:
    with callback(tmp_path) as checkpoint:
        outcome = checkpoint.on_step(1, {"w": np.zeros(2)})
        with pytest.raises(hf.errors.OptionError, match=r"ask for on_step\(\.\.\.\)\.should_stop"):
            bool(outcome)


def test_extras_that_are_not_passed_any_more_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    rng = np.random.default_rng(0)
    for extras in ({"rng": rng}, {}):
        with callback(tmp_path) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)}, **extras)
            for step in range(start + 1, start + 5):
                checkpoint.on_step(step, state, **extras)
    assert "step 4 has extras that this program does not pass: rng=" in caplog.messages
