"""The document's sections on checkpointers and handlers: its interfaces, implemented and called on small real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

import holdfast as hf

Spec: Any = PartitionSpec
INPUTS, LABELS = load_iris(return_X_y=True)
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


def test_array_checkpoint_handler(tmp_path: Path) -> None:
    checkpointer = hf.AsyncCheckpointer(hf.ArrayCheckpointHandler())
    checkpointer.save(tmp_path / "one", jnp.asarray(INPUTS))
    np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one"), INPUTS.astype(np.float32))
    args = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec(), dtype=np.float16)
    found = checkpointer.restore(tmp_path / "one", restore_args=args)
    assert (found.dtype, found.sharding) == (np.float16, NamedSharding(MESH, Spec()))
    assert hf.load(tmp_path / "one").shape == INPUTS.shape
    for item in ({"a": INPUTS}, [1.0], None, "text"):
        with pytest.raises(hf.errors.UnsupportedLeafError, match="ArrayCheckpointHandler saves one array"):
            hf.Checkpointer(hf.ArrayCheckpointHandler()).save(tmp_path / "two", item)
