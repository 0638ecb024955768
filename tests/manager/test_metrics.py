from __future__ import annotations

import fractions
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.ids import plain_id

from holdfast.engine.errors import OptionError
from holdfast.engine.manager import metric_name, metric_value, plain_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping


def accuracy_of(metrics: Mapping[str, Any]) -> Any:
    return metrics["accuracy"]


class FailedArray:
    """An array whose computation failed, as seen when its value is fetched."""

    shape = ()

    def item(self) -> float:
        raise RuntimeError("out of device memory")


class Score:
    def __call__(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["loss"])


class SeveralNumbers:
    """A tensor of two elements, of which torch makes no number."""

    shape = (2,)

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


REFUSED = "refused"


@pytest.mark.parametrize(
    ("value", "ranked", "stored"),
    [
        (3, 3.0, 3),
        (True, 1.0, 1),
        (-0.0, 0.0, -0.0),
        (math.inf, math.inf, math.inf),
        (math.nan, None, math.nan),
        (np.float32(0.25), 0.25, 0.25),
        (np.int64(7), 7.0, 7),
        (np.array([[0.25]]), 0.25, 0.25),
        (np.array(1.5, ml_dtypes.bfloat16), 1.5, 1.5),
        (np.array(math.nan), None, math.nan),
        (np.array([1.0, 2.0]), None, [1.0, 2.0]),
        (np.array([]), None, []),
        (np.array("0.5"), None, REFUSED),
        (np.array(1j), None, REFUSED),
        (fractions.Fraction(1, 4), 0.25, 0.25),
        (10**400, None, 10**400),
        ("0.5", None, REFUSED),
        (None, None, REFUSED),
        (["0.5"], None, REFUSED),
        ({}, None, {}),
        (SeveralNumbers(), None, REFUSED),
    ],
    ids=plain_id,
)
def test_real_numbers_rank_a_step_and_only_numbers_are_stored(value: Any, ranked: float | None, stored: Any) -> None:
    assert metric_value({"accuracy": value}, "accuracy") == ranked
    assert metric_value({"accuracy": value}, accuracy_of) == ranked
    if stored is REFUSED:
        with pytest.raises(OptionError, match=r"metric 'val/loss(/0)?' is not a number"):
            plain_metrics({"val": {"loss": value}})
    else:
        assert repr(plain_metrics({"val": {"loss": value}})["val"]["loss"]) == repr(stored)


@pytest.mark.parametrize(
    ("metrics", "name", "expected"),
    [
        (None, "loss", None),
        ({"loss": 1.0}, "lost", None),
        ({"val": {"loss": 1.0}}, "val/loss", 1.0),
        ({"val/loss": 2.0, "val": {"loss": 1.0}}, "val/loss", 2.0),
        ({"val": {"top/5": 1.0}}, "val/top/5", 1.0),
        ({"val/top": {"5": 1.0}, "val": {"loss": 0.0}}, "val/top/5", 1.0),
        ({"a/b": {"x": 1.0}, "a": {"b": {"c": 3.0}}}, "a/b/c", 3.0),
        ({"val": 1.0}, "val/loss", None),
        ({"val": {"loss": 1.0}}, "val", None),
        ({"val": {"": 1.0}}, "val/", 1.0),
    ],
)
def test_names_reach_into_nested_metrics(metrics: dict[str, Any] | None, name: str, expected: float | None) -> None:
    assert metric_value(metrics, name) == expected


def test_a_function_finds_no_metric_by_key_error_only() -> None:
    def broken(metrics: Mapping[str, Any]) -> float:
        raise ZeroDivisionError

    assert metric_value({"loss": 1.0}, accuracy_of) is None
    assert metric_value({"loss": 2.0}, Score()) == 2.0
    assert metric_value(None, broken) is None
    with pytest.raises(ZeroDivisionError):
        metric_value({"loss": 1.0}, broken)
    with pytest.raises(RuntimeError, match="out of device memory"):
        metric_value({"loss": FailedArray()}, "loss")


def test_metrics_have_names_for_people() -> None:
    metrics: list[Any] = ["val/loss", accuracy_of, lambda metrics: 1.0, FailedArray, Score()]
    assert [*map(metric_name, metrics)] == ["val/loss", "accuracy_of", "metric", "FailedArray", "metric"]
