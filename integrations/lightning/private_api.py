"""Access private Lightning names and wrap Lightning methods.

Lightning calls callback hooks before its loops have finished their bookkeeping: after ``on_train_batch_end``, it calls
the module's own hook, runs validation, and steps the schedulers; after ``on_train_epoch_end``, it does the same for the
epoch. A checkpoint saved in a hook would lack these results. Therefore, :class:`LoopHooks` wraps the loop methods
that make all of these calls, but only for the objects of one trainer and for one run.

A trainer selects its checkpoint before it calls any hook. Therefore, the first callback that is created uses
:func:`follow_choices` to wrap the selection method of the connector class.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from ...engine.errors import StateError

logger = logging.getLogger("holdfast")

# ---- the private names, which `check_version` looks for

NAMES = {  # keyed by attribute path, starting at the trainer
    "": ("_accelerator_connector", "_checkpoint_connector", "_logger_connector", "_signal_connector"),
    "_checkpoint_connector": (
        *("_hpc_resume_path", "_loaded_checkpoint", "_parse_ckpt_path", "dump_checkpoint"),
        *("restore_training_state", "resume_start"),
    ),
    "_logger_connector": ("_first_loop_iter",),
    "_signal_connector": ("_original_handlers", "received_sigterm", "register_signal_handlers"),
    "fit_loop": (
        *("_can_stop_early", "_combined_loader", "_last_train_dl_reload_epoch"),
        *("_load_combined_loader_states", "epoch_progress", "on_advance_end", "on_advance_start", "on_iteration_done"),
    ),
    "fit_loop.epoch_loop": (
        *("_num_ready_batches_reached", "_restarting", "_results", "_should_accumulate", "_should_check_val_fx"),
        *("_batches_that_stepped", "advance", "batch_progress", "on_run_start"),
    ),
    "fit_loop.epoch_loop.val_loop": (
        *("_combined_loader", "_has_run", "_last_val_dl_reload_epoch", "batch_progress", "restarting", "setup_data"),
    ),
}
NAMES_OF_CLASSES = {  # keyed by the strategy or callback class
    "DDPStrategy": ("_ddp_comm_state", "_ddp_kwargs"),
    "ModelParallelStrategy": ("_save_distributed_checkpoint",),
    "LearningRateFinder": ("_early_exit",),
    "BatchSizeFinder": ("_early_exit",),
}
_CONNECTOR = "trainer.connectors.checkpoint_connector"
NAMES_IN_MODULES = {  # keyed by submodule of the package; may include attributes set in __init__
    "core.saving": ("_load_state", "_pl_migrate_checkpoint"),
    "utilities.combined_loader": (
        *("CombinedLoader.flattened", "CombinedLoader._iterator"),
        *("_MaxSizeCycle._consumed", "_ModeIterator.iterators"),
    ),
    "trainer.connectors.signal_connector": ("_HandlersCompose",),
    _CONNECTOR: ("_CheckpointConnector",),
    "trainer.connectors.logger_connector.result": (
        *("_ResultCollection.log", "_ResultMetric.has_reset", "_ResultMetric.is_tensor", "_ResultMetric.meta"),
        *("_Metadata.metric_attribute", "_Metadata.sync", "_Sync.group", "_Sync.should"),
    ),
}
_GIVEN = "holdfast_given_path"  # checkpoint connector attribute that stores the ``ckpt_path`` given by the caller
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

# Keep references to released child processes, because Python warns if a running Popen is garbage-collected.
_released: list[subprocess.Popen[bytes]] = []

# A trainer with an auto-resuming callback behaves as if called with ``ckpt_path="last"``. Lightning then warns about a
# missing model and, in a first run, about a missing "last" checkpoint. Both warnings would confuse the user.
_MISLEADING = (
    r"`\.fit\(ckpt_path=None\)` was called without a model\.",
    r'\.fit\(ckpt_path="last"\) is set, but there is no last checkpoint available\.',
)


def missing_names(trainer: Any) -> list[str]:
    """Return the names in the tables above, such as ``trainer.fit_loop.run``, that this version of Lightning lacks."""
    missing = []
    for path, names in NAMES.items():
        owner: Any = trainer
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part, None)
        missing += [".".join(filter(None, ("trainer", path, name))) for name in names if not _has(owner, name)]
    for owner in (trainer.strategy, *trainer.callbacks):
        for base in class_names(owner) & NAMES_OF_CLASSES.keys():
            missing += [f"{base}.{name}" for name in NAMES_OF_CLASSES[base] if not _has(owner, name)]
    for path, names in NAMES_IN_MODULES.items():
        module = importlib.import_module(f"{package_of(type(trainer))}.{path}")
        missing += [f"{module.__name__}.{name}" for name in names if not _has_path(module, name)]
    return missing


def _has(owner: Any, name: str) -> bool:
    return name in dir(type(owner)) or name in getattr(owner, "__dict__", ())


def _has_path(module: Any, name: str) -> bool:
    class_name, _, attribute = name.rpartition(".")
    if not class_name:
        return hasattr(module, name)
    owner = getattr(module, class_name, None)
    return owner is not None and (hasattr(owner, attribute) or attribute in owner.__init__.__code__.co_names)


def check_version(trainer: Any) -> None:
    """Raise StateError if the callback needs private names that this version of Lightning does not have."""
    if missing := missing_names(trainer):
        raise StateError(
            f"{package_of(type(trainer))} differs internally from the versions that holdfast supports (2.5 and 2.6); "
            f"it has no {', '.join(missing)}"
        )


def package_of(derived: type) -> str | None:
    """Return the Lightning package (``lightning.pytorch`` or ``pytorch_lightning``) that a class derives from."""
    names = (base.__module__ for base in derived.__mro__)
    return next((package for name in names for package in _PACKAGES if name.startswith(f"{package}.")), None)


def follow_choices(callback: type) -> None:
    """Make every trainer record the path given to ``fit``, and ignore Lightning's own SLURM requeue checkpoints."""
    for package in _PACKAGES:
        connector: Any = getattr(sys.modules.get(f"{package}.{_CONNECTOR}"), "_CheckpointConnector", None)
        choose = getattr(connector, "_parse_ckpt_path", None)  # missing names are reported by `check_version`
        if choose is not None and not hasattr(choose, "__wrapped__"):
            connector._parse_ckpt_path = _following(choose, callback)


def _following(original: Callable[..., Any], callback: type) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        vars(self)[_GIVEN] = ckpt_path
        models = {"model_provided": model_provided, "model_connected": model_connected}
        if not any(isinstance(present, callback) for present in self.trainer.callbacks):
            return original(self, state_fn, ckpt_path, **models)
        if ckpt_path is None and _is_in_slurm() and is_left_alone(self.trainer, self._hpc_resume_path):
            # Use the defaults that Lightning uses if there is no requeue checkpoint.
            if state_fn != "fit" and model_provided:
                return None
            ckpt_path = "last" if state_fn == "fit" else "best"
        with warnings.catch_warnings():
            for message in _MISLEADING:
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            return original(self, state_fn, ckpt_path, **models)

    return parse


def was_given_no_path(trainer: Any) -> bool:
    return vars(trainer._checkpoint_connector).get(_GIVEN, "") is None


def forget_choice(trainer: Any) -> None:
    """Clear the recorded path when a run ends, because the next run may not record one."""
    vars(trainer._checkpoint_connector).pop(_GIVEN, None)


def is_left_alone(trainer: Any, path: Any) -> bool:
    """Return whether the path is a SLURM requeue checkpoint that Lightning selected; if so, log that it is ignored."""
    connector = trainer._checkpoint_connector
    # If the module creates the first callback, recording starts only after the trainer has chosen a path.
    was_chosen = path and _is_in_slurm() and vars(connector).get(_GIVEN) is None
    if not was_chosen or path != connector._hpc_resume_path:
        return False
    logger.warning("%s is ignored: Lightning saved it for requeueing; ckpt_path='hpc' resumes from it", path)
    return True


def _is_in_slurm() -> bool:
    return "SLURM_NTASKS" in os.environ


class LoopHooks:
    """Wraps methods of individual objects. Wrappers take effect only while ``applies()`` is true."""

    def __init__(self, applies: Callable[[], bool] = lambda: True) -> None:
        self._placed: list[tuple[Any, str, Any, Any]] = []
        self._active = True
        self._applies = applies

    def place(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a method of one object; the wrapper is called with the original method and its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._active or not self._applies():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._placed.append((owner, name, vars(owner).get(name), method))
        setattr(owner, name, method)

    def remove(self) -> None:
        """Remove all wrappers. If a wrapper has itself been wrapped, it stays, but only calls the original method."""
        self._active = False
        for owner, name, before, method in reversed(self._placed):
            if vars(owner).get(name) is not method:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._placed.clear()


def clear_restart(loop: Any) -> None:
    """Clear the restart state of a loop and its nested loops, so that they do not act on restored counters."""
    # A restored loop infers from its counters which hook it was saved in, and then increments steps and skips
    # validation and schedulers. That would be wrong here, because the checkpoint was saved between batches.
    loop.on_iteration_done()
    for child in vars(loop).values():
        if hasattr(child, "on_iteration_done"):
            clear_restart(child)


def finish_epoch(progress: Any, *, within: bool = False) -> None:
    """Set the loop counters to their end-of-epoch values; ``within`` is True if the run was saved mid-epoch."""
    for tracker in (progress.total, progress.current):
        count = tracker.ready if within else tracker.processed
        tracker.ready = tracker.started = tracker.processed = tracker.completed = count


# ---- parts of trainers, loops and strategies


LOGGED_STEP = "_batches_that_stepped"  # epoch loop attribute with the step at which the next batch is logged
LOADERS_MADE = "_load_combined_loader_states"  # fit loop method, called after loaders (but not iterators) are created

# The connector selects, saves, and restores a trainer's checkpoints. It also holds the checkpoint being restored.
checkpoint_connector = attrgetter("_checkpoint_connector")
loaded_checkpoint = attrgetter("_checkpoint_connector._loaded_checkpoint")
signal_connector = attrgetter("_signal_connector")
cluster_environment = attrgetter("_accelerator_connector.cluster_environment")
iterator_of = attrgetter("_iterator")  # the current iterator over all loaders of a combined loader


def class_names(instance: Any) -> set[str]:
    """Return the names of an object's class and all its base classes."""
    return {base.__name__ for base in type(instance).__mro__}


def callbacks_of(trainer: Any, *names: str) -> list[Any]:
    """Return the trainer's callbacks whose class, or one of its base classes, has one of the given names."""
    return [callback for callback in trainer.callbacks if not class_names(callback).isdisjoint(names)]


def handler_before_lightnings(connector: Any, number: signal.Signals) -> Any:
    """Return the signal handler that was installed before Lightning's own; None if there was none."""
    return connector._original_handlers.get(number)


def is_lightnings_handler(handler: Any) -> bool:
    return type(handler).__name__ == "_HandlersCompose"


def dump_checkpoint(trainer: Any, *, weights_only: bool = False) -> dict[str, Any]:
    dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=weights_only)
    return dumped


def loaders_of(loop: Any) -> list[Any]:
    """Return the data loaders of a loop, or an empty list before they are set up."""
    return list(loop._combined_loader.flattened) if has_loaders(loop) else []


def has_loaders(loop: Any) -> bool:
    return loop._combined_loader is not None


def forget_loaders(loop: Any) -> None:
    """Make a loop create its data loaders again before it uses them."""
    loop._combined_loader = None


def have_ended(combined: Any) -> list[bool]:
    """Return whether each loader has been exhausted; the list is empty in modes that do not restart loaders."""
    return list(getattr(combined._iterator, "_consumed", ()))


def set_ended(combined: Any, ended: Sequence[bool]) -> None:
    """Restore the flags returned by :func:`have_ended`; loaders exhausted since then stay exhausted."""
    if hasattr(combined._iterator, "_consumed") and ended:
        combined._iterator._consumed = [saved or now for saved, now in zip(ended, have_ended(combined), strict=True)]


def draws_ahead(fetcher: Any) -> bool:
    """Return whether a fetcher prefetches one batch to detect the end of a dataset without a length."""
    return fetcher.length is None and hasattr(fetcher, "batches")


def reloaded_at_epoch(loop: Any) -> Any:
    """Return the epoch in which a loop last created its data loaders."""
    return getattr(loop, _reload_name(loop))


def set_reloaded_at_epoch(loop: Any, epoch: Any) -> None:
    setattr(loop, _reload_name(loop), epoch)


def _reload_name(loop: Any) -> str:
    return f"_last_{'train' if hasattr(loop, 'epoch_loop') else 'val'}_dl_reload_epoch"


def is_accumulating(fit: Any) -> bool:
    """Return whether gradients are being accumulated and more batches follow before the next update."""
    return bool(fit.epoch_loop._should_accumulate())


def has_done_all_batches(fit: Any) -> bool:
    return bool(fit.epoch_loop._num_ready_batches_reached())


def is_over(fit: Any) -> bool:
    """Return whether the run ends at this point. Unlike ``fit.done``, this does not log a message."""
    return (
        _reached(fit.epoch_loop.global_step, fit.max_steps)
        or _reached(fit.epoch_progress.current.processed, fit.max_epochs)
        or bool(fit.trainer.should_stop and fit._can_stop_early)
    )


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and limit != -1 and count >= limit


def skip_sanity_check(fit: Any) -> None:
    """Skip the trainer's sanity check by marking the validation loop as restarting; see :func:`clear_restart`."""
    fit.epoch_loop.val_loop.restarting = True


def validates_next(fit: Any, fetcher: Any) -> bool:
    return bool(fit.epoch_loop._should_check_val_fx(fetcher))


def restart_in_validation(fit: Any) -> None:
    """Make the loop resume at the start of the validation that follows its last batch."""
    progress = fit.epoch_loop.val_loop.batch_progress
    for name, done in vars(progress.current).items():
        setattr(progress.total, name, max(0, getattr(progress.total, name) - done))
    progress.current.reset()
    fit.epoch_loop.val_loop._has_run = False
    fit.epoch_loop._restarting = True


def gathers_in_one_process(strategy: Any) -> bool:
    return not strategy._save_distributed_checkpoint


def averages_models(strategy: Any) -> bool:
    return type(getattr(strategy, "_ddp_comm_state", None)).__name__ == "PostLocalSGDState"


def keeps_own_buffers(strategy: Any) -> bool:
    """Return whether buffers may differ between processes, because the strategy does not broadcast them."""
    options = getattr(strategy, "_ddp_kwargs", {"broadcast_buffers": False})
    return strategy.world_size > 1 and not options.get("broadcast_buffers", True)


def release_children(trainer: Any) -> None:
    """Prevent a trainer from killing its child processes if one of them exits with a nonzero status."""
    processes = getattr(trainer.strategy.launcher, "procs", None)
    if isinstance(processes, list):
        _released.extend(processes)
        processes.clear()


def made_from(
    package: str,
    module_class: Any,
    checkpoint: dict[str, Any],
    path: str,
    strict: bool | None,
    given: Mapping[str, Any],
) -> Any:
    """Create a module from a Lightning checkpoint dictionary; ``given`` arguments override saved hyperparameters."""
    saving = importlib.import_module(f"{package}.core.saving")
    checkpoint = saving._pl_migrate_checkpoint(checkpoint, path)
    checkpoint.setdefault("hyper_parameters", {}).update(given)
    return saving._load_state(module_class, checkpoint, strict, **given)


# ---- the values that `self.log(..., on_epoch=True)` has accumulated in an epoch


_FACTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)


def logged_averages(trainer: Any) -> dict[str, Any]:
    """Return the epoch averages that the module has logged since the epoch began, keyed by result name."""
    return {key: _entry(metric) for key, metric in trainer.fit_loop.epoch_loop._results.items() if _is_kept(metric)}


def restore_logged(trainer: Any, saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Restore the averages returned by :func:`logged_averages`; ``metrics`` maps names to the module's metrics."""
    results = trainer.fit_loop.epoch_loop._results
    for key, entry in saved.items():
        attribute = entry["metric_attribute"]
        if attribute is not None and attribute not in metrics:
            continue  # The module no longer has this metric.
        logged = torch.zeros((), device=trainer.strategy.root_device) if attribute is None else metrics[attribute]
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
    if saved:  # Otherwise Lightning would reset the averages at the first batch of the epoch.
        trainer._logger_connector._first_loop_iter = True


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
        # This entry omits the state of a logged torchmetrics.Metric, which `capture_averages` saves with all metrics.
        "state": {state: getattr(metric, state).detach() for state in metric._defaults} if metric.is_tensor else {},
    }


# ---- Lightning's searches for a learning rate and a batch size
#
# ``LearningRateFinder`` and ``BatchSizeFinder`` search in ``on_fit_start``, and restore a temporary checkpoint after
# their trials. In a resumed run, that checkpoint would replace the one that is already being loaded.


FINDERS = ("LearningRateFinder", "BatchSizeFinder")


def is_search_file(path: object) -> bool:
    """Return whether a path is the temporary checkpoint that a search restores after its trials."""
    return os.path.basename(str(path)).startswith((".lr_find", ".scale_batch_size"))


def only_searches(trainer: Any) -> bool:
    """Return whether a ``Tuner`` started this ``fit`` only to search for a value."""
    return any(finder._early_exit for finder in callbacks_of(trainer, *FINDERS))
