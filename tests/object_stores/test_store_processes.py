"""Two connected processes save together into a store, and each writes its share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    sent = [request.headers for request in store.server.log if ".0." in request.what and request.method == "GET"]
    ranges = [(headers.get("range") or headers["x-ms-range"]).removeprefix("bytes=").split("-") for headers in sent]
    assert 1 <= sum(int(last) + 1 - int(first) for first, last in ranges) / arrays()["w"].nbytes <= 1.01


FORKED = """
import os, sys
import holdfast as hf
if sys.argv[2] == "used":
    hf.load(sys.argv[1])
child = os.fork()
if not child:
    try:
        print("loaded", hf.load(sys.argv[1])["step"], flush=True)
    except hf.errors.StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", hf.load(sys.argv[1])["step"])
"""

USED = 'this process was forked from one that had used an object store.*multiprocessing_context="spawn"'


@pytest.mark.parametrize(("before", "message"), [("unused", "loaded 3"), ("used", USED)])
def test_forked_processes(s3: Store, before: str, message: str) -> None:
    """A process that is forked later is told so at once; obstore would wait for ever."""
    hf.save(f"{s3.url}/ckpt", {"step": 3})
    command = [sys.executable, "-W", "ignore", "-c", FORKED, f"{s3.url}/ckpt", before]
    found = subprocess.run(command, env={**os.environ, **s3.environment}, capture_output=True, text=True, timeout=100)
    assert re.search(message, found.stdout), found.stderr
    assert found.stdout.endswith("parent 3\n")


WORKERS = """
import sys
import torch
import holdfast as hf

class Rows(torch.utils.data.Dataset):
    def __init__(self, url):
        self.url = url
    def __len__(self):
        return 4
    def __getitem__(self, row):
        with hf.open(self.url) as tree:
            return float(tree["w"][row])

if __name__ == "__main__":
    hf.save(sys.argv[1], {"w": __import__("numpy").arange(4.0)})
    for context in ("spawn", "fork"):
        try:
            loader = torch.utils.data.DataLoader(Rows(sys.argv[1]), num_workers=1, multiprocessing_context=context)
            print(context, [row.item() for row in loader], flush=True)
        except hf.errors.StorageError as error:
            print(context, str(error).splitlines()[-1], flush=True)
"""


def test_workers_of_a_loader_after_a_save(s3: Store, tmp_path: Path) -> None:
    """Those that are spawned open the checkpoint; those that are forked are told to be spawned."""
    pytest.importorskip("torch")
    (tmp_path / "workers.py").write_text(WORKERS)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "workers.py"), f"{s3.url}/rows"]
    found = subprocess.run(command, env={**os.environ, **s3.environment}, capture_output=True, text=True, timeout=100)
    spawned, forked = found.stdout.splitlines()
    assert spawned == "spawn [0.0, 1.0, 2.0, 3.0]", found.stderr
    assert re.search(f"fork .*{USED}", forked)
