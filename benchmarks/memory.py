"""Memory that an operation needs beside the arrays themselves, as the kernel counts it."""

from __future__ import annotations

import gc
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5\n"  # proc_pid_clear_refs(5): resets the peak resident set size


class PeakMemory:
    """The high-water mark of the resident set since construction, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        self._resettable = _reset()
        self._base = _field("VmRSS")

    def rise(self) -> int | None:
        """Returns the bytes of the highest level above the first one; None where the kernel refuses to reset."""
        return _field("VmHWM") - self._base if self._resettable else None


def _reset() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no field {name}")
