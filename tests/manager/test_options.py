"""What a manager can be told, and what makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.manager import retention_rules
from holdfast.engine.manager.options import options_document, options_from_document, save_triggers


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"save_interval_steps": 0}, "save_interval_steps=0 must be a whole number of at least 1, or None"),
        ({"save_interval_steps": 1.5}, "save_interval_steps=1.5"),
        ({"max_to_keep": -1}, "max_to_keep=-1 must be a whole number of at least 1"),
        ({"max_to_keep": True}, "max_to_keep=True"),
        ({"keep_latest": "3"}, "keep_latest='3'"),
        ({"keep_period": 0}, "keep_period=0"),
        ({"save_interval_secs": 0}, "save_interval_secs=0 is not a duration: give seconds above zero"),
        ({"save_interval_secs": True}, "save_interval_secs=True"),
        ({"keep_time_interval": -1}, "keep_time_interval"),
        ({"keep_time_interval": float("nan")}, "keep_time_interval=nan"),
        ({"keep_time_interval": float("inf")}, "keep_time_interval=inf"),
        ({"max_to_keep": 1, "keep_time_interval": "1 fortnight"}, "keep_time_interval"),
        ({"keep_steps": 4}, "keep_steps=4 must be a collection of steps"),
        ({"keep_steps": "12"}, "keep_steps='12'"),
        ({"save": hf.Every(steps=1), "save_interval_secs": 3}, "save_interval_secs=3 and policies of save= say"),
        ({"save_timeout_secs": 0}, "save_timeout_secs"),
        ({"save_on_best": True}, "save_on_best=True needs best_fn"),
        ({"best_mode": "most"}, "best_mode='most' must be 'max' or 'min'"),
        ({"step_prefix": ""}, "step_prefix"),
        ({"step_prefix": "a/b"}, "step_prefix"),
        ({"best_fn": "loss"}, "best_fn='loss' needs best_mode: best_mode='min' if the smallest value is best"),
        ({"best_fn": 3}, "best_fn=3 must be the name of a metric or a function"),
        ({"max_to_keep": 1, "best_fn": ""}, "best_fn='' must be the name of a metric or a function"),
        ({"save": 100}, "save=100 must be a hf.SavePolicy, such as"),
        ({"save": [hf.Every]}, "save=.* must be a hf.SavePolicy"),
        ({"keep": [hf.Every(steps=1), "all"]}, "keep='all' must be a hf.KeepPolicy"),
        ({"reuse_unchanged": 1}, "reuse_unchanged=1 must be True or False"),
        ({"load_and_broadcast": "yes"}, "load_and_broadcast='yes' must be True, False or None"),
        ({"keep": hf.Every(steps=1), "max_to_keep": 3}, "max_to_keep=3 and policies of keep= say the same"),
        ({"save": hf.Every(steps=1, keep=1), "keep_period": 3}, "keep_period=3 and policies of keep= say the same"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], what: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=what):
        hf.CheckpointManagerOptions(**given)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: hf.Local("s3://bucket/run", every=2), "this is not a path of a host"),
        (lambda: hf.Local("/dev/shm/x", every=0), "every=0 must be a whole number of at least 1"),
        (lambda: hf.Local("/dev/shm/x", every=2, copies=-1), "copies=-1 must be a whole number of at least 0"),
        (lambda: hf.CheckpointManagerOptions(local="/dev/shm/x"), "must be a Local, such as Local"),  # type: ignore[arg-type]
        (lambda: hf.Local("/dev/shm/x", every=2, copies=None), "copies=None must be a whole number of at least 0$"),  # type: ignore[arg-type]
        (lambda: hf.Mirror("what://x"), "unknown scheme"),
        (lambda: hf.Mirror("x", max_to_keep=0), "max_to_keep=0"),
        (lambda: hf.Mirror("x", max_bandwidth="fast"), "max_bandwidth='fast'"),
        (lambda: hf.Mirror("x", wait_secs=-1), "wait_secs=-1"),
        (lambda: hf.Mirror("x", save_interval_secs="often"), "save_interval_secs='often'"),
        (lambda: hf.Mirror("x", save_interval_secs="auto"), "save_interval_secs='auto' is not a duration"),
    ],
)
def test_places_that_make_no_sense(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=what):
        make()


@pytest.mark.parametrize(
    "given", [{}, {"steps": 1, "secs": 1}, {"steps": 0}, {"steps": 1.5}, {"secs": 0}, {"keep": 0, "steps": 1}], ids=str
)
def test_periods_that_make_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(hf.errors.OptionError, match=next(iter(given), "steps= or secs=")):
        hf.Every(**given)


@pytest.mark.parametrize("duration", [900, 900.0, "15m", "900s", timedelta(minutes=15)], ids=str)
def test_durations(duration: Any) -> None:
    given = hf.CheckpointManagerOptions(save_interval_secs=duration, keep_time_interval=duration, max_to_keep=1)
    assert hf.Every(secs=900) in save_triggers(given)
    assert hf.Every(secs=900) in retention_rules(given)


def test_retention_is_written_down() -> None:
    def read_back(given: hf.CheckpointManagerOptions) -> hf.CheckpointManagerOptions:
        return options_from_document(options_document(given) | {"unknown": 1})

    given = hf.CheckpointManagerOptions(
        max_to_keep=3, keep_latest=2, keep_period=10, keep_time_interval="1h", keep_steps={5, 1}, best_fn="a/b",
        best_mode="min", keep_checkpoints_without_metrics=True,
    )  # fmt: skip
    assert retention_rules(read_back(given)) == retention_rules(given)
    assert read_back(given).read_only
    document = options_document(given)
    assert (document["keep_steps"], document["keep_time_interval"]) == ([1, 5], 3600.0)
    del document["best_mode"]
    assert options_from_document(document).ranking_mode == "max", "as it was by default"
    periods = (hf.Every(steps=100, keep=5), hf.Every(secs="1h"))
    assert retention_rules(read_back(hf.CheckpointManagerOptions(save=periods))) == periods
    assert options_document(hf.CheckpointManagerOptions(max_to_keep=1, best_fn=len))["best_fn"] is None


@pytest.mark.parametrize(
    "document", [{"max_to_keep": "many"}, {"best_mode": 3}, {"keep_steps": 4}, {"keep": [{"days": 3}]}, {"keep": 3}, []]
)
def test_documents_that_make_no_sense(document: Any) -> None:
    with pytest.raises(hf.errors.OptionError):
        options_from_document(document)


@pytest.mark.parametrize("option", [hf.Mirror, lambda url: hf.Local(url, every=1)], ids=["mirror", "local"])
@pytest.mark.parametrize("scheme", ["s3", "az", "http"])
@pytest.mark.parametrize("path", ["user:word@bucket/run", "user:wo/rd/word@bucket/run", "bucket/run?token=word"])
def test_errors_about_places_show_no_credentials(option: Any, scheme: str, path: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=r"\*\*\*") as caught:
        option(f"{scheme}://{path}")
    assert "word@" not in str(caught.value)
    assert "=word" not in str(caught.value)
    assert scheme != "az" or "?" in path or "abfs://container@account" in str(caught.value)
