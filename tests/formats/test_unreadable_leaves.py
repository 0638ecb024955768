"""One leaf that cannot be read does not take the others with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.formats.orbax_files import DIRECTORIES, edit, ocp, save

import holdfast as hf


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


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
