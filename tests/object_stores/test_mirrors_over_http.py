"""A run whose mirror is a store that is down, slow or full trains on, and ends bit for bit where it should."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.mirrored import jax_loop
from tests.integrations.test_mirrored_runs import outcome
from tests.object_stores.conftest import Store
from tests.processes.harness import run_outcomes

import holdfast as hf

pytestmark = pytest.mark.xdist_group("stores")


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


def test_no_run_begins_beside_a_mirror_that_is_down(s3: Store, tmp_path: Path) -> None:
    s3.server.fail(".", answer=s3.server.error(503, "SlowDown"), times=10_000)
    with pytest.raises(hf.errors.StorageUnavailableError) as caught:
        hf.CheckpointManager(tmp_path / "run", options=hf.CheckpointManagerOptions(mirror=f"{s3.url}/mirror"))
    assert "the run does not start" in caught.value.__notes__[0]
