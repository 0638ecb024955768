"""hf.load, describe and verify on files of other libraries: what the formats have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import holdfast as hf

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()


def written(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path / "model.safetensors")
        return path / "model.safetensors"
    if kind == "dcp":
        cast("Any", dcp).save(tensors, checkpoint_id=path / "dcp")
        return path / "dcp"
    torch.save(tensors, path / "model.pt")
    return path / "model.pt"


KINDS = ["safetensors", "dcp", "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_as_its_own_template(tmp_path: Path, kind: str) -> None:
    tensors = state()

    found = hf.load(written(tmp_path, kind, tensors), like=tensors)

    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_nested_template(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, {"Dense_0.kernel": torch.ones(2, 3), "Dense_0.bias": torch.zeros(3)})

    found = hf.load(path, like={"Dense_0": {"kernel": np.zeros((2, 3), np.float32), "bias": np.ones(3, np.float32)}})

    assert found["Dense_0"]["kernel"].tolist() == np.ones((2, 3)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_differs_says_where(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, {"a.b": torch.ones(2), "c": torch.ones(1)})

    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(path, like={"a": {"b": np.ones(3, np.float32)}, "d": np.ones(1, np.float32)})

    assert [line.partition(":")[0] for line in caught.value.differences] == ["a/b", "d", "c"]


@pytest.mark.parametrize("kind", KINDS)
def test_describe_and_verify(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, {"w": torch.ones(2, 3, dtype=torch.bfloat16)})

    (leaf,) = hf.describe(path)

    assert (leaf.path, leaf.shape, leaf.dtype, leaf.bytes) == ("w", (2, 3), "bfloat16", 12)
    assert hf.verify(path).ok


def test_objects_are_shown_and_not_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": print}, tmp_path / "x.pt")

    assert hf.describe(tmp_path / "x.pt")[1].value == "'(the class or function builtins.print, which is not read)'"
    with pytest.raises(hf.UnsupportedLeafError):
        hf.load(tmp_path / "x.pt")
