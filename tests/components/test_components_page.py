"""The examples of docs/components.md, one after the other, as they are printed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "components.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page_about_components")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # the module that its classes are in
    assert len(PROGRAMS) == 12
    for program in PROGRAMS:
        exec(compile(program, PAGE.name, "exec"), vars(module))
    assert (tmp_path / "runs" / "two_policies" / "learner" / "policies" / "p1" / "metadata.json").exists()
