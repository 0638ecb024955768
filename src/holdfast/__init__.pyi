# The public names of `import holdfast`, and where each is defined: type checkers read this list, and __init__.py loads
# from it what is used.
from . import checkpoint_utils as checkpoint_utils
from . import clock as clock
from . import components as components
from . import errors as errors
from . import graph as graph
from . import handlers as handlers
from . import observer as observer
from . import processes as processes
from . import reports as reports
from . import storage as storage
from . import type_handlers as type_handlers
from .engine.api import load as load
from .engine.api import load_async as load_async
from .engine.api import load_transformed as load_transformed
from .engine.api import save as save
from .engine.api import save_async as save_async
from .engine.arrays import Layout as Layout
from .engine.checkpoint import AsyncCheckpointer as AsyncCheckpointer
from .engine.checkpoint import Checkpointer as Checkpointer
from .engine.checkpoint import PyTreeCheckpointer as PyTreeCheckpointer
from .engine.errors import CheckpointExistsError as CheckpointExistsError
from .engine.errors import CheckpointNotFoundError as CheckpointNotFoundError
from .engine.errors import DamagedCheckpointError as DamagedCheckpointError
from .engine.errors import HoldfastError as HoldfastError
from .engine.errors import SaveFailedError as SaveFailedError
from .engine.errors import TreeMismatchError as TreeMismatchError
from .engine.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from .engine.handlers import ArrayRestoreArgs as ArrayRestoreArgs
from .engine.handlers import JsonCheckpointHandler as JsonCheckpointHandler
from .engine.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from .engine.handlers import RestoreArgs as RestoreArgs
from .engine.handlers import SaveArgs as SaveArgs
from .engine.inspection import describe as describe
from .engine.inspection import verify as verify
from .engine.listing import list_checkpoints as list_checkpoints
from .engine.loaders import skip_to as skip_to
from .engine.manager import CheckpointManager as CheckpointManager
from .engine.manager import CheckpointManagerOptions as CheckpointManagerOptions
from .engine.manager import Local as Local
from .engine.manager import Mirror as Mirror
from .engine.manager import Peek as Peek
from .engine.manager import copy_checkpoint as copy_checkpoint
from .engine.manager import event_scalars as event_scalars
from .engine.manager import record_metrics as record_metrics
from .engine.pytree import Transform as Transform
from .engine.pytree import apply_transformations as apply_transformations
from .engine.resumable import resumable as resumable
from .engine.sources import open as open  # noqa: A004
from .integrations.formats.convert import export_checkpoint as export_checkpoint
from .integrations.formats.convert import import_checkpoint as import_checkpoint
from .integrations.formats.orbax.export import add_orbax_metadata as add_orbax_metadata
from .integrations.loop import CheckpointCallback as CheckpointCallback
from .integrations.loop import StepOutcome as StepOutcome

__version__: str
__all__: list[str]  # noqa: PYI035 - made of the names above
