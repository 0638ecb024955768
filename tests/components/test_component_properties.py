"""Everything in a tree of components comes back; everything in a checkpoint is data, or refused."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.equality import assert_same

import holdfast as hf
from holdfast.components import Checkpointable, read_state
from holdfast.engine.format import decode_document, encode_document
from holdfast.integrations.components.constructor_spec import Missing, SpecDecoder, encode_spec
from holdfast.integrations.components.layout import Description
from holdfast.integrations.components.names import Selection, component_path, format_component_path, named_path
from holdfast.integrations.components.permissions import Permissions

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
ARRAYS = npst.arrays(
    st.sampled_from(["<f4", ">f8", "i1", "<u2", "?", "c8", "datetime64[s]", "<U3", "S2"]).map(np.dtype),
    npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | TEXT | st.binary(max_size=5)
KEYS = st.text(st.sampled_from("ab.%/ 0é"), min_size=1, max_size=4) | st.integers(0, 3)


def nested(leaves: Any) -> Any:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
        ),
        max_leaves=5,
    )


STATES = st.dictionaries(st.sampled_from(["first", "second", "third_one"]), nested(PLAIN | ARRAYS), max_size=3)
NAMES = st.sampled_from(["p0", "p1", "state", "a.b", "d", "checkpoint.json", "metadata.json", "x y", "é", "0", "%41"])
TREES = st.recursive(
    st.tuples(STATES, st.just({})),
    lambda inner: st.tuples(STATES, st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


class Box(Checkpointable):
    """Some values, and boxes below it, which may be called as they like."""

    __untracked__ = ("boxes",)

    def __init__(self, values: dict[str, Any], boxes: dict[str, Box]) -> None:
        vars(self).update(copy.deepcopy(values))
        self.boxes = boxes

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return list(self.boxes.items())


def made(tree: Any, *, empty: bool = False) -> Box:
    """Makes boxes; empty ones have values of the same kinds, and others."""
    values, below = tree
    return Box(
        {name: _other(value) if empty else value for name, value in values.items()},
        {name: made(one, empty=empty) for name, one in below.items()},
    )


def _other(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _other(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_other, value))
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    return value if value is None else type(value)()


def plain(box: Box) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values and boxes of a box."""
    own = {name: one for name, one in vars(box).items() if name != "boxes" and not name.startswith("_holdfast")}
    return own, {name: plain(below) for name, below in box.boxes.items()}


@given(tree=TREES, use_msgpack=st.booleans())
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_trees_come_back(tree: Any, use_msgpack: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for place in (directory, f"memory://tests{directory}"):
            saved, fresh = made(tree), made(tree, empty=True)
            path = saved.save_to_path(f"{place}/x", use_msgpack=use_msgpack)
            assert fresh.restore_from_path(path, strict=True).complete
            assert_same(plain(fresh), plain(saved))
            assert_same(plain(Box.from_checkpoint(path)), plain(saved))
            assert hf.verify(path).ok
            for name, below in tree[1].items():
                part = made(below, empty=True)
                folder = hf.storage.as_location(path) / "/".join(named_path(name, saved))
                part.restore_from_path(folder, strict=True)
                assert_same(plain(part), plain(saved.boxes[name]))
                assert_same(read_state(folder), read_state(path)[name])
            hf.storage.as_location(path).remove_tree()


# ---- constructor specs


def component(_: Any) -> Any:
    return None


@given(args=st.lists(nested(PLAIN | ARRAYS | st.frozensets(st.integers(), max_size=3)), max_size=3))
@settings(max_examples=60)
def test_specs_come_back(args: list[Any]) -> None:
    spec, problems = encode_spec(tuple(args), {}, component, component)
    read = json.loads(json.dumps(spec))["args"]
    decoder = SpecDecoder(Permissions(), component, component, "here")
    found = [decoder.decode(value) for value in read]
    missing = [isinstance(value, Missing) for value in found]
    assert sum(missing) == len(problems)
    for value, again, gone in zip(args, found, missing, strict=True):
        if not gone:
            assert repr(again) == repr(value) or again == value  # the sign of NaN is lost; sets have no order


_KINDS = """
float complex bytes tuple set frozenset dict range slice path namespace component recipe enum partial name object dtype
array key torch.dtype device jax.dtype nnx.Rngs missing nothing
"""
_WORDS = "numpy torch jax float32 bfloat16 os:system a.b:C cpu cuda:-1 inf AAAA threefry2x32 float Tensor _C"
KINDS, WORDS = _KINDS.split(), st.sampled_from(_WORDS.split())
HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | TEXT,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.builds(lambda kind, content: {kind: content}, st.sampled_from(KINDS), inner)
        | st.builds(lambda kind, content: {kind: content}, st.sampled_from(KINDS), st.lists(inner, max_size=5))
        | st.dictionaries(TEXT, inner, max_size=2)
    ),
    max_leaves=8,
)


@given(value=HOSTILE)
@example({"key": ["threefry2x32", "uint32", [2], "AAAAAAAAAAA="]})
@example({"jax.dtype": "int4"})
@example({"device": "cuda:99999999999999999999"})
def test_hostile_specs_are_data_or_refused(value: Any) -> None:
    decoder = SpecDecoder(Permissions(base=Checkpointable), lambda _: None, lambda _: None, "here")
    with contextlib.suppress(
        hf.DamagedCheckpointError, hf.errors.NotAllowedError, hf.errors.OptionError, hf.errors.FormatVersionError
    ):
        decoder.decode(json.loads(json.dumps(value)))


@given(
    changes=st.dictionaries(
        st.sampled_from(["layout", "class", "constructor", "path", "components", "same", "metadata", "no_constructor"]),
        HOSTILE,
        min_size=1,
    )
)
def test_hostile_descriptions(changes: dict[str, Any]) -> None:
    description = Description(type="a:B", constructor={"args": [], "kwargs": {}})
    body = decode_document(description.encode(), "component", source="")
    with contextlib.suppress(hf.DamagedCheckpointError, hf.errors.FormatVersionError):
        Description.decode(encode_document("component", {**body, **changes}), source="here")


@given(
    text=st.text(st.sampled_from("ab./%*?[]F2 é"), max_size=8),
    known=st.lists(st.sampled_from(["a", "b", "a.b", "é"]), unique=True),
)
def test_names_that_people_write(text: str, known: list[str]) -> None:
    paths = [(), *(named_path(name, None) for name in known)]
    with contextlib.suppress(hf.errors.OptionError):
        assert component_path(format_component_path(component_path(text))) == component_path(text)
    with contextlib.suppress(hf.errors.OptionError, hf.TreeMismatchError):
        chosen = Selection(text, None, {path: path for path in paths}, "here")
        assert any(chosen.has(path) for path in paths)
