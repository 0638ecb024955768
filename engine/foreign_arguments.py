"""Hints for error messages: the holdfast equivalents of Orbax, Lightning, Ray and RLlib names and arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from .errors import UnknownArgumentError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

_FOREIGN: Mapping[str, str] = {
    # arguments of Lightning's ModelCheckpoint
    "every_n_train_steps": "here it is save_interval_steps",
    "every_n_epochs": "use save_interval_steps with the number of updates in an epoch",
    "train_time_interval": 'here it is save_interval_secs: seconds, or "15m"',
    "save_top_k": "here it is max_to_keep, where None keeps all",
    "monitor": "here it is best_fn",
    "mode": "here it is best_mode",
    "dirpath": "the directory is the first argument of callbacks and managers, and directory: in a configuration",
    "directory": "the directory is the first argument of callbacks and managers",
    "filename": "a step is a directory named by its number; its metrics are stored inside",
    "save_last": "leave it out: the newest checkpoint is always kept",
    "save_weights_only": "a checkpoint always holds everything; hf.export_checkpoint writes the weights alone",
    "save_on_exception": "only a Lightning trainer takes it",
    "verbose": "leave it out: every save is logged by the logger holdfast",
    # arguments of Orbax's CheckpointManagerOptions
    "step_format_fixed_length": "here it is step_name_width",
    "step_name_format": "of the name of a step, only step_prefix and step_name_width can be chosen",
    "save_on_steps": "save such a step with manager.save(step, ..., force=True); keep_steps keeps it",
    "should_save_fn": "decide in the loop, and save with manager.save(step, ..., force=True)",
    "save_decision_policy": "here it is save_interval_steps, save_interval_secs and save_on_best",
    "preservation_policy": "here it is max_to_keep, keep_latest, keep_period, keep_time_interval and keep_steps",
    "create": "leave it out: the directory is made when something is saved",
    "cleanup_tmp_directories": "leave it out: remains of interrupted saves are always removed",
    "enable_async_checkpointing": "leave it out: saves run in the background, and wait_until_finished waits",
    "async_options": "here it is save_timeout_secs of CheckpointManagerOptions",
    "todelete_subdir": "leave it out: a step that no rule keeps is deleted at once",
    "todelete_full_path": "leave it out: a step that no rule keeps is deleted at once",
    "single_host_load_and_broadcast": "here it is load_and_broadcast of CheckpointManagerOptions",
    # manager arguments that functions with a path argument do not accept
    "step": "give the path of the step, such as runs/digits/400; the path of a run is that of its newest step",
    # arguments of Orbax's handlers
    "ocdbt_target_data_file_size": "here it is data_file_bytes of PyTreeCheckpointHandler, or of hf.Layout",
    "save_concurrent_gb": "leave it out: a save writes from its snapshot, with a few threads; pinned_bytes limits "
    "the memory for copies from GPUs",
    "save_device_host_concurrent_gb": "here it is pinned_bytes: the memory for copies from GPUs",
    "restore_concurrent_gb": "leave it out: a load needs a twelfth of the bytes it reads beside the arrays themselves",
    "use_zarr3": "leave it out: arrays are always stored as zarr v3",
    "use_compression": "here it is compression: the level of zstd",
    "multiprocessing_options": "here it is coordinator=, of checkpointers and managers",
    # arguments of Orbax's methods
    "args": 'pass the tree itself, or a dictionary of items: manager.save(step, {"state": tree}); '
    "manager.restore(step, template)",
    "options": "hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(...)) takes it; "
    "hf.CheckpointCallback(directory, max_to_keep=3) takes options one by one",
    "item_names": 'leave it out: manager.save(step, {"state": tree}) names the items',
    "item_handlers": "here it is checkpointers: a dictionary of them by item",
    "checkpoint_args": "here it is save_kwargs or restore_kwargs of managers",
    "read": "manager.reload() reads the directory again",
    "checkpointables": 'here managers take a dictionary of items: manager.save(step, {"state": tree})',
    "abstract_state": "here it is like: a tree of arrays, or of jax.ShapeDtypeStruct",
    "abstract_pytree": "here it is like: a tree of arrays, or of jax.ShapeDtypeStruct",
    # a holdfast option that only some functions accept
    "local": "hf.CheckpointManager and the callbacks take it; hf.CheckpointCallback saves objects, too",
    # arguments of Ray
    "filesystem": "pass holdfast.storage.as_location(path, filesystem=...) as the path, or a URL such as s3://bucket/run",
}


# Orbax names that do not exist in holdfast.
_FOREIGN_OBJECTS: Mapping[str, str] = {
    "args": "managers take trees and dictionaries of items, without args",
    "StandardCheckpointer": "here it is hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()), or hf.save and hf.load",
    "StandardCheckpointHandler": "here it is hf.PyTreeCheckpointHandler",
    "CompositeCheckpointHandler": "hf.CheckpointManager takes a dictionary of items",
    "save_pytree": "here it is hf.save, or save of a manager",
    "load_pytree": "here it is hf.load, or restore of a manager",
    "save_checkpointables": "here it is manager.save with a dictionary of items",
    "load_checkpointables": "here it is manager.restore",
    "StandardSave": "managers take the tree itself",
    "PyTreeSave": "managers take the tree itself",
    "StandardRestore": "restore takes a template: manager.restore(step, template)",
    "PyTreeRestore": "restore takes a template: manager.restore(step, template)",
    "save_pytree_async": "here it is hf.save_async",
    "load_pytree_async": "here it is hf.load_async",
    "pytree_metadata": "here it is hf.describe",
    "checkpoint_managers": "options of hf.CheckpointManagerOptions say when to save and what to keep",
    "save_decision_policy": "here it is save= of hf.CheckpointManagerOptions, with hf.Every or a hf.SavePolicy",
    "preservation_policy": "here it is keep= of hf.CheckpointManagerOptions, with hf.Every or a hf.KeepPolicy",
    "construct_restore_args": "it is in hf.checkpoint_utils",
    "training": "here it is hf.CheckpointManager, or hf.CheckpointCallback",
    "Context": "options are arguments here",
    "v1": "the names of Orbax v1 are hf.save, hf.load, hf.describe and hf.CheckpointManager here",
    "options": "here it is hf.CheckpointManagerOptions",
    "checkpointables_metadata": "here it is hf.describe",
    "load_checkpointables_async": "here it is manager.restore",
    "save_checkpointables_async": "here it is manager.save, which saves in the background",
    # attributes of Orbax v1 checkpointers
    "latest": "here it is latest_step(), the number of the newest step",
    "checkpoints": "here it is all_steps()",
    "load": "here it is restore",
    "save_async": "here it is save, which saves in the background",
    "wait": "here it is wait_until_finished()",
    "root_metadata": "here it is metadata()",
    "reached_preemption": "hf.CheckpointCallback saves after SIGTERM, and on_step(...).should_stop tells",
}


def object_instead_of(name: str) -> str:
    """Return a message suffix that suggests the equivalent of an Orbax name, or "" for other names."""
    return f": {_FOREIGN_OBJECTS[name]}" if name in _FOREIGN_OBJECTS else ""


class ExplainsNames:
    """Base class whose AttributeError suggests the equivalent of an Orbax attribute."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            hint = object_instead_of(name)
            about = {} if hint else {"name": name, "obj": self}  # name and obj let a traceback suggest the closest name
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", **about)


def foreign_hint(name: str) -> str:
    """Return a message suffix that suggests the equivalent of another library's argument, or ""."""
    return f": {_FOREIGN[name]}" if name in _FOREIGN else ""


def instead_of(name: str, accepted: Collection[str]) -> str:
    """Return a message suffix that suggests the equivalent of an unknown argument or the closest name, or ""."""
    return foreign_hint(name) or did_you_mean(name, accepted)


def refuse_unknown(
    taker: str, unknown: Mapping[str, object], function: Callable[..., Any], hidden: Collection[str] = ()
) -> None:
    """If there are unknown arguments, raise an UnknownArgumentError that lists the accepted keyword-only arguments."""
    if unknown:
        parameters = inspect.signature(function).parameters.items()
        accepted = [name for name, p in parameters if p.kind is p.KEYWORD_ONLY and name not in hidden]
        names = ", ".join(f"{name}{instead_of(name, accepted)}" for name in sorted(unknown))
        takes = f"It takes {', '.join(accepted)}" if accepted else "It takes none"
        raise UnknownArgumentError(f"{taker} does not take these arguments: {names}. {takes}")


def refuse_unexpected(taker: str, unknown: Iterable[str], accepted: Collection[str]) -> None:
    """Raise UnknownArgumentError for the first unknown argument, suggesting its equivalent or the closest name."""
    for name in unknown:
        raise UnknownArgumentError(f"{taker}() got an unexpected keyword argument {name!r}{instead_of(name, accepted)}")


def explains_arguments(function: F, refuse: Callable[..., None] = refuse_unexpected) -> F:
    """Decorate a function or dataclass so that errors about unknown arguments suggest an equivalent."""
    if isinstance(function, type):
        type.__setattr__(function, "__init__", explains_arguments(vars(function)["__init__"], refuse))
        return function
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= parameters.keys():
            refuse(function.__qualname__, sorted(kwargs.keys() - parameters.keys()), parameters)
        return function(*args, **kwargs)

    return cast(F, checked)
