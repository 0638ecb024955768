"""Modules whose parameters lie divided among processes as DTensors (FSDP2, tensor parallelism), read in place."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from typing import Any

from ...engine.handlers import PyTreeCheckpointHandler
from ...engine.record import FileRecord
from ...engine.storage import Location


class StateHandler(PyTreeCheckpointHandler):
    """Saves trees as its base does, and restores with a template for some entries; the rest is as it was saved."""

    def restore(
        self, directory: Location, item: Any = None, *, files: Mapping[str, FileRecord] | None = None, **kwargs: Any
    ) -> Any:
        """Reads a tree.

        Args:
            directory: The folder.
            item: Templates by entry; an entry whose template is None is left out. None for all is no template.
            files: What the commit record says about the folder.
            **kwargs: As for any tree.
        """
        if item is None:
            return super().restore(directory, files=files, **kwargs)
        outline = super().structure(directory, files=files)
        rest = {name: value for name, value in outline.items() if name not in item}
        chosen = _patterns(name for name, value in rest.items() if has_leaves(value))
        found = super().restore(directory, files=files, select=chosen)
        wanted = {name: template for name, template in item.items() if template is not None}
        parts = super().restore(directory, wanted, files=files, select=_patterns(wanted))
        return {**with_containers(rest, found), **parts}


class ShardedState:
    """What a strategy holds divided among its processes.

    Args:
        strategy: The strategy, with its module and optimizers set up.
    """

    def __init__(self, strategy: Any) -> None:
        self._module = strategy.model
        self._optimizers = [getattr(one, "_optimizer", one) for one in strategy.optimizers]

    def template(self) -> dict[str, Any]:
        """Returns the template for what a checkpoint holds of it."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        states = [get_optimizer_state_dict(self._module, optimizer) for optimizer in self._optimizers]
        return {"state_dict": get_model_state_dict(self._module), "optimizer_states": states or None}

    def load(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Takes over what was restored with the template.

        Args:
            checkpoint: Lightning's dictionary.
            strict: Whether all parameters have to be there, and no others.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(strict=strict)
        set_model_state_dict(self._module, dict(checkpoint["state_dict"]), options=options)
        states = checkpoint.get("optimizer_states", []) if self._optimizers else []
        for optimizer, state in zip(self._optimizers, states, strict=True):
            set_optimizer_state_dict(self._module, optimizer, state, options=options)


def has_leaves(tree: Any) -> bool:
    """Returns whether there is anything but containers in a tree."""
    if isinstance(tree, dict):
        return any(map(has_leaves, tree.values()))
    return any(map(has_leaves, tree)) if isinstance(tree, list | tuple) else True


def with_containers(outline: Any, found: Any) -> Any:
    """Returns a tree of which a selection of leaves was read with the containers, too, that hold no leaves.

    Args:
        outline: The tree with anything in the place of its leaves.
        found: What was read: all of its leaves.
    """
    if isinstance(outline, dict):
        read = found if isinstance(found, dict) else {}
        return type(outline)((key, with_containers(value, read.get(key))) for key, value in outline.items())
    if isinstance(outline, list | tuple):
        parts = found if isinstance(found, list | tuple) else [None] * len(outline)
        return type(outline)(with_containers(value, part) for value, part in zip(outline, parts, strict=True))
    return found


def _patterns(names: Iterable[str]) -> list[str]:
    """Returns the patterns of entries and all leaves in them."""
    return [f"{glob.escape(name)}/**" for name in names]
