"""Readers beside a run that replaces and deletes what they read: they get the one or the other, and never "damaged"."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, reading

import holdfast as hf
from holdfast.components import Checkpointable, read_state
from holdfast.engine.sources.native import read_checkpoint
from holdfast.engine.sources.weights import load_weights
from holdfast.engine.steps import MOST_CHANGES, list_steps, read_again

Read = Callable[[hf.storage.Location], Any]


def tree(edition: int) -> dict[str, Any]:
    return {"weights": np.full(5000, edition), "edition": edition}


def whole(found: Any) -> int:
    """Returns the edition, which all leaves have."""
    assert (found["weights"] == found["edition"]).all()
    return int(found["edition"])


def verified(run: hf.storage.Location) -> int:
    report = hf.verify(run)
    assert report.ok, report
    return 10 if 2 in [one.step for one in report.checkpoints] else 3


KEEP = {"weights": ..., "edition": ...}

# What reads step 2, and returns its edition, or None if that is not seen. It is 10 once the step is replaced; of a
# directory, step 3 is the newest then.
NEWEST: dict[str, Read] = {
    "load": lambda run: whole(hf.load(run)),
    "transformed": lambda run: whole(hf.load_transformed(run, {}, KEEP)),
    "weights": lambda run: whole(load_weights(run, tree(0)).tree),
    "described": lambda run: len(hf.describe(run)) == len(tree(0)) and None,
    "manager": lambda run: whole(reading(run.url).restore()),
    "verified": verified,
}
STEP: dict[str, Read] = {
    "load": lambda run: whole(hf.load(run / "2")),
    "manager": lambda run: whole(reading(run.url).restore(2)),
    "checkpointer": lambda run: whole(hf.PyTreeCheckpointer().restore(run / "2")),
}


@pytest.fixture
def run(moment: str, place: str, tmp_path: Any) -> hf.storage.Location:
    return hf.storage.as_location(tmp_path / "run" if moment == "data on a disk" else place)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Lets a writer act once, right before a reader gets at a file of step 2 with a certain name."""

    def schedule(name: str, act: Callable[[], object]) -> None:
        done: list[str] = []

        def before(place: hf.storage.Location) -> None:
            inside = place.url.rpartition("/2/")[2]
            if not done and "/2/" in place.url and (inside == name or (name.startswith("data") and "d/" in inside)):
                done.append(inside)
                act()

        for method in ("read_bytes", "open_data", "entries"):
            real = getattr(hf.storage.Location, method)

            def call(self: hf.storage.Location, *arguments: Any, real: Any = real, **options: Any) -> Any:
                before(self)
                return real(self, *arguments, **options)

            monkeypatch.setattr(hf.storage.Location, method, call)

    return schedule


MOMENTS = ["state/manifest.ocdbt", "state/tree.json", "data", "data on a disk"]


def writer(run: hf.storage.Location) -> hf.CheckpointManager:
    manager = hf.CheckpointManager(run, hf.PyTreeCheckpointer())
    for step in (1, 2):
        manager.save(step, tree(step))
    return manager


@pytest.mark.one_in(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("read", [*NEWEST.values(), *STEP.values()], ids=[*NEWEST, *(f"{name} 2" for name in STEP)])
def test_a_step_is_replaced_meanwhile(moment: str, read: Read, run: hf.storage.Location, meanwhile: Any) -> None:
    with writer(run) as manager:
        meanwhile(moment, lambda: manager.save(2, tree(10), force=True))
        assert read(run) in (10, None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("read", NEWEST.values(), ids=NEWEST)
def test_the_newest_is_deleted_meanwhile(moment: str, read: Read, run: hf.storage.Location, meanwhile: Any) -> None:
    with writer(run) as manager:

        def act() -> None:
            manager.save(3, tree(3))
            manager.delete(2)

        meanwhile(moment, act)
        assert read(run) in (3, None)


@pytest.mark.parametrize("moment", ["data", "data on a disk"])
@pytest.mark.parametrize("read", STEP.values(), ids=STEP)
def test_a_named_step_is_deleted_meanwhile(moment: str, read: Read, run: hf.storage.Location, meanwhile: Any) -> None:
    with writer(run) as manager:
        meanwhile(moment, lambda: manager.delete(2))
        with pytest.raises(hf.CheckpointNotFoundError):
            read(run)


def test_a_list_while_a_step_is_replaced(place: str, tmp_path: Any, meanwhile: Any) -> None:
    for run in (hf.storage.as_location(place), hf.storage.as_location(tmp_path)):
        with writer(run) as manager:
            meanwhile("state", lambda manager=manager: manager.save(2, tree(10), force=True))
            assert [one.damage for one in hf.list_checkpoints(run)] == [None, None]


class Policy(Checkpointable):
    def __init__(self, edition: int) -> None:
        self.weights = np.full(5000, edition)
        self.edition = edition


def test_components_are_replaced_meanwhile(place: str, meanwhile: Any) -> None:
    path = f"{place}/2"
    Policy(1).save_to_path(path)
    meanwhile("data", lambda: Policy(10).save_to_path(path, overwrite=True))
    assert whole(read_state(path)) == 10


def test_damage_stays_damage(place: str, stored: Any) -> None:
    """Also where metrics are no numbers that equal themselves."""
    with hf.CheckpointManager(place, hf.PyTreeCheckpointer()) as manager:
        manager.save(2, tree(2), metrics={"loss": float("nan")})
        stored(f"{place}/2").write("state/tree.json", b"{}")
        reads: list[Callable[[], Any]] = [lambda: manager.restore(2), lambda: hf.load(place)]
        reads.append(lambda: hf.PyTreeCheckpointer().restore(f"{place}/2"))
        for read in reads:
            with pytest.raises(hf.DamagedCheckpointError, match=r"tree\.json"):
                read()
    assert not hf.verify(place).ok


def test_a_step_that_is_deleted_after_the_listing_of_an_object_store(tmp_path: Path) -> None:
    run = hf.storage.as_location(f"memory://{tmp_path.name}/run")
    with hf.CheckpointManager(run) as manager:
        manager.save(1, tree(1))
        commit(manager, 2, tree(2))
        listed = run.snapshot()
        manager.delete(2)
    assert [entry.step for entry in list_steps(listed)] == [1]


def test_a_checkpoint_that_is_always_another_one_is_read_so_many_times(tmp_path: Path) -> None:
    place, reads = hf.storage.as_location(tmp_path), list[None]()

    def read(_: object) -> None:
        reads.append(None)
        raise hf.DamagedCheckpointError("of a moment")

    with pytest.raises(hf.DamagedCheckpointError, match=rf"{tmp_path}: it was replaced each of {MOST_CHANGES} times"):
        read_again(place, lambda: None, read, lambda _: True)
    assert len(reads) == MOST_CHANGES


def test_a_link_that_always_leads_elsewhere_is_followed_so_many_times(tmp_path: Path) -> None:
    for name in ("one", "other"):
        hf.save(tmp_path / name, {"w": np.ones(2)})
    link, turns = tmp_path / "link", itertools.cycle(("one", "other"))

    def read(_: object) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(next(turns))

    read(None)
    with pytest.raises(hf.DamagedCheckpointError, match=rf"link: it was replaced each of {MOST_CHANGES} times"):
        read_checkpoint(hf.storage.as_location(link), read)
