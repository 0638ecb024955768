"""The promises about versions: the public surface is the one on record, and the page says what the project declares."""

from __future__ import annotations

import doctest
import re
import sys
from types import ModuleType

import pytest
from docs.tools import prepare, signatures

PAGE = (prepare.ROOT / "docs" / "stability.md").read_text(encoding="utf-8")


def test_the_public_surface_is_the_one_on_record() -> None:
    recorded = signatures.FILE.read_text(encoding="utf-8")
    present = "\n".join([*signatures.signatures(prepare.public_modules()), ""])
    changed = signatures.difference(recorded, present)
    assert not changed, (
        f"the public surface has changed:\n{changed}\nIf that keeps the promises of docs/stability.md, run\n"
        f"    {signatures.COMMAND}\nand say it in CHANGELOG.md"
    )


def test_what_no_public_name_has_yet_has_its_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record shows the lines of everything else."""
    module = ModuleType("toy")
    monkeypatch.setitem(sys.modules, "toy", module)
    exec("__all__ = ['save', 'again']\nagain = 3\ndef save(step: int, /, tree=...): pass", vars(module))
    assert signatures.signatures(["toy"]) == [
        "toy.again: int",
        "toy.save() -> Any",
        "toy.save(step: int, /)",
        "toy.save(tree: Any = Ellipsis)",
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
