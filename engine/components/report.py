"""What a restore of components has done, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.report import lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentReport:
    """What was restored and what was not. Components are named by their paths, the root by ``(root)``.

    Attributes:
        checkpoint: Where the states come from.
        restored: Components of the program that were restored.
        missing: Components of the program that the checkpoint does not have; they stay as they are.
        unused: Components of the checkpoint that the program does not have.
        missing_values: Values of restored components that the checkpoint does not have: ``learner/p0: net/bias``.
        unused_values: Values of the checkpoint that a restored component has no place for.
    """

    checkpoint: str
    restored: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ()
    unused_values: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether program and checkpoint match exactly."""
        return not (self.missing or self.unused or self.missing_values or self.unused_values)

    def problems(self) -> list[str]:
        """Returns one line for each kind of thing that does not match."""
        return [
            *lines("components that the checkpoint does not have", self.missing),
            *lines("components that the program does not have", self.unused),
            *lines("values that the checkpoint does not have", self.missing_values),
            *lines("values that the program does not have", self.unused_values),
        ]

    def __str__(self) -> str:
        return "\n".join([f"{self.checkpoint}: {len(self.restored)} components restored", *self.problems()])
