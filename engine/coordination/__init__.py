"""Who else takes part in saving and loading: nobody, or other processes of the same program."""

from __future__ import annotations

from .alone import Alone
from .coordinator import Coordinator
from .member import Member

__all__ = ["Alone", "Coordinator", "Member"]
