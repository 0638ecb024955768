"""The checkpoints of one run: when to save, what to keep, which one to resume from."""

from __future__ import annotations

from .copying import CopyReport, copy_checkpoint
from .decisions import Decision, decide
from .directory import record_metrics
from .events import (
    EVENTS,
    Event,
    append_after_death,
    described,
    event_scalars,
    finite,
    guarded,
    has_finished,
    read_events,
    read_run_events,
)
from .intervals import DAY, Experience, LearnedInterval, Loss, save_interval
from .local_steps import LocalStatus
from .manager import CheckpointManager, best_step_in, local_part, note_resume, settle_mirror
from .metrics import Metric, better, metric_name, metric_value, number_of, plain_metrics
from .mirror import MirrorStatus
from .options import (
    BestFn,
    BestMode,
    CheckpointManagerOptions,
    CheckpointOptions,
    Local,
    Mirror,
    has_triggers,
    limits,
    mirror_of,
    option_texts,
    refuse_options,
    retention_rules,
)
from .ownership import stored_identity, stored_options, stored_rules
from .resuming import Peek, Restored
from .retention import KeepAll, Rule, StepInfo, best, infos_of, reasons
