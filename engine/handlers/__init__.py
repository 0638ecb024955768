"""What is in an item, and how it gets into its folder and out again."""

from __future__ import annotations

from .args import ArrayRestoreArgs, RestoreArgs, SaveArgs
from .array import ArrayCheckpointHandler
from .base import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    PreparedCheckpointHandler,
    has_structure,
    item_structure,
    restore_item,
)
from .json import JsonCheckpointHandler
from .per_process import PerProcessCheckpointHandler, ProcessShare, own_share
from .pytree import PyTreeCheckpointHandler
from .saves import Files, PreparedItem, SaveFuture, finish, run_coroutine, write_alone
from .type_handlers import DEFAULT_REGISTRY, ParamInfo, TypeHandler, TypeHandlerRegistry, register_type_handler

__all__ = [
    "DEFAULT_REGISTRY",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "CheckpointHandler",
    "Files",
    "JsonCheckpointHandler",
    "ParamInfo",
    "PerProcessCheckpointHandler",
    "PreparedCheckpointHandler",
    "PreparedItem",
    "ProcessShare",
    "PyTreeCheckpointHandler",
    "RestoreArgs",
    "SaveArgs",
    "SaveFuture",
    "TypeHandler",
    "TypeHandlerRegistry",
    "finish",
    "has_structure",
    "item_structure",
    "own_share",
    "register_type_handler",
    "restore_item",
    "run_coroutine",
    "write_alone",
]
