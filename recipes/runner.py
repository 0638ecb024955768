"""A checked configuration in, an outcome out: the run's directory, its rules for resuming, its report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.errors import OptionError
from ..engine.manager import CheckpointManager
from ..engine.options import CheckpointManagerOptions
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
        MissingExtraError: A package that the recipe needs is not installed.
        HoldfastError: The checkpoints cannot be read or written.
    """
    config = configuration.config
    run_dir = Path(config.run_dir or os.path.join("runs", config.name))
    checkpoints = config.checkpoint.directory or str(run_dir / "checkpoints")
    with PreemptionSignal() as preemption:
        # Until the program watches for preemptions itself, there is nothing to save.
        steps = _check_identity(configuration, checkpoints)
        newest = steps[-1] if steps else 0
        if newest >= config.train.steps and config.checkpoint.resume != "never":
            logger.info("nothing to do: step %d is saved in %s; raise train.steps to train on", newest, checkpoints)
            return Outcome(start=newest, step=newest, preempted=False)
        program = configuration.recipe.program()
        if preemption.received:
            logger.info("preempted before the first step: nothing to save; run the same command again")
            return Outcome(start=newest, step=newest, preempted=True)
    _write_config(configuration, run_dir)
    context = RunContext(
        run_dir=run_dir,
        checkpoints=checkpoints,
        callback_arguments={**config.checkpoint.callback_arguments(), "metadata": _metadata(configuration)},
        log_interval=config.logging.interval_steps,
    )
    began = time.monotonic()
    outcome = program(config, context)
    _report(outcome, config.train.steps, time.monotonic() - began, checkpoints)
    return outcome


def _metadata(configuration: Configuration) -> dict[str, Any]:
    return {"recipe": configuration.recipe.name, "config": configuration.resolved()}


def _check_identity(configuration: Configuration, checkpoints: str) -> list[int]:
    """Returns the steps that there are, if they belong to this run."""
    with CheckpointManager(checkpoints, options=CheckpointManagerOptions(read_only=True)) as manager:
        steps = manager.all_steps()
        stored = (manager.metadata() or {}).get("config")
    config = configuration.config
    if not steps or not isinstance(stored, Mapping) or config.checkpoint.resume == "never":
        return steps
    changes = differences(dict(stored), configuration.resolved(), config.IDENTITY)
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
    return steps


def _write_config(configuration: Configuration, run_dir: Path) -> None:
    """Leaves the whole configuration in the run's directory, for people; it can be run, too."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / CONFIG_FILE
    partial = path.with_name(f".{CONFIG_FILE}.partial")
    header = f"# The whole configuration of this run, from {configuration.source} and the command's arguments.\n"
    partial.write_text(header + to_yaml(configuration.resolved()), encoding="utf-8")
    partial.replace(path)


def _report(outcome: Outcome, total: int, seconds: float, checkpoints: str) -> None:
    done = outcome.step - outcome.start
    if outcome.preempted:
        text = "preempted: %d steps in %.1f s, step %d of %d is saved in %s; run the same command again to go on"
    else:
        text = "done: %d steps in %.1f s, step %d of %d is saved in %s"
    logger.info(text, done, seconds, outcome.step, total, checkpoints)
