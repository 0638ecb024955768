"""The directories of a rehearsal that stand in for those of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import zlib
from pathlib import Path

from ..errors import StateError
from .local import append_line

CLAIMS = "claims.jsonl"
"""Which directories were claimed: lines of ``{"url": ..., "target": ...}``."""

DRILL = "HOLDFAST_DRILL"
"""Environment variable of a program that ``holdfast drill`` rehearses: the folder of the rehearsal."""

STRAYS = "strays.jsonl"  # name of the file in that folder to which processes without the variable add themselves


@functools.cache
def check_no_stray() -> None:
    """Raise StateError where a program that is rehearsed has started this process without the variable that says so.

    It would write to the real directories. The variable with an empty value says that it may.
    """
    parent, found = os.getppid(), b""
    while parent > 1 and DRILL not in os.environ and not found:
        try:
            variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
            stat = Path(f"/proc/{parent}/stat").read_bytes()
        except OSError:  # of another user, or there is no such file system
            return
        found = next((one for one in variables if one.startswith(f"{DRILL}=".encode())), b"").partition(b"=")[2]
        rehearsed, parent = parent, int(stat.rpartition(b")")[2].split()[1])
    if not found:
        return
    with contextlib.suppress(OSError):
        append_line(os.path.join(os.fsdecode(found), STRAYS), json.dumps({"pid": os.getpid(), "command": sys.argv}))
    raise StateError(
        f"holdfast drill rehearses process {rehearsed}, which has started this one without the environment variable "
        f"{DRILL}, so that it would write to the real directories: start it with the environment of its parent, such "
        f"as env={{**os.environ, ...}}; or with an empty {DRILL}, if it is no part of what is rehearsed"
    )


class Redirects:
    """Directories that the program writes to, each with the folder that stands in for it.

    A directory is *claimed* when the program is about to write to it, and everything below it is redirected from then
    on, in all later starts of the program as well. Everything else stays where it is, so that weights of another run
    can still be read.

    Args:
        folder: Where the folders that stand in are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._targets: dict[str, str] = {}
        os.makedirs(folder, exist_ok=True)
        try:
            lines = (folder / CLAIMS).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            claim = json.loads(line)
            self._targets[claim["url"]] = claim["target"]

    def target(self, url: str, *, writes: bool) -> str:
        """Return the path or URL that stands in for another one, or the same.

        Args:
            url: A URL, or an absolute path.
            writes: Whether the program is about to write there, which claims it.
        """
        if f"{url}/".startswith(f"{self._folder}/"):
            return url
        claimed = max((one for one in self._targets if f"{url}/".startswith(f"{one}/")), key=len, default=None)
        if claimed is not None:
            target = self._targets[claimed] + url[len(claimed) :]
        else:
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rstrip("/").rpartition("/")[2]).strip("_.-") or "run"
            target = os.path.join(self._folder, f"{name}.{zlib.crc32(os.fsencode(url)):08x}")
        if not writes or claimed == url:
            return url if claimed is None else target
        self._targets[url] = target
        append_line(os.path.join(self._folder, CLAIMS), json.dumps({"url": url, "target": target}))
        return target
