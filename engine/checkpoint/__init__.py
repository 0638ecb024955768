"""One checkpoint: the commit protocol, saves at once and in the background."""

from __future__ import annotations

from .background import BackgroundSave
from .checkpointer import ITEM, AsyncCheckpointer, Checkpointer, Place, PyTreeCheckpointer
from .commit import (
    CommitParts,
    PendingCheckpoint,
    attempts_at,
    copy_left,
    delete_checkpoint,
    deleted_on_interrupt,
    has_changed,
    has_record,
    read_record,
    read_steadily,
    remove_temporary,
    sweep,
    write_record,
)
from .copying import CopiedFiles, CopyProgress, Throttle, copy_step
from .others import describe_other, formats, only_item, open_other, restore_other
from .replicas import check_replicas
from .save import ItemToSave, Save, SaveReport
