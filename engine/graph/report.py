"""What a restore has done and what it has not, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What is known of a restore at one moment. All paths are written as people read them: ``net/l1/weight``.

    Attributes:
        checkpoint: Where the values come from; ``""`` where no checkpoint was given.
        restored: Values in the program that were restored.
        missing: Values in the program for which the checkpoint has none.
        pending: Values of the checkpoint that wait for an object.
        unused: Values of the checkpoint whose place in the program is taken by something that has no such value.
        conflicts: Objects of the checkpoint that are two different objects in the program: the path in the checkpoint,
            and both in the program.
        skipped: What is in the program and is neither saved nor restored, each with the reason.
        nontrivial: Whether anything but the root was found in the checkpoint.
    """

    checkpoint: str
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    pending: tuple[str, ...]
    unused: tuple[str, ...]
    conflicts: tuple[tuple[str, str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    nontrivial: bool

    @property
    def complete(self) -> bool:
        """Whether program and checkpoint match exactly."""
        return not (self.missing or self.pending or self.unused or self.conflicts)

    def __str__(self) -> str:
        parts = [f"{self.checkpoint or 'no checkpoint'}: {len(self.restored)} values restored"]
        parts += lines("in the program, not in the checkpoint", self.missing)
        parts += lines("in the checkpoint, not in the program", self.pending)
        parts += lines("in the checkpoint; in the program something else is in its place", self.unused)
        parts += lines(
            "one object in the checkpoint, two in the program",
            [f"{saved}: {one} and {other}" for saved, one, other in self.conflicts],
        )
        return "\n".join(parts)


def lines(what: str, paths: list[str] | tuple[str, ...], most: int = 10) -> list[str]:
    """Returns lines for people that name paths, the first few of them.

    Args:
        what: What they have in common.
        paths: The paths.
        most: How many to name.
    """
    if not paths:
        return []
    more = f", and {len(paths) - most} more" if len(paths) > most else ""
    return [f"  {what} ({len(paths)}): {', '.join(paths[:most])}{more}"]
