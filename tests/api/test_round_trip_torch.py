"""torch tensors, saved and loaded with and without a template."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast as hf

Same = Callable[[Any, Any], None]

DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    data = np.random.default_rng(0).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    if dtype is not torch.bool:
        data *= 0x3C
    return torch.from_numpy(data.reshape(-1).copy()).view(dtype).reshape(shape)


def assert_equal(found: Any, expected: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.requires_grad == expected.requires_grad
    assert found.is_contiguous()
    assert torch.equal(_raw(found), _raw(expected))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, place: str, assert_same: Same) -> None:
    matrix = sample(dtype, 5, 3)
    tree = {"matrix": matrix, "scalar": matrix[2, 1], "empty": matrix[:2, :0]}
    hf.save(place, tree)
    plain = hf.load(place)
    for name, tensor in tree.items():
        assert plain[name].dtype == DTYPES[dtype]
        assert plain[name].shape == tensor.shape
        assert plain[name].tobytes() == bytes(_raw(tensor).numpy())
    for template in (tree, {name: torch.empty_like(tensor, device="meta") for name, tensor in tree.items()}):
        found = hf.load(place, like=template)
        for name, tensor in tree.items():
            assert_equal(found[name], tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_complex_numbers(place: str) -> None:
    tensor = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64).to(torch.complex32)
    hf.save(place, [tensor])
    assert hf.load(place)[0].tolist() == [1 + 2j, -0.5j]
    (found,) = hf.load(place, like=[torch.zeros(2, dtype=torch.complex32)])
    assert found.dtype == torch.complex32
    assert torch.equal(torch.view_as_real(found), torch.view_as_real(tensor))


BASE = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)
VIEWS: dict[str, torch.Tensor] = {
    "transposed": BASE.T,
    "strided": BASE[::3, 5:250:7],
    "expanded": BASE[:1].expand(40, 300),
    "shares_storage": BASE[50:60],
    "channels_last": BASE.reshape(2, 3, 100, 100).to(memory_format=torch.channels_last),
    "conjugated": torch.complex(BASE, BASE + 1).conj(),
    "negated": torch.complex(BASE, BASE + 1).conj().imag,
    "parameter": torch.nn.Parameter(BASE.clone()),
    "frozen_parameter": torch.nn.Parameter(BASE.clone(), requires_grad=False),
    "requires_grad": BASE.clone().requires_grad_(),
    "in_a_graph": BASE.clone().requires_grad_() * 2,
    "zero_strides": torch.zeros(()).expand(3, 4, 5),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_any_kind(name: str, place: str) -> None:
    tensor = VIEWS[name]
    hf.save(place, {"t": tensor}, layout=hf.Layout(chunk_bytes=4096, segment_bytes=8192))
    expected = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert hf.load(place)["t"].tobytes() == expected.numpy().tobytes()
    found = hf.load(place, like={"t": tensor})["t"]
    assert torch.equal(found.detach(), expected)
    assert found.requires_grad == tensor.requires_grad
    assert isinstance(found, torch.nn.Parameter) == isinstance(tensor, torch.nn.Parameter)


def test_tensors_that_share_storage_stay_whole(place: str) -> None:
    hf.save(place, {"all": BASE, "row": BASE[3], "again": BASE})
    found = hf.load(place, like={"all": BASE, "row": BASE[3], "again": BASE})
    found["all"].zero_()
    assert torch.equal(found["row"], BASE[3])
    assert torch.equal(found["again"], BASE)


def test_modules_and_optimizers_by_their_state_dict(place: str) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    hf.save(place, state)
    found = hf.load(place, like=state)
    assert type(found["model"]) is OrderedDict
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert list(found["optimizer"]["state"]) == list(state["optimizer"]["state"])  # integers
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    fresh.load_state_dict(found["model"])
    other = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    other.load_state_dict(found["optimizer"])
    for one, two in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(found["rng"], state["rng"])
    plain = hf.load(place, select="model/0.weight")  # a key with a dot in it is one key
    assert plain["model"]["0.weight"].tobytes() == model[0].weight.detach().numpy().tobytes()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "not initialized"),
    "module": (lambda: torch.nn.Linear(2, 2), "store its state_dict"),
    "dtype": (lambda: torch.float32, "torch.dtype"),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_tensors_without_plain_memory_are_named(make: Callable[[], Any], says: str, place: str) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"model/w: .*{says}"):
        hf.save(place, {"model": {"w": make()}})
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(place)


def test_arrays_of_the_three_libraries_stand_for_each_other(place: str, assert_same: Same) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    jnp = pytest.importorskip("jax.numpy")
    makers: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}
    for saved, make in makers.items():
        hf.save(f"{place}/{saved}", {"w": make(values.copy())})
        for asked, like in makers.items():
            found = hf.load(f"{place}/{saved}", like={"w": like(np.zeros_like(values))})["w"]
            assert isinstance(found, type(like(values.copy()))), (saved, asked)
            assert_same(np.asarray(found), values)
