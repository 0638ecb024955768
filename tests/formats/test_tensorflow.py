"""Checkpoints of TensorFlow, compared with what TensorFlow itself reads in them (tensorflow/make_fixtures.py).

They are read as trees and through `holdfast.graph`, which knows TensorFlow's names and restores objects.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.documents.examples import Examples
from tests.equality import assert_same

import holdfast as hf
from holdfast import graph

FIXTURES = Path(__file__).parent / "tensorflow"
SEEN: dict[str, Any] = json.loads((FIXTURES / "seen.json").read_text(encoding="utf-8"))
QUANTISED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
OBJECTS = {"string", "variant"}


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A copy of a directory with the checkpoints 3, 4 and 5."""
    return Path(shutil.copytree(FIXTURES / "guide", tmp_path / "guide"))


@pytest.mark.parametrize("prefix", sorted(SEEN))
def test_every_tensor_is_what_tensorflow_reads(prefix: str) -> None:
    expected = SEEN[prefix]["variables"]
    reader = graph.load_checkpoint(FIXTURES / prefix)
    assert reader.get_variable_to_shape_map() == {name: facts["shape"] for name, facts in expected.items()}
    assert {name: str(dtype) for name, dtype in reader.get_variable_to_dtype_map().items()} == {
        name: "object" if facts["dtype"] in OBJECTS else QUANTISED.get(facts["dtype"], facts["dtype"])
        for name, facts in expected.items()
    }
    for name, facts in expected.items():
        assert reader.has_tensor(name)
        found: Any = reader.get_tensor(name)
        if facts["dtype"] == "variant":
            assert all(text.startswith(b"\n\x14tensorflow::Iterator") for text in found.tolist())
        elif facts["dtype"] == "string":
            texts = [found] if isinstance(found, bytes) else found.ravel().tolist()
            assert [text.hex() for text in texts] == facts["bytes"]
        else:
            assert (list(found.shape), found.tobytes().hex()) == (facts["shape"], facts["elements"])


def test_an_index_of_several_blocks() -> None:
    found = hf.load(FIXTURES / "many")
    names = {hashlib.sha1(str(number).encode()).hexdigest() for number in range(5600)}
    assert found.keys() == names
    assert all(value.dtype == np.uint16 and int(value) == int(name[:4], 16) for name, value in found.items())


def test_the_tree_of_a_training_loop() -> None:
    found = hf.load(FIXTURES / "guide" / "ckpt-5")
    assert found.keys() == {"iterator", "net", "optimizer", "save_counter", "step"}
    assert found["net"]["l1"]["_kernel"].shape == (1, 5)
    assert (int(found["step"]), int(found["save_counter"]), int(found["optimizer"]["_iterations"])) == (51, 5, 50)
    states = found["iterator"][".ATTRIBUTES"]["ITERATOR_STATE"]
    assert len(states) == SEEN["guide/ckpt-5"]["variables"]["iterator/.ATTRIBUTES/ITERATOR_STATE"]["shape"][0]
    assert all(isinstance(state, bytes) for state in states)


def test_lists_dictionaries_and_names_that_are_escaped() -> None:
    found = hf.load(FIXTURES / "objects" / "objects-1")
    assert [float(value) for value in found["listed"]] == [1, 2]
    assert "mapped" not in found  # each value is stored once
    assert {key: value.tolist() for key, value in found["odd"].items()} == {
        "a/b": [1, 2],
        "c.d": [3],
        ".ATTRIBUTES": [4],
        "ü": 5,
    }
    assert found["counter"][".ATTRIBUTES"]["py_state"] == b"seven\0"
    assert found["table"][".ATTRIBUTES"]["table-keys"] == [b"b\0", b"a"]  # an array of numpy's would lose the zero


def test_kinds_of_elements() -> None:
    found = hf.load(FIXTURES / "dtypes")
    assert_same(found["bfloat16"], np.array([[1.5, -2.25], [np.inf, 1e-3]], ml_dtypes.bfloat16))
    assert_same(found["int4"], np.array([1, 7, 0, 5, -8], ml_dtypes.int4))
    assert_same(found["half"], np.array([[1.5, -2.25], [np.inf, 1e-3]], np.float16))
    assert_same(found["text"], "größe".encode())
    assert_same(found["texts"], np.array([[b"a", b"bb", b""], [b"x" * 200, b"\0\1", b"\xff"]]))
    assert_same(found["texts_ending_in_zeros"], [b"a\0", b"\0", b"b"])
    assert_same(found["blank_texts"], np.array([b"", b""], "S1"))
    assert_same(found["empty"], np.zeros((0, 3), np.float32))
    assert_same(found["empty_text"], np.zeros(0, "S1"))


def test_names_of_tensorflow_1() -> None:
    found = hf.load(FIXTURES / "names" / "model.ckpt-2")
    assert found.keys() >= {"global_step", "embedding", "embedding/Adam", "beta1_power"}
    assert found["dense"].keys() == {
        f"{name}{slot}" for name in ("kernel", "bias") for slot in ("", "/Adam", "/Adam_1")
    }


@pytest.mark.parametrize("prefix", sorted(SEEN))
def test_imported_checkpoints_hold_the_same(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "ours"
    assert hf.verify(FIXTURES / prefix).ok
    (done,) = hf.import_checkpoint(FIXTURES / prefix, path)
    assert (done.format, done.left_out) == ("TensorFlow", ())
    assert hf.verify(path).ok
    assert_same(hf.load(path), hf.load(FIXTURES / prefix))
    ours, theirs = graph.load_checkpoint(path).graph, graph.load_checkpoint(FIXTURES / prefix).graph
    assert ours.children() == theirs.children()
    if prefix == "slots/model":
        assert ours.slots("momentum") == {"net/l2/kernel": {"momentum": "momentum/slots/net/l2/kernel/momentum"}}
    if prefix == "objects/objects-1":
        second = np.zeros((), np.float32)
        graph.Checkpoint(mapped={"two": second}).read(path).expect_partial()
        assert second == 2


@pytest.mark.parametrize("name", ["ckpt-4", "ckpt-4.index", "ckpt-4.data-00000-of-00001"])
def test_paths_of_one_checkpoint(guide: Path, name: str) -> None:
    assert int(hf.load(guide / name)["step"]) == 41
    assert hf.verify(guide / name).ok


def test_a_directory_of_numbered_checkpoints(guide: Path, tmp_path: Path) -> None:
    steps = hf.list_checkpoints(guide)
    assert [(one.step, one.reason, one.damage) for one in steps] == [
        (step, "written by TensorFlow", None) for step in (3, 4, 5)
    ]
    assert all(one.time is not None and one.time > 1.7e9 and one.bytes > 3000 for one in steps)
    assert len(hf.verify(guide).checkpoints) == 3
    assert {leaf.path: leaf.shape for leaf in hf.describe(guide, step=3)}["net/l1/bias"] == (5,)
    done = hf.import_checkpoint(guide, tmp_path / "ours")
    assert [one.step for one in done] == [3, 4, 5]
    assert int(hf.load(tmp_path / "ours")["step"]) == 51


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (b'model_checkpoint_path: "ckpt-4"\n', 41),
        (b'model_checkpoint_path: "/elsewhere/run/ckpt-3"\n', 31),
        (b'model_checkpoint_path: "../../../etc/ckpt-3"\n', 31),
        (b"model_checkpoint_path: 'ckpt\\0554'\n", 41),
        (b'model_checkpoint_path: "gone-9"\n', 51),
        (b"", 51),
        (b"\xff\0 no text", 51),
        (None, 51),
    ],
)
def test_the_newest_is_the_one_that_tensorflow_noted(
    guide: Path, state: bytes | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    (guide / "checkpoint").unlink()
    if state is not None:
        (guide / "checkpoint").write_bytes(state)
    assert int(hf.load(guide)["step"]) == expected
    assert graph.latest_checkpoint(guide) == str(guide / f"ckpt-{expected // 10}")
    checkpoint = graph.Checkpoint(step=0)
    checkpoint.restore(guide, partial=True)
    assert (checkpoint.step, checkpoint.save_counter) == (expected, expected // 10)
    told = "the highest number counts" in caplog.text
    assert told == (state in (b"", b"\xff\0 no text"))


def test_checkpoints_without_numbers(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "slots", tmp_path, dirs_exist_ok=True)
    assert hf.load(tmp_path).keys() == {"net", "optimizer", "momentum"}
    for file in list(tmp_path.iterdir()):
        shutil.copy(file, tmp_path / file.name.replace("model", "other"))

    with pytest.raises(hf.CheckpointNotFoundError, match="holds the TensorFlow checkpoints model, other:"):
        hf.load(tmp_path)

    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "other"')
    assert hf.load(tmp_path).keys() == {"net", "optimizer", "momentum"}


def test_a_saved_model() -> None:
    assert hf.load(FIXTURES / "saved_model").keys() == {"scale"}
    assert hf.load(FIXTURES / "saved_model" / "variables").keys() == {"scale"}


@pytest.mark.parametrize("name", ["ckpt-6", "ckpt", "ckpt-5.index.index", "checkpoint"])
def test_what_is_no_checkpoint(guide: Path, name: str) -> None:
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(guide / name)


@pytest.mark.parametrize("fixture", ["guide", "shards"])
def test_places_that_are_no_disk(fixture: str, place: str) -> None:
    folder = hf.storage.as_location(place)
    for file in (FIXTURES / fixture).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert_same(hf.load(folder), hf.load(FIXTURES / fixture))
    assert hf.verify(folder).ok


# ---- objects


def test_what_optimizers_keep_lies_below_them() -> None:
    found = hf.load(FIXTURES / "slots" / "model")
    reader = graph.load_checkpoint(FIXTURES / "slots" / "model")
    path = reader.graph.slots("optimizer")["net/l1/kernel"]["m"]
    assert path == "optimizer/slots/net/l1/kernel/m"
    assert np.array_equal(reader.get_tensor(path), found["optimizer"]["slots"]["net"]["l1"]["kernel"]["m"])
    assert found["momentum"]["slots"]["net"]["l2"]["kernel"].keys() == {"momentum"}
    assert not reader.has_tensor("net/l3/kernel")
    with pytest.raises(hf.errors.ObjectNotFoundError, match="VARIABLE_VALUE"):
        reader.get_tensor("net/l3/kernel")


def test_objects_by_names_of_tensorflow_1() -> None:
    reader = graph.load_checkpoint(FIXTURES / "names")
    assert reader.path.endswith("model.ckpt-2")
    assert reader.get_tensor("dense/kernel/Adam").shape == (4, 3)
    dense: Any = torch.nn.Linear(4, 3)
    graph.Checkpoint(dense=dense).read(
        FIXTURES / "names", rename={"dense/kernel": ("dense/weight", np.transpose)}, select="dense/[wb]*[ts]"
    ).assert_consumed()
    assert np.array_equal(dense.weight.detach().numpy().T, reader.get_tensor("dense/kernel"))


def test_a_cycle() -> None:
    first = graph.Node(v=np.zeros((), np.float32))
    second = graph.Node(v=np.zeros((), np.float32), other=first)
    first.other = second
    graph.Checkpoint(first=first).read(FIXTURES / "objects" / "objects-1").expect_partial()
    assert (float(first.v), float(second.v)) == (3, 4)


# ---- the page of the documentation


@pytest.mark.examples("docs/tensorflow_checkpoints.md")
def test_the_page_runs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FIXTURES / "guide", tmp_path / "tf_ckpts")
    monkeypatch.chdir(tmp_path)
    names = examples.run({"__name__": "page"})
    adam, kept = names["state"][0], names["kept"]  # of optax
    assert (int(adam.count), adam.mu["kernel"].shape, adam.nu["bias"].shape) == (40, (1, 5), (5,))
    assert np.array_equal(adam.mu["bias"], kept["mu"][1])
    assert np.array_equal(adam.nu["kernel"], kept["nu"][0])
    printed = capsys.readouterr().out
    assert printed.startswith("[4.2")
    assert "] 51\n" in printed
