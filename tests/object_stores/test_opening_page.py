"""The page on parts of a checkpoint: its programs run as printed, the last one on object stores."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.documents.examples import Examples
from tests.object_stores.conftest import Store

import holdfast as hf

PAGE = (Path(__file__).parents[2] / "docs" / "opening.md").read_text(encoding="utf-8")


@pytest.mark.examples("docs/opening.md", "python 1", "python 2", "python 4", "python 5", "python 6")
def test_the_programs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = "\n".join(text for _, text in examples.items())
    exec(compile(programs, "page.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", programs)


@pytest.mark.examples("docs/opening.md", "python 3")
def test_dask(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = examples["python 3"]
    pytest.importorskip("dask.array")
    monkeypatch.chdir(tmp_path)
    table = np.arange(1_000_000, dtype=np.float32).reshape(10_000, 100)
    hf.save("model", {"embedding": table})
    exec(compile(program, "page.py", "exec"), {"hf": hf, "table": table})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", program)


@pytest.mark.examples("docs/opening.md", "python 7")
def test_a_row_in_an_object_store(examples: Examples, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    program = examples["python 7"].replace("s3://bucket", store.url).replace("250_000", "8_066")  # two of its chunks
    exec(compile(program, "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`" in PAGE
