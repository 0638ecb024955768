"""Leaves of one's own types: ``holdfast.type_handlers``, with the calls that elsewhere switch OCDBT on.

Here there is nothing to switch on: arrays are always kept in an OCDBT database. These calls are for programs that have
them, so that they run unchanged.
"""

from __future__ import annotations

from typing import Any

from .errors import OptionError
from .handlers.type_handlers import DEFAULT_REGISTRY as DEFAULT_REGISTRY
from .handlers.type_handlers import ParamInfo as ParamInfo
from .handlers.type_handlers import TypeHandler as TypeHandler
from .handlers.type_handlers import TypeHandlerRegistry as TypeHandlerRegistry
from .handlers.type_handlers import register_type_handler as register_type_handler
from .item import AggregateHandler as AggregateHandler
from .item import MsgpackHandler as MsgpackHandler


def create_coordinator_server_and_context() -> tuple[None, None]:
    """Returns the context and the server with which processes write to one OCDBT database: none, as none is needed.

    Every process writes data files of its own, and process 0 writes the database over all of them.
    """
    return None, None


def register_standard_handlers_with_options(*, use_ocdbt: bool = True, ts_context: Any = None) -> None:
    """Accepts the options with which arrays are kept here in any case.

    Args:
        use_ocdbt: Has to be true.
        ts_context: What :func:`create_coordinator_server_and_context` returned: None.

    Raises:
        OptionError: OCDBT is not to be used, or something else is to be used with it.
    """
    if ts_context is not None:
        raise OptionError("ts_context: holdfast writes OCDBT databases by itself, without a context; leave it out")
    if not use_ocdbt:
        raise OptionError("use_ocdbt=False: holdfast always keeps arrays in an OCDBT database; leave it out")
