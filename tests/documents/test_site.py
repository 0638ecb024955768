"""The site: every page has its place in the navigation, every public name its entry, and what is generated is right."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from docs.tools import drawings, prepare, runtime
from ruamel.yaml import YAML

import holdfast
from holdfast.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
SITE: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def places(entries: list[Any]) -> list[str]:
    """The files that a navigation names."""
    found = []
    for entry in entries:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += [target] if isinstance(target, str) else places(target)
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    prepare.prepare(folder)
    return folder


def test_every_page_has_its_place_in_the_navigation(pages: Path) -> None:
    files = sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    assert sorted(places(SITE["nav"])) == files, "mkdocs.yml lists all pages, each once"


def test_every_public_name_has_an_entry(pages: Path) -> None:
    text = "".join(path.read_text() for path in (pages / "reference" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)) | set(re.findall(r"^`([\w.]+)` is \[", text, re.M))
    modules = prepare.public_modules()
    own = [name for name in holdfast.__all__ if inspect.ismodule(getattr(holdfast, name))]
    frameworks = ["integrations.flax", "integrations.lightning"]
    assert {f"holdfast.{name}" for name in [*own, *frameworks, "recipes"]} <= set(modules)
    for module in modules:
        assert module == "holdfast" or f"## {module}\n" in text
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            assert full in entries or full in modules, f"{full} is on no page of the reference"


def test_a_name_of_an_unknown_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast.save, "__module__", "holdfast.engine.elsewhere")
    with pytest.raises(LookupError, match=r"holdfast\.save comes from holdfast\.engine\.elsewhere: add that"):
        prepare.api_pages()


def test_every_command_and_option_is_there(pages: Path) -> None:
    text = (pages / "reference" / "commands.md").read_text()
    assert set(re.findall(r"^## holdfast (\w+)$", text, re.MULTILINE)) == set(COMMANDS)
    options = set(re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE))
    assert {"--max-to-keep", "--other-step", "--hang-timeout", "--in-place"} <= options
    assert "holdfast run [OPTION]... CONFIG [KEY=VALUE]..." in text


def test_every_key_of_every_recipe_is_there(pages: Path) -> None:
    from holdfast.cli.recipes import _keys
    from holdfast.recipes.registry import RECIPES

    text = (pages / "reference" / "yaml_keys.md").read_text()
    documented = set(re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE))
    for recipe in RECIPES.values():
        assert {key["key"] for key in _keys(recipe.schema.model_construct())} <= documented
    assert "| `checkpoint.mirror.max_bandwidth` |" in text
    assert "| `seed` | integer at least 0 below 4294967296 | `0` |" in text
    assert "| `model.hidden` | list of integer above 0 | `[128, 128]` |" in text


def test_the_events_on_the_page_are_those_of_the_code() -> None:
    files = [path for folder in ("engine", "integrations", "cli") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    written = re.findall(r'(?:(?:self|events)\.write|_tell_run)\(\s*"(\w+)"|"event": "(ended)"', code)
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    # One call chooses between two names.
    assert {*listed} == {name or ended for name, ended in written} | {"finished"}


def test_docstrings_become_markdown() -> None:
    assert doctest.testmod(runtime).failed == 0
    assert doctest.testmod(runtime).attempted > 0


def test_drawings_are_complete() -> None:
    files = drawings.files()
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in (make.__name__ for make in drawings.DRAWINGS):
        light, dark = (files[f"{name}.{scheme}.svg"] for scheme in ("light", "dark"))
        assert light != dark
        assert len({"".join(ElementTree.fromstring(one).itertext()) for one in (light, dark)}) == 1, "the same texts"
        for scheme in ("light", "dark"):
            assert f"drawings/{name}.{scheme}.svg#only-{scheme}" in pages
            committed = (ROOT / "docs" / "drawings" / f"{name}.{scheme}.svg").read_text(encoding="utf-8")
            assert committed == files[f"{name}.{scheme}.svg"], "python -m docs.tools.drawings writes them"


def test_the_site_asks_no_other_server_and_addresses_are_set_in_one_place(pages: Path) -> None:
    """In ``pyproject.toml``, which has none until there is a publication; no page has another."""
    assert SITE["theme"]["font"] is False
    assert [next(iter(one)) if isinstance(one, dict) else one for one in SITE["plugins"]] == ["search", "mkdocstrings"]
    assert not {"hooks", "extra_javascript", "site_url", "repo_url"} & SITE.keys()
    if not prepare.PROJECT["urls"]:
        assert "github.com/holdfast" not in "".join(path.read_text() for path in pages.rglob("*.md"))


PAGES = sorted((ROOT / "docs").rglob("*.md")) + [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_work_in_the_repository(page: Path) -> None:
    """They are relative, and lead to files and headings that are there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        address, _, anchor = link.partition("#")
        if address.startswith(("http:", "https:")):
            continue
        target = page.parent / address if address else page
        assert target.exists(), link
        if anchor and not anchor.startswith("only-"):
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            plain = [re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower() for heading in headings]
            assert anchor in [heading.replace(" ", "-") for heading in plain], link
