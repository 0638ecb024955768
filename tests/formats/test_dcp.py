"""Folders of torch.distributed.checkpoint, written by it and read without it."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.equality import assert_same
from tests.formats.torch_values import WAS_RUN, WHOLE, Evil, spread
from tests.processes.harness import Process, run_processes
from tests.versions import older
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

import holdfast as hf
from holdfast.engine.format import compress_chunks
from holdfast.integrations.formats.torch import dcp as format_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),  # torch 2.6 says the latter
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.6 warns of its own use of it
]


def saved(path: Path, state: dict[str, Any], **options: Any) -> Path:
    cast("Any", dcp).save(state, storage_writer=FileSystemWriter(path / "dcp", **options))
    return path / "dcp"


def damaged_leaves(path: Path) -> list[str]:
    return [problem.leaf for problem in hf.verify(path).checkpoints[0].problems]


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    state = trained()
    found = hf.load(saved(tmp_path, {**state, "step": 3, "list": [1, torch.ones(2)], "text": "hi"}))
    assert found["model"].keys() == state["model"].keys()
    assert all(np.array_equal(found["model"][name], value) for name, value in state["model"].items())
    moments = found["optimizer"]["state"]["0"]["exp_avg"]
    assert np.array_equal(moments, state["optimizer"]["state"][0]["exp_avg"])
    (group,) = found["optimizer"]["param_groups"]
    assert (group["betas"], group["params"]) == ((0.9, 0.999), [0, 1, 2, 3])
    assert (found["step"], found["text"], found["list"][0], found["list"][1].tolist()) == (3, "hi", 1, [1, 1])


@pytest.mark.needs("torch", "2.8")
def test_files_of_safetensors_inside(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    state = {"a": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "b": torch.arange(3), "s": 3}
    path = saved(tmp_path, state, serialization_format=SerializationFormat.SAFETENSORS)
    assert_same(hf.load(path, like=state), state)


def test_a_selection_reads_nothing_else(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1000), "b": {"c.d": torch.zeros(3)}})
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(np.ones(1000, np.float32).tobytes(), bytes(4000)))
    assert hf.load(path, select="b/**")["b"]["c.d"].tolist() == [0, 0, 0]
    with pytest.raises(hf.DamagedCheckpointError, match=r"a: .*checksum"):
        hf.load(path)
    assert damaged_leaves(path) == ["a"]


# ---- several processes


def save_tensors(process: Process, folder: str) -> None:
    state = {"model": spread(process.count), "plain": torch.ones(2), "step": 7}
    cast("Any", dcp).save(state, checkpoint_id=f"{folder}/dcp")
    cast("Any", dcp).async_save(state, checkpoint_id=f"{folder}/async").result()
    if not older("torch", "2.9"):  # without collectives, each has its own metadata, and a copy of what all have
        own = {
            "own": torch.full((2,), process.index),
            "rng": process.index,
            "any": (3, torch.ones(1))[process.index % 2],
        }
        state |= {"list": [1, "a"], **own}
        cast("Any", dcp).save(state, checkpoint_id=f"{folder}/alone", use_collectives=False)


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def tensors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors")
    run_processes(save_tensors, request.param, str(folder), backend="torch")
    assert len(list((folder / "dcp").glob("*.distcp"))) == request.param
    return folder


@pytest.mark.parametrize("name", ["dcp", "async", pytest.param("alone", marks=pytest.mark.needs("torch", "2.9"))])
def test_tensors_that_several_processes_saved(tensors: Path, name: str) -> None:
    found = hf.load(tensors / name, select=["model/**", "plain", "step"])
    assert found["model"].keys() == {"rows", "columns", "both", "replicated"}
    assert all(np.array_equal(array, WHOLE) for array in found["model"].values())
    assert (found["plain"].tolist(), found["step"]) == ([1, 1], 7)


@pytest.mark.needs("torch", "2.9")
def test_what_each_process_saved_of_its_own_is_not_joined(tensors: Path) -> None:
    assert hf.load(tensors / "alone", select="list/*")["list"] == [1, "a"]
    for select, message in (
        (None, r"rng: a value that differs.*\n.*any: a value that differs"),
        ("own", r"tensor 'own' in __1_0.distcp differs .* __0_0.distcp.*sel"),
    ):
        with pytest.raises(hf.errors.UnsupportedLeafError, match=message):
            hf.load(tensors / "alone", select=select)


@pytest.mark.needs("torch", "2.9")
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("__0.metadata", r"__0.metadata is missing.*copy them here"),
        ("__1.metadata", r"model/rows: the parts do not hold as many elements|__1.metadata is missing"),
        ("__1_0.distcp", r"__1_0.distcp is missing"),
    ],
)
def test_lost_files_of_a_process_are_noticed(tensors: Path, tmp_path: Path, lost: str, message: str) -> None:
    shutil.copytree(tensors / "alone", tmp_path / "dcp")
    (tmp_path / "dcp" / lost).unlink()
    with pytest.raises(hf.DamagedCheckpointError, match=message) as raised:
        hf.load(tmp_path / "dcp", select="model/rows")
    assert str(tmp_path / "dcp") in str(raised.value)


def test_a_save_that_did_not_finish(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(3)})
    (path / ".metadata").unlink()
    with pytest.raises(
        hf.CheckpointNotFoundError, match=r"dcp: torch.distributed.checkpoint did not finish .* another"
    ):
        hf.load(path)


# ---- export


def load_tensors(process: Process, *folders: str) -> None:
    for folder in folders:
        state: dict[str, Any] = {"model": spread(process.count, np.zeros_like(WHOLE)), "step": 0}
        cast("Any", dcp).load(state, checkpoint_id=folder)
        assert state["step"] == 7
        for tensor in state["model"].values():
            assert torch.equal(tensor.full_tensor(), torch.from_numpy(WHOLE))


def test_an_export_is_loaded_by_torch_whole_and_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**trained(), "model_with_shards": torch.from_numpy(WHOLE)}
    hf.save(tmp_path / "trained", {**state, "rate": 0.1})
    shards = dict.fromkeys(("rows", "columns", "both", "replicated"), WHOLE)
    hf.save(tmp_path / "shards", {"model": shards, "step": 7})

    for size in ("one file", "several files"):
        for name in ("trained", "shards"):
            hf.export_checkpoint(tmp_path / name, tmp_path / size / name, "dcp")
        files = {path.name for path in (tmp_path / size / "trained").iterdir()}
        assert files >= {".metadata", "__0_0.distcp"}
        assert (len(files) == 2) == (size == "one file")
        fresh = trained()
        for tensor in fresh["model"].values():
            tensor.zero_()
        found = {**fresh, "model_with_shards": torch.zeros(7, 5), "rate": 0.0}
        cast("Any", dcp).load(found, checkpoint_id=tmp_path / size / "trained")
        assert_same(found, {**state, "rate": 0.1})
        monkeypatch.setattr(format_module, "_ONE_FILE", 8)
    exports = (str(tmp_path / size / "shards") for size in ("one file", "several files"))
    run_processes(load_tensors, 2, *exports, backend="torch")


def test_an_export_to_an_object_store_is_refused(tmp_path: Path) -> None:
    hf.save(tmp_path / "ours", {"w": np.ones(2)})
    with pytest.raises(hf.errors.OptionError, match="local directories only"):
        hf.export_checkpoint(tmp_path / "ours", "memory://dcp", "dcp")


# ---- extensions


class Zstd(StreamTransformExtension):
    """The extension ZStandard of torch, without the package that it needs."""

    def __init__(self, ending: bytes = b"") -> None:
        self.ending = ending

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> Zstd:
        return Zstd()

    def get_descriptor(self) -> str:
        return "stream.zstd/1"

    def transform_to(self, output: Any) -> Any:
        ending = self.ending

        class Compressed(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(compressed(self.getvalue()) + ending)
                super().close()

        return Compressed()

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        raise NotImplementedError


def compressed(data: bytes) -> bytes:
    return compress_chunks([np.frombuffer(data, np.uint8)], 3)[0][:-4]  # without the checksum


EMPTY_FRAME = compressed(b"")  # pyzstd writes one behind each tensor, zstandard does not


@pytest.mark.needs("torch", "2.7")
@pytest.mark.parametrize("ending", [b"", EMPTY_FRAME], ids=["zstandard", "pyzstd"])
def test_compressed_entries(tmp_path: Path, ending: bytes) -> None:
    tensors = {
        "x": torch.arange(3000.0).reshape(30, 100),
        "zeros": torch.zeros(1 << 19),
        "turned": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "empty": torch.ones(0, 3),
    }
    state: dict[str, Any] = {**tensors, "step": 7, "set": {"a"}, "pair": (1, {"t": torch.ones(2)})}
    path = saved(tmp_path, state, _extensions=[Zstd(ending)])
    found = hf.load(path, like={**state, "set": ...})
    assert (found["step"], found["set"], found["pair"][1]["t"].tolist()) == (7, {"a"}, [1, 1])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with hf.open(path) as tree:
        assert tree["x"][3, 10:12].tolist() == [310, 311]
    assert hf.verify(path).ok


@pytest.mark.needs("torch", "2.7")
def test_damage_of_compressed_entries(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.rand(1000), "y": 1}, _extensions=[Zstd()])
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    for changed, leaves, message in (
        (whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:], ["x"], r"x: .*__0_0.distcp"),
        (whole[:2000], ["x"], r"__0_0.distcp"),
    ):
        data.write_bytes(changed)
        assert damaged_leaves(path) == leaves
        with pytest.raises(hf.DamagedCheckpointError, match=message):
            hf.load(path)


# ---- damage


def rewritten(path: Path, change: Any) -> Path:
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())  # of our own making
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def storage(metadata: Metadata) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "x")


def tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["x"]


CHANGES = {
    "outside": lambda m: setattr(storage(m), "relative_path", "../x"),
    "missing file": lambda m: setattr(storage(m), "relative_path", "x"),
    "past the end": lambda m: setattr(storage(m), "offset", 1 << 40),
    "negative": lambda m: setattr(storage(m), "offset", -1),
    "elsewhere": lambda m: setattr(storage(m), "offset", storage(m).offset + 1),
    "extension": lambda m: setattr(storage(m), "transform_descriptors", ["stream.secret/1"]),
    "no place": lambda m: m.storage_data.clear(),
    "larger": lambda m: setattr(tensor(m), "size", torch.Size([5, 4])),
    "huge": lambda m: setattr(tensor(m), "size", torch.Size([1 << 50, 4])),
    "no parts": lambda m: tensor(m).chunks.clear(),
    "twice": lambda m: tensor(m).chunks.append(tensor(m).chunks[0]),
    "rank": lambda m: setattr(tensor(m), "size", torch.Size([12])),
    "dtype": lambda m: setattr(tensor(m).properties, "dtype", torch.int32),
    "through": lambda m: m.planner_data.update(y=("x", "y")),
    "same place": lambda m: m.planner_data.update(y=("x",)),
    "no path": lambda m: m.planner_data.update(y=[1]),
    "no entries": lambda m: setattr(m, "state_dict_metadata", None),
    "no name": lambda m: m.state_dict_metadata.update({3: None}),
    "odd entry": lambda m: m.state_dict_metadata.update(y="y"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_damaged_metadata(tmp_path: Path, change: Any) -> None:
    path = saved(tmp_path, {"x": torch.arange(12.0).reshape(3, 4), "y": 1})
    with pytest.raises(hf.DamagedCheckpointError):
        hf.load(rewritten(path, change))


def test_a_part_that_is_named_again_and_again_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, {"x": torch.arange(12.0).reshape(3, 4)})
    rewritten(path, lambda m: tensor(m).chunks.extend(tensor(m).chunks * 50_000))
    opened_archives: list[object] = []
    monkeypatch.setattr(format_module, "TorchArchive", lambda *place: opened_archives.append(place))
    with pytest.raises(hf.DamagedCheckpointError, match=r"entry 'x' has two parts at \(0, 0\)"):
        hf.load(path)
    assert not opened_archives


def test_without_the_planner_names_are_whole(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": {"b": torch.ones(1)}})
    found = hf.load(rewritten(path, lambda metadata: setattr(metadata, "planner_data", None)))
    assert list(found) == ["a.b"]


def test_nothing_is_run(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(1), "y": Evil()})
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"y: an object of .*open"):
        hf.load(path)
    assert hf.load(path, select="x")["x"].tolist() == [1]
    rewritten(path, lambda metadata: setattr(metadata, "storage_meta", Evil()))
    WAS_RUN.unlink(missing_ok=True)
    assert hf.load(path, select="x")["x"].tolist() == [1]
    assert not WAS_RUN.exists()
