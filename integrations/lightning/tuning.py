"""Lightning's searches for a learning rate and a batch size: a run begins with them, a resumed run keeps the result.

``LearningRateFinder`` and ``BatchSizeFinder`` search in ``on_fit_start``, between the loading of a checkpoint's weights
and that of its optimizers, and write what they find into attributes that no checkpoint of Lightning's holds.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from .wall import LoopHooks

logger = logging.getLogger("holdfast")

_SEARCHES = {"LearningRateFinder": "lr_find", "BatchSizeFinder": "scale_batch_size"}
_RATES = ("lr", "learning_rate")
_FILES = (".lr_find", ".scale_batch_size")


def is_search_file(path: object) -> bool:
    """Return whether a path is that of a file that a search goes back to after its trials."""
    return os.path.basename(str(path)).startswith(_FILES)


class Searches:
    """The searches of one callback's trainers, and the attributes that they set."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._hooks: LoopHooks | None = None  # while a run begins

    def begin(self, trainer: Any) -> None:
        """Look for finders among the trainer's callbacks."""
        for finder, _ in _finders(trainer):
            self._names.update(_attributes(trainer, finder))

    @staticmethod
    def are_all(trainer: Any) -> bool:
        """Return whether the trainer was started by a ``Tuner``, to search and do nothing else."""
        return any(getattr(finder, "_early_exit", False) for finder, _ in _finders(trainer))

    def found(self, trainer: Any) -> dict[str, Any]:
        """Return the values of the attributes that finders set."""
        return {name: values[-1] for name in sorted(self._names) if (values := [*_values(trainer, name)])}

    def replace(self, trainer: Any, found: Mapping[str, Any]) -> None:
        """Let each finder set, where it would search, what was found when the run began.

        By then the module has made its optimizers, as in the run that searched. A ``Tuner`` searches before that.
        """
        searched = {name for finder, _ in _finders(trainer) for name in _attributes(trainer, finder)}
        for name in found.keys() - searched:
            _set(trainer, name, found[name])
        self.end()
        hooks = self._hooks = LoopHooks()
        for finder, search in _finders(trainer):
            hooks.place(finder, search, functools.partial(_set_instead, trainer, finder, found))

    def end(self) -> None:
        """Let finders search again, such as those that do so when a later epoch starts."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


def _finders(trainer: Any) -> Iterator[tuple[Any, str]]:
    """Yield the callbacks that search, and the name of the method that does it."""
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _SEARCHES:
                yield callback, _SEARCHES[kind.__name__]
                break


def _attributes(trainer: Any, finder: Any) -> list[str]:
    """Return the name of the attribute that a finder sets, if it sets one."""
    if hasattr(finder, "_batch_arg_name"):
        return [finder._batch_arg_name]
    if not finder._update_attr:
        return []
    names = (finder._attr_name,) if finder._attr_name else _RATES
    return [name for name in names if any(True for _ in _values(trainer, name))][:1]


def _set_instead(trainer: Any, finder: Any, found: Mapping[str, Any], *_: Any, **__: Any) -> None:
    kind = type(finder).__name__
    for name in _attributes(trainer, finder):
        if name not in found:
            logger.warning(
                "the checkpoint does not hold the %s that %s found when the run began, and a resumed run does not "
                "search again: it goes on with the program's own",
                name,
                kind,
            )
            continue
        logger.info("the run resumes with the %s that %s found when it began: %s", name, kind, found[name])
        _set(trainer, name, found[name])
        if hasattr(finder, "optimal_batch_size"):
            finder.optimal_batch_size = found[name]
            # Loaders that the module's optimizers asked for have the program's own batch size.
            trainer.fit_loop._combined_loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def _owners(trainer: Any) -> Iterator[Any]:
    """Yield what may have such an attribute, in Lightning's order: the module, its hyper-parameters, the data's."""
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None:
            yield owner
            yield getattr(owner, "hparams", {})


def _values(trainer: Any, name: str) -> Iterator[Any]:
    for owner in _owners(trainer):
        if isinstance(owner, dict):
            if name in owner:
                yield owner[name]
        elif hasattr(owner, name):
            yield getattr(owner, name)


def _set(trainer: Any, name: str, value: Any) -> None:
    for owner in _owners(trainer):
        if isinstance(owner, dict):
            if name in owner:
                owner[name] = value
        elif hasattr(owner, name):
            setattr(owner, name, value)
