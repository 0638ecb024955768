"""The page on object stores: its program runs as printed, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents.examples import Examples
from tests.object_stores.conftest import Store

import holdfast as hf
from holdfast.engine.storage import object_store
from holdfast.engine.storage.parallel import REQUESTS, UPLOADS

PAGE = (Path(__file__).parents[2] / "docs" / "object_stores.md").read_text(encoding="utf-8")


@pytest.mark.examples("docs/object_stores.md", "python 1")
def test_the_program(examples: Examples, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples["python 1"].replace("s3://bucket", store.url), "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in PAGE


@pytest.mark.examples("docs/object_stores.md", "python 2")
def test_a_file_system_of_fsspec(examples: Examples, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples["python 2"], "page.py", "exec"), {"__name__": "__main__", "hf": hf})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in PAGE


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
def test_its_numbers(said: str) -> None:
    assert said in re.sub(r"\s+", " ", PAGE)
