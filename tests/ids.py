"""Names of test cases that are the same in every process, as running them in parallel needs."""

from __future__ import annotations

import re

_LONGEST = 60


def plain_id(value: object) -> str:
    """Returns the ``repr`` of a value without addresses, with the elements of a set in order, cut to 60 characters."""
    if isinstance(value, set | frozenset) and value:
        text = f"{type(value).__name__}({', '.join(sorted(map(plain_id, value)))})"
    else:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text[:_LONGEST]
