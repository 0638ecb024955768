"""What is in an item, and how it gets into its folder and out again."""

from __future__ import annotations

from .base import AsyncCheckpointHandler, CheckpointHandler, PreparedCheckpointHandler, restore_item
from .json import JsonCheckpointHandler
from .pytree import PyTreeCheckpointHandler
from .saves import Files, PreparedItem, SaveFuture, finish, run_coroutine, write_alone

__all__ = [
    "AsyncCheckpointHandler",
    "CheckpointHandler",
    "Files",
    "JsonCheckpointHandler",
    "PreparedCheckpointHandler",
    "PreparedItem",
    "PyTreeCheckpointHandler",
    "SaveFuture",
    "finish",
    "restore_item",
    "run_coroutine",
    "write_alone",
]
