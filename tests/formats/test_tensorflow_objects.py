"""Checkpoints of TensorFlow through `holdfast.graph`: TensorFlow's names, and objects restored from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast import graph

FIXTURES = Path(__file__).parent / "tensorflow"
SEEN: dict[str, Any] = json.loads((FIXTURES / "seen.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("prefix", sorted(SEEN))
def test_names_shapes_and_values(prefix: str) -> None:
    expected = SEEN[prefix]["variables"]
    reader = graph.load_checkpoint(FIXTURES / prefix)

    assert reader.get_variable_to_shape_map() == {name: facts["shape"] for name, facts in expected.items()}
    assert reader.get_variable_to_dtype_map().keys() == expected.keys()
    for name, facts in expected.items():
        assert reader.has_tensor(name)
        if "elements" in facts:
            assert reader.get_tensor(name).tobytes().hex() == facts["elements"]
        elif "bytes" in facts:
            found = np.ravel(np.asarray(reader.get_tensor(name), object)).tolist()
            assert [text.hex() for text in found] == facts["bytes"]


def test_values_by_path_as_well() -> None:
    reader = graph.load_checkpoint(FIXTURES / "slots" / "model")

    by_path = reader.get_tensor("optimizer/slots/net/l1/kernel/m")

    assert np.array_equal(
        by_path, reader.get_tensor("net/l1/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE")
    )
    assert reader.graph.slots("optimizer")["net/l1/kernel"]["m"] == "optimizer/slots/net/l1/kernel/m"
    assert not reader.has_tensor("net/l3/kernel")
    with pytest.raises(hf.errors.ObjectNotFoundError, match="VARIABLE_VALUE"):
        reader.get_tensor("net/l3/kernel")


def test_names_of_tensorflow_1() -> None:
    reader = graph.load_checkpoint(FIXTURES / "names")

    assert reader.path.endswith("model.ckpt-2")
    assert reader.get_tensor("dense/kernel/Adam").shape == (4, 3)
    dense: Any = torch.nn.Linear(4, 3)
    graph.Checkpoint(dense=dense).read(
        FIXTURES / "names", rename={"dense/kernel": ("dense/weight", np.transpose)}, select="dense/[wb]*[ts]"
    ).assert_consumed()
    assert np.array_equal(dense.weight.detach().numpy().T, reader.get_tensor("dense/kernel"))


def test_the_newest_is_the_one_that_tensorflow_noted(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "guide", tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-3"')

    assert graph.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
    checkpoint = graph.Checkpoint(step=0)
    checkpoint.restore(tmp_path, partial=True)
    assert (checkpoint.step, checkpoint.save_counter) == (31, 3)


def test_fake_parents_and_what_is_attached_later() -> None:
    bias, kernel = np.zeros(5, np.float32), np.zeros((1, 5), np.float32)
    layer = graph.Node(bias=bias)

    status = graph.Checkpoint(net=graph.Node(l1=layer)).read(FIXTURES / "guide").expect_partial()

    assert bias.all()
    status.assert_existing_objects_matched()
    layer._kernel = kernel
    assert kernel.all()


def test_another_shape_changes_nothing() -> None:
    bias, step = np.zeros(4, np.float32), np.zeros((), np.int32)

    with pytest.raises(hf.TreeMismatchError, match=r"net/l1/bias: expected float32\[4\]"):
        graph.Checkpoint(net=graph.Node(l1=graph.Node(bias=bias)), step=step).read(FIXTURES / "guide", partial=True)

    assert not step.any()


def test_a_cycle() -> None:
    first = graph.Node(v=np.zeros((), np.float32))
    second = graph.Node(v=np.zeros((), np.float32), other=first)
    first.other = second

    graph.Checkpoint(first=first).read(FIXTURES / "objects" / "objects-1").expect_partial()

    assert (float(first.v), float(second.v)) == (3, 4)
