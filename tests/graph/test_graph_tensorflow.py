"""Checkpoints of TensorFlow as graphs of objects: what TensorFlow saw in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import graph

FIXTURES = Path(__file__).parents[1] / "formats" / "tensorflow"
SEEN: dict[str, Any] = json.loads((FIXTURES / "seen.json").read_text(encoding="utf-8"))
WITH_GRAPHS = sorted(prefix for prefix, seen in SEEN.items() if seen.get("nodes"))


def display(name: str) -> str:
    """Writes the name of an edge as paths show it."""
    return name.replace("%", "%25").replace("/", "%2F")


def paths_of(nodes: list[dict[str, Any]]) -> dict[int, str]:
    """Gives the shortest path to every object."""
    found = {0: ""}
    queue = [0]
    for number in queue:
        for name, child in nodes[number]["children"].items():
            if child not in found:
                found[child] = f"{found[number]}/{display(name)}".lstrip("/")
                queue.append(child)
    return found


@pytest.mark.parametrize("prefix", WITH_GRAPHS)
def test_a_reader_has_the_paths_and_values_that_tensorflow_saw(prefix: str) -> None:
    reader = graph.load_checkpoint(FIXTURES / prefix)
    nodes, variables = SEEN[prefix]["nodes"], SEEN[prefix]["variables"]
    compared = 0
    for number, path in paths_of(nodes).items():
        names = {display(name) for name in nodes[number]["children"]}
        assert names <= set(reader.graph.children(path)), path
        kept = reader.graph.slots(path)
        assert sorted(name for found in kept.values() for name in found) == sorted(
            slot for _, slot, _ in nodes[number]["slots"]
        )
        for name, _, key in nodes[number]["attributes"]:
            if name != "VARIABLE_VALUE" or "elements" not in variables[key]:
                continue
            facts = variables[key]
            value = np.asarray(reader.get_tensor(path))
            assert (list(value.shape), value.tobytes().hex()) == (facts["shape"], facts["elements"])
            compared += 1
    assert compared
