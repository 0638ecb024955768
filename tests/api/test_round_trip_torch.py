"""torch tensors, saved and loaded with and without a template."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.equality import assert_same

import holdfast as hf

BASE = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)


def test_tensors_that_share_storage_stay_whole(place: str) -> None:
    hf.save(place, {"all": BASE, "row": BASE[3], "again": BASE})
    found = hf.load(place, like={"all": BASE, "row": BASE[3], "again": BASE})
    found["all"].zero_()
    assert torch.equal(found["row"], BASE[3])
    assert torch.equal(found["again"], BASE)


def test_a_state_dict_keeps_its_containers_and_keys(place: str) -> None:
    weight = torch.rand(2, 4)
    state: dict[str, Any] = {
        "model": OrderedDict([("0.weight", weight), ("0.bias", torch.zeros(2))]),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "rng": torch.get_rng_state(),
    }
    hf.save(place, state)
    assert_same(hf.load(place, like=state), state)
    plain = hf.load(place, select="model/0.weight")  # a key with a dot in it is one key
    assert plain["model"]["0.weight"].tobytes() == weight.numpy().tobytes()


def test_arrays_of_the_three_libraries_stand_for_each_other(place: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    jnp = pytest.importorskip("jax.numpy")
    makers: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}
    for saved, make in makers.items():
        hf.save(f"{place}/{saved}", {"w": make(values.copy())})
        for asked, like in makers.items():
            found = hf.load(f"{place}/{saved}", like={"w": like(np.zeros_like(values))})["w"]
            assert isinstance(found, type(like(values.copy()))), (saved, asked)
            assert_same(np.asarray(found), values)
