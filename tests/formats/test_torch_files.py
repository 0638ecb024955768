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

import holdfast as hf
from holdfast.engine.arrays import load_tree
from holdfast.engine.sources.stored import StoredTree
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.torch import files as torch_files
from holdfast.integrations.formats.torch.pickles import unpickle


def opened(path: Path) -> StoredTree:
    found = torch_files.recognise(as_location(path), frozenset())
    assert found is not None
    return cast("StoredTree", found.source)


def loaded(path: Path, **options: Any) -> Any:
    return load_tree(opened(path), **options)


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path / "x.pt", **options)
    return path / "x.pt"


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # since torch 2.7
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_as_the_engine_saves_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 13).reshape(3, 4).to(dtype)
    hf.save(tmp_path / "ckpt", {"x": tensor})

    found = loaded(saved(tmp_path, {"x": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]}))

    expected = hf.load(tmp_path / "ckpt")["x"]
    assert found["x"].dtype == expected.dtype
    assert found["x"].tobytes() == expected.tobytes() == bits(tensor)
    assert found["x"].flags.writeable
    assert found["x"].flags.aligned
    assert found["scalar"].shape == ()
    assert found["empty"].shape == (0, 4)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_numbers(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex32)

    path = saved(tmp_path, {"x": tensor})

    assert loaded(path)["x"].tolist() == [1 + 2j, 3 - 4j]
    assert torch.equal(loaded(path, like={"x": tensor})["x"].view(torch.uint8), tensor.view(torch.uint8))


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

    path = saved(tmp_path, {"x": tensor})

    assert np.array_equal(loaded(path)["x"], tensor.detach().resolve_conj().resolve_neg().numpy())
    assert opened(path).leaves[0].saved.details.get("requires_grad", False) == tensor.requires_grad
    assert opened(path).verify() == []


def test_shared_memory_becomes_two_arrays(tmp_path: Path) -> None:
    weight = torch.ones(3)

    found = loaded(saved(tmp_path, {"a": weight, "b": weight}))

    found["a"][0] = 5
    assert found["b"].tolist() == [1, 1, 1]


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
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "array": np.arange(6, dtype=">f8").reshape(2, 3).T,
        "names": np.array(["a", "bc"]),
        "number": np.float32(0.5),
        "extended": np.arange(3).astype(ml_dtypes.bfloat16),
        "extended number": ml_dtypes.int4(-3),
    }

    found = loaded(saved(tmp_path, value))

    assert found.pop("size") == (2, 3)
    assert found.pop("dtype") == "torch.bfloat16"
    assert found.pop("device") == "cuda:1"
    assert np.array_equal(found.pop("array"), cast("Any", value.pop("array")))
    assert found.pop("names").tolist() == ["a", "bc"]
    assert type(found.pop("number")) is np.float32
    assert found.pop("extended").tolist() == [0, 1, 2]
    assert type(found["extended number"]) is ml_dtypes.int4
    assert type(found["ordered"]) is collections.OrderedDict
    assert found == {key: item for key, item in value.items() if key in found}
    assert len(found) == 12


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    values = [1, "a" * 300, {4.5}, b"b", -7, 1 << 20]
    value = {"x": torch.arange(3), "y": values, "z": torch.nn.Parameter(torch.ones(1))}

    found = loaded(saved(tmp_path, value, pickle_protocol=protocol))

    assert found["x"].tolist() == [0, 1, 2]
    assert found["y"] == values
    assert found["z"].tolist() == [1.0]


@pytest.mark.parametrize("count", [3, 200_000], ids=["small", "larger than a block"])
def test_a_bare_tensor(tmp_path: Path, count: int) -> None:
    assert loaded(saved(tmp_path, torch.arange(count))).tolist() == list(range(count))


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Custom(), r"\.Custom"),
        (print, r"builtins\.print"),
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
        ({(1, 2): 3}, "with the key a tuple"),
        ({None: torch.ones(2)}, "with the key None"),
        (np.array([object()]), "an array of Python objects"),
        (np.zeros(2, "M8[s]"), "an array of elements of type 'M8'"),
        (np.zeros(2, "i4,f4")[0], "a number of elements of type 'V8'"),
    ],
    ids=["class", "function", "sparse", "meta", "tuple keys", "None as a key", "numpy objects", "times", "structures"],
)
def test_objects_are_refused_by_name(tmp_path: Path, value: Any, what: str) -> None:
    path = saved(tmp_path, {"good": torch.ones(1), "bad": [value]})

    assert loaded(path, select="good")["good"].tolist() == [1]
    with pytest.raises(hf.errors.UnsupportedLeafError, match=what):
        loaded(path)
    assert hf.verify(path).ok, "what is not read is no damage"


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

    found = torch_files.recognise(as_location(path), frozenset())

    assert found is not None
    assert (found.format, found.step) == ("Lightning", 40)
    assert [line.partition(" ")[0] for line in opened(path).left_out] == [
        "hyper_parameters/loss",
        "hyper_parameters/list",
    ]
    assert loaded(path)["hyper_parameters"] == {"lr": 0.1}
    caplog.clear()
    hf.load(path, select="state_dict/**")
    assert caplog.text == ""
    hf.load(path)
    assert "left out because they are not data: hyper_parameters/loss (an object of " in caplog.text, (
        "a whole file is loaded"
    )
    saved(tmp_path, {**checkpoint, "state_dict": {"w": Custom()}})
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"state_dict/w: an object of .*Custom"):
        loaded(path)


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/holdfast-was-run", "w"))


def test_nothing_is_run(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": Evil()})

    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"x: an object of (io|_io|builtins)\.open"):
        loaded(path)

    assert not Path("/tmp/holdfast-was-run").exists()


def test_torch_is_not_needed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(3), "y": torch.ones(2, dtype=torch.bfloat16)})
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from holdfast.integrations.formats.torch import files\n"
        "from holdfast.engine.arrays import load_tree\n"
        "from holdfast.engine.storage import as_location\n"
        f"print(load_tree(files.recognise(as_location({str(path)!r}), frozenset()).source))"
    )

    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "array([0, 1, 2])" in finished.stdout


# ---- damage


def flipped(path: Path, position: int) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    return path


def test_a_flipped_bit_in_a_tensor_is_seen(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.full((100,), 7, dtype=torch.uint8)})
    flipped(path, path.read_bytes().index(b"\7" * 100) + 50)

    with pytest.raises(hf.DamagedCheckpointError, match=r"x: .*checksum"):
        loaded(path)
    assert {problem.leaf for problem in opened(path).verify()} == {"", "x"}


def test_a_flipped_bit_in_a_part_of_a_storage_is_neither_read_nor_converted(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.full((100,), 7, dtype=torch.uint8)[20:60], "y": torch.zeros(3)})
    flipped(path, path.read_bytes().index(b"\7" * 100) + 50)  # the checksum is that of 100 bytes
    with pytest.raises(hf.DamagedCheckpointError, match=r"damaged in 1 of its leaves.*\n  x: .*100 bytes .*checksum"):
        loaded(path)
    assert hf.load(path, select="y")["y"].tolist() == [0, 0, 0]
    with pytest.raises(
        hf.DamagedCheckpointError, match=r"is damaged; convert another checkpoint:\n  x\.pt: data/0: expected"
    ):
        hf.import_checkpoint(path, tmp_path / "ours")
    for to in ("safetensors", "torch", "dcp", "orbax"):
        with pytest.raises(hf.DamagedCheckpointError, match="is damaged; convert another checkpoint"):
            hf.export_checkpoint(path, tmp_path / "ours", to)
    assert not (tmp_path / "ours").exists()


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"x": torch.arange(3)})
    finally:
        torch.serialization.set_crc32_options(True)

    assert loaded(path)["x"].tolist() == [0, 1, 2]
    assert opened(path).verify() == []


def test_every_cut_is_seen(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(30)})
    whole = path.read_bytes()

    for length in range(4, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(hf.DamagedCheckpointError):
            loaded(path)


def test_every_flipped_byte_is_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(30)})
    whole = path.read_bytes()

    for position in range(4, len(whole), 11):
        path.write_bytes(whole)
        try:
            found = loaded(flipped(path, position))["x"]
        except hf.HoldfastError:
            continue
        assert found.tolist() == list(range(30))


def of_torch_before_1_6(path: Path) -> None:
    torch.save({"x": torch.ones(1)}, path, _use_new_zipfile_serialization=False)


def of_a_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def with_a_compressed_record(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", pickle.dumps({"x": 1}, 2))


def with_a_record_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in ("a", "b"):
            file.writestr(f"{name}/data.pkl", pickle.dumps({"x": name}, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "what"),
    [
        (of_torch_before_1_6, r"before torch 1\.6; load it with torch.load and save it again"),
        (of_a_script, "TorchScript archive, which holds code; save its state_dict"),
        (with_a_compressed_record, "compressed or encrypted"),
        (with_a_record_twice, "occurs twice"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, write: Any, what: str) -> None:
    write(tmp_path / "x.pt")

    with pytest.raises(hf.DamagedCheckpointError, match=what):
        opened(tmp_path / "x.pt")


def test_other_files_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"hello")

    assert torch_files.recognise(as_location(tmp_path / "x.pt"), frozenset()) is None
    assert torch_files.recognise(as_location(tmp_path / "missing.pt"), frozenset()) is None


def archive(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path / "x.pt", "w") as file:
        file.writestr("a/data.pkl", content)
        file.writestr("a/data/0", bytes(64))
    return path / "x.pt"


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
    assert loaded(archive(tmp_path, tensor_pickle(0, (4, 4), (4, 1))))["x"].shape == (4, 4)
    with pytest.raises(hf.DamagedCheckpointError):
        loaded(archive(tmp_path, tensor_pickle(*numbers)))


def laughs(depth: int) -> bytes:
    content = b"\x80\x02]q\x00"
    for level in range(depth):
        content += b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    return content + b"."


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
    try:
        found = loaded(archive(tmp_path, content))
    except hf.DamagedCheckpointError:
        return
    assert found in ({}, [], ())


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
            loaded(archive(tmp_path, bytes(altered)))
