"""Save and restore module state outside the state dict: epoch averages, metrics, and flags such as ``requires_grad``.

Lightning's own checkpoints omit this state. After resuming from one, epoch averages cover only the remaining batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from ...engine.errors import shortened
from ...engine.pytree import loaded
from ..graph import accumulated, set_accumulated
from .private_api import logged_averages, restore_logged
from .strategies import live_names

logger = logging.getLogger("holdfast")

# ---- averages over an epoch, from self.log(..., on_epoch=True) and torchmetrics


def capture_averages(trainer: Any) -> dict[str, Any]:
    """Return the averages logged so far in this epoch and the state of all metrics that have been updated."""
    return {
        "logged": logged_averages(trainer),
        "metrics": {
            name: entry
            for name, metric in _metrics(trainer.lightning_module).items()
            # Wrappers such as RunningMean do not count updates, so also include metrics with additional state.
            if (entry := accumulated(metric))["updates"] or entry["states"].keys() != metric._defaults.keys()
        },
    }


def restore_averages(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Restore the state returned by :func:`capture_averages`; warn about metrics that the module no longer has."""
    entries = saved.get("metrics", {})
    _grow_trackers(trainer.lightning_module, entries)
    metrics = _metrics(trainer.lightning_module)
    live, lost = live_names(entries, metrics), []
    for name, entry in entries.items():
        if (metric := metrics.get(live[name])) is None:
            lost.append(name)
        else:
            set_accumulated(metric, entry)
    if lost and trainer.is_global_zero:
        logger.warning("the module lacks metrics that the checkpoint has; they are ignored: %s", shortened(lost))
    restore_logged(trainer, saved.get("logged", {}), metrics)


def _metrics(module: Any) -> dict[str, Any]:
    torchmetrics: Any = loaded("torchmetrics")
    if torchmetrics is None:
        return {}
    parts = dict(module.named_modules())
    for part in parts.values():
        if isinstance(part, torchmetrics.MetricCollection):
            part.values()  # makes metrics in the same compute group share their state
    return {name: part for name, part in parts.items() if isinstance(part, torchmetrics.Metric)}


def _grow_trackers(module: Any, names: Collection[str]) -> None:
    """Extend each MetricTracker until it has as many metrics as in the checkpoint."""
    tracker: Any = getattr(loaded("torchmetrics"), "MetricTracker", None)
    for path, part in list(module.named_modules()) if tracker is not None else ():
        if isinstance(part, tracker):
            keys = [name.removeprefix(f"{path}.").partition(".")[0] for name in names if name.startswith(f"{path}.")]
            for _ in range(len(part), 1 + max((int(key) for key in keys if key.isdecimal()), default=-1)):
                part.increment()


# ---- flags of a module that a program changes during training, and that no state dict contains


_Flags = dict[str, dict[str, bool]]


class ModuleSwitches:
    """Tracks changes to a module's flags: ``requires_grad``, ``training``, and ``track_running_stats``."""

    # A program may set flags before training begins, and set different values before it resumes. To respect the new
    # values, save only the flags that have changed during training, in this process or an earlier one.

    def __init__(self, module: Any) -> None:
        self._module = module
        self._at_start = _flags(module)
        self._earlier: _Flags = {}

    def switched(self) -> str:
        """Return the changed flags as a JSON string, or an empty string if no flag has changed."""
        changed = {
            flag: {
                name: value
                for name, value in values.items()
                if self._at_start[flag].get(name) != value or name in self._earlier.get(flag, ())
            }
            for flag, values in _flags(self._module).items()
        }
        return json.dumps(changed) if any(changed.values()) else ""

    def restore(self, switched: str) -> None:
        """Restore the flags returned by :meth:`switched` for all parameters and submodules that still exist."""
        self._earlier = json.loads(switched) if switched else {}
        parameters, parts = dict(self._module.named_parameters()), dict(self._module.named_modules())
        for flag, values in self._earlier.items():
            owners: dict[str, Any] = parameters if flag == "requires_grad" else parts
            for name, live in live_names(values, owners).items():
                if live in owners:
                    setattr(owners[live], flag, values[name])


def _flags(module: Any) -> _Flags:
    parts = dict(module.named_modules())
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "training": {name: part.training for name, part in parts.items()},
        "track_running_stats": {
            name: part.track_running_stats for name, part in parts.items() if hasattr(part, "track_running_stats")
        },
    }
