"""The examples of docs/handlers.md, one after the other, as they are printed; twice, as a program is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.documents.examples import Examples

from holdfast.engine.handlers import DEFAULT_REGISTRY


@pytest.mark.examples("docs/handlers.md")
def test_the_examples_run(examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        names: dict[str, Any] = {}
        try:
            examples.run(names)
        finally:
            DEFAULT_REGISTRY.unregister(names.get("Table", object))
    assert (tmp_path / "runs" / "leaves" / "run" / "1" / "checkpoint.json").exists()
