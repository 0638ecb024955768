"""The YAML keys of the recipes.

Every section is a pydantic model that rejects unknown keys and does not convert types. The string below a field
documents its meaning and unit; ``holdfast recipes NAME`` prints this text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from ..engine import clock
from ..engine.errors import InvalidLocationError, OptionError
from ..engine.manager import Local, Mirror, option_texts, save_interval
from ..engine.storage import Place as PlaceOrPath
from ..integrations.loop import CheckpointCallback
from ..integrations.options import CallbackOptions
from .problems import KeyPath, closest_name


def _checked(check: Callable[[Any], object], expected: str) -> AfterValidator:
    """Return a pydantic validator that accepts values for which ``check`` raises no error."""

    def validate(value: Any) -> Any:
        try:
            check(value)
        except (OptionError, TypeError, AttributeError):
            raise PydanticCustomError("expected", "{expected}", {"expected": expected}) from None
        return value

    return AfterValidator(validate)


def _check_file_name(value: str) -> None:
    if value in (".", "..") or not value.strip() or "/" in value or "\\" in value:
        raise OptionError(value)


Count = Annotated[int, Field(gt=0)]
Step = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Layers = Annotated[list[Count], Field(min_length=1)]
Name = Annotated[str, _checked(_check_file_name, "a valid folder name")]
PathOrUrl = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a URL. A leading ``~`` is expanded, because shells do not expand it in ``key=value``."""
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Duration = Annotated[Any, _checked(clock.seconds, 'seconds above zero, or text such as "15m"')]
SaveInterval = Annotated[
    Any, _checked(save_interval, 'seconds above zero, or text such as "15m", "auto" or "auto 1m to 1h"')
]
Rate = Annotated[Any, _checked(clock.bytes_per_second, 'bytes a second above zero, or text such as "50 MB/s"')]
Resume = Annotated[
    Any,
    _checked(
        lambda value: CallbackOptions(resume=value, best_fn="metric", best_mode="max"),
        "'auto', 'must', 'never', 'best' or a step number",
    ),
]


class Section(BaseModel):
    """Immutable base class of configuration sections, with strict types and no unknown keys."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# Maps option types to the narrower types that are accepted in YAML.
_IN_YAML: dict[Any, Any] = {
    clock.Duration: Duration,
    clock.Duration | None: Duration | None,
    clock.Rate | None: Rate | None,
    PlaceOrPath: Place,
    PlaceOrPath | None: Place | None,
}


def _keys(options: type, **types: Any) -> dict[str, Any]:
    """Return a pydantic field for each library option, with its YAML type, default, documentation and limits."""
    texts = option_texts(options if options in (Mirror, Local) else CheckpointCallback)
    hints, keys = get_type_hints(options), {}
    for option in fields(options):
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        key = Field(
            ... if default is MISSING else default,
            description=texts.get(option.name, "").replace("``", "").replace("None", "null"),
            ge=option.metadata.get("least"),
            le=option.metadata.get("greatest"),
        )
        keys[option.name] = types.get(option.name, _IN_YAML.get(hints[option.name], hints[option.name])), key
    return keys


def _section(name: str, text: str | None, base: type[Section], options: type, **types: Any) -> Any:
    """Create a section that extends ``base`` with a key for each library option."""
    return create_model(name, __doc__=text, __base__=base, __module__=__name__, **_keys(options, **types))


_MIRROR = "A second place for the checkpoints, with its own interval and limits: the options of ``Mirror``."
MirrorSection: Any = _section("MirrorSection", _MIRROR, Section, Mirror)
_LOCAL = "Saves into the memory or on the disk of each host, with copies on other hosts: the options of ``Local``."
LocalSection: Any = _section("LocalSection", _LOCAL, Section, Local)


class _Checkpoint(Section):
    directory: PathOrUrl | None = None
    """Directory for checkpoints: a path, or a URL such as s3://bucket/run. Default: checkpoints/ in run_dir."""
    allow_changes: list[str] = []
    """Keys of model, data, optimizer or seed that may differ from the checkpoints when the run resumes."""


_CheckpointKeys: Any = _section(
    "_CheckpointKeys",
    None,
    _Checkpoint,
    CallbackOptions,
    save_interval_secs=SaveInterval | None,
    best_fn=str | None,
    keep_steps=list[Step],
    mirror=Annotated[
        MirrorSection | None, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)
    ],
    local=LocalSection | None,
    resume=Resume,
    signals=list[str],
    replicated=list[str],
)


class CheckpointSection(_CheckpointKeys):  # type: ignore[misc]  # made from the declaration of the options
    """The callback options: when to save, what to keep and whether to resume."""

    def options(self) -> CallbackOptions:
        return CallbackOptions(**self.callback_arguments())

    def callback_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the integrations' callbacks, without the directory."""
        arguments: dict[str, Any] = self.model_dump(exclude={"directory", "allow_changes"})
        for name, options in (("mirror", Mirror), ("local", Local)):
            if (given := arguments[name]) is not None:
                arguments[name] = options(**given)
        return arguments


class TrainSection(Section):
    """How long to train."""

    steps: Count = 1000
    """Total number of optimizer updates; may be raised later to continue a finished run."""
    eval_interval_steps: Count = 100
    """Number of steps between evaluations; the Flax recipes also evaluate at the end."""


class LoggingSection(Section):
    """What to log during training."""

    interval_steps: Count = 100
    """Number of steps between progress reports."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of the messages to log; info includes a line for every save."""


_IDENTITY_ORDER = ("recipe", "seed", "model", "data", "optimizer")


class Config(Section):
    """The keys common to all recipes; your own recipe adds its sections in a subclass."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("recipe", "seed")
    """The keys that identify a run. If any of them has changed, the run does not resume. By default, they include all
    keys that a recipe adds."""
    METRICS: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that the recipe stores with its checkpoints; if empty, ``best_fn`` is not checked."""
    REPLICATED: ClassVar[tuple[str, ...]] = ()
    """Names of the state objects that ``replicated`` may list; if empty, ``replicated`` is not checked."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "IDENTITY" not in vars(cls):
            first = [name for name in _IDENTITY_ORDER if name in cls.model_fields]
            cls.IDENTITY = (*first, *(name for name in cls.model_fields if name not in {*Config.model_fields, *first}))

    recipe: str
    """The training program to run."""
    name: Name
    """The name of the run."""
    run_dir: PathOrUrl | None = None
    """Directory for the files of the run. Default: runs/ and the name of the run, in the current directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed for initial weights, dropout and the order of the data."""
    train: TrainSection = Field(default_factory=TrainSection)
    """How long to train."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """When to save, what to keep and whether to resume."""
    logging: LoggingSection = Field(default_factory=LoggingSection)
    """What to log during training."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        """Yield keys that are valid on their own but conflict with others, each with an explanation."""
        best_fn, metrics = self.checkpoint.best_fn, ", ".join(self.METRICS)
        unknown = None if best_fn is None else _unknown(best_fn, "a metric", self.METRICS)
        try:
            if unknown is None:
                self.checkpoint.options()
            else:
                yield ("checkpoint", "best_fn"), unknown
        except (OptionError, InvalidLocationError) as error:
            option = re.split(r"\W", str(error), maxsplit=1)[0]  # error messages begin with the option name
            hint = f"; here the metrics are {metrics}" if metrics and "needs best_fn" in str(error) else ""
            yield ("checkpoint", option), f"{error}{hint}"
        for index, name in enumerate(self.checkpoint.replicated):
            if (unknown := _unknown(name, "state", self.REPLICATED)) is not None:
                yield ("checkpoint", "replicated", index), unknown
        keys = list(self.identity_keys())
        for index, key in enumerate(self.checkpoint.allow_changes):
            if key not in keys:
                text = f'expected one of {", ".join(self.IDENTITY[1:])}, or a key in them, found "{key}"'
                yield ("checkpoint", "allow_changes", index), text + closest_name(key, keys)

    def identity_keys(self) -> Iterator[str]:
        """Yield the dotted names of all sections and keys that identify the run."""
        for name in self.IDENTITY[1:]:
            yield name
            section = getattr(self, name, None)
            if isinstance(section, Section):
                yield from (f"{name}.{key}" for key in type(section).model_fields)


def _unknown(name: str, noun: str, names: Sequence[str]) -> str | None:
    """Return an error message if ``names`` is not empty and does not contain ``name``; otherwise, return None."""
    if not names or name in names:
        return None
    return f'expected {noun} of this recipe ({", ".join(names)}), found "{name}"' + closest_name(name, names)


class DigitsData(Section):
    """scikit-learn's digits: 1797 images of 8 x 8 pixels in 10 classes."""

    batch_size: Annotated[int, Field(gt=0, le=1000)] = 64
    """Number of images per update; an incomplete batch at the end of an epoch is dropped."""
    validation_fraction: Annotated[float, Field(ge=0.05, le=0.4)] = 0.2
    """Fraction of the images held out for validation."""


class Schedule(Section):
    """AdamW with linear learning rate warmup and cosine decay."""

    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    warmup_steps: Step = 50
    """Number of steps over which the learning rate rises from zero."""
    decay_steps: Count = 1000
    """Step at which the learning rate reaches a tenth of its peak, after which it stays constant."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay: the fraction of the weights subtracted per update, per unit of learning rate."""

    def adamw(self) -> Any:
        import optax  # type: ignore[import-untyped]  # it has no type information

        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            end_value=self.learning_rate / 10,
        )
        return optax.adamw(schedule, weight_decay=self.weight_decay)


class _Scheduled(Config):
    optimizer: Schedule = Field(default_factory=Schedule)
    """AdamW and its learning rate."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts()
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps
        if warmup >= decay:
            yield ("optimizer", "decay_steps"), f"expected more steps than warmup_steps ({warmup}), found {decay}"


class DigitsModel(Section):
    """A multilayer perceptron."""

    hidden: Layers = Field(default_factory=lambda: [128, 128])
    """Number of units in each hidden layer."""
    dropout: Fraction = 0.1
    """Fraction of the units dropped during training."""


class FlaxDigits(_Scheduled):
    """The keys of a Flax linen classifier with BatchNorm and dropout on scikit-learn's digits."""

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "val_accuracy", "val_loss")
    REPLICATED: ClassVar[tuple[str, ...]] = ("data", "global_generators")

    name: Name = "flax_digits"
    """The name of the run."""
    model: DigitsModel = Field(default_factory=DigitsModel)
    """The classifier."""
    data: DigitsData = Field(default_factory=DigitsData)
    """The images."""


class LightningDigits(FlaxDigits):
    """The keys of a PyTorch Lightning classifier on scikit-learn's digits."""

    REPLICATED: ClassVar[tuple[str, ...]] = ("global_generators",)  # not "data", because its data loaders have no state

    name: Name = "lightning_digits"
    """The name of the run."""


class TextModel(Section):
    """A decoder-only character transformer."""

    width: Count = 64
    """Number of features per token."""
    layers: Count = 2
    """Number of transformer blocks."""
    heads: Count = 4
    """Number of attention heads; width must be a multiple of this number."""
    dropout: Fraction = 0.1
    """Fraction of the features dropped during training."""


class TextData(Section):
    """Python's help texts (``pydoc_data.topics``), about 460,000 characters."""

    batch_size: Annotated[int, Field(gt=0, le=1000)] = 16
    """Number of sequences per update."""
    context: Annotated[int, Field(gt=1, le=4096)] = 64
    """Number of characters per sequence."""
    validation_fraction: Annotated[float, Field(ge=0.05, le=0.4)] = 0.1
    """Fraction of the text, taken from its end, held out for validation."""


class FlaxText(_Scheduled):
    """The keys of a Flax nnx character transformer on Python's own help texts."""

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "val_loss")
    REPLICATED: ClassVar[tuple[str, ...]] = ("data", "global_generators")

    name: Name = "flax_text"
    """The name of the run."""
    model: TextModel = Field(default_factory=TextModel)
    """The language model."""
    data: TextData = Field(default_factory=TextData)
    """The text."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts()
        if self.model.width % self.model.heads:
            yield ("model", "width"), f"expected a multiple of heads ({self.model.heads}), found {self.model.width}"


class SelfPlayModel(Section):
    """The network of each policy: a multilayer perceptron with two heads."""

    hidden: Layers = Field(default_factory=lambda: [64, 64])
    """Number of units in each hidden layer."""


class SelfPlayGame(Section):
    """Each player has a hand of cards and plays one of them; the higher card wins."""

    cards: Annotated[int, Field(gt=1, le=100)] = 5
    """Number of cards in a hand."""
    batch_size: Annotated[int, Field(gt=1, le=10_000)] = 128
    """Number of games played per update."""


class SelfPlayOptimizer(Section):
    """Adam, with a separate optimizer for each policy."""

    learning_rate: Positive = 3e-3
    """The learning rate."""
    entropy: NotNegative = 0.02
    """Weight of the entropy bonus, which keeps the policies exploring."""


class SelfPlaySwap(Section):
    """Replaces a policy with one from another checkpoint during training."""

    policy: Literal["p0", "p1"] = "p1"
    """The policy whose weights are replaced; its optimizer and all other state remain unchanged."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory of the policy in another checkpoint, such as .../300/state/learner/policies/p0; null for no swap."""
    at_step: Step = 0
    """Number of updates before the swap; a run that resumes after the swap does not repeat it."""


class SelfPlay(Config):
    """The keys of two torch policies that learn a card game by playing against each other."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("recipe", "seed", "model", "game", "optimizer")
    METRICS: ClassVar[tuple[str, ...]] = ("loss", "win_rate", "win_rate_p0", "win_rate_p1")
    REPLICATED: ClassVar[tuple[str, ...]] = ("global_generators",)

    name: Name = "self_play"
    """The name of the run."""
    model: SelfPlayModel = Field(default_factory=SelfPlayModel)
    """The network of each policy."""
    game: SelfPlayGame = Field(default_factory=SelfPlayGame)
    """The game, and the number of games per update."""
    optimizer: SelfPlayOptimizer = Field(default_factory=SelfPlayOptimizer)
    """Adam, with a separate optimizer for each policy."""
    swap: SelfPlaySwap = Field(default_factory=SelfPlaySwap)
    """Whether to replace a policy with one from another checkpoint during training."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts()
        if self.swap.path is None and self.swap.at_step:
            yield ("swap", "at_step"), "expected a path as well: where the other policy comes from"


def fields_of(section: Any) -> dict[str, tuple[Any, str]]:
    """Return the keys of a section (a pydantic model or a dataclass), each with its type and documentation."""
    if is_dataclass(section):
        types = get_type_hints(section, include_extras=True)
        return {key.name: (types[key.name], key.metadata.get("help", "")) for key in fields(section) if key.init}
    return {name: (field.annotation, field.description or "") for name, field in section.model_fields.items()}


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel))
