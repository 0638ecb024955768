"""Programs as their authors write them, which a resume has to bring back or refuse by name."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import holdfast as hf


def tables_of_hooks() -> dict[str, list[Any]]:
    """The tables of hooks that torch keeps for all modules and optimizers of the process."""
    owners = map(importlib.import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    tables = {name: table for owner in owners for name, table in vars(owner).items() if name.startswith("_global_")}
    return {name: [*table.values()] for name, table in tables.items() if isinstance(table, dict)}


@pytest.mark.usefixtures("default_sigterm")
def test_hooks_of_all_optimizers_are_those_of_the_program(tmp_path: Path) -> None:
    """Torch goes through these tables in every step: one of ours that a finalizer removed would end the program."""
    before = tables_of_hooks()
    callbacks: list[Any] = []

    def forget(*_: Any) -> None:
        callbacks.clear()
        gc.collect()

    hook = register_optimizer_step_post_hook(forget)
    try:
        for number in range(2):
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters())
            callbacks.append(hf.CheckpointCallback(tmp_path / str(number), save_interval_steps=1))
            with callbacks[0] as checkpoint:
                state, _ = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
                for step in (1, 2, 3):
                    model(torch.ones(2)).sum().backward()
                    optimizer.step()
                    checkpoint.on_step(step, state)
                    assert {name: table for name, table in tables_of_hooks().items() if table} == {
                        "_global_optimizer_post_hooks": [forget]
                    }
    finally:
        hook.remove()
    assert tables_of_hooks() == before


@pytest.mark.parametrize(
    ("version", "operations", "refused"),
    [
        ((0, 2, 15), "window, batch", True),
        ((0, 2, 15), "batch", False),
        ((0, 2, 16), "window, batch", False),
        (None, "window", True),
    ],
    ids=["before it was mended", "without a window", "since it was mended", "before versions had a number"],
)
def test_a_grain_that_loses_the_order_of_a_window_is_refused(
    version: Any, operations: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(grain.sources.RangeDataSource(0, 40, 1)).to_iter_dataset()
    if "window" in operations:
        data = grain.experimental.WindowShuffleIterDataset(data, window_size=5, seed=3)
    if "batch" in operations:
        data = data.batch(2)
    batches = iter(data)
    monkeypatch.delattr(grain, "__version_info__")
    if version:
        monkeypatch.setattr(grain, "__version_info__", version, raising=False)
        monkeypatch.setattr(grain, "__version__", ".".join(map(str, version)))
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        if refused:
            message = r"data= shuffles a window of Grain .*: install grain 0\.2\.16 or newer, or shuffle the whole"
            with pytest.raises(hf.errors.OptionError, match=message):
                checkpoint.restore_or_initialize({"w": 0}, data=batches)
        else:
            checkpoint.restore_or_initialize({"w": 0}, data=batches)
