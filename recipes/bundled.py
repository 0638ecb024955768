"""The bundled configurations. This module avoids importing pydantic, which would slow down shell completion."""

from __future__ import annotations

import importlib.resources

_PACKAGE = f"{__package__.rpartition('.')[0]}.configs"


def bundled_configs() -> list[str]:
    """Return the sorted names of the bundled configurations."""
    files = importlib.resources.files(_PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def bundled_text(name: str) -> str:
    return (importlib.resources.files(_PACKAGE) / f"{name}.yaml").read_text(encoding="utf-8")
