"""Handlers: how one item of a checkpoint, such as a tree or a JSON document, is written and read.

Your own handler derives from one of the base classes here. Handlers of single leaves are in
`holdfast.type_handlers`.
"""

from .engine.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from .engine.handlers import AsyncCheckpointHandler as AsyncCheckpointHandler
from .engine.handlers import CheckpointHandler as CheckpointHandler
from .engine.handlers import JsonCheckpointHandler as JsonCheckpointHandler
from .engine.handlers import PerProcessCheckpointHandler as PerProcessCheckpointHandler
from .engine.handlers import PreparedCheckpointHandler as PreparedCheckpointHandler
from .engine.handlers import PreparedItem as PreparedItem
from .engine.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from .engine.handlers import SaveFuture as SaveFuture

__all__ = [name for name in dir() if not name.startswith("_")]
