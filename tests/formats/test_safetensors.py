"""safetensors files and folders, against the real library in both directions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.storage import Location


def exported(path: Path, tree: Any) -> Path:
    hf.save(path / "ckpt", tree)
    hf.export_checkpoint(path / "ckpt", path / "x.safetensors", "safetensors")
    return path / "x.safetensors"


@pytest.mark.parametrize("names", [("a", "a.b"), ("a..b", "c"), ("", "x")], ids=str)
def test_names_that_make_no_tree_are_keys_of_one_dictionary(tmp_path: Path, names: tuple[str, str]) -> None:
    arrays = {name: np.full(2, index) for index, name in enumerate(names)}
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    assert_same(hf.load(tmp_path / "m.safetensors"), arrays)


def test_an_exported_tree_comes_back_whole(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "params": {"Dense_0": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}},
        "opt": [np.ones(2, ml_dtypes.bfloat16), (np.int32(4), 2.5)],
        "step": 7,
        "name": "run",
        "nothing": None,
        "big": 1 << 90,
        "bytes": b"\0\xff",
        "empty": {},
    }
    path = exported(tmp_path, tree)
    assert set(safetensors.numpy.load_file(path)) == {"params.Dense_0.kernel", "opt.0", "opt.1.0", "opt.1.1", "step"}
    assert_same(hf.load(path), tree)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        pytest.param(["a.0", "b"], lambda note: note, id="a tensor has another name"),
        pytest.param(["a.0", "a.1", "b"], lambda note: note, id="a tensor was added"),
        pytest.param(["a.0", "a.1"], lambda note: note[:-1], id="the note is cut off"),
        pytest.param(["a.0", "a.1"], lambda note: note.replace('"numpy"', "NaN"), id="the note is not JSON"),
    ],
)
def test_a_note_that_fits_no_more_is_ignored(tmp_path: Path, names: list[str], change: Any) -> None:
    path = exported(tmp_path, {"a": [np.ones(1), np.ones(2)]})
    with safetensors.safe_open(path, "np") as file:
        note = {name: change(text) for name, text in file.metadata().items()}
    safetensors.numpy.save_file({name: np.ones(1) for name in names}, path, note)
    found = hf.load(path)
    assert (set(found), type(found["a"])) == ({name[0] for name in names}, dict)


FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


def folder(path: Path, first: int = 1, second: int = 2) -> Path:
    """A model in two files, whose tensors are filled with a number each."""
    path.mkdir()
    safetensors.numpy.save_file({"a.x": np.full(2, first)}, path / FIRST)
    safetensors.numpy.save_file({"b": np.full(3, second)}, path / SECOND)
    index = {"metadata": {}, "weight_map": {"b": SECOND, "a.x": FIRST}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def lead(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def imported(path: Path) -> Any:
    hf.import_checkpoint(path, path.parent / "copy")
    return hf.load(path.parent / "copy")


@pytest.mark.parametrize(
    ("read", "moment", "found"),
    [*((hf.load, moment, [7, 7, 7]) for moment in range(1, 5)), (imported, 4, [1, 1, 2])],
)
def test_a_link_that_leads_elsewhere_while_it_is_read(
    read: Any, moment: int, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are those of one checkpoint."""
    folder(tmp_path / "old")
    folder(tmp_path / "new", 7, 7)
    link, open_data, opens = tmp_path / "latest", Location.open_data, []
    lead(link, "old")

    def opened_data(place: Location, **options: Any) -> Any:
        opens.append(place.name)
        if len(opens) == moment:
            lead(link, "new")
        return open_data(place, **options)

    monkeypatch.setattr(Location, "open_data", opened_data)
    tree = read(link)
    assert [*tree["a"]["x"].tolist(), tree["b"].tolist()[0]] == found


@pytest.mark.parametrize("name", ["", FIRST], ids=["folder", "folder of the file"])
def test_handles_stay_where_a_link_has_led(name: str, tmp_path: Path) -> None:
    folder(tmp_path / "old")
    folder(tmp_path / "new", 7, 7)
    link = tmp_path / "latest"
    lead(link, "old")
    with hf.open(link / name) as tree:
        first = tree["a"]["x"][0]
        lead(link, "new")
        assert [first, tree["a"]["x"][1]] == [1, 1]
    assert hf.open(link / name).tree["a"]["x"][:].tolist() == [7, 7]


@pytest.mark.parametrize("is_link", [True, False], ids=["a link that is moved", "a file that is replaced"])
def test_handles_of_a_file_in_whose_place_another_one_is(is_link: bool, tmp_path: Path) -> None:
    for name, value in (("old", 1), ("new", 7)):
        safetensors.numpy.save_file({"x": np.full(2, value)}, tmp_path / f"{name}.safetensors")
    path = tmp_path / "x.safetensors"
    (path.symlink_to if is_link else path.hardlink_to)(tmp_path / "old.safetensors")
    with hf.open(path) as tree:
        assert tree["x"][0] == 1
        path.unlink()
        (path.symlink_to if is_link else path.hardlink_to)(tmp_path / "new.safetensors")
        with pytest.raises(hf.CheckpointNotFoundError, match="another program has replaced this checkpoint or written"):
            tree["x"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.x": "../x.safetensors"}, "not a file in its folder"),
        ({"a.x": "missing.safetensors"}, "is missing"),
        ({"a.x": SECOND}, "does not hold it"),
        ({"a.x": 3}, "file of every tensor"),
    ],
    ids=["outside", "missing file", "missing tensor", "no name"],
)
def test_damaged_indexes(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = folder(tmp_path / "model") / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= change
    path.write_text(json.dumps(index))
    with pytest.raises(hf.DamagedCheckpointError, match=message):
        hf.load(tmp_path / "model")


def forged(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def described(shape: object = (2,), offsets: object = (0, 2), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        ([], b"", "not a JSON object"),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        ({"__metadata__": {"a": 1}}, b"", "to text"),
        ({"a": 1}, b"", "does not describe"),
        ({"a": described()}, b"1", "the file has"),
        ({"a": described()}, b"123", "the file has"),
        ({"a": described(), "b": described(offsets=(1, 3))}, b"123", "overlaps"),
        ({"a": described(offsets=(1, 3))}, b"123", "gap"),
        ({"a": described(shape=(-2, -1))}, b"12", "no shape"),
        ({"a": described(shape=(True, 2))}, b"12", "no shape"),
        ({"a": described(shape=(2.0,))}, b"12", "no shape"),
        ({"a": described(shape=(1 << 61, 8))}, b"12", "takes"),
        ({"a": described(shape=(1 << 63,))}, b"12", "no shape"),
        ({"a": described(shape=[0] * 65, offsets=(0, 0))}, b"", "no shape"),
        ({"a": described(dtype="X")}, b"12", "dtype 'X'"),
        ({"a": described(dtype=["U8"])}, b"12", "dtype"),
        ({"a": described(offsets=(2, 0))}, b"12", "takes"),
        ({"a": described(dtype="F4", shape=(3, 3), offsets=(0, 5))}, b"12345", "does not fill whole bytes"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(hf.DamagedCheckpointError, match=message):
        hf.load(forged(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is an empty file"),
        (b"1234567", "at least 8 bytes"),
        *((struct.pack("<Q", length) + b"{}", str(length)) for length in (1 << 63, 200_000_000, 5_000)),
    ],
)
def test_files_that_are_too_short(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(hf.DamagedCheckpointError, match=said):
        hf.load(tmp_path / "x.safetensors")


def test_packed_numbers_are_bytes(tmp_path: Path) -> None:
    path = forged(tmp_path / "x.safetensors", {"a": described(dtype="F4", shape=(3, 4), offsets=(0, 6))}, b"123456")
    assert hf.load(path)["a"].tobytes() == b"123456"
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert hf.load(path, like={"a": torch.empty(3, 2, dtype=torch.float4_e2m1fn_x2)})["a"].shape == (3, 2)
