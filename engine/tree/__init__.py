"""Pytrees in memory: named leaves, what they are, and how they are made again."""

from __future__ import annotations

from .comparison import compare, spell
from .description import describe
from .document import Skeleton, from_document, to_document
from .external import EXTERNAL, ExternalLeaf
from .flatten import Flattened, flatten
from .garbage import collection_paused
from .leaves import ArrayLeaf, Details, Part, Piece, Saved, ValueLeaf
from .materialization import materialize
from .names import display, escape_key, join, split, unescape_key
from .requests import LeafRequest
from .structure import Key, Node, unflatten
from .targets import Target, describe_template

__all__ = [
    "EXTERNAL",
    "ArrayLeaf",
    "Details",
    "ExternalLeaf",
    "Flattened",
    "Key",
    "LeafRequest",
    "Node",
    "Part",
    "Piece",
    "Saved",
    "Skeleton",
    "Target",
    "ValueLeaf",
    "collection_paused",
    "compare",
    "describe",
    "describe_template",
    "display",
    "escape_key",
    "flatten",
    "from_document",
    "join",
    "materialize",
    "spell",
    "split",
    "to_document",
    "unescape_key",
    "unflatten",
]
