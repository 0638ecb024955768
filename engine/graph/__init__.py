"""Graphs of live objects: walked by named edges, saved as trees, and restored by name, at once or later."""

from __future__ import annotations

from .capture import CapturedGraph, capture
from .checkpoint import Checkpoint
from .latest import checkpoints_iterator, latest_checkpoint
from .manager import CheckpointManager
from .paths import Path, PathFilter, Patterns, parse_path, shown, storage_name
from .reader import CheckpointReader, GraphView, load_checkpoint
from .report import RestoreReport
from .restoration import Restoration
from .saved import Rename, SavedGraph, SavedNode
from .status import RestoreStatus
from .stored import GraphCheckpointHandler, StoredGraph, open_graph
from .tracked import Node, TrackedDict, TrackedList, Untracked, Value
from .walk import LiveGraph, LiveNode, walk

__all__ = [
    "CapturedGraph",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointReader",
    "GraphCheckpointHandler",
    "GraphView",
    "LiveGraph",
    "LiveNode",
    "Node",
    "Path",
    "PathFilter",
    "Patterns",
    "Rename",
    "Restoration",
    "RestoreReport",
    "RestoreStatus",
    "SavedGraph",
    "SavedNode",
    "StoredGraph",
    "TrackedDict",
    "TrackedList",
    "Untracked",
    "Value",
    "capture",
    "checkpoints_iterator",
    "latest_checkpoint",
    "load_checkpoint",
    "open_graph",
    "parse_path",
    "shown",
    "storage_name",
    "walk",
]
