"""Every example of the page about TensorFlow's checkpoints runs as it is printed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.documents.examples import Examples

from holdfast import graph


@pytest.mark.examples("docs/tensorflow_checkpoints.md")
def test_the_page_runs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(Path(__file__).parent / "tensorflow" / "guide", tmp_path / "tf_ckpts")
    monkeypatch.chdir(tmp_path)
    names = examples.run({"__name__": "page"})
    adam, kept = names["state"][0], names["kept"]  # of optax
    assert (int(adam.count), adam.mu["kernel"].shape, adam.nu["bias"].shape) == (40, (1, 5), (5,))
    assert np.array_equal(adam.mu["bias"], kept["mu"][1])
    assert np.array_equal(adam.nu["kernel"], kept["nu"][0])
    printed = capsys.readouterr().out
    assert printed.startswith("[4.2")
    assert "] 51\n" in printed


@pytest.mark.parametrize(
    ("checkpoint", "power", "variable", "first", "second"),
    [
        (
            "slots/model",
            "optimizer/beta1_power",
            "net/l1/kernel",
            "{}/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE",
            "{}/.OPTIMIZER_SLOT/optimizer/v/.ATTRIBUTES/VARIABLE_VALUE",
        ),
        ("names/model.ckpt-2", "beta1_power", "dense/kernel", "{}/Adam", "{}/Adam_1"),
    ],
    ids=["slots", "names of TensorFlow 1"],
)
def test_the_names_of_older_optimizers(checkpoint: str, power: str, variable: str, first: str, second: str) -> None:
    reader = graph.load_checkpoint(Path(__file__).parent / "tensorflow" / checkpoint)

    updates = math.log(float(reader.get_tensor(power))) / math.log(0.9) - 1
    m, v = (reader.get_tensor(name.format(variable)) for name in (first, second))

    assert updates == pytest.approx(2, abs=1e-4)
    assert m.shape == v.shape == reader.get_tensor(variable).shape
    assert (m < 0).any()  # gradients are of both signs, their squares are not
    assert (v >= 0).all()
    assert v.any()
