"""Who else takes part in saving and loading: nobody, or other processes of the same program."""

from __future__ import annotations

from .alone import Alone
from .coordinator import Coordinator
from .current import current_coordinator
from .group import Group, next_group
from .member import Member
from .memory import MemoryCoordinator, memory_coordinators

__all__ = [
    "Alone",
    "Coordinator",
    "Group",
    "Member",
    "MemoryCoordinator",
    "current_coordinator",
    "memory_coordinators",
    "next_group",
]
