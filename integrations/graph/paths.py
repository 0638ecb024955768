"""Format and parse paths through a graph of objects.

An edge is named by the escaped form of its key, as in the names of leaves (:mod:`~holdfast.engine.pytree.names`); a
path is the names of the edges from the root.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.errors import OptionError, shortened
from ...engine.pytree import format_path, unescape_key

Path = tuple[str, ...]  # the names of the edges from the root to a node, each escaped


def storage_name(path: Path) -> str:
    """Return the name of the leaf at a path: ``net.l1.weight``."""
    return ".".join(path)


def format_node_path(path: Path) -> str:
    """Format a path for messages: ``net/l1/weight``; the root is ``(root)``."""
    return format_path(storage_name(path))


def parse_path(text: str) -> Path:
    """Parse a path that a user wrote as ``net/l1/weight`` or ``net.l1.weight``."""
    if not isinstance(text, str) or not text:
        raise OptionError(f"{text!r} is not a path; write 'net/l1/weight' or 'net.l1.weight'")
    path = tuple(key.replace(".", "%2E") for key in text.split("/")) if "/" in text else tuple(text.split("."))
    try:
        for key in path:
            unescape_key(key)
    except ValueError as error:
        raise OptionError(f"{text!r} is not a path: {error}") from error
    return path


def format_section(what: str, names: Sequence[str]) -> list[str]:
    """Format the line of a report for a list of paths; an empty list has none."""
    return [f"  {what} ({len(names)}): {shortened(names, 10)}"] if names else []
