"""torch tensors, saved and loaded with and without a template."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf

Same = Callable[[Any, Any], None]


BASE = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)


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
