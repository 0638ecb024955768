"""partial= of the Lightning callback: programs that have changed since their checkpoint, and continue."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as lightning
import pytest
import safetensors.torch
import torch
from lightning.pytorch import callbacks as parts
from tests.equality import assert_same
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

pytestmark = [
    # of callbacks that only one of two programs has
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:The checkpoint was not created with WeightAveraging"),
]

activations: Any = checkpoint_wrapper  # whose functions have no types
STEPS = 3


class Net(lightning.LightningModule):
    """Layers in a row, each with its weight and bias; a test's program says which, and with what optimizers."""

    def __init__(self, layers: dict[str, int], optimizers: Callable[[Any], Any]) -> None:
        super().__init__()
        width = 3
        for name, units in layers.items():
            setattr(self, name, torch.nn.Linear(width, units))
            width = units
        self.names, self.optimizers_of = list(layers), optimizers
        self.initial: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        values: torch.Tensor = batch[0]
        for name in self.names:
            values = torch.tanh(getattr(self, name)(values))
        return values.square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


class Seen(lightning.Callback):
    """What training begins with: copies of weights, the optimizers' states by parameter, schedules."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step
        self.weights, self.moments, self.groups, self.schedules = contents(trainer, pl_module)


def contents(trainer: Any, module: Any) -> tuple[Any, ...]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    moments = {
        names[parameter]: {key: torch.as_tensor(value).clone() for key, value in state.items() if key != "signs"}
        for optimizer in trainer.optimizers
        for parameter, state in optimizer.state.items()
    }
    groups = [
        ([names[one] for one in group["params"]], group["lr"])
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    schedules = [dict(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
    return {name: value.clone() for name, value in module.state_dict().items()}, moments, groups, schedules


def fit(
    directory: str,
    steps: int,
    layers: dict[str, int],
    optimizers: Any,
    *,
    kind: Any = Net,
    seed: int = 1,
    callbacks: tuple[Any, ...] = (),
    ckpt_path: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Seen]:
    torch.manual_seed(seed)
    seen, net = Seen(), kind(layers, optimizers)
    net.initial = {name: value.clone() for name, value in net.state_dict().items()}
    callback = CheckpointCallback(directory, **{"save_interval_steps": 1, **options})
    made = program.trainer(callback, seen, *callbacks, max_steps=steps, **(trainer or {}))
    made.fit(net, *program.loaders("plain"), ckpt_path=ckpt_path)
    return made, seen


def adam(net: Any) -> Any:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def scheduled(optimizer: Any, schedule: Any = None) -> Any:
    schedule = schedule or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decayed(net: Any) -> Any:
    return scheduled(adam(net))


def new_group(net: Any) -> Any:
    """The new layer first, with a learning rate of its own."""
    old = [value for name, value in net.named_parameters() if not name.startswith("new")]
    groups: Any = [{"params": [*net.new.parameters()], "lr": 1.0}, {"params": old}]
    return scheduled(torch.optim.Adam(groups, lr=0.05))


def cosine(net: Any) -> Any:
    optimizer = adam(net)
    return scheduled(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40))


def kept(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Tells whether moments are those that were saved."""
    return all(torch.equal(value, expected[name][key]) for name in found for key, value in found[name].items())


LAYERS = {"one": 4, "two": 3, "head": 2}
OF_NEW = frozenset({"new.weight", "new.bias"})
OF_HEAD = frozenset({"head.weight", "head.bias"})
ALL = frozenset(f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))


class Change(NamedTuple):
    """Layers and optimizers of a program, and those that it had; what stays as it was initialized, and what is told.

    Weights and moments are fresh; where the optimizer is another one, only moments are.
    """

    layers: dict[str, int]
    optimizers: Any = adam
    old_layers: dict[str, int] = LAYERS
    old_optimizers: Any = adam
    fresh: frozenset[str] = frozenset()
    told: tuple[str, ...] = ()


AT_END = {**LAYERS, "new": 2}
AT_BEGINNING = {"new": 3, **LAYERS}
ADDED = ("state_dict/new.weight: not in the checkpoint", "optimizer_states/0/new.bias: not in the checkpoint")
REMOVED = ("left in the checkpoint: state_dict/new.weight", "left in the checkpoint: optimizer_states/0/new.weight")
OTHER_HEAD = (
    "state_dict/head.weight: expected shape [5, 3] (program), found [2, 3] (checkpoint)",
    "optimizer_states/0/head.bias: expected shape [5] (program), found [2] (checkpoint)",
)
OTHER_OPTIMIZER = "optimizer_states/0: expected torch.optim.sgd.SGD (program), found torch.optim.adam.Adam (checkpoint)"
NO_GROUP = "optimizer_states/0/param_groups/0: not in the checkpoint"
OTHER_SCHEDULE = "lr_schedulers/0: expected torch.optim.lr_scheduler.CosineAnnealingLR (program), found torch.optim.lr_"
CHANGES = {
    "a layer at the end": Change(AT_END, fresh=OF_NEW, told=ADDED),
    "a layer at the beginning": Change(AT_BEGINNING, fresh=OF_NEW, told=ADDED),
    "a layer less": Change(LAYERS, old_layers=AT_BEGINNING, told=REMOVED),
    "another head": Change({**LAYERS, "head": 5}, fresh=OF_HEAD, told=OTHER_HEAD),
    "another optimizer": Change(LAYERS, sgd, fresh=ALL, told=(OTHER_OPTIMIZER,)),
    "a layer with its own rate": Change(AT_END, new_group, LAYERS, decayed, OF_NEW, (NO_GROUP,)),
    "a schedule": Change(LAYERS, decayed, told=("lr_schedulers/0: not in the checkpoint",)),
    "another schedule": Change(LAYERS, cosine, LAYERS, decayed, told=(OTHER_SCHEDULE,)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_fits_is_restored_and_the_rest_is_told(change: str, caplog: pytest.LogCaptureFixture) -> None:
    layers, optimizers, old_layers, old_optimizers, fresh, told = CHANGES[change]
    directory = new_directory()
    old, _ = fit(directory, STEPS, old_layers, old_optimizers)
    weights, moments, _, schedules = contents(old, old.lightning_module)

    with pytest.raises((hf.TreeMismatchError, RuntimeError, ValueError)) as refused:
        fit(directory, STEPS + 1, layers, optimizers, seed=2)
    assert "partial='initialize' restores what fits" in refused.value.__notes__[0]
    caplog.clear()
    trainer, seen = fit(directory, STEPS + 1, layers, optimizers, seed=2, partial="initialize")

    net = trainer.lightning_module
    new = fresh if optimizers is not sgd else set()
    assert seen.step == STEPS
    for name, value in seen.weights.items():
        assert torch.equal(value, net.initial[name] if name in new else weights[name]), name
    assert seen.moments.keys() == {name for name, _ in net.named_parameters()} - fresh
    assert kept(seen.moments, moments)
    if schedules and seen.schedules:
        assert seen.schedules[0]["last_epoch"] == STEPS
    (warning,) = [text for text in caplog.messages if "partial='initialize'" in text]
    assert [text for text in told if text not in warning] == []
    assert trainer.global_step == STEPS + 1

    caplog.clear()  # once saved, it resumes as any other, and strictly
    _, seen = fit(directory, STEPS + 2, layers, optimizers, seed=3)
    assert seen.step == STEPS + 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_group_of_its_own_keeps_its_rate() -> None:
    directory = new_directory()
    fit(directory, STEPS, LAYERS, decayed)
    _, seen = fit(directory, STEPS + 1, AT_END, new_group, partial="initialize")

    assert [(names[0], rate) for names, rate in seen.groups] == [("new.weight", 1.0), ("one.weight", 0.05 * 0.5**3)]
    assert seen.schedules[0]["base_lrs"] == [1.0, 0.05]
    assert seen.schedules[0]["last_epoch"] == STEPS


class Reversed(Net):
    """Uses its layers in the opposite order."""

    def __init__(self, layers: dict[str, int], optimizers: Callable[[Any], Any]) -> None:
        super().__init__(layers, optimizers)
        self.names.reverse()


def test_what_an_optimizer_keeps_follows_the_names() -> None:
    """Parameters of the same shape in another order: torch would exchange their moments, also without partial."""
    directory, layers = new_directory(), {"one": 3, "two": 3}
    old, _ = fit(directory, STEPS, layers, adam)
    _, moments, _, _ = contents(old, old.lightning_module)
    for partial in (None, "initialize"):
        turned = dict(reversed(layers.items()))
        saves: dict[str, Any] = {"save_interval_steps": None, "save_at_end": False}
        _, seen = fit(directory, STEPS + 1, turned, adam, kind=Reversed, seed=7, partial=partial, **saves)
        assert [names for names, _ in seen.groups] == [["two.weight", "two.bias", "one.weight", "one.bias"]]
        assert kept(seen.moments, moments)


class Checkpointed(Net):
    """Computes the activations of its layers anew in the backward pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        activations.apply_activation_checkpointing(self, check_fn=lambda module: isinstance(module, torch.nn.Linear))


@pytest.mark.parametrize(("before", "after"), [(Net, Checkpointed), (Checkpointed, Net)])
@pytest.mark.parametrize("partial", [None, "initialize"])
def test_activation_checkpointing_on_and_off(before: type[Net], after: type[Net], partial: Any) -> None:
    """Each layer with a rate of its own, so that names decide about groups."""

    def rates(net: Any) -> Any:
        groups: Any = [{"params": [value], "lr": 0.01 * len(value)} for value in net.parameters()]
        return torch.optim.Adam(groups)

    def bare(name: str) -> str:
        return name.replace("_checkpoint_wrapped_module.", "")

    def bare_groups(groups: list[Any]) -> list[Any]:
        return [([bare(name) for name in names], rate) for names, rate in groups]

    directory = new_directory()
    trainer, _ = fit(directory, STEPS, LAYERS, rates, kind=before)
    weights, moments, groups, _ = contents(trainer, trainer.lightning_module)
    _, again = fit(directory, STEPS + 1, AT_END if partial else LAYERS, rates, kind=after, seed=2, partial=partial)
    assert again.step == STEPS
    assert again.weights.keys() == weights.keys() | (OF_NEW if partial else set())
    assert all(torch.equal(again.weights[name], value) for name, value in weights.items())
    found = {bare(name): value for name, value in again.moments.items()}
    assert found.keys() == {bare(name) for name in moments}
    assert kept(found, {bare(name): value for name, value in moments.items()})
    assert bare_groups(again.groups)[: len(groups)] == bare_groups(groups)


def test_parameters_in_other_groups_are_refused() -> None:
    def groups(*first: str) -> Any:
        def make(net: Any) -> Any:
            one = [value for name, value in net.named_parameters() if name.startswith(first)]
            other = [value for name, value in net.named_parameters() if not name.startswith(first)]
            made: Any = [{"params": one, "lr": 1.0}, {"params": other}]
            return torch.optim.Adam(made, lr=0.05)

        return make

    layers = {"one": 3, "two": 3}
    directory = new_directory()
    fit(directory, STEPS, layers, groups("one"))
    with pytest.raises(hf.TreeMismatchError, match="grouped differently than in the checkpoint"):
        fit(directory, STEPS + 1, layers, groups("two"))


class Manual(Net):
    """Has an optimizer for each of some layers, or one for all, and updates by itself."""

    def __init__(self, layers: dict[str, int], optimized: tuple[str, ...]) -> None:
        def optimizers(net: Any) -> Any:
            return [adam(getattr(net, name)) for name in optimized] or [adam(net)]

        super().__init__(layers, optimizers)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        found = self.optimizers()
        for one in found if isinstance(found, list) else [found]:
            one.step()
            one.zero_grad()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Nothing, as a training step updates."""


def test_another_number_of_optimizers_is_refused() -> None:
    """Lightning would leave the second one as it is made, and say nothing."""
    directory, layers = new_directory(), {"one": 3, "two": 3}
    fit(directory, STEPS, layers, (), kind=Manual)
    with pytest.raises(hf.TreeMismatchError, match=r"expected 2 optimizers \(program\), found 1"):
        fit(directory, 3 * STEPS, layers, ("two", "one"), kind=Manual)
    _, seen = fit(directory, 3 * STEPS, layers, ("two", "one"), kind=Manual, partial="initialize")
    assert seen.moments.keys() == {"two.weight", "two.bias"}  # the first took what it could, the other is fresh


class Wider(program.Wide):
    """Keeps a list of tensors, too."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["signs"] = [state["sum"].sign().to(torch.int8)]
        return loss


class Widest(Wider):
    pass


class AlsoWide(torch.optim.Optimizer):
    """Of another class than `Wide`, with the same states."""

    step = program.Wide.step

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


class Replacing(lightning.Callback):
    """Begins another optimizer over the same parameters, as finetuning in phases does."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            trainer.strategy.optimizers = [self.kind(pl_module.parameters(), lr=0.05)]


@pytest.mark.parametrize(("first", "then"), [(torch.optim.Adam, torch.optim.RAdam), (program.Wide, AlsoWide)])
def test_an_optimizer_that_replaced_another_is_refused_to_the_first(first: Any, then: Any) -> None:
    directory, layers = new_directory(), {"one": 3}

    def begun(net: Any) -> Any:
        return first(net.parameters(), lr=0.05)

    fit(directory, STEPS, layers, begun, callbacks=(Replacing(then),))
    with pytest.raises(hf.TreeMismatchError, match=f"optimizer 0: expected .*{first.__name__}.*{then.__name__}"):
        fit(directory, STEPS + 1, layers, begun)
    _, seen = fit(directory, STEPS + 1, layers, begun, partial="initialize")
    assert (seen.step, seen.moments) == (STEPS, {})
    _, seen = fit(directory, STEPS + 2, layers, lambda net: then(net.parameters(), lr=0.05), partial="initialize")
    assert seen.step == STEPS + 1


@pytest.mark.parametrize("partial", [None, "initialize"])
def test_what_an_optimizer_keeps_has_the_dtypes_that_it_had_also_in_a_derived_class(partial: Any) -> None:
    directory, found = new_directory(), list[Any]()
    trainer, _ = fit(directory, STEPS, {"one": 3}, lambda net: Wider(net.parameters()))
    saved = {name: dict(trainer.optimizers[0].state[one]) for name, one in trainer.model.named_parameters()}

    class Keeping(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            states = {name: trainer.optimizers[0].state[one] for name, one in pl_module.named_parameters()}
            found.append(copy.deepcopy(states))

    saves: dict[str, Any] = {"save_interval_steps": None, "save_at_end": False, "partial": partial}
    for optimizer in (lambda net: Wider(net.parameters()), lambda net: Widest(net.parameters())):
        fit(directory, STEPS + 1, {"one": 3}, optimizer, callbacks=(Keeping(),), **saves)
    assert_same(found, [saved, saved])


def average() -> Any:
    return parts.EMAWeightAveraging(decay=0.5)


@pytest.mark.needs("lightning", "2.6")
@pytest.mark.parametrize("partial", [None, "initialize"])
def test_an_average_from_now_on(partial: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()
    old, _ = fit(directory, STEPS, LAYERS, adam)
    weights = old.lightning_module.state_dict()
    _, seen = fit(directory, STEPS, LAYERS, adam, seed=2, callbacks=(average(),), partial=partial)
    assert not hasattr(seen, "step")  # nothing left to do, with the average in place
    caplog.clear()
    _, seen = fit(directory, STEPS + 2, LAYERS, adam, seed=2, callbacks=(average(),), partial=partial)
    assert seen.step == STEPS
    assert all(torch.equal(value, weights[name]) for name, value in seen.weights.items())
    told = [text for text in caplog.messages if "callbacks/EMAWeightAveraging: not in the checkpoint" in text]
    assert len(told) == (partial is not None)


@pytest.mark.needs("lightning", "2.6")
def test_an_average_and_a_new_layer() -> None:
    """Of both: the weights and their average keep what fits."""
    directory = new_directory()
    fit(directory, STEPS, LAYERS, adam, callbacks=(average(),))
    saved = hf.load(f"{directory}/{STEPS}")

    class Began(Seen):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            (found,) = [one for one in trainer.callbacks if isinstance(one, parts.EMAWeightAveraging)]
            assert found._average_model is not None
            self.average = {k: v.clone() for k, v in found._average_model.module.state_dict().items()}

    began = Began()
    fit(directory, STEPS + 1, AT_END, adam, seed=2, callbacks=(average(), began), partial="initialize")
    for name in ALL:
        assert began.weights[name].numpy().tobytes() == saved["current_model_state"][name].tobytes()
        assert began.average[name].numpy().tobytes() == saved["state_dict"][name].tobytes()
        assert not torch.equal(began.weights[name], began.average[name])
    for name in OF_NEW:
        assert torch.equal(began.weights[name], began.average[name])


@pytest.mark.needs("lightning", "2.6")
def test_an_average_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """The state dict of such a checkpoint is the average: training would continue from it, and say nothing."""
    directory = new_directory()
    fit(directory, STEPS, LAYERS, adam, callbacks=(average(),))
    saved = hf.load(f"{directory}/{STEPS}")
    with pytest.raises(hf.TreeMismatchError, match="saved with WeightAveraging"):
        fit(directory, STEPS + 1, LAYERS, adam, seed=2)
    _, seen = fit(directory, STEPS + 1, LAYERS, adam, seed=2, partial="initialize")
    for name in ALL:
        assert seen.weights[name].numpy().tobytes() == saved["current_model_state"][name].tobytes()
    assert "left in the checkpoint: the average of WeightAveraging" in caplog.text


def test_clipping_is_no_state(caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()
    fit(directory, STEPS, LAYERS, adam)
    _, seen = fit(directory, STEPS + 1, LAYERS, adam, partial="initialize", trainer={"gradient_clip_val": 0.1})
    assert seen.step == STEPS
    assert seen.moments.keys() == ALL
    assert "partial='initialize'" not in caplog.text


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(("layers", "taken"), [(LAYERS, True), (AT_BEGINNING, False)], ids=["same", "changed"])
def test_a_file_of_lightning_does_not_name_parameters(
    tmp_path: Any, layers: dict[str, int], taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their order is all there is: it is used where all shapes fit, and never guessed from."""
    old, _ = fit(new_directory(), STEPS, LAYERS, adam)
    old.save_checkpoint(tmp_path / "x.ckpt")
    _, moments, _, _ = contents(old, old.lightning_module)
    _, seen = fit(new_directory(), STEPS + 1, layers, adam, partial="initialize", ckpt_path=tmp_path / "x.ckpt")
    assert seen.step == STEPS
    assert set(seen.moments) == (ALL if taken else set())
    assert all(torch.equal(seen.moments[name]["exp_avg"], moments[name]["exp_avg"]) for name in seen.moments)
    assert ("does not name the parameters" in caplog.text) == (not taken)


def weights_in(place: Path, kind: str) -> dict[str, torch.Tensor]:
    """Trains for some steps, and writes the weights as a checkpoint of a kind."""
    run = place if kind == "run" else new_directory()
    trainer, _ = fit(str(run), STEPS, LAYERS, adam)
    weights: dict[str, torch.Tensor] = trainer.lightning_module.state_dict()
    if kind == "lightning.ckpt":
        trainer.save_checkpoint(place)
    elif kind == "weights.pt":
        torch.save(weights, place)
    elif kind == "weights.safetensors":
        safetensors.torch.save_file(weights, place)
    return weights


@pytest.mark.parametrize("kind", ["run", "lightning.ckpt", "weights.pt", "weights.safetensors"])
def test_weights_come_from_any_checkpoint(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = weights_in(tmp_path / kind, kind)
    caplog.set_level(logging.INFO, "holdfast")
    _, seen = fit(new_directory(), 1, LAYERS, adam, seed=2, init_from=tmp_path / kind)
    assert_same(seen.weights, dict(weights))
    assert (seen.step, seen.moments) == (0, {})
    assert len([line for line in caplog.messages if line.startswith("took the weights from ")]) == 1


def test_init_from_takes_the_weights_that_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, layers = weights_in(tmp_path, "run"), {**AT_END, "head": 5}
    with pytest.raises(hf.TreeMismatchError, match="are not those of the model"):
        fit(new_directory(), 1, layers, adam, seed=2, init_from=tmp_path)
    trainer, seen = fit(new_directory(), 1, layers, adam, seed=2, init_from=tmp_path, partial="initialize")

    initial = trainer.lightning_module.initial
    for name, value in seen.weights.items():
        assert torch.equal(value, initial[name] if name in OF_HEAD | OF_NEW else weights[name]), name
    assert (seen.step, seen.moments) == (0, {})
    (warning,) = [text for text in caplog.messages if "partial='initialize'" in text]
    assert {line.split(":")[1].strip() for line in warning.splitlines()[1:]} == OF_HEAD | OF_NEW


def test_an_interruption_after_it_changes_nothing() -> None:
    """The first start of the changed program may be the last one with partial=."""
    finals = []
    for steps in ((2 * STEPS,), (STEPS + 1, STEPS + 2, 2 * STEPS)):
        directory = new_directory()
        fit(directory, STEPS, LAYERS, decayed)
        for index, count in enumerate(steps):
            partial = None if index else "initialize"
            trainer, _ = fit(directory, count, AT_BEGINNING, decayed, seed=2 + index * 9, partial=partial)
        finals.append(program.plain(contents(trainer, trainer.lightning_module)))
    assert finals[0] == finals[1]


def test_a_strategy_that_divides_modules_is_refused() -> None:
    class ModelParallelStrategy(lightning.strategies.SingleDeviceStrategy):
        _save_distributed_checkpoint = True

    strategy = {"strategy": ModelParallelStrategy(device="cpu")}
    with pytest.raises(hf.errors.OptionError, match="partial='initialize' does not work with ModelParallelStrategy"):
        fit(new_directory(), 1, LAYERS, adam, partial="initialize", trainer=strategy)
