"""Programs that are interrupted in every way that is known, and compared bit for bit with the uninterrupted ones."""
