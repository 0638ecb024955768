"""What the tests of torch's files share: every dtype, a tensor that is spread over processes, an object with code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # since torch 2.7
]
WHOLE = np.arange(35, dtype=np.float32).reshape(7, 5)
WAS_RUN = Path("/tmp/holdfast-was-run")


class Evil:
    """Opens a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (str(WAS_RUN), "w"))


def spread(processes: int, array: Any = WHOLE) -> dict[str, Any]:
    """An array as tensors that are divided in every way among two or four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, processes // 2), mesh_dim_names=("replicas", "parts"))
    placements: dict[str, Any] = {
        "rows": [Shard(0), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "replicated": [Replicate(), Replicate()],
    }
    return {name: distribute_tensor(torch.from_numpy(array), mesh, one) for name, one in placements.items()}
