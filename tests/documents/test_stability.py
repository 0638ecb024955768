"""The promises about versions: the public surface is the one on record, and the page says what the project declares."""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from docs.tools import prepare, signatures

PAGE = (prepare.ROOT / "docs" / "stability.md").read_text(encoding="utf-8")

TOY = '''
from __future__ import annotations
import dataclasses
import pathlib

__all__ = ["Options", "Refused", "Run", "load"]

class Refused(ValueError):
    """An error."""

@dataclasses.dataclass(kw_only=True)
class Options:
    limit: int = 3
    names: list[str] = dataclasses.field(default_factory=list)

class _Base:
    def close(self) -> None: ...

class Run(_Base):
    """A run.

    Attributes:
        place: Where it is.
    """

    def __init__(self, place: pathlib.Path) -> None:
        self.place, self.events = place, []

    def __len__(self) -> int: ...
    def save(self, step: int, /, tree: object, *, force: bool = False) -> bool: ...
    def _hidden(self) -> None: ...
    @property
    def newest(self) -> int | None: ...
    @classmethod
    def of(cls, **options: int) -> Run: ...

def load(path: str = "x", *keys: str) -> dict[str, int]: ...
'''


@pytest.fixture
def surface(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The lines of a module with the given source."""

    def of(source: str) -> str:
        module = ModuleType("toy")
        monkeypatch.setitem(sys.modules, "toy", module)
        exec(source, vars(module))
        return "\n".join(signatures.signatures(["toy"]))

    return of


def test_the_public_surface_is_the_one_on_record() -> None:
    recorded = signatures.FILE.read_text(encoding="utf-8")
    present = "\n".join([*signatures.signatures(prepare.public_modules()), ""])
    changed = signatures.difference(recorded, present)
    assert not changed, (
        f"the public surface has changed:\n{changed}\nIf that keeps the promises of docs/stability.md, run\n"
        f"    {signatures.COMMAND}\nand say it in CHANGELOG.md"
    )


def test_every_part_of_a_module_has_its_line(surface: Callable[[str], str]) -> None:
    assert surface(TOY).splitlines() == [
        "class toy.Options",
        "toy.Options(*, limit: int = 3)",
        "toy.Options(*, names: list[str] = <factory>)",
        "class toy.Refused(ValueError)",
        "class toy.Run",
        "toy.Run(place: pathlib.Path)",
        "toy.Run.__len__",
        "toy.Run.close() -> None",
        "toy.Run.newest: int | None",
        "toy.Run.of() -> Run",
        "toy.Run.of(**options: int)",
        "toy.Run.save() -> bool",
        "toy.Run.save(step: int, /)",
        "toy.Run.save(tree: object)",
        "toy.Run.save(*, force: bool = False)",
        "toy.load() -> dict[str, int]",
        "toy.load(path: str = 'x')",
        "toy.load(*keys: str)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("limit: int = 3", "limit: int = 4", ["- toy.Options(*, limit: int = 3)", "+ toy.Options(*, limit: int = 4)"]),
        ("    def close(self) -> None: ...", "    pass", ["- toy.Run.close() -> None"]),
        ("tree: object, ", "", ["- toy.Run.save(tree: object)"]),
        (", *, force", ", force", ["- toy.Run.save(*, force: bool = False)", "+ toy.Run.save(force: bool = False)"]),
        ("(ValueError)", "(OSError)", ["- class toy.Refused(ValueError)", "+ class toy.Refused(OSError)"]),
        (
            "def newest(self) -> int |",
            "def newest(self) -> ",
            ["- toy.Run.newest: int | None", "+ toy.Run.newest: None"],
        ),
        ("_hidden", "seen", ["+ toy.Run.seen() -> None"]),
        ("        place: Where it is.", "        events: What happened.", ["+ toy.Run.events: Any"]),
        ('"load"]', '"again", "load"]\nagain = 3', ["+ toy.again: int"]),
    ],
)
def test_any_change_is_seen(surface: Callable[[str], str], old: str, new: str, lines: list[str]) -> None:
    assert TOY.count(old) == 1
    assert signatures.difference(surface(TOY), surface(TOY.replace(old, new))).splitlines() == lines


def test_a_second_name_of_an_object_is_one_line(surface: Callable[[str], str]) -> None:
    again = TOY.replace('"load"]', '"load", "read"]') + "\nread = load\n"
    assert surface(again).splitlines()[-1] == "toy.read = toy.load"


def test_the_difference_is_explained() -> None:
    assert doctest.testmod(signatures).attempted > 0
    assert doctest.testmod(signatures).failed == 0


def test_the_page_names_every_public_module() -> None:
    listed = PAGE.partition("- the names in `__all__` of")[2].partition("with\n")[0]
    assert set(re.findall(r"`(holdfast[\w.]*)`", listed)) == set(prepare.public_modules())


def test_the_page_names_the_oldest_versions() -> None:
    project = prepare.PROJECT
    extras = project["optional-dependencies"]
    declared = {"Python": project["requires-python"].removeprefix(">=")}
    for requirement in (*project["dependencies"], *extras["flax"], *extras["lightning"]):
        name, _, version = requirement.partition(">=")
        declared[name] = re.match(r"[\d.]+", version)[0]  # type: ignore[index]
    table = PAGE.partition("| oldest version |\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"(\w+) (\d[\d.]*)", table))
    assert found == {name: declared[name] for name in found}
    assert found.keys() >= {"Python", "jax", "flax", "torch", "lightning"}
