"""Paths and long chains of objects."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import graph
from holdfast.engine.pytree import join, split
from holdfast.integrations.graph import format_node_path, parse_path, storage_name

KEYS = st.lists(st.text(max_size=4) | st.sampled_from(["a/b", "a.b", "%", "", ".S", "1"]), min_size=1, max_size=4)


@given(KEYS)
@settings(deadline=None, max_examples=50)
def test_paths_round_trip(keys: list[str]) -> None:
    path = tuple(join([key]) for key in keys)
    assert split(storage_name(path)) == keys
    assert parse_path(storage_name(path)) == path or "/" in storage_name(path) or storage_name(path) == ""
    if "/" in format_node_path(path):
        assert parse_path(format_node_path(path)) == path


@pytest.mark.parametrize("text", ["", "a//b", "a..b", "a/%zz", 3])
def test_what_is_no_path(text: Any) -> None:
    with pytest.raises(hf.errors.OptionError, match="path"):
        parse_path(text)
    if text == 3:
        for action in (graph.Checkpoint().restore, graph.Checkpoint().read, graph.load_checkpoint):
            with pytest.raises(hf.errors.OptionError, match="directory/ckpt-3"):
                action(text)


@pytest.mark.parametrize(("length", "values"), [(150, True), (1500, True), (1500, False)])
def test_long_chains_of_objects(place: str, length: int, values: bool) -> None:
    first = last = graph.Node(v=0)
    for number in range(1, length):
        last.next = graph.Node(v=number) if values else graph.Node()
        last = last.next
    checkpoint = graph.Checkpoint(first=first)
    if values and length == 1500:
        with pytest.raises(hf.errors.UnsupportedLeafError, match=r"first/next.*nothing was written"):
            checkpoint.write(place)
        return
    path = checkpoint.write(place)
    last.v = first.v = -1
    checkpoint.read(path, partial=not values)
    assert (first.v, last.v) == (0, length - 1 if values else -1)


def test_no_framework_is_loaded() -> None:
    program = """
import sys, tempfile
import numpy as np
from holdfast import graph
with tempfile.TemporaryDirectory() as directory:
    path = graph.Checkpoint(w=np.ones(3), listed=[1]).save(f"{directory}/x")
    graph.Checkpoint(w=np.zeros(3), listed=[]).restore(path).assert_consumed()
    graph.load_checkpoint(path).get_tensor("w")
print(sorted({"jax", "torch", "flax", "optax", "lightning", "tensorstore"} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
