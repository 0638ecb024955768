"""Folders of torch.distributed.checkpoint, written by it and read without it."""

from __future__ import annotations

import collections
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
from tests.processes.harness import Process, run_processes
from tests.versions import older
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

import holdfast as hf
from holdfast.engine.arrays import load_tree
from holdfast.engine.format import compress_chunks
from holdfast.engine.sources.stored import StoredTree
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.torch import dcp as format_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),  # torch 2.6 says the latter
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.6 warns of its own use of it
]


def opened(path: Path) -> StoredTree:
    location = as_location(path)
    found = format_module.recognise(location, frozenset(entry.name for entry in location.entries()))
    assert found is not None
    return cast("StoredTree", found.source)


def loaded(path: Path, **options: Any) -> Any:
    return load_tree(opened(path), **options)


def saved(path: Path, state: dict[str, Any]) -> Path:
    cast("Any", dcp).save(state, checkpoint_id=path / "dcp")
    return path / "dcp"


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    state = trained()

    found = loaded(saved(tmp_path, {**state, "step": 3, "list": [1, torch.ones(2)], "text": "hi"}))

    assert found["model"].keys() == state["model"].keys()
    assert all(np.array_equal(found["model"][name], value) for name, value in state["model"].items())
    moments = found["optimizer"]["state"]["0"]["exp_avg"]
    assert np.array_equal(moments, state["optimizer"]["state"][0]["exp_avg"])
    assert type(found["optimizer"]["param_groups"]) is list
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert found["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert (found["step"], found["text"], found["list"][0], found["list"][1].tolist()) == (3, "hi", 1, [1, 1])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.uint16], ids=str
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 13).reshape(3, 4).to(dtype)

    path = saved(tmp_path, {"x": tensor, "empty": tensor[:0], "scalar": tensor[0, 0]})

    found = loaded(path, like={"x": tensor, "empty": tensor[:0], "scalar": tensor[0, 0]})
    assert torch.equal(found["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["empty"].shape == (0, 4)


@pytest.mark.needs("torch", "2.8")
def test_files_of_safetensors_inside(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    writer = FileSystemWriter(tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    state = {"a": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "b": torch.arange(3), "s": 3}
    cast("Any", dcp).save(state, storage_writer=writer)

    found = loaded(tmp_path / "dcp", like=state)

    assert torch.equal(found["a"]["w"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert (found["b"].tolist(), found["s"]) == ([0, 1, 2], 3)


def test_a_selection_reads_nothing_else(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1000), "b": {"c.d": torch.zeros(3)}})
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole.replace(np.ones(1000, np.float32).tobytes(), bytes(4000)))

    assert loaded(path, select="b/**")["b"]["c.d"].tolist() == [0, 0, 0]
    with pytest.raises(hf.DamagedCheckpointError, match=r"a: .*checksum"):
        loaded(path)
    assert [problem.leaf for problem in opened(path).verify()] == ["a"]


WHOLE = np.arange(35, dtype=np.float32).reshape(7, 5)


def placed(process: Process) -> dict[str, Any]:
    """Make tensors that are divided in every way among two or four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, process.count // 2), mesh_dim_names=("replicas", "parts"))
    placements: dict[str, Any] = {
        "rows": [Shard(0), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "replicated": [Replicate(), Replicate()],
    }
    whole = torch.from_numpy(WHOLE)
    return {name: distribute_tensor(whole, mesh, one) for name, one in placements.items()}


def save_tensors(process: Process, folder: str) -> None:
    state = {"model": placed(process), "plain": torch.ones(2), "step": 7}
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
def tensors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("tensors")
    run_processes(save_tensors, request.param, str(folder), backend="torch")
    return folder, request.param


def test_tensors_that_several_processes_saved(tensors: tuple[Path, int]) -> None:
    folder, processes = tensors
    for name in ("dcp", "async"):
        found = loaded(folder / name)
        assert all(np.array_equal(array, WHOLE) for array in found["model"].values())
        assert (found["plain"].tolist(), found["step"]) == ([1, 1], 7)
        assert len(list((folder / name).glob("*.distcp"))) == processes


# ---- export


def load_tensors(process: Process, *folders: str) -> None:
    for folder in folders:
        state = {"model": {name: torch.zeros_like(one) for name, one in placed(process).items()}, "step": 0}
        cast("Any", dcp).load(state, checkpoint_id=folder)
        assert state["step"] == 7
        for tensor in state["model"].values():  # type: ignore[attr-defined]
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


def test_what_dcp_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    hf.save(tmp_path / "list", [np.ones(2)])
    hf.save(tmp_path / "text", {"a": np.array(["x"])})
    with pytest.raises(hf.errors.UnsupportedLeafError, match="dictionaries only"):
        hf.export_checkpoint(tmp_path / "list", tmp_path / "dcp", "dcp")
    with pytest.raises(hf.errors.UnsupportedLeafError, match="a: torch cannot store elements"):
        hf.export_checkpoint(tmp_path / "text", tmp_path / "dcp", "dcp")
    with pytest.raises(hf.errors.OptionError, match="local directories only"):
        hf.export_checkpoint(tmp_path / "text", "memory://dcp", "dcp")
    assert not (tmp_path / "dcp").exists()


# ---- without collectives


@pytest.fixture
def alone(tensors: tuple[Path, int]) -> Path:
    return tensors[0] / "alone"


@pytest.mark.needs("torch", "2.9")
def test_what_each_process_saved_without_the_others_is_joined(alone: Path, tmp_path: Path) -> None:
    common = ["model/**", "plain", "step", "list/*"]

    found = hf.load(alone, select=common)

    assert all(np.array_equal(found["model"][name], WHOLE) for name in ("rows", "columns", "both", "replicated"))
    assert (found["plain"].tolist(), found["step"], found["list"]) == ([1, 1], 7, [1, "a"])
    with pytest.raises(
        hf.errors.UnsupportedLeafError, match=r"rng: a value that differs.*\n.*any: a value that differs"
    ):
        hf.load(alone)
    with pytest.raises(
        hf.errors.UnsupportedLeafError, match=r"tensor 'own' in __1_0.distcp differs .* __0_0.distcp.*sel"
    ):
        hf.load(alone, select="own")


@pytest.mark.needs("torch", "2.9")
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("__0.metadata", r"__0.metadata is missing.*copy them here"),
        ("__1.metadata", r"model/rows: the parts do not hold as many elements|__1.metadata is missing"),
        ("__1_0.distcp", r"__1_0.distcp is missing"),
    ],
)
def test_lost_files_of_a_process_are_noticed(alone: Path, tmp_path: Path, lost: str, message: str) -> None:
    shutil.copytree(alone, tmp_path / "dcp")
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
    state = {**tensors, "step": 7, "set": {"a"}, "pair": (1, {"t": torch.ones(2)})}
    writer = FileSystemWriter(tmp_path / "dcp", _extensions=[Zstd(ending)])
    cast("Any", dcp).save(state, storage_writer=writer)

    found = loaded(tmp_path / "dcp", like={**state, "set": ...})

    assert (found["step"], found["set"], found["pair"][1]["t"].tolist()) == (7, {"a"}, [1, 1])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with hf.open(tmp_path / "dcp") as tree:
        assert tree["x"][3, 10:12].tolist() == [310, 311]
    assert opened(tmp_path / "dcp").verify() == []


@pytest.mark.needs("torch", "2.7")
def test_damage_of_compressed_entries(tmp_path: Path) -> None:
    state = {"x": torch.rand(1000), "y": 1}
    cast("Any", dcp).save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", _extensions=[Zstd()]))
    data = tmp_path / "dcp" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])

    assert [problem.leaf for problem in opened(tmp_path / "dcp").verify()] == ["x"]
    with pytest.raises(hf.DamagedCheckpointError, match=r"x: .*__0_0.distcp"):
        loaded(tmp_path / "dcp")
    data.write_bytes(whole[:2000])
    with pytest.raises(hf.DamagedCheckpointError, match=r"__0_0.distcp"):
        loaded(tmp_path / "dcp")


# ---- damage


def rewritten(path: Path, change: Any) -> Path:
    content = (path / ".metadata").read_bytes()
    metadata: Metadata = pickle.loads(content)  # of our own making
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
        loaded(rewritten(path, change))


def test_a_part_that_is_named_again_and_again_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, {"x": torch.arange(12.0).reshape(3, 4)})
    rewritten(path, lambda m: tensor(m).chunks.extend(tensor(m).chunks * 50_000))
    opened_archives: list[object] = []
    monkeypatch.setattr(format_module, "TorchArchive", lambda *place: opened_archives.append(place))

    with pytest.raises(hf.DamagedCheckpointError, match=r"entry 'x' has two parts at \(0, 0\)"):
        loaded(path)

    assert not opened_archives


def test_without_the_planner_names_are_whole(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": {"b": torch.ones(1)}})

    found = loaded(rewritten(path, lambda metadata: setattr(metadata, "planner_data", None)))

    assert list(found) == ["a.b"]


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/holdfast-was-run", "w"))


def test_nothing_is_run(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(1), "y": Evil()})

    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"y: an object of .*open"):
        loaded(path)
    assert loaded(path, select="x")["x"].tolist() == [1]
    rewritten(path, lambda metadata: setattr(metadata, "storage_meta", Evil()))
    Path("/tmp/holdfast-was-run").unlink(missing_ok=True)
    assert loaded(path, select="x")["x"].tolist() == [1]
    assert not Path("/tmp/holdfast-was-run").exists()


def test_other_folders_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(collections.Counter()))

    assert format_module.recognise(as_location(tmp_path), frozenset({".metadata"})) is None
    assert format_module.recognise(as_location(tmp_path), frozenset({"x"})) is None


def test_every_flipped_byte_is_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(30)})
    file = path / ".metadata"
    whole = file.read_bytes()

    for position in range(100, len(whole), 13):  # behind the name that it is recognised by
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 5]) + whole[position + 1 :])
        try:
            found = loaded(path)
        except hf.HoldfastError:
            continue
        assert [array.tolist() for array in found.values()] == [list(range(30))]
