"""Reshard a run's data position when the number of processes changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ...engine.distributed import ProcessGroup
from ...engine.errors import StateError
from ...engine.generators import differing_parts, same_state
from ..options import Reshard
from .loader_states import loader_states
from .store import GLOBAL_GENERATORS
from .strategies import replicas

logger = logging.getLogger("holdfast")


@dataclass(frozen=True)
class SavedPosition:
    """The saved data position that this process resumes from."""

    tree: dict[str, Any]
    is_new: bool = False  # whether this process has no saved position, because processes were added
    keeps_random: bool = False  # whether this process keeps the global generators that the program has seeded
    until_loaders: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed once the loaders exist
    until_batches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed before the first batch

    @property
    def is_cut_off(self) -> bool:
        """True if the saved run ended before it completed the work that follows its last batch, such as validation."""
        return bool(self.tree.get("is_cut_off", self.tree["point"] == "validation"))


def share_of(
    saved: dict[str, Any], trainer: Any, replicated: Collection[str], reshard: Reshard | None, processes: ProcessGroup
) -> SavedPosition:
    """Return the position that this process resumes from; raise StateError if the data cannot be divided."""
    shares = saved.pop("shares", None)
    is_new = shares is not None and processes.index >= len(shares)
    draws_alike = GLOBAL_GENERATORS in replicated
    if draws_alike:
        check_drawn_alike(shares or [saved])
    before, now = saved.get("replicas", 1), replicas(trainer.strategy)
    one_for_all = check_replicated(saved, shares)
    if not one_for_all and (shares is not None or before != now):
        reshard_states(saved, shares, reshard, processes)
    if before != now and saved["point"] != "epoch" and not one_for_all:
        saved["point"] = "batch"
        saved["rescaled"] = Fraction(before, now)
    if is_new and "averages" in saved:
        saved["averages"] = {"metrics": {name: {"updates": 0, "states": {}} for name in saved["averages"]["metrics"]}}
    if before != now and trainer.is_global_zero:
        order = "; a loader that shuffles has a different order in one process than in several"
        samples = f"the epoch continues after the same number of samples{order if 1 in (before, now) else ''}"
        logger.warning(
            "saved by %d processes, each with a share of the data, and resumed by %d: weights, optimizers and "
            "schedules are unchanged, and %s. %s",
            before,
            now,
            "the data continues in the order that all processes share" if one_for_all else samples,
            "" if shares is None else describe_left(len(shares), processes.count, draws_alike),
        )
    return SavedPosition(saved, is_new, is_new and not draws_alike)


def check_replicated(saved: dict[str, Any], shares: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether all data loaders are replicated; raise StateError if a replicated loader's saved states differ."""
    replicated = saved.get("replicated", [])
    if any(len(share["loaders"]) <= max(replicated, default=-1) for share in shares or [saved]):
        raise StateError(
            f"the step declares {len(replicated)} data loaders whose state is the same in all processes "
            "(replicated_state), but does not hold their states, so the position in the data is unknown: pass an "
            "earlier step as fit(ckpt_path=...), or delete this step to resume from the one before it"
        )
    for index in replicated:
        states = [share["loaders"][index] for share in shares or [saved]]
        if (other := next((state for state in states if not same_state(state, states[0])), None)) is not None:
            raise StateError(
                f"the data loader of loaders/{index} declares that its state is the same in all processes "
                f"(replicated_state), but {len(states)} processes saved different ones: {states[0]!r:.80} and "
                f"{other!r:.80} (different: {differing_parts(states[0], other)}); leave out of the state "
                "whatever changes without a batch, such as a time; resume from a step before they differed, or with "
                f"{len(states)} processes and without the declaration"
            )
    return bool(replicated) and len(replicated) == len(saved["loaders"]) and not saved.keys() & {"epoch", "ahead"}


def check_drawn_alike(shares: Sequence[dict[str, Any]]) -> None:
    """Raise StateError if global generators are declared replicated, but processes saved different states."""
    of_loaders = {"loaders", "attributes"}
    states = [{name: state for name, state in share["random"].items() if name not in of_loaders} for share in shares]
    for state in states:
        if differing := [name for name in states[0] if not same_state(state.get(name), states[0][name])]:
            raise StateError(
                f"replicated names 'global_generators', but the {len(states)} processes of the checkpoint saved "
                f"different states of {', '.join(differing)}: seed and draw identically on all processes; or omit the "
                "name, and each generator belongs to the rank that saved it"
            )


def check_same_place(saved: dict[str, Any], loaders: Sequence[Any]) -> None:
    """Raise StateError if a replicated loader is not at its saved position after the batches were drawn again."""
    declared = saved.get("replicated", ())
    for index, (state, before) in enumerate(zip(loader_states(loaders), saved["loaders"], strict=True)):
        if index not in declared or same_state(state, before):
            continue
        raise StateError(
            f"after drawing the {saved['consumed']} batches of the epoch again, the data loader of "
            f"loaders/{index} is at {state!r:.80} instead of {before!r:.80} "
            f"(different: {differing_parts(state, before)}). Leave out of its state whatever changes "
            "without a batch, such as a time, and let load_state_dict restore the rest. If the number of "
            "processes has changed, change the batch sizes of the other loaders, so that all processes together "
            "take as many samples as before"
        )


def reshard_states(
    saved: dict[str, Any], shares: Sequence[dict[str, Any]] | None, reshard: Reshard | None, processes: ProcessGroup
) -> None:
    """Replace the saved data loader states with the states that ``reshard`` returns for this process."""
    owners = {"": saved, "epoch/": saved.get("epoch", {})}  # states at the save and at the start of the epoch
    replicated = saved.get("replicated", ())
    divided = [
        (prefix, index)
        for prefix, owner in owners.items()
        for index in range(len(owner.get("loaders", ())))
        if index not in replicated
    ]
    has_ahead = any("ahead" in share for share in shares or [saved])
    names = [f"{prefix}loaders/{index}" for prefix, index in divided] + ["ahead"] * has_ahead
    if not names:
        return
    if shares is None or reshard is None:
        way = (
            "continue with as many shares as before"
            if shares is None
            else "give CheckpointCallback reshard=, a function of (name, states, process_index, process_count) that "
            "returns the state of one process"
        )
        raise StateError(
            f"the checkpoint was saved with the training data divided among {saved.get('replicas', 1)} processes, but "
            f"is resumed by another number: each state of its data loaders ({', '.join(names)}) is a position in the "
            "data of one process, and says nothing about other processes. Use data loaders without a "
            f"state, whose batches are counted, from the start of a run; or {way}"
        )
    for prefix, index in divided:
        states = [(share["epoch"] if prefix else share)["loaders"][index] for share in shares]
        mine = reshard(f"{prefix}loaders/{index}", states, processes.index, processes.count)
        owners[prefix]["loaders"] = [*owners[prefix]["loaders"][:index], mine, *owners[prefix]["loaders"][index + 1 :]]
    if has_ahead:
        saved["ahead"] = reshard("ahead", [share.get("ahead") for share in shares], processes.index, processes.count)


def describe_left(before: int, now: int, draws_alike: bool) -> str:
    """Describe which processes start with fresh per-process state, or whose saved state is dropped."""
    state = "averages over the epoch" if draws_alike else "random generators and averages over the epoch"
    if now > before:
        return f"Processes from {before} on start with fresh {state}"
    return f"The {state} of processes from {now} on are dropped" if now < before else ""
