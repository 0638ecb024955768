"""The impact of saves on training: the same model, trained with each library in turn.

``python -m benchmarks.loop`` runs it; docs/benchmarks.md explains each number.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLDFAST = "holdfast"
NO_SAVING = "no saving"

# Where each contender is, by framework: the first saves nothing, and the second is holdfast.
CONTENDERS: dict[str, dict[str, str]] = {
    "lightning": {
        NO_SAVING: "lightning_runs:no_saving",
        HOLDFAST: "lightning_runs:holdfast",
        "ModelCheckpoint": "lightning_runs:model_checkpoint",
        "AsyncCheckpointIO": "lightning_runs:async_checkpoint_io",
        "torch dcp": "lightning_runs:torch_dcp",
        "torch dcp (process)": "lightning_runs:torch_dcp_process",
    },
    "jax": {
        NO_SAVING: "jax_runs:no_saving",
        HOLDFAST: "jax_runs:holdfast",
        "orbax": "jax_runs:orbax",
        "orbax (tuned)": "jax_runs:orbax_tuned",
    },
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One program: a decoder-only transformer, and when it is saved.

    Attributes:
        width: Features of each token.
        layers: Blocks.
        vocabulary: Different tokens.
        batch: Sequences of a step.
        length: Tokens of a sequence.
        interval: Steps from save to save; long enough that no contender's saves overlap.
        saves: Saves that are measured; the one before them is not.
    """

    width: int = 256
    layers: int = 10
    vocabulary: int = 2048
    batch: int = 1
    length: int = 32
    interval: int = 24
    saves: int = 3

    @property
    def heads(self) -> int:
        """Attention heads, of 32 features each."""
        return max(1, self.width // 32)

    @property
    def first(self) -> int:
        """The last step that is not measured: half-way between the first save and the second."""
        return self.interval + self.interval // 2

    @property
    def last(self) -> int:
        """The last step, which is saved."""
        return self.interval * (self.saves + 1)


STANDARD = Plan()
QUICK = Plan(width=32, layers=1, vocabulary=64, length=8, interval=4, saves=1)
