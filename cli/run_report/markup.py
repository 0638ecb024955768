"""Elements of HTML and SVG; text that is not marked as HTML is escaped."""

from __future__ import annotations

import html

_VOID = frozenset({"path", "polyline", "rect"})  # written as <path/> if they are empty


class Markup(str):
    """HTML, which is inserted as it is."""

    __slots__ = ()


def join(*parts: str) -> Markup:
    """Concatenate parts; escape those that are not HTML."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element with escaped content; ``data_v`` becomes ``data-v``, and None omits an attribute."""
    start = name
    for key, value in attributes.items():
        if value is not None:
            key = key.rstrip("_").replace("_", "-")
            start += f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'
    inside = join(*content)
    return Markup(f"<{start}/>" if name in _VOID and not inside else f"<{start}>{inside}</{name}>")
