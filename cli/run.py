"""``holdfast run``: a configuration in, a trained model and an exit status out."""

from __future__ import annotations

from collections.abc import Sequence

from ..recipes.configuration import load_configuration
from ..recipes.runner import run
from .log import configure_logging
from .status import DONE, PREEMPTED


def run_recipe(config: str, overrides: Sequence[str], *, print_config: bool) -> int:
    """Runs what a configuration describes.

    Args:
        config: A path or a bundled name.
        overrides: ``key=value`` texts that go over the file.
        print_config: Print the whole configuration, and run nothing.

    Returns:
        The exit status.
    """
    configuration = load_configuration(config, overrides)
    if print_config:
        print(configuration.yaml(), end="")
        return DONE
    configure_logging(configuration.config.logging.level)
    outcome = run(configuration)
    return PREEMPTED if outcome.preempted else DONE
