"""Templates by jax.eval_shape on eight devices: arrays return to the mesh that they were on."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.meshes import sharding

import holdfast as hf


def spread_state(mesh: Any) -> Any:
    """Returns arrays on a mesh, divided and not, with a key and a number."""
    import jax

    def put(array: Any, *axes: Any) -> Any:
        return jax.device_put(array, sharding(mesh, *axes))

    return {
        "rows": put(np.arange(64.0, dtype=np.float32).reshape(16, 4), "x"),
        "both": put(np.arange(64, dtype=np.int32).reshape(8, 8), "x", "y"),
        "whole": put(np.arange(3.0, dtype=np.float32)),
        "key": jax.random.key(3),
        "step": 5,
    }


# Devices of the mesh, whether its axes are explicit, whether it is in context; the arrays that come back on it.
CASES: dict[str, tuple[slice, bool, bool, list[str]]] = {
    "all": (slice(None), True, False, ["rows", "both", "whole"]),
    "half in context": (slice(4), True, True, ["rows", "both", "whole"]),
    "backwards in context": (slice(None, None, -1), True, True, ["rows", "both", "whole"]),
    "not explicit": (slice(None), False, False, []),
    "half": (slice(4), True, False, ["rows", "both", "whole"]),
    "other half": (slice(4, None), True, False, ["rows", "both", "whole"]),
    "backwards": (slice(None, None, -1), True, False, ["rows", "both", "whole"]),
}


def restore_abstract(process: Process, directory: str) -> tuple[dict[str, Any], str]:
    """Restores by abstract templates; returns which shardings are the old ones, and an error."""
    import jax
    from jax.sharding import AxisType

    results: dict[str, Any] = {}
    for number, (case, (part, explicit, in_context, _)) in enumerate(CASES.items()):
        devices = jax.devices()[part]
        kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
        mesh = jax.make_mesh((len(devices) // 2, 2), ("x", "y"), axis_types=kinds, devices=devices)
        state = spread_state(mesh)
        template = jax.eval_shape(lambda state=state: state)
        with hf.CheckpointManager(f"{directory}/{number}") as manager:
            manager.save(5, state)
            with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
                found = manager.restore(5, template)
        for name in ("rows", "both", "whole", "step"):
            np.testing.assert_array_equal(found[name], state[name])
        assert jax.random.bits(found["key"]) == jax.random.bits(state["key"])
        results[case] = [
            name
            for name in ("rows", "both", "whole")
            if found[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim)
        ]
    return results, restore_with_other_axes(f"{directory}/other axes")


def restore_with_other_axes(directory: str) -> str:
    """Restores by a template on another mesh of half of the devices; returns the error."""
    import jax
    from jax.sharding import AxisType

    def mesh(*sizes: int) -> Any:
        return jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    hf.save(directory, spread_state(mesh(2, 2)))
    state = spread_state(mesh(4, 1))
    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(directory, like=jax.eval_shape(lambda: state))
    return str(caught.value)


@pytest.mark.needs("jax", "0.7")
def test_abstract_templates_return_to_their_mesh_or_say_that_its_devices_are_unknown(tmp_path: Path) -> None:
    ((found, error),) = run_processes(restore_abstract, 1, str(tmp_path), devices_per_process=8)
    assert found == {case: expected for case, (*_, expected) in CASES.items()}
    assert re.search(r"rows.*whose devices are unknown: it needs 4 of the 8.*jax\.set_mesh\(mesh\)", error), error
