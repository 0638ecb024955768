"""Check that the replicated parts of a tree have equal values on all processes, as a save assumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from ..clock import Duration, seconds
from ..distributed import Coordinator, ProcessGroup
from ..errors import TreeMismatchError, first_lines, shortened
from ..format import crc32c
from ..pytree import ArrayLeaf, Box, ValueLeaf, describe, flatten, format_path, whole

_NOT_HERE = -1


def check_replicas(tree: Any, *, coordinator: Coordinator | None = None, timeout_secs: Duration = "10m") -> None:
    """Check that the replicated parts of a tree have equal values on all processes.

    A save assumes that plain tensors, numpy arrays and Python values are equal on all processes, and writes each part
    from one process. The same applies to replicated jax arrays and DTensors. If the values differ, for example because
    of a forgotten broadcast or different seeds, the checkpoint mixes values of several processes. Saves do not check
    this, so call this function before the first save, or when in doubt. It reads every replicated array at a few
    gigabytes per second, after copying it to the host if necessary. Intentional differences, such as BatchNorm
    statistics under DDP, are also reported.

    All processes must call this function. In a single-process program, it returns immediately.

    Args:
        tree: The tree to check.
        coordinator: Connects the processes. None uses jax.distributed or torch.distributed if one of them
            is initialized.
        timeout_secs: The maximum time to wait for other processes, in seconds or as text such as ``"10m"``.

    Raises:
        TreeMismatchError: The trees or their values differ. All processes raise the error, which names the leaves.
        UnsupportedLeafError: A leaf cannot be saved.
    """
    group = ProcessGroup("check_replicas", coordinator, seconds(timeout_secs, name="timeout_secs"))
    if group.alone:
        return
    try:
        names, lines, digests = _digests(tree, group.index)
    except BaseException as error:
        group.fail("replicas", error)
        raise
    structure = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
    differences = group.agree("replicas", [structure, *digests], lambda gathered: _compare(gathered, names))
    if differences:
        raise TreeMismatchError("the processes hold different values where a save takes them to be equal:", differences)


def _digests(tree: Any, process: int) -> tuple[list[str], list[str], list[int]]:
    """Return the leaf name of each replicated part, a description of each leaf, and the digest of each part."""
    flat = flatten(tree)
    names: list[str] = []
    lines: list[str] = []
    digests: list[int] = []
    layouts: dict[int, str] = {}  # digest of each part list, keyed by the list's id, because many arrays share a list
    for name, leaf in zip(flat.names, describe(flat.names, flat.values), strict=True):
        if isinstance(leaf, ValueLeaf):
            names.append(name)
            lines.append(f"{name}\ta value")
            digests.append(crc32c(json.dumps(leaf.details, sort_keys=True).encode()))
            continue
        if id(leaf.parts) not in layouts:
            layouts[id(leaf.parts)] = xxhash.xxh3_128_hexdigest(repr(leaf.parts).encode())
        lines.append(f"{name}\t{leaf.dtype}{list(leaf.shape)} {layouts[id(leaf.parts)]}")
        if leaf.parts is None:
            boxes = [(whole(leaf.shape), True)]
        else:
            boxes = [(part.box, process in part.holders) for part in leaf.parts if len(part.holders) > 1]
        names += [name] * len(boxes)
        digests += [_digest(leaf, box) if is_held else _NOT_HERE for box, is_held in boxes]
    return names, lines, digests


def _digest(leaf: ArrayLeaf, box: Box) -> int:
    """Compute the digest of a region of an array; the whole region must be on this process."""
    held = next((piece for piece in leaf.pieces if box.common(piece.box) == box), None)
    elements = np.zeros(box.shape, leaf.dtype) if held is None else held.array[box.within(held.box)]
    for piece in leaf.pieces if held is None else ():
        common = box.common(piece.box)
        if common is not None:
            elements[common.within(box)] = piece.array[common.within(piece.box)]
    return crc32c(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))


def _compare(gathered: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    """Return a line for each leaf that differs between processes; called on process 0."""
    strangers = [number for number, (structure, *_) in enumerate(gathered) if structure != gathered[0][0]]
    if strangers:
        return first_lines([f"process {number} has another tree than process 0" for number in strangers])
    expected = np.full(len(names), _NOT_HERE, np.int64)  # digest of each part on the first process that holds it
    holder = np.zeros(len(names), np.int64)
    different: dict[str, list[int]] = {}
    for process, (_, *numbers) in enumerate(gathered):
        digests = np.array(numbers, np.int64)
        is_here, is_first = digests != _NOT_HERE, expected == _NOT_HERE
        for position in np.flatnonzero((digests != expected) & is_here & ~is_first).tolist():
            others = different.setdefault(names[position], [int(holder[position])])
            if process not in others:
                others.append(process)
        expected[is_first], holder[is_first & is_here] = digests[is_first], process
    lines = []
    for name, (first, *others) in different.items():
        which = "process" if len(others) == 1 else "processes"
        lines.append(f"{format_path(name)}: process {first} has other values than {which} {shortened(others)}")
    return first_lines(lines)
