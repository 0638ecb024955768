"""Arrays that have not changed are not written again: what is shared, what never is, and that no step loses by it."""

from __future__ import annotations

import copy
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.damage import flip
from tests.equality import assert_same
from tests.events import heard
from tests.manager.runs import commit, newest_whole, opened

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler
from holdfast.engine.arrays import reuse
from holdfast.engine.manager.ownership import Ownership
from holdfast.engine.storage import local

Tree = dict[str, Any]

BASE = 1 << 19  # elements of the array that does not change, of four bytes
OTHER = 15_000
SHARED = 300_000  # elements of an array whose file is large enough to be shared


def base() -> NDArray[np.float32]:
    return np.arange(BASE, dtype=np.float32).reshape(8, -1)


def tree(step: int, frozen: NDArray[Any] | None = None) -> Tree:
    return {"frozen": base() if frozen is None else frozen, "adapter": np.full(OTHER, step, np.float32), "step": step}


def save(run: hf.CheckpointManager, step: int, items: Any, **arguments: Any) -> dict[str, Any]:
    """Save a step, wait, and return the event."""
    events = heard(run)
    commit(run, step, items, **arguments)
    return events[-1]


def data_files(step: Path) -> dict[int, int]:
    """Return the inodes of a step's data files, with their sizes."""
    found = [path.stat() for path in step.rglob("d/*.*.*")]
    return {status.st_ino: status.st_size for status in found}


def on_disk(run: Path) -> int:
    """Return the bytes that a directory takes, each file counted once: what `du` says."""
    found = {status.st_ino: status for path in run.rglob("*") for status in [path.stat()]}
    return sum(512 * status.st_blocks for status in found.values())


def shares(one: Path, other: Path) -> bool:
    return not data_files(one).keys().isdisjoint(data_files(other))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


# ---- what is shared


@pytest.mark.parametrize(
    "convert",
    [pytest.param(np.copy, id="numpy"), pytest.param(torch.tensor, id="torch"), pytest.param(jnp.asarray, id="jax")],
)
def test_ten_saves_of_a_frozen_base_take_two(run: Path, tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    saved: Callable[[int], Tree] = lambda step: {name: convert(value) for name, value in tree(step).items()}  # noqa: E731
    with opened(run, max_to_keep=4) as writer:
        for step in range(10):
            report = save(writer, step, saved(step))
            assert on_disk(run) <= 2.2 * 4 * BASE
            assert (report["shared_bytes"] > 4 * BASE) is (step > 1)
            assert report["bytes"] + report["shared_bytes"] == hf.list_checkpoints(run)[-1].bytes
            assert not step or not shares(run / str(step), run / str(step - 1)), "the newest two share a file"
            links = [path.stat() for path in run.rglob("d/*") if path.stat().st_nlink > 1]
            assert bool(links) is (step > 1)
            assert all(link.st_mode & 0o222 == 0 for link in links), "shared files are read-only"
        assert writer.all_steps() == [6, 7, 8, 9]
    assert shares(run / "9", run / "7")
    assert hf.verify(run).ok
    for step in range(6, 10):
        alone = tmp_path / f"only {step}"
        shutil.copytree(run, alone)
        for other in {6, 7, 8, 9} - {step}:
            shutil.rmtree(alone / str(other))
        assert_same(hf.load(alone, like=saved(step)), saved(step))
    for step in (9, 8, 7):  # and in place
        shutil.rmtree(run / str(step))
    assert hf.verify(run).ok
    assert_same(hf.load(run, like=saved(6)), saved(6))


def test_what_changes_lies_apart_from_what_does_not(run: Path) -> None:
    """A large part that changes leaves the first file mostly dead: the next ones hold only what stays."""
    with opened(run, max_to_keep=3) as writer:
        for step in range(8):
            report = save(writer, step, {**tree(step), "large": np.full(2 * BASE, step, np.float32)})
            if step >= 3:
                assert report["shared_bytes"] == pytest.approx(4 * BASE, rel=0.01)
    assert on_disk(run) <= (2 + 3 * 2.1) * 4 * BASE


def test_a_part_that_changes_once(run: Path) -> None:
    """Chunks of a file that are changed, or gone, stay in it as long as most of the file is in use."""
    frozen = [base() + number for number in range(5)]
    with hf.CheckpointManager(run) as writer:
        for step in range(12):
            if step >= 6:
                frozen[0] = base() - 1
            report = save(writer, step, dict(enumerate(frozen[: 5 - (step == 11)])))
            assert report["shared_bytes"] >= (20 * BASE if step > 1 else 0)
            assert report["bytes"] == pytest.approx(
                20 * BASE if step < 2 else 4 * BASE * (step in (6, 7, 8)), abs=20_000
            )
    for step in range(12):
        found = hf.load(run / str(step))
        expected = [base() + number for number in range(5 - (step == 11))]
        expected[0] = base() - 1 if step >= 6 else base()
        assert_same(list(found.values()), expected)


NOISE = np.random.default_rng(0).integers(0, 1 << 32, BASE, np.uint32)


@pytest.mark.parametrize(
    ("handler", "arguments", "frozen", "stored", "nbytes"),
    [
        pytest.param(hf.PyTreeCheckpointHandler(compression=1), {}, NOISE, NOISE, 4 * BASE, id="compressed"),
        pytest.param(
            hf.PyTreeCheckpointHandler(),
            {"save_args": {"frozen": hf.SaveArgs(dtype=np.dtype(np.float64)), "adapter": None, "step": None}},
            base(),
            base().astype(np.float64),
            8 * BASE,
            id="cast",
        ),
    ],
)
def test_arrays_that_are_stored_in_another_way(
    run: Path, handler: Any, arguments: dict[str, Any], frozen: Any, stored: Any, nbytes: int
) -> None:
    with hf.CheckpointManager(run, hf.AsyncCheckpointer(handler)) as writer:
        reports = [save(writer, step, tree(step, frozen), save_kwargs=arguments) for step in range(4)]
    assert [report["shared_bytes"] > nbytes for report in reports] == [False, False, True, True]
    for step in range(4):
        assert_same(hf.load(run / str(step)), tree(step, stored))
    assert hf.verify(run).ok


class Backbone(Checkpointable):
    def __init__(self) -> None:
        self.weights = base()


class Agent(Checkpointable):
    def __init__(self) -> None:
        self.backbone = Backbone()
        self.count = 0

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [("backbone", self.backbone)]


def test_handlers_of_other_kinds_and_rare_items(run: Path) -> None:
    agent = Agent()
    checkpointers: dict[str, hf.Checkpointer] = {
        "agent": hf.AsyncCheckpointer(ComponentCheckpointHandler()),
        "own": hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()),
        "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        "replay": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
    }
    with opened(run, checkpointers, item_intervals={"replay": 2}, max_to_keep=6) as writer:
        for agent.count in range(9):
            items = {"agent": agent, "own": tree(agent.count), "facts": {"a": 1}, "replay": {"frames": base()}}
            report = save(writer, agent.count, items)
    assert report["shared_bytes"] > 12 * BASE
    assert hf.verify(run).ok
    replay = {step: run / str(step) / "replay" for step in (4, 6, 8)}
    assert shares(replay[8], replay[4]), "rare items have lineages of their own"
    assert not shares(replay[8], replay[6])
    with hf.CheckpointManager(run, checkpointers) as reader:
        found: dict[str, Any] = reader.restore(8, {"agent": Agent(), "own": None})
    assert found["agent"].count == 8
    assert_same(found["agent"].backbone.weights, base())
    assert_same(found["own"], tree(8))


@pytest.mark.parametrize("max_to_keep", [1, 2, 3])
def test_retention_over_shared_files(run: Path, max_to_keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("deletions of the run itself make no file suspicious, so that none is read again")

    with opened(run, max_to_keep=max_to_keep, keep_period=4) as writer:
        for step in range(9):
            with monkeypatch.context() as patch:
                patch.setattr(hf.storage.Location, "open_data", read)
                report = save(writer, step, tree(step))
            assert (report["shared_bytes"] > 0) is (step > 1) or max_to_keep < 3
            for kept in writer.all_steps():
                assert_same(hf.load(run / str(kept)), tree(kept))
        assert writer.all_steps() == sorted({0, 4, 8, *range(9 - max_to_keep, 9)})
    assert hf.verify(run).ok
    inodes: set[int] = set().union(*(data_files(run / str(step)) for step in writer.all_steps()))
    assert set(data_files(run)) == inodes


# ---- what never is: a change


_swap: Any = torch.utils.swap_tensors
TorchChange = Callable[[Any, int, float], object]
TORCH_CHANGES: dict[str, TorchChange] = {
    "index": lambda t, at, value: t.__setitem__(at, value),
    "add_": lambda t, at, value: t[at : at + 1].add_(value),
    "data": lambda t, at, value: t.data[at : at + 1].mul_(0).add_(value),
    "view": lambda t, at, value: t.view(100, -1).view(-1)[at].fill_(value),
    "detach": lambda t, at, value: t.detach()[at].fill_(value),
    "numpy": lambda t, at, value: t.detach().numpy().__setitem__(at, value),
    "dlpack": lambda t, at, value: torch.utils.dlpack.from_dlpack(t.detach())[at].fill_(value),
    "out": lambda t, at, value: torch.add(t[at : at + 1].clone(), value, out=t[at : at + 1]),
    "copy_": lambda t, at, value: t.copy_(t.clone().index_fill_(0, torch.tensor([at]), value)),
    "storage": lambda t, at, value: t.untyped_storage().copy_(_with(t, at, value).untyped_storage()),
    "set_data": lambda t, at, value: setattr(t, "data", _with(t, at, value)),
    "swap": lambda t, at, value: _swap(t, _with(t, at, value)),
}


def _with(tensor: torch.Tensor, at: int, value: float) -> torch.Tensor:
    copy = tensor.detach().clone()
    copy[at] = value
    return copy


NumpyChange = Callable[[Any, int, float], object]
NUMPY_CHANGES: dict[str, NumpyChange] = {
    "index": lambda a, at, value: a.__setitem__(at, value),
    "view": lambda a, at, value: a.reshape(100, -1).reshape(-1).__setitem__(at, value),
    "stride": lambda a, at, value: a[at::7].__setitem__(0, value),
    "memory": lambda a, at, value: a.data.__setitem__(at, value),
    "out": lambda a, at, value: np.add(a[at : at + 1], value, out=a[at : at + 1]),
    "bytes": lambda a, at, value: a.view(np.uint8).__setitem__(4 * at, int(value) % 255),
    "tensor": lambda a, at, value: torch.from_numpy(a)[at].fill_(value),
    "sign of zero": lambda a, at, value: a.__setitem__(at, -0.0),
    "nan": lambda a, at, value: a.__setitem__(at, np.nan),
}

changes = st.lists(
    st.tuples(
        st.sampled_from(["tensor", "array", "aliased", "nothing"]),
        st.sampled_from(sorted(TORCH_CHANGES)),
        st.sampled_from(sorted(NUMPY_CHANGES)),
        st.integers(0, SHARED - 10),
        st.integers(1, 200),
    ),
    min_size=3,
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(changes)
def test_a_change_of_one_element_is_never_missed(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    """Every step holds the bits of its moment, in any way that they were changed, or not at all."""
    run = tmp_path_factory.mktemp("run")
    tensor, array = torch.zeros(SHARED), np.zeros(SHARED, np.float32)
    memory = np.zeros(SHARED + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    memory = memory[start : start + SHARED]
    aliased = jax.device_put(memory)  # on the CPU, it is the memory of numpy
    expected: list[Tree] = []
    shared = 0
    with opened(run) as writer:
        for step, (what, torch_change, numpy_change, at, value) in enumerate(steps):
            if what == "tensor":
                TORCH_CHANGES[torch_change](tensor, at, float(value))
            elif what == "array":
                NUMPY_CHANGES[numpy_change](array, at, float(value))
            elif what == "aliased":
                memory[at] = value
            state = {"tensor": tensor, "array": array, "aliased": aliased}
            expected.append({name: np.asarray(leaf).copy() for name, leaf in state.items()})
            shared += save(writer, step, state)["shared_bytes"]
    assert shared or any(what != "nothing" for what, *_ in steps)
    for step, tree in enumerate(expected):
        found = hf.load(run / str(step))
        assert_same({name: np.asarray(found[name]) for name in tree}, tree)
    shutil.rmtree(run)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True), id="SGD"),
        pytest.param(lambda p: torch.optim.AdamW(p, 0.1, fused=True), id="AdamW"),
        pytest.param(lambda p: torch.optim.Adagrad(p, 0.1, fused=True), id="Adagrad"),
    ],
)
def test_fused_optimizers_and_running_means(run: Path, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Neither moves the version counters of the tensors that it changes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, SHARED), torch.nn.BatchNorm1d(SHARED), torch.nn.Linear(SHARED, 2))
    model[2].requires_grad_(False)
    updates = optimizer([p for p in model.parameters() if p.requires_grad])
    expected = []
    with hf.CheckpointManager(run) as writer:
        for step in range(5):
            model(torch.randn(4, 2)).sum().backward()
            updates.step()
            state = {"model": model.state_dict(), "optimizer": updates.state_dict()}
            expected.append(copy.deepcopy(state))
            report = save(writer, step, state)
    assert report["shared_bytes"] >= 4 * 2 * SHARED
    for step in range(5):
        assert_same(hf.load(run / str(step), like=state), expected[step])


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda a: a.astype(np.int32).view(np.float32), id="other bits"),
        pytest.param(lambda a: a.view(np.int32), id="other type, equal bits"),
        pytest.param(lambda a: a.reshape(-1, 100), id="other shape, equal bits"),
        pytest.param(lambda a: np.append(a, np.float32(0)), id="longer"),
    ],
)
def test_another_array_of_the_same_name(run: Path, changed: Callable[[Any], Any]) -> None:
    first = np.arange(SHARED, dtype=np.float32)
    arrays = [first, first, first, changed(first), changed(first), first]
    with hf.CheckpointManager(run) as writer:
        for step, array in enumerate(arrays):
            save(writer, step, {"array": array})
    for step, array in enumerate(arrays):
        assert_same(hf.load(run / str(step))["array"], array)


# ---- what never is: the step before, or one that is damaged


def records(run: Path) -> Iterator[int]:
    yield from sorted(int(path.parent.name) for path in run.glob("*/checkpoint.json"))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(["save", "save", "save", "replace", "back", "delete", "fail"]), max_size=14))
def test_the_newest_step_shares_nothing_with_the_one_to_fall_back_to(
    tmp_path_factory: pytest.TempPathFactory, history: list[str]
) -> None:
    run = tmp_path_factory.mktemp("run")
    frozen = np.arange(SHARED, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch, opened(run, max_to_keep=5) as writer:
        saved = 0
        for what in ["save", *history, "save", "save"]:
            steps = writer.all_steps()
            if what == "delete" and steps:
                writer.delete(steps[0])
                continue
            if what == "back" and steps:
                saved = steps[len(steps) // 2]
                writer.restore(saved)
            saved += what != "replace"
            if what == "fail":
                with patch.context() as broken:
                    broken.setattr(Ownership, "check", _refuse)
                    writer.save(saved, tree(saved, frozen), force=True)
                    with pytest.raises(hf.SaveFailedError):
                        writer.wait_until_finished()
                continue
            save(writer, saved, tree(saved, frozen), force=True)
            listed = list(records(run))
            place = listed.index(saved)
            for other in {listed[-1], listed[max(0, place - 1)]} - {saved}:
                assert not shares(run / str(saved), run / str(other)), f"{saved} and {other} after {what}"
    for step in records(run):
        assert_same(hf.load(run / str(step)), tree(step, frozen))
    assert hf.verify(run).ok
    shutil.rmtree(run)


def _refuse(ownership: Ownership, *, at_once: bool = False) -> None:
    if not at_once:
        raise hf.errors.StorageError("not now")


def test_a_bad_sector_in_a_shared_file(run: Path) -> None:
    """It takes one lineage; the run falls back to the other, and builds on neither."""
    with opened(run, max_to_keep=4) as writer:
        for step in range(6):
            save(writer, step, tree(step))
        assert largest(run / "5").stat().st_nlink == 2
        flip(largest(run / "5"))
        restored = newest_whole(writer)
        assert restored.step == 4
        assert_same(restored.items, tree(4))
        damaged = {item.step for item in hf.verify(run).checkpoints if item.problems}
        assert damaged == {3, 5}
        for step in range(5, 9):
            assert (save(writer, step, tree(step), force=True)["shared_bytes"] > 0) is (step > 6)
    assert [(item.step, not item.problems) for item in hf.verify(run).checkpoints] == [(s, True) for s in range(5, 9)]


# ---- what a file system refuses


def refusing(error: int) -> Callable[..., None]:
    def link(*arguments: Any, **options: Any) -> None:
        raise OSError(error, os.strerror(error))

    return link


ERRORS = ("EMLINK", "EPERM", "EACCES", "EXDEV", "EOPNOTSUPP", "ENOTTY", "EINVAL", "EAGAIN", "ENOSYS", "EROFS")


@pytest.mark.parametrize("name", ERRORS)
def test_without_links(run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str) -> None:
    monkeypatch.setattr(os, "link", refusing(getattr(errno, name)))
    with caplog.at_level("INFO", "holdfast"), hf.CheckpointManager(run) as writer:
        for step in range(5):
            assert save(writer, step, tree(step))["shared_bytes"] == 0
    said = [line for line in caplog.messages if os.strerror(getattr(errno, name)) in line]
    assert len(said) == (3 if name in ("EMLINK", "EAGAIN") else 1), said
    for step in range(5):
        assert_same(hf.load(run / str(step)), tree(step))
    assert hf.verify(run).ok


@pytest.mark.parametrize(
    ("patches", "options"),
    [
        pytest.param({}, {"reuse_unchanged": False}, id="switched off"),
        pytest.param(
            {(os, "link"): refusing(errno.EPERM), (fcntl, "ioctl"): lambda *_: None}, {}, id="a clone that is cut off"
        ),
        pytest.param(
            {(os, "link"): lambda source, target, **_: shutil.copyfile(source, target)}, {}, id="a link that is a copy"
        ),
    ],
)
def test_nothing_is_shared(run: Path, monkeypatch: pytest.MonkeyPatch, patches: Any, options: dict[str, Any]) -> None:
    for (module, name), does in patches.items():
        monkeypatch.setattr(module, name, does)
    with opened(run, **options) as writer:
        assert [save(writer, step, tree(step))["shared_bytes"] for step in range(4)] == [0] * 4
    assert all(path.stat().st_nlink == 1 for path in run.rglob("d/*"))
    assert hf.verify(run).ok


def test_clones_where_links_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(target: int, request: int, source: int) -> None:
        assert request == local._FICLONE
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)

    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(fcntl, "ioctl", clone)
    with hf.CheckpointManager(run) as writer:
        reports = [save(writer, step, tree(step)) for step in range(6)]
    assert [report["shared_bytes"] > 0 for report in reports] == [False, False, True, True, True, True]
    for step in range(6):
        assert_same(hf.load(run / str(step)), tree(step))
    names = [{path.name for path in (run / str(step)).rglob("d/*.*.*")} for step in range(6)]
    assert all(one.isdisjoint(other) for one, other in itertools.pairwise(names)), "clones have lineages, too"


def largest(step: Path) -> Path:
    file = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
    file.chmod(0o644)
    return file


def replace(step: Path) -> None:
    file = largest(step)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[::-1])


@pytest.mark.parametrize(
    ("meddle", "whole"),
    [
        pytest.param(lambda step: os.truncate(largest(step), 1000), False, id="truncated"),
        pytest.param(lambda step: largest(step).write_bytes(largest(step).read_bytes()[::-1]), False, id="written to"),
        # As rsync --inplace --times does, and as a bad disk might: nothing but the ctime shows it.
        pytest.param(lambda step: flip(largest(step)), False, id="written to, its times set back"),
        pytest.param(replace, False, id="replaced"),
        pytest.param(lambda step: largest(step).unlink(), False, id="deleted"),
        pytest.param(lambda step: step.rename(step.with_name("0.unreadable")), False, id="moved aside"),
        pytest.param(shutil.rmtree, False, id="step deleted"),
        pytest.param(lambda step: largest(step).chmod(0o640), True, id="rights"),
        pytest.param(lambda step: step.with_name("backup").hardlink_to(largest(step)), True, id="a backup of links"),
        pytest.param(
            lambda step: os.utime(largest(step), ns=(0, largest(step).stat().st_mtime_ns)), True, id="time of access"
        ),
    ],
)
def test_only_a_file_that_is_as_it_was_is_shared(run: Path, meddle: Callable[[Path], object], whole: bool) -> None:
    with hf.CheckpointManager(run) as writer:
        for step in range(2):
            save(writer, step, tree(step))
        meddle(run / "0")
        assert (save(writer, 2, tree(2))["shared_bytes"] > 0) is whole
    assert hf.verify(run, None if whole else 2).ok
    assert_same(hf.load(run / "2"), tree(2))


# ---- what it costs


def test_what_changes_is_soon_not_digested_any_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an array that changes everywhere, nor one that changes where no sample is taken."""
    digested: list[int] = []
    real: Callable[[NDArray[np.uint8]], bytes] = vars(reuse)["content_digest"]

    def content_digest(data: NDArray[np.uint8]) -> bytes:
        if len(data) > 1 << 17:
            digested.append(len(data))
        return real(data)

    monkeypatch.setattr(reuse, "content_digest", content_digest)
    everywhere, hidden = np.zeros(BASE // 4, np.float32), np.zeros(BASE // 4, np.float32)
    counts = []
    with opened(run, max_to_keep=1) as writer:
        for step in range(24):
            everywhere += 1
            hidden[100] += 1
            save(writer, step, {"everywhere": everywhere, "hidden": hidden})
            counts.append(len(digested))
    assert counts[2] == 2
    assert counts[-1] <= 6
    found = hf.load(run)
    assert_same(found["everywhere"], everywhere)
    assert_same(found["hidden"], hidden)


# ---- what people see


def test_reports_and_lists(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "holdfast"), hf.CheckpointManager(run) as writer:
        for step in range(4):
            save(writer, step, tree(step))
    assert "saved step 3 (every step): " in caplog.text
    assert "unchanged since earlier steps" in caplog.messages[-1]
    listed = {summary.step: summary for summary in hf.list_checkpoints(run)}
    assert [listed[step].shared_bytes > 4 * BASE for step in range(4)] == [True] * 4
    before = on_disk(run)
    own = listed[3].bytes - listed[3].shared_bytes
    shutil.rmtree(run / "3")
    assert before - on_disk(run) == pytest.approx(own, abs=40_000), "what a step has of its own is what deleting frees"
    shutil.rmtree(run / "2")
    assert [summary.shared_bytes for summary in hf.list_checkpoints(run)] == [0, 0], "they own what no other has"
