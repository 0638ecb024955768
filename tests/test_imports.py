"""Who imports whom: downwards only, and no framework before it is needed.

A call of ``import_module`` with a relative name counts as an import. Only that of the table of formats leads up.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.engine.sources import discovery

ROOT = Path(__file__).resolve().parents[1] / "src" / "holdfast"
FOLDERS = ("engine", "integrations", "recipes", "cli")  # each imports itself and those before it
# What anything in the engine may import.
SHARED = ("errors", "clock", "foreign_arguments", "forks", "installed", "observer", "progress", "streams")
PURE = ("storage", "format", "pytree", "distributed")  # these import none of each other
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {  # of modules and folders: each imports those before its own
    "engine": (
        SHARED,
        PURE,
        ("generators", "steps"),
        ("loaders",),
        ("resumable",),
        ("stateful",),
        ("fingerprints", "witness"),
        ("arrays",),
        ("handlers",),
        ("sources",),
        ("checkpoint",),
        ("manager",),
        ("api", "inspection", "listing"),
    ),
    "integrations": (
        ("hugging_face", "options"),
        ("formats",),
        ("graph",),
        ("components",),
        ("loop",),
        ("flax", "keras", "lightning", "ray"),
    ),
}
LAYER = {house: {name: n for n, names in enumerate(layers) for name in names} for house, layers in LAYERS.items()}
TABLE = ROOT / "engine" / "sources" / "discovery.py"  # the table of formats; their modules are built on the engine
POLICIES = ("metrics", "retention", "decisions")  # of the manager: pure functions of a list of steps
FRAMEWORKS = {"jax", "jaxlib", "torch", "flax", "optax", "lightning", "pytorch_lightning", "tensorstore"}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def imports(path: Path, *, everywhere: bool = True) -> tuple[str, ...]:
    """Returns the full names of what a file imports; without ``everywhere``, only what it does when it is loaded."""
    package = ["holdfast", *path.relative_to(ROOT).parts[:-1]]
    return tuple(imported(path.read_text(), package, everywhere, calls=path != TABLE))


def imported(text: str, package: list[str], everywhere: bool = True, calls: bool = True) -> Iterator[str]:
    """Yield the full names of what a module imports; ``calls`` says whether those of ``import_module`` count."""
    for node in _nodes(ast.parse(text).body, everywhere):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join([*_above(package, node.level), *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif calls and isinstance(node, ast.Call) and _name(node.func) == "import_module":
            name = _beginning(node.args[0])
            level = len(name) - len(name.lstrip("."))
            if level:
                yield ".".join([*_above(package, level), name[level:]])


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _above(package: list[str], level: int) -> list[str]:
    return package[: len(package) - level + 1] if level else []


def _beginning(name: ast.expr) -> str:
    """The text that an expression is known to begin with."""
    first = name.values[0] if isinstance(name, ast.JoinedStr) else name
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _nodes(body: list[ast.stmt], everywhere: bool) -> Iterator[ast.AST]:
    for statement in body:
        if everywhere:
            yield from ast.walk(statement)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _nodes(statement.orelse, everywhere)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
            for part in ("body", "orelse", "finalbody"):
                yield from _nodes(getattr(statement, part, []), everywhere)
            for handler in getattr(statement, "handlers", []):
                yield from _nodes(handler.body, everywhere)


def wrong(paths: Iterable[Path], is_wrong: Callable[[Path, str], object], *, everywhere: bool = True) -> list[str]:
    """Returns the imports of files that are wrong, of which there must be none."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imports(path, everywhere=everywhere)
        if is_wrong(path, name)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_downwards(folder: str) -> None:
    above = tuple(f"holdfast.{one}." for one in FOLDERS[FOLDERS.index(folder) + 1 :])
    assert sources(folder)
    assert wrong(sources(folder), lambda _, name: f"{name}.".startswith(above)) == []


def test_the_engine_names_what_is_built_on_it_in_one_table() -> None:
    """The modules of the formats, which are imported by name."""
    naming = [
        str(path.relative_to(ROOT))
        for path in sources("engine")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"\.integrations\b|^integrations\.", node.value)
    ]
    assert naming == [str(TABLE.relative_to(ROOT))]
    folder = ROOT / "integrations" / "formats"
    recognising = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in sources("integrations/formats")
        if re.search(r"^def recognise\(", path.read_text(), re.MULTILINE)
    }
    assert {entry.module for entry in discovery._FORMATS} == recognising
    assert all(find_spec(f"holdfast.integrations.formats.{module}") for module in recognising)


def unit(name: str, house: str) -> str:
    """The module or folder of a house that an imported name belongs to; "" for other names."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["holdfast", house] and len(parts) > 2 else ""


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


@pytest.mark.parametrize("house", LAYERS)
def test_every_module_has_a_layer(house: str) -> None:
    units = {unit_of(path) for path in sources(house)}
    assert units - {"__init__"} == set(LAYER[house]), "say in this file which layer it belongs to"


@pytest.mark.parametrize("house", LAYERS)
def test_layers_import_downwards(house: str) -> None:
    layer = LAYER[house]

    def is_wrong(path: Path, name: str) -> bool:
        own, other = unit_of(path), unit(name, house)
        return other not in ("", own) and (layer[other] > layer[own] or (own in PURE and other not in SHARED))

    assert wrong(sources(house), is_wrong) == []


@pytest.mark.parametrize("house", LAYERS)
def test_there_are_no_cycles(house: str) -> None:
    graph: dict[str, set[str]] = {}
    for path in sources(house):
        graph.setdefault(unit_of(path), set()).update(
            other for name in imports(path) if (other := unit(name, house)) and other != unit_of(path)
        )
    while leaves := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert graph == {}


def test_no_framework_is_loaded_by_itself() -> None:
    """Except by ``integrations/lightning``, for programs that import it."""
    paths = [path for path in (*sources("engine"), *sources("integrations")) if unit_of(path) != "lightning"]
    assert wrong(paths, lambda _, name: name.split(".")[0] in FRAMEWORKS, everywhere=False) == []


def test_pure_modules_do_no_input_or_output() -> None:
    paths = [*sources("engine/format"), *(ROOT / "engine" / "manager" / f"{name}.py" for name in POLICIES)]
    assert wrong(paths, lambda _, name: name.split(".")[0] in ("io", "pathlib", "socket", "time", "random")) == []


def modules_of(program: str) -> set[str]:
    program += "\nimport sys; print('\\n'.join(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {*finished.stdout.splitlines()}


IN_A_FOLDER = "import tempfile, holdfast as hf\nwith tempfile.TemporaryDirectory() as folder: "


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import holdfast", {"numpy", "holdfast.engine.storage", "holdfast.errors"}),
        ("import holdfast as hf; [getattr(hf, name) for name in hf.__all__]", FRAMEWORKS),
        (
            "import numpy as np, holdfast as hf, tempfile\n"
            "with tempfile.TemporaryDirectory() as directory, hf.CheckpointManager(directory) as manager:\n"
            "    manager.save(1, {'weights': np.ones(3)})\n"
            "    manager.restore()",
            FRAMEWORKS,
        ),
        (
            f"{IN_A_FOLDER} hf.list_checkpoints(folder)",
            {"numpy", "statistics", "holdfast.engine.pytree", "holdfast.engine.arrays.read"},
        ),
        (
            f"{IN_A_FOLDER} hf.save(folder + '/a', {{'step': 1}})",
            {
                "asyncio",
                "concurrent.futures",
                "email",
                "queue",
                "ssl",
                "ml_dtypes",
                "_hashlib",
                "holdfast.engine.arrays.load",
                "holdfast.engine.arrays.read",
                "holdfast.engine.manager",
                "holdfast.engine.inspection",
                "holdfast.engine.pytree.transform",
                "holdfast.engine.sources.native",
                "holdfast.engine.stateful",
            },
        ),
    ],
    ids=["import", "every name", "save and restore", "a list", "a save"],
)
def test_a_program_loads_what_it_uses(program: str, unneeded: set[str]) -> None:
    assert modules_of(program) & unneeded == set()


def listing_of(front: Path) -> Path:
    """The file with the names of a package: next to an ``__init__.py`` that loads each when it is first used."""
    stub = front.with_suffix(".pyi")
    return stub if stub.exists() else front


@pytest.mark.parametrize("stub", sorted(ROOT.glob("engine/*/__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_what_a_package_lists_is_there(stub: Path) -> None:
    package = importlib.import_module(f"holdfast.engine.{stub.parent.name}")
    names = {name.rpartition(".")[2]: name.rpartition(".")[0] for name in imports(stub)}
    assert {*package.__all__} == {*names}
    for name, module in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert not (stub.parent / f"{name}.py").exists(), "the module would take the place of what it defines"


def test_packages_are_entered_through_their_init() -> None:
    """What other packages may import is what ``__init__.py`` lists; ``formats`` is a folder of packages."""
    listed: dict[tuple[str, ...], set[str]] = {
        (house, front.parent.name): {name.rpartition(".")[2] for name in imports(listing_of(front))}
        for house in LAYERS
        for front in (ROOT / house).glob("*/__init__.py")
        if front.parent.name != "formats"
    }
    assert ("engine", "manager") in listed
    assert ("integrations", "graph") in listed

    def is_wrong(path: Path, name: str) -> bool:
        package = tuple(name.split(".")[1:3])
        inside = path.relative_to(ROOT).parts[:2] == package
        return package in listed and not inside and name.split(".")[3:] not in [[one] for one in listed[package]]

    assert wrong([path for folder in FOLDERS for path in sources(folder)], is_wrong) == []


def test_only_tests_of_the_benchmarks_import_them() -> None:
    tests = Path(__file__).parent
    importing = [
        str(path)
        for path in tests.rglob("*.py")
        if path.parent != tests / "benchmarks" and "benchmarks" in (text := path.read_text())
        if any(name.split(".")[0] == "benchmarks" for name in imported(text, ["tests"]))
    ]
    assert importing == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import os.path", "os.path"),
        ("from functools import partial", "functools.partial"),
        ("from . import listing", "holdfast.engine.folder.listing"),
        ("from ..checkpoint import Checkpointer as C", "holdfast.engine.checkpoint.Checkpointer"),
        ('importlib.import_module("..sources", __package__)', "holdfast.engine.sources"),
        ('import_module(".listing", package=__package__)', "holdfast.engine.folder.listing"),
        ('importlib.import_module(f"..{name}", __package__)', "holdfast.engine."),
        ('importlib.import_module(f"...integrations.formats.{name}", __package__)', "holdfast.integrations.formats."),
    ],
)
def test_imports_are_found(line: str, found: str) -> None:
    assert [*imported(f"def f(name):\n    {line}\n", ["holdfast", "engine", "folder"])] == [found]
