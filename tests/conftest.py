"""What every test needs, set before anything imports a framework: jax on four CPU devices, torch on one thread.

Torch's threads wait for each other busily: beside other work on two cores, that takes many times as long as one thread.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("OMP_NUM_THREADS", "1")
