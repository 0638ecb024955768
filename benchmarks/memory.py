"""Memory that an operation needs in addition to the arrays, as the kernel counts it."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5\n"  # proc_pid_clear_refs(5): resets the peak resident set size


class PeakMemory:
    """The high-water mark of the resident set since construction, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        self._resettable = _reset()
        self._base = _field(STATUS, "VmRSS")

    def rise(self) -> int | None:
        """Return the bytes of the highest level above the first one; None where the kernel refuses to reset."""
        return _field(STATUS, "VmHWM") - self._base if self._resettable else None


def _reset() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file} has no field {name}")


class Reserve:
    """Touched memory, held ready for the next measurement.

    A virtual machine may hand free memory back to its host (virtio-balloon's free page reporting does after two
    seconds), and to touch it again then costs seconds for a gigabyte, several times what a load takes. So the harness
    holds memory that it has touched, and frees it right before something is measured.

    Args:
        nbytes: How much; less where the machine has not got three times as much available.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._mapping: mmap.mmap | None = None

    def hold(self) -> None:
        """Take and touch the memory."""
        nbytes = min(self._nbytes, _field(MEMORY, "MemAvailable") // 3)
        self._mapping = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, len(self._mapping), mmap.PAGESIZE):
            self._mapping[start] = 1

    def release(self) -> None:
        """Free the memory, still warm."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
