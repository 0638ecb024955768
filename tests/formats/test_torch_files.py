"""Files of torch.save and Lightning, read without torch and without running anything."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.damage import flip
from tests.equality import assert_same
from tests.formats.torch_values import WAS_RUN, Evil

import holdfast as hf
from holdfast.engine.sources import open_checkpoint
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.torch.pickles import unpickle


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path / "x.pt", **options)
    return path / "x.pt"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_numbers(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex32)
    path = saved(tmp_path, {"x": tensor})
    assert hf.load(path)["x"].tolist() == [1 + 2j, 3 - 4j]
    assert torch.equal(hf.load(path, like={"x": tensor})["x"].view(torch.uint8), tensor.view(torch.uint8))


VIEWS = {
    "transposed": lambda base: base.t(),
    "sliced": lambda base: base[1:, ::2],
    "expanded": lambda base: base[:, :1].expand(4, 9),
    "conjugated": lambda base: torch.complex(base, base + 1).conj(),
    "negated": lambda base: torch.complex(base, base + 1).conj().imag,
    "parameter": lambda base: torch.nn.Parameter(base),
    "gradient": lambda base: base.clone().requires_grad_(),
    "channels last": lambda base: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_views(tmp_path: Path, make: Any) -> None:
    tensor = make(torch.arange(24.0).reshape(4, 6))
    path = saved(tmp_path, {"x": tensor, "again": tensor})
    found = hf.load(path)
    assert np.array_equal(found["x"], tensor.detach().resolve_conj().resolve_neg().numpy())
    assert not np.shares_memory(found["x"], found["again"])
    details = open_checkpoint(as_location(path)).tree("state").leaves[0].saved.details
    assert details.get("requires_grad", False) == tensor.requires_grad
    assert hf.verify(path).ok


def test_plain_values_and_containers(tmp_path: Path) -> None:
    value = {
        "int": 1 << 70,
        "float": 0.1,
        "text": "ünïcode",
        "bytes": b"\0\xff",
        "none": None,
        "flags": [True, False],
        "tuple": (1, (2.5,)),
        "complex": 1 + 2j,
        "set": {1, 2},
        3: "int key",
        "ordered": collections.OrderedDict(a=1, b=2),
        "array": np.arange(6, dtype=">f8").reshape(2, 3).T,
        "names": np.array(["a", "bc"]),
        "number": np.float32(0.5),
        "extended": np.arange(3).astype(ml_dtypes.bfloat16),
        "extended number": ml_dtypes.int4(-3),
    }
    odd = {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1)}
    found = hf.load(saved(tmp_path, {**value, **odd}))
    assert_same(found, {**value, "size": (2, 3), "dtype": "torch.bfloat16", "device": "cuda:1"})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    values = [1, "a" * 300, {4.5}, b"b", -7, 1 << 20]
    value = {"x": torch.arange(3), "y": values, "z": torch.nn.Parameter(torch.ones(1))}
    found = hf.load(saved(tmp_path, value, pickle_protocol=protocol))
    assert (found["x"].tolist(), found["y"], found["z"].tolist()) == ([0, 1, 2], values, [1.0])


@pytest.mark.parametrize("count", [3, 200_000], ids=["small", "larger than a block"])
def test_a_bare_tensor(tmp_path: Path, count: int) -> None:
    assert hf.load(saved(tmp_path, torch.arange(count))).tolist() == list(range(count))


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Custom(), r"\.Custom"),
        (print, r"builtins\.print"),
        (Evil(), r": an object of (io|_io|builtins)\.open"),
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
        ({(1, 2): 3}, "with the key a tuple"),
        ({None: torch.ones(2)}, "with the key None"),
        (np.array([object()]), "an array of Python objects"),
        (np.zeros(2, "M8[s]"), "an array of elements of type 'M8'"),
        (np.zeros(2, "i4,f4")[0], "a number of elements of type 'V8'"),
    ],
    ids=["class", "function", "code", "sparse", "meta", "tuple", "None", "numpy objects", "times", "structures"],
)
def test_objects_are_refused_by_name_and_never_run(tmp_path: Path, value: Any, what: str) -> None:
    path = saved(tmp_path, {"good": torch.ones(1), "bad": [value]})
    assert hf.load(path, select="good")["good"].tolist() == [1]
    with pytest.raises(hf.errors.UnsupportedLeafError, match=what):
        hf.load(path)
    assert hf.verify(path).ok, "what is not read is no damage"
    assert not WAS_RUN.exists()


def test_lightning_checkpoints_lose_what_is_no_data_outside_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = {
        "state_dict": {"w": torch.ones(2)},
        "pytorch-lightning_version": "2.6.6",
        "global_step": 40,
        "hyper_parameters": {"lr": 0.1, "loss": Custom(), "list": [1, Custom()]},
    }
    path = saved(tmp_path, checkpoint)
    source = open_checkpoint(as_location(path))
    assert (source.format, source.step) == ("Lightning", 40)
    left_out = source.tree("state").left_out
    assert [line.partition(" ")[0] for line in left_out] == ["hyper_parameters/loss", "hyper_parameters/list"]

    hf.load(path, select="state_dict/**")
    assert caplog.text == ""
    assert hf.load(path)["hyper_parameters"] == {"lr": 0.1}
    assert "left out because they are not data: hyper_parameters/loss (an object of " in caplog.text
    for to in ("safetensors", "torch", "dcp", "orbax"):
        caplog.clear()
        (done,) = hf.export_checkpoint(path, tmp_path / to, to)
        assert (done.leaves, done.left_out) == (4, left_out)
        assert "left out: hyper_parameters/loss (an object of " in caplog.text
    saved(tmp_path, {**checkpoint, "state_dict": {"w": Custom()}})
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"state_dict/w: an object of .*Custom"):
        hf.load(path)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(3), "y": torch.ones(2, dtype=torch.bfloat16)})
    program = f"import sys; sys.modules['torch'] = None; import holdfast as hf; print(hf.load({str(path)!r}))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "array([0, 1, 2])" in finished.stdout


# ---- damage


def test_a_flipped_bit_in_a_part_of_a_storage_is_neither_read_nor_converted(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.full((100,), 7, dtype=torch.uint8)[20:60], "y": torch.zeros(3)})
    flip(path, path.read_bytes().index(b"\7" * 100) + 50)  # the checksum is that of 100 bytes
    with pytest.raises(hf.DamagedCheckpointError, match=r"damaged in 1 of its leaves.*\n  x: .*100 bytes .*checksum"):
        hf.load(path)
    assert {problem.leaf for problem in hf.verify(path).checkpoints[0].problems} == {"", "x"}
    assert hf.load(path, select="y")["y"].tolist() == [0, 0, 0]
    with pytest.raises(
        hf.DamagedCheckpointError, match=r"is damaged; convert another checkpoint:\n  x\.pt: data/0: expected"
    ):
        hf.import_checkpoint(path, tmp_path / "ours")
    for to in ("safetensors", "torch", "dcp", "orbax"):
        with pytest.raises(hf.DamagedCheckpointError, match="is damaged; convert another checkpoint"):
            hf.export_checkpoint(path, tmp_path / "ours", to)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pt"]


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"x": torch.arange(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert hf.load(path)["x"].tolist() == [0, 1, 2]
    assert hf.verify(path).ok


def archive(path: Path, compression: int = zipfile.ZIP_STORED, **records: Any) -> Path:
    """Writes a file of records, each of which is a pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for folder, content in records.items():
            file.writestr(f"{folder}/data.pkl", content if isinstance(content, bytes) else pickle.dumps(content, 2))
        file.writestr("a/data/0", bytes(64))
    return path


REFUSED: dict[str, tuple[Any, str]] = {
    "of torch before 1.6": (
        lambda path: torch.save({"x": torch.ones(1)}, path, _use_new_zipfile_serialization=False),
        r"before torch 1\.6; load it with torch.load and save it again",
    ),
    "of a script": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
        "TorchScript archive, which holds code; save its state_dict",
    ),
    "compressed": (lambda path: archive(path, zipfile.ZIP_DEFLATED, a={"x": 1}), "compressed or encrypted"),
    "a record twice": (lambda path: archive(path, a={"x": 1}, b={"x": 2}), "occurs twice"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("write", "what"), REFUSED.values(), ids=REFUSED)
def test_files_that_are_refused(tmp_path: Path, write: Any, what: str) -> None:
    write(tmp_path / "x.pt")
    with pytest.raises(hf.DamagedCheckpointError, match=what):
        hf.load(tmp_path / "x.pt")


def tensor_pickle(offset: int, size: tuple[int, ...], stride: tuple[int, ...], count: int = 16) -> bytes:
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", count) if isinstance(value, Custom) else None

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Evil):
                arguments: Any = (Custom(), offset, size, stride, False, collections.OrderedDict())
                return (cast("Any", torch)._utils._rebuild_tensor_v2, arguments)
            return NotImplemented

    Pickler(buffer, 2).dump({"x": Evil()})
    return buffer.getvalue()


FORGED: dict[str, Any] = {
    "past the end": (1, (4, 4), (4, 1)),
    "before": (-1, (4,), (1,)),
    "backwards": (0, (4,), (-1,)),
    "negative": (0, (-4,), (1,)),
    "rank": (0, (4, 4), (4,)),
    "overflow": (0, (1 << 40, 1 << 40), (0, 0)),
    "bomb": (0, (1 << 30,), (0,)),
    "far": (0, (4,), (1 << 62,)),
    "storage": (0, (4,), (1,), 1 << 40),
    "axes": (0, (0,) * 65, (0,) * 65),
}


@pytest.mark.parametrize("numbers", FORGED.values(), ids=FORGED)
def test_forged_tensors_are_refused(tmp_path: Path, numbers: Any) -> None:
    assert hf.load(archive(tmp_path / "x.pt", a=tensor_pickle(0, (4, 4), (4, 1))))["x"].shape == (4, 4)
    with pytest.raises(hf.DamagedCheckpointError):
        hf.load(archive(tmp_path / "x.pt", a=tensor_pickle(*numbers)))


def laughs(depth: int) -> bytes:
    levels = (b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1]) for level in range(depth))
    return b"\x80\x02]q\x00" + b"".join(levels) + b"."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b".",
        b"\x80\x02}q\0h\0.",
        b"\x80\x02]q\0h\0a.",
        b"(" * 100_000 + b"t.",
        b"\x80\x02" + b"]" * 500 + b"a" * 499 + b".",
        b"\x80\x02)" + b"\x85" * 100_000 + b"\x85Ns}.",
        b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
        b"\x80\x02h\0.",
        b"\x80\x02K\1K\2R.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02c\xff\n\n.",
        b"\x80\x02U\1a.",
        b"\x80\x02\x82\1.",
        b"\x80\x02NQ.",
        b"\x80\x02}Nb.a",
        b"\x80\x02]](K\1K\2us.",
        laughs(60),
    ],
)
def test_damaged_pickles(tmp_path: Path, content: bytes) -> None:
    with contextlib.suppress(hf.DamagedCheckpointError):
        assert hf.load(archive(tmp_path / "x.pt", a=content)) in ({}, [], ())


def test_names_in_a_pickle_import_nothing() -> None:
    assert "antigravity" not in sys.modules
    found = unpickle(b"cantigravity\ngeohash\n)R.", {})
    assert str(found.name) == "antigravity.geohash"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("protocol", [2, 4])
def test_altered_pickles_raise_nothing_else(tmp_path: Path, protocol: int) -> None:
    value = {"x": torch.arange(30).reshape(5, 6).t(), "n": np.arange(3), "l": [1, 2.5, "a", {1}, 1 << 80]}
    with zipfile.ZipFile(saved(tmp_path, value, pickle_protocol=protocol)) as file:
        whole = file.read("x/data.pkl")
    random = np.random.default_rng(protocol)
    for _ in range(150):
        altered = bytearray(whole)
        for position in random.integers(0, len(whole), 2):
            altered[position] = random.integers(0, 256)
        with contextlib.suppress(hf.HoldfastError):
            hf.load(archive(tmp_path / "x.pt", a=bytes(altered)))
