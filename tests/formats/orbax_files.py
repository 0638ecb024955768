"""What the tests of Orbax's files share: trees that orbax-checkpoint saves and restores, and edits of its metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jnp: Any = pytest.importorskip("jax.numpy")
ocp: Any = pytest.importorskip("orbax.checkpoint")

DIRECTORIES = {"use_ocdbt": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ocdbt zarr2": {},
    "ocdbt zarr3": {"use_zarr3": True},
    "directories zarr2": DIRECTORIES,
    "directories zarr3": {**DIRECTORIES, "use_zarr3": True},
}


def many_kinds() -> dict[str, Any]:
    """A tree that Orbax and we restore with the same types."""
    return {
        "params": {"w": jnp.arange(24.0).reshape(4, 6), "half": jnp.arange(8, dtype=jnp.bfloat16)},
        "fp8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "numpy": np.arange(5, dtype=np.uint16),
        "bool": np.array([True, False]),
        "text": "hello",
        "list": [np.ones(1), [np.zeros(2), []]],
        "step": 7,
        "rate": 1.5,
        "flag": True,
        "none": None,
        "nothing": {},
    }


def save(path: Path, tree: Any, **layout: Any) -> Path:
    """Saves a tree in a layout, with Orbax."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**layout)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def restored(path: Path, *like: Any) -> Any:
    """Restores a tree with Orbax, perhaps like a template."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *like)


def copied(original: Path, folder: Path) -> Path:
    """Copies a directory to be damaged; the copy."""
    return Path(shutil.copytree(original, folder / "copy"))


def edit(path: Path, change: Callable[[Any], Any], file: str = "_METADATA") -> None:
    """Changes a JSON file in a directory."""
    document = json.loads((path / file).read_text())
    change(document)
    (path / file).write_text(json.dumps(document))
