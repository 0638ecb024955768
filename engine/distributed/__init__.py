"""The processes of a program: how they find each other, exchange values and wait for each other."""

from __future__ import annotations

from .coordinators import Alone, Coordinator, ProcessInfo, current_coordinator, shares_machine
from .process_group import ProcessGroup, run_on_primary
from .rendezvous import BoundedCoordinator, Rendezvous, next_rendezvous
