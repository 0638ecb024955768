"""Two connected processes save together into a store, and each writes its share."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tests.object_stores.conftest import Store
from tests.processes.harness import Process, run_processes

import holdfast as hf

AZURE = True


def train(process: Process, environment: dict[str, str], url: str, last: int) -> Any:
    """Saves steps of a tree that both processes share and an item that each has alone; restores the last."""
    os.environ.update(environment)
    items = {
        "state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler(layout=hf.Layout(chunk_bytes=4096))),
        "data": hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()),
    }
    with hf.CheckpointManager(url, items, hf.CheckpointManagerOptions(max_to_keep=2)) as run:
        for step in range(1 + (run.latest_step() or 0), last + 1):
            run.save(step, {"state": {"w": np.full(50_000, step)}, "data": {"process": process.index, "at": step}})
        run.wait_until_finished()
        found = run.restore()
        return run.all_steps(), found["state"]["w"].tolist() == [last] * 50_000, found["data"]


def test_two_processes(store: Store) -> None:
    url = f"{store.url}/run"
    for last in (3, 5):  # the second time, both continue from the saved steps
        found = run_processes(train, 2, store.environment, url, last, backend="torch")
        assert found == [([last - 1, last], True, {"process": index, "at": last}) for index in range(2)]
    assert hf.verify(url).ok
    writers = {key.split(".")[-2] for key in store.stored("run/5/state") if "/d/" in key and not key.endswith("index")}
    assert writers == {"0", "1"}
    assert not any("fragment" in key or "partial" in key for key in store.stored())


def restore(process: Process, environment: dict[str, str], url: str) -> bool:
    os.environ.update(environment)
    with hf.CheckpointManager(url, options=hf.CheckpointManagerOptions(load_and_broadcast=True)) as run:
        return bool((run.restore()["w"] == arrays()["w"]).all())


def arrays() -> dict[str, Any]:
    return {"w": np.arange(2 << 20).reshape(64, -1)}


def test_the_store_sends_each_byte_once(store: Store) -> None:
    handler = hf.PyTreeCheckpointHandler(layout=hf.Layout(chunk_bytes=2 << 20))
    with hf.CheckpointManager(f"{store.url}/run", hf.Checkpointer(handler)) as run:
        run.save(1, arrays())
    store.server.log.clear()
    assert run_processes(restore, 3, store.environment, f"{store.url}/run", backend="torch") == [True] * 3
    sent = [request.headers for request in store.server.log if ".0." in request.path and request.method == "GET"]
    ranges = [(headers.get("range") or headers["x-ms-range"]).removeprefix("bytes=").split("-") for headers in sent]
    assert 1 <= sum(int(last) + 1 - int(first) for first, last in ranges) / arrays()["w"].nbytes <= 1.01
