"""Every example of the page about TensorFlow's checkpoints runs as it is printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tensorflow_checkpoints.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [
    "\n" * TEXT.count("\n", 0, found.start(1)) + found[1]  # so that errors name the page's lines
    for found in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(Path(__file__).parent / "tensorflow" / "guide", tmp_path / "tf_ckpts")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("[4.2")
    assert "] 51\n" in printed
