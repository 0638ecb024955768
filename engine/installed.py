"""Builds the command that installs extras for this copy of holdfast, and warns about other ``holdfast`` packages."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

_NAME = "holdfast-checkpoint"  # distribution name, because ``holdfast`` on PyPI is another project


def install_command(*extras: str) -> str:
    """Return the command that installs extras from the same origin as this copy."""
    wanted = f"[{','.join(extras)}]"
    match _origin():
        case {"url": str(url), "dir_info": dict(folder)}:
            return f"pip install {'-e ' if folder.get('editable') else ''}'{url.removeprefix('file://')}{wanted}'"
        case {"url": str(url), "vcs_info": dict(vcs)}:
            revision = vcs.get("requested_revision")
            return f"pip install '{_NAME}{wanted} @ {vcs['vcs']}+{url}{f'@{revision}' if revision else ''}'"
        case {"url": str(url)}:
            return f"pip install '{_NAME}{wanted} @ {url}'"
    return f"pip install '{_NAME}{wanted}'"


def _origin() -> dict[str, Any]:
    """Return pip's record of this distribution's origin (PEP 610), or {} if it was installed from an index."""
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.exists(os.path.join(folder, "pyproject.toml")):  # a source checkout, which may not be installed
        return {"url": f"file://{folder}", "dir_info": {"editable": True}}
    from importlib.metadata import PackageNotFoundError, distribution  # imported lazily, because only errors need it

    try:
        text = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    origin: dict[str, Any] = json.loads(text) if text else {}
    return origin


def tell_of_stranger(folder: str) -> None:
    """Warn on stderr that another project's distribution ``holdfast`` is installed in the same folder."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError), open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as entries:
        if "holdfast.cli" in entries.read():  # earlier versions of this project used this name
            return
    sys.stderr.write(
        f"holdfast: another project's package `holdfast` is installed beside {_NAME}, in the same folder. To mend it: "
        f"pip uninstall holdfast {_NAME}; {install_command('cli')}\n"
    )
