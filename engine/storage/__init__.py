"""Where bytes live: locations on local disks and in object stores, small objects, bulk data files."""

from __future__ import annotations

from .backend import Entry
from .buffers import Buffer, aligned_empty
from .bulk import DataFile, DataReader, Segment
from .local import TEMPORARY_PREFIX
from .location import Location, as_location, at_once
from .several import REQUESTS, several

__all__ = [
    "REQUESTS",
    "TEMPORARY_PREFIX",
    "Buffer",
    "DataFile",
    "DataReader",
    "Entry",
    "Location",
    "Segment",
    "aligned_empty",
    "as_location",
    "at_once",
    "several",
]
