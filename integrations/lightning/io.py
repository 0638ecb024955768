"""How checkpoints of the engine come and go through a Lightning trainer and its strategy.

``lightning.pytorch`` and ``pytorch_lightning`` are separate copies of the same code: a trainer of the one does not know
the callbacks of the other. The base classes here derive from those of each package that is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ...engine.errors import InvalidLocationError
from ...engine.manager import best_step_in
from ...engine.steps import list_steps, newest_step
from ...engine.storage import Location, Place, as_location
from .store import RunStore, Template, is_checkpoint, read_checkpoint
from .strategies import ShardedState, SharedState, can_save, is_sharded
from .trees import POSITION
from .wall import checkpoint_connector, is_search_file, made_from

_PACKAGES = {
    "lightning.pytorch.callbacks": "lightning.fabric.plugins.io.checkpoint_io",
    "pytorch_lightning.callbacks": "lightning_fabric.plugins.io.checkpoint_io",
}


def _importable() -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    errors: list[str] = []
    for callbacks, plugins in _PACKAGES.items():
        try:
            found[callbacks] = importlib.import_module(callbacks), importlib.import_module(plugins)
        except ImportError as error:
            errors.append(f"{callbacks}: {error}")
    if not found:
        raise ImportError(
            "holdfast.integrations.lightning needs Lightning: pip install 'holdfast[lightning]'. " + "; ".join(errors)
        )
    return found


if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class ResumingCallback(OnExceptionCheckpoint):
        """The one kind of callback that a trainer asks for a checkpoint when ``fit`` is given none."""

        def __init__(self) -> None:
            """Take nothing: the base class only notes the one file that it would save on an exception.

            Parsers of arguments (LightningCLI) look here for what ``**unknown`` of a derived class may be.
            """

else:
    _found = _importable().values()

    class ResumingCallback(*(callbacks.OnExceptionCheckpoint for callbacks, _ in _found)):
        """The one kind of callback that a trainer asks for a checkpoint when ``fit`` is given none."""

        def __init__(self) -> None:
            """Take nothing: the base class only notes the one file that it would save on an exception.

            Parsers of arguments (LightningCLI) look here for what ``**unknown`` of a derived class may be.
            """

    class CheckpointIO(*(plugins.CheckpointIO for _, plugins in _found)):
        """What a strategy writes checkpoints to and reads them from."""


class ResumePath(str):
    """The path that a trainer resumes from by itself: the newest whole checkpoint of a directory, or one of its steps.

    A trainer takes only paths that its own file systems find. Where the directory is not on this machine, the path is
    some directory that is; messages show the real one.
    """

    directory: Location
    step: int | None

    def __new__(cls, directory: Location, step: int | None = None) -> Self:
        path = super().__new__(cls, os.fspath(directory) if directory.is_local else os.path.dirname(__file__))
        path.directory = directory
        path.step = step
        return path

    def __format__(self, _: str) -> str:
        return str(self.directory)


class HoldfastCheckpointIO(CheckpointIO):
    """Lets a trainer without the callback load its checkpoints: all that ``ckpt_path`` takes, and steps of a run.

    ::

        trainer = L.Trainer(plugins=[HoldfastCheckpointIO()])
        trainer.test(model, ckpt_path="runs/x/checkpoints/1200")  # or the directory, for the newest

    It writes nothing of its own. With a strategy that loads by itself, such as ``ModelParallelStrategy``, Lightning
    takes no such plugin.

    Args:
        inner: What writes, and reads all other paths; None is Lightning's own ``TorchCheckpointIO``.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = _torch_io() if inner is None else inner

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save as the inner plugin does."""
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; those of the engine hold no code, with either ``weights_only``."""
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
        """Load a checkpoint of the engine, with templates for some entries; None if it is not one."""
        return read_checkpoint(path, with_position=False, template=template()) if _is_ours(path) else None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file as the inner plugin does."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Let the inner plugin end."""
        self.inner.teardown()


class EngineCheckpointIO(HoldfastCheckpointIO):
    """Saves and loads the checkpoints of one run with the engine, and leaves every other path to the plugin before it.

    Other paths are those of the tuner, of SLURM's requeueing, and files that the user names. Checkpoints of the engine
    in other directories are read as well.
    """

    def __init__(self, store: RunStore, inner: Any) -> None:
        super().__init__(inner)
        self.store = store

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a step of the run; the files are written in the background."""
        step = self.step_of(path)
        if step is None:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        else:
            self.store.save(step, checkpoint)

    def read(
        self, path: str | os.PathLike[str], template: Callable[[], Template] = lambda: None
    ) -> dict[str, Any] | None:
        """Load a checkpoint of the engine, with templates for some entries; None if it is not one."""
        if isinstance(path, ResumePath):
            if path.directory != self.store.directory:
                return None
            if path.step is not None:
                return self.store.load(path.step, template=template())
            checkpoint = self.store.load_newest(template=template())
            checkpoint.get(POSITION, {})["automatic"] = True
            return checkpoint
        if (step := self.step_of(path)) is not None:
            return self.store.load(step, template=template())
        if _is_ours(path):
            return read_checkpoint(path, with_position=self.store.is_open, template=template())
        return None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        step = self.step_of(path)
        if step is None:
            self.inner.remove_checkpoint(path)
        else:
            self.store.manager.delete(step)

    def step_of(self, path: str | os.PathLike[str]) -> int | None:
        """Return the step of the run that a path stands for, or None."""
        try:
            return self.store.step_of(path)
        except InvalidLocationError:
            return None


def _torch_io() -> Any:
    for fabric in ("lightning.fabric", "lightning_fabric"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO()
    raise ImportError("Lightning is not installed")


def install(strategy: Any, store: RunStore) -> None:
    """Put the engine in front of a strategy's checkpoint plugin, once."""
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
    """Make all processes save what the engine saves: Lightning would ask the plugin on one of them, or on none."""
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
    """Let a strategy that loads into its module and optimizers by itself do so from the engine, too."""
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
    """Let ``choose`` replace the path that a trainer begins from; called at the latest in a callback's ``setup``."""
    connector, function = checkpoint_connector(trainer), trainer.state.fn
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if is_search_file(checkpoint_path):
            original(checkpoint_path, *args, **kwargs)
            return
        if vars(connector).get("resume_start") is resume_start:
            del connector.resume_start
        original(choose(checkpoint_path) if trainer.state.fn == function else checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _is_ours(path: str | os.PathLike[str]) -> bool:
    try:
        return is_checkpoint(path)
    except InvalidLocationError:
        return False


# ---- modules made from checkpoints, and steps for trainers that have no callback of ours


Step = int | Literal["best", "latest"] | None

T = TypeVar("T")

_CORES = ("lightning.pytorch", "pytorch_lightning")


def load_checkpoint(path: Place, step: Step = None) -> dict[str, Any]:
    """Read a checkpoint into the dictionary that Lightning's own ``.ckpt`` files hold.

    ::

        model.load_state_dict(load_checkpoint("runs/x/checkpoints", 1200)["state_dict"])

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory: its number, or ``"best"``, as the run's ``best_fn`` ranks them. None and
            ``"latest"`` are the newest whole one.

    Returns:
        The dictionary; arrays are tensors on the CPU.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none with the metric of ``best_fn``.
        OptionError: ``step="best"``, and the run ranks its checkpoints by no metric.
        DamagedCheckpointError: It does not verify.
        NoWholeCheckpointError: It is a directory of steps, and all of them are damaged.
        StateError: It was not saved from a Lightning trainer.
    """
    return read_checkpoint(_place(as_location(path), step), with_position=False)


def load_from_checkpoint(
    kind: type[T], path: Place, step: Step = None, *, strict: bool | None = None, **arguments: Any
) -> T:
    """Make a ``LightningModule`` or ``LightningDataModule`` with the hyper-parameters and the state of a checkpoint.

    As ``kind.load_from_checkpoint``, which reads Lightning's own files only::

        model = load_from_checkpoint(Model, "runs/x/checkpoints", step="best")

    Args:
        kind: The class.
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory: its number, or ``"best"``, as the run's ``best_fn`` ranks them. None and
            ``"latest"`` are the newest whole one.
        strict: Whether the state must have exactly the module's keys; None takes the setting of the module.
        **arguments: Arguments of the constructor that replace saved hyper-parameters, or were not saved.

    Returns:
        The module, on the CPU.

    Raises:
        TypeError: The class is none of Lightning's.
        CheckpointNotFoundError: There is no checkpoint, or none with the metric of ``best_fn``.
        OptionError: ``step="best"``, and the run ranks its checkpoints by no metric.
        DamagedCheckpointError: It does not verify.
        StateError: It was not saved from a Lightning trainer.
        RuntimeError: The module's state has other keys or shapes, as in ``load_state_dict``.
    """
    package = next((core for core in _CORES if _is_of(kind, core)), None)
    if package is None:
        raise TypeError(f"{kind!r} is neither a LightningModule nor a LightningDataModule")
    place = _place(as_location(path), step)
    checkpoint = read_checkpoint(place, with_position=False)
    loaded: T = made_from(package, kind, checkpoint, str(place), strict, arguments)
    return loaded


def _is_of(kind: type, package: str) -> bool:
    try:
        core = importlib.import_module(f"{package}.core")
    except ImportError:
        return False
    return issubclass(kind, core.LightningModule | core.LightningDataModule)


def _place(location: Location, step: Step) -> Location:
    if step is None or step == "latest":
        return location
    number = best_step_in(location) if step == "best" else step
    found = newest_step(entry for entry in list_steps(location) if entry.step == number)
    return location / str(number) if found is None else found.location
