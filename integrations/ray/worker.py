"""Access the Ray Train worker in this process: its storage, reports, and preemption signals.

SIGTERM handlers are installed in the main thread of the worker's actor, because signals cannot be handled in any other
thread. A notice from Ray that it will remove a node is treated like a signal.
"""

from __future__ import annotations

import logging
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any
from urllib.parse import quote, unquote

from ...engine.errors import StateError
from ...engine.storage import Location, as_location, aws_endpoint
from ..loop import PreemptionSignal

logger = logging.getLogger("holdfast")

DRAINED = 1000
"""Pseudo signal number for Ray's notice that it will remove a node."""

_TIMEOUT = 30.0  # timeout, in seconds, of calls in the actor's main thread, which is normally idle
_SCHEMES = {"s3": "s3://", "gcs": "gs://", "abfs": "abfs://"}  # maps pyarrow file system types to URL schemes
_CREDENTIALS = ("access_key", "account_key", "access_token", "sas_token", "client_id", "anonymous", "role_arn")
"""File system options that set credentials; for a plain URL, credentials come from the environment instead."""

_signals: weakref.WeakValueDictionary[int, WorkerSignal] = weakref.WeakValueDictionary()  # keyed by id, for `_call`


def run_directory(name: str = "checkpoints") -> str:
    """Return the checkpoint directory in the storage of this Ray Train run. It is the same directory for every worker.

    Ray registers checkpoints in this directory without copying them. It is a subdirectory of the run's directory, which
    ``RunConfig(storage_path=..., name=...)`` sets. Set both, so that a restarted program finds the same directory.

    Args:
        name: The name of the subdirectory.

    Returns:
        A path, or a URL such as ``s3://bucket/runs/digits/checkpoints``. If the storage has its own options, such as an
        endpoint or ``RunConfig(storage_filesystem=...)``, the URL is the one that
        ``holdfast.storage.as_location(..., filesystem=...)`` returns, with the same guarantees.

    Raises:
        StateError: This process is not a Ray Train worker.
    """
    worker = current_worker()
    if worker is None:
        raise StateError("run_directory() must be called in the function that a Ray Train trainer runs in its workers")
    return (worker.root() / name).url


def current_worker() -> Worker | None:
    """Return the Ray Train worker in this process; None outside of a worker, or if the program does not use Ray."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        return Worker(train, train.get_context())
    except (RuntimeError, DeprecationWarning):  # Ray rejects the call outside of workers and in Ray Tune trials
        return None


class Worker:
    """The Ray Train worker in this process. Use it only in the thread that runs the training loop."""

    def __init__(self, train: Any, context: Any) -> None:
        self._train = train
        self._storage = context.get_storage()
        self.count: int = context.get_world_size()

    def root(self) -> Location:
        """Return the run directory in Ray's storage."""
        return _location(self._storage.storage_filesystem, self._storage.experiment_fs_path)

    def checkpoint(self) -> Location | None:
        """Return the directory of the last checkpoint that Ray knows of; None if there is no checkpoint."""
        checkpoint = self._train.get_checkpoint()
        return None if checkpoint is None else _location(checkpoint.filesystem, checkpoint.path)

    def report(self, metrics: dict[str, Any], step: Location | None) -> None:
        """Report metrics and, optionally, a checkpoint that is already in Ray's storage; wait for all workers."""
        checkpoint = None
        if step is not None:
            below = step.url.removeprefix(self.root().url)
            path = self._storage.experiment_fs_path + (below if step.is_local else unquote(below))
            checkpoint = self._train.Checkpoint(path, filesystem=self._storage.storage_filesystem)
        mode = self._train.CheckpointUploadMode.NO_UPLOAD
        self._train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=mode)


def _location(filesystem: Any, path: str) -> Location:
    """Convert a path in a pyarrow file system to a location, based on an equivalent object store URL if possible."""
    type_name = filesystem.type_name
    if type_name in _SCHEMES:
        options = filesystem.__reduce__()[1][0]  # pyarrow exposes its options only for pickling
        bucket, _, key = path.partition("/")
        account = f"@{options['account_name']}" if type_name == "abfs" else ""
        if not any(options.get(name) for name in _CREDENTIALS) and _is_service_of_urls(type_name, options):
            return as_location(f"{_SCHEMES[type_name]}{bucket}{account}/{quote(key)}")
    return as_location(path, filesystem=filesystem)


def _is_service_of_urls(type_name: str, options: Mapping[str, Any]) -> bool:
    """True if a file system with these options uses the same service endpoint as a plain URL."""
    if type_name == "abfs":
        return bool(options.get("blob_storage_authority") == ".blob.core.windows.net")
    endpoint = options.get("endpoint_override") or None
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{options['scheme']}://{endpoint}"
    return endpoint == (aws_endpoint() if type_name == "s3" else None)


def is_drained() -> bool:
    """True if Ray has announced that it will remove a node of this run."""
    # Read the local value: ``ray.train.get_preemption_info`` is a barrier across all workers, and thus too slow to call
    # at every step.
    context: Any = sys.modules.get("ray.train.v2._internal.execution.context")
    try:
        return context is not None and context.get_train_context().preemption_context.preemption_info is not None
    except (AttributeError, RuntimeError):  # this version of Ray does not announce removals, or no run is active
        return False


class WorkerSignal(PreemptionSignal):
    """The preemption signal of a Ray Train worker, with handlers installed in the main thread of its actor."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        super().__init__(signals)
        _signals[id(self)] = self

    @property
    def is_agreed(self) -> bool:
        """Always False: agreement through JAX needs JAX's handler, which is replaced here and ignores drained nodes."""
        return False

    @property
    def received(self) -> bool:
        """True if a signal has arrived or Ray has announced that it will remove a node."""
        if self._received is None and is_drained():
            self.request(DRAINED)
        return super().received

    def install(self) -> bool:
        """Install the handlers in the main thread of the actor; return whether they are installed."""
        if not self.installed:
            self._in_main_thread("install")
        return self.installed

    def restore(self) -> None:
        """Restore the previous handlers in the main thread of the actor."""
        if self.installed:
            self._in_main_thread("restore")
        super().restore()

    def _in_main_thread(self, method: str) -> None:
        import ray

        try:
            # A Ray Train actor runs the functions passed to its ``execute`` method in its main thread.
            actor: Any = ray.get_runtime_context().current_actor
            ray.get(actor.execute.remote(_call, id(self), method), timeout=_TIMEOUT)
        except Exception as error:
            if method == "install":
                logger.warning(
                    "%s is not handled, because the main thread of this Ray worker cannot be reached: %s; a preemption "
                    "without a notice from Ray loses the steps since the last save",
                    self._names(),
                    error,
                )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.installed:
            self.request(number)  # do not call Ray's own handler, which would exit at once
        else:
            super()._handle(number, frame)


def _call(key: int, method: str) -> None:
    if (preemption := _signals.get(key)) is not None:
        getattr(PreemptionSignal, method)(preemption)
