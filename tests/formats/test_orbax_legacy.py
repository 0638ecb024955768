"""Checkpoints of early versions of Orbax and of Flax: trees in msgpack, with and without arrays beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.formats.orbax_files import DIRECTORIES, ocp, save

import holdfast as hf

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
optax: Any = pytest.importorskip("optax")
msgpack_utils: Any = pytest.importorskip("orbax.checkpoint.msgpack_utils")
serialization: Any = pytest.importorskip("flax.serialization")
msgpack: Any = pytest.importorskip("msgpack")


def aggregate(path: Path, tree: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "checkpoint").write_bytes(msgpack_utils.msgpack_serialize(tree))
    return path


def test_leaves_in_one_file(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "half": jnp.ones(2, jnp.bfloat16)},
        "step": 7,
        "rate": 1.5,
        "flag": True,
        "text": "hello",
        "complex": 1 + 2j,
        "scalar": np.float32(2.5),
        "none": None,
        "nothing": {},
        "pair": (1, np.ones(1)),
        "list": [np.zeros(2, np.int8), []],
    }
    found = hf.load(aggregate(tmp_path / "one", tree))
    params = {"w": tree["params"]["w"], "half": np.ones(2, jnp.bfloat16)}
    expected = {**tree, "params": params, "pair": [1, np.ones(1)]}
    assert_same(*(jax.tree.map(lambda leaf: leaf, one) for one in (found, expected)))  # in the same order
    with ocp.PyTreeCheckpointer() as checkpointer:
        theirs = checkpointer.restore(aggregate(tmp_path / "two", {"w": tree["params"]["w"], "step": 7}))
    assert (theirs["w"].tolist(), theirs["step"]) == (found["params"]["w"].tolist(), found["step"])
    assert hf.load(tmp_path / "one", select="params/w")["params"]["w"].flags.writeable
    assert hf.verify(tmp_path / "one").ok


@pytest.mark.parametrize("with_metadata", [False, True], ids=["msgpack alone", "beside _METADATA"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "ocdbt"])
def test_arrays_beside_the_file(tmp_path: Path, with_metadata: bool, use_ocdbt: bool) -> None:
    tree = {"params": {"w": jnp.arange(6.0)}, "small": {"v": np.zeros(2)}, "step": 0}
    path = save(tmp_path / "one", tree, use_ocdbt=use_ocdbt)
    # As SaveArgs(aggregate=True) did it: values in the place of small leaves, names in that of the others.
    aggregate(path, {"params": {"w": "PLACEHOLDER://params.w"}, "small": {"v": np.ones(2)}, "step": 7})
    if not with_metadata:
        (path / "_METADATA").unlink()
    values = np.arange(6, dtype=np.float32)
    assert_same(hf.load(path), {"params": {"w": values}, "small": {"v": np.ones(2)}, "step": 7})
    like: Any = {"params": {"w": jnp.zeros(6)}, "small": {"v": np.zeros(2)}, "step": 0}
    assert isinstance(hf.load(path, like=like)["params"]["w"], jax.Array)
    assert hf.verify(path).ok


def test_arrays_without_any_word_on_their_tree(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "12" / "default", {"a": {"b": jnp.ones(2)}, "c": jnp.zeros(1)}, **DIRECTORIES)
    (path / "_METADATA").unlink()
    assert_same(hf.load(path), {"a": {"b": np.ones(2, np.float32)}, "c": np.zeros(1, np.float32)})


def test_flax_s_own_files(tmp_path: Path) -> None:
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}}
    state = {"params": params, "optimizer": optax.adamw(0.1).init(params), "step": 5}
    for name in ("model.msgpack", "checkpoint_5"):
        (tmp_path / name).write_bytes(serialization.to_bytes(state))
    like = jax.tree.map(jnp.zeros_like, state) | {"step": 0}
    assert_same(hf.load(tmp_path / "model.msgpack", like=like), jax.tree.map(lambda leaf: leaf, state))
    assert hf.load(tmp_path / "checkpoint_5")["step"] == 5
    assert hf.describe(tmp_path / "checkpoint_5")[-1].kind == "int"


def test_large_arrays_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_utils, "MAX_CHUNK_SIZE", 64)
    tree = {"v": np.arange(3), "w": np.arange(60.0).reshape(5, 12)}
    assert_same(hf.load(aggregate(tmp_path / "one", tree)), tree)


# Beside what no file of msgpack may hold (tests/format/test_msgpack.py).
HOSTILE = {
    "truncated": msgpack.packb({"a": "long enough"})[:-3],
    "unknown extension": msgpack.packb({"a": msgpack.ExtType(9, b"")}),
    "damaged complex": msgpack.packb({"a": msgpack.ExtType(2, msgpack.packb([1.0]))}),
    "bytes as key": msgpack.packb({b"a": 1}),
    "a key as text and as a number": msgpack.packb({"1": 1, 1: 2}),
    "text that is none": b"\x81\xa1a\xa1\xff",
    "deep tuples": b"\x81\xa1a" + bytes(msgpack.packb(msgpack.ExtType(4, msgpack.packb(msgpack.ExtType(4, b""))))),
    "parts that are none": msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": 3}}),
    "another place": msgpack.packb({"a": "PLACEHOLDER://../../outside"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoint").write_bytes(HOSTILE[name])
    with pytest.raises(hf.DamagedCheckpointError, match="checkpoint"):
        hf.load(tmp_path)
    assert not hf.verify(tmp_path).ok
