"""Leaves whose values somebody else keeps, such as the handler of a type of the user's own; or nobody at all."""

from __future__ import annotations

from .leaves import Details
from .names import display

EXTERNAL = "external"
"""Kind of such leaves in ``tree.json``."""
PLACEHOLDER = "placeholder"
"""Kind of the leaves that another library has saved by their names alone; their value is ``...``."""


class ExternalLeaf:
    """Stands in a loaded tree for a value that its handler is yet to read.

    Attributes:
        name: The leaf's name.
        details: What ``tree.json`` says of it, not trusted.
        handler: The name of the handler that knows the value.
    """

    __slots__ = ("details", "handler", "name")

    def __init__(self, name: str, details: Details) -> None:
        self.name = name
        self.details = details
        self.handler = str(details.get("handler"))

    def __repr__(self) -> str:
        return f"<{display(self.name)}, kept by the handler {self.handler!r:.80}>"
