"""Pages whose every program, file and command runs, in the order of the page, and prints what the page says."""

from __future__ import annotations

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
