"""Which files of an OCDBT database are missing or too short: TensorStore only tells which key it could not read."""

from __future__ import annotations

from ..errors import HoldfastError
from ..format import MANIFEST_NAME, Entries, decode_database
from ..storage import Location

_LIMIT = 512 << 20  # bytes of a manifest


def explain(location: Location, name: str) -> list[tuple[str, str]]:
    """Finds the files that keep an array from being read.

    Args:
        location: The folder of the database.
        name: The array's name.

    Returns:
        Files by their path inside the folder, each with what is wrong; empty where nothing can be found out.
    """
    try:
        entries = _read(location)
    except (HoldfastError, OSError) as error:
        return [(MANIFEST_NAME, str(error))]
    prefix = f"{name}/".encode() if name else b""
    ends: dict[str, int] = {}
    for row, key in enumerate(entries.keys):
        if key.startswith(prefix) and entries.inline[row] is None:
            file = entries.files[int(entries.file_ids[row])]
            ends[file] = max(ends.get(file, 0), int(entries.offsets[row]) + int(entries.lengths[row]))
    found = []
    for file, end in sorted(ends.items()):
        try:
            with (location / file).open_data() as data:
                if location.is_local and data.size < end:
                    found.append((file, f"it is truncated: expected at least {end} bytes, found {data.size}"))
        except (HoldfastError, OSError) as error:
            found.append((file, f"it is missing or cannot be opened ({error})"))
    return found


def _read(location: Location) -> Entries:
    def node(path: str, offset: int, length: int) -> bytes:
        with (location / path).open_data() as file:
            return file.read(offset, length).tobytes()

    return decode_database((location / MANIFEST_NAME).read_bytes(limit=_LIMIT), node)
