"""Files of Keras 3, other HDF5, and of numpy.savez: written in the layout that those programs write."""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.equality import assert_same
from tests.format.memory import at_most

import holdfast as hf

h5py: Any = pytest.importorskip("h5py")

KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([1, 2, 3], np.float32)
HALF = np.array([1.5, -2.0], ml_dtypes.bfloat16)


def weights_h5(path: Path) -> Path:
    """What ``model.save_weights`` of Keras 3 writes for two layers and an optimizer."""
    with h5py.File(path, "w") as file:
        dense = file.create_group("layers/dense/vars")
        dense.create_dataset("0", data=KERNEL)
        dense.create_dataset("1", data=BIAS)
        file.create_group("layers/dropout")
        half = file.create_group("layers/embedding/vars").create_dataset("0", data=HALF)
        half.attrs["dtype"] = "bfloat16"
        optimizer = file.create_group("optimizer/vars")
        for number in range(11):
            optimizer.create_dataset(str(number), data=np.int64(number), compression=None)
    return path


def keras(path: Path) -> Path:
    weights = weights_h5(path.with_suffix(".inside"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.8.0"}))
        archive.writestr("config.json", json.dumps({"class_name": "Sequential"}))
        archive.write(weights, "model.weights.h5")
    return path


@pytest.mark.parametrize(("write", "name"), [(weights_h5, "m.weights.h5"), (keras, "m.keras")])
def test_weights_of_keras(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    path = write(tmp_path / name)
    expected = {
        "layers": {"dense": {"vars": [KERNEL, BIAS]}, "embedding": {"vars": [HALF]}},
        "optimizer": {"vars": [np.array(number) for number in range(11)]},
    }
    assert_same(hf.load(path), expected)
    with hf.open(path) as opened:
        kernel, (half,) = opened["layers"]["dense"]["vars"][0], opened["layers"]["embedding"]["vars"]
        assert (kernel[1:, ::2].tolist(), half[1:].tobytes()) == ([[3, 5]], HALF[1:].tobytes())
        assert [int(one[()]) for one in opened["optimizer"]["vars"]] == list(range(11))
    assert_same(hf.load(path, select="layers/dense/vars/1")["layers"]["dense"]["vars"][1], BIAS)
    like = {"layers": {"dense": {"vars": [torch.empty(2, 3), torch.empty(3)]}}}
    taken = hf.load(path, like=like, select="layers/dense/**")
    assert torch.equal(taken["layers"]["dense"]["vars"][0], torch.from_numpy(KERNEL))
    assert hf.verify(path).ok
    assert "layers/dense/vars/0" in {leaf.path for leaf in hf.describe(path)}

    (done,) = hf.import_checkpoint(path, tmp_path / "ours")
    assert (done.format, done.leaves, done.left_out) == ("Keras", 14, ())
    assert_same(hf.load(tmp_path / "ours", item="state"), expected)
    if name.endswith(".keras"):
        assert hf.load(path, item="config") == hf.load(tmp_path / "ours", item="config") == {"class_name": "Sequential"}


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [weights_h5(tmp_path / "m.weights.h5"), keras(tmp_path / "m.keras")]
    monkeypatch.setitem(sys.modules, "h5py", None)
    for path in paths:
        with pytest.raises(hf.errors.OptionError, match=rf"{path.name} is a Keras file.*pip install .*\[keras\]'"):
            hf.load(path)


def test_a_file_of_hdf5_does_not_lead_outside(tmp_path: Path) -> None:
    weights_h5(tmp_path / "secret.h5")
    (tmp_path / "raw").write_bytes(b"secret")
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as file:
        file["w"] = KERNEL
        file["text"] = "text"
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/layers/dense/vars/0")
        file.create_dataset("raw", (6,), np.uint8, external=[(str(tmp_path / "raw"), 0, 6)])
        layout = h5py.VirtualLayout((3,), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "/layers/dense/vars/1", (3,))
        file.create_virtual_dataset("virtual", layout)
    others = ["elsewhere", "raw", "text", "virtual"]
    with pytest.raises(hf.errors.UnsupportedLeafError) as raised:
        hf.load(path)
    assert [line.strip().partition(":")[0] for line in str(raised.value).splitlines()[1:]] == others
    assert hf.load(path, select="w")["w"].tolist() == KERNEL.tolist()
    (done,) = hf.import_checkpoint(path, tmp_path / "ours")
    assert [line.partition(" ")[0] for line in done.left_out] == others
    assert done.format == "HDF5"


def test_claims_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("w", (1 << 40,), np.float32, chunks=(1024,))
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for number in range(100):
            file.create_dataset(f"w{number}", (60 << 20,), np.uint8, chunks=(1024,))  # of which nothing is stored
    content = weights_h5(tmp_path / "m.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(content[:700])
    # The address of the information of a driver, in the superblock, is one that no file has.
    (tmp_path / "address.h5").write_bytes(content[:48] + b"\xff\xff\xff\x7f" + content[52:])
    np.savez(tmp_path / "weights.npz", w=KERNEL)
    with zipfile.ZipFile(tmp_path / "weights.npz") as archive:
        header = archive.read("w.npy").replace(b"}", b"(")  # which is no literal
    with zipfile.ZipFile(tmp_path / "weights.npz", "w") as archive:
        archive.writestr("w.npy", header)
    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    refused = {
        "large.h5": "w claims 4398046511104 bytes",
        "many.h5": "but all 100 arrays have 0",
        "cut.h5": "is damaged",
        "address.h5": r"address\.h5 is damaged",
        "weights.npz": r"weights\.npz is not a complete zip archive: .*EOF",
        "notes.zip": r"a zip archive of a\.txt, without the data\.pkl of torch\.save",
    }
    for name, what in refused.items():
        with pytest.raises(hf.DamagedCheckpointError, match=what):
            hf.load(tmp_path / name)


def test_every_group_is_visited_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["a/w"] = KERNEL
        file["a/again"] = file["a"]
        file["tied"] = file["a/w"]
        group = file.create_group("deep")
        for number in range(30):  # the last group has 2**30 paths
            below = file.create_group(f"g{number}")
            group["left"] = group["right"] = below
            group = below
    found = hf.load(tmp_path / "m.h5", select=["a/w", "tied"])
    assert found["a"]["w"].tolist() == found["tied"].tolist() == KERNEL.tolist()
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"a/again: another name for a$"):
        hf.load(tmp_path / "m.h5", select="a/**")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_numpy(tmp_path: Path, save: Any) -> None:
    params = {"b": BIAS, "w": KERNEL}
    arrays: dict[str, Any] = {"n": np.array(7, np.int32), "order": np.asfortranarray(KERNEL)}
    save(
        tmp_path / "a.npz",
        **{f"params/{name}": array for name, array in params.items()},
        **arrays,
        swapped=BIAS.astype(">f4"),
    )
    found = hf.load(tmp_path / "a.npz")
    assert_same(found, {"params": params, **arrays, "swapped": found["swapped"]})
    assert found["swapped"].tolist() == BIAS.tolist()
    assert_same(hf.load(tmp_path / "a.npz", like={"params": params}, select="params/**"), {"params": params})
    assert hf.verify(tmp_path / "a.npz").ok
    (done,) = hf.import_checkpoint(tmp_path / "a.npz", tmp_path / "ours")
    assert (done.format, done.leaves) == ("NumPy", 5)

    content = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        content[archive.getinfo("swapped.npy").header_offset - 2] ^= 1  # in the data of the member before
    (tmp_path / "b.npz").write_bytes(content)
    with pytest.raises(hf.DamagedCheckpointError, match=r"b\.npz"):
        hf.load(tmp_path / "b.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_hides_no_array_of_numpy(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", w=BIAS, **{"layer/b": BIAS})
    content = (tmp_path / "a.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        directory = archive.start_dir
    for bit in range(8 * directory, 8 * len(content), 3):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b.npz").write_bytes(flipped)
        with contextlib.suppress(hf.DamagedCheckpointError):
            assert_same(hf.load(tmp_path / "b.npz"), {"w": BIAS, "layer": {"b": BIAS}})


def test_an_array_of_a_compressed_archive_is_in_memory_once(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(16 << 20, np.uint8))
    hf.load(tmp_path / "a.npz")  # imports what it needs
    with at_most(24 << 20):
        hf.load(tmp_path / "a.npz")


def test_objects_of_numpy_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=KERNEL, odd=np.array([print], object))
    with pytest.raises(hf.errors.UnsupportedLeafError, match="odd: pickled Python objects"):
        hf.load(tmp_path / "a.npz")
    assert hf.load(tmp_path / "a.npz", select="w")["w"].tolist() == KERNEL.tolist()
