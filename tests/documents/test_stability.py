"""The promises about versions: the public surface is the one on record, and the page says what the project declares."""

from __future__ import annotations

import doctest
import re
import sys
from types import ModuleType

import pytest
from docs.tools import prepare, signatures

PAGE = (prepare.ROOT / "docs" / "stability.md").read_text(encoding="utf-8")

TOY = '''
from __future__ import annotations
import dataclasses
import pathlib

__all__ = ["Options", "Refused", "Run", "again", "load", "read"]

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
        events: What happened.
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
again, read = 3, load
'''


def test_the_public_surface_is_the_one_on_record() -> None:
    recorded = signatures.FILE.read_text(encoding="utf-8")
    present = "\n".join([*signatures.signatures(prepare.public_modules()), ""])
    changed = signatures.difference(recorded, present)
    assert not changed, (
        f"the public surface has changed:\n{changed}\nIf that keeps the promises of docs/stability.md, run\n"
        f"    {signatures.COMMAND}\nand say it in CHANGELOG.md"
    )


def test_every_part_of_a_module_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("toy")
    monkeypatch.setitem(sys.modules, "toy", module)
    exec(TOY, vars(module))
    surface = signatures.signatures(["toy"])
    assert surface == [
        "class toy.Options",
        "toy.Options(*, limit: int = 3)",
        "toy.Options(*, names: list[str] = <factory>)",
        "class toy.Refused(ValueError)",
        "class toy.Run",
        "toy.Run(place: pathlib.Path)",
        "toy.Run.__len__",
        "toy.Run.close() -> None",
        "toy.Run.events: Any",
        "toy.Run.newest: int | None",
        "toy.Run.of() -> Run",
        "toy.Run.of(**options: int)",
        "toy.Run.save() -> bool",
        "toy.Run.save(step: int, /)",
        "toy.Run.save(tree: object)",
        "toy.Run.save(*, force: bool = False)",
        "toy.again: int",
        "toy.load() -> dict[str, int]",
        "toy.load(path: str = 'x')",
        "toy.load(*keys: str)",
        "toy.read = toy.load",
    ]
    changed = [line.replace("force: bool", "force: int") for line in surface if "events" not in line]
    assert signatures.difference("\n".join(surface), "\n".join(changed)).splitlines() == [
        "- toy.Run.events: Any",
        "- toy.Run.save(*, force: bool = False)",
        "+ toy.Run.save(*, force: int = False)",
    ]
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
