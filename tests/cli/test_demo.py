from __future__ import annotations

import pytest

from holdfast.cli import demo


@pytest.mark.xdist_group("programs")
def test_a_preempted_run_ends_as_the_uninterrupted_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("train.steps=60", "checkpoint.save_interval_steps=5", "logging.interval_steps=10")
    monkeypatch.setattr(demo, "RECIPE", (*demo.RECIPE[:2], *short))
    assert demo.main([]) == 0
    said = capfd.readouterr().out
    assert "kill -TERM" in said
    assert "are the same, bit for bit" in said
    assert "newest" in said


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["a", "b"]) == 2
    assert "usage" in capsys.readouterr().err
