"""The steps in a directory, their commit records, and what else is stored beside them."""

from __future__ import annotations

from .late_metrics import LATE, LateMetrics, remove_late, with_late, write_late
from .listing import StepEntry, list_steps, newest_step, prefix_of, read_entry, series_and_step, series_of, step_folders
from .records import (
    METADATA,
    RECORD_LIMIT,
    attempts_at,
    has_changed,
    has_record,
    read_record,
    read_steadily,
    store_metadata,
    stored_metadata,
)
