"""Loading a part of a checkpoint by the paths of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.equality import assert_same
from tests.ids import plain_id

import holdfast as hf

TREE = {
    "params": {
        "Dense_0": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)},
        "Dense_1": {"kernel": np.full((3, 1), 2.0), "bias": np.zeros(1)},
        "scale": np.float32(3),
    },
    "opt": [{"mu": {"kernel": 1}}, (), {"nu": (2, 3)}],
    "a.b": {"c/d": 1, "e%f": 2},
    "step": 7,
    "empty": {},
}
ALL = [
    "params/Dense_0/kernel",
    "params/Dense_0/bias",
    "params/Dense_1/kernel",
    "params/Dense_1/bias",
    "params/scale",
    "opt/0/mu/kernel",
    "opt/2/nu/0",
    "opt/2/nu/1",
    "a.b/c%2Fd",
    "a.b/e%25f",
    "step",
]


@pytest.fixture
def saved(place: str) -> str:
    hf.save(place, TREE)
    return place


def that(test: Callable[[str], bool]) -> list[str]:
    return [path for path in ALL if test(path)]


KERNELS, BIASES = ["params/Dense_1/kernel", "params/Dense_1/bias"], ["params/Dense_0/bias", "params/Dense_1/bias"]
PATTERNS: dict[str, tuple[Any, list[str]]] = {
    "everything": ("**", ALL),
    "top_level": ("*", ["step"]),
    "below": ("params/**", that(lambda path: path.startswith("params"))),
    "a_leaf_is_below_itself": ("step/**", ["step"]),
    "at_any_depth": ("**/kernel", that(lambda path: path.endswith("kernel"))),
    "in_the_middle": ("params/**/bias", BIASES),
    "no_keys_in_the_middle": ("params/**/scale", ["params/scale"]),
    "within_a_key": ("params/Dense_*/bias", BIASES),
    "one_character": ("params/Dense_?/bias", BIASES),
    "some_characters": ("params/Dense_[1-9]/*", KERNELS),
    "not_some_characters": ("params/Dense_[!0]/*", KERNELS),
    "stars_stay_in_a_key": ("params/*", ["params/scale"]),
    "one_key_each": ("*/*/*", that(lambda path: path.count("/") == 2 or path.startswith("a.b"))),
    "indices": ("opt/2/**", ["opt/2/nu/0", "opt/2/nu/1"]),
    "a_key_with_dots_is_one_key": ("a.b/*", ["a.b/c%2Fd", "a.b/e%25f"]),
    "and_the_keys_between_its_dots": ("a/b/*", ["a.b/c%2Fd", "a.b/e%25f"]),
    "below_the_first_of_them": ("a/**", ["a.b/c%2Fd", "a.b/e%25f"]),
    "escaped": ("a.b/c%2Fd", ["a.b/c%2Fd"]),
    "several": (["step", "**/nu/1"], ["opt/2/nu/1", "step"]),
    "overlapping": (["params/**", "**/bias"], that(lambda path: path.startswith("params"))),
    "a_tuple": (("step",), ["step"]),
}


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(pattern: Any, expected: list[str], saved: str, tmp_path: Path) -> None:
    hf.save(tmp_path / "found", hf.load(saved, select=pattern))
    assert [leaf.path for leaf in hf.describe(tmp_path / "found")] == expected


def test_patterns_cross_the_dots_of_a_state_dict(tmp_path: Path) -> None:
    """As torch.save and Lightning write it, or a module's state dict saved with hf.save."""
    block = {"attention.lora_A.weight": torch.ones(2), "attention.weight": torch.zeros(3), "norm.bias": torch.ones(1)}
    model = {f"encoder.layer.{number}.{name}": value for number in range(2) for name, value in block.items()}
    torch.save({"state_dict": model, "epoch": 3}, tmp_path / "m.pt")
    hf.save(tmp_path / "ours", {"state_dict": model, "epoch": 3})

    def names(select: Any) -> list[str]:
        (found, again) = (hf.load(tmp_path / place, select=select)["state_dict"] for place in ("m.pt", "ours"))
        assert list(found) == list(again)
        return [name.removeprefix("encoder.layer.") for name in found]

    every = [name.removeprefix("encoder.layer.") for name in model]
    assert names("state_dict/encoder/**") == names("state_dict/*") == names("**/layer/**") == every
    assert names("state_dict/encoder/layer/1/**") == names("state_dict/encoder.layer.1.*") == every[3:]
    assert names("**/weight") == [name for name in every if name.endswith("weight")]
    assert names(["**/lora_A/**", "**/norm/bias"]) == [name for name in every if "lora" in name or "norm" in name]
    with pytest.raises(hf.TreeMismatchError, match=r"did you mean 'state_dict/encoder\.layer\.0\.norm\.bias'\?"):
        hf.load(tmp_path / "m.pt", select="state_dict/encoder.layer.0.nrm.bias")

    hf.export_checkpoint(tmp_path / "m.pt", tmp_path / "lora.safetensors", "safetensors", select="**/lora_A/*")
    assert sorted(safetensors.torch.load_file(tmp_path / "lora.safetensors")) == [
        f"state_dict.encoder.layer.{number}.attention.lora_A.weight" for number in range(2)
    ]


# "?" must not stand for the "/" between keys, nor "." for anything; a path is matched as a whole, and has dots, not
# their escapes.
@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("params", "params/**"),
        ("Dense_0/*", "**/Dense_0/*"),
        ("Dense_0", "**/Dense_0/**"),
        ("parms/**", "params/**"),
        ("params/Dense_2/**", "params/Dense_1/**"),
        ("stpe", "step"),
        *((pattern, None) for pattern in ("nothing", "para?/**", "params?scale", "a?b", "ste", "*kernel", "")),
        *((pattern, None) for pattern in ("opt/[0-9]mu/*", "a%2Eb/c%2Fd", "a%2Eb/*")),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_and_says_what_would(
    pattern: str, near: str | None, saved: str
) -> None:
    with pytest.raises(hf.TreeMismatchError) as raised:
        hf.load(saved, select=["step", pattern])
    assert f"select={pattern!r} matches no leaf; the checkpoint has 'params/Dense_0/kernel'" in str(raised.value)
    if near is not None:
        assert str(raised.value).endswith(f"; did you mean {near!r}?")
        assert hf.load(saved, select=near)


@pytest.mark.parametrize("select", [5, [], ["step", 5], b"step", {}, {1: ...}], ids=plain_id)
def test_invalid_patterns(select: Any, saved: str) -> None:
    with pytest.raises(hf.errors.OptionError, match="must be a pattern of paths such as"):
        hf.load(saved, select=select)


def test_containers_that_have_nothing_left_are_left_out(saved: str) -> None:
    assert_same(hf.load(saved, select="**"), TREE)
    assert_same(hf.load(saved, select="opt/**"), {"opt": TREE["opt"]})
    assert_same(
        hf.load(saved, select=["opt/2/nu/1", "params/scale"]),
        {"params": {"scale": np.float32(3)}, "opt": {2: {"nu": {1: 3}}}},
    )


def test_a_template_of_the_selected_leaves(saved: str) -> None:
    dense = {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}
    found = hf.load(saved, select="params/Dense_0/*", like={"params": {"Dense_0": dense}})
    assert_same(found, {"params": {"Dense_0": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}}})
    del dense["bias"]
    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(saved, select="params/Dense_0/*", like={"params": {"Dense_0": dense}, "step": 0})
    assert caught.value.differences == (
        "step: expected int (template), not selected",
        "params/Dense_0/bias: not in the template, found float64[3] (checkpoint)",
    )


def test_only_selected_leaves_are_read(place: str, stored: Callable[[str], Any]) -> None:
    tree = {"a": np.arange(3.0), "b": np.arange(100_000.0), "c": np.arange(4.0)}
    hf.save(place, tree)
    files = stored(place)
    content = bytearray(files.read()["state/d/0"])
    content[4096 : len(content) - 4096] = bytes(len(content) - 8192)
    files.write("state/d/0", bytes(content))
    with pytest.raises(hf.DamagedCheckpointError, match=r"(?s)in 1 of its leaves.*b: "):
        hf.load(place)
    assert_same(hf.load(place, select=["a", "c"]), {"a": tree["a"], "c": tree["c"]})


def test_few_of_many_leaves_need_a_small_part_of_the_index(tmp_path: Path) -> None:
    tree = {f"layer{number:05d}": {"w": np.full(3, number), "b": np.asarray(number)} for number in range(10_000)}
    hf.save(tmp_path / "saved", tree)
    index = (tmp_path / "saved/state/d/index").stat().st_size
    few = {"layer00001": ["b"], "layer04002": ["w"], "layer09999": ["w"]}
    for select, expected in [
        ("layer00007/w", {"layer00007": ["w"]}),
        ("layer00007/*", {"layer00007": ["w", "b"]}),
        ([f"{layer}/{names[0]}" for layer, names in few.items()], few),
    ]:
        wanted = {layer: {name: tree[layer][name] for name in names} for layer, names in expected.items()}
        assert_same(hf.load(tmp_path / "saved", select=select), wanted)
        opened = hf.open(tmp_path / "saved", select=select)
        read = {layer: {name: np.asarray(opened.tree[layer][name]) for name in expected[layer]} for layer in expected}
        assert_same(read, wanted)
        assert opened.bytes_read - (tmp_path / "saved/state/tree.json").stat().st_size < index / 4
