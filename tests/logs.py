"""Logging as in a program that does not mention it."""

from __future__ import annotations

import logging

import pytest


def unconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take off the handlers of pytest and all levels, for the rest of the test."""
    for logger in (logging.getLogger(), logging.getLogger("holdfast")):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logging.WARNING if logger.parent is None else logging.NOTSET)
    logging.getLogger("holdfast").manager._clear_cache()  # type: ignore[attr-defined] # levels are cached
