"""Saves trees in memory, to be loaded again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf


@pytest.fixture
def save(place: str) -> Callable[[Any], SimpleNamespace]:
    """Saves a tree; ``save(tree).load()`` loads it, with the options of `hf.load`."""
    numbers = itertools.count()

    def save_tree(tree: Any) -> SimpleNamespace:
        url = f"{place}/{next(numbers)}"
        hf.save(url, tree)
        return SimpleNamespace(load=partial(hf.load, url))

    return save_tree
