"""What other processes are told of a failure."""

from __future__ import annotations

from holdfast.engine.errors import told


def test_notes_are_told_too() -> None:
    error = KeyError("word")
    assert told(error) == "'word'"
    error.add_note("raised by serialize of the TypeHandler 'words' for a/b")
    assert told(error) == "'word'\nraised by serialize of the TypeHandler 'words' for a/b"
