"""Leaves on disk: compression and chunks for each leaf, for a handler, and with several writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from tests.handlers.vocabulary import Vocabulary, VocabularyHandler, trees_with

import holdfast as hf
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.storage import as_location

ZEROS = {"a": np.zeros(100_000), "b": np.zeros(100_000)}


def stored_bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def array(place: Path, name: str) -> Any:
    base = {"driver": "ocdbt", "base": f"file://{place}/state/", "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": base}).result()


@pytest.mark.parametrize(
    ("handler", "save_args", "least", "most"),
    [
        ({}, None, 1_600_000, 1_700_000),
        ({}, {"a": hf.SaveArgs(compression=3)}, 800_000, 850_000),
        ({}, hf.SaveArgs(compression=3), 0, 50_000),
        ({"compression": 1}, None, 0, 50_000),
        ({"compression": 1}, {"a": hf.SaveArgs(compression=0)}, 800_000, 850_000),
        ({"compression": 1}, {"a": hf.SaveArgs()}, 0, 50_000),
        ({"layout": hf.Layout(compression=1)}, None, 0, 50_000),
    ],
    ids=["none", "one leaf", "all leaves", "handler", "handler but one", "handler and arguments", "layout"],
)
def test_compression(tmp_path: Path, handler: dict[str, Any], save_args: Any, least: int, most: int) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(**handler))
    checkpointer.save(tmp_path / "one", ZEROS, save_args=save_args)
    assert least <= stored_bytes(tmp_path / "one") <= most
    for name in ("a", "b"):
        np.testing.assert_array_equal(hf.load(tmp_path / "one")[name], ZEROS[name])
        np.testing.assert_array_equal(array(tmp_path / "one", name).read().result(), ZEROS[name])
    assert hf.verify(tmp_path / "one").ok


def test_chunks(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(chunk_bytes=80_000, data_file_bytes=100_000))
    checkpointer.save(tmp_path / "one", ZEROS, save_args={"a": hf.SaveArgs(chunk_bytes=40_000)})
    assert array(tmp_path / "one", "a").chunk_layout.read_chunk.shape == (5_000,)
    assert array(tmp_path / "one", "b").chunk_layout.read_chunk.shape == (10_000,)
    assert len(list((tmp_path / "one" / "state" / "d").iterdir())) > 16
    np.testing.assert_array_equal(hf.load(tmp_path / "one")["b"], ZEROS["b"])


def test_all_arguments_together(tmp_path: Path) -> None:
    """Leaves may change as soon as the save has begun: those that are cast, aggregated, or neither."""
    numbers = np.arange(100_000) % 100
    tree = {"w": numbers.astype(np.float64), "small": numbers[:3].copy(), "plain": numbers[:3].copy()}
    save_args = {
        "w": hf.SaveArgs(dtype=np.float16, compression=3, chunk_bytes=40_000),
        "small": hf.SaveArgs(aggregate=True, compression=3),
    }
    with hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", tree, save_args=save_args)
        for leaf in tree.values():
            leaf[...] = 0
    found = hf.load(tmp_path / "one")
    np.testing.assert_array_equal(found["w"], numbers.astype(np.float16))
    for name in ("small", "plain"):
        np.testing.assert_array_equal(found[name], numbers[:3])
    assert array(tmp_path / "one", "w").chunk_layout.read_chunk.shape == (20_000,)
    assert stored_bytes(tmp_path / "one") < 50_000


def test_several_processes_write_aggregates_and_leaves_of_handlers_once(place: str) -> None:
    handler = trees_with(VocabularyHandler(), compression=1)
    tree: dict[str, Any] = {
        "w": np.arange(50_000),
        "small": np.arange(3),
        "text": Vocabulary(["hello"]),
        "half": np.linspace(0, 1, 9),
    }
    save_args = {"small": hf.SaveArgs(aggregate=True), "half": hf.SaveArgs(dtype=np.float16)}
    folder = as_location(place) / "state"
    shares = [handler.prepare(tree, snapshot=True, save_args=save_args) for _ in range(3)]
    fragments = [share.write(folder, ProcessInfo(index, 3, "token")) for index, share in enumerate(shares)]
    files = shares[0].merge(folder, fragments)
    assert {"aggregate.msgpack", "leaves/2/0.txt", "tree.json"} <= set(files)
    found = handler.restore(folder, files=files)
    np.testing.assert_array_equal(found["w"], tree["w"])
    np.testing.assert_array_equal(found["small"], tree["small"])
    assert found["text"] == tree["text"]
    np.testing.assert_array_equal(found["half"], tree["half"].astype(np.float16))
