"""Records of steps: what is sampled, what a comparison says, and files that are damaged or of something else."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
import torch
from flax import nnx
from flax.training.train_state import TrainState

from holdfast import graph
from holdfast.engine.pytree import MISSING, Sampler, Samples, Ways, full_sum, leaves_of
from holdfast.engine.pytree.sampling import gathered_by_jax
from holdfast.engine.storage import as_location
from holdfast.engine.witness import (
    LIMIT,
    Record,
    Recorder,
    RecordFile,
    Records,
    Seen,
    compare,
    is_rounding,
    read_records,
)

# ---- samples


def in_each_library(dtype: str) -> list[Any]:
    array = (np.arange(300).reshape(20, 15) % 7).astype(dtype)
    return [array, torch.tensor(array), *([jnp.asarray(array)] if array.itemsize < 8 or dtype == "complex64" else [])]


RECORDS: Any = np.ones(3, "i4,f4").view(np.recarray)
NUMBERS, MATRIX, TABLE = np.arange(10.0), np.arange(200.0).reshape(20, 10), torch.arange(200.0).view(20, 10)
IMAGES = torch.arange(240.0).reshape(4, 5, 3, 4)
ALIKE: dict[str, Callable[[], list[Any]]] = {
    **{
        dtype: partial(in_each_library, dtype)
        for dtype in ("float32", "float64", "int8", "int64", "bool", "complex64", "uint16")
    },
    "a number": lambda: [3, np.int64(3), np.array(3), torch.tensor(3), jnp.asarray(3), np.array([3])],
    "Fortran": lambda: [MATRIX, np.asfortranarray(MATRIX)],
    "reversed": lambda: [NUMBERS[::-1], np.arange(9.0, -1, -1)],
    "a column": lambda: [TABLE[:, 3], torch.arange(3.0, 200, 10)],
    "a transposed tensor": lambda: [TABLE.t(), TABLE.t().contiguous()],
    "channels last": lambda: [IMAGES, IMAGES.to(memory_format=torch.channels_last)],
    "an expanded number": lambda: [torch.ones(1).expand(5), torch.ones(5)],
    "a matrix": lambda: [MATRIX, MATRIX.view(np.matrix)],
    "a matrix of one number": lambda: [np.ones((1, 1)).view(np.matrix), np.ones(1)],
    "records": lambda: [RECORDS, RECORDS],
    "a record": lambda: [RECORDS[0], RECORDS[0]],
}


@pytest.mark.parametrize("name", ALIKE)
def test_digests_are_of_the_elements_wherever_they_lie_and_in_each_library(name: str) -> None:
    sampler, leaves = Sampler(), ALIKE[name]()
    for _ in range(3):  # The sampler keeps views of tensors from the second time on.
        digests, values = sampler.take(leaves).fetch(4)
        assert len({*digests.tolist()}) == 1
        for found in values:
            np.testing.assert_array_equal(found, values[0])


def test_a_change_of_any_sampled_element_changes_the_digest() -> None:
    before = np.zeros(64, np.float32)
    (known,), _ = Sampler().take([before]).fetch(1)
    for index in range(64):
        after = before.copy()
        after[index] = -0.0  # other bits of an equal value
        (found,), _ = Sampler().take([after]).fetch(1)
        assert found != known


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (33, 2), (30, 7), (8, 8, 8), (784, 100)], ids=str)
def test_a_change_outside_of_the_first_column_is_seen(shape: tuple[int, ...]) -> None:
    """The weights of an input that is always 0, such as the first pixel of a digit, never change."""
    for make in (np.array, torch.tensor, jnp.asarray):
        before, after = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        after[..., 0] = 0
        digests, _ = Sampler().take([make(before), make(after)]).fetch(1)
        assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([object()]),
        np.array(["words"]),
        np.zeros((0, 3)),
        torch.zeros(3, device="meta"),
        torch.zeros(0),
        torch.zeros(3, 3).to_sparse(),
        "text",
        None,
        MISSING,
    ],
    ids=["objects", "words", "empty", "meta", "empty of torch", "sparse", "text", "None", "gone"],
)
def test_what_cannot_be_read_has_the_digest_0(leaf: Any) -> None:
    digests, _ = Sampler().take([1.0, leaf, 2.0]).fetch(1)
    assert [bool(one) for one in digests] == [True, False, True]


def test_what_jax_gathers_on_a_device_has_the_digests_of_the_host() -> None:
    """Each dtype is gathered on its own, so that no bit changes: not the bits of a NaN, nor those of long integers."""
    nan = np.array([1, 2, 0x7FC0BEEF, 0xFFC00001], np.uint32).view(np.float32)
    dtypes: list[Any] = [jnp.bfloat16, jnp.float32, bool, jnp.complex64, jnp.float16, jnp.int32]
    arrays = [jnp.asarray(nan), *(jnp.asarray(np.arange(300).reshape(20, 15) % 7, dtype) for dtype in dtypes)]
    arrays.append(jnp.asarray(np.arange(100) + (1 << 30), jnp.uint32))
    gathered = Samples(len(arrays), gathered_by_jax([*enumerate(arrays)])).fetch(4)
    for found, expected in zip(gathered, Sampler().take(arrays).fetch(4), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_tensors_are_read_where_they_are_now() -> None:
    """In-place changes, other memory under the same tensor, freed memory, and another tensor in its place."""
    tensor, kept, sampler = torch.zeros(5), torch.ones(3), Sampler()

    def freed() -> None:
        """Give the memory back and take other memory, as FSDP does between two steps."""
        tensor.untyped_storage().resize_(0)
        assert sampler.take([tensor, kept]).fetch(1)[0][0] == 0
        tensor.untyped_storage().resize_(20)
        tensor.fill_(3.0)

    changes: list[tuple[Callable[[], Any], float]] = [
        *[(lambda: tensor.add_(1), value) for value in (1.0, 2.0, 3.0, 4.0)],
        (lambda: setattr(tensor, "data", torch.full((5,), 7.0)), 7.0),
        *[(lambda: tensor.mul_(2), value) for value in (14.0, 28.0, 56.0)],
        (freed, 3.0),
        *[(lambda: tensor.sub_(1), value) for value in (2.0, 1.0, 0.0)],
    ]
    found, expected = [sampler.take([tensor, kept]).fetch(1)], [0.0]
    for change, value in changes:
        change()
        found.append(sampler.take([tensor, kept], [tensor * 2]).fetch(1))
        expected.append(value)
    found.append(sampler.take([torch.ones(5), kept]).fetch(1))
    for (digests, values), value in zip(found, [*expected, 1.0], strict=True):
        alone, _ = Sampler().take([torch.full((5,), value), kept, torch.full((5,), 2 * value)]).fetch(1)
        assert digests.tolist() == alone.tolist()[: len(digests)]
        assert values[0, 0] == value


MEMORY = torch.arange(100, dtype=torch.int32)


@pytest.mark.parametrize(
    "data",
    [
        MEMORY[:50].view(torch.float32),
        MEMORY[::2],
        MEMORY.as_strided((50,), (0,)),
        MEMORY[50:],
        MEMORY[:25].view(5, 5),
    ],
    ids=["dtype", "strides", "expanded", "offset", "shape"],
)
def test_a_tensor_that_becomes_another_view_of_its_memory_is_read_there(data: torch.Tensor) -> None:
    tensor, sampler = MEMORY[:50], Sampler()
    for _ in range(3):
        sampler.take([tensor])
    tensor.data = data
    for _ in range(3):
        for found, expected in zip(sampler.take([tensor]).fetch(4), Sampler().take([tensor]).fetch(4), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_sums_see_what_samples_do_not() -> None:
    for make in (np.array, torch.tensor, jnp.asarray):
        array = np.zeros((1000, 3))
        table: Any = make(array)
        array[501, 2] = 1.0  # between two elements that are sampled
        other: Any = make(array.copy())
        sampled, _ = Sampler().take([table, other]).fetch(1)
        assert sampled[0] == sampled[1]
        assert int(full_sum(table)) != int(full_sum(other))


# ---- ways


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Held:
    w: Any
    note: str = "as it was"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen = 3


class Plain:
    def __init__(self) -> None:
        self.array = np.ones(2)
        self.myself = self
        self.count = 5


def trained() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 0.5)
    model.layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def flax_state() -> Any:
    params = {"dense": {"kernel": jnp.ones((2, 2))}}
    create: Any = TrainState.create
    return create(apply_fn=print, params=params, tx=optax.adam(0.1))


MOMENTS = [f"optimizer.state.{number}.{name}" for number in (0, 1) for name in ("exp_avg", "exp_avg_sq", "step")]
LEAVES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "containers": (
        lambda: {"a": [np.ones(1), (1, 2.0)], "b": Point(np.ones(1), "text")},
        {"a.0", "a.1.0", "a.1.1", "b.x"},
    ),
    "a dataclass": (lambda: {"held": Held(np.ones(1))}, {"held.w"}),
    "torch": (trained, {"model.layer.weight", "model.layer.bias", "optimizer.param_groups.0.lr", *MOMENTS}),
    "flax": (
        flax_state,
        {"step", "params.dense.kernel", "opt_state.0.count"} | {f"opt_state.0.{n}.dense.kernel" for n in ("mu", "nu")},
    ),
    "nnx": (lambda: {"m": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, {"m.kernel.value", "m.bias.value"}),
    "an object": (lambda: {"plain": Plain()}, {"plain.array"}),
    "a name that is no text": (lambda: {"\udc80": np.ones(2)}, {"\udc80"}),
    "a value of a graph": (lambda: {"n": graph.Value(np.ones(2))}, {"n.value"}),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_ways_lead_to_every_leaf(kind: str) -> None:
    make, expected = LEAVES[kind]
    root = make()
    ways = Ways(root, 256)
    assert expected <= {*ways.names}
    assert ways.total == len(ways.names)
    digests, _ = Sampler().take(ways.follow(root)).fetch(1)
    assert digests.all()


def test_ways_lead_to_the_present_leaf_and_end_where_it_is_gone() -> None:
    root = {"a": {"w": 1.0}, "model": torch.nn.Sequential(torch.nn.Linear(1, 1))}
    ways = Ways(root, 256)
    later = {"a": {"w": 2.0}, "model": root["model"]}
    root["model"][0].weight = torch.nn.Parameter(torch.full((1, 1), 5.0))  # type: ignore[index]
    found = dict(zip(ways.names, ways.follow(later), strict=True))
    assert found["a.w"] == 2.0
    assert found["model.0.weight"].item() == 5.0
    assert ways.follow({"model": root["model"]})[ways.names.index("a.w")] is MISSING


@pytest.mark.parametrize("kind", [Counter, partial(defaultdict, int)])
def test_ways_make_no_entries(kind: Any) -> None:
    root = {"counts": kind({"a": 1})}
    ways = Ways(root, 256)
    del root["counts"]["a"]
    assert ways.follow(root) == [MISSING]
    assert not root["counts"]


def test_learning_rates_and_trained_leaves_are_chosen_first() -> None:
    state = {**trained(), "data": {str(index): np.ones(1) for index in range(500)}}
    names = Ways(state, 16).names
    assert names[0] == "optimizer.param_groups.0.lr"
    assert {*names[1:9]} == {"model.layer.weight", "model.layer.bias", *MOMENTS}
    assert names == Ways({name: state[name] for name in reversed(state)}, 16).names


def test_attributes_are_texts_without_addresses() -> None:
    state = {"plain": Plain(), "held": Held(np.ones(1)), **trained()}
    texts = Ways(state, 256).attributes(state)
    assert texts["plain.count"] == "5"
    assert texts["held.note"] == "'as it was'"
    assert texts["model.seen"] == "3"
    assert not [text for text in texts.values() if " at 0x" in text]
    state["plain"].count, state["held"].note = 6, "long " * 100
    texts = Ways(state, 256).attributes(state)
    assert texts["plain.count"] == "6"
    assert re.fullmatch(r"'long long .*[(]502 characters, checksum [0-9a-f]{8}[)]", texts["held.note"])


def test_what_metrics_only_cache_is_no_attribute() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])
    ways = Ways({"metrics": metrics}, 0)
    before = ways.attributes({"metrics": metrics})
    metrics.update(torch.ones(3))
    metrics.compute()
    after = ways.attributes({"metrics": metrics})
    changed = {name.rpartition(".")[2] for name, text in after.items() if before[name] != text}
    assert "_update_count" in changed
    assert changed <= {"_update_count", "mean_value", "sum_value", "weight"}


def test_the_leaves_of_a_batch() -> None:
    arrays, text = leaves_of({"x": np.ones(2), "y": [torch.ones(1), "label", 3], "z": None})
    assert len(arrays) == 2
    assert all(part in text for part in ("'x'", "label", "3", "None"))


# ---- comparisons


def seen(step: int, w: float = 1.0, **layers: Any) -> Seen:
    root = {"state": {"w": np.full(100, w), "frozen": np.ones(3)}}
    return Seen(**{"step": step, "root": root, "metrics": {"loss": 0.5}, "counters": {"step": step}, **layers})


def record(k: int, shown: Seen) -> Record:
    found: Record = json.loads(json.dumps(Recorder(seen(0)).take(k, shown).finish()))
    return found


NAMES = ("state.w", "state.frozen")
SAME: dict[str, Any] = {
    "batch": {"x": np.zeros(3)},
    "checksums": {"data": 5},
    "generators": {"rng": {"words": np.zeros(3)}},
    "counters": {"step": 1, "epoch": 1},
    "positions": {"data": {"n": 1}},
    "metrics": {"loss": 0.5, "val": {"accuracy": 0.75}, "step_time": 1.0},
}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": {"x": np.ones(3)}}, "batch"),
    "loader": ({"checksums": {"data": 6}}, "batch"),
    "generators": ({"generators": {"rng": {"words": np.ones(3)}}}, "generators"),
    "metrics": ({"metrics": {"loss": 0.25}}, "metrics"),
    "nested metrics": ({"metrics": {"val": {"accuracy": 0.25}}}, "metrics"),
    "counters": ({"counters": {"step": 1, "epoch": 2}}, "counters"),
    "state": ({"w": 2.0}, "state"),
    # These only explain another difference.
    "an opaque position": ({"positions": {"data": {"n": 2}}}, ""),
    "times": ({"metrics": {"loss": 0.5, "step_time": 2.0, "samples_per_sec": 3}}, ""),
    "a new metric": ({"metrics": {"loss": 0.5, "another": 1}}, ""),
    "no batch": ({"batch": None}, ""),
    "no metrics": ({"metrics": None}, ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_layer_decides(name: str) -> None:
    changes, layer = CHANGES[name]
    same, differs = compare(record(1, seen(1, **SAME)), record(1, seen(1, **{**SAME, **changes})), NAMES)
    missing = {"metrics"} if name == "no metrics" else set()
    assert [*differs] == [layer] * bool(layer)
    assert {*same} == {"batch", "generators", "metrics", "counters", "state"} - {layer} - missing


@pytest.mark.parametrize(
    ("before", "place", "explained"),
    [
        (1, 1, ", with the same state of data"),
        (1, 2, ", and so is the state of data"),
        (jax.random.key(1), jax.random.key(1), ", with the same state of data"),
        (jax.random.key(1), jax.random.key(2), ", and so is the state of data"),
    ],
)
def test_the_state_of_a_loader_explains_another_batch(before: Any, place: Any, explained: str) -> None:
    first = seen(1, **{**SAME, "positions": {"data": {"n": before}}})
    changes = {"batch": {"x": np.ones(3)}, "positions": {"data": {"n": place}}}
    _, differs = compare(record(1, first), record(1, seen(1, **{**SAME, **changes})), NAMES)
    assert differs == {"batch": explained}


@pytest.mark.parametrize("metrics", [{"loss": 0.5}, None], ids=["metrics", "sums"])
def test_a_step_that_is_saved_is_sampled_once(metrics: dict[str, float] | None) -> None:
    """The last record of the save before and that of the new one share a sample, with the sums of whole leaves."""
    table = Seen(step=6, root={"state": {"w": np.ones(1000)}}, metrics=metrics, batch=np.ones(3))
    recorder, alone = (Recorder(Seen(step=0, root=table.root)) for _ in range(2))
    last = recorder.take(3, table)
    first = recorder.take(0, table, last)
    assert first.samples is last.samples
    assert {"full": {}} | first.finish() == alone.take(0, table).finish()


@pytest.mark.parametrize("generator", [random.Random(0), np.random.RandomState(0)], ids=["Python", "numpy"])
def test_a_generator_that_steps_draw_from_is_recorded_at_each(generator: Any) -> None:
    recorder, found = Recorder(seen(0)), []
    for k, draws in enumerate((False, False, True), start=1):
        if draws:
            generator.random_sample() if hasattr(generator, "random_sample") else generator.random()
        state = generator.getstate() if hasattr(generator, "getstate") else generator.get_state()
        found.append(recorder.take(k, seen(k, generators={"rng": state})).finish()["generators"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("noise", "loss", "explained"),
    [(1e-6, 0.5, True), (1e-6, 0.50001, True), (1e-6, 0.501, False), (2e-2, 0.5, False), (float("nan"), 0.5, True)],
)
def test_rounding(noise: float, loss: float, explained: bool) -> None:
    """A step changes w from 1 to 2; another processor rounds the change."""
    first, saved = record(0, seen(0, 1.0)), record(1, seen(1, 2.0))
    now = record(1, seen(1, 2.0 + noise, metrics={"loss": loss}))
    assert (is_rounding(saved, now, first) is not None) is explained


# ---- the file


def written(place: Path, ks: tuple[int, ...] = (0, 1, 2)) -> Records:
    recorder = Recorder(seen(0))
    file = RecordFile(5, 0, {"processes": 1}, recorder.take(0, seen(5)))
    file.add(recorder.take(1, seen(6)))
    file.commit(as_location(place), "abc")
    for k in ks[2:]:
        file.add(recorder.take(k, seen(5 + k)))
    file.finish()
    return read_records(as_location(place), 0, "abc")


def test_a_file_is_read_again(tmp_path: Path) -> None:
    records = written(tmp_path)
    assert (records.why, [*records.by_k], {*records.names}) == ("", [2, 1, 0], {*NAMES})
    assert [records.by_k[k]["step"] for k in (0, 1, 2)] == [5, 6, 7]
    assert "another checkpoint" in read_records(as_location(tmp_path), 0, "def").why


def test_a_file_does_not_grow_beyond_its_limit(tmp_path: Path) -> None:
    records = written(tmp_path, tuple(range(300)))
    assert (tmp_path / "witness.jsonl").stat().st_size <= LIMIT
    assert len(records.by_k) < 300


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flipped(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"step":5', '"step":4')
    path.write_text("\n".join(lines) + "\n")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str, list[int]]] = {
    "a torn last line": (torn, "", [0, 1]),
    "a changed line": (flipped, "", [1, 2]),
    "no file": (Path.unlink, "no record", []),
    "a directory": (a_directory, "no record", []),
    "no text": (lambda path: path.write_bytes(os.urandom(1000)), "damaged", []),
    "no lines": (lambda path: path.write_bytes(b""), "damaged", []),
    "nested": (lambda path: path.write_text("[" * 100_000), "damaged", []),
    "another program's lines": (lambda path: path.write_text('{"event": "saved"}\n'), "damaged", []),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_no_error(tmp_path: Path, name: str) -> None:
    damage, why, ks = DAMAGE[name]
    written(tmp_path)
    damage(tmp_path / "witness.jsonl")
    records = read_records(as_location(tmp_path), 0, "abc")
    assert why in records.why
    assert bool(records.why) is bool(why)
    assert sorted(records.by_k) == ks
