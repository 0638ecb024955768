"""Torch tensors: every dtype and flavour, and tensors that are refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import ArrayLeaf, Saved, compare, describe, describe_template

torch = pytest.importorskip("torch")

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int4", "uint4", "uint1", "bits8",
]  # fmt: skip


def sample(name: str, count: int = 6) -> Any:
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.arange(count) % 2 == 0
    data = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that complex32 is experimental
        return torch.from_numpy(data).view(dtype)


def raw(tensor: Any) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex32:
        tensor = torch.view_as_real(tensor)
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.requires_grad == other.requires_grad
    assert raw(one) == raw(other)


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_comes_back_bit_for_bit(name: str, place: str) -> None:
    tensor = sample(name)
    hf.save(place, {"t": tensor})
    assert_same(hf.load(place, like={"t": tensor})["t"], tensor)
    plain = hf.load(place)["t"]
    assert isinstance(plain, np.ndarray)
    assert plain.shape == (6,)
    if name == "complex32":  # which numpy does not have
        np.testing.assert_array_equal(plain, torch.view_as_complex(torch.view_as_real(tensor).float()).numpy())
    else:
        assert plain.tobytes() == raw(tensor)
        has_no_numbers = name in ("float4_e2m1fn_x2", "int4", "uint4", "uint1", "bits8")
        assert plain.dtype.name == ("uint8" if has_no_numbers else name)


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
COMPLEX = torch.view_as_complex(torch.arange(8, dtype=torch.float32).reshape(4, 2))


FLAVOURS = {
    "0-d": torch.tensor(1.5), "0-d bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3), "empty float8": torch.empty(0, dtype=torch.float8_e4m3fn),
    "transposed": BASE.T, "strided": BASE[1:, ::2], "strided bfloat16": BASE.to(torch.bfloat16).T[::2],
    "expanded": BASE.expand(3, 4, 6),
    "channels last": BASE.reshape(1, 2, 2, 6).to(memory_format=torch.channels_last),
    "conjugated": COMPLEX.conj(), "negated": COMPLEX.conj().imag, "real part": COMPLEX.real,
    "gradient": torch.ones(3, requires_grad=True), "inner node": torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "integer parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
    "bfloat16 parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("tensor", FLAVOURS.values(), ids=list(FLAVOURS))
def test_every_flavour_comes_back(tensor: Any, place: str) -> None:
    hf.save(place, {"t": tensor})
    again = hf.load(place, like={"t": tensor})["t"]
    assert type(again) is type(tensor)
    assert again.is_leaf
    assert_same(again, tensor)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "is a tensor of layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "is a tensor of layout torch.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is a quantized tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
        (lambda: torch.ones(3, device="meta"), "is on the meta device and has no values"),
        (torch.nn.UninitializedParameter, "is not initialized yet"),
        (lambda: torch.nn.Linear(2, 2), r"is of type torch.nn.modules.linear.Linear; store its state_dict\(\)"),
        (torch.Generator, r"is of type torch._C.Generator; store its get_state\(\)"),
        (lambda: torch.float32, "is of type torch.dtype; leaves are arrays, numbers, strings, bytes and None"),
    ],
    ids=["sparse", "csr", "quantized", "nested", "meta", "uninitialized", "module", "generator", "dtype"],
)
def test_tensors_without_an_array_are_named(make: Any, said: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch deprecates some of them
        value = make()
    with pytest.raises(UnsupportedLeafError, match=f"model/w: {said}"):
        describe(["ok", "model.w"], [torch.ones(1), value])


def test_a_tensor_on_the_meta_device_is_a_template_for_the_cpu(place: str) -> None:
    hf.save(place, [torch.arange(3.0)])
    again = hf.load(place, like=[torch.empty(3, device="meta", requires_grad=True)])[0]
    assert again.device.type == "cpu"
    assert again.requires_grad
    assert again.tolist() == [0, 1, 2]


ALIKE = [
    ("complex64", "complex32"), ("float16", "complex32"), ("uint8", "uint4"), ("float16", "bfloat16"),
    ("float8_e5m2", "float8_e4m3fn"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "value"), ALIKE)
def test_dtypes_of_the_same_size_are_told_apart(template: str, value: str) -> None:
    [leaf] = describe(["w"], [sample(value)])
    assert isinstance(leaf, ArrayLeaf)
    [target] = describe_template(["w"], [sample(template)])
    line = compare(target, Saved(leaf.details, leaf.dtype, leaf.shape))
    assert line == f"w: expected {template}[6] (template), found {value}[6] (checkpoint)"
