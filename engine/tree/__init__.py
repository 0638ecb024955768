"""Pytrees in memory: named leaves, what they are, and how they are made again."""

from __future__ import annotations

from .boxes import Box, box_of, whole
from .casts import CastProblem, cast_checked
from .comparison import compare, compare_metadata, spell
from .containers import expand
from .description import describe
from .document import Skeleton, from_document, to_document
from .external import EXTERNAL, PLACEHOLDER, ExternalLeaf
from .flatten import Flattened, flatten
from .garbage import collection_paused
from .leaves import ArrayLeaf, Details, Part, Piece, Saved, ValueLeaf
from .materialization import materialize
from .metadata import LeafMetadata, metadata_of
from .names import display, escape_key, join, split, unescape_key
from .partition import Partition, partition
from .requests import LeafRequest, requested
from .structure import Key, Node, unflatten
from .targets import Target, describe_template
from .transform import Transform
from .transform_plan import Call, Computed, Kept, Origin, OriginalTree, Taken, unfilled
from .transform_plan import plan as plan_transformations
from .transformations import apply_transformations, has_values, parts, transformed

__all__ = [
    "EXTERNAL",
    "PLACEHOLDER",
    "ArrayLeaf",
    "Box",
    "Call",
    "CastProblem",
    "Computed",
    "Details",
    "ExternalLeaf",
    "Flattened",
    "Kept",
    "Key",
    "LeafMetadata",
    "LeafRequest",
    "Node",
    "Origin",
    "OriginalTree",
    "Part",
    "Partition",
    "Piece",
    "Saved",
    "Skeleton",
    "Taken",
    "Target",
    "Transform",
    "ValueLeaf",
    "apply_transformations",
    "box_of",
    "cast_checked",
    "collection_paused",
    "compare",
    "compare_metadata",
    "describe",
    "describe_template",
    "display",
    "escape_key",
    "expand",
    "flatten",
    "from_document",
    "has_values",
    "join",
    "materialize",
    "metadata_of",
    "partition",
    "parts",
    "plan_transformations",
    "requested",
    "spell",
    "split",
    "to_document",
    "transformed",
    "unescape_key",
    "unfilled",
    "unflatten",
    "whole",
]
