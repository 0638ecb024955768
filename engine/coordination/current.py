"""Which processes this program consists of."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .alone import Alone
from .coordinator import Coordinator
from .jax_coordinator import JaxCoordinator
from .torch_coordinator import TorchCoordinator

_ALONE = Alone()


def current_coordinator() -> Coordinator:
    """Finds out how many processes this program has, and how they reach each other.

    A program has several if ``jax.distributed`` is initialized with more than one process or, where that is not so,
    ``torch.distributed`` with a world of more than one; otherwise it is alone. Nothing is imported or initialized, and
    nobody else is asked, so that it can be called as often as one likes.

    Returns:
        What connects them; the same object for as long as that connection lasts.
    """
    return _jax.find() or _torch.find() or _ALONE


class _JaxProgram:
    """Keeps the coordinator of the jax program that this process belongs to."""

    def __init__(self) -> None:
        self._client: Any = None
        self._started = False
        self._made: JaxCoordinator | None = None

    def find(self) -> JaxCoordinator | None:
        # jax's public functions for this would choose and start a backend.
        state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
        client = getattr(state, "client", None)
        if state is None or client is None or (state.num_processes or 1) < 2:
            self._client = self._made = None
            return None
        backends = sys.modules.get("jax._src.xla_bridge")
        started = backends is not None and bool(backends.backends_are_initialized())
        made = self._made
        if made is None or client is not self._client:
            made = JaxCoordinator(client, int(state.process_id), int(state.num_processes))
            self._client, self._started, self._made = client, False, made
        if started is not self._started:
            # Holders of arrays are numbered by the backend, which may count otherwise than the service (on TPUs).
            made.process_index = int(sys.modules["jax"].process_index())
            self._started = started
        return made


class _TorchProgram:
    """Keeps the coordinator of the torch program that this process belongs to."""

    def __init__(self) -> None:
        self._group: weakref.ref[Any] | None = None
        self._made: TorchCoordinator | None = None

    def find(self) -> TorchCoordinator | None:
        distributed: Any = sys.modules.get("torch.distributed")
        initialized = getattr(distributed, "is_initialized", None)  # not there in builds without it
        if initialized is None or not initialized():
            self._group = self._made = None
            return None
        group = distributed.group.WORLD
        if self._group is None or self._group() is not group:
            # Made without a lock: a second one, made by another thread meanwhile, would reach the same store.
            self._made = _connect(distributed) if distributed.get_world_size() > 1 else None
            self._group = weakref.ref(group)
        return self._made


def _connect(distributed: Any) -> TorchCoordinator:
    store = distributed.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):  # torch 2.8: a connection of one's own, which the process group does not keep busy
        store = store.clone()
    store = distributed.PrefixStore("holdfast", store)
    return TorchCoordinator(store, int(distributed.get_rank()), int(distributed.get_world_size()))


_jax = _JaxProgram()
_torch = _TorchProgram()
