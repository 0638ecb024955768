"""Item handlers: how one checkpoint item, such as a tree or a JSON document, is written and read.

Your own handler derives from one of the base classes here. Handlers for individual leaves are in
`holdfast.type_handlers`.
"""

from .engine.handlers import (
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    CheckpointHandler,
    JsonCheckpointHandler,
    PerProcessCheckpointHandler,
    PreparedCheckpointHandler,
    PreparedItem,
    PyTreeCheckpointHandler,
    SaveFuture,
)

__all__ = [
    "ArrayCheckpointHandler",
    "AsyncCheckpointHandler",
    "CheckpointHandler",
    "JsonCheckpointHandler",
    "PerProcessCheckpointHandler",
    "PreparedCheckpointHandler",
    "PreparedItem",
    "PyTreeCheckpointHandler",
    "SaveFuture",
]
