"""Save graphs of live objects and restore them by name, either immediately or as objects are attached."""

from __future__ import annotations

from .checkpoint import Checkpoint, snapshot
from .frameworks import (
    OPTIMIZER_SLOTS,
    OptionSlot,
    accumulated,
    is_module,
    keras_kind,
    nnx_children,
    set_accumulated,
)
from .fresh import FreshObjects
from .manager import CheckpointManager
from .outside import derived_classes, is_actor_class, is_kin, unwrapped
from .reader import CheckpointReader, GraphView, checkpoints_iterator, latest_checkpoint, load_checkpoint
from .restoration import Restoration, RestoreReport, RestoreStatus
from .saved import as_list, current_name
from .slots import Path, format_node_path, parse_path, storage_name
from .stored import GraphCheckpointHandler, StoredGraph, capture
from .tracked import Node, Part, TrackedDict, TrackedList, Untracked, Value, stand_for, tracked_attributes
from .walk import LiveGraph, LiveNode, walk
