"""What lies beside the steps of a run and follows them: links to the newest and the best, and the best weights."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ...engine.errors import HoldfastError
from ...engine.format import ITEM
from ...engine.handlers import PyTreeCheckpointHandler
from ...engine.manager import CheckpointManager
from ...engine.steps import read_record, series_of
from ...engine.storage import TEMPORARY_PREFIX, Location
from .arguments import CallbackArguments
from .strategies import has_leaves
from .trees import plain_weights

logger = logging.getLogger("holdfast")


class Published:
    """The links and the file of one run, which process 0 keeps up to date."""

    def __init__(self, directory: Location, options: CallbackArguments) -> None:
        self._directory = directory
        self._options = options
        self._series = series_of(options.step_prefix)
        self._exported: int | None = None

    def update(self, manager: CheckpointManager) -> None:
        """Let everything follow the committed steps; a failure is logged, as nothing of the run depends on it."""
        links = self._options.links and self._directory.is_local
        steps = manager.all_steps() if links or self._options.export_best is not None else []
        if not steps:
            return
        best = None if self._options.best_fn is None else manager.best_step()
        if links:
            self._link("last", steps[-1])
            if best is not None:
                self._link("best", best)
        if self._options.export_best is None or best in (None, self._exported):
            return
        place = self._options.export_place
        try:
            export_weights(self._directory / f"{self._series}{best}", place)
        except (HoldfastError, OSError) as error:
            logger.warning("step %d is the best, but %s could not be written: %s", best, place, error)
        else:
            self._exported = best

    def _link(self, name: str, step: int) -> None:
        link, folder = self._directory.path / name, f"{self._series}{step}"
        if (link.exists() and not link.is_symlink()) or (link.is_symlink() and os.readlink(link) == folder):
            return
        partial = link.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            partial.symlink_to(folder, target_is_directory=True)
            partial.replace(link)
        except OSError as error:  # the disk has no links
            logger.debug("%s is not kept as a link: %s", link, error)
            with contextlib.suppress(OSError):
                partial.unlink()


def export_weights(step: Location, place: Location) -> None:
    """Write the weights of a step into one file, atomically.

    A ``.safetensors`` file has the names of the module's state dict. A ``.ckpt`` file has the hyper-parameters, too, as
    plain data, so that Lightning loads it with ``weights_only=True``.
    """
    if place.name.endswith(".safetensors"):
        _export_safetensors(step, place)
        return
    buffer = io.BytesIO()
    torch.save(plain_weights(_entries(step, _OF_THE_MODEL)), buffer)
    place.parent.make_directory()
    place.write_bytes(buffer.getvalue())


_OF_THE_MODEL = {
    *("state_dict", "state_dict_versions", "epoch", "global_step", "pytorch-lightning_version"),
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
}


def _entries(step: Location, names: Collection[str]) -> dict[str, Any]:
    """Read some entries of Lightning's dictionary, those that are there."""
    record = read_record(step).items[ITEM]
    handler, folder = PyTreeCheckpointHandler(), step / record.folder
    outline = handler.structure(folder, files=record.files)
    chosen = [f"{name}/**" for name, value in outline.items() if name in names and has_leaves(value)]
    found: dict[str, Any] = handler.restore(folder, files=record.files, select=chosen)
    return found


def _export_safetensors(step: Location, place: Location) -> None:
    from ..formats.safetensors import write_tensors

    state = _entries(step, {"state_dict"}).get("state_dict", {})
    arrays = {name: np.asarray(value) for name, value in state.items() if isinstance(value, np.ndarray | np.generic)}
    tensors = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_tensors(place, tensors, {"step": step.name}, arrays.values)
