"""The options of training callbacks, and how a callback takes them as keyword arguments.

:class:`CallbackOptions` adds to the options of every manager what only callbacks have. :func:`takes` gives a callback's
``__init__`` the fields of such a dataclass as its arguments, with their types, defaults and documentation.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from ..engine.clock import Clock, Duration, seconds
from ..engine.errors import InvalidLocationError, OptionError
from ..engine.handlers import PyTreeCheckpointHandler
from ..engine.manager import (
    CheckpointManagerOptions,
    CheckpointOptions,
    documentation,
    documented,
    options_as_text,
)
from ..engine.storage import Place, as_location

Resume = Literal["auto", "must", "never", "best"] | int
Partial = Literal["initialize"] | None
Reshard = Callable[[str, Sequence[Any], int, int], Any]
"""Makes the state of one process from those of all processes that saved: of a name, the states, an index, a count."""

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
T = TypeVar("T")


@documented
@dataclass(frozen=True, kw_only=True)
class CallbackOptions(CheckpointOptions):
    """When a callback saves, what it keeps, and whether it resumes.

    A step is saved when any trigger asks for it: ``save_interval_steps``, ``save_interval_secs`` or ``save_on_best``.
    With none of these given, a checkpoint is saved every 15 minutes. A checkpoint is kept when any rule wants it; the
    newest is always kept.
    """

    DEFAULT_TRIGGER: ClassVar[Mapping[str, Any]] = {"save_interval_secs": "15m"}

    save_at_end: bool = field(
        default=True,
        metadata=documentation("Save the last step when training ends, whether or not a trigger asks for it."),
    )
    resume: Resume = field(
        default="auto",
        metadata=documentation(
            '``"auto"`` resumes if there is a checkpoint, ``"must"`` raises if there is none, and ``"never"`` raises '
            'if there is one. A number begins from that step, ``"best"`` from the one that ``best_fn`` ranks first. '
            "Later steps stay until the run saves them again; remove the option before the run is started again."
        ),
    )
    init_from: Place | None = field(
        default=None,
        metadata=documentation(
            "Where a fresh start takes its weights from: any checkpoint that ``hf.load`` reads, of holdfast or of "
            "another library. Names, shapes and dtypes of all weights must agree; everything else starts fresh. A run "
            "that resumes ignores it."
        ),
    )
    partial: Partial = field(
        default=None,
        metadata=documentation(
            '``"initialize"`` goes on with a state that has changed, such as another layer or one more transformation '
            "of an optimizer: values that fit the checkpoint are restored, the others stay as they were initialized, "
            "and a warning lists them. It holds for a resume and for the weights of ``init_from``. None takes all that "
            "was saved, or nothing."
        ),
    )
    compression: int | None = field(
        default=None,
        metadata=documentation(
            "Compress arrays with zstd at this level, 1 to 22. None does not compress, which is faster on a fast disk.",
            least=1,
            greatest=22,
        ),
    )

    signals: Collection[str | signal.Signals] = field(
        default=("SIGTERM",),
        metadata=documentation(
            "The signals that announce a preemption, by name: the run finishes its step, saves it, and ends. "
            "With SIGINT, the first Ctrl-C does so, and a later one interrupts the program."
        ),
    )
    grace_secs: Duration | None = field(
        default=None,
        metadata=documentation(
            "The time between the signal and the end of the process, as the scheduler grants it. A save that takes "
            "longer is reported with a warning."
        ),
    )

    def __post_init__(self) -> None:
        self.preemption_signals()
        if self.grace_secs is not None:
            seconds(self.grace_secs, name="grace_secs")
        if self.init_from is not None:
            try:
                as_location(self.init_from)
            except InvalidLocationError as error:
                raise InvalidLocationError(f"init_from={self.init_from!r}: {error}") from error
        words: tuple[str, ...] = get_args(get_args(Resume)[0])
        if type(self.resume) is int and self.resume < 0:
            raise OptionError(f"resume={self.resume} must not be negative")
        if type(self.resume) is not int and self.resume not in words:
            close = difflib.get_close_matches(str(self.resume), words, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"resume={self.resume!r} is not one of {', '.join(map(repr, words))} or a step{hint}")
        if self.partial not in (None, *get_args(get_args(Partial)[0])):
            raise OptionError(f'partial={self.partial!r} must be "initialize" or None')
        if self.resume == "best" and self.best_fn is None:
            raise OptionError("resume='best' needs best_fn=, the metric that ranks the steps")
        super().__post_init__()

    def tree_handler(self) -> PyTreeCheckpointHandler:
        """Return the handler that saves a tree with these options."""
        return PyTreeCheckpointHandler(compression=self.compression)

    def preemption_signals(self) -> tuple[signal.Signals, ...]:
        """Return the signals that announce a preemption.

        Raises:
            OptionError: There is no such signal, or no process can handle it.
        """
        names = [self.signals] if isinstance(self.signals, str) else list(self.signals)
        return tuple(dict.fromkeys(_signal(name) for name in names))

    def manager_options(self) -> CheckpointManagerOptions:
        """Return the same options for a :class:`~holdfast.CheckpointManager`."""
        shared = {one.name: getattr(self, one.name) for one in fields(CheckpointOptions)}
        return CheckpointManagerOptions(**shared if self.has_triggers else {**shared, **self.DEFAULT_TRIGGER})


def _as_of_managers(name: str) -> Any:
    """Return the metadata of an option of managers, which a callback takes as well."""
    return CheckpointManagerOptions.__dataclass_fields__[name].metadata


@documented
@dataclass(frozen=True, kw_only=True)
class ProgramOptions(CallbackOptions):
    """What callbacks take that a program makes: the rest of what a manager takes, and what counts in a resume."""

    clock: Clock | None = field(default=None, metadata=documentation("Where the time comes from, for tests."))
    metadata: Mapping[str, Any] | None = field(
        default=None,
        metadata=documentation("JSON about the run, such as its configuration, stored with the checkpoints."),
    )
    hyperparameters: Literal["saved", "program"] = field(
        default="saved",
        metadata=documentation(
            'Which hyperparameters count in a resume where they differ, such as a new learning rate: ``"saved"`` takes '
            'all of the saved state, ``"program"`` keeps the options of torch\'s optimizers and the values of '
            "``optax.inject_hyperparams`` as the program has set them. A line says what differs."
        ),
    )
    reshard: Reshard | None = field(
        default=None,
        metadata=documentation(
            "Called in a resume with another number of processes, for each place in the data, and other "
            "state that differs from process to process: a function of its name, the states that processes 0, 1, ... "
            "have saved, the index of this process and the number of processes. It returns the state of this process. "
            "Without it, such a resume is refused. Random generators stay with the index of their process."
        ),
    )
    keep_checkpoints_without_metrics: bool = field(
        default=False, metadata=_as_of_managers("keep_checkpoints_without_metrics")
    )
    item_intervals: Mapping[str, int] = field(default_factory=dict, metadata=_as_of_managers("item_intervals"))
    step_prefix: str | None = field(default=None, metadata=_as_of_managers("step_prefix"))
    save_timeout_secs: Duration = field(default="1h", metadata=_as_of_managers("save_timeout_secs"))
    barrier_timeout_secs: Duration = field(default="10m", metadata=_as_of_managers("barrier_timeout_secs"))

    def __post_init__(self) -> None:
        if self.hyperparameters not in ("saved", "program"):
            raise OptionError(f"hyperparameters={self.hyperparameters!r} must be 'saved' or 'program'")
        super().__post_init__()
        self.manager_options()  # which checks the others

    def manager_options(self) -> CheckpointManagerOptions:
        """Return the same options for a manager."""
        return replace(
            super().manager_options(),
            keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
            item_intervals=self.item_intervals,
            step_prefix=self.step_prefix,
            save_timeout_secs=self.save_timeout_secs,
            barrier_timeout_secs=self.barrier_timeout_secs,
        )


def _signal(name: Any) -> signal.Signals:
    text = str(getattr(name, "name", name))
    found = signal.Signals.__members__.get(text if text.startswith("SIG") else f"SIG{text}")
    if found is None or found.name in ("SIGKILL", "SIGSTOP"):
        raise OptionError(
            f"signals: {name!r} is not a signal that a process can handle; give names such as 'SIGTERM', 'SIGINT' or "
            "'SIGUSR1'"
        )
    return found


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """Give an ``__init__`` that takes one dataclass the fields of that dataclass as its arguments."""

    def decorate(init: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        made = vars(arguments)["__init__"]
        made.__qualname__ = inspect.unwrap(made).__qualname__ = init.__qualname__  # which TypeErrors name

        @functools.wraps(init)
        def with_arguments(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, arguments(*args, **kwargs))

        this, *_ = inspect.signature(init).parameters.values()
        # The types themselves, not their names, which mean nothing in the module of the callback.
        hints = {name: _for_parsers(hint) for name, hint in get_type_hints(arguments).items()}
        # The defaults themselves, too, which dataclasses hide where a factory makes them.
        declared: dict[str, Field[Any]] = vars(arguments)["__dataclass_fields__"]
        made_anew = {name: one.default_factory() for name, one in declared.items() if callable(one.default_factory)}
        parameters = [
            one.replace(annotation=hints[name], default=made_anew.get(name, one.default))
            for name, one in inspect.signature(arguments).parameters.items()
        ]
        vars(with_arguments)["__signature__"] = inspect.Signature([this, *parameters], return_annotation=None)
        return with_arguments

    return decorate


def _for_parsers(hint: Any) -> Any:
    """Return a type as parsers of arguments know it: jsonargparse, which LightningCLI uses, leaves out collections."""
    return Sequence[get_args(hint)] if get_origin(hint) is Collection else hint  # type: ignore[misc]  # made at runtime


def documents(arguments: type) -> Callable[[type[T]], type[T]]:
    """Put the documentation of a callback's arguments in the place of ``{arguments}`` in its docstring."""

    def decorate(callback: type[T]) -> type[T]:
        if callback.__doc__ is not None:  # which python -OO removes
            callback.__doc__ = callback.__doc__.replace("{arguments}", options_as_text(arguments).strip())
        return callback

    return decorate
