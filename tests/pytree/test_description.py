"""Trees with all kinds of leaves, and trees without any framework."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import ArrayLeaf, describe, flatten
from holdfast.engine.pytree.flattening import collection_paused


def test_every_leaf_that_cannot_be_saved_is_named_at_once() -> None:
    tree = {
        "fine": np.ones(2),
        "a": {"b": object()},
        "c": [np.zeros(2, object), 1, lambda: None],
        "d": sys,
        "e": {(1,)},
        "f": iter([]),
    }
    flat = flatten(tree)
    with pytest.raises(UnsupportedLeafError) as caught:
        describe(flat.names, flat.values)
    lines = str(caught.value).splitlines()
    assert lines[0] == "these leaves cannot be saved, and nothing was written:"
    assert [text.split(":")[0].strip() for text in lines[1:]] == ["a/b", "c/0", "c/2", "d", "e", "f"]
    assert "is of type function, which is code; leave it out of the tree" in lines[3]


def test_ten_thousand_leaves_are_views_with_shared_details() -> None:
    tree = {f"leaf_{index}": np.full(4, index) for index in range(10_000)}
    flat = flatten(tree)
    leaves = describe(flat.names, flat.values)
    assert flat.names == list(tree)
    assert len({id(leaf.details) for leaf in leaves}) == 1
    for leaf, array in zip(leaves, tree.values(), strict=True):
        assert isinstance(leaf, ArrayLeaf)
        assert leaf.pieces[0].array is array


def test_a_tree_of_all_kinds_comes_back_through_one_template(save: Any) -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    tree = {
        "jax": [jax.numpy.ones((2, 2)), jax.random.key(3), jax.numpy.zeros((), jax.numpy.bfloat16)],
        "torch": (torch.arange(3), torch.ones(2, requires_grad=True)),
        "numpy": {1: np.arange(3, dtype=">f8"), "1": np.float16(2), -1: np.zeros((0, 3), "U4")},
        "python": [True, 10**30, "\ud800", b"\x00", None, float("-inf"), -0.0, 1j, {1, "a"}],
        "empty": [{}, [], ()],
    }
    again = save(tree).load(like=tree)
    flat, flat_again = flatten(tree), flatten(again)
    assert flat.names == flat_again.names
    for name, one, other in zip(flat.names, flat.values, flat_again.values, strict=True):
        assert type(one) is type(other), name
        assert repr(one) == repr(other), name
    assert again["empty"] == tree["empty"]


def test_collection_is_paused_until_the_last_block_ends() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_framework_is_needed_or_loaded() -> None:
    program = (
        "import sys, numpy as np\n"
        "from holdfast.engine.pytree import *\n"
        "flat = flatten({'a': [np.ones(2), 1, None, {}], 'b': object()})\n"
        "assert flat.names == ['a.0', 'a.1', 'a.2', 'b']\n"
        "leaves = describe(flat.names[:3], flat.values[:3])\n"
        "targets = describe_template(flat.names[:3], flat.values[:3])\n"
        "saved = [Saved(leaf.details, getattr(leaf, 'dtype', None), getattr(leaf, 'shape', None)) for leaf in leaves]\n"
        "arrays = [leaf.pieces[0].array if isinstance(leaf, ArrayLeaf) else None for leaf in leaves]\n"
        "assert not any(map(compare, targets, saved))\n"
        "assert materialize(targets, saved, arrays, flat.names[:3])[1:] == [1, None]\n"
        "assert not {'jax', 'torch', 'flax', 'tensorstore'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
