"""Make a Lightning trainer and its strategy save and load holdfast checkpoints.

``lightning.pytorch`` and ``pytorch_lightning`` are separate copies of the same code, and a trainer from one package
does not recognize callbacks from the other. Therefore, the base classes here inherit from every installed package.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ...engine.installed import install_command
from ...engine.manager import best_step_in
from ...engine.steps import list_steps, newest_step
from ...engine.storage import Location, Place, as_location
from .private_api import LoopHooks, checkpoint_connector, dump_checkpoint, is_search_file, made_from, package_of
from .store import RunStore, Template, is_checkpoint, read_checkpoint
from .strategies import ShardedState, can_save, is_sharded, named_as
from .trees import POSITION

_PACKAGES = {
    "lightning.pytorch.callbacks": "lightning.fabric.plugins.io.checkpoint_io",
    "pytorch_lightning.callbacks": "lightning_fabric.plugins.io.checkpoint_io",
}


def _importable() -> list[tuple[Any, Any]]:
    modules: list[tuple[Any, Any]] = []
    errors: list[str] = []
    for callbacks, plugins in _PACKAGES.items():
        try:
            modules.append((importlib.import_module(callbacks), importlib.import_module(plugins)))
        except ImportError as error:
            errors.append(f"{callbacks}: {error}")
    if not modules:
        raise ImportError(
            f"holdfast.integrations.lightning needs Lightning: {install_command('lightning')}. {'; '.join(errors)}"
        )
    return modules


if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
else:
    _callbacks, _plugins = zip(*_importable(), strict=True)
    _bases = tuple(module.OnExceptionCheckpoint for module in _callbacks)
    OnExceptionCheckpoint = types.new_class("OnExceptionCheckpoint", _bases)
    CheckpointIO = types.new_class("CheckpointIO", tuple(module.CheckpointIO for module in _plugins))


class ResumingCallback(OnExceptionCheckpoint):
    """Base class of callbacks that choose the checkpoint for ``fit`` when no ``ckpt_path`` is given."""

    def __init__(self) -> None:
        # Don't initialize the base class: it would only store the path of a file to save on an exception. Keep this
        # signature without parameters: LightningCLI uses it to resolve the ``**unknown`` arguments of subclasses.
        pass


class ResumePath(str):
    """The path to resume from: a directory's newest intact checkpoint, or one of its steps."""

    directory: Location
    step: int | None

    def __new__(cls, directory: Location, step: int | None = None) -> Self:
        # Trainers check that the path exists locally, so use an existing path in place of a URL. Messages show the URL.
        path = super().__new__(cls, os.fspath(directory) if directory.is_local else os.path.dirname(__file__))
        path.directory = directory
        path.step = step
        return path

    def __format__(self, _: str) -> str:
        return str(self.directory)


class HoldfastCheckpointIO(CheckpointIO):
    """Lets a trainer without the callback load holdfast checkpoints as well as Lightning's own files.

    ::

        trainer = L.Trainer(plugins=[HoldfastCheckpointIO()])
        trainer.test(model, ckpt_path="runs/x/checkpoints/1200")  # or the directory, to load its newest step

    The plugin itself never saves. Lightning does not accept checkpoint plugins for strategies that load checkpoints
    themselves, such as ``ModelParallelStrategy``.

    Args:
        inner: The plugin that saves all checkpoints and loads all other files; by default, ``TorchCheckpointIO``.
    """

    def __init__(self, inner: Any = None) -> None:
        if inner is None:
            package = CheckpointIO.__bases__[0].__module__.rpartition(".")[0]
            inner = importlib.import_module(f"{package}.torch_io").TorchCheckpointIO()
        self.inner = inner

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint with the inner plugin."""
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; ``weights_only`` has no effect on holdfast checkpoints, which contain no code."""
        if (checkpoint := self.read(path)) is not None:
            return checkpoint
        options = {} if weights_only is None else {"weights_only": weights_only}
        loaded: dict[str, Any] = self.inner.load_checkpoint(path, map_location, **options)
        return loaded

    def read(
        self, path: str | os.PathLike[str], template: Callable[[], Template] = lambda: None
    ) -> dict[str, Any] | None:
        """Load a holdfast checkpoint, restoring its entries to match ``template()``; return None for any other file."""
        return read_checkpoint(path, with_position=False, template=template()) if is_checkpoint(path) else None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint with the inner plugin."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Tear down the inner plugin."""
        self.inner.teardown()


class EngineCheckpointIO(HoldfastCheckpointIO):
    """Loads the run's steps and other holdfast checkpoints, and delegates everything else to ``inner``."""

    def __init__(self, store: RunStore, strategy: Any) -> None:
        super().__init__(strategy.checkpoint_io)
        self.store = store
        self._strategy = strategy

    def read(
        self, path: str | os.PathLike[str], template: Callable[[], Template] = lambda: None
    ) -> dict[str, Any] | None:
        """Load a checkpoint; rename its entries if the module's names differ, for example under ``torch.compile``."""
        store = self.store
        if isinstance(path, ResumePath) and path.directory != store.directory:
            return None
        step = path.step if isinstance(path, ResumePath) else store.step_of(path)
        if isinstance(path, ResumePath) and step is None:
            checkpoint = store.load(None, with_position=True, template=template())
            checkpoint.get(POSITION, {})["automatic"] = True
        elif step is not None:
            checkpoint = store.load(step, with_position=store.is_open, template=template())
        elif is_checkpoint(path):
            checkpoint = read_checkpoint(path, with_position=store.is_open, template=template())
        else:
            return None
        return named_as(self._strategy.lightning_module, checkpoint)

    def teardown(self) -> None:
        super().teardown()
        self.store.at_teardown.close()

    # ---- wrappers of trainer and strategy methods, so that all processes save, delete, and load a step together
    # Without these wrappers, Lightning would call the plugin in at most one process. Steps are saved in the background.

    def save_together(
        self, trainer: Any, original: Any, filepath: Any, weights_only: Any = None, storage_options: Any = None
    ) -> None:
        if (step := self.store.step_of(filepath)) is None:
            original(filepath, weights_only, storage_options)
            return
        with trainer.profiler.profile("save_checkpoint"):
            self.store.save(step, partial(dump_checkpoint, trainer, weights_only=bool(weights_only)), self._strategy)
            self._strategy.barrier("CheckpointCallback")

    def save_given(self, original: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (step := self.store.step_of(filepath)) is None:
            original(checkpoint, filepath, storage_options=storage_options)
        else:
            self.store.save(step, lambda: checkpoint, self._strategy)

    def remove_together(self, original: Callable[..., None], filepath: Any) -> None:
        if (step := self.store.step_of(filepath)) is None:
            original(filepath)
        else:
            self.store.delete(step)

    def load_in_place(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint into the module and optimizers of a strategy that loads checkpoints itself."""
        state = ShardedState(self._strategy)
        if (checkpoint := self.read(path, state.template)) is None:
            return original(path, *args, **kwargs)
        state.load(checkpoint, strict=self._strategy.lightning_module.strict_loading)
        return checkpoint


def install(trainer: Any, store: RunStore) -> None:
    """Make a trainer and its strategy use holdfast to save, delete, and load steps, unless they already do."""
    strategy = trainer.strategy
    plugin = strategy.checkpoint_io
    while isinstance(plugin, EngineCheckpointIO):
        if plugin.store is store:
            return
        plugin = plugin.inner
    plugin = strategy.checkpoint_io = EngineCheckpointIO(store, strategy)
    hooks = LoopHooks()  # like the plugin, these hooks remain installed for the trainer's lifetime
    if can_save(strategy):
        hooks.place(trainer, "save_checkpoint", partial(plugin.save_together, trainer))
        hooks.place(strategy, "save_checkpoint", plugin.save_given)
        hooks.place(strategy, "remove_checkpoint", plugin.remove_together)
    if is_sharded(strategy):
        hooks.place(strategy, "load_checkpoint", plugin.load_in_place)


def redirect_resume(trainer: Any, choose: Callable[[Any], Any]) -> None:
    """Let ``choose`` replace the path that a trainer resumes from. Call this in ``setup`` or earlier."""
    function, hooks = trainer.state.fn, LoopHooks()

    def resume_start(original: Callable[..., None], checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if not is_search_file(checkpoint_path):
            hooks.remove()
            checkpoint_path = choose(checkpoint_path) if trainer.state.fn == function else checkpoint_path
        original(checkpoint_path, *args, **kwargs)

    hooks.place(checkpoint_connector(trainer), "resume_start", resume_start)


# ---- reading checkpoints without a trainer


Step = int | Literal["best", "latest"] | None

T = TypeVar("T")


def load_checkpoint(path: Place, step: Step = None) -> dict[str, Any]:
    """Load a checkpoint as a dictionary with the same layout as Lightning's own ``.ckpt`` files.

    ::

        model.load_state_dict(load_checkpoint("runs/x/checkpoints", 1200)["state_dict"])

    Args:
        path: A checkpoint, or a directory of steps.
        step: The step to load from a directory: a number, or ``"best"`` as ranked by the run's ``best_fn``. None and
            ``"latest"`` load the newest intact step.

    Returns:
        The dictionary, with arrays as tensors on the CPU.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none has the metric that ``best_fn`` needs.
        OptionError: ``step="best"``, but the run does not rank its checkpoints by a metric.
        DamagedCheckpointError: The checkpoint fails verification.
        NoWholeCheckpointError: All steps in the directory are damaged.
        StateError: The checkpoint was not saved from a Lightning trainer.
    """
    return read_checkpoint(_location_of(path, step), with_position=False)


def load_from_checkpoint(
    kind: type[T], path: Place, step: Step = None, *, strict: bool | None = None, **arguments: Any
) -> T:
    """Create a ``LightningModule`` or ``LightningDataModule`` from the hyper-parameters and state in a checkpoint.

    This works like ``kind.load_from_checkpoint``, which reads only Lightning's own files::

        model = load_from_checkpoint(Model, "runs/x/checkpoints", step="best")

    Args:
        kind: The class to instantiate.
        path: A checkpoint, or a directory of steps.
        step: The step to load from a directory: a number, or ``"best"`` as ranked by the run's ``best_fn``. None and
            ``"latest"`` load the newest intact step.
        strict: Whether the saved keys must match the module's keys exactly; None uses the module's own setting.
        **arguments: Constructor arguments that override saved hyper-parameters or supply those that were not saved.

    Returns:
        The new module or data module, on the CPU.

    Raises:
        TypeError: The class is neither a ``LightningModule`` nor a ``LightningDataModule``.
        CheckpointNotFoundError: There is no checkpoint, or none has the metric that ``best_fn`` needs.
        OptionError: ``step="best"``, but the run does not rank its checkpoints by a metric.
        DamagedCheckpointError: The checkpoint fails verification.
        StateError: The checkpoint was not saved from a Lightning trainer.
        RuntimeError: The saved keys or shapes do not match the module's, as in ``load_state_dict``.
    """
    if (package := package_of(kind)) is None or not hasattr(kind, "load_from_checkpoint"):
        raise TypeError(f"{kind!r} is neither a LightningModule nor a LightningDataModule")
    location = _location_of(path, step)
    checkpoint = read_checkpoint(location, with_position=False)
    loaded: T = made_from(package, kind, checkpoint, str(location), strict, arguments)
    return loaded


def _location_of(path: Place, step: Step) -> Location:
    location = as_location(path)
    if step is None or step == "latest":
        return location
    number = best_step_in(location) if step == "best" else step
    entry = newest_step(entry for entry in list_steps(location) if entry.step == number)
    return location / str(number) if entry is None else entry.location
