"""Processes of one machine that read the same bytes share the page cache; parts, and a process alone, go past it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes

import holdfast as hf


def modes_of_loads(process: Process, directory: str, local: str | None) -> list[list[bool]]:
    """Whether the data files were opened for direct I/O: in a load of everything, and in one of a part."""
    if local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local
    opened: list[bool] = []
    real = os.open

    def note(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".0.0"):
            opened.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest, **options)

    os.open = note
    try:
        found = []
        for select in (None, {"w": np.s_[:1]}):
            opened.clear()
            hf.load(directory, select=select)
            found.append(list(opened))
        return found
    finally:
        os.open = real


@pytest.mark.parametrize(
    ("backend", "count", "local", "whole"),
    [("torch", 2, None, False), ("jax", 2, None, False), ("torch", 2, "1", True), ("none", 1, None, True)],
)
def test_what_goes_through_the_page_cache(
    tmp_path: Path, backend: Backend, count: int, local: str | None, whole: bool
) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(4096.0).reshape(64, 64)}, layout=hf.Layout(chunk_bytes=4096))
    found = run_processes(modes_of_loads, count, str(tmp_path / "ckpt"), local, backend=backend)
    assert found == [[[whole], [True]]] * count
