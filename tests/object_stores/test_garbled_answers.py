"""One wrong answer of a store, as of a faulty proxy, costs no step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.object_stores.conftest import Store
from tests.object_stores.store_server import Answer

import holdfast as hf

AZURE = True

WRONG = {"a page": b"<html><body>busy</body></html>", "nothing": b"", "zeros": bytes(5000)}


def restored(url: str) -> tuple[int, float]:
    """Returns the newest step as a run resumes from it."""
    with hf.CheckpointManager(url, options=hf.CheckpointManagerOptions(read_only=True)) as run:
        found = run.restore_latest()
        assert found is not None
        assert not found.skipped
        return found.step, float(found.items["w"].sum())


def loaded(url: str) -> tuple[int, float]:
    """Returns the same step as anyone loads it."""
    tree = hf.load(f"{url}/2")
    return tree["step"], float(tree["w"].sum())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("read", [restored, loaded])
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_costs_no_step(store: Store, body: bytes, read: Callable[[str], tuple[int, float]]) -> None:
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(5000, step), "step": step})
    before = len(store.server.log)
    assert read(url) == (2, 10_000.0)
    for number in range(len(store.server.log) - before):
        status = 206 if "range" in store.server.log[before + number].headers else 200
        headers = {"Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"} if status == 206 and body else {}
        store.server.fail("GET ", skip=number, answer=Answer(status, body, headers))
        assert read(url) == (2, 10_000.0), store.server.log[before + number].what


def test_a_record_that_is_listed_and_never_given_is_a_damaged_step(store: Store) -> None:
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(5000, step), "step": step})
    store.server.fail("GET .*2/checkpoint.json", answer=store.server.error(404, "NoSuchKey"), times=1000)

    first, second = hf.list_checkpoints(url)

    assert first.damage is None
    assert "2/checkpoint.json: the store lists this commit record, and has answered 10 times" in str(second.damage)
    assert "holdfast rm" in str(second.damage)
