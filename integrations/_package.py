"""holdfast keeps the state of training runs safe.

>>> import tempfile, numpy as np
>>> import holdfast as hf
>>> with tempfile.TemporaryDirectory() as directory:
...     report = hf.save(f"{directory}/ckpt", {"w": np.arange(3), "step": 7})
...     hf.load(f"{directory}/ckpt")
{'w': array([0, 1, 2]), 'step': 7}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("fcntl")
except ImportError:
    raise ImportError(
        "holdfast runs on Linux and macOS: this Python has no fcntl, without which files cannot be locked. On Windows, "
        "run it in WSL 2 (wsl --install), with checkpoints on the disk of Linux"
    ) from None

if TYPE_CHECKING:
    from .engine import checkpoint_utils as checkpoint_utils
    from .engine import type_handlers as type_handlers
    from .engine.api import load as load
    from .engine.api import load_transformed as load_transformed
    from .engine.api import save as save
    from .engine.arrays import AggregateHandler as AggregateHandler
    from .engine.arrays import Layout as Layout
    from .engine.arrays import MsgpackHandler as MsgpackHandler
    from .engine.arrays import Problem as Problem
    from .engine.checkpoint import AsyncCheckpointer as AsyncCheckpointer
    from .engine.checkpoint import Checkpointer as Checkpointer
    from .engine.checkpoint import PyTreeCheckpointer as PyTreeCheckpointer
    from .engine.checkpoint import SaveReport as SaveReport
    from .engine.checkpoint import check_replicas as check_replicas
    from .engine.clock import Clock as Clock
    from .engine.clock import Progress as Progress
    from .engine.clock import SystemClock as SystemClock
    from .engine.distributed import Alone as Alone
    from .engine.distributed import Coordinator as Coordinator
    from .engine.distributed import ProcessInfo as ProcessInfo
    from .engine.distributed import current_coordinator as current_coordinator
    from .engine.errors import BarrierTimeoutError as BarrierTimeoutError
    from .engine.errors import CheckpointExistsError as CheckpointExistsError
    from .engine.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from .engine.errors import DamagedCheckpointError as DamagedCheckpointError
    from .engine.errors import FormatVersionError as FormatVersionError
    from .engine.errors import HoldfastError as HoldfastError
    from .engine.errors import InvalidLocationError as InvalidLocationError
    from .engine.errors import NotAllowedError as NotAllowedError
    from .engine.errors import NoWholeCheckpointError as NoWholeCheckpointError
    from .engine.errors import ObjectNotFoundError as ObjectNotFoundError
    from .engine.errors import OptionError as OptionError
    from .engine.errors import OwnershipError as OwnershipError
    from .engine.errors import PeerFailedError as PeerFailedError
    from .engine.errors import SaveFailedError as SaveFailedError
    from .engine.errors import StateError as StateError
    from .engine.errors import StorageConflictError as StorageConflictError
    from .engine.errors import StorageError as StorageError
    from .engine.errors import StorageFullError as StorageFullError
    from .engine.errors import StoragePermissionError as StoragePermissionError
    from .engine.errors import StorageUnavailableError as StorageUnavailableError
    from .engine.errors import TreeMismatchError as TreeMismatchError
    from .engine.errors import UnknownArgumentError as UnknownArgumentError
    from .engine.errors import UnmatchedObjectsError as UnmatchedObjectsError
    from .engine.errors import UnsupportedLeafError as UnsupportedLeafError
    from .engine.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
    from .engine.handlers import ArrayRestoreArgs as ArrayRestoreArgs
    from .engine.handlers import AsyncCheckpointHandler as AsyncCheckpointHandler
    from .engine.handlers import CheckpointHandler as CheckpointHandler
    from .engine.handlers import JsonCheckpointHandler as JsonCheckpointHandler
    from .engine.handlers import ParamInfo as ParamInfo
    from .engine.handlers import PerProcessCheckpointHandler as PerProcessCheckpointHandler
    from .engine.handlers import PreparedCheckpointHandler as PreparedCheckpointHandler
    from .engine.handlers import PreparedItem as PreparedItem
    from .engine.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
    from .engine.handlers import RestoreArgs as RestoreArgs
    from .engine.handlers import SaveArgs as SaveArgs
    from .engine.handlers import SaveFuture as SaveFuture
    from .engine.handlers import TypeHandler as TypeHandler
    from .engine.handlers import TypeHandlerRegistry as TypeHandlerRegistry
    from .engine.handlers import register_type_handler as register_type_handler
    from .engine.inspection import CheckpointSummary as CheckpointSummary
    from .engine.inspection import LeafSummary as LeafSummary
    from .engine.inspection import describe as describe
    from .engine.inspection import list_checkpoints as list_checkpoints
    from .engine.manager import CheckpointManager as CheckpointManager
    from .engine.manager import CheckpointManagerOptions as CheckpointManagerOptions
    from .engine.manager import CopyReport as CopyReport
    from .engine.manager import Decision as Decision
    from .engine.manager import Mirror as Mirror
    from .engine.manager import MirrorStatus as MirrorStatus
    from .engine.manager import Peek as Peek
    from .engine.manager import Restored as Restored
    from .engine.manager import copy_checkpoint as copy_checkpoint
    from .engine.manager import event_scalars as event_scalars
    from .engine.manager import record_metrics as record_metrics
    from .engine.pytree import LeafMetadata as LeafMetadata
    from .engine.pytree import Transform as Transform
    from .engine.pytree import apply_transformations as apply_transformations
    from .engine.stateful import skip_to as skip_to
    from .engine.storage import Location as Location
    from .engine.storage import as_location as as_location
    from .engine.verification import CheckpointVerification as CheckpointVerification
    from .engine.verification import VerifyReport as VerifyReport
    from .engine.verification import verify as verify
    from .integrations.formats.convert import Conversion as Conversion
    from .integrations.formats.convert import export_checkpoint as export_checkpoint
    from .integrations.formats.convert import import_checkpoint as import_checkpoint
    from .integrations.formats.orbax.export import add_orbax_metadata as add_orbax_metadata
    from .integrations.loop import CheckpointCallback as CheckpointCallback
    from .integrations.loop import StepOutcome as StepOutcome

# Loaded when first asked for, so that importing the package costs next to nothing.
_HOMES = {
    "engine.api": "load load_transformed save",
    "engine.arrays": "AggregateHandler Layout MsgpackHandler Problem",
    "engine.checkpoint": "AsyncCheckpointer Checkpointer PyTreeCheckpointer SaveReport check_replicas",
    "engine.clock": "Clock Progress SystemClock",
    "engine.distributed": "Alone Coordinator ProcessInfo current_coordinator",
    "engine.errors": """
        BarrierTimeoutError CheckpointExistsError CheckpointNotFoundError DamagedCheckpointError FormatVersionError
        HoldfastError InvalidLocationError NoWholeCheckpointError NotAllowedError ObjectNotFoundError OptionError
        OwnershipError PeerFailedError SaveFailedError StateError StorageConflictError StorageError StorageFullError
        StoragePermissionError StorageUnavailableError TreeMismatchError UnknownArgumentError UnmatchedObjectsError
        UnsupportedLeafError
    """,
    "engine.handlers": """
        ArrayCheckpointHandler ArrayRestoreArgs AsyncCheckpointHandler CheckpointHandler JsonCheckpointHandler
        ParamInfo PerProcessCheckpointHandler PreparedCheckpointHandler PreparedItem PyTreeCheckpointHandler
        RestoreArgs SaveArgs SaveFuture TypeHandler TypeHandlerRegistry register_type_handler
    """,
    "engine.inspection": "CheckpointSummary LeafSummary describe list_checkpoints",
    "engine.manager": """
        CheckpointManager CheckpointManagerOptions CopyReport Decision Mirror MirrorStatus Peek Restored
        copy_checkpoint event_scalars record_metrics
    """,
    "engine.pytree": "LeafMetadata Transform apply_transformations",
    "engine.stateful": "skip_to",
    "engine.storage": "Location as_location",
    "engine.verification": "CheckpointVerification VerifyReport verify",
    "integrations.formats.convert": "Conversion export_checkpoint import_checkpoint",
    "integrations.formats.orbax.export": "add_orbax_metadata",
    "integrations.loop": "CheckpointCallback StepOutcome",
}
_FRONTS = ("components", "graph")  # modules with names of their own, found without an import of their own
_SUBMODULES = ("checkpoint_utils", "type_handlers")
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted([*_MODULES, *_SUBMODULES])  # noqa: PLE0605 - a list, made of the table above


def __getattr__(name: str) -> Any:
    if name in _FRONTS:
        return importlib.import_module(f".{name}", __name__)
    module = _MODULES.get(name)
    if name in _SUBMODULES:
        value: Any = importlib.import_module(f".engine.{name}", __name__)
    elif module is not None:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
