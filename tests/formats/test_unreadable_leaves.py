"""Leaves that cannot be read or have no data: the others load, and are converted."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.formats.orbax_files import DIRECTORIES, edit, ocp, save

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.pytree import decode_value


@dataclass
class Money:
    cents: int


class MoneyHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes a file of its own for each value, as a program's handler of Orbax may."""

    def typestr(self) -> str:
        return "Money"

    async def metadata(self, infos: Any) -> Any:
        return [ocp.metadata.Metadata(name=info.name, directory=info.parent_dir) for info in infos]

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        for value, info in zip(values, infos, strict=True):
            (info.parent_dir / f"{info.name}.json").write_text(json.dumps(value.cents))
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        return [Money(json.loads((info.parent_dir / f"{info.name}.json").read_text())) for info in infos]


STATE = {"params": {"w": jnp.arange(3.0), "b": jnp.ones(2)}, "step": 5, "note": "text"}


def with_an_object_of_the_program(place: Path) -> None:
    registry = ocp.type_handlers.create_type_handler_registry(
        (jnp.ndarray, ocp.type_handlers.ArrayHandler()),
        (int, ocp.type_handlers.ScalarHandler()),
        (str, ocp.type_handlers.StringHandler()),
        (Money, MoneyHandler()),
    )
    save(place, {**STATE, "odd": Money(250)}, type_handler_registry=registry)


def with_a_folder_gone(place: Path) -> None:
    save(place, {**STATE, "odd": jnp.zeros(4)}, **DIRECTORIES)
    shutil.rmtree(place / "odd")


def with_a_text_gone(place: Path) -> None:
    save(place, {**STATE, "odd": "text"})
    edit(place, lambda texts: texts.pop("odd"), "_strings.json")


def with_an_object_of_torch(place: Path) -> None:
    torch.save({**STATE, "odd": print, "params": {"w": torch.arange(3.0), "b": torch.ones(2)}}, place)


CASES = {
    with_an_object_of_the_program: (
        "a 'Money' of the program",
        "odd: a 'Money' of the program, which only its handler",
    ),
    with_a_folder_gone: ("damaged", "odd: "),
    with_a_text_gone: ("damaged", r"odd: _strings\.json has no text for leaf odd"),
    with_an_object_of_torch: ("the class or function builtins.print", r"odd: the class or function builtins\.print"),
}


@pytest.mark.parametrize("write", CASES, ids=lambda one: str(one.__name__))
def test_the_other_leaves_load_and_are_imported(tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture) -> None:
    why, what = CASES[write]
    kind = hf.DamagedCheckpointError if why == "damaged" else hf.errors.UnsupportedLeafError
    place = tmp_path / "theirs"
    write(place)
    rest = ["params/**", "step", "note"]
    like: Any = {"params": {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}, "step": 0, "note": ""}
    for select in (None, "**/odd", "odd"):
        for template in (None, {**like, "odd": np.zeros(4, np.float32)}):
            with pytest.raises(kind, match=what) as raised:
                hf.load(place, like=template, select=select)
            assert "load the others with select=" in str(raised.value)
    for found in (hf.load(place, select=rest), hf.load(place, like=like, select=rest)):
        assert (found["step"], found["note"]) == (5, "text")
        assert (found["params"]["w"].tolist(), found["params"]["b"].tolist()) == ([0, 1, 2], [1, 1])
    (shown,) = [one for one in hf.describe(place) if one.path == "odd"]
    assert shown.value == repr(f"({why}, which is not read)")
    problems = [problem.leaf for problem in hf.verify(place).checkpoints[0].problems]
    assert problems == (["odd"] if kind is hf.DamagedCheckpointError else [])

    (done,) = hf.import_checkpoint(place, tmp_path / "ours")
    assert (done.leaves, [line.partition(" ")[0] for line in done.left_out]) == (4, ["odd"])
    assert "left out: odd (" in caplog.text
    again: Any = hf.load(tmp_path / "ours", like=like)
    assert again["params"]["w"].tolist() == [0, 1, 2]
    with pytest.raises(hf.TreeMismatchError, match=r"odd: expected .* not in the checkpoint"):
        hf.load(tmp_path / "ours", like={**like, "odd": np.zeros(4, np.float32)})

    for to in ("safetensors", "torch", "dcp", "orbax"):
        with pytest.raises(kind, match=what):
            hf.export_checkpoint(place, tmp_path / to, to)
        assert not (tmp_path / to).exists()
        (done,) = hf.export_checkpoint(place, tmp_path / to, to, select=rest)
        assert done.leaves == 4


# ---- trees of Orbax without arrays, and placeholders


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
    assert safetensors.numpy.load_file(tmp_path / "one.safetensors").keys() == {"w"}


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
