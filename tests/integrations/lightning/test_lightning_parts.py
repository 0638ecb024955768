"""The parts of the callback, one by one."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from argparse import Namespace
from collections import OrderedDict
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from tests.equality import assert_same
from tests.integrations.lightning import program

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, private_api
from holdfast.integrations.lightning.private_api import check_version, missing_names
from holdfast.integrations.lightning.saving import MetricsLedger, copied
from holdfast.integrations.lightning.strategies import StateHandler
from holdfast.integrations.lightning.trees import from_tree, to_tree


def through_disk(checkpoint: dict[str, Any], directory: Any) -> dict[str, Any]:
    hf.save(directory, to_tree(checkpoint)[0])
    return from_tree(hf.load(directory))


# ---- trees


def test_tensors_come_back_with_their_strides(tmp_path: Any) -> None:
    """An optimizer that keeps a transposed matrix rounds differently with another order in memory."""
    tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bfloat16": torch.rand(3, 4, dtype=torch.bfloat16).T,
        "batches": torch.rand(2, 3, 4).mT,
        "ordinary": torch.rand(2, 3),
        "every second": torch.rand(3, 4)[:, ::2],  # not dense: as an ordinary one
        "expanded": torch.rand(3, 1).expand(3, 4),
    }
    checkpoint = {"state_dict": tensors, "optimizer_states": [{"state": {0: tensors}}], "callbacks": {"other": tensors}}
    found = through_disk(checkpoint, tmp_path / "checkpoint")
    buffers: dict[Any, torch.Tensor] = {}
    for tree in (found, copied(checkpoint, buffers), copied(checkpoint, buffers)):
        for each in (tree["state_dict"], tree["optimizer_states"][0]["state"][0], tree["callbacks"]["other"]):
            for name, value in each.items():
                assert torch.equal(value, tensors[name]), name
                assert value.stride() == torch.empty_like(tensors[name]).stride(), name


def test_every_kind_of_state_comes_back_as_what_it_was(tmp_path: Any) -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
    checkpoint: dict[str, Any] = {
        "state_dict": OrderedDict((str(kind), torch.arange(6).reshape(2, 3).to(kind)) for kind in kinds),
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.99)}]}
        ],
        "empty": {"list": [], "dict": {}, "tensor": torch.zeros(0, 3)},
        "numbers": [1, -(10**30), 0.1, float("nan"), float("inf"), 1j, True, None, "text", b"bytes"],
        "numpy": {"array": np.arange(4, dtype=">u2"), "scalar": np.float32(0.5), "words": np.array(["a", "bc"])},
        "integer keys": {1: "one", "1": "text"},
        "sets": {1, 2},
        "strided": torch.arange(12).reshape(3, 4)[:, ::2],
        "shape": torch.Size([2, 3]),
    }
    assert_same(dict(through_disk(checkpoint, tmp_path / "checkpoint")), checkpoint)


class Color(Enum):
    RED = "#f00"


@dataclasses.dataclass(frozen=True)
class Network:
    width: int
    act: type
    where: Path | None = None


VALUES: dict[str, tuple[Any, Any]] = {  # and what a reader that knows nothing of them gets
    "path": (Path("data/x"), "data/x"),
    "namespace": (Namespace(lr=0.1, inner=Namespace(path=Path("y"))), {"lr": 0.1, "inner": {"path": "y"}}),
    "dataclass": (
        [Network(3, torch.nn.ReLU, Path("z"))],
        [{"width": 3, "act": "torch.nn.modules.activation.ReLU", "where": "z"}],
    ),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "memory format": (torch.channels_last, "torch.channels_last"),
    "device": (torch.device("cuda:1"), "cuda:1"),
    "numpy dtype": (np.dtype("<f4"), "<f4"),
    "numpy type": (np.float32, "numpy.float32"),
    "numpy scalar": (np.int64(3), np.int64(3)),
    "enum": ({"color": Color.RED}, {"color": "RED"}),
    "size": (torch.Size([2, 3]), [2, 3]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_other_types_are_kept(tmp_path: Path, name: str) -> None:
    value, plain = VALUES[name]
    found = through_disk({"hyper_parameters": {"one": value, "other": 1}}, tmp_path / "checkpoint")
    assert found == {"hyper_parameters": {"one": value, "other": 1}}
    assert type(found["hyper_parameters"]["one"]) is type(value)
    read = hf.load(tmp_path / "checkpoint")["hyper_parameters"]
    assert read == {"one": plain, "other": 1}


def test_a_class_that_the_program_has_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = to_tree({"network": Network(3, torch.nn.ReLU), "color": Color.RED})
    monkeypatch.delattr(f"{__name__}.Network")
    monkeypatch.delattr(f"{__name__}.Color")
    assert from_tree(tree) == {"network": {"width": 3, "act": torch.nn.ReLU, "where": None}, "color": "RED"}


def test_names_in_a_checkpoint_run_nothing() -> None:
    for kind in ("class os:system", "dataclass subprocess:Popen", "class subprocess:Popen", "enum argparse:Namespace"):
        forged = {"one": "x", "value_types": json.dumps([[["one"], kind]])}
        assert from_tree(forged) == {"one": "x"}


def test_configurations_of_omegaconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DictConfig:
        __module__ = "omegaconf.dictconfig"

        def __init__(self, content: Any) -> None:
            self.content = content

    class OmegaConf:
        create = DictConfig

        @staticmethod
        def to_container(config: DictConfig, *, resolve: bool) -> Any:
            assert not resolve
            return config.content

    stand_in = ModuleType("omegaconf")
    vars(stand_in).update(OmegaConf=OmegaConf)
    monkeypatch.setitem(sys.modules, "omegaconf", stand_in)
    content = {"lr": 0.1, "twice": "${lr}", "data": {"path": Path("x")}}
    found = through_disk({"hyper_parameters": DictConfig(content)}, tmp_path / "checkpoint")["hyper_parameters"]
    assert type(found) is DictConfig
    assert found.content == content
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # not installed
    assert from_tree(hf.load(tmp_path / "checkpoint"))["hyper_parameters"] == content


_ARRAYS = st.sampled_from([torch.ones(2), np.ones(2), np.float64(2.0), torch.tensor(1, dtype=torch.bfloat16)])
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _ARRAYS
_KEYS = st.text(max_size=4) | st.integers(-(2**63), 2**63 - 1)


def _lists_and_dictionaries(inner: Any) -> Any:
    return st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), st.recursive(_LEAVES, _lists_and_dictionaries, max_leaves=12), max_size=3))
def test_any_tree_comes_back(checkpoint: dict[str, Any]) -> None:
    tree, left = to_tree(checkpoint)
    directory = "memory://lightning-trees/one"
    hf.save(directory, tree, overwrite=True)
    assert left == []
    assert_same(dict(from_tree(hf.load(directory))), checkpoint)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (object(), "extra (object)"),
        ({"deep": {"part": partial(print)}}, "extra/deep/part (functools.partial)"),
        ([1, torch.relu], "extra (builtin_function_or_method)"),
        ([{"inner": torch.nn.ReLU()}], "extra/0/inner (torch.nn.modules.activation.ReLU)"),
        ({2.5: 1}, "extra/2.5 (its key is a float)"),
        ({2**63: 1}, "extra/9223372036854775808 (its key is a number of more than 64 bits)"),
        (torch.eye(2).to_sparse(), "extra (torch.Tensor)"),
        (np.array([object()]), "extra (numpy.ndarray)"),
    ],
)
def test_what_is_left_out_is_named(entry: Any, named: str) -> None:
    _, left = to_tree({"extra": entry, "kept": 1})
    assert len(left) == 1
    assert left[0].startswith(named)


# ---- metrics


def test_metrics_are_those_of_the_step_at_which_they_came_up() -> None:
    ledger = MetricsLedger()
    validation, first, second = torch.tensor(0.5), torch.tensor(1.0), torch.tensor(1.0)
    ledger.observe(10, {"val_loss": validation.detach(), "loss": first})
    ledger.observe(20, {"val_loss": validation.detach(), "loss": second})
    assert ledger.of(10) == {"val_loss": 0.5}
    assert ledger.of(20) == {"loss": 1.0}
    ledger.observe(30, {"val_loss": torch.tensor(0.5), "loss": second})
    assert ledger.of(30) == {"val_loss": 0.5}


# ---- templates for a part of a checkpoint


def test_only_some_entries_have_a_template(tmp_path: Path) -> None:
    tree = {
        "state_dict": {"w": torch.arange(3.0), "b": torch.ones(1)},
        "optimizer_states": [{"lr": 0.1}],
        "loops": {"fit": {"state": {}, "steps": 3}, "test": {"state": {}}},
        "callbacks": {},
        "lists": [{"a": 1, "none": {}}, []],
        "*": None,
    }
    checkpointer = hf.Checkpointer(StateHandler())
    checkpointer.save(tmp_path / "one", tree)
    found = checkpointer.restore(tmp_path / "one", {"state_dict": tree["state_dict"], "optimizer_states": None})
    assert isinstance(found["state_dict"]["w"], torch.Tensor)
    assert found["state_dict"]["w"].tolist() == [0, 1, 2]
    rest = {name: value for name, value in tree.items() if name not in ("state_dict", "optimizer_states")}
    assert {name: value for name, value in found.items() if name != "state_dict"} == rest


# ---- names of Lightning that are not public


def test_a_new_version_of_lightning_is_told_by_what_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails with the names that the installed version does not have."""
    finders: list[Any] = [LearningRateFinder(), BatchSizeFinder()]
    strategies: tuple[Any, ...] = ("auto", "ddp", ModelParallelStrategy())
    trainer: Any = None
    for strategy in strategies:
        trainer = program.trainer(*finders, devices=1, strategy=strategy, enable_checkpointing=False)
        assert missing_names(trainer) == []
        check_version(trainer)
    del trainer._logger_connector._first_loop_iter, trainer.strategy._save_distributed_checkpoint
    del finders[0]._early_exit
    monkeypatch.delattr("lightning.pytorch.core.saving._load_state")
    monkeypatch.delattr("lightning.pytorch.utilities.combined_loader._MaxSizeCycle")
    gone = [
        "trainer._logger_connector._first_loop_iter",
        "ModelParallelStrategy._save_distributed_checkpoint",
        "LearningRateFinder._early_exit",
        "lightning.pytorch.core.saving._load_state",
        "lightning.pytorch.utilities.combined_loader._MaxSizeCycle._consumed",
    ]
    message = r"holdfast supports \(2.5 and 2.6\); it has no " + re.escape(", ".join(gone))
    with pytest.raises(hf.errors.StateError, match=message):
        check_version(trainer)


def test_a_callback_names_a_moved_choice_of_checkpoints_when_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made before it knows its trainer."""
    monkeypatch.delattr(_CheckpointConnector, "_parse_ckpt_path")
    callback = CheckpointCallback(tmp_path)
    trainer = program.trainer(callback)
    with pytest.raises(hf.errors.StateError, match=r"has no trainer\._checkpoint_connector\._parse_ckpt_path"):
        callback.setup(trainer, None, "fit")


def test_one_module_has_the_names_that_lightning_does_not_make_public() -> None:
    tables = (private_api.NAMES, private_api.NAMES_OF_CLASSES, private_api.NAMES_IN_MODULES)
    private = {name for table in tables for names in table.values() for name in names if name.startswith("_")}
    folder = Path(str(private_api.__file__)).parent
    for module in folder.glob("*.py"):
        found = {node.attr for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Attribute)}
        assert module.name == "private_api.py" or not found & private, module.name
