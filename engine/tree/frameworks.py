"""Frameworks are looked up, never imported: a leaf of one can only turn up once somebody else has imported it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..errors import OptionError


def loaded(name: str) -> Any | None:
    """Gives the module if the program has imported it, and None otherwise.

    Args:
        name: "jax" or "torch".
    """
    module = sys.modules.get(name)
    # A module that another thread is importing at this moment has none of its names yet.
    return module if module is not None and hasattr(module, _LANDMARKS[name]) else None


def required(name: str) -> Any:
    """Gives the module that a caller has asked for by name, and imports it if need be.

    Args:
        name: "jax" or "torch".

    Raises:
        OptionError: It is not installed.
    """
    module = loaded(name)
    if module is not None:
        return module
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(f"{name} arrays are asked for, and {name} cannot be imported: {error}") from error


_LANDMARKS = {"jax": "ShapeDtypeStruct", "torch": "Tensor"}


def is_torch_tensor(value: object) -> bool:
    """Whether the value is a torch tensor (parameters and other subclasses included)."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jax_array(value: object) -> bool:
    """Whether the value is a jax array, a typed PRNG key, or the tracer of one."""
    jax = loaded("jax")
    return jax is not None and isinstance(value, jax.Array)


def is_jax_abstract(value: object) -> bool:
    """Whether the value is a `jax.ShapeDtypeStruct`: a shape, a dtype and perhaps a sharding, without data."""
    jax = loaded("jax")
    return jax is not None and isinstance(value, jax.ShapeDtypeStruct)
