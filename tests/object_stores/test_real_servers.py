"""Servers that are not ours, where they are installed: ``make test-servers`` runs this, and says what is missing.

Each server gets the conformance suite of backends, the scenarios of a disk, and several saves to one path at a time.
"""

from __future__ import annotations

import pathlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.object_stores.conftest import outcome
from tests.object_stores.installed_servers import SECRET, SERVERS, Server, reach, started
from tests.object_stores.test_scenarios import SCENARIOS
from tests.storage.test_storage_conformance import NAMES, BackendConformance

import holdfast as hf
from holdfast.engine.storage import Location, as_location

pytestmark = pytest.mark.servers


@pytest.fixture(scope="session", params=SERVERS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that runs, in an environment in which it is found."""
    reach(running, monkeypatch)
    if "FSSPEC_SFTP_PASSWORD" in running.client:
        import fsspec.config

        monkeypatch.setitem(fsspec.config.conf, "sftp", {"password": SECRET})
    return running


@pytest.fixture
def url(server: Server) -> str:
    """A URL of its own."""
    return f"{server.url}/{uuid.uuid4().hex[:8]}"


class TestServers(BackendConformance):
    @pytest.fixture
    def root(self, url: str) -> Location:
        return as_location(f"{url}/a folder")

    @pytest.mark.parametrize("name", NAMES)
    def test_names(self, folder: Location, name: str, server: Server) -> None:  # type: ignore[override]
        if name in server.unnamed:
            pytest.skip("it cannot hold this name")
        super().test_names(folder, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_as_on_a_disk(url: str, name: str, tmp_path: pathlib.Path) -> None:
    assert_same(SCENARIOS[name](f"{url}/a run"), SCENARIOS[name](str(tmp_path)))


def test_one_of_several_saves_to_a_path_is_committed(server: Server, url: str) -> None:
    if not server.conditional:
        pytest.skip("it ignores conditions")
    # The first save asks whether the server honours conditions; later ones of new small checkpoints have no marker.
    for name, old in (("ckpt", False), ("ckpt", True), ("again", False)):
        together = threading.Barrier(8)

        def save(number: int, path: str = f"{url}/{name}", old: bool = old, barrier: Any = together) -> Any:
            barrier.wait()
            return outcome(lambda: hf.save(path, {"w": np.full(5000, number)}, overwrite=old))

        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(save, range(8)))
        winners = [number for number, result in enumerate(results) if not isinstance(result, Exception)]
        lost = (hf.errors.StorageConflictError, hf.CheckpointExistsError)
        assert all(isinstance(result, lost) for result in results if isinstance(result, Exception))
        assert len(winners) == 1 or (old and winners)
        assert hf.load(f"{url}/{name}")["w"][0] in winners
        assert hf.verify(f"{url}/{name}").ok


class TestPyarrow(BackendConformance):
    """The file systems of pyarrow, in memory: as they are, below a folder, and around one of fsspec."""

    @pytest.fixture(params=["own", "folder", "fsspec"])
    def root(self, request: pytest.FixtureRequest) -> Location:
        pyarrow = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed: pip install pyarrow")
        filesystem = pyarrow._MockFileSystem()
        if request.param == "folder":
            filesystem = pyarrow.SubTreeFileSystem("base", filesystem)
        elif request.param == "fsspec":
            memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem(skip_instance_cache=True)
            filesystem = pyarrow.PyFileSystem(pyarrow.FSSpecHandler(memory))
        return as_location(f"a folder/{uuid.uuid4().hex}", filesystem=filesystem)


def test_the_disk_as_pyarrow_has_it(tmp_path: pathlib.Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed: pip install pyarrow")
    disk = pyarrow.LocalFileSystem()
    assert as_location(str(tmp_path), filesystem=disk).path == tmp_path
    assert as_location("x", filesystem=pyarrow.SubTreeFileSystem(str(tmp_path), disk)).path == tmp_path / "x"
