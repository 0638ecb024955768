"""What Lightning says of every small program, which the tests of such programs pass over."""

from __future__ import annotations

import pytest

ADVICE = [
    # on any data loader without, or with few, worker processes
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Lightning 2.6 with torch 2.13
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]
