"""A loader whose class wraps the state of the loader that it extends, as in torchtitan."""

from __future__ import annotations

import pickle
from typing import Any


def of_a_rank(kind: Any) -> Any:
    """Return a subclass of a loader of torchdata, in whose state the original one is pickled under the rank."""

    class OfRank(kind):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {"rank_0": pickle.dumps(super().state_dict()), "world_size": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(pickle.loads(state["rank_0"]))

    return OfRank
