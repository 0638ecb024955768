"""One tree from several checkpoints, of any library, chosen by the paths of the leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf

ENCODER = {"w": np.arange(4.0), "layers": [1, 2]}
HEAD = {"w": np.ones(3, np.float32)}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    hf.save(tmp_path / "old", {"encoder": ENCODER, "head": {"w": np.zeros(3)}, "step": 7})
    hf.save(tmp_path / "new", {"encoder": {"w": np.zeros(4), "scale": 2.0}, "head": HEAD, "step": 9})
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"encoder.w": np.full(4, 5.0), "head.w": HEAD["w"]}, tmp_path / "model.safetensors")
    return {name: tmp_path / name for name in ("old", "new", "model.safetensors")}


# The patterns and their checkpoints, the template with further arguments, and the tree.
MERGES: dict[str, tuple[dict[str, str], dict[str, Any], Any]] = {
    "as saved": (
        {"encoder/**": "old", "**": "new"},
        {},
        {"encoder": ENCODER, "head": HEAD, "step": 9},
    ),
    "within a container": (
        {"encoder/w": "old", "encoder/scale": "new", "step": "old"},
        {},
        {"encoder": {"w": ENCODER["w"], "scale": 2.0}, "step": 7},
    ),
    "by a template": (
        {"encoder/**": "model.safetensors", "**": "new"},
        {"like": {"encoder": {"w": np.zeros(4)}, "head": {"w": np.zeros(3, np.float32)}, "step": 0}},
        {"encoder": {"w": np.full(4, 5.0)}, "head": HEAD, "step": 9},
    ),
    "by a template for a part, and with a cast": (
        {"head/**": "new", "**": "old"},
        {"like": {"encoder": {"w": np.zeros(4, np.float16)}, "head": HEAD}, "subset": True, "cast": True},
        {"encoder": {"w": np.arange(4, dtype=np.float16)}, "head": HEAD},
    ),
    "a selection": (
        {"encoder/**": "old", "**": "new"},
        {"select": {"encoder/w": np.s_[1:3], "step": ...}},
        {"encoder": {"w": np.array([1.0, 2.0])}, "step": 9},
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_leaves_come_from_the_checkpoint_of_the_first_pattern(case: str, places: dict[str, Path]) -> None:
    patterns, arguments, expected = MERGES[case]
    found = hf.load({pattern: places[name] for pattern, name in patterns.items()}, **arguments)
    assert_same(found, expected)


def test_what_cannot_be_merged_is_named(places: dict[str, Path], tmp_path: Path) -> None:
    hf.save(tmp_path / "flat", {"encoder": 3})
    with pytest.raises(hf.errors.OptionError, match="encoder: two checkpoints have it"):
        hf.load({"encoder": tmp_path / "flat", "**": places["new"]})
    with pytest.raises(hf.TreeMismatchError, match=r"decoder.* matches no leaf"):
        hf.load({"decoder/*": places["old"], "**": places["new"]})
    with pytest.raises(hf.errors.OptionError, match="empty"):
        hf.load({})
    with pytest.raises(hf.CheckpointNotFoundError, match="gone"):
        hf.load({"encoder/**": places["old"], "**": tmp_path / "gone"})
