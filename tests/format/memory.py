"""Bounds on the memory that a block of a test takes."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def at_most(allowed: int = 4 << 20) -> Iterator[None]:
    """Asserts that the block needs less memory than this, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < allowed
    finally:
        tracemalloc.stop()
