"""JSON files with a format, a version, a kind and a digest.

A document is one JSON object: ``{"format": "holdfast", "version": 1, "kind": ..., <body>, "digest": "crc32c:..."}``.
The digest is the CRC-32C of the compact JSON text of all other members, in the order of the file: it covers every name,
every value and the order of the members, but no white space. This rule holds for every version of the format.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ..errors import DamagedCheckpointError, FormatVersionError
from .codecs import crc32c, extend

FORMAT = "holdfast"
VERSION = 2  # the newest version of the format that is read
ARCHIVES_VERSION = 2  # of commit records whose items are zip files, which earlier versions do not read

DOCUMENT_LIMIT = 128 << 20  # bytes of the largest document that is read or written

_RESERVED = ("format", "version", "kind", "digest")
_READABLE = frozenset({"checkpoint"})  # kinds that users read; all others are compact
_DIGEST = re.compile(r"crc32c:[0-9a-f]{8}")


def encode_document(kind: str, body: dict[str, Any], *, version: int = 1) -> bytes:
    """Return a document; ``version`` is the oldest version of the format whose readers understand it."""
    taken = [name for name in _RESERVED if name in body]
    if taken:
        raise ValueError(f"the body of a document cannot have members called {', '.join(taken)}")
    document = {"format": FORMAT, "version": version, "kind": kind, **body}
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
    """Verify a document and return its body."""

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
    """Compute the digest from the bytes that `encode_document` wrote; None if they were reformatted since."""
    end = f',"digest":"{digest}"}}\n'.encode("ascii")
    if not data.endswith(end):
        return None
    computed = f"crc32c:{extend(crc32c(memoryview(data)[: -len(end)]), b'}'):08x}"
    return computed if computed == digest else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")
