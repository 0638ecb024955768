from __future__ import annotations

import pytest

from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import blocks_resume, differences


@pytest.mark.parametrize(
    ("arguments", "expected", "blocks"),
    [
        ("seed=1", {"seed": "0 (checkpoints), 1 (now)"}, True),
        ("model.hidden=[64]", {"model.hidden": "[128, 128] (checkpoints), [64] (now)"}, True),
        ("model.dropout=0", {"model.dropout": "0.1 (checkpoints), 0.0 (now)"}, True),
        ("data.batch_size=32", {"data.batch_size": "64 (checkpoints), 32 (now)"}, True),
        ("optimizer.learning_rate=1e-2", {"optimizer.learning_rate": "0.003 (checkpoints), 0.01 (now)"}, True),
        ("train.steps=9", {"train.steps": "2000 (checkpoints), 9 (now)"}, False),
        ("checkpoint.best_fn=", {"checkpoint.best_fn": "val_accuracy (checkpoints), null (now)"}, False),
        ("checkpoint.save_at_end=false", {"checkpoint.save_at_end": "true (checkpoints), false (now)"}, False),
        ("logging.level=debug", {"logging.level": "info (checkpoints), debug (now)"}, False),
        ("name=other", {"name": "flax_digits (checkpoints), other (now)"}, False),
        ("optimizer.learning_rate=0.003", {}, False),
        ("model.hidden=[128,128]", {}, False),
    ],
)
def test_what_makes_a_run_what_it_is(arguments: str, expected: dict[str, str], blocks: bool) -> None:
    stored = load_configuration("flax_digits").resolved()
    now = load_configuration("flax_digits", [arguments])
    found = differences(stored, now.resolved())
    assert found == expected
    assert any(blocks_resume(key, now.config.IDENTITY, []) for key in found) == blocks


def test_keys_that_only_one_side_has() -> None:
    assert differences({"model": {"old": 1}}, {"model": {"new": None}}) == {
        "model.new": "nothing (checkpoints), null (now)",
        "model.old": "1 (checkpoints), nothing (now)",
    }


@pytest.mark.parametrize(
    ("allowed", "blocks"),
    [
        ([], True),
        (["optimizer.learning_rate"], False),
        (["optimizer"], False),
        (["optimizer.weight_decay", "model"], True),
        (["optimizer.learning"], True),
    ],
)
def test_changes_are_allowed_by_key_or_section(allowed: list[str], blocks: bool) -> None:
    assert blocks_resume("optimizer.learning_rate", ["optimizer"], allowed) is blocks
    assert not blocks_resume("train.steps", ["optimizer"], allowed)
