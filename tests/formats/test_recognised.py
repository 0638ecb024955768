"""hf.load, describe and verify on files of other libraries: what the formats have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import jax
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
def test_a_state_dict_as_its_own_template_and_from_one_library_to_another(tmp_path: Path, kind: str) -> None:
    tensors = state()
    path = written(tmp_path, kind, tensors)

    found = hf.load(path, like=tensors)
    (done,) = hf.export_checkpoint(path, tmp_path / "x.safetensors", "safetensors")

    assert done.leaves == len(tensors)
    for one in (found, safetensors.torch.load_file(tmp_path / "x.safetensors")):
        assert one.keys() == tensors.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_nested_template(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, {"Dense_0.kernel": torch.ones(2, 3), "Dense_0.bias": torch.zeros(3)})

    found = hf.load(path, like={"Dense_0": {"kernel": np.zeros((2, 3), np.float32), "bias": np.ones(3, np.float32)}})

    assert found["Dense_0"]["kernel"].tolist() == np.ones((2, 3)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_files_in_an_object_store(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, {"a.b": torch.arange(3), "c": torch.ones(2)})
    place = hf.storage.as_location(f"memory://recognised/{kind}")
    for file in [path] if path.is_file() else path.iterdir():
        (place / path.name / file.name if path.is_dir() else place / path.name).write_bytes(file.read_bytes())

    found: Any = hf.load(place / path.name, like={"a": {"b": np.zeros(3, np.int64)}, "c": np.zeros(2, np.float32)})

    assert found["a"]["b"].tolist() == [0, 1, 2]
    hf.import_checkpoint(place / path.name, place / "ckpt")
    for to, name in (("safetensors", "x.safetensors"), ("torch", "x.pt")):
        hf.export_checkpoint(place / "ckpt", place / name, to)  # type: ignore[arg-type]  # a loop over literals
        assert hf.load(place / name, select="c")["c"].tolist() == [1, 1]


def test_keys_of_jax_survive_an_exported_file(tmp_path: Path) -> None:
    key = jax.random.key(3)
    hf.save(tmp_path / "ckpt", {"key": key})

    hf.export_checkpoint(tmp_path / "ckpt", tmp_path / "x.safetensors", "safetensors")

    assert hf.load(tmp_path / "x.safetensors", like={"key": jax.random.key(0)})["key"] == key
