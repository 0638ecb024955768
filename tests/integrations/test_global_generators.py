"""The global generators of Python, numpy and torch, which the callback saves and restores by itself."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes.harness import Process, run_processes

import holdfast as hf
from holdfast.components import Checkpointable
from holdfast.engine.sources import compare_checkpoints, open_checkpoint
from holdfast.engine.storage import as_location

pytestmark = pytest.mark.usefixtures("default_sigterm")


@pytest.fixture(autouse=True)
def _generators_as_before() -> Any:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn() -> list[Any]:
    """Draws from every generator, also one number of the pairs that two of them draw."""
    return [random.gauss(0, 1), float(np.random.randn()), torch.randn(1).item(), torch.randperm(9).tolist()]


class Constructed(Checkpointable):
    """A component whose construction draws."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(0).normal(size=2)
        self.noise = random.random() + torch.rand(1).item()


@pytest.mark.parametrize("numpy", ["MT19937", "PCG64"])
@pytest.mark.parametrize(
    ("make", "extras"),
    [
        (lambda: {"w": np.ones(2)}, {}),
        (lambda: {"w": np.ones(2)}, {"rng": torch.default_generator}),  # as programs without the option have it
        (lambda: torch.nn.Linear(1, 1), {}),
        (Constructed, {}),
    ],
    ids=["a tree", "beside torch's own as an extra", "a module", "a component"],
)
def test_they_go_on_where_they_were_at_the_step(make: Any, extras: Any, numpy: str, tmp_path: Path) -> None:
    global_numpy: Any = np.random
    before = global_numpy.get_bit_generator()
    global_numpy.set_bit_generator(getattr(np.random, numpy)(5))
    try:
        random.seed(2)
        torch.manual_seed(2)
        drawn()
        with hf.CheckpointCallback(tmp_path) as checkpoint:
            state, _ = checkpoint.restore_or_initialize(make(), **extras)
            drawn()
            checkpoint.on_step(1, state, **extras)
            expected = drawn()  # after the step that is saved at the end
        global_numpy.set_bit_generator(getattr(np.random, numpy)(6))
        random.seed(3)
        torch.manual_seed(3)
        with hf.CheckpointCallback(tmp_path) as checkpoint:
            checkpoint.restore_or_initialize(make(), **extras)
            assert checkpoint.extras == extras
            assert drawn() == expected
        saved = hf.load(tmp_path, item="extras")["global_generators"]["drawn"]
        assert {"python", "numpy"} <= set(saved) <= {"python", "numpy", "torch"}
    finally:
        global_numpy.set_bit_generator(before)


def test_what_no_step_draws_from_is_restored_but_not_compared(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "other")):
        seed(number)
        with hf.CheckpointCallback(tmp_path / name, save_interval_steps=1) as checkpoint:
            checkpoint.restore_or_initialize({"w": 1})
            checkpoint.on_step(1, {"w": 1})
            random.random()
            checkpoint.on_step(2, {"w": 1})
    one, other = (as_location(tmp_path / name) for name in ("one", "other"))
    assert list(compare_checkpoints(open_checkpoint(one, 1), open_checkpoint(other, 1))) == []
    (found,) = compare_checkpoints(open_checkpoint(one, 2), open_checkpoint(other, 2))
    assert found.path == "global_generators/drawn/python"
    with hf.CheckpointCallback(tmp_path / "one") as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
        checkpoint.on_step(3, {"w": 1})
    assert list(hf.load(tmp_path / "one", item="extras")["global_generators"]["drawn"]) == ["python"]


@pytest.mark.parametrize("extras", [{}, {"rng": torch.default_generator}], ids=["none", "as an extra"])
def test_checkpoints_without_them_resume_with_a_warning(
    extras: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed(1)
    with hf.CheckpointCallback(tmp_path, global_generators=False) as checkpoint:
        checkpoint.restore_or_initialize({"w": 1}, **extras)
        checkpoint.on_step(1, {"w": 1}, **extras)
    assert "global_generators" not in hf.load(tmp_path, item="extras")
    expected = drawn()[2:] if extras else None
    for generators in (False, True):
        caplog.clear()
        seed(2)
        fresh = drawn()
        seed(2)
        with hf.CheckpointCallback(tmp_path, global_generators=generators) as checkpoint:
            checkpoint.restore_or_initialize({"w": 1}, **extras)
            found = drawn()
        assert found[:2] == fresh[:2]
        assert found[2:] == (expected or fresh[2:])
        warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert ["without the global random generators" in text for text in warned] == [True] * generators


def test_devices_that_are_gone_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"drawn": {"cuda": [np.zeros(16, np.uint8)]}, "idle": {"mps": np.zeros(16, np.uint8)}}
    with hf.CheckpointCallback(tmp_path, global_generators=False) as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
        checkpoint.manager.save(1, {"state": {"w": 1}, "extras": {"global_generators": saved}}, force=True)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
    assert "the random generators of cuda:0 are not restored" in caplog.text
    assert "mps" not in caplog.text


@pytest.mark.parametrize("saved", [7, {"drawn": {}}, {"drawn": {"python": [1]}, "idle": {}}])
def test_what_is_no_state_of_generators_is_damage(saved: Any, tmp_path: Path) -> None:
    with hf.CheckpointCallback(tmp_path, global_generators=False) as checkpoint:
        checkpoint.restore_or_initialize({"w": 1})
        checkpoint.manager.save(1, {"state": {"w": 1}, "extras": {"global_generators": saved}}, force=True)
    with hf.CheckpointCallback(tmp_path) as checkpoint, pytest.raises(hf.DamagedCheckpointError, match="generators"):
        checkpoint.restore_or_initialize({"w": 1})


def draw(process: Process, directory: str, first: int) -> list[Any]:
    seed(first + process.index)
    with hf.CheckpointCallback(directory) as checkpoint:
        checkpoint.restore_or_initialize({"w": np.ones(2)})
        before = drawn()
        checkpoint.on_step(checkpoint.manager.latest_step() or 1, {"w": np.ones(2)})
    return [before, drawn()]


def test_each_of_several_processes_has_its_own(tmp_path: Path) -> None:
    first = run_processes(draw, 2, str(tmp_path), 10, backend="torch")
    again = run_processes(draw, 2, str(tmp_path), 20, backend="torch")
    assert [before for before, _ in again] == [after for _, after in first]
    assert first[0] != first[1]
