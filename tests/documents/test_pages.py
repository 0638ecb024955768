"""Pages whose every program, file and command runs, in the order of the page, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documents.examples import ALONE, LANGUAGES, blocks_of, declared, missing
from tests.documents.pages import DOCS, run_page

pytestmark = pytest.mark.xdist_group("programs")

FOLDERS = ("trouble", "migrate")
PAGES = [
    "index.md",
    "tutorial.md",
    "first_torch.md",
    "which_interface.md",
    "how_it_works.md",
    "file_format.md",
    "events.md",
    "exact_resume.md",
    "aggregates.md",
]
PAGES += sorted(path.relative_to(DOCS).as_posix() for folder in FOLDERS for path in (DOCS / folder).glob("*.md"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if (DOCS / page).exists()])
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_page(page, folder)


def test_every_example_is_run_by_a_test() -> None:
    """A new example belongs to a page of the list above or of ``ALONE``, or to a test that declares it."""
    done = {f"docs/{page}": {block.name for block in blocks_of(f"docs/{page}")} for page in PAGES}
    done |= {page: {block.name for block in blocks_of(page) if block.language == "python"} for page in ALONE}
    for _, page, names in declared():
        done.setdefault(page, set()).update(names or (block.name for block in blocks_of(page)))
    kinds = {page: {name for name in names if name.split()[0] in LANGUAGES} for page, names in done.items()}
    assert missing(kinds) == []


def test_an_example_that_no_test_runs_is_found() -> None:
    assert missing({})[0].startswith("CONTRIBUTING.md:5: no test runs console 1: $ make test")
    assert "README.md has no example python 9" in missing({"README.md": {"python 9"}})
