"""Every example of the page about graphs runs as it is printed."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
from tests.documents.examples import Examples

from holdfast import graph


@pytest.mark.needs("flax", "0.11")
@pytest.mark.examples("docs/graphs.md")
def test_the_page_runs(
    examples: Examples,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thirty saves would wait for the disk
    with caplog.at_level(logging.WARNING, "holdfast"):
        examples.run({"__name__": "page"})
    printed = capsys.readouterr().out
    assert "Initializing from scratch." in printed
    assert re.search(r"Restored from .*torch_ckpts/ckpt-5", printed)
    assert re.search(r"Saved checkpoint for step 100: .*torch_ckpts/ckpt-10", printed)


def test_the_names_for_users_of_tensorflow_exist() -> None:
    page = (Path(__file__).parents[2] / "docs/migrate/tf_train_checkpoint.md").read_text()
    names = set(re.findall(r"\bgraph\.([A-Za-z_]+)", page))
    assert len(names) >= 9
    assert names <= set(graph.__all__)
