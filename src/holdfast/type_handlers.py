"""Leaf handlers for your own types, and handlers for the single file that stores many small leaves.

In Orbax, this module also has functions that enable OCDBT. holdfast always stores arrays in an OCDBT database, but
accepts calls to these functions, so that programs written for Orbax run unchanged.
"""

from __future__ import annotations

from typing import Any

from .engine.arrays import AggregateHandler, MsgpackHandler
from .engine.errors import OptionError
from .engine.handlers import DEFAULT_REGISTRY, ParamInfo, TypeHandler, TypeHandlerRegistry, register_type_handler

__all__ = [
    "DEFAULT_REGISTRY",
    "AggregateHandler",
    "MsgpackHandler",
    "ParamInfo",
    "TypeHandler",
    "TypeHandlerRegistry",
    "create_coordinator_server_and_context",
    "register_standard_handlers_with_options",
    "register_type_handler",
]


def create_coordinator_server_and_context() -> tuple[None, None]:
    """Return ``None`` for the coordinator server and for the context that Orbax uses for OCDBT; neither is needed.

    Every process writes its own data files, and process 0 writes the database's index of all these files.
    """
    return None, None


def register_standard_handlers_with_options(*, use_ocdbt: bool = True, ts_context: Any = None) -> None:
    """Check that Orbax's handler options match what holdfast always does.

    Args:
        use_ocdbt: Must be true.
        ts_context: The context returned by :func:`create_coordinator_server_and_context`, which is None.

    Raises:
        OptionError: ``use_ocdbt`` is false, or ``ts_context`` is given.
    """
    if ts_context is not None:
        raise OptionError("ts_context: holdfast writes OCDBT databases without a context; leave it out")
    if not use_ocdbt:
        raise OptionError("use_ocdbt=False: holdfast always stores arrays in an OCDBT database; leave it out")
