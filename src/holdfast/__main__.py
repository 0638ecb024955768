"""Run the command as ``python -m holdfast``, which works even if the ``holdfast`` script is not on the PATH."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
