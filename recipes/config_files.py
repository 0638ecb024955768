"""Finding a configuration: a path, or the name of one that comes with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from .problems import ConfigError, Place, Problem, did_you_mean

_PACKAGE = f"{__package__.rpartition('.')[0]}.configs"


def bundled_configs() -> list[str]:
    """Returns the names of the configurations that come with the package, sorted."""
    files = importlib.resources.files(_PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_config(name: str) -> tuple[str, str]:
    """Finds a configuration.

    Args:
        name: A path, with or without ``.yaml``; or a bundled name such as ``flax_digits``, also written
            ``flax_digits.yaml`` or ``configs/flax_digits.yaml``. A file of that path goes first.

    Returns:
        The name for error messages, and the text.

    Raises:
        ConfigError: There is no such configuration, or it is not a readable text file.
    """
    for path in (Path(name), Path(f"{name}.yaml")):
        if path.is_file():
            try:
                return str(path), path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise _no_config(name, f"the file cannot be read: {error}") from error
    bundled = name.removeprefix("configs/").removesuffix(".yaml")
    known = bundled_configs()
    if bundled in known:
        file = importlib.resources.files(_PACKAGE) / f"{bundled}.yaml"
        return f"configs/{bundled}.yaml", file.read_text(encoding="utf-8")
    if name and Path(name).is_dir():
        inside = Path(name, "config.yaml")
        hint = f"; did you mean {inside}?" if inside.is_file() else "; give the path of a YAML file"
        raise _no_config(name, f"this is a directory{hint}")
    hint = did_you_mean(bundled, known) or f"; bundled: {', '.join(known)}"
    raise _no_config(name, f"no such file, and no configuration of this name comes with holdfast{hint}")


def _no_config(name: str, text: str) -> ConfigError:
    return ConfigError([Problem(Place(name), "", text)])
