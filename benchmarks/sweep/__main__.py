"""``python -m benchmarks.sweep``: interrupts many small programs, resumes them, and compares every bit."""

from __future__ import annotations

import sys

from .runner import main

if __name__ == "__main__":
    sys.exit(main())
