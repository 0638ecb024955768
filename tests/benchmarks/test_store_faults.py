"""A few faults of a store: ``python -m benchmarks.store_faults`` has a thousand."""

from __future__ import annotations

import pytest
from benchmarks.store_faults import BUCKET, KINDS, main, run
from tests.object_stores.lying_server import LyingServer


def test_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "12", "--seed", "1"]) == 0
    assert "0 promises broken" in capsys.readouterr().out


def test_a_step_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = LyingServer.reset

    def reset_and_lose(server: LyingServer) -> None:
        reset(server)
        for key in server.keys(BUCKET, "run/1/"):
            del server.buckets[BUCKET][key]

    monkeypatch.setattr(LyingServer, "reset", reset_and_lose)
    counts, [problem] = run(100, seed=1)
    assert "step 1 holds None" in problem
    assert sum(counts[kind] for kind in KINDS) == counts["faults"] < 100
