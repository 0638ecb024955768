"""What trainers and loggers ask of a checkpoint callback, by the names that ``ModelCheckpoint`` has given it."""

from __future__ import annotations

import torch

from ..options import CallbackOptions
from .store import RunStore


class ModelCheckpointAttributes:
    """Answers of a checkpoint callback, all of them taken from the directory: there is no state to lose.

    Scores are 0-d tensors, and missing without ``best_fn``.
    """

    _store: RunStore
    _options: CallbackOptions
    filename = "{step}"
    save_weights_only = False
    save_last = True

    @property
    def monitor(self) -> str | None:
        """The name of the metric that ranks checkpoints, if it has one."""
        return self._options.best_fn if isinstance(self._options.best_fn, str) else None

    @property
    def mode(self) -> str:
        """Whether the largest or the smallest value is best."""
        return self._options.best_mode

    @property
    def save_top_k(self) -> int:
        """How many checkpoints are kept; -1 for all."""
        return -1 if self._options.max_to_keep is None else self._options.max_to_keep

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint: the newest one without ``best_fn``; empty when there is none."""
        step = self._store.manager.best_step()
        return "" if step is None else self._store.path_of(step)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Takes what a trainer that has forked its processes tells of them; the directory says it already."""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of the best checkpoint."""
        return _tensor(self._store.score(self._store.manager.best_step()))

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint; empty when there is none."""
        step = self._store.manager.latest_step()
        return "" if step is None else self._store.path_of(step)

    @property
    def current_score(self) -> torch.Tensor | None:
        """The metric of the newest checkpoint."""
        return _tensor(self._store.score(self._store.manager.latest_step()))

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The scores of all checkpoints that have one, by path."""
        scores = {step: self._store.score(step) for step in self._store.manager.all_steps()}
        return {self._store.path_of(step): torch.tensor(score) for step, score in scores.items() if score is not None}


def _tensor(score: float | None) -> torch.Tensor | None:
    return None if score is None else torch.tensor(score)
