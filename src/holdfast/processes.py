"""Multi-process programs: coordination between processes, and a check that replicated values are equal."""

from .engine.checkpoint import check_replicas
from .engine.distributed import Alone, Coordinator, ProcessInfo, current_coordinator

__all__ = ["Alone", "Coordinator", "ProcessInfo", "check_replicas", "current_coordinator"]
