"""Templates: what they decide, and the errors if they do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf

torch: Any = pytest.importorskip("torch")
jnp: Any = pytest.importorskip("jax.numpy")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any
    y: Any


def test_a_mismatch_lists_every_leaf_that_differs(place: str) -> None:
    saved = {
        "same": np.ones(3),
        "shape": np.ones((3, 4), np.float32),
        "dtype": np.ones(3, np.float32),
        "gone": 1,
        "layers": [{"w": np.ones(2)}, {"w": "text"}],
        "number": 1,
        "key.with/both": b"x",
    }
    template = {
        "same": np.ones(3),
        "shape": np.ones((3, 5), np.float32),
        "dtype": np.ones(3, np.float16),
        "layers": [{"w": np.ones(2)}, {"w": np.ones(2)}],
        "number": 1.0,
        "key.with/both": "x",
        "new": {"a": None},
    }
    hf.save(place, saved)
    with pytest.raises(hf.TreeMismatchError, match="differ in 7 of 9 leaves") as caught:
        hf.load(place, like=template)
    assert caught.value.differences == (
        "shape: expected float32[3, 5] (template), found float32[3, 4] (checkpoint)",
        "dtype: expected float16[3] (template), found float32[3] (checkpoint)",
        "layers/1/w: expected float64[2] (template), found str (checkpoint)",
        "number: expected float (template), found int (checkpoint)",
        "key.with%2Fboth: expected str (template), found bytes (checkpoint)",
        "new/a: expected None (template), not in the checkpoint",
        "gone: not in the template, found int (checkpoint)",
    )
    assert place in str(caught.value)
    for line in caught.value.differences:
        assert line in str(caught.value)


def test_a_bare_leaf_has_a_name_in_messages(place: str) -> None:
    hf.save(place, np.ones(3))
    with pytest.raises(hf.TreeMismatchError, match=r"\(root\): expected float64\[4\] \(template\), found float64\[3\]"):
        hf.load(place, like=np.ones(4))
    with pytest.raises(hf.TreeMismatchError, match=r"\(root\): not in the template"):
        hf.load(place, like={})
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"(?s)template.*a: is of type slice.*b: .*function"):
        hf.load(place, like={"a": slice(3), "b": lambda: 1})


DIFFER = object()
# Saved value, template, result or DIFFER.
PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "tuple_for_list": ([1, 2], (0, 0), (1, 2)),
    "namedtuple_for_dict": ({"x": 1, "y": 2}, Pair(0, 0), Pair(1, 2)),
    "dataclass_for_namedtuple": (Pair(1, [2]), Record(0, [0]), Record(1, [2])),
    "dict_for_dataclass": (Record(1, 2), {"y": 0, "x": 0}, {"y": 2, "x": 1}),
    "list_for_int_keys": ({0: "a", 1: "b"}, ["", ""], ["a", "b"]),
    "order_of_the_template": ({"a": 1, "b": 2}, {"b": 0, "a": 0}, {"b": 2, "a": 1}),
    "as_it_was": ({"a": np.ones(2), "b": "x"}, {"a": ..., "b": ...}, {"a": np.ones(2), "b": "x"}),
    "int_for_array": (np.asarray(7, np.int32), 0, 7),
    "array_for_int": (7, np.asarray(0, np.int16), np.asarray(7, np.int16)),
    "array_too_narrow_for_int": (70_000, np.asarray(0, np.int16), DIFFER),
    "unsigned_for_negative": (-1, np.asarray(0, np.uint8), DIFFER),
    "narrow_float": (0.5, np.float16(0), np.float16(0.5)),
    "too_narrow_float": (0.1, np.float16(0), DIFFER),
    "nan": (float("nan"), np.asarray(0, np.float32), np.asarray(np.nan, np.float32)),
    "int_for_bool": (True, 0, DIFFER),
    "bool_for_array": (np.asarray(True), False, True),
    "float_for_int": (1, 0.0, DIFFER),
    "int_for_float": (1.0, 0, DIFFER),
    "scalar_for_array": (np.asarray(2.5), np.float64(0), np.float64(2.5)),
    "array_for_scalar": (np.float32(2.5), np.asarray(0, np.float32), np.asarray(2.5, np.float32)),
    "other_byte_order": (np.arange(3, dtype=">f4"), np.zeros(3, np.float32), np.arange(3, dtype=np.float32)),
    "signed_for_unsigned": (np.arange(3, dtype=np.uint8), np.zeros(3, np.int8), DIFFER),
    "one_axis_more": (np.ones(3), np.ones((1, 3)), DIFFER),
    "one_for_none": (np.ones(()), np.ones(1), DIFFER),
    "time_units": (np.zeros(1, "M8[s]"), np.zeros(1, "M8[ms]"), DIFFER),
    "none_for_zero": (0, None, DIFFER),
    "none": (None, None, None),
    "text_for_bytes": (b"a", "a", DIFFER),
    "set_for_list": ({1, 2}, [1, 2], DIFFER),
    "big_int_for_int": (1 << 80, 0, 1 << 80),
    "big_int_for_array": (1 << 80, np.asarray(0), DIFFER),
    "fewer": ([1, 2], [1], DIFFER),
    "empty_containers_do_not_matter": ({"a": {}, "b": 1}, {"b": 0, "c": []}, {"b": 1, "c": []}),
}


EXACT = np.linspace(0, 1, 7, dtype=np.float32)
# The same for ``cast=True``; without it, none of these templates fits.
CASTS: dict[str, tuple[Any, Any, Any]] = {
    "cast_narrower": (np.array([0.1, np.nan]), np.zeros(2, np.float16), np.array([0.1, np.nan], np.float16)),
    "cast_wider": (np.ones(2, np.float32), np.zeros(2), np.ones(2)),
    "cast_float_that_overflows": (np.array([1e30]), np.zeros(1, np.float16), DIFFER),
    "cast_number": (0.1, np.asarray(0, np.float16), np.asarray(0.1, np.float16)),
    "cast_integer": (np.array([-7, 100]), np.zeros(2, np.int8), np.array([-7, 100], np.int8)),
    "cast_integer_that_does_not_fit": (np.array([7, 200]), np.zeros(2, np.int8), DIFFER),
    "cast_unsigned": (np.array([7]), np.zeros(1, np.uint8), np.array([7], np.uint8)),
    "cast_negative": (np.array([-7]), np.zeros(1, np.uint8), DIFFER),
    "cast_complex": (np.array([1 + 2j]), np.zeros(1, np.complex64), np.array([1 + 2j], np.complex64)),
    "cast_complex_for_float": (np.ones(1), np.zeros(1, np.complex64), DIFFER),
    "cast_float_for_integer": (np.ones(1, np.int64), np.zeros(1), DIFFER),
    "cast_integer_for_float": (np.ones(1), np.zeros(1, np.int64), DIFFER),
    "cast_bool": (np.ones(1, bool), np.zeros(1, np.int8), DIFFER),
    "cast_shape": (np.ones(3), np.zeros(4, np.float32), DIFFER),
    "cast_text": (np.array(["a"]), np.array(["ab"]), DIFFER),
    "cast_torch": (EXACT, torch.zeros(7, dtype=torch.bfloat16), torch.from_numpy(EXACT).to(torch.bfloat16)),
    "cast_jax": (EXACT, jnp.zeros(7, jnp.bfloat16), jnp.asarray(EXACT).astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", [*PAIRS, *CASTS])
def test_what_fits_a_template(name: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    saved, template, expected = (PAIRS | CASTS)[name]
    hf.save(place, {"x": saved, "same": np.ones(2)})
    like, cast = {"x": template, "same": np.zeros(2)}, name in CASTS
    for casts in {False, cast}:
        if expected is DIFFER or casts != cast:
            with pytest.raises(hf.TreeMismatchError) as caught:
                hf.load(place, like=like, cast=casts)
            assert caught.value.differences
            assert all(line.startswith("x") for line in caught.value.differences)
    if expected is DIFFER:
        return
    caplog.set_level("INFO", "holdfast")
    assert_same(hf.load(place, like=like, cast=cast), {"x": expected, "same": np.ones(2)})
    assert not like["same"].any(), "the template is left as it is"
    to = "bfloat16" if name in ("cast_torch", "cast_jax") else np.asarray(template).dtype if cast else ""
    listed = f"x from {np.asarray(saved).dtype} to {to}" if cast else ""
    assert any(listed in message and "same" not in message for message in caplog.messages) or not cast


def test_a_subset_is_what_the_template_has(place: str) -> None:
    saved = {"a": {"w": np.ones(3), "v": 2}, "b": [1, 2], "c": "text", "key.with.dots": 3}
    hf.save(place, saved)
    for part in ({"a": {"v": 2}}, {"b": [1], "c": "text"}, {"key": {"with": {"dots": 3}}}, saved, {}):
        assert_same(hf.load(place, like=part, subset=True), part)
    with pytest.raises(hf.TreeMismatchError) as caught:
        hf.load(place, like={"a": {"w": np.ones(4)}, "d": 1}, subset=True)
    assert [line.partition(":")[0] for line in caught.value.differences] == ["a/w", "d"]
    with pytest.raises(hf.errors.OptionError, match="like="):
        hf.load(place, like=None, subset=True)
    with pytest.raises(hf.errors.OptionError, match="like="):
        hf.load(place, like=None, cast=True)


def test_items_of_a_checkpoint(place: str) -> None:
    items = {"state": hf.PyTreeCheckpointer(), "config": hf.Checkpointer(hf.JsonCheckpointHandler())}
    with hf.CheckpointManager(place, items) as manager:
        manager.save(3, {"state": {"w": np.ones(2)}, "config": {"lr": 0.1}})
        manager.save(4, {"state": {"w": np.zeros(2)}, "config": {"lr": 0.2}})
    assert_same(hf.load(place), {"state": {"w": np.zeros(2)}, "config": {"lr": 0.2}})
    assert_same(hf.load(f"{place}/3", item="state", like={"w": np.ones(2)}), {"w": np.ones(2)})
    assert_same(hf.load(place, item="config"), {"lr": 0.2})
    with pytest.raises(hf.CheckpointNotFoundError, match="no item 'weights'; it has config, state"):
        hf.load(place, item="weights")
    for arguments in ({"like": {"w": np.ones(2)}}, {"select": "w"}):
        with pytest.raises(hf.errors.OptionError, match="name one with item="):
            hf.load(place, **arguments)
    for name in ("missing", "10/state"):
        with pytest.raises(hf.CheckpointNotFoundError, match=f"{place}/{name}"):
            hf.load(f"{place}/{name}")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"something else", "a file in no supported format; checkpoints are directories"),
        (b"", "an empty file"),
        (LFS, "a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>", "an HTML page"),
    ],
)
def test_a_file_is_no_checkpoint(tmp_path: Path, content: bytes, said: str) -> None:
    for name in ("model.ckpt", "model.pt", "model.npz"):
        (tmp_path / name).write_bytes(content)
        for action in (hf.load, hf.describe, hf.verify, lambda path: hf.import_checkpoint(path, tmp_path / "new")):
            with pytest.raises(hf.CheckpointNotFoundError, match=f"this is {said}"):
                action(tmp_path / name)


def test_a_pointer_of_git_lfs_is_named_in_place_of_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LFS)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(hf.DamagedCheckpointError, match="it is a Git LFS pointer instead of the file"):
            hf.load(path)


def test_a_state_dict_takes_the_weights_of_a_run(tmp_path: Path) -> None:
    """The callback saves nested containers; the keys of a state dict have dots."""
    models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        state, step = checkpoint.restore_or_initialize({"model": models[0], "rate": 0.1})
        checkpoint.on_step(step + 1, state)

    like = {"model": models[1].state_dict()}
    models[1].load_state_dict(hf.load(tmp_path, item="state", select="model/**", like=like)["model"])

    for before, after in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(before, after)
    with pytest.raises(hf.errors.TreeMismatchError, match=r"model/0\.weight: expected float32\[5, 4\]"):
        hf.load(tmp_path, item="state", like={"model": torch.nn.Sequential(torch.nn.Linear(4, 5)).state_dict()})
