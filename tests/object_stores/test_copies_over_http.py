"""Copies to and from an object store, and mirrors: nothing is sent twice, and a store in trouble costs no step."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import Waiting
from tests.integrations.mirrored import jax_loop
from tests.integrations.test_mirrored_runs import outcome
from tests.object_stores.conftest import Store
from tests.processes.harness import Process, run_outcomes, run_processes

import holdfast as hf
from holdfast.engine.checkpoint import Transfer, copied_step
from holdfast.engine.steps import read_record
from holdfast.storage import as_location

pytestmark = pytest.mark.xdist_group("stores")

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=16_384)
WEIGHTS = np.arange(20_000, dtype=np.float32)


def test_bytes_that_are_read_twice_count_once(store: Store, tmp_path: Path) -> None:
    weights = np.arange(2 << 20, dtype=np.float32)
    # Data files that are too large to be sent in one go.
    layout = hf.Layout(chunk_bytes=1 << 20, segment_bytes=1 << 20, data_file_bytes=2 << 20)
    hf.save(tmp_path / "original", {"w": weights}, layout=layout)
    store.server.fail(r"(PUT|POST) .*\.0\.3$", answer=store.server.error(503, "SlowDown"), times=2)
    (report,) = hf.copy_checkpoint(tmp_path / "original", f"{store.url}/copy")
    assert report.sent == report.bytes


def test_a_copy_of_zip_files_that_is_interrupted_twice_names_each_once(store: Store, tmp_path: Path) -> None:
    hf.save(f"{store.url}/original", {"w": WEIGHTS[:100]})
    original, copy = as_location(f"{store.url}/original"), as_location(f"{store.url}/copy")
    for _ in range(2):
        with pytest.raises(EOFError), copied_step(original, copy, read_record(original)):
            raise EOFError
    listed = json.loads((copy / "checkpoint.partial").read_bytes())["folders"]
    assert [copy / name for name in listed] == [copy / one.name for one in copy.entries() if one.name.endswith(".zip")]
    (report,) = hf.copy_checkpoint(original.url, copy.url)
    assert report.sent == 0
    assert hf.verify(copy.url).ok


@pytest.mark.parametrize("code", [(507, "StorageFull"), (403, "AccessDenied"), (503, "SlowDown")])
def test_an_upload_that_fails_goes_on(store: Store, tmp_path: Path, code: tuple[int, str]) -> None:
    hf.save(tmp_path / "original", {"w": WEIGHTS}, layout=SMALL)
    store.server.fail(r"(PUT|POST) .*\.0\.3$", answer=store.server.error(*code), times=1000)
    with pytest.raises(hf.errors.StorageError):
        hf.copy_checkpoint(tmp_path / "original", f"{store.url}/copy")
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(f"{store.url}/copy")
    before = {key for key in store.stored() if ".0." in key}
    assert before
    store.server.reset()

    (report,) = hf.copy_checkpoint(tmp_path / "original", f"{store.url}/copy")

    assert report.sent < report.bytes
    written = [what for what in store.server.sent() if what.startswith(("PUT", "POST")) and ".0." in what]
    assert not [key for key in before for what in written if what.endswith(key)]
    assert hf.verify(f"{store.url}/copy").ok
    assert not [key for key in store.stored() if "partial" in key]
    hf.copy_checkpoint(f"{store.url}/copy", tmp_path / "back")
    assert np.array_equal(hf.load(tmp_path / "back")["w"], WEIGHTS)
    assert hf.verify(tmp_path / "back").ok


def test_the_bandwidth_counts_what_is_sent(store: Store, tmp_path: Path) -> None:
    """Over plain http, requests to S3 are signed by a hash of the data, which reads it once more."""
    time = Waiting()
    hf.save(tmp_path / "original", {"w": np.arange(1_000_000, dtype=np.float32)})
    original, copy = hf.storage.as_location(tmp_path / "original"), hf.storage.as_location(f"{store.url}/copy")
    record = read_record(original)
    transfer = Transfer(record.nbytes / 100, changed=time, now=lambda: time.now)
    with copied_step(original, copy, record, transfer=transfer):
        pass
    assert 99 <= time.now <= 101


LARGE = 192 << 20  # bytes of one file


def growth(process: Process, environment: dict[str, str], original: str, copy: str) -> int:
    """Copies a checkpoint; returns by how many bytes the process grew at most."""
    os.environ.update(environment)
    hf.copy_checkpoint(original + "-small", copy + "-small")  # imports what is needed

    def peak() -> int:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    before = peak()
    hf.copy_checkpoint(original, copy)
    return peak() - before


def test_a_large_file_is_not_in_memory(store: Store, tmp_path: Path) -> None:
    hf.save(tmp_path / "original", {"w": np.ones(LARGE, np.uint8)})
    hf.save(tmp_path / "original-small", {"w": np.ones(4 << 20, np.uint8)})
    arguments = (store.environment, str(tmp_path / "original"), f"{store.url}/copy")
    (grown,) = run_processes(growth, 1, *arguments, backend="none")
    assert grown < LARGE / 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The end of a run that nothing has killed."""
    place = tmp_path_factory.mktemp("undisturbed")
    return outcome(jax_loop, f"{place}/run", f"{place}/mirror", {})["final"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("trouble", "until", "some"),
    [
        ("none", ("it has a step",), True),
        ("slow", ("it has a step",), True),
        ("full", ("it has a step", "it has failed"), True),
        ("down", ("it has failed",), False),
    ],
)
def test_a_run_is_killed_while_its_mirror_is_in_trouble(
    s3: Store, tmp_path: Path, undisturbed: Any, trouble: str, until: tuple[str, ...], some: bool
) -> None:
    directory, mirror = f"{tmp_path}/run", f"{s3.url}/mirror"
    server: Any = s3.server
    if trouble == "slow":
        server.latency = 0.05
    if trouble == "full":
        server.fail(r"^PUT .*mirror/[68]/", answer=server.error(507, "StorageFull"), times=10_000)
    if trouble == "down":
        # The directory of the run is empty: while nothing is known of the mirror, no run begins.
        server.fail(r"^PUT ", answer=server.error(503, "SlowDown"), times=10_000)
    run_outcomes(jax_loop, 1, directory, mirror, s3.environment, until, kill=(0, "after some steps"), backend="none")
    server.reset()
    shutil.rmtree(directory)
    there = [one.step for one in hf.list_checkpoints(mirror)] if s3.stored("mirror/") else []
    assert bool(there) == some

    found = outcome(jax_loop, directory, mirror, s3.environment)

    assert found["start"] == (there[-1] if there else 0)
    assert found["final"] == undisturbed
    assert hf.verify(mirror).ok
    assert hf.list_checkpoints(mirror)[-1].step == 12
