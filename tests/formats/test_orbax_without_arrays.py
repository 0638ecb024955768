"""Trees of Orbax in which some leaves have no data: there are no arrays at all, or some leaves are placeholders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.orbax_files import ocp, save

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.pytree import decode_value

safetensors: Any = pytest.importorskip("safetensors.numpy")

TREES: dict[str, Any] = {
    "texts": {"a": "x", "b": ["y", ""]},
    "empty": {"e": {}, "f": []},
    "none": {"e": None},
}


def restored(path: Path) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path)


@pytest.fixture(params=[True, False], ids=["ocdbt", "files"])
def with_placeholder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tree = {"a": ocp.PLACEHOLDER, "w": np.arange(3.0), "list": [ocp.PLACEHOLDER, "text"], "none": None}
    return save(tmp_path / "saved", tree, use_ocdbt=request.param)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_without_arrays(tmp_path: Path, tree: Any) -> None:
    hf.save(tmp_path / "ours", tree)
    saved = save(tmp_path / "saved", tree)
    hf.export_checkpoint(tmp_path / "ours", tmp_path / "exported", "orbax")
    assert not (saved / "manifest.ocdbt").exists()
    for path in (saved, tmp_path / "exported"):
        assert hf.load(path) == restored(path) == hf.load(path, like=tree) == tree
        assert hf.verify(path).ok


def test_one_item_with_arrays_and_one_without(tmp_path: Path) -> None:
    state, names = {"w": np.arange(4.0)}, {"first": "x", "others": ["y"]}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), names=ocp.args.PyTreeSave(names)))

    (done,) = hf.import_checkpoint(tmp_path / "run", tmp_path / "imported")

    for run in (tmp_path / "run", tmp_path / "imported"):
        found = hf.load(run)
        assert found["names"] == names
        assert np.array_equal(found["state"]["w"], state["w"])
        assert hf.verify(run).ok
    assert done.leaves == 3


def test_placeholders_are_what_orbax_restores(with_placeholder: Path, tmp_path: Path) -> None:
    hf.export_checkpoint(with_placeholder, tmp_path / "exported", "orbax")
    for found in (hf.load(with_placeholder), restored(with_placeholder), restored(tmp_path / "exported")):
        assert found["a"] is ...
        assert found["list"] == [..., "text"]
        assert np.array_equal(found["w"], np.arange(3.0))
    assert hf.verify(with_placeholder).ok
    assert [leaf.kind for leaf in hf.describe(with_placeholder) if leaf.path == "a"] == ["placeholder"]
    like = {"a": ..., "w": np.zeros(3), "list": [..., ""], "none": None}
    assert hf.load(with_placeholder, like=like)["a"] is ...
    with pytest.raises(hf.TreeMismatchError, match=r"a: expected float64\[3\] .*found a placeholder, saved without"):
        hf.load(with_placeholder, like={**like, "a": np.zeros(3)})


def test_conversions_leave_placeholders_out_and_say_so(with_placeholder: Path, tmp_path: Path) -> None:
    (done,) = hf.import_checkpoint(with_placeholder, tmp_path / "imported")
    assert done.left_out == tuple(f"{path} (saved as a placeholder: it has no data)" for path in ("a", "list/0"))
    found = hf.load(tmp_path / "imported")
    assert (found.keys(), found["list"]) == ({"w", "list", "none"}, {1: "text"})
    assert np.array_equal(found["w"], np.arange(3.0))

    save(tmp_path / "arrays", {"a": ocp.PLACEHOLDER, "w": np.arange(3.0)})
    (done,) = hf.export_checkpoint(tmp_path / "arrays", tmp_path / "one.safetensors", "safetensors")
    assert done.left_out == ("a (saved as a placeholder: it has no data)",)
    assert safetensors.load_file(tmp_path / "one.safetensors").keys() == {"w"}


def test_our_own_format_has_no_placeholders_with_values() -> None:
    with pytest.raises(hf.DamagedCheckpointError):
        decode_value({"kind": "placeholder", "value": 1}, "a")


def test_an_import_and_an_export_count_the_same_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "saved", {"w": np.arange(3.0), "none": None, "empty": {}, "text": "x", "left": ocp.PLACEHOLDER})
    counts = []
    for arguments in (
        ["import", "saved", "imported"],
        ["export", "saved", "copied", "--to", "orbax"],
        ["export", "imported", "exported", "--to", "orbax"],
        ["export", "saved", "saved.pt", "--to", "torch"],
        ["export", "imported", "imported.pt", "--to", "torch"],
    ):
        places = [str(tmp_path / one) for one in arguments[1:3]]
        assert main([arguments[0], *places, *arguments[3:], "--json"]) == 0
        (done,) = json.loads(capsys.readouterr().out)["checkpoints"]
        counts.append(done["leaves"])
    assert counts == [2] * 5
