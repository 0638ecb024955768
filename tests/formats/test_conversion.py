"""Foreign checkpoints made into our own, our own into files of others, and state dicts in the files of each library."""

from __future__ import annotations

import functools
import resource
import weakref
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from tests.equality import assert_same
from tests.formats.torch_values import DTYPES

import holdfast as hf
from holdfast.engine.sources import open_checkpoint
from holdfast.engine.storage import as_location
from holdfast.integrations.formats import convert
from holdfast.integrations.formats.convert import export_checkpoint, import_checkpoint

ORBAX = ["orbax", "in place"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def pt(path: Path, value: Any) -> Path:
    torch.save(value, path / "x.pt")
    return path / "x.pt"


def test_import_keeps_kinds_and_values(tmp_path: Path) -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    value = {"w": weight, "n": [1, "text", None], "p": torch.nn.Parameter(torch.ones(1))}

    (done,) = import_checkpoint(pt(tmp_path, value), tmp_path / "ckpt")
    assert (done.format, done.leaves, done.bytes, done.left_out) == ("torch", 5, 24, ())
    found: Any = hf.load(tmp_path / "ckpt", like=value)
    assert torch.equal(found["w"], weight)
    assert found["n"] == [1, "text", None]
    assert [leaf.kind for leaf in hf.describe(tmp_path / "ckpt")] == ["torch", "int", "str", "none", "torch"]
    assert hf.verify(tmp_path / "ckpt").ok


def test_import_holds_only_some_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"layer.{index}": np.full(1000, index, np.float32) for index in range(40)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    source = open_checkpoint(as_location(tmp_path / "x.safetensors")).tree("default")
    given: list[weakref.ref[Any]] = []
    held = []
    read = source.read_leaves

    def counted(leaves: Any) -> Any:
        held.append(sum(one() is not None for one in given))
        found = read(leaves)
        given.extend(weakref.ref(array) for array in found)
        return found

    source.read_leaves = counted  # type: ignore[method-assign]
    monkeypatch.setattr(convert, "_BATCH", 5000)
    monkeypatch.setattr(convert, "_KEPT", 2)
    hf.Checkpointer(convert.TreeSourceHandler()).save(tmp_path / "ckpt", source)

    assert len(held) > 40
    assert max(held) <= 3
    found = hf.load(tmp_path / "ckpt")["layer"]
    assert all(np.array_equal(found[name.partition(".")[2]], array) for name, array in arrays.items())


def test_an_import_that_is_refused_and_one_over_another(tmp_path: Path) -> None:
    with pytest.raises(
        hf.errors.UnsupportedLeafError, match=r"none of its arrays can be read:\n  f \(the class or function"
    ):
        import_checkpoint(pt(tmp_path, {"f": print, "name": "x"}), tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    for value in (1, 0):
        import_checkpoint(pt(tmp_path, {"w": torch.full((1,), value)}), tmp_path / "ckpt", overwrite=not value)
    assert hf.load(tmp_path / "ckpt")["w"].tolist() == [0]


# ---- export


def test_export_for_torch(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "state_dict": {"w": torch.ones(2, 3, dtype=torch.float8_e4m3fn), "b": torch.arange(3)},
        "jax": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(0),
        "scalar": np.float32(2),
        "plain": [1, 2.5, True, "text", b"bytes", None, (1 + 2j,)],
    }
    hf.save(tmp_path / "ckpt", tree)

    (done,) = export_checkpoint(tmp_path / "ckpt", tmp_path / "x.pt", "torch")
    export_checkpoint(tmp_path / "ckpt", tmp_path / "x", "dcp")

    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_same(hf.load(tmp_path / "x"), hf.load(tmp_path / "x.pt"))
    as_tensors = {
        "jax": torch.ones(2, dtype=torch.bfloat16),
        "key": torch.zeros(2, dtype=torch.uint32),
        "scalar": torch.tensor(2.0),
    }
    assert_same(found, {**tree, **as_tensors})
    assert (done.format, done.path) == ("torch", str(tmp_path / "x.pt"))


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_an_export_that_the_disk_refuses_leaves_nothing_behind(tmp_path: Path, kind: Any) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.ones(1 << 17)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(hf.errors.StorageError, match=r"cannot write .*File too large; raise the limit .*ulimit -f"):
            export_checkpoint(tmp_path / "ckpt", tmp_path / "out" / "x", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_file_does_not_take_the_place_of_a_directory(tmp_path: Path, kind: Any) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.ones(1)})
    with pytest.raises(hf.CheckpointExistsError, match="is a directory; give the name of a file"):
        export_checkpoint(tmp_path / "ckpt", tmp_path, kind, overwrite=True)
    with pytest.raises(hf.errors.StorageError):
        export_checkpoint(tmp_path / "ckpt", "/proc/x", kind)


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_export_of_one_item_of_one_step(tmp_path: Path, to: Any) -> None:
    checkpointers = {name: hf.Checkpointer(hf.PyTreeCheckpointHandler()) for name in ("a", "b")}
    with hf.CheckpointManager(tmp_path / "run", checkpointers) as manager:
        for step in (1, 2):
            manager.save(step, {"a": {"x": np.full(2, step)}, "b": {"y": np.ones(1)}}, force=True)

    export = functools.partial(export_checkpoint, tmp_path / "run", tmp_path / "x", to)
    (done,) = export(step=1, item="a")
    assert done.step == 1
    assert hf.load(tmp_path / "x")["x"].tolist() == [1, 1]
    with pytest.raises(hf.CheckpointExistsError):
        export(item="a")
    if to != "dcp":
        export(item="a", overwrite=True)
        assert hf.load(tmp_path / "x")["x"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("to", "name", "options", "message"),
    [
        ("onnx", "x", {}, "to='onnx' is not one of 'safetensors', 'orbax', 'torch', 'dcp'"),
        ("torch", "x.safetensors", {}, "to='torch' does not fit .*x.safetensors: other programs read"),
        ("orbax", "x", {"root": "model"}, "root= does not apply to Orbax, which restores the whole tree"),
        ("orbax", "x", {"overwrite": True}, "overwrite= does not apply to Orbax: remove the destination"),
        ("dcp", "x", {"overwrite": True}, "overwrite= does not apply to torch.distributed.checkpoint: remove"),
    ],
)
def test_exports_that_are_refused(tmp_path: Path, to: Any, name: str, options: Any, message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        export_checkpoint(tmp_path, tmp_path / name, to, **options)


SAME_NAME = {"a.b": np.ones(1), "a": {"b": np.ones(2)}, "c": np.ones(3, np.complex128)}
TEXT = np.array(["x"])
# The tree, what cannot hold it, and why.
MISFITS: dict[str, tuple[Any, list[str], str]] = {
    "one name": (SAME_NAME, ["safetensors"], r"a/b: .* the same name as a\.b, 'a\.b'\n.*c: .*complex128"),
    "no tensors": ({"a": TEXT, "b": jnp.ones(2, jnp.int4)}, ["torch"], r"a: torch .* of type str\d+\n  b: .* int4$"),
    "a list": ([np.ones(2)], ["dcp"], "dictionaries only"),
    "a text array": ({"fine": np.ones(2), "a": TEXT}, ["dcp"], "a: torch cannot store elements"),
    "a text array for Orbax": ({"a": TEXT, "b": np.ones(2)}, ORBAX, "a: .*elements of type <U1"),
    "dates": ({"a": np.zeros(2, "datetime64[s]")}, ORBAX, r"a: .*elements of type datetime64\[s\]"),
    "uint4": ({"a": np.zeros(2, ml_dtypes.uint4)}, ORBAX, "a: .*elements of type uint4"),
    "bytes": ({"a": b"bytes", "b": np.ones(2)}, ORBAX, "a: .*cannot store leaves of kind bytes"),
    "a set": ({"a": {1, 2}}, ORBAX, "a: .*cannot store leaves of kind set"),
    "a long integer": ({"a": 1 << 80}, ORBAX, "a: .*does not fit 64 bits"),
    "nothing": ({}, ["orbax"], "without leaves"),
    "one name for Orbax": (SAME_NAME, ORBAX, r"Orbax would name it 'a\.b'"),
    "a name with a dot": ({"a.b": np.ones(1)}, ["in place"], r"stored as 'a%2Eb', but Orbax would look for 'a\.b'"),
    "an array in another's folder": (
        {"a": np.ones(1), "a/b": np.zeros(1)},
        ["orbax"],
        "a/b: it would lie in the folder",
    ),
    "text in a text": ({"a.b": "text", "a": {"b/c": "text"}}, ["orbax"], "would store it inside another text"),
    "odd name of a text": ({"a~": "text"}, ["orbax"], "cannot store a text under the name 'a~'"),
    "lone surrogates": ({"a": "\ud800"}, ["orbax"], "has lone surrogates, which JSON files cannot hold"),
}


@pytest.mark.parametrize(("tree", "formats", "message"), MISFITS.values(), ids=MISFITS)
def test_what_a_format_cannot_hold_is_named(tmp_path: Path, tree: Any, formats: list[Any], message: str) -> None:
    hf.save(tmp_path / "ours", tree)
    for to in formats:
        export = functools.partial(export_checkpoint, destination=tmp_path / "theirs", to=to)
        with pytest.raises(hf.errors.UnsupportedLeafError, match=message):
            (hf.add_orbax_metadata if to == "in place" else export)(tmp_path / "ours")
        assert [entry.name for entry in tmp_path.iterdir()] == ["ours"]
        assert not (tmp_path / "ours" / "state" / "_METADATA").exists()


# ---- state dicts in the files of each library


def written(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path / "model.safetensors")
        return path / "model.safetensors"
    if kind == "dcp":
        cast("Any", dcp).save(tensors, checkpoint_id=path / "dcp")
        return path / "dcp"
    return pt(path, tensors)


def read_by_its_library(path: Path, kind: str, like: dict[str, torch.Tensor]) -> Any:
    if kind == "safetensors":
        return safetensors.torch.load_file(path)
    if kind == "torch":
        return torch.load(path, weights_only=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    cast("Any", dcp).load(found, checkpoint_id=path)
    return found


KINDS = ["safetensors", "dcp", "torch"]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_of_torch(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    if kind == "safetensors" and dtype == torch.complex128:
        return
    tensor = torch.arange(1, 13).reshape(3, 4).to(dtype)
    tensors = {"empty": tensor[:0], "scalar": tensor[0, 0].clone(), "x": tensor}
    path = written(tmp_path, kind, tensors)
    hf.save(tmp_path / "ours", tensors)
    assert_same(hf.load(path), hf.load(tmp_path / "ours"))
    assert_same(hf.load(path, like=tensors), tensors)
    export_checkpoint(tmp_path / "ours", tmp_path / "exported", kind)
    assert_same(read_by_its_library(tmp_path / "exported", kind, tensors), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_as_its_own_template_nested_and_from_one_library_to_another(tmp_path: Path, kind: str) -> None:
    layers: dict[str, torch.nn.Module] = {"dense": torch.nn.Linear(3, 2), "norm": torch.nn.BatchNorm1d(2)}
    tensors = torch.nn.ModuleDict(layers).state_dict()
    path = written(tmp_path, kind, tensors)

    found = hf.load(path, like=tensors)
    (done,) = hf.export_checkpoint(path, tmp_path / "x.safetensors", "safetensors")

    assert done.leaves == len(tensors)
    for one in (found, safetensors.torch.load_file(tmp_path / "x.safetensors")):
        assert one.keys() == tensors.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in tensors.items())
    nested = {name: dict(layer.state_dict()) for name, layer in layers.items()}
    assert_same(hf.load(path, like=nested), nested)


@pytest.mark.parametrize(("to", "name"), [("safetensors", "x.safetensors"), ("torch", "x.pt")])
def test_an_import_and_an_export_in_an_object_store(tmp_path: Path, to: Any, name: str, place: str) -> None:
    hf.import_checkpoint(written(tmp_path, to, {"a.b": torch.arange(3), "c": torch.ones(2)}), f"{place}/ckpt")
    hf.export_checkpoint(f"{place}/ckpt", f"{place}/{name}", to)
    assert hf.load(f"{place}/{name}", select="c")["c"].tolist() == [1, 1]


def test_keys_of_jax_survive_an_exported_file(tmp_path: Path) -> None:
    key = jax.random.key(3)
    hf.save(tmp_path / "ckpt", {"key": key})
    hf.export_checkpoint(tmp_path / "ckpt", tmp_path / "x.safetensors", "safetensors")
    assert hf.load(tmp_path / "x.safetensors", like={"key": jax.random.key(0)})["key"] == key
