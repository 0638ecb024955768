"""What listeners of a run hear."""

from __future__ import annotations

from typing import Any

import holdfast as hf


def heard(run: hf.CheckpointManager, name: str = "saved") -> list[dict[str, Any]]:
    """Return a list that gets the events of a name, such as those of all commits."""
    found: list[dict[str, Any]] = []
    run.events.add_listener(lambda event: found.append(event) if event["event"] == name else None)
    return found
