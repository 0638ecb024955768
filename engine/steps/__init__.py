"""The steps in a directory, their commit records, and what else is stored beside them."""

from __future__ import annotations

from .listing import StepEntry, list_steps, newest_step, prefix_of, read_entry, series_and_step, series_of, step_folders
from .records import (
    LATE,
    METADATA,
    RECORD_LIMIT,
    LateMetrics,
    has_changed,
    has_record,
    read_again,
    read_record,
    read_steadily,
    store_metadata,
    stored_metadata,
    with_late,
    write_late,
)
