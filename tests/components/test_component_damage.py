"""Directories of components that are damaged or forged: clear errors, never a wrong value, never code that runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import flip
from tests.ids import plain_id

import holdfast as hf
from holdfast.components import Checkpointable, allow, read_state
from holdfast.engine.arrays.digests import fsync_and_digest
from holdfast.engine.checkpoint.commit import write_record
from holdfast.engine.format import decode_document, encode_document
from holdfast.engine.steps import read_record
from holdfast.engine.storage import as_location

RAN: list[Any] = []
REFUSALS = (hf.DamagedCheckpointError, hf.errors.FormatVersionError, hf.CheckpointNotFoundError)


class Part(Checkpointable):
    def __init__(self, size: int = 3) -> None:
        self.weights = np.zeros(size)
        self.label = "new"


class Whole(Checkpointable):
    def __init__(self, rate: float = 0.5) -> None:
        self.a, self.b = Part(), Part(2)
        self.count = 0


@allow
def remember(*args: Any, **kwargs: Any) -> float:
    RAN.append((args, kwargs))
    return 0.0


def whole() -> Whole:
    """Returns one with values of its own."""
    made = Whole(rate=0.25)
    made.a.weights[:] = [1, 2, 3]
    made.b.label = "seven"
    made.count = 7
    return made


def values(one: Whole) -> list[Any]:
    return [one.count, one.a.weights.tolist(), one.a.label, one.b.weights.tolist(), one.b.label]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory of components."""
    return Path(whole().save_to_path(tmp_path / "x"))


def forge(path: Path, part: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the description of a component, with all digests right again."""
    file = path / part / "state" / "component.json"
    body = decode_document(file.read_bytes(), "component", source="")
    edit(body)
    file.write_bytes(encode_document("component", body))
    for place in (path, path / part):
        location = as_location(place)
        record = read_record(location)
        items = {name: item.__class__(item.folder, item.kind, {**item.files}) for name, item in record.items.items()}
        for item in items.values():
            if place / item.folder / "component.json" == file:
                digests = fsync_and_digest(location / item.folder)
                item.files["component.json"] = digests["component.json"]  # type: ignore[index]  # made above
        write_record(location, record.__class__(items=items, time=record.time))


def tampered(path: Path, places: int) -> Iterator[str]:
    """Flips a bit at some places of every file, and cuts every file; each is as it was before the next."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for position in {*range(0, len(content), max(1, len(content) // places)), len(content) - 1}:
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            file.write_bytes(flipped)
            yield f"{file}, flipped at {position}"
        for size in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            yield f"{file}, cut to {size}"
        file.write_bytes(content)


def test_every_byte_matters_or_does_not(saved: Path, every: bool) -> None:
    found = {"right": 0, "refused": 0}
    for change in tampered(saved, 40 if every else 15):
        running = Whole()
        try:
            running.restore_from_path(saved, strict=True)
        except REFUSALS:
            found["refused"] += 1
            assert values(running) == values(Whole()), "nothing is changed"
        else:
            found["right"] += 1
            assert values(running) == values(whole()), change
    assert found["refused"] > found["right"] > 0  # metadata.json, records of parts, and padding are not needed

    part = saved.parent / "part"
    shutil.move(saved / "a", part)
    for change in tampered(part, 10_000 if every else 50):
        try:
            assert Part.from_checkpoint(part).weights.tolist() == [1, 2, 3], change
        except REFUSALS:
            continue


@pytest.mark.parametrize("name", ["checkpoint.json", "state/tree.json", "a/state/component.json", "a/state/d/index"])
def test_what_is_missing_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(REFUSALS, match=name.rpartition("/")[2] if "/" in name else "no tree of components"):
        Whole().restore_from_path(saved)


def test_verify_finds_what_is_flipped(saved: Path) -> None:
    (file,) = (saved / "b" / "state" / "d").glob("*.0.0")
    flip(file, 0)
    problems = [problem for one in hf.verify(saved).checkpoints for problem in one.problems]
    assert [(problem.file.rpartition("/")[0], problem.leaf) for problem in problems] == [("b/state/d", "b: weights")]
    assert not hf.verify(saved / "b").ok
    assert hf.verify(saved / "a").ok


def spec_of(rate: Any) -> dict[str, Any]:
    return {"constructor": {"args": [], "kwargs": {"rate": rate}}}


CODE: dict[str, dict[str, Any]] = {
    "function": {"constructor": {"args": [{"name": "os:system"}], "kwargs": {}}},
    "partial": spec_of({"partial": [{"name": "os:system"}, ["true"], []]}),
    "object": spec_of({"object": ["subprocess:Popen", [["args", "true"]]]}),
    "enum": spec_of({"enum": ["antigravity:Fly", "NOW"]}),
    "nested": spec_of({"recipe": {"class": "os:system", "constructor": {"args": [], "kwargs": {}}}}),
    "builtin": spec_of({"name": "builtins:eval"}),
    "layer of torch": spec_of({"object": ["torch.nn.modules.linear:Linear", [["in_features", 1 << 40]]]}),
    "attribute of a module": spec_of({"name": "__main__:os.system"}),
    "class": {"class": "subprocess:Popen"},
    "class that is a function": {"class": "os:system"},
    "class of a module that is not imported": {"class": "antigravity:x"},
}


@pytest.mark.parametrize("change", CODE.values(), ids=list(CODE))
def test_descriptions_that_would_run_code(saved: Path, change: dict[str, Any]) -> None:
    forge(saved, "", lambda body: body.update(change))
    with pytest.raises(hf.errors.NotAllowedError, match="nothing was imported"):
        Whole.from_checkpoint(saved)
    assert "antigravity" not in sys.modules
    assert RAN == []
    running = Whole()
    running.restore_from_path(saved, strict=True)  # needs no constructor spec
    assert running.count == 7


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of the user's own, whose modules import what every program imports."""

    home = tmp_path / "packages"
    (home / "some_game" / "policies").mkdir(parents=True)
    (home / "some_game" / "__init__.py").write_text("from .policies import Size\n")
    (home / "some_game" / "policies" / "__init__.py").write_text(
        "import functools, os, subprocess\n\nclass Size:\n    pass\n\nready = functools.partial(print, 'ready')\n"
    )
    monkeypatch.syspath_prepend(str(home))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "some_game"]:
        del sys.modules[name]


TOUCH = {"args": [["touch", "ran"]], "kwargs": {}}
IMPORTED: dict[str, Any] = {
    "object": {"object": ["some_game.policies:subprocess.Popen", [["args", ["touch", "ran"]]]]},
    "recipe": {"recipe": {"class": "some_game.policies:subprocess.Popen", "constructor": TOUCH}},
    "function": {"partial": [{"name": "some_game.policies:os.system"}, ["touch ran"], []]},
    "class of a class": {"name": "some_game.policies:Size.__class__"},
    "base": {"name": "some_game.policies:Size.__init__.__objclass__"},
    "dictionary": {"name": "some_game.policies:Size.__dict__"},
    "partial": {"name": "some_game.policies:ready"},
}


@pytest.mark.parametrize("value", IMPORTED.values(), ids=list(IMPORTED))
@pytest.mark.usefixtures("package")
def test_what_a_package_imports_is_not_of_the_package(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    forge(saved, "", lambda body: body.update(constructor={"args": [value], "kwargs": {}}))
    with pytest.raises(hf.errors.NotAllowedError, match="not allowed by that name: it was not called"):
        Whole.from_checkpoint(saved, allowed="some_game.*")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["some_game.policies:Size", "some_game:Size"])
@pytest.mark.usefixtures("package")
def test_what_a_pattern_allows(saved: Path, name: str) -> None:
    forge(saved, "", lambda body: body.update(constructor={"args": [{"name": name}], "kwargs": {}}))
    with pytest.raises(hf.errors.NotAllowedError, match="nothing was imported"):
        Whole.from_checkpoint(saved)
    for pattern in ("some_game.*", "some_game*"):
        Whole.from_checkpoint(saved, allowed=pattern)


DEEP: Any = 1
for _ in range(150):
    DEEP = {"tuple": [DEEP]}


OF_REMEMBER = f"{__name__}:remember"
EMPTY: dict[str, Any] = {"args": [], "kwargs": {}}
NO_SPECS: list[Any] = [
    {}, {"unknown": 1}, {"a": 1, "b": 2}, {"component": "/"}, {"component": "/../../etc"},
    {"tuple": 5}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"float": "1e5"}, {"bytes": "!"},
    {"array": ["numpy", "float64", [1 << 40], ""]}, {"array": ["numpy", "float64", [2], "AAAA"]},
    {"array": ["numpy", "object", [0], ""]}, {"device": 5}, {"torch.dtype": "Tensor"},
    {"namespace": [["a b", 1]]}, {"path": None}, {"recipe": 5}, {"recipe": {"class": 5, "constructor": EMPTY}},
    {"recipe": {"class": OF_REMEMBER, "constructor": EMPTY}}, {"object": [OF_REMEMBER, []]},
    {"enum": [OF_REMEMBER, "NOW"]}, {"partial": [5, [], []]}, DEEP,
    {"array": ["torch", "float32", [1], "AAAA"]}, {"array": ["numpy", "float32", [0, 1 << 62], ""]},
    {"range": [0, 1 << 70, 0]}, {"complex": ["inf", "0x1p99999"]}, {"torch.dtype": "_C"}, {"device": "numpy"},
    {"jax.dtype": "datetime64[s]"}, {"dict": [[{"slice": [1, 2, 3]}, 1]]}, {"set": [{"dict": []}]},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_SPECS, ids=plain_id)
def test_specs_that_are_not_valid(saved: Path, value: Any) -> None:
    forge(saved, "", lambda body: body.update(spec_of(value)))
    with pytest.raises((*REFUSALS, hf.errors.NotAllowedError, hf.errors.OptionError)):
        Whole.from_checkpoint(saved)
    assert RAN == []


@pytest.mark.parametrize(
    ("folder", "error"),
    [("../x/a/state", "unexpected content"), ("/etc", "unexpected content"), ("b/state", "not in the commit record")],
)
def test_records_that_lead_elsewhere(saved: Path, folder: str, error: str) -> None:
    location = as_location(saved)
    record = read_record(location)
    items = {**record.items}
    items["a"] = items["a"].__class__(folder, items["a"].kind, items["b"].files)
    write_record(location, record.__class__(items=items, time=record.time))
    running = Whole()
    with pytest.raises(hf.DamagedCheckpointError, match=error):
        running.restore_from_path(saved)
    assert values(running) == values(Whole())


def test_specs_with_too_few_arguments(saved: Path, tmp_path: Path) -> None:
    class Needy(Checkpointable):
        def __init__(self, size: int) -> None:
            self.weights = np.zeros(size)

    path = Path(Needy(2).save_to_path(tmp_path / "needy"))
    forge(path, "", lambda body: body.update(constructor={"args": [], "kwargs": {}}))
    with pytest.raises(hf.errors.OptionError, match="missing a required argument: 'size'"):
        Needy.from_checkpoint(path)
    forge(path, "", lambda body: body.update(constructor={"args": [1, 2], "kwargs": {"other": 1}}))
    with pytest.raises(hf.errors.OptionError, match="no longer takes the saved arguments"):
        Needy.from_checkpoint(path)
    assert Whole.from_checkpoint(saved).count == 7


CHANGES: list[tuple[dict[str, Any], type[Exception] | None]] = [
    ({"layout": "2.0"}, hf.errors.FormatVersionError),
    ({"layout": "1.7", "something new": 5}, None),
    *(({"layout": layout}, hf.DamagedCheckpointError) for layout in (1, "1", "1.-1")),
    *(({"components": ["a", name]}, hf.DamagedCheckpointError) for name in ("../../../etc", "/etc", "", "no such")),
    *(({"components": names}, hf.DamagedCheckpointError) for names in (5, [["a"]])),
    ({"constructor": []}, hf.DamagedCheckpointError),
    ({"constructor": {"args": {}, "kwargs": {}}}, hf.DamagedCheckpointError),
    *(({name: None}, hf.DamagedCheckpointError) for name in ("class", "metadata")),
    *(({name: wrong}, hf.DamagedCheckpointError) for name, wrong in (("same", []), ("path", 5))),
]


@pytest.mark.parametrize(
    ("change", "error"), CHANGES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_descriptions_that_make_no_sense(saved: Path, change: dict[str, Any], error: type[Exception] | None) -> None:
    forge(saved, "", lambda body: body.update(change))
    running = Whole()
    if error is None:
        running.restore_from_path(saved, strict=True)
        return
    with pytest.raises(error):
        running.restore_from_path(saved)
    assert values(running) == values(Whole())


def test_a_component_that_is_made_with_itself(saved: Path) -> None:
    for part in ("a", ""):
        forge(saved, part, lambda body: body.update(constructor={"args": [{"component": "/a"}], "kwargs": {}}))
    with pytest.raises(hf.DamagedCheckpointError, match="depends on itself"):
        Whole.from_checkpoint(saved)


NO_GRAPHS: dict[str, Any] = {
    "no json": "no JSON",
    "number": 5,
    "root with a value": '{"nodes": [{"edges": {"weights": 0}, "value": "weights"}]}',
    "no such node": '{"nodes": [{"edges": {"weights": 7}}]}',
}


@pytest.mark.parametrize("graph", NO_GRAPHS.values(), ids=list(NO_GRAPHS))
def test_graphs_that_make_no_sense(tmp_path: Path, graph: Any) -> None:
    state = {"weights": np.ones(3), "label": "x", "__graph__": graph}
    path = Part().save_to_path(tmp_path / "x", state=state)
    with pytest.raises(hf.DamagedCheckpointError):
        Part().restore_from_path(path)


def test_graphs_that_lead_back_to_themselves(tmp_path: Path) -> None:
    nodes = [{"edges": {"again": 0, "weights": 1, "label": 0}}, {"value": "weights"}]
    state = {"weights": np.ones(3), "__graph__": json.dumps({"nodes": nodes})}
    path = Part().save_to_path(tmp_path / "x", state=state)
    part = Part()
    part.again = part  # type: ignore[attr-defined]  # as the checkpoint has it
    report = part.restore_from_path(path)
    assert part.weights.tolist() == [1, 1, 1]
    assert report.missing_values == ("(root): label",)
    chain = [{"edges": {"next": number + 1}} for number in range(10_000)]
    state["__graph__"] = json.dumps({"nodes": [*chain, {"value": "weights"}]})
    with pytest.raises((hf.TreeMismatchError, hf.DamagedCheckpointError)):
        Part().restore_from_path(Part().save_to_path(tmp_path / "y", state=state))


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(hf.CheckpointExistsError, match=r"notes\.txt"):
        Part().save_to_path(tmp_path / "mine", overwrite=True)
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    with pytest.raises(hf.CheckpointExistsError, match="a file is there"):
        Part().save_to_path(tmp_path / "mine" / "notes.txt")


def test_a_part_without_its_record_is_found_by_the_whole(saved: Path) -> None:
    (saved / "a" / "checkpoint.json").unlink()  # as a crash right after the commit leaves it
    assert Part.from_checkpoint(saved / "a").weights.tolist() == [1, 2, 3]
    assert read_state(saved / "a")["label"] == "new"
