"""checkpoint.compression of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from holdfast.engine.arrays import ArrayDatabase, TreeReader
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import run

SHORT = [
    *("model.hidden=[8]", "data.batch_size=300", "train.eval_interval_steps=2"),
    *("optimizer.warmup_steps=1", "optimizer.decay_steps=6", "checkpoint.best_fn=null", "run_dir=run"),
]


def levels(path: Path) -> set[int | None]:
    database, names = (
        ArrayDatabase(hf.storage.as_location(path)),
        [leaf.name for leaf in TreeReader(hf.storage.as_location(path)).leaves],
    )
    return {found.compression for found in database.metadata(names) if found is not None}


@pytest.mark.parametrize(
    ("recipe", "level"),
    [
        ("flax_digits", None),
        ("flax_digits", 3),
        ("lightning_digits", 3),
        pytest.param("lightning_digits", None, marks=pytest.mark.sweep),
    ],
)
def test_arrays_are_compressed_when_asked(
    recipe: str, level: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [] if level is None else [f"checkpoint.compression={level}"]
    run(load_configuration(recipe, ["train.steps=2", *SHORT, *asked]))
    assert levels(tmp_path / "run" / "checkpoints" / "2" / "state") == {level}
    assert hf.verify(tmp_path / "run" / "checkpoints").ok
    run(load_configuration(recipe, ["train.steps=3", *SHORT]))  # continues from there
    assert hf.load(tmp_path / "run" / "checkpoints", item="state")


def test_levels_that_zstd_does_not_have() -> None:
    from holdfast.integrations.options import CallbackOptions

    with pytest.raises(hf.errors.OptionError, match="23"):
        CallbackOptions(compression=23)
