"""How checkpoints of the engine come and go through a Lightning strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Self

from ...engine.errors import InvalidLocationError
from ...engine.storage import Location
from .packages import CheckpointIO
from .sharded import ShardedState
from .sharing import SharedState
from .store import RunStore, Template, is_checkpoint, read_checkpoint
from .strategies import can_save, is_sharded
from .trees import POSITION


class ResumePath(str):
    """The path that a trainer is given when nobody has named one: the newest whole checkpoint of a directory.

    A trainer takes only paths that its own file systems find. Directories that are none of this machine's are stood for
    by one that is; messages show the real one.

    Attributes:
        directory: The directory of the run.
    """

    directory: Location

    def __new__(cls, directory: Location) -> Self:
        """Makes the path of a directory."""
        path = super().__new__(cls, os.fspath(directory) if directory.is_local else os.path.dirname(__file__))
        path.directory = directory
        return path

    def __format__(self, _: str) -> str:
        return str(self.directory)


class EngineCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of one run with the engine, and leaves every other path to the plugin before it.

    Other paths are those of the tuner, of SLURM's requeueing, and files that the user names. Checkpoints of the engine
    in other directories are read as well.

    Args:
        store: The run's checkpoints.
        inner: The plugin that the strategy had.
    """

    def __init__(self, store: RunStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves a step of the run; the files are written in the background."""
        step = self.step_of(path)
        if step is None:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        else:
            self.store.save(step, checkpoint)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; those of the engine hold no code, whatever ``weights_only`` says."""
        checkpoint = self.read(path)
        if checkpoint is not None:
            return checkpoint
        if weights_only is None:
            loaded: dict[str, Any] = self.inner.load_checkpoint(path, map_location)
        else:
            loaded = self.inner.load_checkpoint(path, map_location, weights_only=weights_only)
        return loaded

    def read(
        self, path: str | os.PathLike[str], template: Callable[[], Template] = lambda: None
    ) -> dict[str, Any] | None:
        """Loads a checkpoint of the engine; None if it is another.

        Args:
            path: Where it is.
            template: Makes templates for some of its entries.
        """
        if isinstance(path, ResumePath):
            if path.directory != self.store.directory:
                return None
            checkpoint = self.store.load_newest(template=template())
            checkpoint.get(POSITION, {})["automatic"] = True
            return checkpoint
        if (step := self.step_of(path)) is not None:
            return self.store.load(step, template=template())
        if _is_ours(path):
            return read_checkpoint(path, with_position=self.store.is_open, template=template())
        return None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint."""
        step = self.step_of(path)
        if step is None:
            self.inner.remove_checkpoint(path)
        else:
            self.store.manager.delete(step)

    def teardown(self) -> None:
        """Passes the end of the run on."""
        self.inner.teardown()

    def step_of(self, path: str | os.PathLike[str]) -> int | None:
        """Returns the step of the run that a path stands for, or None."""
        try:
            return self.store.step_of(path)
        except InvalidLocationError:
            return None


def install(strategy: Any, store: RunStore) -> None:
    """Puts the engine in front of a strategy's checkpoint plugin, once.

    Args:
        strategy: The trainer's strategy.
        store: The run's checkpoints.
    """
    plugin = strategy.checkpoint_io
    while isinstance(plugin, EngineCheckpointIO):
        if plugin.store is store:
            return
        plugin = plugin.inner
    strategy.checkpoint_io = EngineCheckpointIO(store, strategy.checkpoint_io)
    if "save_checkpoint" not in vars(strategy) and can_save(strategy):
        if strategy.world_size > 1 or is_sharded(strategy):
            _save_together(strategy)
        if is_sharded(strategy):
            _load_in_place(strategy)


def _plugins(strategy: Any) -> Iterator[EngineCheckpointIO]:
    plugin = strategy.checkpoint_io
    while isinstance(plugin, EngineCheckpointIO):
        yield plugin
        plugin = plugin.inner


def _save_together(strategy: Any) -> None:
    """Has all processes save what the engine saves; the plugin would be asked on one of them only, or on none."""
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        for plugin in _plugins(strategy):
            step = plugin.step_of(filepath)
            if step is not None:
                plugin.store.save(step, checkpoint, SharedState(strategy) if strategy.world_size > 1 else None)
                return
        original(checkpoint, filepath, storage_options=storage_options)

    strategy.save_checkpoint = save_checkpoint


def _load_in_place(strategy: Any) -> None:
    """Has a strategy that loads into its module and optimizers by itself do so from the engine's checkpoints, too."""
    original = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = ShardedState(strategy)
        for plugin in _plugins(strategy):
            checkpoint = plugin.read(checkpoint_path, state.template)
            if checkpoint is not None:
                state.load(checkpoint, strict=strategy.lightning_module.strict_loading)
                return checkpoint
        loaded: dict[str, Any] = original(checkpoint_path, *args, **kwargs)
        return loaded

    strategy.load_checkpoint = load_checkpoint


def redirect_resume(trainer: Any, choose: Callable[[Any], Any]) -> None:
    """Has the last word on the checkpoint that a trainer is about to fit from.

    Args:
        trainer: The trainer, at the latest in a callback's ``setup``.
        choose: Takes the path that the trainer has settled on, or None, and returns the one to use, or None.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if vars(connector).get("resume_start") is resume_start:
            del connector.resume_start  # the tuner goes back to files of its own in the same way
        original(choose(checkpoint_path) if trainer.state.fn == "fit" else checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _is_ours(path: str | os.PathLike[str]) -> bool:
    try:
        return is_checkpoint(path)
    except InvalidLocationError:
        return False
