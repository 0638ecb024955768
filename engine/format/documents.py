"""JSON files that say what they are and check themselves.

A document is one JSON object: ``{"format": "holdfast", "version": 1, "kind": ..., <body>, "digest": "crc32c:..."}``.
The digest is the CRC-32C of the compact JSON text of everything but the digest itself, members in the order of the
file; so white space does not matter to it, and every value, name and the order of the members does. This rule holds
for every version of the format.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ..errors import DamagedCheckpointError, FormatVersionError
from .checksums import crc32c, extend

FORMAT = "holdfast"
VERSION = 1
"""The newest version of the format that is read, and the one that is written."""

DOCUMENT_LIMIT = 128 << 20
"""Bytes of the largest document that is read or written."""

_RESERVED = ("format", "version", "kind", "digest")
_READABLE = frozenset({"checkpoint"})
"""Kinds that people look into; all others are compact."""
_DIGEST = re.compile(r"crc32c:[0-9a-f]{8}")


def encode_document(kind: str, body: dict[str, Any]) -> bytes:
    """Encodes a document.

    Args:
        kind: What the document is, such as "checkpoint" or "tree".
        body: Its content: strings, finite numbers, booleans, None, lists and dicts with string keys.

    Returns:
        The JSON text, ending in one newline.

    Raises:
        ValueError: The body holds something that JSON does not, such as NaN, is nested too deeply or too large, or
            uses one of the names format, version, kind and digest.
        TypeError: The body holds an object of another type.
    """
    taken = [name for name in _RESERVED if name in body]
    if taken:
        raise ValueError(f"the body of a document cannot have members called {', '.join(taken)}")
    document = {"format": FORMAT, "version": VERSION, "kind": kind, **body}
    try:
        text = _canonical(document)
        digest = _digest(text)
        if kind in _READABLE:
            text = json.dumps({**document, "digest": digest}, indent=1, allow_nan=False)
        else:
            text = f'{text[:-1]},"digest":"{digest}"}}'
    except RecursionError as error:
        raise ValueError(f"the {kind} document is nested too deeply, or holds itself") from error
    if len(text) >= DOCUMENT_LIMIT:
        raise ValueError(f"the {kind} document has {len(text)} bytes; the limit is {DOCUMENT_LIMIT}")
    return text.encode("ascii") + b"\n"


def decode_document(data: bytes, kind: str, *, source: str) -> dict[str, Any]:
    """Decodes a document and checks it.

    Args:
        data: The content of the file.
        kind: What the document must be.
        source: The path of the file, for error messages.

    Returns:
        The body: what was given to `encode_document`.

    Raises:
        DamagedCheckpointError: The file is not a whole document of this kind.
        FormatVersionError: It is whole, but of a newer version, or not written by holdfast.
    """

    def damaged(what: str, cause: Exception | None = None) -> NoReturn:
        raise DamagedCheckpointError(f"{source} is damaged: {what}") from cause

    if len(data) > DOCUMENT_LIMIT:
        damaged(f"it has {len(data)} bytes; the limit is {DOCUMENT_LIMIT}")
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as error:
        damaged("it is nested too deeply", error)
    except ValueError as error:
        damaged(f"it is not JSON ({error})", error)
    if not isinstance(document, dict):
        damaged(f"expected a JSON object, found {type(document).__name__}")
    digest = document.pop("digest", None)
    ours = document.get("format") == FORMAT
    version = _version(document.get("version"))
    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
        try:
            computed = _written_digest(data, digest) or _digest(_canonical(document))
        except (ValueError, RecursionError) as error:
            damaged(f"its values cannot be checked ({error})", error)
        if computed != digest:
            damaged(f"expected the digest {digest}, computed {computed} from its content")
    elif ours and version <= VERSION:
        damaged("it has no digest")
    if not ours:
        raise FormatVersionError(f"{source} was not written by holdfast: its format is {document.get('format')!r}")
    if version < 1:
        damaged(f"its version is {document.get('version')!r}")
    if version > VERSION:
        raise FormatVersionError(
            f"{source} has format version {version}, but this holdfast reads up to version {VERSION}; "
            "upgrade holdfast to read it"
        )
    if document.get("kind") != kind:
        damaged(f"expected a {kind!r} document, found {document.get('kind')!r}")
    return {name: value for name, value in document.items() if name not in _RESERVED}


def _version(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return f"crc32c:{crc32c(text.encode('ascii')):08x}"


def _written_digest(data: bytes, digest: str) -> str | None:
    """Computes the digest of a document that is still as `encode_document` has written it, without encoding it anew.

    Returns:
        The digest, or None if the text is laid out in another way.
    """
    end = f',"digest":"{digest}"}}\n'.encode("ascii")
    if not data.endswith(end):
        return None
    computed = f"crc32c:{extend(crc32c(memoryview(data)[: -len(end)]), b'}'):08x}"
    return computed if computed == digest else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")
