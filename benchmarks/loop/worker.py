"""Runs one contender in its own process, and prints its measurements as one line of JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from . import CONTENDERS, QUICK, STANDARD

if __name__ == "__main__":
    _, framework, contender, plan, path = sys.argv
    module, function = CONTENDERS[framework][contender].split(":")
    run = getattr(import_module(f".{module}", __package__), function)
    print(json.dumps(run(QUICK if plan == "quick" else STANDARD, Path(path).resolve())), flush=True)
