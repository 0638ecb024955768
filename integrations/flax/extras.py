"""The named extras of a checkpoint: data positions, random keys, averages, and plain data beside the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.errors import TreeMismatchError
from ..stateful import is_plain, is_stateful, restore_state, state_of
from .states import from_tree, is_nnx, to_tree


def tree_of(extra: Any) -> Any:
    """Returns what a checkpoint holds of one extra: a snapshot for stateful objects, the values of anything else."""
    if is_nnx(extra):
        return to_tree(extra)
    return state_of(extra) if is_stateful(extra) else extra


def changes_in_place(extra: Any) -> bool:
    """Returns whether a snapshot of the extra has to be taken, as the object itself moves on."""
    return is_stateful(extra) and not is_nnx(extra)


def is_own(extra: Any) -> bool:
    """Returns whether each of several processes has an extra of its own, such as where its data iterator is."""
    return changes_in_place(extra) or is_plain(extra)


def templates_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the extras that are restored into the types, dtypes and shardings of what was passed.

    Stateful objects and plain data may change their structure as they go (a list that grows, a shuffled order), so
    they are taken as they were saved.
    """
    return {
        name: to_tree(extra)
        for name, extra in extras.items()
        if is_nnx(extra) or not (is_stateful(extra) or is_plain(extra))
    }


def check_names(extras: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Checks that a checkpoint holds every extra that is asked for.

    Raises:
        TreeMismatchError: Some are missing.
    """
    missing = [name for name in extras if name not in saved]
    if missing:
        held = ", ".join(saved) or "none"
        names = ", ".join(f"{name}=" for name in missing)
        raise TreeMismatchError(
            f"{where} does not hold all extras that are to be restored (it holds: {held}). Leave {names} out of "
            "restore_or_initialize and pass it to on_step only, to begin saving it from now on",
            [f"{name}: expected an extra of this name, found none" for name in missing],
        )


def restore(extras: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Brings every extra back.

    Args:
        extras: The extras that were passed; stateful and nnx objects are changed in place.
        saved: What the checkpoint holds of all extras.

    Returns:
        By name: the same object where it was changed in place, and the restored value otherwise.
    """
    values = {name: saved[name] for name in extras}
    for name, extra in extras.items():
        if is_nnx(extra):
            values[name] = from_tree(extra, saved[name])
        elif is_stateful(extra) or is_plain(extra):
            values[name] = restore_state(extra, saved[name])
    return values
