"""Object checkpoints: attach objects to a checkpoint, save it, build new objects, and restore them by name.

>>> import tempfile
>>> from holdfast import graph
>>> with tempfile.TemporaryDirectory() as directory:
...     path = graph.Checkpoint(step=7).save(f"{directory}/ckpt")
...     checkpoint = graph.Checkpoint(step=0)
...     _ = checkpoint.restore(path).assert_consumed()
>>> checkpoint.step
7
"""

from .integrations.graph import (
    Checkpoint,
    CheckpointManager,
    CheckpointReader,
    GraphView,
    Node,
    RestoreReport,
    RestoreStatus,
    TrackedDict,
    TrackedList,
    Untracked,
    Value,
    checkpoints_iterator,
    latest_checkpoint,
    load_checkpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointReader",
    "GraphView",
    "Node",
    "RestoreReport",
    "RestoreStatus",
    "TrackedDict",
    "TrackedList",
    "Untracked",
    "Value",
    "checkpoints_iterator",
    "latest_checkpoint",
    "load_checkpoint",
]
