"""What another front builds on: parts of a graph, filters, and paths."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import graph
from holdfast.engine.graph import (
    GraphCheckpointHandler,
    PathFilter,
    Restoration,
    capture,
    open_graph,
    parse_path,
    shown,
    storage_name,
    walk,
)
from holdfast.engine.storage import as_location
from holdfast.engine.tree import join, split

KEYS = st.lists(st.text(max_size=4) | st.sampled_from(["a/b", "a.b", "%", "", ".S", "1"]), min_size=1, max_size=4)


@given(KEYS)
@settings(deadline=None, max_examples=50)
def test_paths_round_trip(keys: list[str]) -> None:
    path = tuple(join([key]) for key in keys)
    assert split(storage_name(path)) == keys
    assert parse_path(storage_name(path)) == path or "/" in storage_name(path) or storage_name(path) == ""
    if "/" in shown(path):
        assert parse_path(shown(path)) == path


@pytest.mark.parametrize("text", ["", "a//b", "a..b", "a/%zz", 3])
def test_what_is_no_path(text: Any) -> None:
    with pytest.raises(hf.OptionError, match="path"):
        parse_path(text)


@pytest.mark.parametrize(
    ("select", "exclude", "chosen"),
    [
        (None, None, ["a", "a/b", "a/b/c", "d"]),
        ("a/**", None, ["a", "a/b", "a/b/c"]),
        ("**/c", None, ["a/b/c"]),
        ("*", None, ["a", "d"]),
        (["?", "a/[bx]/**"], None, ["a", "a/b", "a/b/c", "d"]),
        (None, "**", []),
        ("a/**", ["a/b", "**/c"], ["a"]),
        ("**/b/**", None, ["a/b", "a/b/c"]),
    ],
)
def test_filters(select: Any, exclude: Any, chosen: list[str]) -> None:
    found = PathFilter(select, exclude)
    assert [path for path in ("a", "a/b", "a/b/c", "d") if found.chooses(tuple(path.split("/")))] == chosen


def test_filters_that_are_none() -> None:
    for wrong in (3, [], [None]):
        with pytest.raises(hf.OptionError, match="select"):
            PathFilter(wrong)  # type: ignore[arg-type]  # that is the point


def test_a_part_is_restored_into_another(place: str) -> None:
    net = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = graph.Checkpoint(trainer=graph.Node(net=net, optimizer=optimizer)).write(f"{place}/x")
    stored = open_graph(as_location(path))
    live: Any = torch.nn.Linear(2, 2)
    part = graph.Checkpoint(live)  # kept, as a restore does not keep what it is for
    Restoration(stored.at(parse_path("trainer/net/two")), part).advance()
    assert torch.equal(live.weight, net["two"].weight)  # type: ignore[arg-type]  # a module for torch's types
    with pytest.raises(hf.TreeMismatchError, match="nothing at trainer/nat"):
        stored.at(parse_path("trainer/nat"))
    with pytest.raises(hf.TreeMismatchError, match="value"):
        stored.at(parse_path("trainer/net/two/weight"))
    trainer = graph.Node(net=torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)}))
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), 0.5, momentum=0.5)
    whole = graph.Checkpoint(trainer)
    restoration = Restoration(stored.at(parse_path("trainer")), whole)
    restoration.advance()
    assert restoration.report(whole).complete
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9


def test_only_what_is_chosen_is_saved(place: str) -> None:
    root = graph.Node(a=np.ones(1), b=graph.Node(c=np.ones(2), d=[1, 2, 3]))
    captured = capture(walk(root), PathFilter("b/**", exclude="b/d/1"))
    hf.Checkpointer(GraphCheckpointHandler()).save(place, captured)
    assert [leaf.path for leaf in hf.describe(place)] == ["b/c", "b/d/0", "b/d/2"]
    loaded = hf.load(place)
    assert loaded["b"]["d"] == {0: 1, 2: 3}
    checkpoint = graph.Checkpoint(graph.Node(b=graph.Node(c=np.zeros(2), d=[0, 5, 0])))
    status = checkpoint.read(place)
    assert checkpoint.__holdfast_root__().b.d == [1, 5, 3]
    assert status.report.missing == ("b/d/1",)


@pytest.mark.parametrize(("length", "fails"), [(150, False), (3000, True)])
def test_long_chains_of_objects(place: str, length: int, fails: bool) -> None:
    first = last = graph.Node(v=0)
    for number in range(1, length):
        last.next = graph.Node(v=number)
        last = last.next
    checkpoint = graph.Checkpoint(first=first)
    if fails:
        with pytest.raises(hf.UnsupportedLeafError, match=r"first/next.*nothing was written"):
            checkpoint.write(place)
        return
    path = checkpoint.write(place)
    last.v = -1
    checkpoint.read(path).assert_consumed()
    assert last.v == length - 1


def test_a_long_chain_without_values(place: str) -> None:
    first = last = graph.Node(v=0)
    for _ in range(3000):
        last.next = graph.Node()
        last = last.next
    checkpoint = graph.Checkpoint(first=first)
    checkpoint.read(checkpoint.write(place)).assert_consumed()


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
