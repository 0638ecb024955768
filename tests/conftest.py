"""What every test needs, set before anything imports a framework: jax on four CPU devices, torch on one thread, and
property tests that try the same examples every time, so that a test that passes here passes elsewhere.

Torch's threads wait for each other busily: beside other work on two cores, that takes many times as long as one thread.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings  # after the environment is set

settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
