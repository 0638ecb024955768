"""Pytrees in memory: named leaves, what is stored of each, templates and transformations."""

from __future__ import annotations

from .containers import class_name, expand, is_nnx, opens_as
from .describe import KnownLeaves, check_leaves, describe, shared_memory
from .device_arrays import Arrival, Copy, DeviceArray, PinnedMemory, default_pinned_bytes
from .document import TreeDocument, from_document, leaves_at, to_document
from .flatten import (
    MAX_DEPTH,
    PACKED_FROM,
    Flattened,
    Key,
    KeyProblem,
    Outline,
    PackedNumbers,
    TreeDef,
    collection_paused,
    flatten,
    is_leaf,
    key_segments,
    pack_numbers,
    pack_tree,
    packed_again,
    unflatten,
)
from .host_leaves import encode_value, is_python_value, number_kind
from .jax_leaves import is_key, template_sharding
from .leaves import (
    ARRAY_KINDS,
    EXTERNAL,
    NAME_ONLY,
    NUMBER_KINDS,
    NUMBERS,
    PLACEHOLDER,
    ArrayLeaf,
    Box,
    Details,
    ExternalLeaf,
    LeafMetadata,
    Part,
    Piece,
    PinnedLeaf,
    Saved,
    ValueLeaf,
    is_jax_abstract,
    is_jax_array,
    is_torch_tensor,
    loaded,
    metadata_of,
    report_problems,
    whole,
)
from .materialize import CastProblem, Partition, cast_checked, materialize, partition, wanted_parts
from .names import (
    WRAPPED,
    PathFilter,
    Patterns,
    choose,
    escape_first,
    escape_key,
    format_path,
    join,
    split,
    unescape_key,
    unwrapped_name,
)
from .template import (
    FreshTypes,
    GrowthProblem,
    LeafRequest,
    LeafTemplate,
    LeafType,
    as_saved,
    compare,
    compare_metadata,
    describe_template,
    leaf_names,
    new_leaf,
    recorded_types,
    regrown,
    with_request,
)
from .torch_leaves import STRIDES, copy_tensors, is_permuted, tensor_like, tensor_of, tensors_over, with_strides
from .transform import (
    Call,
    Computed,
    Kept,
    Origin,
    OriginalTree,
    Taken,
    Transform,
    apply_transformations,
    has_values,
    plan_transformations,
    unfilled_error,
)
