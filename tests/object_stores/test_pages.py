"""The pages on object stores and on parts of a checkpoint: programs run as printed, numbers are those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.documents.examples import Examples
from tests.object_stores.conftest import Store

import holdfast as hf
from holdfast.engine.storage import object_store
from holdfast.engine.storage.parallel import REQUESTS, UPLOADS

DOCS = Path(__file__).parents[2] / "docs"
STORES, OPENING = ((DOCS / name).read_text(encoding="utf-8") for name in ("object_stores.md", "opening.md"))


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program as printed, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, **names: Any) -> str:
        exec(compile(program, "page.py", "exec"), {"__name__": "__main__", **names})
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.examples("docs/object_stores.md", "python 1")
def test_a_program_for_a_store(examples: Examples, store: Store, printed: Callable[..., str]) -> None:
    assert f"This prints `{printed(examples['python 1'].replace('s3://bucket', store.url))}`." in STORES


@pytest.mark.examples("docs/object_stores.md", "python 2")
def test_a_file_system_of_fsspec(examples: Examples, printed: Callable[..., str]) -> None:
    assert f"This prints `{printed(examples['python 2'], hf=hf)}`." in STORES


@pytest.mark.parametrize(
    "said",
    [
        f"tried {object_store.RETRIES} times",
        f"After {object_store.WARN_AFTER:.0f} s the log",
        f"after {object_store.REQUEST_TIMEOUT / 60:.0f} minutes",
        f"{(1 << 20) / object_store.SLOWEST:.0f} s for each MiB",
        f"up to {hf.Layout().upload_bytes >> 20} MiB",
        f"{UPLOADS} are uploaded, and {REQUESTS} ranges",
    ],
)
def test_numbers(said: str) -> None:
    assert said in re.sub(r"\s+", " ", STORES)


@pytest.mark.examples("docs/opening.md", "python 1", "python 2", "python 4", "python 5", "python 6")
def test_parts_of_a_checkpoint(examples: Examples, printed: Callable[..., str]) -> None:
    programs = "\n".join(text for _, text in examples.items())
    assert printed(programs).splitlines() == re.findall(r"print\(.*\)  # (.*)", programs)


@pytest.mark.examples("docs/opening.md", "python 3")
def test_dask(examples: Examples, printed: Callable[..., str]) -> None:
    program = examples["python 3"]
    pytest.importorskip("dask.array")
    table = np.arange(1_000_000, dtype=np.float32).reshape(10_000, 100)
    hf.save("model", {"embedding": table})
    assert printed(program, hf=hf, table=table).splitlines() == re.findall(r"print\(.*\)  # (.*)", program)


@pytest.mark.examples("docs/opening.md", "python 7")
def test_a_row_in_an_object_store(examples: Examples, store: Store, printed: Callable[..., str]) -> None:
    program = examples["python 7"].replace("s3://bucket", store.url).replace("250_000", "8_066")  # two of its chunks
    assert f"This prints `{printed(program)}`" in OPENING
