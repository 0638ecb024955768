"""What a checkpoint says of one component: what it is, how it is made, what is below it, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamagedCheckpointError, FormatVersionError, UnsupportedLeafError
from ..format import decode_document, encode_document
from ..tree import unescape_key
from .names import Path

VERSION = (1, 0)
"""Major and minor version of the layout that is written: a reader of the same major version understands it."""
_DOCUMENT = "component"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One component.

    Attributes:
        type: Import path of its class: ``"module:qualified.name"``.
        recipe: How it is made: ``{"args": [...], "kwargs": {...}}`` as :mod:`.recipes` encodes them; None where that
            is not known.
        obstacle: Why the recipe is not known, or ``""``.
        path: Its path from the root of the tree that was saved.
        components: The paths of its own components, seen from it.
        same: Components of it that are another component of the tree: their paths from it, and from the root of the
            tree the path that the other is saved under.
        metadata: What people may want to know; nothing depends on it.
    """

    type: str
    recipe: Mapping[str, Any] | None
    obstacle: str = ""
    path: Path = ()
    components: tuple[Path, ...] = ()
    same: Mapping[Path, Path] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Returns the content of its file.

        Raises:
            UnsupportedLeafError: The metadata is not JSON, or the recipe too large.
        """
        body = {
            "layout": ".".join(map(str, VERSION)),
            "class": self.type,
            "constructor": None if self.recipe is None else dict(self.recipe),
            **({"no_constructor": self.obstacle} if self.obstacle else {}),
            "path": "/".join(self.path),
            "components": ["/".join(path) for path in self.components],
            "same": {"/".join(path): "/".join(target) for path, target in self.same.items()},
            "metadata": dict(self.metadata),
        }
        try:
            content = encode_document(_DOCUMENT, body)
        except (ValueError, TypeError) as error:
            raise UnsupportedLeafError(f"{self.type} cannot be described: {error}; nothing was written") from error
        return (json.dumps(json.loads(content), indent=1) + "\n").encode("ascii")

    @classmethod
    def decode(cls, content: bytes, *, source: str) -> Description:
        """Reads a file.

        Args:
            content: Its content, not trusted in any way.
            source: Where it came from, for messages.

        Raises:
            DamagedCheckpointError: It does not verify.
            FormatVersionError: It is of a later major version.
        """
        body = decode_document(content, _DOCUMENT, source=source)
        _check_version(body.get("layout"), source)
        try:
            recipe = body["constructor"]
            if recipe is not None and not (
                isinstance(recipe, dict)
                and isinstance(recipe.get("args"), list)
                and isinstance(recipe.get("kwargs"), dict)
            ):
                raise TypeError(f"constructor {recipe!r:.80}")
            described = body["metadata"]
            if not isinstance(described, dict) or not isinstance(body["components"], list):
                raise TypeError(f"metadata {described!r:.80}")
            return cls(
                type=_text(body["class"]),
                recipe=recipe,
                obstacle=_text(body.get("no_constructor", "")),
                path=_path(body["path"]),
                components=tuple(_below(name) for name in body["components"]),
                same={_below(name): _path(target) for name, target in body["same"].items()},
                metadata=described,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"{source} does not describe a component: {error!r:.200}") from error


def _check_version(version: Any, source: str) -> None:
    parts = version.split(".") if isinstance(version, str) and len(version) < 20 else []
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise DamagedCheckpointError(f"{source}: {version!r:.80} is no version of the layout")
    if int(parts[0]) > VERSION[0]:
        raise FormatVersionError(
            f"{source}: the component was written with version {version} of the layout, but this holdfast reads up to "
            f"version {VERSION[0]}.x; upgrade holdfast to read it"
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def _below(name: Any) -> Path:
    path = _path(name)
    if not path:
        raise ValueError("a component below it has no name")
    return path


def _path(name: Any) -> Path:
    segments = tuple(_text(name).split("/")) if name != "" else ()
    for segment in segments:
        unescape_key(segment)
    return segments
