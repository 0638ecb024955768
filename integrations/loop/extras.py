"""Extras that are saved with a state, such as data positions, random keys, averages and plain data."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...engine.errors import OptionError
from ...engine.generators import is_generator
from ...engine.handlers import DEFAULT_REGISTRY
from ...engine.loaders import LoaderPosition, drawing_sampler, is_accelerate_loader, is_torchdata_loader, nodes_of
from ...engine.pytree import encode_state, flatten, is_nnx, is_plain, is_torch_tensor
from ...engine.stateful import check_grain_loader, check_window, is_replicated, is_stateful, state_of
from ..hugging_face import check_stream
from .objects import is_versioned
from .states import LoopArguments, check_depth
from .trees import is_stream, to_tree

logger = logging.getLogger("holdfast")

GRADIENTS = "accumulated_gradients"
CHECKSUMS = "replicated_checksums"  # extra with checksums of replicated arrays, for comparison between processes
_TAKEN = ("step", "state", "metrics", GRADIENTS, CHECKSUMS)
_OPTIONS = frozenset(LoopArguments.__dataclass_fields__)
GLOBAL_GENERATORS = "global_generators"


def tree_of(extra: Any, *, was_plain: bool = False) -> Any:
    """Return the tree to save for an extra. The tree of a stateful object is a snapshot."""
    if was_plain and is_template(extra) and not is_nnx(extra):
        return encode_state(extra)  # restored without a template, so the tree must name libraries and classes
    return to_tree(extra) if is_template(extra) else state_of(extra)


def changes_in_place(extra: Any) -> bool:
    return is_stateful(extra) and not is_nnx(extra)


def is_object(extra: Any) -> bool:
    """Return whether a resume restores an extra into an object that the program must pass."""
    return is_stateful(extra) or is_nnx(extra)


def moves(extra: Any) -> bool:
    """Return whether an extra needs a snapshot at every step, because the loop may advance the extra before a save."""
    return (changes_in_place(extra) and not is_versioned(extra)) or is_stream(extra)


def is_own(name: str, extra: Any, replicated: Collection[str]) -> bool:
    """Return whether an extra differs between processes, like the position of a data iterator."""
    return (changes_in_place(extra) or is_plain(extra)) and not (name in replicated or is_replicated(extra))


def checksum_of(tree: Any) -> int | None:
    """Return a checksum of the numpy and torch arrays in a saved state, or None if there are none."""
    checksum = None
    for leaf in flatten(tree).values:
        if isinstance(leaf, np.ndarray) or is_torch_tensor(leaf):
            array = np.ascontiguousarray(leaf.cpu() if is_torch_tensor(leaf) else leaf)
            checksum = zlib.crc32(array.tobytes(), checksum or 0)
    return checksum


def templates_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees of all extras that serve as templates for the types and shardings of restored values."""
    return {name: to_tree(extra) for name, extra in extras.items() if is_template(extra)}


def is_template(extra: Any) -> bool:
    """Return whether an extra serves as the template for restoring its saved value."""
    # Stateful objects and plain data are restored as saved, because their structure may change (a list may grow).
    return is_nnx(extra) or not (is_stateful(extra) or is_plain(extra))


def loaders_of(extras: Mapping[str, Any]) -> dict[str, LoaderPosition]:
    """Return the extras that are loaders from ``hf.resumable`` or ``hf.skip_to``."""
    return {name: extra for name, extra in extras.items() if isinstance(extra, LoaderPosition)}


def check_extras(extras: Mapping[str, Any], *, is_fresh: bool) -> None:
    """Raise OptionError for reserved names and iterators or loaders without a state; warn if a resume may lose data."""
    if taken := [name for name in extras if name in _TAKEN]:
        raise OptionError(
            f"an extra cannot be called {taken[0]!r}, as the callback uses this name itself; choose another name"
        )
    check_no_options(extras)
    check_depth(extras)
    for name, extra in extras.items():
        check_grain_loader(name, extra, is_fresh=is_fresh)
        check_window(name, extra)
        check_stream(f"{name}=", extra)
        if is_generator(extra):
            state_of(extra)  # raises an error if the generator has no state
        if is_accelerate_loader(extra):
            raise OptionError(
                f"{name}= is a {type(extra).__qualname__} of accelerate, which cannot be resumed exactly: without "
                "use_stateful_dataloader=True it has no state, and with it a resume draws once more from torch's "
                "global generator, and begins the count of epochs and the order of shuffle=True anew. Leave "
                f"use_stateful_dataloader out, pass {name}=hf.skip_to(loader), and loop over what that returns"
            )
        can_shuffle = is_torchdata_loader(extra)
        if (can_shuffle or nodes_of(extra)) and (sampler := drawing_sampler(extra)) is not None:
            raise OptionError(
                f"{name}= is a {type(extra).__qualname__} whose order is drawn by a {sampler}, which has no state: "
                "after a resume, the rest of an epoch would have other batches. Pass "
                f"{'shuffle=True without a sampler, or ' if can_shuffle else ''}a sampler with state_dict and "
                "load_state_dict, or one whose order depends on set_epoch alone"
            )
        if isinstance(extra, Iterable) and not _is_saveable(extra):
            raise OptionError(
                f"{name}= is a {type(extra).__qualname__}, whose position can be neither saved nor restored: pass "
                "an object with get_state and set_state, or state_dict and load_state_dict, such as an iterator of "
                f"Grain or a StatefulDataLoader of torchdata; or make {name} = hf.resumable({name}) of a DataLoader, a "
                f"list or another loader, before the loop; or leave {name}= out and start the data again after a resume"
            )


def check_replicated(replicated: Collection[str], extras: Mapping[str, Any], method: str) -> None:
    """Raise OptionError if ``replicated`` names an extra that was not passed to the callback's ``method``."""
    if unknown := [name for name in replicated if name not in extras]:
        given = f" (known: {', '.join(extras)})" if extras else ""
        raise OptionError(
            f"replicated names {unknown[0]!r}, and {method} was given no extra of this name{given}: correct the name, "
            "or pass the extra"
        )


def check_no_options(extras: Mapping[str, Any]) -> None:
    """Raise OptionError if an extra has the name of an option, which must be passed to the constructor."""
    if not _OPTIONS.isdisjoint(extras):
        name = min(_OPTIONS & extras.keys())
        raise OptionError(
            f"{name}= is an option of the callback: pass it to CheckpointCallback(..., {name}=...). An extra needs "
            "another name"
        )


def _is_saveable(extra: Any) -> bool:
    if hasattr(extra, "dtype") or is_nnx(extra) or is_stateful(extra) or is_plain(extra):
        return True
    is_container = not any(leaf is extra for leaf in flatten(extra).values)
    return is_container or DEFAULT_REGISTRY.find(extra) is not None


def warn_of_unrestored(extras: Mapping[str, Any], names: Collection[str]) -> None:
    """Warn about stateful objects that are passed to ``on_step`` but not to ``restore_or_initialize``."""
    if others := [name for name, extra in extras.items() if name not in names and is_object(extra)]:
        listed = ", ".join(f"{name}={name}" for name in others)
        logger.warning(
            "on_step was given %s, and restore_or_initialize was not: a resume does not restore what is saved of it. "
            "Pass it to restore_or_initialize as well",
            listed,
        )
