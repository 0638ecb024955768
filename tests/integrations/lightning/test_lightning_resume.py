"""A run that is interrupted anywhere and resumed ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    # Lightning's own, on any data loader without worker processes
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Lightning 2.6 with torch 2.13
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "validation within epochs": {"val_check_interval": 3},
    "max_steps": {"max_steps": 12, "max_epochs": -1},
    "accumulation": {"accumulate_grad_batches": 3},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
}


def interrupt(program: Any, directory: str, step: int, **options: Any) -> list[Any]:
    """Runs until a step, which is the only one that is saved, and returns what happened."""
    recorder = program.Recorder(stop_after=step)
    with pytest.raises(program.Interruption):
        program.run(directory, recorder=recorder, checkpoint={"save_interval_steps": step}, **options)
    return list(recorder.events)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loader", ["plain", "shuffled", "stateful"])
def test_interrupted_at_every_step(program: Any, new_directory: Callable[[], str], loader: str, variant: str) -> None:
    options = {"loader": loader, **VARIANTS[variant]}
    whole = program.run(new_directory(), checkpoint={"save_interval_steps": 100}, **options)
    for step in range(1, whole.trainer.global_step):
        directory = new_directory()
        events = interrupt(program, directory, step, **options)
        resumed = program.run(directory, seed=step + 10, checkpoint={"save_interval_steps": 100}, **options)
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final, f"interrupted after step {step}"
        assert events + resumed.recorder.events == whole.recorder.events, f"interrupted after step {step}"
