"""Forged graph documents: cycles are fine, invalid documents are refused in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast import graph
from holdfast.engine.format import decode_document, encode_document

Document = dict[str, Any]
Change = Callable[[Document], Any]


@pytest.fixture
def forge(place: str, stored: Callable[[str], Any]) -> Callable[[Change], str]:
    """Saves a small graph, lets a function change its document, and seals it again as a forger would."""

    def forged(change: Change) -> str:
        path = graph.Checkpoint(net=graph.Node(w=np.ones(2), v=np.ones(3)), n=1).write(f"{place}/x")
        document = decode_document(stored(path).read()["state/graph.json"], "graph", source="test")
        change(document)
        stored(path).reseal("graph.json", encode_document("graph", document))
        return path

    return forged


def blank() -> graph.Checkpoint:
    return graph.Checkpoint(net=graph.Node(w=np.zeros(2), v=np.zeros(3)), n=0)


def look(path: str) -> str:
    """Does all that one can do with a checkpoint; gives the one error that all of it comes to."""
    checkpoint = blank()
    errors = set()
    for action in (checkpoint.read, checkpoint.restore, graph.load_checkpoint):
        with pytest.raises(hf.DamagedCheckpointError) as error:
            action(path)
        errors.add(str(error.value))
    assert not checkpoint.net.w.any()
    (message,) = errors
    return message


CHANGES: dict[str, tuple[Change, str]] = {
    "no nodes": (lambda document: document.update(nodes=[]), "no list of nodes"),
    "no list": (lambda document: document.update(nodes={"0": {}}), "no list of nodes"),
    "a node that is a number": (lambda document: document["nodes"].append(7), "node 5"),
    "an edge to nowhere": (lambda document: document["nodes"][0]["edges"].update(x=99), "99 is not the number"),
    "an edge backwards": (lambda document: document["nodes"][0]["edges"].update(x=-1), "-1"),
    "an edge to true": (lambda document: document["nodes"][0]["edges"].update(x=True), "True"),
    "an edge to text": (lambda document: document["nodes"][0]["edges"].update(x="1"), "'1'"),
    "edges that are a list": (lambda document: document["nodes"][0].update(edges=[1]), "node 0"),
    "the name of an edge is a path": (lambda document: document["nodes"][0]["edges"].update({"a.b": 1}), "a.b"),
    "the name of an edge leaves the folder": (lambda document: document["nodes"][0]["edges"].update({"../x": 1}), "x"),
    "a value that there is not": (lambda document: document["nodes"][3].update(value="net.z"), "net.z"),
    "a value that is a number": (lambda document: document["nodes"][3].update(value=3), "value 3"),
    "a value of two nodes": (
        lambda document: document["nodes"][3].update(value=document["nodes"][4]["value"]),
        "another node",
    ),
    "a value and edges": (lambda document: document["nodes"][3].update(edges={"x": 1}), "both"),
    "a root with a value": (
        lambda document: document["nodes"][0].update(edges={}, value="n") or document["nodes"][2].pop("value"),
        "root",
    ),
    "slots that are none": (lambda document: document["nodes"][1].update(slots=[[1, 2]]), "node 1"),
    "slots without a parameter": (lambda document: document["nodes"][1].update(slots=[[77, "m", 2]]), "77"),
    "slots without a name": (lambda document: document["nodes"][1].update(slots=[[3, 5, 4]]), "5 is not the name"),
    "groups that are none": (lambda document: document["nodes"][1].update(groups=[3]), "node 1"),
    "a type that is a number": (lambda document: document["nodes"][1].update(type=3), "type 3"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=list(CHANGES))
def test_invalid_documents_are_refused(forge: Callable[[Change], str], change: Change, message: str) -> None:
    found = look(forge(change))
    assert re.search(message, found), found


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff" * 10], ids=["empty", "{}", "deep", "binary"])
def test_what_is_no_document_is_refused(forge: Callable[[Change], str], stored: Any, content: bytes) -> None:
    path = forge(lambda document: None)
    stored(path).reseal("graph.json", content)
    with pytest.raises((hf.DamagedCheckpointError, hf.errors.FormatVersionError)):
        graph.Checkpoint(n=0).read(path)
    assert hf.load(path, select="n") == {"n": 1}  # the values need no graph


def test_a_missing_document_is_damage(forge: Callable[[Change], str], stored: Any) -> None:
    path = forge(lambda document: None)
    stored(path).remove("state/graph.json")
    assert "graph.json is missing" in look(path)
    assert not hf.verify(path).ok


def test_cycles_and_long_chains_are_fine(forge: Callable[[Change], str]) -> None:
    def change(document: Document) -> None:
        nodes = document["nodes"]
        first = len(nodes)
        nodes.extend({"edges": {"next": first + number + 1, "up": 0}} for number in range(10_000))
        nodes.append({"edges": {"next": first, "self": len(nodes)}})
        nodes[0]["edges"]["chain"] = first

    path, checkpoint = forge(change), blank()
    checkpoint.read(path).assert_consumed()
    assert checkpoint.net.w.all()
    reader = graph.load_checkpoint(path)
    assert reader.graph.same("chain/next/next/up", "chain/up")


def test_slots_of_what_is_no_optimizer_wait(forge: Callable[[Change], str]) -> None:
    def change(document: Document) -> None:
        nodes = document["nodes"]
        del nodes[1]["edges"]["v"]
        nodes[1]["slots"] = [[3, "m", 4], [3, "m", 4], [1, "loop", 1]]

    path = forge(change)
    status = blank().read(path)
    assert status.report.pending == ("net/slots/net/w/m",)
    assert status.report.missing == ("net/v",)
    assert graph.load_checkpoint(path).get_tensor("net/slots/net/w/m").tolist() == [1, 1, 1]
    status.expect_partial()
