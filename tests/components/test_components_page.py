"""The examples of docs/components.md, one after the other, as they are printed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from tests.documents.examples import Examples


@pytest.mark.examples("docs/components.md")
def test_the_examples_run(examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page_about_components")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # the module that its classes are in
    examples.run(vars(module))
    assert (tmp_path / "runs" / "two_policies" / "learner" / "policies" / "p1" / "metadata.json").exists()
