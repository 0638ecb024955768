"""The state of every random generator that a training run draws from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..stateful import restore_state, state_of

_OWN_GENERATORS = (torch.Generator, np.random.Generator, random.Random)


def capture(device: torch.device, loaders: Sequence[object]) -> dict[str, Any]:
    """Takes the state of all generators, without changing any.

    Args:
        device: The device of the model; the generator of an accelerator is part of the state.
        loaders: The training data loaders; generators that they, their samplers and their datasets hold are, too.

    Returns:
        A tree of tensors, arrays and numbers.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "loaders": {name: state_of(generator) for name, generator in _generators(loaders)},
    }
    if device.type != "cpu":
        state["device"] = {"type": device.type, "state": getattr(torch, device.type).get_rng_state()}
    return state


def restore(state: dict[str, Any], device: torch.device, loaders: Sequence[object]) -> None:
    """Gives all generators the state that :func:`capture` took.

    Args:
        state: What ``capture`` returned; the state of a generator that is not there any more is passed over.
        device: The device of the model.
        loaders: The training data loaders.
    """
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    for name, generator in _generators(loaders):
        if name in state["loaders"]:
            restore_state(generator, state["loaders"][name])
    saved = state.get("device")
    if saved is not None and saved["type"] == device.type:
        getattr(torch, device.type).set_rng_state(saved["state"])


def _generators(loaders: Sequence[object]) -> Iterator[tuple[str, Any]]:
    """Generates every generator held by a loader or one of its parts, once, with a name such as ``0.sampler.rng``."""
    seen: set[int] = set()
    for index, loader in enumerate(loaders):
        batch_sampler = getattr(loader, "batch_sampler", None)
        parts = {
            "loader": loader,
            "sampler": getattr(loader, "sampler", None),
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
            "dataset": getattr(loader, "dataset", None),
        }
        for part, owner in parts.items():
            for name, value in getattr(owner, "__dict__", {}).items():
                if isinstance(value, _OWN_GENERATORS) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{index}.{part}.{name}", value
