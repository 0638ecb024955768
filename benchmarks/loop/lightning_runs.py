"""One Lightning trainer for each way to save."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import warnings
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from typing_extensions import override

from holdfast.integrations.lightning import CheckpointCallback

from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from pathlib import Path

    from . import Plan


class Model(lightning.LightningModule):
    """A decoder-only transformer with AdamW."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            plan.width, plan.heads, 4 * plan.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(plan.vocabulary, plan.width)
        self.blocks = nn.TransformerEncoder(block, plan.layers, enable_nested_tensor=False)
        self.head = nn.Linear(plan.width, plan.vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(plan.length), persistent=False)

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(batch[:, :-1]), mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Times(Callback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self._stopwatch.step_ends(batch_idx)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stopwatch.step_ends(trainer.global_step)


def _train(plan: Plan, path: Path, *callbacks: Any, plugins: list[Any] | None = None) -> dict[str, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    lightning.seed_everything(0, verbose=False)
    tokens = torch.randint(plan.vocabulary, (plan.last * plan.batch, plan.length + 1))
    data: Any = torch.utils.data.DataLoader(tokens, batch_size=plan.batch)  # type: ignore[arg-type]  # has what a data set has
    stopwatch = Stopwatch(plan, path)
    trainer = lightning.Trainer(
        max_steps=plan.last,
        accelerator="cpu",
        callbacks=[_Times(stopwatch), *callbacks],
        plugins=plugins,
        enable_checkpointing=bool(callbacks) and not isinstance(callbacks[0], _TorchDcp),
        default_root_dir=path.parent,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(plan), data)
    return stopwatch.finish()


def no_saving(plan: Plan, path: Path) -> dict[str, float]:
    """Train and save nothing."""
    return _train(plan, path)


def holdfast(plan: Plan, path: Path) -> dict[str, float]:
    """Save with holdfast's callback."""
    return _train(plan, path, CheckpointCallback(path, save_interval_steps=plan.interval, max_to_keep=1))


def model_checkpoint(plan: Plan, path: Path) -> dict[str, float]:
    """Save with ModelCheckpoint, which holds up the loop."""
    return _train(plan, path, ModelCheckpoint(path, every_n_train_steps=plan.interval))


def async_checkpoint_io(plan: Plan, path: Path) -> dict[str, float]:
    """Save with ModelCheckpoint on a thread of Lightning's."""
    return _train(plan, path, ModelCheckpoint(path, every_n_train_steps=plan.interval), plugins=[AsyncCheckpointIO()])


def torch_dcp(plan: Plan, path: Path) -> dict[str, float]:
    """Save with ``async_save`` of torch.distributed.checkpoint, on a thread."""
    return _train(plan, path, _TorchDcp(plan, path, AsyncCheckpointerType.THREAD))


def torch_dcp_process(plan: Plan, path: Path) -> dict[str, float]:
    """Save with ``async_save`` of torch.distributed.checkpoint, in a process beside the loop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The process that saves finds its group through these.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo")
    try:
        return _train(plan, path, _TorchDcp(plan, path, AsyncCheckpointerType.PROCESS))
    finally:
        torch.distributed.destroy_process_group()


class _TorchDcp(Callback):
    """The callback that the documentation of ``async_save`` leaves to its users; its staging memory is kept."""

    def __init__(self, plan: Plan, path: Path, kind: AsyncCheckpointerType) -> None:
        self._interval = plan.interval
        self._path = path
        self._kind = kind
        shared = kind is AsyncCheckpointerType.PROCESS
        # Pinned memory, a staging thread and non-blocking copies are refused without CUDA.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._pending: tuple[Future[Any], threading.Event] | None = None

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step % self._interval:
            return
        self._wait()
        model, optimizer = get_state_dict(pl_module, trainer.optimizers)
        pending = async_save(
            {"model": model, "optimizer": optimizer},
            storage_writer=FileSystemWriter(self._path / str(step), thread_count=os.cpu_count() or 1),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=self._kind is AsyncCheckpointerType.THREAD,
        )
        assert isinstance(pending, Future)
        earlier, removed = self._path / str(step - self._interval), threading.Event()

        def remove(_: Future[Any]) -> None:
            shutil.rmtree(earlier, ignore_errors=True)
            removed.set()

        pending.add_done_callback(remove)
        self._pending = pending, removed

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._wait()
        self._stager.close()

    def _wait(self) -> None:
        if self._pending is not None:
            saved, removed = self._pending
            saved.result()
            removed.wait()
