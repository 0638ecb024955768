"""Handlers: how an item of a checkpoint is written and read."""

from __future__ import annotations

from .args import ArrayRestoreArgs, RestoreArgs, SaveArgs, broadcast_prefix
from .base import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    Files,
    JsonCheckpointHandler,
    PreparedCheckpointHandler,
    PreparedItem,
    SaveFuture,
    SizedItem,
    finish,
    has_structure,
    refuse_arguments,
    run_coroutine,
    write_alone,
    write_archive,
)
from .per_process import PerProcessCheckpointHandler, ProcessShare, SavedShares, own_share
from .pytree import ArrayCheckpointHandler, PyTreeCheckpointHandler, check_savable, flat_template, fresh_types
from .registry import (
    DEFAULT_REGISTRY,
    ParamInfo,
    TypeHandler,
    TypeHandlerRegistry,
    register_type_handler,
    restore_external,
)
