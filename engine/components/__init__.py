"""Trees of components: saved into a directory each, restored whole or one by one, and made anew from there."""

from __future__ import annotations

from .building import build
from .checkpointable import Checkpointable, Component
from .description import Description
from .handler import ComponentCheckpointHandler
from .names import component_path, written
from .permissions import Permissions, allow, rename
from .reading import SavedComponent, all_components, open_component, read_state
from .report import ComponentReport
from .restoring import restore
from .saving import save

__all__ = [
    "Checkpointable",
    "Component",
    "ComponentCheckpointHandler",
    "ComponentReport",
    "Description",
    "Permissions",
    "SavedComponent",
    "all_components",
    "allow",
    "build",
    "component_path",
    "open_component",
    "read_state",
    "rename",
    "restore",
    "save",
    "written",
]
