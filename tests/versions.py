"""What the oldest supported versions of frameworks spell otherwise than the newest, for tests that run with both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import version
from typing import Any

from packaging.version import Version


def older(package: str, needed: str) -> bool:
    """Whether the installed version of a package is older than the needed one."""
    return Version(version(package)) < Version(needed)


def enable_x64() -> AbstractContextManager[Any]:
    """A context in which jax makes 64-bit arrays."""
    holder: Any = import_module("jax.experimental" if older("jax", "0.8") else "jax")
    context: AbstractContextManager[Any] = holder.enable_x64(True)
    return context


def unchecked_shard_map(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """``jax.shard_map`` that does not check what its result declares to be the same on several devices."""
    if older("jax", "0.7"):
        sharded: Any = import_module("jax.experimental.shard_map")
        return sharded.shard_map(function, mesh, in_specs, out_specs, check_rep=False)
    jax: Any = import_module("jax")
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def allow_empty_arrays() -> None:
    """Lets jax make arrays of which this process holds nothing; new versions always do."""
    import jax

    config: Any = jax.config
    if older("jax", "0.8"):
        config.update("jax_enable_empty_arrays", True)


def flax_flag(name: str, value: bool) -> AbstractContextManager[Any]:
    """A context in which a setting of flax has another value."""
    from flax import config, configurations

    holder: Any = configurations if older("flax", "0.11") else config
    context: AbstractContextManager[Any] = holder.temp_flip_flag(name, value)
    return context


def nnx_list(modules: list[Any]) -> Any:
    """A list of modules as the attribute of an nnx module."""
    from flax import nnx

    return modules if older("flax", "0.12") else nnx.List(modules)


def nnx_update(optimizer: Any, model: Any, gradients: Any) -> None:
    """Changes the parameters of an nnx module by a step of its optimizer."""
    if older("flax", "0.11"):
        optimizer.update(gradients)
    else:
        optimizer.update(model, gradients)


def nnx_value(variable: Any) -> Any:
    """The value of an nnx variable."""
    return variable.value if older("flax", "0.12") else variable.get_value()


def nnx_assign(variable: Any, value: Any) -> None:
    """Replaces the value of an nnx variable."""
    if older("flax", "0.12"):
        variable.value = value
    else:
        variable.set_value(value)
