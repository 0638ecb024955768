"""Trees as JSON: what a selection leaves, what is stored once, and forged documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.errors import DamagedCheckpointError, TreeMismatchError
from holdfast.engine.pytree import choose, flatten, from_document, leaves_at, to_document

PATTERNS = st.lists(st.sampled_from(["**", "*", "?", "a", "b*", "[ab]", "a.b", "b", "0"]), min_size=1, max_size=3)


KEYS = st.sampled_from(["a", "b", "ab", "a.b", "b.0", "0", 0, 1, ("a", 1)])
TREES = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def test_selecting_leaves_out_what_is_empty_beside_a_leaf_that_goes() -> None:
    tree = {"a": [(), {"b": 1}, {"c": {}}], "d": {"e": 2}, "f": []}
    _, _, containers = from_document(to_document(flatten(tree).structure, [{"kind": "int"}] * 2))
    assert containers.select([True, True]).build([1, 2]) == tree
    assert containers.select([True, False]).build([1]) == {"a": [(), {"b": 1}, {"c": {}}]}
    assert containers.select([False, True]).build([2]) == {"d": {"e": 2}}
    assert containers.select([False, False]).build([]) == {}


def test_a_document_of_many_leaves_is_stored_once() -> None:
    jax: dict[str, Any] = {"kind": "jax", "sharding": {"type": "SingleDeviceSharding"}}
    keys: dict[str, Any] = {"kind": "numpy"}
    value: dict[str, Any] = {"kind": "int", "value": "12345678901234567890"}
    said = [jax, dict(jax), keys, value, value, jax, keys, jax]
    flat = flatten(list(range(len(said))))
    document = json.loads(json.dumps(to_document(flat.structure, said)))
    assert document["leaves"] == [0, 0, 1, value, value, 0, 1, 0]
    assert document["facts"] == [jax, keys]
    assert from_document(document)[1] == said
    different = [{"kind": "jax", "number": number} for number in range(8)]
    assert to_document(flat.structure, different)["leaves"] == different


LEAF = {"kind": "none"}


def nested(levels: int) -> Any:
    node: Any = None
    for _ in range(levels):
        node = {"type": "list", "children": [node]}
    return node


def keyed(*keys: Any) -> Any:
    """A document of a dictionary with these keys."""
    return {"tree": {"type": "dict", "keys": [*keys], "children": [None] * len(keys)}, "leaves": [LEAF] * len(keys)}


LEAVES: list[Any] = [[], {}, [LEAF, LEAF], [None], [{}], [{"kind": 1}], [0]]
FACTS: list[Any] = [{}, [None], [{}], [{"kind": "set", "value": []}], [{"kind": "bytes", "base64": ""}]]
NODES: list[Any] = [
    *([], {}, {"type": "list"}, {"type": "list", "children": {}}, {"type": "list", "class": 5, "children": []}),
    *({"type": "os.system", "children": []}, {"type": ["list"], "children": []}),
]
NODES_OF_A_LEAF: list[Any] = [
    *(5, "dict", {"type": "list", "children": [1]}, nested(300), {"type": "dict", "children": [None]}),
    *({"type": "dict", "keys": "a", "children": [None]}, {"type": "dict", "keys": [], "children": [None]}),
]
FORGED: list[Any] = [
    *({}, {"tree": None}, {"leaves": []}),
    *({"tree": None, "leaves": leaves} for leaves in LEAVES),
    *({"tree": None, "leaves": [0], "facts": facts} for facts in FACTS),
    *({"tree": None, "leaves": leaves, "facts": [LEAF]} for leaves in ([1], [-1])),
    {"tree": None, "leaves": [True], "facts": [LEAF, LEAF]},
    *({"tree": node, "leaves": []} for node in NODES),
    *({"tree": node, "leaves": [LEAF]} for node in NODES_OF_A_LEAF),
    *map(keyed, (None, 1.5, [1.5], 1 << 64, "a/b", "..")),
    *(keyed(*keys) for keys in (("a", "a"), ("a", "%61"), ("1", 1), (True, 1))),
]


@pytest.mark.parametrize("document", FORGED, ids=lambda document: json.dumps(document)[:60])
def test_a_forged_document_is_damage(document: Any) -> None:
    with pytest.raises(DamagedCheckpointError):
        from_document(document)


def test_a_factory_that_is_not_plain_is_never_looked_up() -> None:
    document = {"type": "default_dict", "class": "os.system", "keys": [], "children": []}
    assert from_document({"tree": document, "leaves": []})[2].build([]).default_factory is None


@settings(max_examples=100)
@given(tree=TREES, patterns=st.lists(PATTERNS.map("/".join), min_size=1, max_size=3))
def test_looking_leaves_up_and_reading_all_agree(tree: Any, patterns: list[str]) -> None:
    flat = flatten(tree)
    document = to_document(flat.structure, [{"kind": "none", "value": number} for number in range(len(flat.names))])
    names, leaves, containers = from_document(document)
    try:
        flags = choose(names, patterns)
    except TreeMismatchError:
        with pytest.raises(TreeMismatchError):
            leaves_at(document, patterns)
        return
    chosen, numbers = leaves_at(document, patterns)
    assert numbers == [number for number, flag in enumerate(flags) if flag]
    some, details, kept = from_document(json.loads(json.dumps(chosen)))
    assert some == [names[number] for number in numbers]
    assert details == [leaves[number] for number in numbers]
    assert kept.build(numbers) == containers.select(flags).build(numbers)


def test_containers_with_equal_keys_are_apart_and_keep_the_types_of_the_keys() -> None:
    tree: list[Any] = [{1: 0}, {True: 0}, {"1": 0}, {"a": 0, "b": 0}, {"a": 0, "b": 0}, {"a": 0, 1: 0}]
    flat = flatten(tree)
    document = json.loads(json.dumps(to_document(flat.structure, [{"kind": "int"}] * len(flat.names))))
    names, _, containers = from_document(document)
    built = containers.build([0] * len(names))
    assert names == flat.names
    assert [[(type(key), key) for key in one] for one in built] == [[(type(key), key) for key in one] for one in tree]
    del built[3]["a"]
    assert built[4] == {"a": 0, "b": 0} == containers.build([0] * len(names))[3]
