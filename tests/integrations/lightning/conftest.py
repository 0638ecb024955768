"""The program that the Lightning tests run."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).with_name("program.py")

_count = itertools.count()


@pytest.fixture(scope="session")
def program() -> ModuleType:
    """The module ``program.py``."""
    spec = importlib.util.spec_from_file_location("holdfast_lightning_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def new_directory() -> Callable[[], str]:
    """Makes names of directories that do not exist yet, in memory, where a save takes milliseconds."""
    return lambda: f"memory://lightning-tests/{next(_count)}"
