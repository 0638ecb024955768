"""A checked configuration in, an outcome out: the run's directory, its rules for resuming, its report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.errors import CheckpointExistsError, CheckpointNotFoundError, DamagedCheckpointError, OptionError
from ..engine.interop.places import open_checkpoint
from ..engine.manager import CheckpointManager
from ..engine.options import CheckpointManagerOptions
from ..engine.record import RECORD
from ..engine.storage import Location, as_location
from ..integrations.options import CallbackOptions
from ..integrations.preemption import PreemptionSignal
from .configuration import Configuration, to_yaml
from .context import Outcome, RunContext
from .identity import differences

logger = logging.getLogger("holdfast.recipes")

CONFIG_FILE = "config.yaml"


def run(configuration: Configuration) -> Outcome:
    """Runs a recipe, from its newest checkpoint if there is one.

    Args:
        configuration: What to run.

    Returns:
        How it ended.

    Raises:
        OptionError: The checkpoints are from a run with another model, data, optimizer or seed.
        CheckpointNotFoundError: ``checkpoint.resume`` is ``must``, and there is no checkpoint.
        CheckpointExistsError: ``checkpoint.resume`` is ``never``, and there are checkpoints.
        MissingExtraError: A package that the recipe needs is not installed.
        HoldfastError: The checkpoints cannot be read or written.
    """
    config = configuration.config
    run_dir = Path(config.run_dir or os.path.join("runs", config.name))
    checkpoints = config.checkpoint.directory or str(run_dir / "checkpoints")
    logger.info("%s: %d steps of %s in %s", config.name, config.train.steps, configuration.recipe.name, run_dir)
    with PreemptionSignal() as preemption:
        # Until the program watches for preemptions itself, there is nothing to save.
        newest = _check_checkpoints(configuration, checkpoints)
        if newest >= config.train.steps:
            logger.info("nothing to do: step %d is saved in %s; raise train.steps to train on", newest, checkpoints)
            return Outcome(start=newest, step=newest, preempted=False)
        program = configuration.recipe.program()
        _store_config(configuration, run_dir, checkpoints)
        if preemption.received:
            logger.info("preempted before the first step: nothing to save; run the same command again")
            return Outcome(start=newest, step=newest, preempted=True)
    context = RunContext(
        run_dir=run_dir,
        checkpoints=checkpoints,
        callback_arguments=_callback_arguments(configuration),
        log_interval=config.logging.interval_steps,
    )
    began = time.monotonic()
    outcome = program(config, context)
    _report(outcome, config.train.steps, time.monotonic() - began, checkpoints)
    return outcome


def _check_checkpoints(configuration: Configuration, checkpoints: str) -> int:
    """Returns the newest step that there is, 0 without any, if the run may go on from it."""
    with CheckpointManager(checkpoints, options=CheckpointManagerOptions(read_only=True)) as manager:
        newest = manager.latest_step()
        try:
            stored = (manager.metadata() or {}).get("config")
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error}; so nobody knows what configuration the checkpoints are from: if it is this one, remove "
                f"{manager.directory}/metadata and run the same command again"
            ) from error
    section = configuration.config.checkpoint
    if newest is None:
        if section.resume == "must":
            raise CheckpointNotFoundError(
                f"checkpoint.resume=must, but there is no checkpoint in {checkpoints}; check the path, or set "
                "checkpoint.resume=auto to start when there is none"
            )
        if section.init_from is not None:
            try:
                open_checkpoint(_weights_at(section.init_from))  # before anything is written
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(f"checkpoint.init_from: {error}") from error
        return 0
    if section.resume == "never":
        raise CheckpointExistsError(
            f"checkpoint.resume=never, but {checkpoints} has checkpoints, the newest of step {newest}; begin another "
            "run with name=... or run_dir=..., or set checkpoint.resume=auto to go on"
        )
    if isinstance(stored, Mapping):
        _check_identity(configuration, dict(stored), checkpoints)
    return newest


def _callback_arguments(configuration: Configuration) -> dict[str, Any]:
    section = configuration.config.checkpoint
    arguments = section.callback_arguments()
    return arguments if section.init_from is None else {**arguments, "init_from": _weights_at(section.init_from)}


def _weights_at(place: str) -> Location:
    """Returns the checkpoints that weights are taken from: a run is known by its directory as well."""
    location = as_location(place)
    inside = location / "checkpoints"
    return inside if inside.is_directory() and not (location / RECORD).exists() else location


def _check_identity(configuration: Configuration, stored: dict[str, Any], checkpoints: str) -> None:
    config = configuration.config
    changes = differences(stored, configuration.resolved(), config.IDENTITY)
    blocking = [change for change in changes if not change.allowed(config.checkpoint.allow_changes)]
    if blocking:
        keys = ",".join(change.key for change in blocking)
        raise OptionError(
            "\n".join(
                [
                    f"{checkpoints} belongs to a run with another configuration than {configuration.source}:",
                    *(f"  {change}" for change in blocking),
                    "begin another run with name=... or run_dir=..., or go on with the new values: "
                    f"checkpoint.allow_changes=[{keys}]",
                ]
            )
        )
    for change in changes:
        logger.info("changed since the last time: %s", change)


def _store_config(configuration: Configuration, run_dir: Path, checkpoints: str) -> None:
    """Stores the whole configuration with the checkpoints, and in the run's directory for people."""
    options = CallbackOptions(**configuration.config.checkpoint.callback_arguments()).manager_options()
    metadata = {"recipe": configuration.recipe.name, "config": configuration.resolved()}
    with CheckpointManager(checkpoints, options=options, metadata=metadata) as manager:
        manager.acquire()
    _write_config(configuration, run_dir)


def _write_config(configuration: Configuration, run_dir: Path) -> None:
    """Writes a file that can be run, too."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / CONFIG_FILE
    partial = path.with_name(f".{CONFIG_FILE}.partial")
    header = f"# The whole configuration of this run, from {configuration.source} and the command's arguments.\n"
    partial.write_text(header + to_yaml(configuration.resolved()), encoding="utf-8")
    partial.replace(path)


def _report(outcome: Outcome, total: int, seconds: float, checkpoints: str) -> None:
    done = outcome.step - outcome.start
    if outcome.preempted:
        text = "preempted after %d steps in %.1f s; the same command again goes on from step %d of %d in %s"
    else:
        text = "done: %d steps in %.1f s, step %d of %d is saved in %s"
    logger.info(text, done, seconds, outcome.step, total, checkpoints)
