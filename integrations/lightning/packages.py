"""The two packages that Lightning is published as, and base classes that belong to whichever of them are here.

``lightning.pytorch`` and ``pytorch_lightning`` are separate copies of the same code: a callback of the one is not a
callback to the trainer of the other, and is quietly treated as none of its checkpoint callbacks.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

_PACKAGES = {
    "lightning.pytorch.callbacks": "lightning.fabric.plugins.io.checkpoint_io",
    "pytorch_lightning.callbacks": "lightning_fabric.plugins.io.checkpoint_io",
}

# A callback that resumes by itself is found by way of ``ckpt_path="last"``, of which Lightning then warns, although
# nobody asked for "last": about a model that was not given, and about a first run that finds nothing.
_MISLEADING = (
    r"`\.fit\(ckpt_path=None\)` was called without a model\.",
    r'\.fit\(ckpt_path="last"\) is set, but there is no last checkpoint available\.',
)


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


def silence_misleading_warnings() -> None:
    """Ignores what Lightning says of a checkpoint callback that resumes by itself, and nothing else."""
    for message in _MISLEADING:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class ResumingCallback(OnExceptionCheckpoint):
        """The one kind of callback that a trainer asks for a checkpoint when ``fit`` is given none."""

else:
    _found = _importable().values()

    class ResumingCallback(*(callbacks.OnExceptionCheckpoint for callbacks, _ in _found)):
        """The one kind of callback that a trainer asks for a checkpoint when ``fit`` is given none."""

    class CheckpointIO(*(plugins.CheckpointIO for _, plugins in _found)):
        """What a strategy writes checkpoints to and reads them from."""
