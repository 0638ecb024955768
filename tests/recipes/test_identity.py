from __future__ import annotations

import pytest

from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import differences


def changes(*arguments: str) -> list[tuple[str, str, str, bool]]:
    stored = load_configuration("flax_digits").resolved()
    now = load_configuration("flax_digits", arguments)
    found = differences(stored, now.resolved(), now.config.IDENTITY)
    return [(item.key, item.before, item.now, item.identity) for item in found]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("seed=1", ("seed", "0", "1", True)),
        ("model.hidden=[64]", ("model.hidden", "[128, 128]", "[64]", True)),
        ("model.dropout=0", ("model.dropout", "0.1", "0.0", True)),
        ("data.batch_size=32", ("data.batch_size", "64", "32", True)),
        ("optimizer.learning_rate=1e-2", ("optimizer.learning_rate", "0.003", "0.01", True)),
        ("train.steps=9", ("train.steps", "2000", "9", False)),
        ("checkpoint.best_fn=", ("checkpoint.best_fn", "val_accuracy", "null", False)),
        ("checkpoint.save_at_end=false", ("checkpoint.save_at_end", "true", "false", False)),
        ("logging.level=debug", ("logging.level", "info", "debug", False)),
        ("name=other", ("name", "flax_digits", "other", False)),
    ],
)
def test_what_makes_a_run_what_it_is(argument: str, expected: tuple[str, str, str, bool]) -> None:
    assert changes(argument) == [expected]


def test_equal_configurations_do_not_differ() -> None:
    assert changes("optimizer.learning_rate=0.003", "model.hidden=[128, 128]") == []


def test_keys_that_only_one_side_has() -> None:
    found = differences({"model": {"old": 1}}, {"model": {"new": None}}, ["model"])

    assert [str(item) for item in found] == [
        "model.new: nothing (checkpoints), null (now)",
        "model.old: 1 (checkpoints), nothing (now)",
    ]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([], False),
        (["optimizer.learning_rate"], True),
        (["optimizer"], True),
        (["optimizer.weight_decay", "model"], False),
        (["optimizer.learning"], False),
    ],
)
def test_changes_are_allowed_by_key_or_section(allowed: list[str], expected: bool) -> None:
    (change,) = differences({"optimizer": {"learning_rate": 1}}, {"optimizer": {"learning_rate": 2}}, ["optimizer"])

    assert change.allowed(allowed) is expected


def test_operational_changes_are_always_allowed() -> None:
    (change,) = differences({"train": {"steps": 1}}, {"train": {"steps": 2}}, ["optimizer"])

    assert change.allowed([])
