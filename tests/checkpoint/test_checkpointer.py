"""One object at one path: the checkpointers, and handlers that users write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.kinds import TextFiles
from tests.manager.runs import HeldHandler

import holdfast as hf


class Later:
    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.thread = path, text, ""

    def result(self, timeout: float | None = None) -> None:
        self.thread = threading.current_thread().name
        with open(self.path, "w") as file:
            file.write(self.text)


class AsyncTextFiles(hf.handlers.AsyncCheckpointHandler):
    """Takes a snapshot in a coroutine, and writes one file for each future."""

    def __init__(self) -> None:
        self.futures: list[Later] = []

    async def async_save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        self.futures = [Later(os.path.join(directory, name), json.dumps(value)) for name, value in item.items()]
        return list(self.futures)

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
        return {path.name: json.loads(path.read_text()) for path in sorted(Path(os.fspath(directory)).iterdir())}


class Delegating(hf.handlers.AsyncCheckpointHandler):
    """Leaves the snapshot and the files to the handler of trees."""

    trees = hf.PyTreeCheckpointHandler()

    async def async_save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> Any:
        return await self.trees.async_save(directory, {"tree": item}, **kwargs)

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
        return self.trees.restore(directory)["tree"]


TEXTS = {"poem": "one\ntwo\n", "deep/er/letter": "dear", "empty": ""}


def test_a_handler_of_ones_own(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(TextFiles())
    report = checkpointer.save(tmp_path / "texts", TEXTS)
    assert report is not None
    assert report.bytes == 12
    assert checkpointer.restore(tmp_path / "texts") == dict(sorted(TEXTS.items()))
    assert checkpointer.restore(tmp_path / "texts", {"poem": None}) == {"poem": TEXTS["poem"]}
    assert checkpointer.structure(tmp_path / "texts") is None
    checkpointer.save(tmp_path / "other", TEXTS, suffix=".md")
    assert checkpointer.restore(tmp_path / "other") == {}
    assert checkpointer.restore(tmp_path / "other", suffix=".md") == dict(sorted(TEXTS.items()))
    record = json.loads((tmp_path / "texts" / "checkpoint.json").read_text())
    assert sorted(record["items"]["state"]["files"]) == ["deep/er/letter.txt", "empty.txt", "poem.txt"]
    with pytest.raises(hf.errors.OptionError, match="a custom handler"):
        hf.load(tmp_path / "texts")


def test_handlers_of_ones_own_in_a_manager(tmp_path: Path) -> None:
    items = {
        "texts": hf.Checkpointer(TextFiles()),
        "facts": hf.AsyncCheckpointer(AsyncTextFiles()),
        "tree": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
    }
    with hf.CheckpointManager(tmp_path, items, hf.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in range(4):
            saved = {"texts": {"poem": str(step)}, "facts": {"step": step}, "tree": {"a": np.full(3, step)}}
            manager.save(step, saved, save_kwargs={"texts": {"suffix": ".md"}})
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        found = manager.restore(3, restore_kwargs={"texts": {"suffix": ".md"}})
    assert (found["texts"], found["facts"], found["tree"]["a"].tolist()) == ({"poem": "3"}, {"step": 3}, [3, 3, 3])


@pytest.mark.parametrize("kind", [hf.Checkpointer, hf.AsyncCheckpointer])
def test_async_handlers_of_ones_own(tmp_path: Path, kind: Any) -> None:
    """The handlers save in the background or at once; what the caller changes after the call does not matter."""
    handler = AsyncTextFiles()
    item, weights = {"a": [1, 2], "b": {"c": None}}, np.ones(1000)
    checkpointers = [kind(handler), kind(Delegating())]
    for checkpointer, value in zip(checkpointers, (item, weights), strict=True):
        checkpointer.save(tmp_path / type(value).__name__, value)
    item["a"], weights[:] = [], 2
    assert checkpointers[0].restore(tmp_path / "dict") == {"a": [1, 2], "b": {"c": None}}
    assert set(checkpointers[1].restore(tmp_path / "ndarray")) == {1.0}
    thread = "holdfast-save" if kind is hf.AsyncCheckpointer else threading.current_thread().name
    assert {future.thread for future in handler.futures} == {thread}
    assert hf.verify(tmp_path / "dict").ok
    assert hf.verify(tmp_path / "ndarray").ok


@pytest.mark.usefixtures("default_sigint")
def test_a_coroutine_inside_a_running_loop(tmp_path: Path) -> None:
    """As in a notebook. An interrupt ends it."""
    ended = []

    class Slow(AsyncTextFiles):
        async def async_save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    async def notebook(handler: hf.handlers.CheckpointHandler, path: Path) -> None:
        hf.Checkpointer(handler).save(path, {"a": 1})

    asyncio.run(notebook(AsyncTextFiles(), tmp_path / "one"))
    assert hf.Checkpointer(AsyncTextFiles()).restore(tmp_path / "one") == {"a": 1}
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(notebook(Slow(), tmp_path / "two"))
    assert ended == ["cancelled"]
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-snapshot"]
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("when", ["async_save", "result"])
@pytest.mark.parametrize("background", [False, True])
def test_a_handler_that_fails(tmp_path: Path, when: str, background: bool) -> None:
    """An error in the background is told once, and the next save happens."""

    class Failing(AsyncTextFiles):
        async def async_save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> Any:
            if item is not None:
                return await super().async_save(directory, item)
            Path(os.fspath(directory), "half").write_text("written")
            if when == "async_save":
                raise ZeroDivisionError("so soon")
            return [Later(os.fspath(directory / "no" / "such" / "folder"), "")]

    checkpointer = hf.AsyncCheckpointer(Failing()) if background else hf.Checkpointer(Failing())
    if background and when == "result":
        checkpointer.save(tmp_path / "one", None)
        with pytest.raises(hf.SaveFailedError, match=f"{tmp_path}/one was not saved: .*No such file") as caught:
            checkpointer.save(tmp_path / "two", {"a": 2})
        assert isinstance(caught.value.__cause__, FileNotFoundError)
    else:
        with pytest.raises((ZeroDivisionError, FileNotFoundError)):
            checkpointer.save(tmp_path / "one", None)
        checkpointer.save(tmp_path / "two", {"a": 2})
    if isinstance(checkpointer, hf.AsyncCheckpointer):
        checkpointer.close()
        checkpointer.check_for_errors()
    assert checkpointer.restore(tmp_path / "two") == {"a": 2}
    assert not (tmp_path / "one").exists()
    with pytest.raises(hf.CheckpointNotFoundError, match=r"no checkpoint here \(there is no checkpoint.json\)"):
        checkpointer.restore(tmp_path / "one")


def test_a_save_in_the_background_that_takes_too_long(tmp_path: Path) -> None:
    handler = HeldHandler()
    handler.snapshot.set()
    with hf.AsyncCheckpointer(handler, timeout_secs=0.01) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": 1})
        with pytest.raises(hf.SaveFailedError, match=f"{tmp_path}/one is still not saved after 0.01 s"):
            checkpointer.wait_until_finished()
        handler.written.set()
        while checkpointer._save.running:
            pass
    assert hf.load(tmp_path / "one") == {"a": 1}
    with pytest.raises(TypeError, match="TextFiles cannot save in the background: use Checkpointer"):
        hf.AsyncCheckpointer(TextFiles())  # type: ignore[arg-type]


def restored(place: Path, **given: Any) -> Any:
    hf.save(place, {"a": 1})
    return hf.PyTreeCheckpointer().restore(place, **given)


def saved_in_a_manager(place: Path, **given: Any) -> None:
    items = {"net": hf.PyTreeCheckpointer(), "meta": hf.Checkpointer(hf.JsonCheckpointHandler())}
    with hf.CheckpointManager(place, items) as manager:
        try:
            manager.save(7, {"net": {"a": 1}, "meta": {}}, save_kwargs=given)
        finally:
            assert manager.all_steps() == []


DATA_FILE = {"ocdbt_target_data_file_size": 1 << 20}
FILESYSTEM = r"'?filesystem'?: pass holdfast.storage.as_location"
COORDINATOR = r"multiprocessing_options'?: here it is coordinator="
PEERS: dict[str, str] = {
    "save_concurrent_gb": "leave it out: a save writes from its snapshot",
    "restore_concurrent_gb": "leave it out: a load needs a twelfth",
    "ocdbt_target_data_file_size": "here it is data_file_bytes",
    "use_zarr3": "arrays are always stored as zarr v3",
    "chunk_byte": "did you mean chunk_bytes",
}


def made(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda place, **given: make(**given)


CHECKPOINTERS: dict[str, Callable[..., Any]] = {
    "save": lambda place, **given: hf.save(place, {"w": 1}, **given),
    "CheckpointManager": hf.CheckpointManager,
    "Checkpointer": made(partial(hf.Checkpointer, hf.PyTreeCheckpointHandler())),
    "AsyncCheckpointer": made(partial(hf.AsyncCheckpointer, hf.PyTreeCheckpointHandler())),
    "PyTreeCheckpointer": made(hf.PyTreeCheckpointer),
}


def saved_by(handler: hf.handlers.CheckpointHandler) -> Callable[..., Any]:
    return lambda place, **given: hf.Checkpointer(handler).save(place, {"a": 1}, **given)


UNKNOWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (saved_by(hf.PyTreeCheckpointHandler()), {"colour": 1}, "does not take these arguments: colour"),
    (saved_by(hf.PyTreeCheckpointHandler()), DATA_FILE, "ocdbt_target_data_file_size: here it is data_file_bytes"),
    (saved_by(hf.JsonCheckpointHandler()), {"colour": 1}, "does not take these arguments: colour"),
    (restored, {"restor_args": {}}, r"one/state was not restored: .*: restor_args; did you mean restore_args"),
    (saved_in_a_manager, {"net": {"sav_args": 1}}, r"7.*: item 'net' was not saved: .*sav_args; did you mean save_"),
    (saved_in_a_manager, {"meta": {"indent": 2}}, r"item 'meta' .*arguments: indent\. It takes none"),
    *(
        (made(make), {name: 1}, rf"{make.__name__} .*: {name}.*{advice}.* It takes ")
        for make in (hf.PyTreeCheckpointHandler, hf.ArrayCheckpointHandler)
        for name, advice in PEERS.items()
    ),
    *((make, {"filesystem": object()}, rf"^{taker}\b.* {FILESYSTEM}") for taker, make in CHECKPOINTERS.items()),
    *((make, {"multiprocessing_options": None}, COORDINATOR) for make in CHECKPOINTERS.values()),
    *(
        (made(make), given, advice)
        for make in (hf.Layout, hf.SaveArgs, hf.RestoreArgs, hf.ArrayRestoreArgs)
        for given, advice in [
            (DATA_FILE, "'ocdbt_target_data_file_size': here it is data_file_bytes"),
            ({"save_concurrent_gb": 4}, "'save_concurrent_gb': leave it out"),
        ]
    ),
]


@pytest.mark.parametrize(("call", "given", "message"), UNKNOWN, ids=[message for *_, message in UNKNOWN])
def test_unknown_arguments_are_explained(tmp_path: Path, call: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.errors.UnknownArgumentError, match=message) as caught:
        call(tmp_path / "one", **given)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, hf.errors.OptionError)
    assert call in (restored, saved_in_a_manager) or not (tmp_path / "one").exists()


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "one", {"a": 1})
    with pytest.raises(hf.CheckpointExistsError, match="a checkpoint is there already"):
        checkpointer.save(tmp_path / "one", {"a": 2})
    assert checkpointer.restore(tmp_path / "one") == {"a": 1}
    checkpointer.save(tmp_path / "one", {"a": 2}, force=True)
    assert checkpointer.restore(tmp_path / "one") == {"a": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(hf.CheckpointExistsError, match=r"not empty and is not a checkpoint \(it holds 'file'"):
        checkpointer.save(tmp_path / "mine", {"a": 2}, force=True)
    assert os.listdir(tmp_path / "mine") == ["file"]


JSON, ARRAY = "cannot be saved as JSON", "ArrayCheckpointHandler saves one array, not a {}: use PyTreeCheckpointHandler"


@pytest.mark.parametrize(
    ("handler", "item", "message"),
    [
        pytest.param(hf.JsonCheckpointHandler(), np.ones(3), JSON, id="an array as JSON"),
        pytest.param(hf.JsonCheckpointHandler(), {"a": object()}, JSON, id="an object as JSON"),
        pytest.param(hf.JsonCheckpointHandler(), float("nan"), JSON, id="NaN as JSON"),
        pytest.param(hf.JsonCheckpointHandler(), {1, 2}, JSON, id="a set as JSON"),
        pytest.param(hf.ArrayCheckpointHandler(), {"a": 1}, ARRAY.format("dict"), id="a dictionary as an array"),
        pytest.param(hf.ArrayCheckpointHandler(), "text", ARRAY.format("str"), id="text as an array"),
    ],
)
def test_what_a_handler_cannot_hold(
    tmp_path: Path, handler: hf.handlers.CheckpointHandler, item: Any, message: str
) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match=message):
        hf.Checkpointer(handler).save(tmp_path / "one", item)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (hf.JsonCheckpointHandler(), "has the items .*; not one of JSON"),
        (TextFiles(), r"TextFiles cannot restore item .* of this safetensors checkpoint; hf\.load\(path, item="),
    ],
)
def test_what_a_checkpoint_of_another_library_lacks(
    tmp_path: Path, handler: hf.handlers.CheckpointHandler, message: str
) -> None:
    hf.save(tmp_path / "one", {"w": np.ones(3)})
    hf.export_checkpoint(tmp_path / "one", tmp_path / "one.safetensors", "safetensors")
    with pytest.raises(hf.errors.OptionError, match=message):
        hf.Checkpointer(handler).restore(tmp_path / "one.safetensors")


def test_a_step_of_a_manager_is_a_checkpoint(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1})
    assert hf.PyTreeCheckpointer().restore(tmp_path / "1") == {"a": 1}
    with hf.CheckpointManager(tmp_path / "more", {"x": hf.PyTreeCheckpointer()}) as manager:
        manager.save(1, {"x": 1})
    with pytest.raises(hf.errors.StateError, match="has the items x; restore it with a CheckpointManager"):
        hf.PyTreeCheckpointer().restore(tmp_path / "more" / "1")
