"""The position of a run in its data, and how a new process returns to it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any, Literal

from ...engine.distributed import ProcessGroup
from ...engine.errors import shortened
from ..hugging_face import check_stream
from ..loop import announce
from ..options import Reshard
from . import epoch
from .epoch import ModuleSwitches
from .resharding import check_drawn_alike, check_replicated, check_same_place, describe_left, reshard_states
from .store import GLOBAL_GENERATORS
from .strategies import keeps_own_buffers, own_buffers, replicas
from .trees import is_plain_tree
from .wall import (
    BEFORE_FETCH,
    FIRST_ITERATOR,
    SANITY_CHECK,
    LoopHooks,
    callbacks_of,
    clear_restart,
    end_epoch,
    end_restart,
    finish_epoch,
    has_done_all_batches,
    has_loaders,
    have_ended,
    iterator_of,
    loaders_of,
    reloaded_at_epoch,
    restart_in_validation,
    set_reloaded_at_epoch,
)

logger = logging.getLogger("holdfast")

Point = Literal["batch", "validation", "epoch"]
"""After a batch and all that belongs to it, before the validation that follows a batch, or after an epoch."""

# These callbacks of Lightning set the trainer up when an epoch starts, and can do so again in the middle of it.
# Other callbacks have seen the epoch start, and are not called again.
_SET_UP_EPOCHS = ("GradientAccumulationScheduler", "StochasticWeightAveraging")

# Lightning warns of this, but here the data is brought to the right position.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Position:
    """Follows one ``fit`` through its epochs, and takes it to where a checkpoint was saved.

    The order of the batches of an epoch depends on the generators at three points: where the data loader makes its
    iterator (it seeds the workers, which begin to load), at the first batch (samplers without workers are seeded), and
    at each batch after that, as the model draws from the same generators. To restore a loader without a state, a resume
    repeats the first two with the saved generator states, and draws the earlier batches again.
    """

    def __init__(
        self, trainer: Any, hooks: LoopHooks, restored: Callable[[], None], replicated: Collection[str] = ()
    ) -> None:
        self._trainer = trainer
        self._restored = restored  # called when everything is as it was at the save
        self._fit = trainer.fit_loop
        self.fetcher: Any = None  # the data fetcher of the present epoch
        self._epoch: dict[str, Any] = {}
        self._switches = ModuleSwitches(trainer.lightning_module)
        self._saved: dict[str, Any] | None = None
        self._replicated = replicated  # the names of state that is the same in all processes
        self._is_new = False  # whether the saved position is that of another process, as more continue than have saved
        self._keeps_random = False  # whether this process keeps the global generators that the program has seeded
        self._skip_batch = False
        self._ended: list[Any] | None = None  # states of loaders at the end of an epoch, which a resume has left
        self._is_one_for_all = False  # whether the states of all loaders are those of all processes
        # the states of such loaders before the batch that was drawn ahead, and which of them had ended
        self._before_batch: tuple[list[Any], list[bool]] = [], []
        self._has_warned = False
        self.holds_gradients = False  # whether manual optimization has gradients that no update has used yet
        self.batches = 0  # the batches that count as steps, as global_step has not moved
        epoch_loop = self._fit.epoch_loop
        hooks.place(trainer, SANITY_CHECK, self._sanity_check)
        hooks.place(self._fit, "run", self._run)
        hooks.place(self._fit, FIRST_ITERATOR, self._first_iterator)
        hooks.place(self._fit, "on_advance_start", self._epoch_starts)
        hooks.place(epoch_loop, "reset", self._counters_reset)
        hooks.place(epoch_loop, "on_run_start", self._batches_start)
        hooks.place(epoch_loop, "advance", self._count)
        hooks.place(epoch_loop, "advance", self._batch)
        hooks.place(epoch_loop, BEFORE_FETCH, self._before_fetch)

    def begin(self) -> None:
        """Note the switches of the module when training begins; warn of data that an epoch does not use up."""
        self._switches = ModuleSwitches(self._trainer.lightning_module)
        if (names := epoch.cut_short(self._loaders(), self._fit.max_batches)) and self._trainer.is_global_zero:
            logger.warning(
                "the trainer ends an epoch after %s batches, and the data of %s last longer: a run that resumes at the "
                "end of an epoch continues behind them, where a run without a stop begins the data again. Leave "
                "limit_train_batches out, or give the loader an epoch of this length",
                self._fit.max_batches,
                ", ".join(names),
            )

    def capture(self, point: Point) -> dict[str, Any]:
        """Return the position as a tree that a checkpoint can hold; the run has just finished ``point``."""
        fetcher = self.fetcher
        position: dict[str, Any] = {
            "point": point,
            "random": self._random(),
            "validation": self._validation_loaders(),
            "switched": self._switches.switched(),
            "loaders": epoch.loader_states(self._loaders()),
            "callback_metrics": dict(self._trainer.callback_metrics),
            "should_stop": bool(self._trainer.should_stop),
            "reloaded_at_epoch": reloaded_at_epoch(self._fit),
        }
        if self.batches:
            position["batches_as_steps"] = self.batches
        if (count := replicas(self._trainer.strategy)) > 1:
            position["replicas"] = count
        if keeps_own_buffers(self._trainer.strategy):
            position["buffers"] = own_buffers(self._trainer.lightning_module)
        if replicated := epoch.replicated_states(self._loaders(), self._replicated):
            position["replicated"] = replicated
        if point != "epoch":
            ahead = list(getattr(fetcher, "batches", ()))  # one for data without a length, to detect the last batch
            position["fetched"] = fetcher.fetched
            position["consumed"] = fetcher.fetched - len(ahead)
            position["averages"] = epoch.capture_averages(self._trainer)
            if not epoch.all_stateful(self._loaders()):
                position["epoch"] = self._epoch
                position["batch_sizes"] = epoch.batch_sizes(self._loaders())
            else:
                if any(ended := have_ended(fetcher.combined_loader)):
                    position["ended"] = ended
                if ahead:
                    self._add_ahead(position, ahead)
        return position

    def _add_ahead(self, position: dict[str, Any], ahead: list[Any]) -> None:
        """Add the batch that was drawn ahead, or the position before it if other processes divide it otherwise."""
        if self._is_one_for_all:
            position["loaders"], position["ended"] = self._before_batch
        elif is_plain_tree(ahead):
            position["ahead"] = {"batches": ahead, "done": self.fetcher.done}
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the training data has no length, so Lightning draws one batch ahead. This batch cannot be saved, as "
                "it is not a tree of tensors: a resumed run leaves it out"
            )

    def resume(self, saved: dict[str, Any], reshard: Reshard | None, processes: ProcessGroup) -> None:
        """Resume from what :meth:`capture` returned; called before the loops of the trainer run."""
        self._saved = saved
        shares = saved.pop("shares", None)
        self._is_new = shares is not None and processes.index >= len(shares)
        draws_alike = GLOBAL_GENERATORS in self._replicated
        self._keeps_random = self._is_new and not draws_alike
        if draws_alike:
            check_drawn_alike(shares or [saved])
        before, now = saved.get("replicas", 1), replicas(self._trainer.strategy)
        one_for_all = check_replicated(saved, shares)
        if not one_for_all and (shares is not None or before != now):
            reshard_states(saved, shares, reshard, processes)
        if before != now and saved["point"] != "epoch" and not one_for_all:
            saved["point"] = "batch"
            saved["rescaled"] = Fraction(before, now)
        if self._is_new and "averages" in saved:
            saved["averages"] = {"logged": {}, "metrics": {}}
        if before != now and self._trainer.is_global_zero:
            order = "; a loader that shuffles has another order in one process than in several"
            samples = f"the epoch continues after as many samples{order if 1 in (before, now) else ''}"
            logger.warning(
                "saved by %d processes that had a share of the data each, and resumed by %d: weights, optimizers and "
                "schedules are as they were, and %s. %s",
                before,
                now,
                "the data continues in the order that all processes share" if one_for_all else samples,
                "" if shares is None else describe_left(len(shares), processes.count, draws_alike),
            )

    # ---- in the order in which the loops call

    def _sanity_check(self, original: Callable[[], None]) -> None:
        # Lightning itself does not skip it after an epoch, and its hooks would change the restored state.
        if self._saved is None:
            original()

    def _run(self, original: Callable[[], None]) -> None:
        original()
        saved, self._saved = self._saved, None
        if saved is not None:  # Nothing was left to do: the program continues with the state at the end of the run.
            self._go_to_end(saved)
            for callback in callbacks_of(self._trainer, "WeightAveraging"):  # puts the average in place of the weights
                callback.on_train_end(self._trainer, self._trainer.lightning_module)

    def _first_iterator(self, original: Callable[[], None]) -> None:
        original()
        epoch.replicated_states(self._loaders(), self._replicated)  # This refuses unknown names.
        for index, loader in enumerate(self._loaders()):
            check_stream(f"training data loader {index}", loader)
        self._ended = None  # These loaders are new.
        self._epoch = self._before_iterator()
        if self._saved is not None and self._saved["point"] != "epoch" and not epoch.all_stateful(self._loaders()):
            self._begin_again(self._saved)

    def _epoch_starts(self, original: Callable[[], None]) -> None:
        saved = self._saved
        if saved is not None and saved["point"] == "epoch":
            self._saved = None
            self._go_to_epoch(saved)
        original()

    def _counters_reset(self, original: Callable[[], None]) -> None:
        if self._saved is None:
            original()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            original()

    def _batches_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        saved, self._saved = self._saved, None
        self.fetcher = fetcher
        parts = self._loaders()
        declared = epoch.replicated_states(parts, self._replicated)
        self._is_one_for_all = epoch.all_stateful(parts) and len(declared) == len(parts)
        if saved is not None:
            self._find_batch(saved, fetcher)
            original(fetcher)
            self._go_to_batch(saved, fetcher)
            return
        before, iterator = self._before_iterator(), iterator_of(fetcher.combined_loader)
        original(fetcher)
        if iterator_of(fetcher.combined_loader) is not iterator or not self._epoch:
            self._epoch = before
        self._epoch["at_first_batch"] = self._random()

    def _count(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Count a batch that trains the module without an optimizer of Lightning, which alone moves ``global_step``."""
        trainer = self._trainer
        if trainer.lightning_module.automatic_optimization:
            original(fetcher)
            return
        step, before, optimized = trainer.global_step, *self._versions()
        self.holds_gradients = False
        original(fetcher)
        if trainer.global_step != step:
            return
        moved = any(parameter._version != version for parameter, version in before)
        # Checkpoints hold no gradients, so that those which no update has used yet are waited for.
        holds = any(parameter.grad is not None and parameter._version == version for parameter, version in before)
        self.holds_gradients = holds and (optimized or not moved)
        if not self.holds_gradients and (moved or not optimized):
            if not self.batches:
                text = "steps are batches here, since no optimizer of Lightning steps"
                announce(text, shown=trainer.is_global_zero)
            self.batches += 1

    def _versions(self) -> tuple[list[tuple[Any, int]], bool]:
        """Return the trained parameters with torch's counts of their changes, and whether optimizers hold them."""
        own = [one for one in self._trainer.lightning_module.parameters() if one.requires_grad]
        groups = (group for optimizer in self._trainer.optimizers for group in optimizer.param_groups)
        given = {id(one) for group in groups for one in group["params"]}
        optimized = [one for one in own if id(one) in given]  # Lightning itself makes an optimizer of no parameter.
        found = [(one, one._version) for one in optimized or own if not one.is_inference()]
        return found, bool(optimized)

    def _batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        if self._skip_batch:
            self._skip_batch = False
            end_restart(self._fit)
        elif len(parts := self._loaders()) == 1 or epoch.all_stateful(parts):
            original(fetcher)
        else:
            # Where there are several loaders, shorter ones begin again, and are seeded, in the middle of an epoch.
            before, drawn = epoch.capture_generators(parts), fetcher.fetched
            marks = epoch.marks(iterator_of(fetcher.combined_loader).iterators)
            original(fetcher)
            if epoch.has_restarted(marks, epoch.marks(iterator_of(fetcher.combined_loader).iterators)):
                self._epoch.setdefault("restarts", {})[drawn] = before

    def _before_fetch(self, original: Callable[[], None]) -> None:
        original()
        if self._is_one_for_all and self.fetcher.length is None:
            self._before_batch = epoch.loader_states(self._loaders()), have_ended(self.fetcher.combined_loader)

    # ---- returning to where a checkpoint was saved

    def _go_to_epoch(self, saved: dict[str, Any]) -> None:
        self._restore_module(saved)
        self._warn_of_lasting_workers(saved)
        self._warn_of_unknown(saved)
        clear_restart(self._fit)
        finish_epoch(self._fit.epoch_progress)
        set_reloaded_at_epoch(self._fit, saved["reloaded_at_epoch"])
        self._ended = saved["loaders"]
        epoch.load_loader_states(self._loaders(), self._ended, ended=True)
        self._restore_random(saved["random"])
        self._restored()

    def _go_to_end(self, saved: dict[str, Any]) -> None:
        parts = self._loaders()
        if saved["point"] == "epoch" and len(saved["loaders"]) == len(epoch.loader_states(parts)):
            self._go_to_epoch(saved)
            return
        self._restore_module(saved)
        clear_restart(self._fit)
        if self._fit.max_epochs in (None, -1) or self._fit.epoch_progress.current.processed < self._fit.max_epochs:
            end_epoch(self._fit.epoch_progress)  # The run has ended within this epoch.
        self._restore_random(saved["random"])

    def _begin_again(self, saved: dict[str, Any]) -> None:
        """Take loaders to the start of an epoch whose batches are drawn again; Lightning makes their iterators next."""
        parts, now = self._loaders(), self._fit.epoch_progress.current.processed
        epoch.set_sampler_epoch(parts, now)
        is_first = saved["reloaded_at_epoch"] == now  # of these loaders
        epoch.load_loader_states(parts, saved.get("epoch", saved)["loaders"], ended=not is_first)
        epoch.start_workers(parts, set(range(len(parts))).difference(saved["epoch"].get("new_workers", ())))
        self._restore_random(saved["epoch"]["at_iterator"])

    def _find_batch(self, saved: dict[str, Any], fetcher: Any) -> None:
        parts = self._loaders()
        self._rescale(saved)
        self._epoch = started = saved.get("epoch", {})
        self._set_up_epoch()
        if epoch.all_stateful(parts):
            is_over = saved["point"] == "validation" and has_done_all_batches(self._fit)
            epoch.load_loader_states(parts, saved["loaders"], ended=is_over)
            if is_over:
                fetcher.reset()
                fetcher.done = True
                return
            ended = saved.get("ended", [])
            epoch.begin_within(fetcher, saved.get("ahead"), ended)
            self._before_batch = saved["loaders"], ended
            return
        logger.info("drawing %d batches again to find the position in the epoch", saved["consumed"])
        self._restore_random(started["at_first_batch"])
        restarts = started.get("restarts", {})

        def before_batch(drawn: int) -> None:
            if drawn in restarts:
                self._restore_random(restarts[drawn])

        epoch.skip_batches(fetcher, saved["consumed"], before_batch)
        check_same_place(saved, parts)

    def _set_up_epoch(self) -> None:
        module = self._trainer.lightning_module
        if not (found := callbacks_of(self._trainer, *_SET_UP_EPOCHS)):
            return
        restored = {name: value.clone() for name, value in module.state_dict().items()}
        for callback in found:
            callback.on_train_epoch_start(self._trainer, module)
        # In its last epoch, StochasticWeightAveraging resets the statistics of batch normalization.
        module.load_state_dict(restored)

    def _go_to_batch(self, saved: dict[str, Any], fetcher: Any) -> None:
        self._restore_module(saved)
        self._warn_of_lasting_workers(saved)
        self._warn_of_unknown(saved)
        fetcher.fetched = saved["fetched"]
        set_reloaded_at_epoch(self._fit, saved["reloaded_at_epoch"])
        epoch.restore_averages(self._trainer, saved["averages"])
        clear_restart(self._fit)
        if saved["point"] == "validation":
            restart_in_validation(self._fit)
            self._skip_batch = True
        hook: Any = type(self._trainer.lightning_module).on_train_epoch_start
        if saved["point"] != "epoch" and not hook.__module__.startswith(("lightning.", "pytorch_lightning.")):
            text = "the run continues within epoch %d: %s is called again when the next epoch begins"
            announce(text, self._trainer.current_epoch, hook.__qualname__, shown=self._trainer.is_global_zero)
        self._restore_random(saved["random"])
        self._restored()

    def _warn_of_lasting_workers(self, saved: dict[str, Any]) -> None:
        parts = self._loaders()
        new = [] if saved["point"] == "epoch" else saved.get("epoch", {}).get("new_workers", [])
        lasting = [i for i, part in enumerate(parts) if epoch.keeps_iterator(part) and not epoch.all_stateful([part])]
        if self._trainer.is_global_zero and not set(lasting) <= set(new):
            logger.warning(
                "the workers of a data loader live across epochs (persistent_workers=True), and their random "
                "generators cannot be saved: each sample comes exactly when it would have come, but where a dataset "
                "draws random numbers in the workers, as augmentation does, it draws others"
            )

    def _warn_of_unknown(self, saved: dict[str, Any]) -> None:
        """Warn of what a step of an earlier version holds, and a resume no longer restores."""
        random, measured = saved["random"], saved.get("validation", {}).get("generators", {})
        generators = random.get("loaders", {}).keys() - epoch.loader_generators(self._loaders()).keys()
        others = measured.keys() - epoch.loader_generators(loaders_of(self._fit.epoch_loop.val_loop)).keys()
        ended = any(saved.get("ended", ())) and not have_ended(self.fetcher.combined_loader)
        unknown = {
            "attributes of data loaders": sorted(random.get("attributes", ())),
            "generators of data loaders": sorted(generators),
            "generators of data loaders of the validation": sorted(others),
            "data loaders that have ended": ["their iterators"] if ended else [],
            "results of searches": sorted(saved.get("found", ())),
        }
        if (listed := [f"{what} ({shortened(names)})" for what, names in unknown.items() if names]) and (
            self._trainer.is_global_zero
        ):
            logger.warning(
                "the step was saved by an earlier version of holdfast, and has more than a resume restores now: %s. If "
                "the batches depend on that, they differ from those of a run without a stop: let state_dict() of the "
                "data loader return it, and load_state_dict() take it, or on_save_checkpoint() and "
                "on_load_checkpoint() of the module",
                "; ".join(listed),
            )

    def _rescale(self, saved: dict[str, Any]) -> None:
        """Correct the count of batches if the data is divided among another number of processes."""
        if (factor := saved.get("rescaled")) is None:
            return
        factor *= epoch.batch_size_ratio(saved.get("batch_sizes"), self._loaders())
        ahead, steps = saved["fetched"] - saved["consumed"], self._trainer.accumulate_grad_batches
        exact: Fraction = saved["consumed"] * factor
        consumed = int(exact) // steps * steps
        if consumed != exact and self._trainer.is_global_zero:
            logger.warning(
                "the position in the epoch is after %g batches of this number of processes: the epoch continues after "
                "%d, and the samples between come again",
                float(exact),
                consumed,
            )
        saved["consumed"], saved["fetched"] = consumed, consumed + ahead
        current = self._fit.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = consumed

    def _restore_module(self, saved: dict[str, Any]) -> None:
        buffers = own_buffers(self._trainer.lightning_module)
        for name, value in saved.get("buffers", {}).items():
            if name in buffers:
                buffers[name].copy_(value)
        self._trainer.callback_metrics.update(saved["callback_metrics"])
        self._switches.restore(saved.get("switched", ""))
        if validation := saved.get("validation"):
            self._restore_validation_loaders(validation)

    def _loaders(self) -> list[Any]:
        return loaders_of(self._fit)

    def _validation_loaders(self) -> dict[str, Any]:
        """Return what later validations depend on: generators, and which loaders keep workers that have a seed."""
        loop = self._fit.epoch_loop.val_loop
        parts = loaders_of(loop)
        kept = [i for i, loader in enumerate(parts) if epoch.keeps_iterator(loader) and loader._iterator is not None]
        generators = epoch.loader_generators(parts)
        found = {"kept": kept, "generators": generators, "reloaded_at_epoch": reloaded_at_epoch(loop)}
        return found if kept or generators else {}

    def _restore_validation_loaders(self, saved: dict[str, Any]) -> None:
        loop = self._fit.epoch_loop.val_loop
        if not has_loaders(loop):
            self._trainer.validating = True
            loop.setup_data()
            self._trainer.training = True
        set_reloaded_at_epoch(loop, saved["reloaded_at_epoch"])
        parts = loaders_of(loop)
        epoch.start_workers(parts, saved["kept"])
        if not self._is_new:
            epoch.restore_loader_generators(saved["generators"], parts)

    def _before_iterator(self) -> dict[str, Any]:
        parts = self._loaders()
        ended, self._ended = self._ended, None
        states = [] if epoch.all_stateful(parts) else ended or epoch.loader_states(parts)
        new = [index for index, part in enumerate(parts) if epoch.keeps_iterator(part) and part._iterator is None]
        return {"at_iterator": self._random(), "loaders": states, "new_workers": new}

    def _random(self) -> dict[str, Any]:
        return epoch.capture_generators(self._loaders())

    def _restore_random(self, state: dict[str, Any]) -> None:
        if not self._keeps_random:
            own = [] if self._is_new else self._loaders()
            epoch.restore_generators(state, self._trainer.strategy.root_device, own)
