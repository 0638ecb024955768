"""Checkpoints of any library, read as trees: the one that a path stands for, and its contents."""

from __future__ import annotations

from .comparison import LeafDifference, LeafStatistics, compare_checkpoints, leaf_path, leaf_statistics, trees_in
from .discovery import (
    GRAPH,
    KIND,
    NativeCheckpoint,
    NativeTree,
    PreparedGraph,
    check_unclaimed,
    described_steps,
    find_checkpoint,
    find_steps,
    is_foreign,
    is_ours,
    is_run,
    open_at,
    open_checkpoint,
    portions_of,
    read_checkpoint,
    recognise,
)
from .files import (
    check_destination,
    entry_size,
    first_bytes,
    last_bytes,
    read_json,
    read_object,
    read_optional,
    replacing,
    total_bytes,
)
from .protocol import (
    JSON,
    METRICS,
    TREE,
    CheckpointSource,
    FoundSteps,
    SingleTree,
)
from .stored import (
    OPTIONAL,
    Bytes,
    FetchedArray,
    FetchedTree,
    Path,
    StoredArray,
    StoredPart,
    StoredTree,
    Unreadable,
    is_contiguous,
    nested,
    nested_tree,
    not_read,
    renamed_for,
    rooted,
    selected,
    storage_name,
    without_leaves,
    without_placeholders,
    without_unreadable,
)
from .weights import Misfits, Weights, load_fitting, load_weights
