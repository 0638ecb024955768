"""Save component trees to directories, restore trees or single components, and construct them from checkpoints."""

from __future__ import annotations

from ..graph import RestoreReport as ComponentReport
from .component import Checkpointable, Component
from .handler import ComponentCheckpointHandler
from .live import modules_of
from .permissions import allow, rename
from .reading import read_state
from .states import fresh_components
