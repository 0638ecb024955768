"""One pytree in its folder: plan, write, read, load."""

from __future__ import annotations

from .database import ArrayDatabase, Problem, naming
from .digests import (
    FileCheck,
    check_file,
    check_files,
    fsync_and_digest,
    make_durable,
    open_folder,
    read_checked,
    required,
)
from .extents import Range, read_ranges
from .load import leaf_as, leaf_values, load_tree, read_parts, selected_values, tree_metadata, with_optimizer_states
from .plan import Layout, batches, check_level, check_size
from .read import AGGREGATE_LIMIT, AggregateHandler, MsgpackHandler, TreeReader, aggregate_details
from .reuse import WrittenSteps
from .shared_reads import ReadPlan, SharedReads, WantedArray
from .snapshot import KnownTree, Snapshot, StagingBuffer
from .source import MemoryTree, NamedVariables, PartialTree, SavedLeaf, TreeSource, damaged_leaves
from .transform import load_transformed_tree
from .write import MANIFEST, TREE, HostTree, TreePlan, TreeWriter, write_file
