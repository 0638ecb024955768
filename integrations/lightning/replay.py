"""Save and restore the position of a ``fit`` within its epochs.

The order of batches in an epoch depends on the state of the random generators at four points: when the program creates
the data loaders, when a loader creates its iterator (and seeds the workers, which start loading), at the first batch
(when samplers without workers are seeded), and at each later batch, because the model draws from the same generators.
To restore a stateless loader, a resumed run sets the saved generator states at the first three points and then draws
the earlier batches again. A stateful loader restores itself.

:class:`EpochReplay` is a state machine. It either follows the run or holds a saved position, at the end of an epoch
or within one, until the loops have returned to it. Lightning's loops produce these events, in this order:

==============  =======================  ================================  ======================================
event           no saved position        position at the end of an epoch   position within an epoch
==============  =======================  ================================  ======================================
state restored                           restores the generators for the   the same; lifts the step limit if work
                                         creation of the loaders           after the last batch remains
loaders wanted  records generator state
loaders made    records generator state  records generator state           rewinds the loaders
epoch begins    records generator state  restores everything               silences a warning
batches begin   records generator state                                    restores everything
batch           trains on it                                               skips it if only its validation remains
fit ends                                 restores the final state          restores the final state
==============  =======================  ================================  ======================================

If nothing is left to do, no epoch begins, and ``fit ends`` follows directly.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from ...engine.distributed import ProcessGroup
from ...engine.errors import shortened
from ...engine.generators import as_tree, capture, restore
from ...engine.loaders import warn_of_new_workers
from ..hugging_face import check_stream
from ..loop import announce
from . import loader_states as loaders
from . import private_api
from .averages import ModuleSwitches, capture_averages, restore_averages
from .private_api import LoopHooks
from .resharding import SavedPosition, check_same_place, share_of
from .steps import Fit
from .strategies import live_names, own_buffers, replicas

logger = logging.getLogger("holdfast")

Point = Literal["batch", "validation", "epoch"]
"""When a step is saved: after a batch and its validation, between a batch and its validation, or after an epoch."""

# These Lightning callbacks set up the trainer at the start of an epoch, and it is safe to call them again mid-epoch.
# Other callbacks must not be called twice in an epoch.
_SET_UP_EPOCHS = ("GradientAccumulationScheduler", "StochasticWeightAveraging")

# This Lightning warning is silenced because holdfast restores the data position.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class EpochReplay:
    """Tracks the epochs of one ``fit``, and restores a saved position as described in the module docstring.

    All callbacks of a trainer share one, because the position in the epoch can be restored only once.
    """

    def __init__(self, fit: Fit, hooks: LoopHooks) -> None:
        self._fit = fit
        self._trainer = fit.trainer
        self._loop = fit.trainer.fit_loop
        self.until_restored = contextlib.ExitStack()  # closed when everything has been restored
        self.resumed: tuple[dict[str, Any], bool] = {}, False  # the saved position, and whether work after it remains
        self._saved: SavedPosition | None = None  # saved position to return to; None once it has been reached
        self._has_counters = False  # whether the loops have their restored counters
        self._switches = ModuleSwitches(fit.trainer.lightning_module)
        self._before: dict[str, Any] = {}  # generator states at the last loader request; {} if loaders are not reloaded
        self._made: dict[str, Any] = {}  # generator states from which the current loaders were created
        self._start: dict[str, Any] = {}  # generator and loader states at the start of the epoch
        self._ended: list[Any] | None = None  # loader states restored from a save at the end of an epoch
        self._ahead = loaders.DrawnAhead()
        self.fetcher: Any = None  # the data fetcher of the current epoch
        hooks.place(self._loop, "setup_data", self._loaders_wanted)
        hooks.place(self._loop, private_api.LOADERS_MADE, self._loaders_made)
        hooks.place(self._loop, "on_advance_start", self._epoch_begins)
        hooks.place(self._loop.epoch_loop, "on_run_start", self._batches_begin)
        hooks.place(self._loop.epoch_loop, "advance", self._batch)

    def begin(self) -> None:
        """Record the module's flags at the start of training, and warn about loaders that an epoch does not exhaust."""
        self._switches = ModuleSwitches(self._trainer.lightning_module)
        if (names := loaders.cut_short(self._loaders(), self._loop.max_batches)) and self._trainer.is_global_zero:
            logger.warning(
                "the trainer ends an epoch after %s batches, but there is more data in %s: a run that resumes at the "
                "end of an epoch continues with that data, while an uninterrupted run starts it over. Remove "
                "limit_train_batches, or give the loader an epoch of this length",
                self._loop.max_batches,
                ", ".join(names),
            )

    def capture(self, point: Point, *, is_cut_off: bool = False) -> dict[str, Any]:
        """Return the position as a tree; ``is_cut_off`` is True if work that follows the batch is still to be done."""
        parts, averages = self._loaders(), capture_averages(self._trainer)
        position: dict[str, Any] = {
            "point": point,
            "random": self._random(),
            "validation": self._validation_loaders(),
            "switched": self._switches.switched(),
            "loaders": loaders.loader_states(parts),
            "callback_metrics": dict(self._trainer.callback_metrics),
            "should_stop": bool(self._trainer.should_stop),
            "reloaded_at_epoch": private_api.reloaded_at_epoch(self._loop),
        }
        count, keeps_buffers = replicas(self._trainer.strategy), private_api.keeps_own_buffers(self._trainer.strategy)
        others = {
            "loaders_made": self._made,
            "is_cut_off": is_cut_off,
            "batches_as_steps": self._fit.counts.batches,
            "replicas": count if count > 1 else 0,
            "buffers": own_buffers(self._trainer.lightning_module) if keeps_buffers else {},
            "replicated": loaders.replicated_states(parts, self._fit.options.replicated),
        }
        position |= {name: value for name, value in others.items() if value}
        if point != "epoch" or averages["metrics"]:
            position["averages"] = averages
        if point != "epoch":
            ahead = getattr(self.fetcher, "batches", ())  # holds one prefetched batch if the data has no length
            position["fetched"] = self.fetcher.fetched
            position["consumed"] = self.fetcher.fetched - len(ahead)
            if not loaders.all_stateful(parts):
                position["epoch"] = self._start
                position["batch_sizes"] = loaders.batch_sizes(parts)
            else:
                position |= self._ahead.capture(self.fetcher)
        return position

    def resume(self, saved: dict[str, Any], processes: ProcessGroup) -> None:
        """Set the position to return to."""
        self._saved = share_of(saved, self._trainer, self._fit.options.replicated, self._fit.options.reshard, processes)
        self._fit.counts.batches = saved.get("batches_as_steps", 0)
        self.resumed = saved, self._saved.is_cut_off

    # ---- the events

    def state_restored(self) -> None:
        """Prepare the loops. Called after their counters are restored and before data loaders are created."""
        if self._has_counters:  # several callbacks of the trainer call this
            return
        saved, self._has_counters = self._saved, True
        if saved is None:
            return
        # A restarting loop may count a step of the loggers twice, after an epoch that a module has ended with -1.
        step = private_api.LOGGED_STEP
        saved.until_batches.callback(setattr, self._loop.epoch_loop, step, getattr(self._loop.epoch_loop, step))
        # The program may have created loaders already, for example through trainer.estimated_stepping_batches in
        # configure_optimizers. Discard these loaders, whose workers may already be loading batches of epoch 0.
        private_api.forget_loaders(self._loop)
        private_api.skip_sanity_check(self._loop)  # The hooks of the sanity check would change the restored state.
        self._made = saved.tree.get("loaders_made", {})
        if self._made:
            progress = self._loop.epoch_progress.current
            saved.until_loaders.callback(setattr, progress, "completed", progress.completed)
            progress.completed = saved.tree["reloaded_at_epoch"]  # Loaders may depend on the epoch number.
            if not saved.keeps_random:
                restore(self._made)
        if not saved.is_cut_off:
            self._stop_if_asked(saved)
        elif 0 <= (limit := self._loop.epoch_loop.max_steps) <= self._trainer.global_step:
            saved.until_batches.callback(setattr, self._loop.epoch_loop, "max_steps", limit)
            self._loop.epoch_loop.max_steps = -1

    def _loaders_wanted(self, original: Callable[[], None]) -> None:
        self._before = as_tree(capture()) if self._trainer.reload_dataloaders_every_n_epochs else {}
        original()

    def _loaders_made(self, original: Callable[[], None]) -> None:
        original()
        parts, saved = self._loaders(), self._saved if self._has_counters else None
        loaders.replicated_states(parts, self._fit.options.replicated)  # raises for unknown names
        for index, loader in enumerate(parts):
            check_stream(f"training data loader {index}", loader)
        self._ended = None  # these states belong to the previous loaders
        self._start = self._before_iterator()
        if saved is None:
            self._made = self._before
        else:
            saved.until_loaders.close()
            if saved.tree["point"] != "epoch" and not loaders.all_stateful(parts):
                self._begin_again(saved)

    def _epoch_begins(self, original: Callable[[], None]) -> None:
        if self._saved is not None and self._saved.tree["point"] == "epoch":
            self._go_to_epoch(self._saved)
            self._saved = None
        original()
        if self._saved is not None:
            self._saved.until_batches.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    def _batches_begin(self, original: Callable[[Any], None], fetcher: Any) -> None:
        self.fetcher = fetcher
        self._ahead.begin(self._loaders(), self._fit.options.replicated)
        if (saved := self._saved) is not None:
            saved.until_batches.close()
            self._find_batch(saved, fetcher)
            original(fetcher)
            self._go_to_batch(saved, fetcher)
            return
        before, iterator = self._before_iterator(), private_api.iterator_of(fetcher.combined_loader)
        original(fetcher)
        if private_api.iterator_of(fetcher.combined_loader) is not iterator or not self._start:
            self._start = before
        self._start["at_first_batch"] = self._random()

    def _batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        if self._saved is not None:
            private_api.clear_restart(self._loop.epoch_loop)
            self._stop_if_asked(self._saved)
            self._saved = None
            return
        self._ahead.note(fetcher)
        parts = self._loaders()
        if len(parts) == 1 or loaders.all_stateful(parts):
            self._fit.count(original, fetcher)
            return
        # Shorter loaders restart mid-epoch and draw new seeds, so record the generator states before each restart.
        before, drawn, marks = self._random(), fetcher.fetched, loaders.marks(fetcher)
        self._fit.count(original, fetcher)
        if loaders.has_restarted(marks, loaders.marks(fetcher)):
            self._start.setdefault("restarts", {})[drawn] = before

    def fit_ends(self) -> None:
        """If the run was already complete, restore its final state for the rest of the program."""
        if (saved := self._saved) is None:
            return
        self._saved = None
        saved.until_loaders.close()
        saved.until_batches.close()
        self._go_to_end(saved)
        for callback in private_api.callbacks_of(self._trainer, "WeightAveraging"):
            # At the end of training, this callback replaces the weights with their average.
            callback.on_train_end(self._trainer, self._trainer.lightning_module)

    # ---- returning to a saved position

    def _go_to_epoch(self, saved: SavedPosition) -> None:
        self._restore_module(saved)
        self._warn(saved)
        private_api.clear_restart(self._loop)
        private_api.finish_epoch(self._loop.epoch_progress)
        private_api.set_reloaded_at_epoch(self._loop, saved.tree["reloaded_at_epoch"])
        restore_averages(self._trainer, saved.tree.get("averages", {}))
        self._ended = saved.tree["loaders"]
        loaders.load_loader_states(self._loaders(), self._ended, ended=True)
        self._restore_random(saved, saved.tree["random"])
        self.until_restored.close()

    def _go_to_end(self, saved: SavedPosition) -> None:
        parts = self._loaders()
        if saved.tree["point"] == "epoch" and len(saved.tree["loaders"]) == len(loaders.loader_states(parts)):
            self._go_to_epoch(saved)
            return
        self._restore_module(saved)
        private_api.clear_restart(self._loop)
        if self._loop.max_epochs in (None, -1) or self._loop.epoch_progress.current.processed < self._loop.max_epochs:
            private_api.finish_epoch(self._loop.epoch_progress, within=True)  # The saved run ended mid-epoch.
        self._restore_random(saved, saved.tree["random"])

    def _begin_again(self, saved: SavedPosition) -> None:
        """Rewind the loaders to the start of the epoch, before Lightning creates their iterators."""
        parts, now = self._loaders(), self._loop.epoch_progress.current.processed
        if (start := saved.tree.get("epoch")) is None:  # All loaders were stateful when the step was saved.
            raise loaders.other_loaders(parts, saved.tree["loaders"])
        loaders.set_sampler_epoch(parts, now)
        is_first = saved.tree["reloaded_at_epoch"] == now  # whether the loaders were created in this epoch
        loaders.load_loader_states(parts, start["loaders"], ended=not is_first)
        loaders.start_workers(parts, set(range(len(parts))).difference(start.get("new_workers", ())))
        self._restore_random(saved, start["at_iterator"])

    def _find_batch(self, saved: SavedPosition, fetcher: Any) -> None:
        parts, tree = self._loaders(), saved.tree
        self._rescale(tree)
        self._start = start = tree.get("epoch", {})
        self._set_up_epoch()
        if loaders.all_stateful(parts):
            is_over = tree["point"] == "validation" and private_api.has_done_all_batches(self._loop)
            loaders.load_loader_states(parts, tree["loaders"], ended=is_over)
            if is_over:
                fetcher.reset()
                fetcher.done = True
                return
            self._ahead.begin_within(fetcher, tree)
            return
        logger.info("drawing %d batches again to find the position in the epoch", tree["consumed"])
        self._restore_random(saved, start["at_first_batch"])
        restarts = start.get("restarts", {})

        def before_batch(drawn: int) -> None:
            if drawn in restarts:
                self._restore_random(saved, restarts[drawn])

        loaders.skip_batches(fetcher, tree["consumed"], before_batch)
        check_same_place(tree, parts)

    def _set_up_epoch(self) -> None:
        module = self._trainer.lightning_module
        if not (callbacks := private_api.callbacks_of(self._trainer, *_SET_UP_EPOCHS)):
            return
        restored = {name: value.clone() for name, value in module.state_dict().items()}
        for callback in callbacks:
            callback.on_train_epoch_start(self._trainer, module)
        # Undo a side effect: in its last epoch, StochasticWeightAveraging resets the batch normalization statistics.
        module.load_state_dict(restored)

    def _go_to_batch(self, saved: SavedPosition, fetcher: Any) -> None:
        self._restore_module(saved)
        self._warn(saved)
        fetcher.fetched = saved.tree["fetched"]
        private_api.set_reloaded_at_epoch(self._loop, saved.tree["reloaded_at_epoch"])
        restore_averages(self._trainer, saved.tree["averages"])
        private_api.clear_restart(self._loop)
        if saved.tree["point"] == "validation":
            private_api.restart_in_validation(self._loop)  # `_batch` then clears the saved position.
        else:
            self._stop_if_asked(saved)
            self._saved = None
        hook: Any = type(self._trainer.lightning_module).on_train_epoch_start
        if not hook.__module__.startswith(("lightning.", "pytorch_lightning.")):
            text = (
                "the run continues within epoch %d: %s is called again when the next epoch begins. Set what it sets in "
                "on_train_start as well, or in train_dataloader, if the workers of a loader read it"
            )
            announce(text, self._trainer.current_epoch, hook.__qualname__, shown=self._trainer.is_global_zero)
        self._restore_random(saved, saved.tree["random"])
        self.until_restored.close()

    def _stop_if_asked(self, saved: SavedPosition) -> None:
        """Stop if the saved run had been asked to stop, unless the program itself chose the step to resume from."""
        if saved.tree.get("automatic", False) and saved.tree["should_stop"]:
            self._trainer.should_stop = True

    def _warn(self, saved: SavedPosition) -> None:
        """Warn about workers that cannot be restored, and about saved state that this version no longer restores."""
        if not self._trainer.is_global_zero:
            return
        tree, parts = saved.tree, self._loaders()
        new = [] if tree["point"] == "epoch" else tree.get("epoch", {}).get("new_workers", [])
        lasting = [part for index, part in enumerate(parts) if loaders.keeps_iterator(part) and index not in new]
        if renewed := [part for part in lasting if not loaders.all_stateful([part])]:
            warn_of_new_workers(renewed[0])
        random, measured = tree["random"], tree.get("validation", {}).get("generators", {})
        generators = random.get("loaders", {}).keys() - loaders.loader_generators(parts).keys()
        measuring = private_api.loaders_of(self._loop.epoch_loop.val_loop)
        others = measured.keys() - loaders.loader_generators(measuring).keys()
        ended = any(tree.get("ended", ())) and not private_api.have_ended(self.fetcher.combined_loader)
        unknown = {
            "data loader attributes": sorted(random.get("attributes", ())),
            "data loader generators": sorted(generators),
            "validation data loader generators": sorted(others),
            "exhausted data loaders": ["their iterators"] if ended else [],
            "search results": sorted(tree.get("found", ())),
        }
        if listed := [f"{state} ({shortened(names)})" for state, names in unknown.items() if names]:
            logger.warning(
                "the step was saved by an earlier version of holdfast and has state that is no longer restored: %s. "
                "If the batches depend on it, they differ from those of an uninterrupted run: save and load it in "
                "state_dict() and load_state_dict() of the data loader, or in on_save_checkpoint() and "
                "on_load_checkpoint() of the module",
                "; ".join(listed),
            )

    def _rescale(self, tree: dict[str, Any]) -> None:
        """Rescale the batch counts if the data is now divided among a different number of processes."""
        if (factor := tree.get("rescaled")) is None:
            return
        factor *= loaders.batch_size_ratio(tree.get("batch_sizes"), self._loaders())
        ahead, steps = tree["fetched"] - tree["consumed"], self._trainer.accumulate_grad_batches
        exact: Fraction = tree["consumed"] * factor
        consumed = int(exact) // steps * steps
        if consumed != exact and self._trainer.is_global_zero:
            logger.warning(
                "with this number of processes, the position in the epoch is after %g batches: the epoch continues "
                "after %d, and the samples in between are repeated",
                float(exact),
                consumed,
            )
        tree["consumed"], tree["fetched"] = consumed, consumed + ahead
        current = self._loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = consumed

    def _restore_module(self, saved: SavedPosition) -> None:
        buffers = own_buffers(self._trainer.lightning_module)
        values = saved.tree.get("buffers", {})
        for name, live in live_names(values, buffers).items():
            if live in buffers:
                buffers[live].copy_(values[name])
        self._trainer.callback_metrics.update(saved.tree["callback_metrics"])
        self._switches.restore(saved.tree.get("switched", ""))
        if validation := saved.tree.get("validation"):
            self._restore_validation_loaders(saved, validation)

    def _validation_loaders(self) -> dict[str, Any]:
        """Return the state that affects later validation: generators, and which loaders have running workers."""
        loop = self._loop.epoch_loop.val_loop
        parts = private_api.loaders_of(loop)
        kept = [i for i, loader in enumerate(parts) if loaders.keeps_iterator(loader) and loader._iterator is not None]
        generators = loaders.loader_generators(parts)
        position = {"kept": kept, "generators": generators, "reloaded_at_epoch": private_api.reloaded_at_epoch(loop)}
        return position if kept or generators else {}

    def _restore_validation_loaders(self, saved: SavedPosition, validation: dict[str, Any]) -> None:
        loop = self._loop.epoch_loop.val_loop
        if not private_api.has_loaders(loop):
            self._trainer.validating = True
            loop.setup_data()
            self._trainer.training = True
        private_api.set_reloaded_at_epoch(loop, validation["reloaded_at_epoch"])
        parts = private_api.loaders_of(loop)
        loaders.start_workers(parts, validation["kept"])
        if not saved.is_new:
            loaders.restore_loader_generators(validation["generators"], parts)

    # ---- the current loaders and generators

    def _loaders(self) -> list[Any]:
        return private_api.loaders_of(self._loop)

    def _before_iterator(self) -> dict[str, Any]:
        parts = self._loaders()
        ended, self._ended = self._ended, None
        states = [] if loaders.all_stateful(parts) else ended or loaders.loader_states(parts)
        new = [index for index, part in enumerate(parts) if loaders.keeps_iterator(part) and part._iterator is None]
        return {"at_iterator": self._random(), "loaders": states, "new_workers": new}

    def _random(self) -> dict[str, Any]:
        return loaders.capture_generators(self._loaders())

    def _restore_random(self, saved: SavedPosition, state: dict[str, Any]) -> None:
        if not saved.keeps_random:
            parts = [] if saved.is_new else self._loaders()
            loaders.restore_generators(state, self._trainer.strategy.root_device, parts)
