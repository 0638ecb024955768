"""``holdfast prune``, ``rm``, ``rollback``, ``pin`` and ``unpin`` change which checkpoints a run keeps.

Each command takes ownership of the checkpoint directory, as a training run does, and fails while a run owns it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from ..engine.clock import format_size
from ..engine.errors import DONE, FAILED, CheckpointNotFoundError, OptionError, StorageError, shortened_steps
from ..engine.manager import (
    LEFT_ALONE,
    CheckpointManager,
    CheckpointManagerOptions,
    KeepAll,
    best,
    infos_of,
    reasons,
    retention_rules,
    settle_mirror,
    stored_identity,
    stored_rules,
)
from ..engine.sources import find_steps
from ..engine.steps import StepEntry, list_steps, prefix_of, stray_folders
from ..engine.storage import Location, as_location
from . import arguments
from .arguments import checkpoints_at, is_one_checkpoint, where_else
from .progress import progress_of
from .report import count, print_json
from .streams import configure_logging, say


class ChangedRun:
    """The run to change. If ``takes_strays`` is true, step folders without a commit record count as its steps."""

    def __init__(self, directory: str, prefix: str | None, *, takes_strays: bool = False) -> None:
        configure_logging("warning")
        self.location = checkpoints_at(directory)
        if is_one_checkpoint(self.location):
            raise OptionError(f"{directory}: this is one checkpoint; give the directory of its run, and the step")
        listed = find_steps(self.location)
        steps = listed.entries or (stray_folders(self.location, None, ()) if takes_strays else ())
        if not steps:
            raise CheckpointNotFoundError(f"{self.location}: no checkpoint was found{where_else(self.location)}")
        if listed.entries and not listed.is_native:
            raise OptionError(
                f"{self.location}: {listed.format} wrote these checkpoints; holdfast changes only its own"
            )
        chosen = _of_one_prefix(self.location, steps, prefix)
        self.series = chosen[0].series
        self.entries = chosen if listed.entries else []
        strays = stray_folders(self.location, self.series, self.entries) if takes_strays else []
        self.strays = [entry.step for entry in strays]
        identity = stored_identity(self.location)
        self.mirror, self.local = identity.mirror, identity.local
        stored, self.function = stored_rules(self.location)
        options = stored or CheckpointManagerOptions()
        self.options = replace(options, read_only=False, step_prefix=prefix_of(self.series))

    @contextlib.contextmanager
    def manager(self) -> Iterator[CheckpointManager]:
        """Open the run for writing, preserving its stored retention rules."""
        logger, is_other = logging.getLogger("holdfast"), lambda record: record.msg is not LEFT_ALONE
        with CheckpointManager(self.location, options=self.options) as manager:
            logger.addFilter(is_other)  # hide the warning about folders that `rm` may be about to delete
            try:
                manager.acquire()
            finally:
                logger.removeFilter(is_other)
            yield manager

    def check(self, steps: Collection[int]) -> None:
        """Raise CheckpointNotFoundError if any of the steps does not exist."""
        there = sorted([*(entry.step for entry in self.entries), *self.strays])
        if missing := sorted(set(steps) - set(there)):
            raise CheckpointNotFoundError(
                f"{self.location}: no checkpoint of step {shortened_steps(missing)}; there are {shortened_steps(there)}"
            )

    def counted(self, steps: Collection[int]) -> str:
        """Describe how many of the steps are checkpoints, and how many are folders without a checkpoint."""
        strays = len(set(steps).intersection(self.strays))
        checkpoints = count(len(steps) - strays, "checkpoint") if len(steps) > strays else ""
        folders = f"{count(strays, 'folder')} without a checkpoint" if strays else ""
        return " and ".join(filter(None, [checkpoints, folders]))

    def mirrored_after(self, step: int) -> list[int] | None:
        """Return the steps after ``step`` that exist only in the mirror, or None if the mirror cannot be read."""
        if self.mirror is None:
            return []
        here = {entry.step for entry in self.entries}
        try:
            there = list_steps(as_location(self.mirror), self.series)
        except StorageError:  # the deletion will report the error
            return None
        return [entry.step for entry in there if entry.step > step and entry.step not in here]

    def nbytes(self, steps: Collection[int]) -> int:
        """Return the total size of the steps in bytes, not counting steps whose records are unreadable."""
        return sum(entry.record.nbytes for entry in self.entries if entry.step in steps and entry.record is not None)


def _of_one_prefix(location: Location, entries: Sequence[StepEntry], prefix: str | None) -> list[StepEntry]:
    names = sorted({entry.series for entry in entries})
    listed = ", ".join(name.rstrip("_-") for name in names if name)
    if prefix is None and len(names) > 1:
        raise OptionError(f"{location}: there are steps with several prefixes; give one with --prefix: {listed}")
    wanted = next((name for name in names if prefix is None or name.rstrip("_-") == prefix.rstrip("_-")), None)
    if wanted is None:
        raise CheckpointNotFoundError(
            f"{location}: no checkpoint has the prefix {prefix}; there are: {listed or 'none'}"
        )
    return [entry for entry in entries if entry.series == wanted]


@click.command()
@arguments.run_directory
@click.option("--max-to-keep", type=int, help="Keep this many: the best with --best-fn, the newest without.")
@click.option("--keep-latest", type=int, help="Keep this many of the newest.")
@click.option("--keep-period", type=int, help="Keep the first at or past each multiple of this many steps.")
@click.option("--keep-time-interval", help="Keep those this far apart, such as 1h.")
@click.option("--keep-step", "keep_steps", type=int, multiple=True, help="Keep this step; may be repeated.")
@click.option("--best-fn", help="The metric that ranks checkpoints.")
@click.option("--best-mode", help="max or min.")
@click.option("--only", is_flag=True, help="Apply only the rules given here, without those of the run.")
@arguments.deletes
def prune(directory: str, only: bool, prefix: str | None, dry_run: bool, yes: bool, as_json: bool, **given: Any) -> int:
    """Delete the checkpoints of a run that no rule keeps.

    Rules that you omit default to the run's last rules. The newest checkpoint and pinned checkpoints are always kept.
    """
    rules = {name: value for name, value in given.items() if value not in (None, ())}
    run = ChangedRun(directory, prefix)
    options = _pruning_options(run, rules, only)
    applied = [rule for rule in retention_rules(options) if not (rules and isinstance(rule, KeepAll))]
    infos = infos_of(run.entries)
    if isinstance(options.best_fn, str) and best(infos, options.best_fn, options.ranking_mode) is None:
        metrics = sorted({name for info in infos for name in info.metrics or ()})
        raise OptionError(
            f"{run.location}: no checkpoint has the metric {options.best_fn}, so none is the best, and nothing was "
            f"deleted; the metrics are: {', '.join(metrics) or 'none'}"
        )
    kept = reasons(infos, applied)
    unkept = [info.step for info in infos if info.step not in kept]
    damaged = [entry.step for entry in run.entries if entry.record is None]
    if not as_json:
        for step, why in kept.items():
            say(f"keep {step}: {', '.join(why)}")
        if damaged:
            say(f"damaged, left alone (holdfast rm deletes them): {shortened_steps(damaged)}")
    if run.mirror is not None and not as_json:
        say(f"the mirror {run.mirror} follows its own rules and is not changed")
    more = {"kept": kept, "damaged": damaged}
    return _delete(run, unkept, yes, dry_run, as_json=as_json, more=more, in_mirror=False)


def _pruning_options(run: ChangedRun, rules: dict[str, Any], only: bool) -> CheckpointManagerOptions:
    """Merge the command's rules into the run's options; raise OptionError if the best steps cannot be determined."""
    if only:
        if not rules:
            raise OptionError("--only needs a rule that says what to keep, such as --keep-latest 3")
        return CheckpointManagerOptions(**rules)
    if "best_fn" not in rules:
        if run.function is not None:
            raise OptionError(
                f"{run.location}: the run ranks its checkpoints by a function in its program, {run.function}, so what "
                "it keeps is unknown here, and nothing was deleted; give --best-fn METRIC and --best-mode, or --only"
            )
    elif rules["best_fn"] != run.options.best_fn and "best_mode" not in rules:
        raise OptionError(f"--best-fn {rules['best_fn']} needs --best-mode max or min; nothing was deleted")
    return replace(run.options, **rules)


@click.command()
@arguments.run_directory
@arguments.steps
@arguments.deletes
def rm(directory: str, steps: Sequence[int], prefix: str | None, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Delete checkpoints of a run, including pinned and damaged ones."""
    run = ChangedRun(directory, prefix, takes_strays=True)
    run.check(steps)
    return _delete(run, sorted(set(steps)), yes, dry_run, as_json=as_json)


@click.command()
@arguments.run_directory
@arguments.step_of("The step to go back to.", required=True)
@arguments.deletes
def rollback(directory: str, step: int, prefix: str | None, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Delete all checkpoints later than a step, so that the run resumes from it."""
    run = ChangedRun(directory, prefix)
    run.check([step])
    chosen = next(entry for entry in run.entries if entry.step == step)
    if chosen.error is not None:
        raise chosen.error
    later = [entry.step for entry in run.entries if entry.step > step]
    mirrored = run.mirrored_after(step)
    if not as_json:
        say(f"keep {step}: the run resumes from it")
        if mirrored:
            say(f"also delete {shortened_steps(mirrored)} in the mirror {run.mirror}")
        if run.local is not None:
            say(f"local steps of the hosts in {run.local} no longer count")
    after = step if mirrored or mirrored is None or run.local is not None else None
    return _delete(run, later, yes, dry_run, as_json=as_json, more={"resumes_from": step}, after=after)


def _delete(
    run: ChangedRun,
    steps: Sequence[int],
    yes: bool,
    dry_run: bool,
    *,
    as_json: bool,
    more: dict[str, Any] | None = None,
    in_mirror: bool = True,
    after: int | None = None,
) -> int:
    nbytes = run.nbytes(steps)
    counted = f"{run.counted(steps)} of {run.location}, {format_size(nbytes)}"
    if not as_json:
        say(f"delete {shortened_steps(steps)}: {counted}" if steps else "nothing to delete")
    deleted: list[int] = []
    anything = bool(steps) or after is not None
    if anything and not yes and not dry_run and not sys.stdin.isatty():
        raise OptionError("nothing was deleted: cannot ask without a terminal; give --yes, or --dry-run to look")
    if anything and not dry_run and (yes or click.confirm(f"Delete {counted}?")):
        with run.manager() as manager, progress_of("delete", shown=not as_json) as progress:
            progress.expect(nbytes)
            for step in reversed(steps):  # newest first, so that an interruption leaves a valid run
                manager.delete(step, mirror=in_mirror)
                deleted.append(step)
                progress.advance(run.nbytes([step]))
            if after is not None:
                manager.delete_after(after)  # the mirror may contain later steps that are missing from the run
            if in_mirror:
                settle_mirror(manager)
    elif anything and not dry_run:
        say("nothing was deleted")
        return FAILED
    if as_json:
        facts = {"directory": str(run.location), "dry_run": dry_run, "delete": list(steps), "bytes": nbytes}
        print_json({**facts, "deleted": deleted[::-1], **(more or {})})
    elif deleted:
        say(f"deleted {run.counted(deleted)}")
    return DONE


def _pinning(name: str, text: str) -> click.Command:
    @click.command(name, help=text)
    @arguments.run_directory
    @arguments.steps
    @arguments.prefix
    @arguments.as_json
    def change(directory: str, steps: Sequence[int], prefix: str | None, as_json: bool) -> int:
        run = ChangedRun(directory, prefix)
        run.check(steps)
        with run.manager() as manager:
            for step in steps:
                getattr(manager, name)(step)
            settle_mirror(manager)
        if as_json:
            print_json({"directory": str(run.location), f"{name}ned": list(steps)})
        else:
            say(f"{name}ned {shortened_steps(list(steps))}")
        return DONE

    return change


pin = _pinning("pin", "Keep checkpoints until they are unpinned, even if no rule keeps them.")
unpin = _pinning("unpin", "Return checkpoints to the control of the retention rules.")
