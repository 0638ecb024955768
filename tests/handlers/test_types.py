"""Leaves of the user's own types, and leaves in the user's own storage."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.handlers.vocabulary import ParamInfo, Registry, Vocabulary, VocabularyHandler, trees_with

import holdfast as hf
from holdfast.engine.format import encode_document
from holdfast.engine.handlers import DEFAULT_REGISTRY


class Rare(Vocabulary):
    pass


class Elsewhere(hf.type_handlers.TypeHandler):
    """Another storage: the checkpoint holds only the place of the leaf."""

    name = "elsewhere"

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> list[ParamInfo]:
        return [ParamInfo(name=name, facts={"file": f"{name}.npy"}) for name in names]

    def serialize(self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[hf.SaveArgs]) -> Any:
        for value, info, asked in zip(values, infos, args, strict=True):
            np.save(self.directory / info.facts["file"], value if asked.dtype is None else value.astype(asked.dtype))

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[hf.RestoreArgs]) -> Any:
        return [np.load(self.directory / info.facts["file"]) for info in infos]


WORDS = ["one", "two", "drei"]
TREE: dict[str, Any] = {"w": np.arange(3), "text": {"vocabulary": Vocabulary(WORDS)}, "rest": [1, Vocabulary([])]}


@pytest.fixture
def checkpointer() -> hf.Checkpointer:
    return hf.Checkpointer(trees_with(VocabularyHandler()))


def test_a_leaf_type_of_ones_own(place: str, checkpointer: hf.Checkpointer) -> None:
    checkpointer.save(place, TREE)
    found = checkpointer.restore(place)
    assert found["w"].tolist() == [0, 1, 2]
    assert found["text"] == TREE["text"]
    assert found["rest"] == TREE["rest"]
    assert hf.verify(place).ok
    assert checkpointer.restore(place, copy.deepcopy(TREE))["text"] == TREE["text"]
    assert checkpointer.restore(place, {**TREE, "text": {"vocabulary": object()}})["text"] == TREE["text"]
    restore_args = {"text": hf.RestoreArgs(restore_type=float)}
    assert checkpointer.restore(place, restore_args=restore_args)["text"] == {"vocabulary": WORDS}
    assert checkpointer.restore(place, select="text/**") == {"text": {"vocabulary": Vocabulary(WORDS)}}
    with pytest.raises(hf.TreeMismatchError, match="text/vocabulary: expected float64"):
        checkpointer.restore(place, {**TREE, "text": {"vocabulary": np.zeros(3)}})
    checkpointer.save(place, Rare(["x"]), force=True)  # of a subclass, and a bare leaf
    assert checkpointer.restore(place) == Vocabulary(["x"])
    assert "Rare" in (hf.describe(place)[0].value or "") or "vocabulary" in (hf.describe(place)[0].value or "")
    hf.save(place, TREE, overwrite=True)
    assert hf.load(place)["text"] == {"vocabulary": {"words": WORDS}}, "without its handler, it is a container"


def test_without_the_handler(place: str, checkpointer: hf.Checkpointer) -> None:
    checkpointer.save(place, TREE)
    with pytest.raises(hf.errors.OptionError) as caught:
        hf.load(place)
    for said in (place, "text/vocabulary is a", "Vocabulary of the TypeHandler 'vocabulary'", "rest/1"):
        assert said in str(caught.value)
    assert "register it with hf.type_handlers.register_type_handler" in str(caught.value)
    assert hf.load(place, select=["w", "rest/0"])["w"].tolist() == [0, 1, 2]
    assert hf.verify(place).ok
    kinds = {leaf.path: leaf.kind for leaf in hf.describe(place)}
    assert kinds == {"w": "numpy", "text/vocabulary": "external", "rest/0": "int", "rest/1": "external"}
    assert str(hf.PyTreeCheckpointer().structure(place)["text"]["vocabulary"]) == "external"


def test_damaged_files_are_found(tmp_path: Path, checkpointer: hf.Checkpointer) -> None:
    place = tmp_path / "one"
    checkpointer.save(place, TREE)
    path = place / "state" / "leaves" / "1" / "2.txt"
    assert path.read_text() == "drei"
    path.write_text("vier")
    with pytest.raises(hf.DamagedCheckpointError, match=r"leaves/1/2\.txt: expected crc32c"):
        checkpointer.restore(place)
    assert checkpointer.restore(place, select="rest/1") == {"rest": {1: Vocabulary([])}}
    (problem,) = hf.verify(place).checkpoints[0].problems
    assert problem.file == "state/leaves/1/2.txt"
    path.unlink()
    with pytest.raises(hf.DamagedCheckpointError, match="is missing"):
        checkpointer.restore(place)


def test_a_snapshot_in_the_background(place: str) -> None:
    leaf = Vocabulary(["before"])
    with hf.AsyncCheckpointer(trees_with(VocabularyHandler())) as checkpointer:
        checkpointer.save(place, {"v": leaf, "w": np.ones(3)})
        leaf.words[0] = "after"
        assert checkpointer.restore(place)["v"] == Vocabulary(["before"])


def test_another_storage_medium(place: str, tmp_path: Path) -> None:
    registry = Registry({np.ndarray: Elsewhere(tmp_path)})
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(type_handler_registry=registry))
    checkpointer.save(place, {"a": {"w": np.arange(4.0)}, "n": 3}, save_args={"a": hf.SaveArgs(dtype=np.float16)})
    assert os.listdir(tmp_path) == ["a.w.npy"]
    found = checkpointer.restore(place)
    assert found["n"] == 3
    assert found["a"]["w"].dtype == np.float16
    assert hf.load(place, select="n") == {"n": 3}


def test_the_default_registry(place: str) -> None:
    hf.type_handlers.register_type_handler(Vocabulary, VocabularyHandler())
    try:
        hf.save(place, TREE)
        assert hf.load(place)["text"] == TREE["text"]
        with hf.CheckpointManager(f"{place}/run") as manager:
            manager.save(0, TREE)
            manager.wait_until_finished()
            assert manager.restore(0)["text"] == TREE["text"]
    finally:
        DEFAULT_REGISTRY.unregister(Vocabulary)
    with pytest.raises(hf.errors.OptionError, match="register_type_handler"):
        hf.load(place)


def test_registering_twice() -> None:
    registry = Registry({Vocabulary: VocabularyHandler()})
    with pytest.raises(hf.errors.OptionError, match="Vocabulary has the handler 'vocabulary' already"):
        registry.register(Vocabulary, VocabularyHandler())
    with pytest.raises(hf.errors.OptionError, match="another handler has the name 'vocabulary'"):
        registry.register(dict, VocabularyHandler())
    with pytest.raises(hf.errors.OptionError, match="needs a name"):
        registry.register(dict, object())  # type: ignore[arg-type]  # that is the mistake
    other = VocabularyHandler()
    registry.register(Vocabulary, other, override=True)
    assert registry.find(Rare()) is other
    assert registry.find({}) is None
    registry.unregister(Vocabulary)
    registry.unregister(Vocabulary)
    assert registry.find(Vocabulary()) is None


def test_handlers_that_make_mistakes(place: str, checkpointer: hf.Checkpointer) -> None:
    class Forgetful(VocabularyHandler):
        def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> list[ParamInfo]:
            return []

        def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[hf.RestoreArgs]) -> Any:
            return []

    class Odd(VocabularyHandler):
        def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> list[ParamInfo]:
            return [ParamInfo(name=name, facts={"fact": object()}) for name in names]

    checkpointer.save(place, TREE)
    forgetful, odd = (hf.Checkpointer(trees_with(handler)) for handler in (Forgetful(), Odd()))
    with pytest.raises(hf.errors.OptionError, match=r"gave 0 infos for 2 leaves: .*must return one for each; nothing"):
        forgetful.save(f"{place}/other", TREE)
    with pytest.raises(hf.errors.OptionError, match=r"gave 0 values for 2 leaves: text/vocabulary \(.*Vocabul"):
        forgetful.restore(place)
    with pytest.raises(hf.errors.UnsupportedLeafError, match="text/vocabulary: its facts are not JSON"):
        odd.save(f"{place}/other", TREE)
    with pytest.raises(hf.errors.UnsupportedLeafError, match="text: words are text"):
        checkpointer.save(f"{place}/other", {"text": Vocabulary([1])})  # type: ignore[list-item]
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(f"{place}/other")


@pytest.mark.parametrize("method", ["param_infos", "snapshot", "serialize", "deserialize"])
def test_errors_say_where(place: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("word")

    def save_and_restore() -> None:
        background.save(place, TREE)
        background.wait_until_finished()
        background.restore(place)

    handler = VocabularyHandler()
    monkeypatch.setattr(handler, method, fails)
    with hf.AsyncCheckpointer(trees_with(handler)) as background:
        with pytest.raises((KeyError, hf.SaveFailedError)) as caught:
            save_and_restore()
        told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert f"raised by {method} of the TypeHandler 'vocabulary' for text/vocabulary (" in told
        assert "Vocabulary), rest/1 (" in told
        assert method != "serialize" or " in " in told.splitlines()[-1]
        assert method != "deserialize" or (told.endswith("/state") and len(caught.value.__notes__) == 1)


@pytest.mark.parametrize("to", ["safetensors", "torch", "orbax"])
def test_other_formats_have_no_place_for_it(tmp_path: Path, checkpointer: hf.Checkpointer, to: Any) -> None:
    checkpointer.save(tmp_path / "one", TREE)
    with pytest.raises(hf.errors.UnsupportedLeafError, match="text/vocabulary"):
        hf.export_checkpoint(tmp_path / "one", tmp_path / "two", to=to)
    assert not (tmp_path / "two").exists()


def test_coroutines_and_futures(place: str) -> None:
    class Later:
        def __init__(self, place: hf.storage.Location, text: str) -> None:
            self.place, self.text = place, text

        def result(self, timeout: float | None = None) -> None:
            self.place.write_bytes(self.text.encode())

    class Asynchronous(VocabularyHandler):
        async def serialize(self, values: Any, infos: Any, args: Any) -> list[Later]:
            return [
                Later(info.folder / f"{number}.txt", word)
                for value, info in zip(values, infos, strict=True)
                for number, word in enumerate(value.words)
            ]

        async def deserialize(self, infos: Any, args: Any) -> list[Any]:
            found: list[Any] = super().deserialize(infos, args)
            return found

    with hf.AsyncCheckpointer(trees_with(Asynchronous())) as checkpointer:
        checkpointer.save(place, TREE)
        assert checkpointer.restore(place)["text"] == TREE["text"]
    assert hf.verify(place).ok


@pytest.mark.parametrize(
    "leaf",
    [
        {},
        {"handler": ["vocabulary"], "facts": {"count": 1}},
        {"handler": "vocabulary\n" * 1000, "type": "x" * 10_000},
        {"handler": "other", "facts": [1]},
        {"handler": "vocabulary", "aggregate": "x"},
        {"handler": "vocabulary", "facts": {"count": 3}},
    ],
    ids=["nothing", "a list", "long", "another", "aggregate", "no files"],
)
def test_forged_descriptions(
    place: str, leaf: dict[str, Any], checkpointer: hf.Checkpointer, stored: Any, look: Callable[..., Any]
) -> None:
    checkpointer.save(place, [Vocabulary(WORDS)])
    tree = {"tree": {"type": "list", "children": [None]}, "leaves": [{"kind": "external", **leaf}]}
    files = stored(place)
    files.reseal("tree.json", encode_document("tree", {"tree": tree}))
    assert len(look(place)) == 1
    files.edit(lambda body: body["items"]["state"]["files"].pop("leaves/0/2.txt"))
    files.remove("state/leaves/0/2.txt")
    with pytest.raises((hf.errors.OptionError, hf.errors.StorageError)) as caught:
        checkpointer.restore(place)
    assert len(str(caught.value)) < 1000
