"""Checkpoints of TensorFlow that are damaged: every byte of them, and every length."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast import graph
from holdfast.integrations.formats.tensorflow.tree import BundleTree
from holdfast.integrations.graph.stored import open_graph

FIXTURES = Path(__file__).parent / "tensorflow"


def damaged(content: bytes) -> Iterator[bytes]:
    """Generates the content with one bit flipped in each byte in turn, and cut off everywhere."""
    for place, byte in enumerate(content):
        yield content[:place] + bytes([byte ^ 1 << place % 8]) + content[place + 1 :]
    for length in range(len(content)):
        yield content[:length]


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict | list):
        return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in flat(child)]
    return [tree.tobytes() if isinstance(tree, np.ndarray) else tree]


def test_every_byte_of_a_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "saved_model" / "variables", tmp_path, dirs_exist_ok=True)
    expected = flat(hf.load(tmp_path / "variables"))
    found_out, right = 0, 0
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        for wrong in damaged(content):
            file.write_bytes(wrong)
            try:
                assert flat(hf.load(tmp_path / "variables")) == expected
                right += 1
            except hf.DamagedCheckpointError:
                found_out += 1
        file.write_bytes(content)
    assert flat(hf.load(tmp_path / "variables")) == expected
    assert (found_out, right) == (2 * (196 + 122), 0)


def test_every_byte_of_a_graph_of_objects(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "objects", tmp_path, dirs_exist_ok=True)
    place = hf.storage.as_location(tmp_path / "objects-1")

    def read() -> Any:
        tree = BundleTree.open(place)
        return tree.graph_document(), [array.tobytes() for array in tree.read_leaves(tree.leaves) if array is not None]

    expected = read()
    for file in sorted(tmp_path.glob("objects-1.*")):
        content = file.read_bytes()
        for wrong in list(damaged(content))[: len(content)]:
            file.write_bytes(wrong)
            with pytest.raises(hf.DamagedCheckpointError):
                read()
        file.write_bytes(content)
    assert expected == read()


@pytest.mark.parametrize("prefix", ["objects/objects-1", "shards/sharded-1", "names/model.ckpt-2"])
def test_some_bytes_of_others(prefix: str, tmp_path: Path) -> None:
    shutil.copytree((FIXTURES / prefix).parent, tmp_path, dirs_exist_ok=True)
    place = tmp_path / Path(prefix).name
    random = np.random.default_rng(0)
    expected = flat(hf.load(place))
    assert hf.verify(place).ok
    for file in sorted(tmp_path.glob(f"{place.name}.*")):
        content = file.read_bytes()
        for offset in random.integers(len(content), size=10).tolist():
            wrong = bytearray(content)
            wrong[offset] ^= 1 << int(random.integers(8))
            file.write_bytes(wrong)
            assert not hf.verify(place).ok
            with pytest.raises(hf.DamagedCheckpointError):
                assert flat(hf.load(place)) != expected
        file.write_bytes(content)


def test_a_restore_from_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "guide", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "ckpt-5.data-00000-of-00001"
    bias = hf.load(tmp_path)["net"]["l1"]["bias"]
    content = file.read_bytes()
    file.write_bytes(content.replace(bias.tobytes(), bias[::-1].tobytes()))
    live, kernel = np.zeros(5, np.float32), np.zeros((1, 5), np.float32)

    with pytest.raises(hf.DamagedCheckpointError, match=r"ckpt-5\.data-00000-of-00001"):
        graph.Checkpoint(net=graph.Node(l1=graph.Node(_kernel=kernel, bias=live))).restore(tmp_path, partial=True)

    assert not live.any()
    assert not kernel.any()
    assert open_graph(hf.storage.as_location(tmp_path)).load(["step"]) == [51]  # what is whole can be read
