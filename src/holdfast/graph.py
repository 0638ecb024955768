"""Checkpoints of objects: attach objects to a checkpoint, save it, build new objects, and restore them by name.

>>> import tempfile
>>> from holdfast import graph
>>> with tempfile.TemporaryDirectory() as directory:
...     path = graph.Checkpoint(step=7).save(f"{directory}/ckpt")
...     checkpoint = graph.Checkpoint(step=0)
...     _ = checkpoint.restore(path).assert_consumed()
>>> checkpoint.step
7
"""

from .integrations.graph import Checkpoint as Checkpoint
from .integrations.graph import CheckpointManager as CheckpointManager
from .integrations.graph import CheckpointReader as CheckpointReader
from .integrations.graph import GraphView as GraphView
from .integrations.graph import Node as Node
from .integrations.graph import RestoreReport as RestoreReport
from .integrations.graph import RestoreStatus as RestoreStatus
from .integrations.graph import TrackedDict as TrackedDict
from .integrations.graph import TrackedList as TrackedList
from .integrations.graph import Untracked as Untracked
from .integrations.graph import Value as Value
from .integrations.graph import checkpoints_iterator as checkpoints_iterator
from .integrations.graph import latest_checkpoint as latest_checkpoint
from .integrations.graph import load_checkpoint as load_checkpoint

__all__ = [name for name in dir() if not name.startswith("_")]
