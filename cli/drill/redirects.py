"""The directories of a rehearsal that stand in for those of a run."""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path

from ...engine.errors import StateError
from ...engine.storage import append_line

CLAIMS = "claims.jsonl"
"""Which directories were claimed: lines of ``{"url": ..., "target": ...}``."""


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
        if self._stands_in(url):
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

    def check(self, url: str) -> None:
        """Raise StateError for a place that would be changed, and for which nothing stands in."""
        if not self._stands_in(url):
            raise StateError(
                f"{url}: the program is about to change this place in a rehearsal, and no folder of the rehearsal "
                "stands in for it, so that nothing was changed; make the location with as_location(place, writes=True)"
            )

    def _stands_in(self, url: str) -> bool:
        return f"{url}/".startswith(f"{self._folder}/")
