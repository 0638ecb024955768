"""What a save did and what it cost, as data and as one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One completed save.

    Attributes:
        step: Its step, or None for a save outside a manager.
        path: The checkpoint's directory.
        reason: Why it was saved.
        bytes: Bytes written.
        blocked_seconds: How long the training loop had to wait.
        total_seconds: From the call until the checkpoint was durable.
    """

    step: int | None
    path: str
    reason: str
    bytes: int
    blocked_seconds: float
    total_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """Returns the bytes written for each second in all, in units of 1e9 bytes a second."""
        return self.bytes / 1e9 / self.total_seconds if self.total_seconds > 0 else 0.0

    def __str__(self) -> str:
        what = self.path if self.step is None else f"step {self.step}"
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"saved {what}{why}: {_size(self.bytes)}, blocked {self.blocked_seconds:.3f} s, "
            f"{self.total_seconds:.3f} s in all, {self.gigabytes_per_second:.2f} GB/s"
        )


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
