"""The page on parts of a checkpoint: its programs run as printed, the last one on object stores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents.examples import Examples
from tests.object_stores.conftest import Store

PAGE = (Path(__file__).parents[2] / "docs" / "opening.md").read_text(encoding="utf-8")


@pytest.mark.examples("docs/opening.md", "python 1", "python 2", "python 3")
def test_the_programs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = "\n".join(text for _, text in examples.items())
    exec(compile(programs, "page.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", programs)


@pytest.mark.examples("docs/opening.md", "python 4")
def test_a_row_in_an_object_store(examples: Examples, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    program = examples["python 4"].replace("s3://bucket", store.url).replace("250_000", "8_066")  # two of its chunks
    exec(compile(program, "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`" in PAGE
