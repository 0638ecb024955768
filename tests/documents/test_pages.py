"""Pages whose every program, file and command runs, in the order of the page, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents.pages import DOCS, run_page

FOLDERS = ("trouble", "migrate")
PAGES = ["index.md", "tutorial.md", "which_interface.md", "how_it_works.md", "file_format.md", "events.md"]
PAGES += sorted(path.relative_to(DOCS).as_posix() for folder in FOLDERS for path in (DOCS / folder).glob("*.md"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if (DOCS / page).exists()])
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_page(page, folder)


def test_every_page_with_programs_is_run_by_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in DOCS.parent.joinpath("tests").rglob("*.py")
        if path != Path(__file__)
    )
    for path in DOCS.rglob("*.md"):
        if re.search(r"^ *```python", path.read_text(encoding="utf-8"), re.MULTILINE):
            name = path.relative_to(DOCS).as_posix()
            assert name in PAGES or re.search(rf'["/]{re.escape(path.name)}"', tests), f"add {name} to PAGES"
