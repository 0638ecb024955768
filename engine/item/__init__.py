"""One tree in a folder of its own: planned, written, read, verified."""

from __future__ import annotations

from .aggregation import AGGREGATE_LIMIT, AggregateHandler, MsgpackHandler, aggregate_details
from .database import MANIFEST, ArrayDatabase, Problem, naming
from .loading import Select, load_tree, tree_metadata
from .plan import Layout
from .reader import SavedLeaf, TreeReader
from .staging import StagingBuffer
from .transformed import load_transformed_tree
from .writer import HostTree, TreeWriter

__all__ = [
    "AGGREGATE_LIMIT",
    "MANIFEST",
    "AggregateHandler",
    "ArrayDatabase",
    "HostTree",
    "Layout",
    "MsgpackHandler",
    "Problem",
    "SavedLeaf",
    "Select",
    "StagingBuffer",
    "TreeReader",
    "TreeWriter",
    "aggregate_details",
    "load_transformed_tree",
    "load_tree",
    "naming",
    "tree_metadata",
]
