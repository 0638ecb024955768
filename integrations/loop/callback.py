"""The training loop callback, which saves checkpoints, decides which of them to keep, and resumes runs.

:class:`CheckpointCallback` is framework-agnostic; a :class:`StateAdapter` contains the code for each type of state.
"""

from __future__ import annotations

import logging
import operator
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, Self, TypeVar, overload

from ...engine.checkpoint import AsyncCheckpointer
from ...engine.clock import Clock, Duration, seconds
from ...engine.errors import INTERRUPTED, PREEMPTED, OptionError, StateError, UnknownArgumentError
from ...engine.generators import GlobalGenerators
from ...engine.handlers import PerProcessCheckpointHandler
from ...engine.manager import (
    BestFn,
    BestMode,
    CheckpointManager,
    CheckpointManagerOptions,
    KeepPolicy,
    Local,
    Mirror,
    Peek,
    SavePolicy,
    described,
    explains_options,
    has_triggers,
    restores_of,
    shown_call,
    takes_texts_of,
)
from ...engine.sources import Misfits
from ...engine.storage import Place
from ..options import OnInexact, Partial, Reshard, Resume
from .announce import Ending, announce
from .extras import (
    GLOBAL_GENERATORS,
    check_extras,
    check_no_options,
    check_replicated,
    loaders_of,
    warn_of_unrestored,
)
from .first_steps import compare_processes
from .initial import Hyperparameters, InitialState
from .objects import adapter_for
from .preemption import WITHOUT_GRACE, PreemptionSignal, grace_check
from .resuming import all_steps, check_resume, peek, restore, unfinished_neighbour, warn_of_misfits
from .states import STATE, LoopArguments, Start, StateAdapter, check_depth
from .steps import Report, StepSaver, check_metrics, record_metrics
from .stopping import AgreedStop, StepsAfterSignal, Stop, barrier_exit, stop_of
from .witnessing import Proof, Witness, why_not_comparable

logger = logging.getLogger("holdfast")

T = TypeVar("T")


class HasStateDict(Protocol):
    """An object such as a torch module or optimizer, which is treated as a state even if it is callable."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the object's values by name."""
        ...


Live = TypeVar("Live", bound=HasStateDict)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a call to ``on_step`` or ``on_eval``.

    Attributes:
        saved: Whether this call saved the step. The files are written in the background, except after a preemption,
            when they are durable on return.
        reason: The reason why the step was or was not saved, as human-readable text.
        should_stop: Whether the program should leave the loop now.
    """

    saved: bool
    reason: str
    should_stop: bool

    def __bool__(self) -> Never:
        raise OptionError(
            "on_step returns an outcome, which is neither true nor false: ask for on_step(...).should_stop to leave "
            "the loop, or for on_step(...).saved"
        )


@takes_texts_of(CheckpointManagerOptions)
class CheckpointCallback:
    """Saves a training loop's state, keeps the checkpoints you need, and resumes the loop where it stopped.

    ::

        with CheckpointCallback("runs/digits/checkpoints", save_interval_steps=100, max_to_keep=3) as checkpoint:
            state, step = checkpoint.restore_or_initialize(state, data=batches)
            while step < total_steps:
                state, metrics = train_step(state, next(batches))
                step += 1
                if checkpoint.on_step(step, state, metrics=metrics, data=batches).should_stop:
                    break

    Step N means that the state includes N optimizer updates, so increment the step and call ``on_step`` after the
    update. A run that is interrupted at any point and then resumed ends with exactly the same bits as an uninterrupted
    run, provided that the state and the extras contain everything that the loop depends on.

    The state must be one of the following:

    - A pytree of jax, numpy or torch arrays and plain values, such as a ``TrainState``. The state that you pass is not
      changed. The restored state has the saved types: a number that became a jax array is restored as a jax array,
      weakly typed if the saved array was, and a list that grew is restored with its saved length.
    - nnx objects, or dicts, lists and tuples of nnx objects, which are updated in place.
    - torch modules and optimizers, such as ``{"model": model, "optimizer": optimizer}``, and all other objects that
      ``holdfast.graph`` saves (its nodes, and objects with attributes). They are restored in place, but only if the
      complete state matches the complete checkpoint.
    - A component of ``holdfast.components``, which is restored in place.

    ``init_from`` initializes the ``params`` of a pytree, or the weights of the only module in the state. With
    ``save_on_best``, the metric is fetched from the device at every step that reports it.

    Extras can have any names. Each extra must be one of the following:

    - A numpy ``Generator``, a ``random.Random``, or any object with the methods ``get_state`` and ``set_state`` or
      ``state_dict`` and ``load_state_dict``. It is restored in place.
    - nnx objects, such as ``nnx.Rngs``, which are restored in place.
    - A pytree with arrays or typed PRNG keys. ``checkpoint.extras[name]`` is the restored pytree, with the saved types
      and the shardings of the pytree that was passed.
    - Plain data (None, numbers, strings, bytes, and dicts, lists and tuples of them). ``checkpoint.extras[name]`` is
      the saved value; the value that was passed is not used as a template.

    Checkpoints do not include torch gradients. If gradients are accumulated over several batches, call ``on_step``
    after ``optimizer.step()``, not after each batch; otherwise a warning is logged.

    The global random generators of Python, numpy and torch, which ``torch.randn``, dropout and ``np.random.shuffle``
    draw from, are saved with the extras and restored after all other values. If the program draws random values only
    once, for example to select a validation set, draw them before ``restore_or_initialize``.

    SIGTERM only sets a flag. The next ``on_step`` saves the step and waits until its files are durable. After at most
    ``witness_steps_after_signal`` further steps, ``on_step`` asks the loop to stop, after which the program should call
    ``sys.exit(checkpoint.exit_status)`` to inform the scheduler. Leaving the ``with`` block saves the last step if it
    has not been saved, waits for the files and closes the callback. If an exception ends the block, a save in progress
    is completed, but the last step is not saved. Worker processes that are started after the callback was created
    survive a signal to the whole job.

    In a program with several processes (``jax.distributed`` or ``torch.distributed``), each process creates a callback
    and calls it at every step. The processes save the arrays together, but each process saves and restores its own
    data iterators and other extras that are stateful objects or plain data.

    Args:
        directory: The checkpoint directory, as a path or URL.
        save_interval_steps, max_to_keep, best_fn, best_mode:

    Args: when to save
        save_interval_secs, save_on_best, save:
        save_at_end: Whether to save the last step when training ends, even if no trigger is due.
        step_offset: 0 if your loop reports the number of updates as its step, 1 if it reports the index of the last
            update, as with Orbax. With 1, the state of step N includes N + 1 updates, and a resume begins with step
            N + 1. None uses the offset that was saved with the step from which the run resumes, or else 0.
        item_intervals:

    Args: what to keep
        keep_latest, keep_period, keep_time_interval, keep_steps, keep, keep_checkpoints_without_metrics:

    Args: where, and how it is stored
        mirror, local, step_prefix, step_name_width:
        metadata: JSON data about the run, such as its configuration, which is stored with the checkpoints.
        compression: The zstd level with which arrays are compressed, from 1 to 22. None disables compression, which is
            faster on a fast disk.
        reuse_unchanged:

    Args: what a resume does
        resume: ``"auto"`` resumes if there is a checkpoint (``"latest"``, ``"last"`` and True do the same), ``"must"``
            raises an error if there is none, and ``"never"`` raises an error if there is one. A number resumes from
            that step, and ``"best"`` from the step that ``best_fn`` ranks first. Later steps are kept until the run
            saves them again; remove the option before you restart the run.
        init_from: The checkpoint from which a fresh start takes its weights, in any format that ``hf.load`` supports.
            The names, shapes and dtypes of all weights must match. All other state starts fresh. A run that resumes
            ignores this option.
        partial: ``"initialize"`` allows the state to differ from the checkpoint, for example after a layer or an
            optimizer transformation was added. Values that fit are restored, all others stay as they were initialized,
            and a warning lists them. This applies to a resume and to the weights of ``init_from``. None requires that
            all values match.
        hyperparameters: Which hyperparameters, such as learning rates, a resume uses if the program's differ from the
            saved ones. ``"saved"`` uses the saved values, and ``"program"`` keeps the options of torch optimizers and
            the values of ``optax.inject_hyperparams`` from the program. A log line lists the differences.
        global_generators: Whether to save and restore the global random generators of Python, numpy and, if it was
            imported, torch (on the CPU and on devices). If there are several processes, each process has its own
            generators, unless they are ``replicated``.
        witness: Whether to record the steps after each save, with which a resumed run compares its first steps. A log
            line lists the identical steps, and a warning describes any difference.
        on_inexact: What to do if a step of a resumed run differs from the recorded step: log a warning (``"warn"``),
            raise ``StateError`` at that step and stop saving (``"raise"``), or only record the difference in ``proof``
            and an event (``"ignore"``).

    Args: preemptions
        signals: Names of the signals that announce a preemption, after which the run saves the current step and ends. A
            closed terminal sends SIGHUP. With SIGINT, the first Ctrl-C ends the run this way, with exit status 130, and
            a later one interrupts it. SIGHUP and SIGINT stay ignored if they already are, as under ``nohup`` or ``&``.
        grace_secs: The time that the scheduler allows between the signal and the end of the process. A warning is
            logged if a save takes longer.
        witness_steps_after_signal: The maximum number of further steps that the run takes after the save that SIGTERM
            triggers. These steps must fit in a quarter of ``grace_secs`` (2 seconds if it is None). They are recorded
            for comparison with the resumed run, but not saved. 0 stops at the saved step.
        save_timeout_secs:

    Args: several processes
        replicated: Names of states that are equal in all processes, and that any number of processes can restore. They
            may be extras, such as a position in an order that does not depend on the number of processes, or a random
            generator with the same seed everywhere; ``"global_generators"`` for the generators of Python, numpy and
            torch; and in Lightning ``"loaders"`` for training loaders with ``state_dict``, or ``"loaders/0"`` for the
            first one. Loops check at each save that the states are equal, and store one copy; Lightning trainers check
            this when a different number of processes resumes. Objects with an attribute ``replicated_state = True``,
            ``hf.skip_to`` with a ``global_batch_size`` and Grain's ``ElasticIterator`` need not be named.
        reshard: A function to call when a different number of processes resumes, for each data position and any other
            state that differs between processes. Its arguments are the name, the states saved by processes 0, 1, ...,
            the index of this process and the number of processes; it returns the state of this process. Without this
            function, such a resume raises an error. Random generators are restored by process index.
        barrier_timeout_secs, load_and_broadcast:

    Args: tests
        clock: A replacement for the system clock, for tests.

    Attributes:
        extras: The restored extras by name, or the extras that were passed if the run started fresh.

    Raises:
        OptionError: An option has an invalid value.
    """

    @explains_options
    def __init__(
        self,
        directory: Place,
        *,
        save_interval_steps: int | None = None,
        save_interval_secs: Duration | None = None,
        save_on_best: bool = False,
        best_fn: BestFn | None = None,
        best_mode: BestMode | None = None,
        max_to_keep: int | None = None,
        keep_latest: int | None = None,
        keep_period: int | None = None,
        keep_time_interval: Duration | None = None,
        keep_steps: Collection[int] = (),
        mirror: Place | Mirror | None = None,
        local: Local | None = None,
        reuse_unchanged: bool = True,
        step_name_width: int | None = None,
        save: SavePolicy | Sequence[SavePolicy] | None = None,
        keep: KeepPolicy | Sequence[KeepPolicy] | None = None,
        save_at_end: bool = True,
        resume: Resume = "auto",
        init_from: Place | None = None,
        partial: Partial = None,
        compression: int | None = None,
        signals: Collection[str | signal.Signals] = ("SIGTERM", "SIGHUP"),
        grace_secs: Duration | None = None,
        replicated: Collection[str] = (),
        witness: bool = True,
        on_inexact: OnInexact = "warn",
        witness_steps_after_signal: int = 4,
        clock: Clock | None = None,
        metadata: Mapping[str, Any] | None = None,
        hyperparameters: Literal["saved", "program"] = "saved",
        reshard: Reshard | None = None,
        keep_checkpoints_without_metrics: bool = False,
        item_intervals: Mapping[str, int] | None = None,
        step_prefix: str | None = None,
        save_timeout_secs: Duration = "1h",
        barrier_timeout_secs: Duration = "10m",
        load_and_broadcast: bool | None = None,
        global_generators: bool = True,
        step_offset: Literal[0, 1] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self._options = options = LoopArguments(**given)
        self._state_checkpointer = AsyncCheckpointer(options.tree_handler())
        extras = options.tree_handler()
        extras.optional = True  # component trees have this item only if there are extras
        self._manager = CheckpointManager(
            options.directory,
            {
                STATE: self._state_checkpointer,
                "extras": AsyncCheckpointer(extras),
                "process": AsyncCheckpointer(PerProcessCheckpointHandler()),
            },
            options.manager_options(),
            metadata=options.metadata,
            clock=options.clock,
        )
        self._manager.events.has_callback = True
        self._ending = Ending(str(self._manager.directory), saves_at_end=options.save_at_end)
        self._manager.events.add_listener(self._ending.note)
        if options.grace_secs is not None:
            self._manager.events.add_listener(grace_check(seconds(options.grace_secs)))
        self._witness = Witness(self._manager, enabled=options.witness, on_inexact=options.on_inexact)
        self._adapter: StateAdapter | None = None  # chosen according to the type of the first state
        self._saver: StepSaver | None = None  # set when the state before the first step is known
        self._stop: Stop | None = None  # set when the processes of the run are connected
        self._preemption = self._signal(options.preemption_signals())
        self._after_signal = StepsAfterSignal(options, self._manager, self._preemption)
        self._generators = GlobalGenerators() if options.global_generators else None
        self._names: frozenset[str] = frozenset()
        self._closed = False
        self._has_peeked = False
        self._restored: int | None = None
        self._restores = 0  # the manager's restore count at the last report or resume
        self.extras: dict[str, Any] = {}

    def __repr__(self) -> str:
        return shown_call(self, self._manager.directory, self._options)

    @property
    def manager(self) -> CheckpointManager:
        """The checkpoint manager, which can list and pin steps, read metrics, and so on."""
        return self._manager

    @property
    def preempted(self) -> bool:
        """True if one of the signals has arrived.

        Evaluation loops can read this often: reading it is cheap and shows a supervisor that the program is alive.
        """
        self._manager.observer.reached("validation", self._last_step)
        return self._preemption.received

    @property
    def _last_step(self) -> int | None:
        """The last reported step, or None."""
        return None if self._saver is None else self._saver.step

    @property
    def proof(self) -> Proof:
        """The result, so far, of comparing a resumed run with the steps recorded before it was interrupted."""
        return self._witness.proof

    @property
    def should_stop(self) -> bool:
        """True if ``on_step`` has saved because of a preemption and asked the loop to stop."""
        return self._after_signal.left == 0

    @property
    def exit_status(self) -> int:
        """The exit status for the program: 75 (``EX_TEMPFAIL``: run the same command again) after a preemption.

        It is 130 after Ctrl-C if ``signals`` includes SIGINT, to prevent a restart, and 0 otherwise. Read it after the
        ``with`` block, when the last step has been saved.
        """
        if not self._preemption.received:
            return 0
        return INTERRUPTED if self._preemption.number == signal.SIGINT else PREEMPTED

    @overload
    def restore_or_initialize(self, state: Live, *, like: Any = None, **extras: Any) -> tuple[Live, int]:
        """Restore objects such as modules and optimizers in place if there is a checkpoint."""

    @overload
    def restore_or_initialize(self, state: Callable[[], T], *, like: Any = None, **extras: Any) -> tuple[T, int]:
        """Restore a state that has the structure of a function's result, or call the function on a fresh start."""

    @overload
    def restore_or_initialize(self, state: T, *, like: Any = None, **extras: Any) -> tuple[T, int]:
        """Return the restored state and its number of updates, or the given state on a fresh start."""

    def restore_or_initialize(self, state: Any, *unknown: Never, like: Any = None, **extras: Any) -> tuple[Any, int]:
        """Restore the newest intact checkpoint or the step that ``resume`` selects, or start fresh if there is none.

        Args:
            state: The freshly initialized state, which is the template for the restore. Alternatively, a function
                without arguments that creates it with jax. The shapes are determined by ``jax.eval_shape``, and the
                function is called only on a fresh start, to avoid holding two states in memory.
            like: The template if ``state`` is a function, such as an abstract state with shardings. A fresh start calls
                the function under ``jax.jit`` with the shardings of the template.
            **extras: Further values and objects to restore. Pass all of them to every ``on_step`` call as well.

        Returns:
            The state and the number of updates that it includes, which is also the index of the next update.

        Raises:
            CheckpointNotFoundError: There is no checkpoint and ``resume="must"``, or ``resume`` selects a step that
                does not exist.
            CheckpointExistsError: There are checkpoints and ``resume="never"``.
            TreeMismatchError: The structure, shapes or dtypes of the state or the extras differ from those that the
                run began with, or the parameters do not match ``init_from``.
            UnsupportedLeafError: The state or an extra has leaves that cannot be saved; the message lists all of them.
            NoWholeCheckpointError: There are checkpoints, but all of them are damaged.
            DamagedCheckpointError: The step that ``resume`` selects is damaged.
            OwnershipError: Another live run writes to the directory.
            OptionError: An extra is an iterator or a loader whose state can be neither saved nor restored, or has the
                name of an option; or ``replicated`` names an extra that was not passed; or the state is abstract and
                there is no checkpoint.
        """
        if unknown:
            raise UnknownArgumentError(
                'restore_or_initialize takes one state: restore_or_initialize({"model": model, "optimizer": '
                "optimizer}). Extras, such as the place in the data, have names: data=loader"
            )
        processes, resume, source = self._manager.processes, self._options.resume, self._options.init_from
        with processes.together("restore_or_initialize"):
            processes.compare("the options of the callbacks", {"resume": resume})
            initial = InitialState(state, like)
            adapter = self._adapt(initial.template)
            is_fresh = resume == "never" or self._manager.latest_step() is None
            check_extras(extras, is_fresh=is_fresh)
            given = self._with_generators(extras)
            check_replicated(self._options.replicated, given, "restore_or_initialize")
            adapter.note_fresh(initial.template)
            program = Hyperparameters(adapter, initial.template, extras, initial)
            saver = StepSaver(self._manager, adapter, self._options.replicated, self._witness, program, extras)
            if resume in ("must", "never"):
                self._check_resume(resume)
            if is_fresh:
                initial.check_fresh(adapter)
            self._begin()
            self._saver = None  # prevents the loop from continuing with unrestored values after an error
            self._manager.acquire()
            self._names = frozenset(extras)
            restored = restore(self._manager, adapter, initial, program, given, self._options)
            if restored is not None and source is not None:
                logger.info("init_from=%s is ignored, as the run resumes", source)
            start = restored or self._start_fresh(adapter, initial, given)
            self.extras = {name: start.extras[name] for name in extras}
            self._begin_steps(saver, start)
            seen = Report(start.step, start.state, extras=start.extras).seen({})
            self._restored = None if restored is None else restored.step
            why_not = why_not_comparable(self._options, adapter.misfits)
            if self._ending.step is not None:  # the loop restored an earlier step, perhaps to train differently
                why_not, self._ending.step = f"the loop went back after step {self._ending.step}", start.step
            self._witness.begin(seen, self._restored, why_not)
            self._restores = restores_of(self._manager)
            return start.state, start.step + start.offset

    def _start_fresh(self, adapter: StateAdapter, initial: InitialState, extras: Mapping[str, Any]) -> Start:
        compare_processes(self._manager.processes, initial.template)
        directory, source = self._manager.directory, self._options.init_from
        self._announce("started fresh: no checkpoint in %s%s", directory, unfinished_neighbour(directory))
        state = initial.make()
        if source is not None:
            state, taken = adapter.with_weights(state, source)
            logger.info("took the weights from %s; everything else starts fresh", taken)
            warn_of_misfits(adapter.misfits, f"init_from={str(source)!r}", "weights")
        if not has_triggers(self._options):
            minutes = seconds(self._options.DEFAULT_TRIGGER["save_interval_secs"]) / 60
            end = " or at the end" if self._options.save_at_end else ""
            text = (
                "no save_interval_steps= or other trigger is set: the first save is in %g minutes%s, or at a preemption"
            )
            self._announce(text, minutes, end)
        offset = self._options.step_offset or 0
        return Start(-offset, state, extras, offset)

    def peek(self) -> Peek | None:
        """Return the step, extras, metrics and metadata that ``restore_or_initialize`` will restore.

        Programs whose state depends on the step, for example because they prune layers, can call this before they build
        the state. All processes must call it together. ``resume`` selects the step. Only the extras of the step are
        read, so this may return a step that the restore skips because its state is damaged.

        Returns:
            The step, extras, metrics and metadata, or None for a fresh start. The extra of a stateful object is its
            saved state. Arrays are numpy arrays, or torch tensors if they were saved as such and torch is imported.

        Raises:
            CheckpointNotFoundError: ``resume`` selects a missing step, or is ``"must"`` and there are no checkpoints.
            NoWholeCheckpointError: There are checkpoints, but all of them are damaged.
        """
        self._has_peeked = True
        if self._options.resume == "must":
            self._check_resume("must")
        return peek(self._manager, self._options.resume)

    def on_step(
        self,
        step: int,
        state: Any,
        *unknown: Never,
        metrics: Mapping[str, Any] | None = None,
        batch: Any = None,
        epoch: Any = None,
        **extras: Any,
    ) -> StepOutcome:
        """Report a completed update, and save the step if a save is due. Call this after every update.

        If no save is due, the call takes a few hundred microseconds, mostly to get the state of the global generators,
        and never waits for the device.

        Args:
            step: The number of updates that the state includes, minus ``step_offset``.
            state: The state after the update.
            metrics: Metrics of this step by name. Values may be numbers, or scalars on the device, which are fetched
                only if a save needs them.
            batch: The batch of the step, which the witness compares after a resume. It is not saved, unless an extra of
                this name was passed to ``restore_or_initialize``.
            epoch: The epoch number, which is treated like ``batch``.
            **extras: All extras that were passed to ``restore_or_initialize``, and, optionally, further extras.

        Returns:
            The outcome: whether the step was saved, the reason, and whether to leave the loop now.

        Raises:
            SaveFailedError: An earlier background save failed; this step is saved nevertheless.
            StateError: The callback is closed, or the directory contains checkpoints that were not restored; or the
                state lacks parts that ``restore_or_initialize`` returned, or is a state dict passed to that method;
                or a step of a resumed run differs from the recorded step and ``on_inexact="raise"``.
        """
        if self._names:
            extras |= {name: value for name, value in (("batch", batch), ("epoch", epoch)) if name in self._names}
        step = self._check_call(step, unknown, metrics, extras)
        saver, stop = self._saver, self._stop
        if saver is None or stop is None or self._closed:
            saver, stop = self._begin_without_restore(state)
        self._ending.step = step
        self._after_signal.note_step()
        if self.should_stop and self._preemption.ends_run:
            self._manager.observer.reached("step", step)
            return StepOutcome(False, "the run was stopped; nothing is saved any more", should_stop=True)
        report = Report(step, state, metrics, self._with_generators(extras), batch, epoch)
        if self._after_signal.left:
            saver.show(report)
            if self._after_signal.count() == 0:
                self._end_loaders(extras)
            return StepOutcome(False, "preempted; the step is recorded and not saved", self.should_stop)
        saver.update(report)
        decision = self._manager.decide(step, metrics=metrics)
        if stop.after_batch():
            return self._on_preemption(saver, report, decision.save, decision.reason)
        if not decision.save:
            saver.save_locally()
            return StepOutcome(False, "nothing is due", should_stop=False)
        saver.save(decision.reason, reported=True)
        return StepOutcome(True, decision.reason, should_stop=False)

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> StepOutcome:
        """Report metrics that become available after the step, such as evaluation metrics.

        Args:
            step: The step that was evaluated.
            metrics: The metrics of the step by name. If the step is saved, they are stored with its checkpoint. With
                ``save_on_best``, the step is saved now if its metric is the best so far and no later step was
                reported to ``on_step``.

        Returns:
            The outcome: whether this call saved the step, the reason, and whether to leave the loop now.
        """
        check_metrics(metrics)
        step = operator.index(step)
        self._manager.observer.reached("validation", step)
        saver = self._saver
        is_saved = step in self._manager.all_steps() if saver is None else saver.holds(step)
        if self._after_signal.left and not is_saved:
            return StepOutcome(False, "preempted; the step is recorded and not saved", self.should_stop)
        if is_saved:
            record_metrics(self._manager, step, metrics)
            return StepOutcome(False, f"metrics recorded with step {step}", self.should_stop)
        decision = None if saver is None else saver.reconsider(step, metrics)
        if saver is None or decision is None:
            return StepOutcome(False, f"step {step} is not saved, so its metrics are not kept", self.should_stop)
        if not decision.save or saver.why_lost() is not None:
            return StepOutcome(False, decision.reason, self.should_stop)
        saver.save(decision.reason)
        return StepOutcome(True, decision.reason, self.should_stop)

    def close(self) -> None:
        """Save the last step if it has not been saved, wait for all saves, and close, as the ``with`` block does.

        Raises:
            SaveFailedError: A background save failed.
        """
        if self._closed:
            return
        self._closed = True
        saver = self._saver
        if self._last_step is None and self._restored is not None and not self._preemption.received:
            self._announce("nothing left to do after step %d in %s", self._restored, self._manager.directory)
        orderly = False
        try:
            try:
                # With an AgreedStop, ignore a late signal, because the other processes may not have received it.
                preempted = self._preemption.received and not isinstance(self._stop, AgreedStop)
                saves = (self._options.save_at_end or preempted) and self._witness.error is None
                if saver is not None and not saver.is_saved and saves:
                    saver.save_at_end()
            finally:
                self._witness.close()
                self._manager.close()
            orderly = True
        finally:
            self._end(orderly=orderly)
        if saver is not None and self._after_signal.left is None:
            last = self._restored if saver.step is None else saver.step
            self._manager.events.write("preempted" if self._preemption.received else "finished", step=last)
        if self._after_signal.left:
            self._hand_on()

    def _hand_on(self) -> None:
        """Exit now and skip the rest of the program, because the loop ended during the steps after a preemption."""
        self._preemption.hand_on()
        raise SystemExit(self.exit_status)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            is_hook = name == "setup" or name.startswith("on_")  # a hook that Lightning trainers call
            hint = "; a Lightning trainer takes holdfast.integrations.lightning.CheckpointCallback" if is_hook else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __enter__(self) -> Self:
        self._preemption.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        if self._stop is not None:
            self._manager.events.write("failed", step=self._last_step, error=described(error))
        try:
            self._witness.close()
            self._manager.finish_mirror(WITHOUT_GRACE)
            self._manager.close()
        except Exception:
            # Do not let this exception replace the loop's exception, which is more important.
            logger.exception("a save failed while the training loop was ending with %s", type(error).__name__)
        finally:
            self._end(orderly=False, error=error)

    def _end(self, *, orderly: bool, error: BaseException | None = None) -> None:
        # After a preemption, the steps after the saved step do not count as lost, because the resume repeats them.
        has_stopped = self._after_signal.left is not None
        self._ending.end(error, shown=self._manager.processes.is_primary and not has_stopped)
        self._preemption.restore()
        if self._stop is not None:
            self._stop.end(orderly=orderly)
        if orderly and isinstance(self._stop, AgreedStop):
            barrier_exit(self._manager.processes)

    def _check_resume(self, resume: Resume) -> None:
        directory = self._manager.directory
        check_resume(resume, all_steps(directory, self._options.step_prefix, self._manager), directory)

    def _signal(self, signals: Sequence[signal.Signals]) -> PreemptionSignal:
        return PreemptionSignal(signals)

    def _announce(self, text: str, *args: object) -> None:
        announce(text, *args, shown=self._manager.processes.is_primary)

    def _adapt(self, state: Any) -> StateAdapter:
        if self._adapter is None:
            check_depth(state)
            self._adapter = adapter_for(state, None if self._options.partial is None else Misfits())
            self._state_checkpointer.handler = self._adapter.handler(self._options)
        return self._adapter

    def _check_call(self, step: Any, unknown: Sequence[object], metrics: object, extras: Mapping[str, Any]) -> int:
        """Check the arguments of ``on_step``, and return the step as an integer."""
        if unknown or not hasattr(type(step), "__index__"):
            raise UnknownArgumentError(
                f"on_step takes the step, a whole number (found {step!r:.40}), and one state: on_step(step, state, "
                "metrics=..., data=loader)"
            )
        if metrics is not None:
            check_metrics(metrics)
        check_no_options(extras)
        if missing := sorted(self._names - extras.keys()):
            raise StateError(
                f"restore_or_initialize was given {', '.join(f'{name}=' for name in missing)} but on_step was not: "
                "pass it at every step, so that it is saved"
            )
        if self._ending.step is None and self._restored is None:  # a resumed run may begin to save additional extras
            warn_of_unrestored(extras, self._names)
        last, restores = self._ending.step, restores_of(self._manager)
        if restores != self._restores and last is not None and step <= last:
            self._witness.forget()  # the manager restored an earlier step, so compare no steps until a save or resume
        if restores != self._restores or last is None:
            last = self._manager.resumed_from
        if last is not None and step < last:
            raise OptionError(
                f"on_step({step}) came after step {last}: step N means that N updates are in the state, so "
                "it never goes down. Begin the loop at the step that restore_or_initialize has returned; to go back, "
                "restore the earlier step first"
            )
        self._restores = restores
        return operator.index(step)

    def _with_generators(self, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the extras with the global generators last, because restoring other extras may draw from them."""
        return extras if self._generators is None else {**extras, GLOBAL_GENERATORS: self._generators}

    def _begin_steps(self, saver: StepSaver, start: Start) -> None:
        """Start watching the state, and set the global generators after all other values have been restored."""
        self._saver = saver
        for loader in loaders_of(start.extras).values():
            loader.begin_run(self._announce)
        saver.begin(start, grows=self._has_peeked or self._options.partial is not None)
        missing = [] if self._generators is None else self._generators.begin()
        if missing:
            logger.warning(
                "the random generators of %s are not restored, as this process has no such devices", ", ".join(missing)
            )

    def _begin(self) -> Stop:
        if self._closed:
            raise StateError(f"the callback for {self._manager.directory} is closed; make a new one")
        self._preemption.install()
        if self._stop is None:
            self._stop = stop_of(self._manager.processes, self._preemption)
            self._stop.begin()
        if self._manager.processes.is_primary:
            self._ending.begin()
        return self._stop

    def _begin_without_restore(self, state: Any) -> tuple[StepSaver, Stop]:
        if self._options.init_from is not None and not self._closed:
            raise StateError("init_from= takes effect in restore_or_initialize: call it before the loop")
        stop = self._begin()
        newest = self._manager.latest_step()
        if newest is not None:
            raise StateError(
                f"{self._manager.directory} holds checkpoints up to step {newest} that this run has not restored; call "
                "restore_or_initialize before the loop, or choose another directory"
            )
        adapter = self._adapt(state)
        unknown = Hyperparameters(adapter, (), {})
        saver = StepSaver(self._manager, adapter, self._options.replicated, self._witness, unknown, {})
        self._begin_steps(saver, Start(0, (), {}, self._options.step_offset or 0, is_known=False))
        self._witness.begin(Report(0, state).seen({}))
        return saver, stop

    def _end_loaders(self, extras: Mapping[str, Any]) -> None:
        """End the data loaders when the loop should stop, because a ``break`` may leave only the innermost loop."""
        if self._preemption.ends_run:
            for loader in loaders_of(extras).values():
                loader.end_run(self.exit_status)

    def _on_preemption(self, saver: StepSaver, report: Report, due: bool, why: str) -> StepOutcome:
        if self.should_stop:  # the run continues after a Ray notice, so the usual triggers apply
            if due:
                saver.save(why)
            return StepOutcome(due, why, should_stop=True)
        save = not saver.is_saved
        if save and not saver.save("preempted"):  # the step's folder is not a checkpoint, so save the next step
            return StepOutcome(False, "the step has a folder that is no checkpoint", should_stop=False)
        self._after_signal.finish_saves()
        self._manager.events.write("preempted", step=saver.step)
        self._ending.end()  # later steps do not count as lost, because the resume repeats them
        next_action = "stopping"
        if self._after_signal.begin(report.left_in_epoch):
            left = self._after_signal.left
            next_action += f" after {left} more step{'' if left == 1 else 's'}, which the resume is compared with"
        else:
            self._end_loaders(report.extras)
        text = "preempted: step %d is saved in %s; %s"
        self._announce(text, saver.step, self._manager.directory, next_action)
        return StepOutcome(save, "preempted", self.should_stop)
