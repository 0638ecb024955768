"""``python -m benchmarks.loop``: the impact of saves on training, with holdfast and with other libraries."""

from __future__ import annotations

import sys

from .runner import main

if __name__ == "__main__":
    sys.exit(main())
