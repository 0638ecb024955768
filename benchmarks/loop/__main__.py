"""``python -m benchmarks.loop``: what training feels of its checkpoints, with holdfast and its peers."""

from __future__ import annotations

import sys

from .runner import main

if __name__ == "__main__":
    sys.exit(main())
