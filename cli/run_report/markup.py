"""Build HTML and SVG elements, escaping text unless it is marked as HTML."""

from __future__ import annotations

import html

_VOID = frozenset({"path", "polyline", "rect"})  # elements that are self-closing when empty, such as <path/>


class Markup(str):
    """A string of HTML that is inserted without escaping."""

    __slots__ = ()


def join(*parts: str) -> Markup:
    """Concatenate parts, escaping those that are not ``Markup``."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Build an element, escaping its content. ``data_v`` becomes ``data-v``; attributes that are None are omitted."""
    start = name
    for key, value in attributes.items():
        if value is not None:
            key = key.rstrip("_").replace("_", "-")
            start += f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'
    inside = join(*content)
    return Markup(f"<{start}/>" if name in _VOID and not inside else f"<{start}>{inside}</{name}>")
