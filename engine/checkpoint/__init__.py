"""One checkpoint: the commit protocol, saves at once and in the background."""

from __future__ import annotations

from .background import BackgroundSave
from .checkpointer import AsyncCheckpointer, Checkpointer, PyTreeCheckpointer
from .commit import (
    CommitParts,
    PendingCheckpoint,
    copy_left,
    delete_checkpoint,
    deleted_on_interrupt,
    is_swept,
    remove_temporary,
    sweep,
    sweep_stray,
    write_record,
)
from .copying import CopiedFiles, CopyProgress, Throttle, copied_step, file_checks
from .replicas import check_replicas
from .save import ItemToSave, Save, SaveReport, leave_save
from .stored import OtherItems, OwnItems, StoredItems
