"""Containers of every kind, and generated trees, saved and loaded."""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.storage import as_location


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Layer:
    w: Any
    name: str = "layer"
    cache: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Config(dict[str, Any]):
    note = "of the class"


class Steps(list[Any]):
    pass


class Table(Mapping[str, Any]):
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values_ = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


A = np.arange(3.0)
CONFIG = Config(a=1)
CONFIG.note = "of the instance"
TWICE = [A, A]
DEEP: Any = A
for _ in range(130):
    DEEP = {"k": [DEEP]} if isinstance(DEEP, list) else [DEEP]
# The saved tree, and the result of a load without a template; None if they are equal.
CONTAINERS: dict[str, tuple[Any, Any]] = {
    "dict": ({"b": 1, "a": 2}, None),
    "int_keys": ({3: A, -1: 2, 0: 0}, None),
    "mixed_keys": ({1: "int", "1": "str", "a": {2: A, "2": 3}}, None),
    "bool_keys": ({True: 1, False: 0, "True": 2}, None),
    "tuple_keys": ({("a", "b"): 1, ("a.b", (2, True)): 2, (): 3, "()": 4}, None),
    "odd_keys": ({"": 1, ".": 2, "..": 3, "a.b": 4, "a/b": 5, "%": 6, "a%2Eb": 7, "x__lock": 8, "ü \n": 9}, None),
    "keys_like_others": ({"a": {"b": 1}, "a.b": 2, "a/b": 3, "a%2Eb": 4}, None),
    "surrogates": ({"\ud800": 1, "\udcff\ud800": 2}, None),
    "zarr_keys": ({"c": {"0": A, "c": {"0": A}}, "zarr.json": A, "manifest.ocdbt": 1}, None),
    "long_key": ({"k" * 5000: A}, None),
    "list": ([1, [2, [3]]], None),
    "tuple": ((1, (2,), [(3,)]), None),
    "ordered_dict": (OrderedDict([("b", 1), ("a", 2)]), None),
    "default_dict": (defaultdict(list, {"a": [1]}), None),
    "default_dict_of_code": (defaultdict(lambda: 1, {"a": 1}), defaultdict(None, {"a": 1})),
    "counter": (Counter("abca"), None),
    "empty": ({"d": {}, "l": [], "t": (), "o": OrderedDict(), "c": Counter(), "n": {"m": [{}]}}, None),
    "the_same_in_many_places": ({"a": TWICE, "b": TWICE, "c": A}, None),
    "many_within_each_other": (DEEP, None),
    "only_empty": ({}, None),
    "empty_list": ([], None),
    "namedtuple": (Point(1, Point(2)), {"x": 1, "y": {"x": 2, "y": None}}),
    "dataclass": (Layer(A, cache=[1]), {"w": A, "name": "layer", "cache": [1]}),
    "frozen": (Frozen(Frozen({"a": 1})), {"inner": {"inner": {"a": 1}}}),
    "subclass": (CONFIG, {"a": 1}),
    "list_subclass": (Steps([1, 2]), [1, 2]),
    "mapping": (Table({"b": A, "a": 1}), {"b": A, "a": 1}),
    "proxy": (MappingProxyType({"a": 1}), {"a": 1}),
    "mixture": ([Point({"a": (Frozen(1), None)}, [])], [{"x": {"a": ({"inner": 1}, None)}, "y": []}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, place: str) -> None:
    tree, plain = CONTAINERS[name]
    hf.save(place, tree)
    found = hf.load(place)
    assert_same(found, tree if plain is None else plain)
    again: Any = hf.load(place, like=tree)
    assert_same(again, tree)
    if isinstance(tree, defaultdict):
        assert found.default_factory is (plain or tree).default_factory
        assert again.default_factory is tree.default_factory
    assert getattr(again, "note", None) == getattr(tree, "note", None)
    assert hf.verify(place).ok


KEYS = st.text(max_size=4) | st.sampled_from(["a", "b.c", "", "%2E", "0", "1"]) | st.integers(-3, 3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
)
ARRAYS = hnp.arrays(
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=3) | hnp.byte_string_dtypes(max_len=3),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
TREES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)
LAYOUTS = st.builds(
    hf.Layout,
    chunk_bytes=st.just(4096),
    segment_bytes=st.sampled_from([4096, 10_000]),
    data_file_bytes=st.sampled_from([4096, 20_000]),
)


@settings(deadline=None, max_examples=100)
@given(TREES, LAYOUTS)
def test_any_tree(tree: Any, layout: hf.Layout) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    hf.save(place, tree, layout=layout)
    assert_same(hf.load(place), tree)
    assert_same(hf.load(place, like=tree), tree)
    as_location(place).remove_tree()


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["u1", "f4", "c16", ">i8", "U3", "M8[s]"]),
    hnp.array_shapes(max_dims=4, max_side=40),
    st.integers(0, 1 << 30),
)
def test_any_shape_in_chunks(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    place = f"memory://tests/{uuid.uuid4().hex}"
    random = np.random.default_rng(seed)
    array = random.integers(0, 100, shape).astype(dtype).transpose(random.permutation(len(shape)))
    hf.save(place, [array], layout=hf.Layout(chunk_bytes=4096, segment_bytes=4096, data_file_bytes=65536))
    assert_same(hf.load(place), [np.ascontiguousarray(array)])
    as_location(place).remove_tree()
