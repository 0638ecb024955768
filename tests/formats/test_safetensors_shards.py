"""Folders of numbered safetensors files without an index, as HuggingFaceStorageWriter of torch writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp
from tests.formats.torch_values import WHOLE, spread
from tests.processes.harness import Process, run_processes

import holdfast as hf

pytestmark = [
    pytest.mark.needs("torch", "2.9"),  # earlier ones write fewer kinds of folders
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

EXPECTED = {
    **dict.fromkeys(("rows", "columns", "both", "replicated"), WHOLE),
    "plain": np.ones(2, np.float32),
    "few": np.arange(2, dtype=np.float32).reshape(2, 1),
    "scalar": np.array(3, np.float32),  # torch 2.13 fails to consolidate integers
}


def save(process: Process, folder: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    model = {
        **spread(process.count),
        "plain": torch.ones(2),
        "few": spread(process.count, EXPECTED["few"])["rows"],
        "scalar": torch.tensor(3.0),
    }
    files = {f"model.{name}": 1 + index % 2 for index, name in enumerate(model)}
    for name, options in {
        "one": {},
        "two": {"fqn_to_index_mapping": files},
        "consolidated": {"fqn_to_index_mapping": files, "enable_consolidation": True},
    }.items():
        writer = HuggingFaceStorageWriter(f"{folder}/{name}", save_distributed=True, **cast("Any", options))
        cast("Any", dcp).save({"model": model}, storage_writer=writer)


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_processes(save, request.param, str(folder), backend="torch")
    return folder


@pytest.mark.parametrize("name", ["one", "two", "consolidated", "consolidated/sharded"])
def test_parts_of_several_processes_are_joined(saved: Path, tmp_path: Path, name: str) -> None:
    found = hf.load(saved / name)
    hf.import_checkpoint(saved / name, tmp_path / "imported")
    for tree in (found, hf.load(tmp_path / "imported")):
        assert tree["model"].keys() == EXPECTED.keys()
        for leaf, array in EXPECTED.items():
            assert tree["model"][leaf].dtype == array.dtype
            if (name, leaf) != ("consolidated", "scalar"):  # torch 2.13 writes a zero there
                assert np.array_equal(tree["model"][leaf], array)
    with hf.open(saved / name) as tree:
        assert np.array_equal(tree["model"]["both"][3:5, 1:4], WHOLE[3:5, 1:4])
    assert {leaf.path: leaf.shape for leaf in hf.describe(saved / name)}["model/rows"] == (7, 5)
    file = max((saved / name).glob("*.safetensors"))  # by itself, it is what it holds
    assert hf.load(file)["model"].keys() == {key[6:] for key in safetensors.numpy.load_file(file)}


def test_the_library_reads_what_was_exported(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    hf.export_checkpoint(saved / "two", tmp_path / "out" / "model.safetensors", "safetensors")
    state = {f"model.{name}": torch.from_numpy(np.zeros_like(array)) for name, array in EXPECTED.items()}
    cast("Any", dcp).load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")))
    assert all(np.array_equal(state[f"model.{name}"], array) for name, array in EXPECTED.items())


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("shard-00001-*", r"every file of shard 1 is missing.* give the path of a file"),
        ("*-model-00002-of-00002.safetensors", r"2 of 2 is missing"),
        ("shard-00001-model-00001-*", r"tensor 'model\.\w+' is incomplete: its .* parts, the first in shard-00002"),
    ],
    ids=["a process", "a file of all", "a file of one"],
)
def test_lost_files_are_noticed(saved: Path, tmp_path: Path, lost: str, message: str) -> None:
    shutil.copytree(saved / "two", tmp_path / "two", ignore=shutil.ignore_patterns(lost))
    with pytest.raises(hf.DamagedCheckpointError, match=message) as raised:
        hf.load(tmp_path / "two")
    assert str(tmp_path / "two") in str(raised.value)


def part(path: Path, process: int, array: Any, offsets: object = (0,), note: str | None = None) -> None:
    places = json.dumps({"x": {"saved_offsets": offsets}}) if note is None else note
    file = path / f"shard-{process:05}-model-00001-of-00001.safetensors"
    safetensors.numpy.save_file({"x": np.asarray(array)}, file, {"DCP_SHARDING_INFO": places})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (1,)}, r"have 4 elements for shape \[3\]"),
        ({"offsets": (3,)}, r"have 4 elements for shape \[5\]"),
        ({"offsets": (2, 0)}, "is not an index into a tensor"),
        ({"offsets": (-1,)}, "is not an index into a tensor"),
        ({"offsets": 2}, "is not an index into a tensor"),
        ({"array": np.ones(2, np.int64)}, r"do not fit together: .*00001.* has float64\[2\], .*00002.* int64\[2\]"),
        ({"array": np.ones((2, 1)), "offsets": (2, 0)}, "do not fit together"),
        ({"note": "{"}, "cannot be read"),
        ({"note": "[]"}, "not an object"),
        ({"note": '{"x": 3}'}, "cannot be read"),
        ({"note": '{"x": {}}'}, "saved_offsets"),
    ],
)
def test_damaged_places(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    part(tmp_path, 1, np.ones(2))
    part(tmp_path, 2, **{"array": np.ones(2), "offsets": (2,), **change})
    with pytest.raises(hf.DamagedCheckpointError, match=message):
        hf.load(tmp_path)


def test_numbered_files_that_lost_their_index(tmp_path: Path) -> None:
    for number in (1, 2):
        safetensors.numpy.save_file({f"x.{number}": np.ones(2)}, tmp_path / f"model-{number:05}-of-00002.safetensors")
    assert hf.load(tmp_path)["x"].keys() == {"1", "2"}
