"""docs/design.md and CONTRIBUTING.md name folders, files, classes and functions that exist, in the order of imports."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from pathlib import Path

import pytest
from tests.test_imports import LAYERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/design.md", "CONTRIBUTING.md")
WIDTH = 90  # columns of a page in a window of 1280 pixels
OBJECTS = {"manager": "CheckpointManager", "handler": "PyTreeCheckpointHandler"}  # objects in the drawing, and classes


def section(title: str) -> str:
    text = (ROOT / "docs" / "design.md").read_text()
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return str(found)


def drawing(title: str) -> list[str]:
    found = re.findall(r"^```\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    assert found, title
    return [line for block in found for line in block.splitlines()]


def names(line: str) -> list[str]:
    """The folders and modules that a line of the tree begins with: names divided by commas or two spaces."""
    found = re.match(r" *((?:\w+/?(?:, |  )?)+?)(?:  +|$)(?=[^ ])", line)
    assert found is not None, line
    return re.findall(r"\w+/?", found[1])


@functools.cache
def defined_names() -> frozenset[str]:
    """The names of all modules, classes, functions, arguments and variables of the package."""
    names = set(dir(builtins))
    for folder in ("engine", "integrations", "recipes", "cli"):
        for path in (ROOT / "src" / "holdfast" / folder).rglob("*.py"):
            names.update((path.stem, path.parent.name))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return frozenset(names)


def methods_of(package: str, name: str) -> set[str] | None:
    """The methods of a class of a package or module; none for a function; None if neither is defined there."""
    place = ROOT / "src" / "holdfast" / "engine" / package
    for path in place.rglob("*.py") if package.endswith("/") else [place.with_suffix(".py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return None


def below(folder: str) -> list[str]:
    """The names that the tree lists below a folder at the top."""
    lines = drawing("The layout")
    start = next(index for index, line in enumerate(lines) if line.startswith(f"{folder}/")) + 1
    return [name for line in itertools.takewhile(lambda line: line[0] == " ", lines[start:]) for name in names(line)]


@pytest.mark.parametrize("folder", LAYERS)
def test_tree_lists_the_packages_in_the_order_of_imports(folder: str) -> None:
    listed = below(folder)
    for name in listed:
        assert (ROOT / folder / name).is_dir() if name.endswith("/") else (ROOT / folder / f"{name}.py").is_file()
    order = [name.strip("/") for name in listed]
    layers = [[name for name in layer if not name.startswith("_")] for layer in LAYERS[folder]]
    assert sorted(order) == sorted(name for layer in layers for name in layer)
    height = {name: number for number, layer in enumerate(layers) for name in layer}
    assert [height[name] for name in order] == sorted((height[name] for name in order), reverse=True)


def test_tree_lists_the_folders_around_the_engine() -> None:
    folders = [name for line in drawing("The layout") if not line.startswith(" ") for name in names(line)]
    assert {*LAYERS} < {name.strip("/") for name in folders}
    assert [name for name in folders if not (name.endswith("/") and (ROOT / name).is_dir())] == []


def test_drawings_fit_a_page() -> None:
    lines = [line for title in ("On disk", "How a save and a load flow", "The layout") for line in drawing(title)]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_steps_of_the_flow_are_defined_in_the_packages_beside_them() -> None:
    """A step begins with a class or function, and its line ends with the package that defines it."""
    lines = drawing("How a save and a load flow")
    steps = [(line.split()[0].partition("(")[0].rstrip(":"), line.split()[-1]) for line in lines if line[0].isalpha()]
    assert len(steps) >= 15
    for name, folder in steps:
        outer, _, inner = name.partition(".")
        methods = methods_of(folder, OBJECTS.get(outer, outer))
        assert methods is not None, (name, folder)
        assert not inner or inner in methods, (name, folder)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"\b(?:engine|integrations|recipes|cli|configs|tests)/[\w/]+(?:\.py)?", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_named_alone_exist(page: str) -> None:
    """A file named without its folder lies in a folder that the section, or the row, names."""
    for part in re.split(r"\n(?=#|\|)", (ROOT / page).read_text()):
        named = [ROOT / name for name in re.findall(r"\b((?:engine|integrations)/[\w/.]*\w)", part)]
        folders = [ROOT, *(path if path.is_dir() else path.parent for path in named)]
        for name in re.findall(r"`(?!__)(\w+\.py)`", part):
            assert any((folder / name).exists() for folder in folders), (name, part[:80])


def test_each_of_the_first_questions_has_a_file() -> None:
    """That the files exist is tested above."""
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", section("First questions"), re.MULTILINE)
    assert len(rows) >= 15
    assert [question for question, answer in rows if not re.search(r"`[a-z_/]+/(?:\w+\.py)?`", answer)] == []


def test_names_exist() -> None:
    words = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", (ROOT / "docs" / "design.md").read_text())
    names = {word for word in words if re.fullmatch(r"[A-Z]\w+[a-z]\w*|[a-z]+_\w+|_[a-z]\w*", word)}
    names |= {part for word in words if re.fullmatch(r"[A-Z]\w*[a-z]\w*\.\w+", word) for part in word.split(".")}
    assert names
    assert sorted(names - defined_names()) == []
