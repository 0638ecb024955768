"""The page on Lightning: models from checkpoints. ``tests/integrations/lightning`` runs its other program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.documents.examples import Examples

from holdfast.integrations.lightning import CheckpointCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Model(BoringModel):
    """Logs its loss, and counts its tests."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tested = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        found: Any = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"])
        return found

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.tested += 1


@pytest.mark.examples("docs/lightning.md", "python 4")
def test_models_from_checkpoints(examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = CheckpointCallback("runs/x/checkpoints", save_interval_steps=4, best_fn="loss", best_mode="min")
    trained = Model(width=1)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    lightning.Trainer(max_steps=12, callbacks=[callback], **options).fit(trained)
    names: dict[str, Any] = {"L": lightning, "Model": Model}
    exec(compile(examples["python 4"].replace("1200", "12"), "page.py", "exec"), names)
    assert isinstance(names["model"], Model)
    assert names["model"].tested == len(trained.test_dataloader())
    assert names["weights"].keys() == trained.state_dict().keys()
    assert torch.equal(torch.as_tensor(names["weights"]["layer.weight"]), trained.layer.weight)


@pytest.mark.examples("docs/lightning.md", "python 1")
def test_a_listener_names_checkpoints_by_their_metric(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = examples.run({"L": lightning, "Model": Model, "CheckpointCallback": CheckpointCallback})
    folder, steps = names["folder"], names["checkpoint"].manager.all_steps()
    links = [link.resolve() for link in folder.glob("step=*-loss=*.*")]
    assert sorted(links) == sorted(folder / str(step) for step in steps)
    assert len(steps) == 2
