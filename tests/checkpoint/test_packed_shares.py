"""The small trees of several processes lie in one file; each process reads its own, and no other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.threads import together, unwrap

import holdfast as hf
from holdfast.engine.distributed import Coordinator


def saved(place: Path, counts: Sequence[int]) -> Path:
    """Save step 1 in threads that stand for processes; each has an array of its own, of so many numbers."""

    def run(coordinator: Coordinator) -> None:
        with several(place, coordinator) as manager:
            manager.save(1, {"own": values(coordinator.process_index, counts[coordinator.process_index])})

    unwrap(together(len(counts), run))
    return place / "1"


def several(place: Path, coordinator: Coordinator) -> hf.CheckpointManager:
    own = hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler(coordinator=coordinator))
    return hf.CheckpointManager(place, {"own": own}, coordinator=coordinator)


def restored(place: Path, count: int) -> list[Any]:
    """Restore step 1 in so many threads; return what each has got, or its error."""

    def run(coordinator: Coordinator) -> list[float]:
        with several(place, coordinator) as manager:
            found: list[float] = manager.restore(1)["own"]["values"].tolist()
            return found

    return together(count, run)


def values(process: int, count: int) -> dict[str, Any]:
    return {"values": np.arange(count) + 1000.0 * process}


def expected(counts: Sequence[int]) -> list[list[float]]:
    return [values(process, count)["values"].tolist() for process, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "files", "version"),
    [
        pytest.param([5, 6, 7], ["0-2.zip"], 3, id="all small"),
        pytest.param([5], ["0.zip"], 2, id="one process"),
        pytest.param([5, 90_000, 7, 8], ["0.zip", "1", "2-3.zip"], 3, id="one large"),
        pytest.param([5, 6, 3_000, 8], ["0-1.zip", "2.zip", "3.zip"], 3, id="one too large to be sent to process 0"),
        pytest.param([90_000, 90_000], ["0", "1"], 1, id="all large"),
        pytest.param([5] * 12, ["0-11.zip"], 3, id="numbers of two digits"),
    ],
)
def test_round_trips(tmp_path: Path, counts: list[int], files: list[str], version: int) -> None:
    step = saved(tmp_path / "run", counts)
    assert sorted(os.listdir(step / "own")) == files
    assert json.loads((step / "checkpoint.json").read_text())["version"] == version
    hf.copy_checkpoint(step, tmp_path / "copy" / "1")
    for place in (tmp_path / "run", tmp_path / "copy"):
        assert hf.verify(place).ok
        assert unwrap(restored(place, len(counts))) == expected(counts)
        assert unwrap(restored(place, 1)) == expected(counts)[:1]
        for process, own in enumerate(expected(counts)):
            assert hf.load(place / "1", item=f"own/{process}")["values"].tolist() == own
        assert sum(leaf.path == "values" for leaf in hf.describe(place / "1")) == len(counts)


def test_the_share_of_another_process_is_asked_for_by_its_number(tmp_path: Path) -> None:
    saved(tmp_path, [5, 6])
    with several(tmp_path, hf.processes.Alone()) as manager:
        found = manager.restore(1, restore_kwargs={"own": {"process": 1}})["own"]["values"]
        assert found.tolist() == expected([5, 6])[1]
        with pytest.raises(hf.errors.OptionError, match=r"process=2: .*/own has trees of 2 processes, from 0"):
            manager.restore(1, restore_kwargs={"own": {"process": 2}})


def test_a_process_reads_its_own_share(tmp_path: Path) -> None:
    counts = [1500] * 16
    step = saved(tmp_path / "run", counts)
    (pack,) = (step / "own").iterdir()
    hf.load(step, item="own/3")  # what a first load imports is no part of it

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ", 1)[1].split("\n", 1)[0])

    began = bytes_read()
    assert hf.load(step, item="own/7")["values"].tolist() == expected(counts)[7]
    assert bytes_read() - began < pack.stat().st_size // 4


def test_other_programs_open_it(tmp_path: Path) -> None:
    import tensorstore as ts

    step = saved(tmp_path / "run", [5, 6, 7])
    file = f"file://{step}/own/0-2.zip"
    array = ts.open(f"{file}|zip:1.zip|zip:|ocdbt:values/|zarr3:").result()
    assert array.read().result().tolist() == expected([5, 6, 7])[1]
    shutil.unpack_archive(step / "own/0-2.zip", tmp_path / "unpacked")
    assert sorted(os.listdir(tmp_path / "unpacked")) == ["0.zip", "1.zip", "2.zip"]
    shutil.unpack_archive(tmp_path / "unpacked/2.zip", tmp_path / "2")
    assert {"tree.json", "manifest.ocdbt", "d"} == set(os.listdir(tmp_path / "2"))


def test_damage_is_found_by_the_process_whose_share_it_is(tmp_path: Path) -> None:
    counts = [5, 6, 7]
    pack = saved(tmp_path / "run", counts) / "own" / "0-2.zip"
    whole = pack.read_bytes()
    hit = set()
    for place in range(0, len(whole), 61):
        pack.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        found = restored(tmp_path / "run", 3)
        failed = [process for process, one in enumerate(found) if isinstance(one, hf.DamagedCheckpointError)]
        assert [one for process, one in enumerate(found) if process not in failed] == [
            one for process, one in enumerate(expected(counts)) if process not in failed
        ]
        assert len(failed) <= 1, "the headers of the zip file belong to no share"
        assert all(f"own/0-2.zip/{process}.zip" in str(found[process]) for process in failed)
        hit |= {*failed}
        problems = hf.verify(tmp_path / "run").checkpoints[0].problems
        assert "own/0-2.zip" in {problem.file for problem in problems}
        with pytest.raises(hf.DamagedCheckpointError, match=r"own/0-2\.zip"):
            hf.copy_checkpoint(tmp_path / "run/1", tmp_path / "copy")
    assert hit == {0, 1, 2}


def test_the_file_of_another_save(tmp_path: Path) -> None:
    """It is whole, and of the same length: the record tells that it is not the one that was saved."""
    pack = saved(tmp_path / "run", [5, 5]) / "own" / "0-1.zip"
    other = saved(tmp_path / "other", [5, 5]).parent / "1" / "own" / "0-1.zip"
    content = other.read_bytes()
    assert len(content) == pack.stat().st_size
    pack.write_bytes(content)
    failed = [process for process, one in enumerate(restored(tmp_path / "run", 2)) if isinstance(one, Exception)]
    assert failed == [0, 1]


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "fewer members": lambda files: files["0-2.zip"].update(members=files["0-2.zip"]["members"][:2]),
    "no members": lambda files: files["0-2.zip"].update(members=[]),
    "not members": lambda files: files["0-2.zip"].update(members="abc"),
    "a huge member": lambda files: files["0-2.zip"]["members"].__setitem__(1, [1 << 40, "00000000"]),
    "a negative member": lambda files: files["0-2.zip"]["members"].__setitem__(0, [-5, "00000000"]),
    "a huge file": lambda files: files["0-2.zip"].update(size=1 << 40),
    "another name": lambda files: files.update({"x.zip": files.pop("0-2.zip")}),
    "other processes": lambda files: files.update({"1-3.zip": files.pop("0-2.zip")}),
    "a process twice": lambda files: files.update({"2.zip": {"size": 5, "crc32c": "00000000"}}),
    "two of one name": lambda files: files.update({"a/0-2.zip": files["0-2.zip"]}),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", HOSTILE)
def test_forged_records(tmp_path: Path, stored: Any, look: Callable[..., list[str]], what: str) -> None:
    step = saved(tmp_path / "run", [5, 6, 7])
    stored(str(step)).edit(lambda body: HOSTILE[what](body["items"]["own"]["files"]))
    assert look(str(step), loads=what == "a huge file")
    assert not hf.verify(step).ok
