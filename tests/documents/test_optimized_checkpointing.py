"""The document on OCDBT: what a checkpoint looks like on disk, and that nothing has to be enabled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

import holdfast as hf

INPUTS, LABELS = load_iris(return_X_y=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    layers = {f"layer{number}": {"param0": INPUTS * number, "param1": LABELS} for number in range(100)}
    items = {"state": hf.PyTreeCheckpointer(), "another_item": hf.Checkpointer(hf.JsonCheckpointHandler())}
    with hf.CheckpointManager(tmp_path, items) as manager:
        for step in range(2):
            manager.save(step, {"state": layers, "another_item": {"step": step}})
    return tmp_path


def kvstore(state: Path) -> Any:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{state}/"}).result()


def test_enabling_ocdbt(directory: Path) -> None:
    """There is nothing to enable, and no server to keep alive: TensorStore opens what any handler has saved."""
    ocdbt_context, coordinator_server = hf.type_handlers.create_coordinator_server_and_context()
    hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=True, ts_context=ocdbt_context)
    assert coordinator_server is None

    ckptr = hf.Checkpointer(hf.PyTreeCheckpointHandler(use_ocdbt=True))
    ckptr.save(directory / "one", {"inputs": INPUTS})
    spec = {"driver": "ocdbt", "base": f"file://{directory}/one/state/", "path": "inputs/"}
    found = ts.open({"driver": "zarr3", "kvstore": spec}).result().read().result()
    np.testing.assert_array_equal(found, INPUTS)
    with pytest.raises(hf.errors.OptionError, match="always stores arrays in an OCDBT database"):
        hf.PyTreeCheckpointHandler(use_ocdbt=False)
    with pytest.raises(hf.errors.OptionError, match="always stores arrays in an OCDBT database"):
        hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=False)
