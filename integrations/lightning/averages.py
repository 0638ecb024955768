"""Averages over an epoch that is not over yet: what ``self.log(..., on_epoch=True)`` and torchmetrics have seen so far.

Lightning's own checkpoints leave them out, so that the epoch's mean after a resume is that of the remaining batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_FACTS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)


def update_counts(trainer: Any) -> dict[str, int]:
    """Returns how often each of the module's torchmetrics has been updated since it was reset, by name."""
    return {name: int(metric._update_count) for name, metric in _metrics(trainer.lightning_module)}


def capture(trainer: Any, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Takes what has been accumulated since the epoch began.

    Args:
        trainer: The trainer, between two training batches.
        before: The update counts when an evaluation began that is going to be repeated: metrics that it has updated
            are left out.

    Returns:
        A tree of tensors and plain values.
    """
    logged = trainer.fit_loop.epoch_loop._results
    return {
        "logged": {key: _entry(metric) for key, metric in logged.items() if _is_kept(metric)},
        "metrics": {
            name: {
                "updates": int(metric._update_count),
                "states": {state: getattr(metric, state) for state in metric._defaults},
            }
            for name, metric in _metrics(trainer.lightning_module)
            if metric._update_count and (before is None or metric._update_count == before.get(name))
        },
    }


def restore(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Puts back what :func:`capture` took, before the first batch after a resume.

    Args:
        trainer: The trainer, about to go on in the middle of an epoch.
        saved: What ``capture`` returned.
    """
    _restore_metrics(trainer, saved["metrics"])
    results = trainer.fit_loop.epoch_loop._results
    modules = dict(_metrics(trainer.lightning_module))
    for key, entry in saved["logged"].items():
        attribute = entry["metric_attribute"]
        if attribute is not None and attribute not in modules:
            continue  # the module has changed
        logged = torch.zeros((), device=trainer.strategy.root_device) if attribute is None else modules[attribute]
        results.log(
            **{name: entry[name] for name in _FACTS},
            value=logged,
            reduce_fx=getattr(torch, entry["reduce"]),
            sync_dist=entry["sync_dist"],
            sync_dist_fn=trainer.strategy.reduce,
            rank_zero_only=entry["rank_zero_only"],
            batch_size=1,
        )
        metric = results[key]
        for name, value in entry["state"].items():
            setattr(metric, name, value.to(trainer.strategy.root_device))
        metric._forward_cache = None
        metric._computed = None
    if saved["logged"]:
        # In the first batch of an epoch, Lightning begins all averages anew. This is not the first one.
        trainer._logger_connector._first_loop_iter = True


def _restore_metrics(trainer: Any, saved: Mapping[str, Any]) -> None:
    present = dict(_metrics(trainer.lightning_module))
    for name, entry in saved.items():
        if (metric := present.get(name)) is None:
            continue
        for state, value in entry["states"].items():
            moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, state, moved)
        metric._update_count = entry["updates"]
        metric._computed = None


def _is_kept(metric: Any) -> bool:
    meta = metric.meta
    reduction = getattr(meta.reduce_fx, "__name__", "")
    return bool(
        meta.on_epoch
        and not metric.has_reset
        and meta.dataloader_idx is None
        and meta.sync.group is None
        and getattr(torch, reduction, None) is meta.reduce_fx
    )


def _entry(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    return {
        **{name: getattr(meta, name) for name in _FACTS},
        "reduce": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        # A torchmetrics.Metric that was logged is saved as part of the module.
        "state": {state: getattr(metric, state).detach() for state in metric._defaults} if metric.is_tensor else {},
    }


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Generates the torchmetrics of a module, by name."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, torchmetrics.Metric):
            yield name, part
