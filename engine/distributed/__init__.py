"""The processes of a program: how they find each other, exchange values and wait for each other."""

from __future__ import annotations

from .all_gather import AllGather, Teams, Transport, transport_of
from .coordinators import (
    Alone,
    Coordinator,
    ProcessInfo,
    current_coordinator,
    machine_identity,
    primary_host,
    shares_machine,
)
from .process_group import ProcessGroup, run_on_primary
from .rendezvous import BoundedCoordinator, Rendezvous, call_within, next_rendezvous
