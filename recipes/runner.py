"""Run a checked configuration: create the run directory, apply the resume rules, and log the outcome."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.errors import PREEMPTED, CheckpointNotFoundError, OptionError
from ..engine.format import RECORD
from ..engine.manager import CheckpointManager, mirror_of
from ..engine.observer import process_observer
from ..engine.sources import open_checkpoint
from ..engine.storage import Location, Place, as_location
from ..integrations.loop import PreemptionSignal, all_steps, check_resume, resume_step
from .configuration import Configuration
from .problems import KeyPath, as_yaml, dotted
from .registry import Outcome, RunContext

logger = logging.getLogger("holdfast.recipes")

CONFIG_FILE = "config.yaml"


def run(configuration: Configuration) -> Outcome:
    """Run a recipe, resuming from its newest checkpoint if ``checkpoint.resume`` and the run's identity allow it."""
    config = configuration.config
    run_dir, checkpoints = places_of(configuration)
    path = os.path.abspath(run_dir)
    if (stand_in := process_observer().place(path, writes=True)) != path:
        run_dir = Path(stand_in)
    logger.info("%s: %d steps of %s in %s", config.name, config.train.steps, configuration.recipe.name, run_dir)
    with PreemptionSignal(config.checkpoint.options().preemption_signals()) as preemption:
        # Until the program handles preemptions itself, handle them here; there is nothing to save yet.
        newest = _check_checkpoints(configuration, checkpoints)
        if newest >= config.train.steps:
            logger.info("nothing to do: step %d is saved in %s; raise train.steps to continue", newest, checkpoints)
            return Outcome(start=newest, step=newest, preempted=False)
        program = configuration.recipe.program()
        _store_config(configuration, run_dir, checkpoints)
        if preemption.received:
            logger.info("preempted before the first step: nothing to save; run the same command again")
            return Outcome(start=newest, step=newest, preempted=True)
    context = RunContext(
        config=config,
        run_dir=run_dir,
        checkpoints=checkpoints,
        callback_arguments=_callback_arguments(configuration, newest),
        log_interval=config.logging.interval_steps,
    )
    began = time.monotonic()
    try:
        outcome = program(config, context)
    except SystemExit as end:  # raised by a training loop that exits after saving on preemption
        if end.code != PREEMPTED:
            raise
        outcome = Outcome(start=newest, step=newest, preempted=True)
    if not isinstance(outcome, Outcome):
        raise OptionError(
            f"the recipe {configuration.recipe.name} returned {type(outcome).__name__}; it must return an Outcome of "
            "holdfast.recipes, which says how the run ended"
        )
    if outcome.preempted and (saved := all_steps(as_location(checkpoints))):
        # Later steps are lost, so treat the run as having ended at the last saved step.
        outcome = replace(outcome, step=saved[-1], preempted=saved[-1] < config.train.steps)
    text = "done: %d steps in %.1f s, step %d of %d is saved in %s"
    if outcome.preempted:
        text = "preempted after %d steps in %.1f s; the same command again resumes from step %d of %d in %s"
    seconds, done = time.monotonic() - began, outcome.step - outcome.start
    logger.info(text, done, seconds, outcome.step, config.train.steps, checkpoints)
    return outcome


def places_of(configuration: Configuration) -> tuple[Path, str]:
    """Return the run directory, and the path or URL of the checkpoint directory."""
    config = configuration.config
    run_dir = Path(config.run_dir or os.path.join("runs", config.name))
    return run_dir, config.checkpoint.directory or str(run_dir / "checkpoints")


def first_step(configuration: Configuration) -> int:
    """Return the step that `run` would resume from, or 0; raise the same errors as `run`, but write nothing."""
    mirror = mirror_of(configuration.config.checkpoint.options())
    urls = [places_of(configuration)[1], *([] if mirror is None else [as_location(mirror.url).url])]
    newest = max(urls, key=lambda url: max(all_steps(as_location(url)), default=-1))
    return _check_checkpoints(configuration, newest, fetch=False)


def _check_checkpoints(configuration: Configuration, checkpoints: str, *, fetch: bool = True) -> int:
    """Check the resume rules and return the step to resume from, or 0. If ``fetch``, first update from the mirror."""
    section = configuration.config.checkpoint.options()
    options = section.manager_options()
    if not fetch:
        options = replace(options, mirror=None)
    if options.mirror is not None:
        CheckpointManager(checkpoints, options=options).close()  # fetches newer steps from the mirror
    with CheckpointManager(checkpoints, options=replace(options, read_only=True)) as manager:
        newest = manager.latest_step()
        stored = (manager.metadata() or {}).get("config")
        named = resume_step(section.resume, manager, option="checkpoint.resume={}")
    if section.resume in ("must", "never"):
        check_resume(
            section.resume,
            all_steps(as_location(checkpoints)),
            checkpoints,
            option="checkpoint.resume={}",
            elsewhere="start a new run with name=... or run_dir=...",
        )
    if newest is None:
        if section.init_from is not None:
            try:
                open_checkpoint(_weights_at(section.init_from))  # fails early, before anything is written
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(f"checkpoint.init_from: {error}") from error
        return 0
    if isinstance(stored, Mapping):
        _check_identity(configuration, dict(stored), checkpoints)
    return newest if named is None else named


def _callback_arguments(configuration: Configuration, newest: int) -> dict[str, Any]:
    """Return the callback's keyword arguments. If the run has checkpoints, ``"must"`` replaces ``resume="auto"``."""
    arguments = configuration.config.checkpoint.callback_arguments()
    if newest and arguments["resume"] == "auto":
        arguments["resume"] = "must"
    if arguments["init_from"] is not None:
        arguments["init_from"] = _weights_at(arguments["init_from"])
    return arguments


def _weights_at(source: Place) -> Location:
    """Return the location of initial weights; for a run directory, this is the checkpoint directory inside it."""
    location = as_location(source)
    inside = location / "checkpoints"
    return inside if inside.is_directory() and not (location / RECORD).exists() else location


def _check_identity(configuration: Configuration, stored: dict[str, Any], checkpoints: str) -> None:
    config = configuration.config
    changes = differences(stored, configuration.resolved())
    if blocking := [key for key in changes if blocks_resume(key, config.IDENTITY, config.checkpoint.allow_changes)]:
        listed = "".join(f"  {key}: {changes[key]}\n" for key in blocking)
        raise OptionError(
            f"{checkpoints} belongs to a run whose configuration differs from {configuration.source}:\n{listed}start "
            "a new run with name=... or run_dir=..., or continue with the new values: "
            f"checkpoint.allow_changes=[{','.join(blocking)}]"
        )
    for key, values in changes.items():
        logger.info("changed since the last time: %s: %s", key, values)


def _store_config(configuration: Configuration, run_dir: Path, checkpoints: str) -> None:
    """Store the complete configuration with the checkpoints, and as a runnable file in the run directory."""
    options = configuration.config.checkpoint.options().manager_options()
    metadata = {"recipe": configuration.recipe.name, "config": configuration.resolved()}
    with CheckpointManager(checkpoints, options=options, metadata=metadata) as manager:
        manager.acquire()
    run_dir.mkdir(parents=True, exist_ok=True)
    header = f"# The whole configuration of this run, from {configuration.source} and the command's arguments.\n"
    as_location(run_dir / CONFIG_FILE).write_bytes(f"{header}{configuration.yaml()}".encode())


# ---- whether the configuration still matches the checkpoints


def differences(stored: dict[str, Any], resolved: dict[str, Any]) -> dict[str, str]:
    """Map each changed key's dotted name to a text with the old and new values. Keys that were removed come last."""
    before, now = dict(_flat(stored)), dict(_flat(resolved))
    return {
        dotted(key): f"{_as_text(before, key)} (checkpoints), {_as_text(now, key)} (now)"
        for key in now | before
        if key not in before or key not in now or before[key] != now[key]
    }


def blocks_resume(key: str, identity: Sequence[str], allowed: Sequence[str]) -> bool:
    """Return True if a changed key identifies the run, unless ``allowed`` lists the key or an enclosing section."""
    return key.partition(".")[0] in identity and not any(f"{key}.".startswith(f"{section}.") for section in allowed)


def _flat(values: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, key))
        else:
            yield (*path, key), value


def _as_text(values: Mapping[KeyPath, Any], key: KeyPath) -> str:
    return as_yaml(values[key]) if key in values else "nothing"
