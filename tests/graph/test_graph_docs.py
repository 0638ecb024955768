"""Every example of the page about graphs runs as it is printed."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [
    "\n" * TEXT.count("\n", 0, found.start(1)) + found[1]  # so that errors name the page's lines
    for found in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
]


@pytest.mark.needs("flax", "0.11")
def test_the_page_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thirty saves would wait for the disk
    names: dict[str, Any] = {"__name__": "page"}
    assert len(BLOCKS) >= 15
    with caplog.at_level(logging.WARNING, "holdfast"):
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "Initializing from scratch." in printed
    assert re.search(r"Restored from .*torch_ckpts/ckpt-5", printed)
    assert re.search(r"Saved checkpoint for step 100: .*torch_ckpts/ckpt-10", printed)
