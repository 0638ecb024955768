"""Storage of bytes: paths and URLs, small objects, bulk data files, locks, and work on threads."""

from __future__ import annotations

from .backend import DataFile, DataReader, Entry, FileIdentity, Segment
from .buffers import PAGE, Buffer, aligned_empty, round_up
from .folder_in_memory import folder_in_memory
from .kvstore import shared_context, store_spec
from .local import TEMPORARY_PREFIX, LocalBackend, append_line, open_own
from .location import Location, Place, as_location, max_concurrency, sync_all
from .lock import FileLock, SaveLock, locked_elsewhere
from .parallel import CORES, REQUESTS, Helper, parallel_map
from .scattered import ScatteredFiles
from .status import check_extent, is_unreadable, map_status, os_errors, unreadable_as_damage, without_secrets
