"""Pages whose every program, file and command runs: in the order of the page, or, in How do I, each program alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tests.documents.examples import ALONE, LANGUAGES, blocks_of, declared, missing
from tests.documents.pages import DOCS, run_page

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

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


@pytest.mark.xdist_group("programs")
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


# ---- How do I

SNIPPETS = [(page, block.name) for page in ALONE for block in blocks_of(page) if block.language == "python"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("page", "name"), SNIPPETS)
def test_a_snippet_runs_alone(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in blocks_of(page) if block.name == name]
    try:
        exec(compile("\n" * block.line + block.text, page, "exec", dont_inherit=True), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"status {end.code}") from end


def test_the_arguments_in_the_table_are_there() -> None:
    text = (DOCS / "migrate" / "model_checkpoint.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`(\w+)=", "".join(rows)))
    assert named >= {"best_fn", "save_on_best"}
    assert named <= set(inspect.signature(CheckpointCallback).parameters)


def test_a_renamed_step_is_named(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(300, {"x": 1})
    (tmp_path / "300").rename(tmp_path / "400")
    with pytest.raises(hf.DamagedCheckpointError, match=r"for step 300, .* step 400; give the step its name back"):
        hf.load(tmp_path)
    assert hf.load(tmp_path / "400") == {"x": 1}
