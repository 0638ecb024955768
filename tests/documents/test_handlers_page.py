"""The examples of docs/handlers.md, one after the other, as they are printed; twice, as a program is run again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.handlers import DEFAULT_REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "handlers.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAMS) == 4
    for _ in range(2):
        names: dict[str, Any] = {}
        try:
            for program in PROGRAMS:
                exec(compile(program, PAGE.name, "exec"), names)
        finally:
            DEFAULT_REGISTRY.unregister(names.get("Table", object))
    assert (tmp_path / "runs" / "leaves" / "run" / "1" / "checkpoint.json").exists()
