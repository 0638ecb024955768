"""What the YAML of a recipe may say.

Every section is a pydantic model that refuses unknown keys and never converts one type into another. The text under a
field is its documentation, with units; ``holdfast recipes NAME`` prints it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..engine import durations
from ..engine.errors import OptionError
from .problems import KeyPath, did_you_mean


def _duration(value: Any) -> Any:
    try:
        if value is not None and not isinstance(value, (list, dict)):
            durations.seconds(value)
            return value
    except (OptionError, TypeError):
        pass
    raise PydanticCustomError("expected", "{expected}", {"expected": 'seconds above zero, or text such as "15m"'})


def _file_name(value: str) -> str:
    if value in (".", "..") or not value.strip() or "/" in value or "\\" in value:
        raise PydanticCustomError("expected", "{expected}", {"expected": "a name that a folder can have"})
    return value


Duration = Annotated[Any, AfterValidator(_duration)]
Name = Annotated[str, AfterValidator(_file_name)]
PathOrUrl = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a URL; ``~`` at its beginning is the home directory, as in a shell, which leaves key=value alone."""
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of a configuration: strict types, no unknown keys, unchangeable once read."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class CheckpointSection(Section):
    """When to save, what to keep and whether to resume: the same words for every recipe."""

    directory: PathOrUrl | None = None
    """Where the checkpoints go: a path, or a URL such as s3://bucket/run. Default: checkpoints/ in run_dir."""
    save_interval_steps: Count | None = None
    """Save every so many steps. With no trigger given: every 15 minutes."""
    save_interval_secs: Duration | None = None
    """Save when so much time has passed since the last save: seconds, or text such as 15m."""
    save_on_best: bool = False
    """Save when best_fn is better than at every earlier checkpoint."""
    save_at_end: bool = True
    """Save the last step."""
    best_fn: str | None = None
    """The metric that tells which step is best."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of best_fn is the best."""
    max_to_keep: Count | None = None
    """Keep so many checkpoints: the best with best_fn, else the newest. Default: all. The newest always stays."""
    keep_latest: Count | None = None
    """Keep so many of the newest checkpoints, best or not."""
    keep_period: Count | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    keep_time_interval: Duration | None = None
    """Keep one checkpoint in every such span of time: seconds, or text such as 1h."""
    keep_steps: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Keep these steps."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: resume if there is a checkpoint; must: fail if there is none; never: fail if there is one."""
    init_from: Annotated[PathOrUrl, Field(min_length=1)] | None = None
    """Where a fresh run takes its weights from: any checkpoint, of holdfast, Orbax, safetensors, torch or Lightning."""
    compression: Annotated[int, Field(ge=1, le=22)] | None = None
    """Compress arrays with zstd at this level. Default: not at all, which is quicker on a fast disk."""
    allow_changes: list[str] = Field(default_factory=list)
    """Keys of model, data, optimizer or seed that may differ from the checkpoints' when the run resumes."""

    def callback_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments that the integrations' callbacks take, without the directory."""
        return self.model_dump(exclude={"directory", "allow_changes"})


class TrainSection(Section):
    """How long to train."""

    steps: Count = 1000
    """Optimizer updates in all; may be raised later to train a finished run on."""
    eval_interval_steps: Count = 100
    """Evaluate every so many steps; the Flax recipes do it at the end as well."""


class LoggingSection(Section):
    """What to say meanwhile."""

    interval_steps: Count = 100
    """Report the progress every so many steps."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """What the log shows; info has a line for every save."""


class Config(Section):
    """What all recipes have in common."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("recipe", "seed", "model", "data", "optimizer")
    """The keys that make a run what it is: a run does not resume when one of them has changed."""
    METRICS: ClassVar[tuple[str, ...]] = ()
    """The names of the metrics that the recipe stores with its checkpoints."""

    recipe: str
    """Which training program to run."""
    name: Name
    """The name of the run."""
    run_dir: PathOrUrl | None = None
    """Where the run keeps its files. Default: runs/ and the name of the run, in the current directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Decides initial weights, dropout and the order of the data."""
    train: TrainSection = Field(default_factory=TrainSection)
    """How long to train."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """When to save, what to keep and whether to resume."""
    logging: LoggingSection = Field(default_factory=LoggingSection)
    """What to say meanwhile."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        """Yields what is wrong although every key by itself is right: the key, and what to do about it."""
        checkpoint = self.checkpoint
        if checkpoint.save_on_best and checkpoint.best_fn is None:
            text = f"expected best_fn to name a metric as well: {', '.join(self.METRICS)}"
            yield ("checkpoint", "save_on_best"), text
        if checkpoint.best_fn is not None and checkpoint.best_fn not in self.METRICS:
            text = f'expected a metric of this recipe ({", ".join(self.METRICS)}), found "{checkpoint.best_fn}"'
            yield ("checkpoint", "best_fn"), text + did_you_mean(checkpoint.best_fn, self.METRICS)
        known = list(self.identity_keys())
        for index, key in enumerate(checkpoint.allow_changes):
            if key not in known:
                text = f'expected one of {", ".join(self.IDENTITY[1:])}, or a key in them, found "{key}"'
                yield ("checkpoint", "allow_changes", index), text + did_you_mean(key, known)

    def identity_keys(self) -> Iterator[str]:
        """Yields the dotted names of everything that makes the run what it is: sections, and the keys in them."""
        for name in self.IDENTITY[1:]:
            yield name
            section = getattr(self, name, None)
            if isinstance(section, Section):
                yield from (f"{name}.{key}" for key in type(section).model_fields)


class DigitsData(Section):
    """scikit-learn's digits: 1797 images of 8 x 8 pixels in 10 classes."""

    batch_size: Annotated[int, Field(gt=0, le=1000)] = 64
    """Images in an update; the rest of an epoch that does not fill a batch is left out."""
    validation_fraction: Annotated[float, Field(ge=0.05, le=0.4)] = 0.2
    """The share of the images held back for validation."""


class Schedule(Section):
    """AdamW, its learning rate warmed up linearly and then decayed along a cosine."""

    learning_rate: Positive = 1e-3
    """The largest learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Steps in which the learning rate rises from zero."""
    decay_steps: Count = 1000
    """The step at which the learning rate has come down to a tenth; it stays there."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay, a factor on the weights per unit of learning rate."""


class _Scheduled(Config):
    optimizer: Schedule = Field(default_factory=Schedule)
    """AdamW and its learning rate."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts()
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps
        if warmup >= decay:
            text = f"expected more steps than warmup_steps ({warmup}), found {decay}"
            yield ("optimizer", "decay_steps"), text


class DigitsModel(Section):
    """A multilayer perceptron."""

    hidden: Annotated[list[Count], Field(min_length=1)] = Field(default_factory=lambda: [128, 128])
    """Units of every hidden layer."""
    dropout: Fraction = 0.1
    """The share of the units dropped in training."""


class FlaxDigits(_Scheduled):
    """The keys of the recipe ``flax_digits``."""

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "val_accuracy", "val_loss")

    name: Name = "flax_digits"
    """The name of the run."""
    model: DigitsModel = Field(default_factory=DigitsModel)
    """The classifier."""
    data: DigitsData = Field(default_factory=DigitsData)
    """The images."""


class LightningDigits(_Scheduled):
    """The keys of the recipe ``lightning_digits``."""

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "val_accuracy", "val_loss")

    name: Name = "lightning_digits"
    """The name of the run."""
    model: DigitsModel = Field(default_factory=DigitsModel)
    """The classifier."""
    data: DigitsData = Field(default_factory=DigitsData)
    """The images."""


class TextModel(Section):
    """A decoder-only transformer over characters."""

    width: Count = 64
    """Features of every token."""
    layers: Count = 2
    """Blocks of attention and feed-forward layers."""
    heads: Count = 4
    """Attention heads; width must be a multiple of it."""
    dropout: Fraction = 0.1
    """The share of the features dropped in training."""


class TextData(Section):
    """The help texts of Python (``pydoc_data.topics``), some 460,000 characters."""

    batch_size: Annotated[int, Field(gt=0, le=1000)] = 16
    """Sequences in an update."""
    context: Annotated[int, Field(gt=1, le=4096)] = 64
    """Characters in a sequence."""
    validation_fraction: Annotated[float, Field(ge=0.05, le=0.4)] = 0.1
    """The share of the text, at its end, held back for validation."""


class FlaxText(_Scheduled):
    """The keys of the recipe ``flax_text``."""

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "val_loss")

    name: Name = "flax_text"
    """The name of the run."""
    model: TextModel = Field(default_factory=TextModel)
    """The language model."""
    data: TextData = Field(default_factory=TextData)
    """The text."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        """Yields what is wrong although every key by itself is right: the key, and what to do about it."""
        yield from super().conflicts()
        if self.model.width % self.model.heads:
            yield ("model", "width"), f"expected a multiple of heads ({self.model.heads}), found {self.model.width}"
