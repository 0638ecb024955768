"""Multi-process programs: how processes connect and wait for each other, and a check that their trees agree."""

from .engine.checkpoint import check_replicas
from .engine.distributed import Alone, Coordinator, ProcessInfo, current_coordinator

__all__ = ["Alone", "Coordinator", "ProcessInfo", "check_replicas", "current_coordinator"]
