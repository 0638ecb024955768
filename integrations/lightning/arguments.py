"""The arguments of the callback."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from ...engine.errors import OptionError
from ...engine.manager import CheckpointManagerOptions, has_triggers, limits
from ...engine.storage import Location, Place, as_location
from ..options import ProgramOptions

_EXPORTS = (".safetensors", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class CallbackArguments(ProgramOptions):
    """The arguments of :class:`~holdfast.integrations.lightning.CheckpointCallback`."""

    dirpath: Place = field(kw_only=False)
    every_n_epochs: int | None = field(default=None, metadata=limits(1))
    save_on_exception: bool = False
    export_best: Place | None = None
    links: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item_intervals:
            raise OptionError(
                f"item_intervals={self.item_intervals!r}: a checkpoint of a Lightning run has the items state and, of "
                "several processes, process, and a run resumes from both; leave it out"
            )
        if self.export_best is not None:
            if self.best_fn is None:
                raise OptionError("export_best= needs best_fn: the name of a metric, or a function of the metrics")
            if not self.export_place.name.endswith(_EXPORTS):
                raise OptionError(f"export_best={self.export_best!r} must end in {' or '.join(_EXPORTS)}")

    @property
    def export_place(self) -> Location:
        """The file of ``export_best``."""
        assert self.export_best is not None
        text = str(self.export_best)
        is_relative = "://" not in text and not text.startswith(("/", "~"))
        return as_location(self.dirpath) / text if is_relative else as_location(self.export_best)

    def manager_options(self) -> CheckpointManagerOptions:
        """Return the same options for a manager, which does not count epochs."""
        options = super().manager_options()
        if has_triggers(self) or self.every_n_epochs is None:
            return options
        # Without any trigger, the manager would save every step.
        return replace(options, save_interval_steps=sys.maxsize, save_interval_secs=None)

    def epoch_reason(self, epochs: int) -> str | None:
        """Return why a save is due after so many epochs, or None."""
        if self.every_n_epochs is None or epochs % self.every_n_epochs:
            return None
        return "every epoch" if self.every_n_epochs == 1 else f"every {self.every_n_epochs} epochs"
