"""Files that programs open in an object store: read whole when they are opened, sent whole when they are closed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

from ..errors import OptionError

_MODES = frozenset({"r", "w", "x", "a"})


class _Upload(io.BytesIO):
    """A file in memory, which is sent when it is closed."""

    def __init__(self, send: Callable[[bytes], None], content: bytes) -> None:
        super().__init__()
        self.write(content)
        self._send = send

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        self._send(content)


def open_object(
    mode: str,
    *,
    read: Callable[[], bytes],
    exists: Callable[[], bool],
    send: Callable[[bytes], None],
    url: str,
    **text: Any,
) -> IO[Any]:
    """Open an object as the builtin ``open`` opens a file; ``text`` has its arguments for text."""
    letters = sorted(mode.replace("t", "", 1))
    binary = "b" in letters
    kind = "".join(letters).replace("b", "", 1)
    if kind not in _MODES:
        raise OptionError(f"{url}: mode={mode!r} opens no object of a store: read it (r), or write it (w, x, a)")
    if kind == "x" and exists():
        raise FileExistsError(f"{url} exists")
    raw: io.BytesIO
    if kind == "r":
        raw = io.BytesIO(read())
    else:
        raw = _Upload(send, read() if kind == "a" and exists() else b"")
    return raw if binary else io.TextIOWrapper(raw, **{**text, "encoding": text.get("encoding") or "utf-8"})
