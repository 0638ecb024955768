"""The options of training callbacks, which extend the options of managers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from ..engine.clock import Clock, Duration, seconds
from ..engine.errors import InvalidLocationError, OptionError, did_you_mean
from ..engine.handlers import PyTreeCheckpointHandler
from ..engine.manager import CheckpointManagerOptions, CheckpointOptions, ProgramPolicies, as_int, has_triggers, limits
from ..engine.storage import Place, as_location, hidden_address

Resume = Literal["auto", "must", "never", "best"] | int
_SAME_AS_AUTO = ("latest", "last", "newest", "True")
_NEVER = "; did you mean 'never', which raises an error if there is a checkpoint?"
Partial = Literal["initialize"] | None
OnInexact = Literal["warn", "raise", "ignore"]
Reshard = Callable[[str, Sequence[Any], int, int], Any]
"""A function that returns the state of one process, given the states that all processes saved.

Its arguments are the name of an extra, the saved states, the index of the process and the number of processes.
"""


@dataclass(frozen=True, kw_only=True)
class CallbackOptions(CheckpointOptions):
    """Options that determine when a callback saves, which steps it keeps, and how it resumes."""

    DEFAULT_TRIGGER: ClassVar[Mapping[str, Any]] = {"save_interval_secs": "15m"}  # used if no trigger is set

    save_at_end: bool = True
    resume: Resume = "auto"
    init_from: Place | None = None
    partial: Partial = None
    compression: int | None = field(default=None, metadata=limits(1, 22))

    signals: Collection[str | signal.Signals] = ("SIGTERM", "SIGHUP")
    grace_secs: Duration | None = None
    replicated: Collection[str] = ()
    witness: bool = True
    on_inexact: OnInexact = "warn"
    witness_steps_after_signal: int = field(default=4, metadata=limits(0))

    def __post_init__(self) -> None:
        self.preemption_signals()
        if self.on_inexact not in get_args(OnInexact):
            raise OptionError(
                f"on_inexact={self.on_inexact!r} is not one of {', '.join(map(repr, get_args(OnInexact)))}"
            )
        if self.grace_secs is not None:
            seconds(self.grace_secs, name="grace_secs")
        if self.init_from is not None:
            try:
                as_location(self.init_from)
            except InvalidLocationError as error:
                raise InvalidLocationError(f"init_from={hidden_address(str(self.init_from))!r}: {error}") from error
        words: tuple[str, ...] = get_args(get_args(Resume)[0])
        resume: Any = as_int(self.resume)
        if str(resume) in _SAME_AS_AUTO:
            object.__setattr__(self, "resume", "auto")
        elif type(resume) is int:
            if resume < 0:
                raise OptionError(f"resume={resume} must not be negative")
            object.__setattr__(self, "resume", resume)
        elif resume not in words:
            hint = _NEVER if resume is False else did_you_mean(str(resume), words, "{!r}")
            raise OptionError(f"resume={resume!r} is not one of {', '.join(map(repr, words))} or a step{hint}")
        if isinstance(self.replicated, str) or not all(isinstance(name, str) for name in self.replicated):
            raise OptionError(
                f"replicated={self.replicated!r} must name extras, such as ['data'], or parts of the state of a "
                "Lightning trainer, such as ['loaders']"
            )
        if self.partial not in (None, *get_args(get_args(Partial)[0])):
            raise OptionError(f'partial={self.partial!r} must be "initialize" or None')
        if self.resume == "best" and self.best_fn is None:
            raise OptionError("resume='best' needs best_fn=, the metric that ranks the steps")
        super().__post_init__()

    def tree_handler(self) -> PyTreeCheckpointHandler:
        """Return a handler that saves trees according to these options."""
        return PyTreeCheckpointHandler(compression=self.compression)

    def preemption_signals(self) -> tuple[signal.Signals, ...]:
        """Return the signals that announce a preemption; raise OptionError for signals that a process cannot handle."""
        names = [self.signals] if isinstance(self.signals, str) else list(self.signals)
        return tuple(dict.fromkeys(_signal(name) for name in names))

    def manager_options(self) -> CheckpointManagerOptions:
        """Convert these options to the options of a :class:`~holdfast.CheckpointManager`."""
        names = {field.name for field in fields(self)} & {field.name for field in fields(CheckpointManagerOptions)}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return CheckpointManagerOptions(**given, **{} if has_triggers(self) else self.DEFAULT_TRIGGER)


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(CallbackOptions, ProgramPolicies):
    """Options that can be set only in code, such as functions, further manager options and rules for resuming."""

    clock: Clock | None = None
    metadata: Mapping[str, Any] | None = None
    hyperparameters: Literal["saved", "program"] = "saved"
    reshard: Reshard | None = None
    keep_checkpoints_without_metrics: bool = False
    item_intervals: Mapping[str, int] | None = None
    step_prefix: str | None = None
    save_timeout_secs: Duration = "1h"
    barrier_timeout_secs: Duration = "10m"
    load_and_broadcast: bool | None = None

    def __post_init__(self) -> None:
        if self.hyperparameters not in ("saved", "program"):
            raise OptionError(f"hyperparameters={self.hyperparameters!r} must be 'saved' or 'program'")
        super().__post_init__()
        self.manager_options()  # also checks the manager's options


def epoch_reason(every: int | None, finished: int | None) -> str | None:
    """Return the reason to save after ``finished`` epochs, or None. Within an epoch, ``finished`` is None."""
    if every is None or finished is None or finished % every:
        return None
    return "every epoch" if every == 1 else f"every {every} epochs"


def _signal(name: Any) -> signal.Signals:
    text = str(getattr(name, "name", name))
    member = signal.Signals.__members__.get(text if text.startswith("SIG") else f"SIG{text}")
    if member is None or member.name in ("SIGKILL", "SIGSTOP"):
        raise OptionError(
            f"signals: {name!r} is not a signal that a process can handle; pass names such as 'SIGTERM', 'SIGINT' or "
            "'SIGUSR1'"
        )
    return member
