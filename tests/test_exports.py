"""What ``import holdfast`` offers."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf


def test_the_names_of_the_package() -> None:
    """They are few, sorted and importable, and leave those of Python."""
    assert list(hf.__all__) == sorted(set(hf.__all__))
    assert len(hf.__all__) <= 56
    for name in hf.__all__:
        assert getattr(hf, name).__name__.rpartition(".")[2] == name
    assert set(hf.__all__) <= set(dir(hf))
    assert not hasattr(hf, "no_such_name")
    names: dict[str, Any] = {}
    exec("from holdfast import *", names)
    assert not names.keys() & vars(builtins).keys()
    assert callable(hf.open)


def test_all_is_what_type_checkers_see() -> None:
    stub = Path(inspect.getsourcefile(hf) or "").with_suffix(".pyi")
    homes = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "only `x as x` is exported"
                homes[alias.name] = "holdfast." + (node.module or alias.name)
    assert sorted(homes) == sorted([*hf.__all__, "open"])  # which would replace the one of Python
    for name, module in homes.items():
        assert getattr(hf, name) in (
            importlib.import_module(module),
            getattr(importlib.import_module(module), name, None),
        )


MODULES = [name for name in hf.__all__ if inspect.ismodule(getattr(hf, name))]


@pytest.mark.parametrize("module", MODULES)
def test_modules_list_their_names(module: str) -> None:
    public = getattr(hf, module)
    assert public.__name__ == f"holdfast.{module}"
    assert sorted(public.__all__) == sorted(set(public.__all__))
    own = {name for name, value in vars(public).items() if getattr(value, "__module__", None) == public.__name__}
    assert {name for name in own if not name.startswith("_")} <= set(public.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "holdfast",
        *(f"holdfast.{name}" for name in MODULES),
        "holdfast.integrations.flax",
        "holdfast.integrations.lightning",
        "holdfast.integrations.ray",
    ],
)
def test_public_names_are_documented(module: str) -> None:
    """Every public name, every public method, and every argument of a public function; ruff asks only for modules."""
    missing = []
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        if inspect.isclass(thing):
            methods = [one for one, value in vars(thing).items() if not one.startswith("_") and _is_code(value)]
            missing += [f"{name}.{one}" for one in methods if not inspect.getdoc(getattr(thing, one))]
        elif inspect.isfunction(thing):
            text = inspect.getdoc(thing) or ""
            taken = [one for one in inspect.signature(thing).parameters if one != "unknown"]  # those are errors
            missing += [f"{name}({one})" for one in taken if f"{one}:" not in text]
        if not inspect.getdoc(thing):
            missing.append(name)
    assert missing == []


def _is_code(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


@pytest.mark.parametrize("name", ["StorageFullError", "TypeHandler", "Alone", "SaveReport", "Restored"])
def test_a_name_of_a_module_is_pointed_out(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; it is holdfast\.\w+\.{name}$") as caught:
        getattr(hf, name)
    inner = str(caught.value).split(".")[-2]
    assert name in getattr(hf, inner).__all__


@pytest.mark.parametrize("source", ["engine/api.py", "integrations/loop/callback.py"])
def test_editors_show_the_documentation_of_each_overload(source: str) -> None:
    tree = ast.parse((Path(hf.__path__[0]) / source).read_text())
    overloads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("overload" in ast.dump(one) for one in node.decorator_list)
    ]
    assert len(overloads) >= 2
    assert [node.lineno for node in overloads if ast.get_docstring(node) is None] == []


def test_editors_show_public_names_only() -> None:
    """As they list what the module imports, names of other packages included."""
    tree = ast.parse((Path(hf.__path__[0]) / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names} - {"__version__"}
    assert [name for name in sorted(names) if not name.startswith("_")] == []


@pytest.mark.parametrize(
    ("name", "meant"), [("args", "without args"), ("StandardCheckpointer", "hf.save"), ("save_pytree", "hf.save")]
)
def test_a_name_of_orbax_is_explained(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': .*{re.escape(meant)}"):
        getattr(hf, name)
    for statement in (f"from holdfast import {name}", f"import holdfast.{name}", f"from holdfast.{name} import x"):
        with pytest.raises(ModuleNotFoundError, match=rf"'holdfast.{name}': .*{re.escape(meant)}"):
            exec(statement)
    assert importlib.util.find_spec("holdfast.nothing") is None


def test_arguments_of_orbax_are_explained(tmp_path: Path) -> None:
    public: Any = hf
    with pytest.raises(hf.errors.UnknownArgumentError, match="abstract_state: here it is like"):
        public.load(tmp_path, abstract_state={})
    with pytest.raises(hf.errors.UnknownArgumentError, match="args: pass the tree itself"):
        public.save(tmp_path, {}, args={})


def test_errors_are_all_exported() -> None:
    from holdfast.engine import errors

    found = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert found == set(hf.errors.__all__)
    assert {"HoldfastError", "CheckpointNotFoundError", "DamagedCheckpointError"} <= set(hf.__all__)
    assert all(issubclass(getattr(errors, name), errors.HoldfastError) for name in found)
    assert {name for name in found if name in (errors.__doc__ or "")} == found


@pytest.mark.parametrize(("name", "meant"), [("CheckpointMangaer", "CheckpointManager"), ("lod", "load")])
def test_a_traceback_suggests_the_closest_name(name: str, meant: str) -> None:
    command = [sys.executable, "-c", f"import holdfast\nholdfast.{name}"]
    last_line = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()[-1]
    assert last_line.startswith(f"AttributeError: module 'holdfast' has no attribute '{name}'")
    assert last_line.endswith(f"Did you mean: '{meant}'?")
