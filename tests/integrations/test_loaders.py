"""Places in the data of loaders without a state, and of iterators that write theirs to files."""

from __future__ import annotations

import gc
import importlib
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.ids import plain_id
from tests.integrations.wrapped_states import of_a_rank
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import holdfast as hf
from holdfast import graph
from holdfast.integrations.flax import CheckpointCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",
    "ignore:.*fork.*:DeprecationWarning",
    r"ignore:os.fork\(\) was called:RuntimeWarning",
)
DATA: Any = TensorDataset(torch.arange(10))


class Epochs:
    """Another order in each epoch, which only the epoch decides; counts what was drawn."""

    def __init__(self) -> None:
        self.epoch, self.drawn = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        for value in np.random.default_rng(self.epoch).permutation(4).tolist():
            self.drawn += 1
            yield value


class Lines:
    """A loader without a length, such as one over a stream of text."""

    def __iter__(self) -> Iterator[str]:
        yield from ("a", "b", "c")


def shuffled() -> Any:
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)
    return DataLoader(DATA, batch_size=2, sampler=sampler)


LOADERS: dict[str, Any] = {
    "list": lambda: [[1, 2], [3, 4], [5]],
    "epochs": Epochs,
    "lines": Lines,
    "DataLoader": lambda: DataLoader(DATA, batch_size=3),
    "DistributedSampler": shuffled,
    "a stream": lambda: DataLoader(Stream(), batch_size=5),
}


def taken(batches: Iterator[Any], count: int) -> list[str]:
    return [str(next(batches)) for _ in range(count)]


def endless(loader: Any) -> Iterator[Any]:
    """Gives the batches of one epoch after the other; a skipped loader has all epochs in one."""
    while True:
        yield from loader


def run_to(directory: Path, until: int, make: Callable[[], Any], **make_extras: Callable[[], Any]) -> list[str]:
    """Go on to a step in a process of its own; return the batches, and numbers that the model draws beside them."""
    seed = 0 if not directory.exists() else 99  # A resumed process has other numbers.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    loader, seen = make(), []
    # Those of a name that comes before ``data`` come first: the order of the names must not matter.
    extras = {name: one() for name, one in make_extras.items()} | {"data": loader}
    with CheckpointCallback(directory, save_interval_steps=1) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": 0}, **dict(sorted(extras.items())))
        batches = endless(loader)
        for step in range(start, until):
            seen.append(f"{next(batches)} {torch.rand(1).item()} {random.random()} {np.random.rand()}")
            checkpoint.on_step(step + 1, state, **extras)
    return seen


def check_cut(tmp_path: Path, stops: Sequence[int], steps: int, make: Callable[[], Any], **extras: Any) -> None:
    """A run that stops, stops again one step later, and goes on to the end is the run without a stop."""
    whole = run_to(tmp_path / "whole", steps, make, **extras)
    for stop in stops:
        found = [run_to(tmp_path / str(stop), until, make, **extras) for until in (stop, stop + 1, steps)]
        assert [batch for part in found for batch in part] == whole, stop


def following(make: Callable[[], Any], count: int) -> tuple[Any, Any]:
    """Return two loaders, one that has given batches, and one that was given its state."""
    first, again = make(), make()
    taken(first, count)
    again.set_state(first.get_state())
    return first, again


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_goes_on_at_the_next_batch(tmp_path: Path, name: str) -> None:
    check_cut(tmp_path, (2, 5), 9, lambda: hf.skip_to(LOADERS[name]()))
    first = hf.skip_to(LOADERS[name]())
    whole = taken(first, 9)
    assert taken(hf.skip_to(LOADERS[name](), 5), 4) == whole[5:]
    path = graph.Checkpoint(data=hf.skip_to(LOADERS[name](), 5)).save(f"{tmp_path}/graph/ckpt")
    again = hf.skip_to(LOADERS[name](), 2)
    taken(again, 1)
    graph.Checkpoint(data=again).restore(path).assert_consumed()
    assert again.position == 5
    assert taken(again, 4) == whole[5:]
    assert again.position == 9


class GlobalGenerator:
    """The generator of all of torch, as programs wrap it."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


@pytest.mark.parametrize("generator", [GlobalGenerator, lambda: torch.default_generator], ids=["wrapped", "torch's"])
@pytest.mark.parametrize("kind", ["skip_to", "StatefulDataLoader"])
def test_a_loader_that_begins_draws_nothing_from_a_restored_generator(
    tmp_path: Path, kind: str, generator: Callable[[], Any]
) -> None:
    """Each epoch of a loader begins with a number of torch's generator, from which the program's dropout draws, too."""

    def make() -> Any:  # epochs of 4
        return hf.skip_to(DataLoader(DATA, batch_size=3)) if kind == "skip_to" else stateful_loader(Ten, shuffle=True)

    def by_graph(directory: Path, until: int) -> list[str]:
        torch.manual_seed(99 if directory.exists() else 0)
        loader = make()
        saved = graph.Checkpoint(a_generator=generator(), data=loader)
        saver = graph.CheckpointManager(saved, directory, max_to_keep=None)
        start = int(str(saver.restore_or_initialize() or "-0").rpartition("-")[2])
        drawn = []
        for step, batch in zip(range(start, until), endless(loader), strict=False):
            drawn.append(f"{batch} {torch.rand(2).tolist()}")
            saver.save(step + 1)
        return drawn

    check_cut(tmp_path, (2, 3, 4, 6), 8, make, a_generator=generator)
    whole = by_graph(tmp_path / "graph", 7)
    for stop in (2, 4, 6):
        assert by_graph(tmp_path / f"graph {stop}", stop) + by_graph(tmp_path / f"graph {stop}", 7) == whole, stop


class Counted:
    """A loader that has no state before its first batch."""

    first = 0
    next: int

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.first, 4):
            self.next = batch + 1
            yield batch
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["next"]


def test_a_loader_without_a_state_before_its_first_batch(tmp_path: Path) -> None:
    check_cut(tmp_path, (2,), 4, Counted)


class Shuffles:
    """A loader of the program's own, which shuffles as each epoch begins; with a length or without one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        order = list(range(8))
        self.generator.shuffle(order)
        yield from order


class Sized(Shuffles):
    def __len__(self) -> int:
        return 8


class Workers(Sized):
    """Of another library than torch."""

    num_workers = 2


class Frozen(Shuffles):
    """Only the program's own functions change what a loader holds."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "generator"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sized(np.random),
        lambda: Shuffles(random),
        lambda: Sized(np.random.default_rng(3)),
        lambda: Shuffles(np.random.RandomState(3)),
        lambda: Workers(random.Random(3)),
        lambda: Frozen(random.Random(3)),
        lambda: DataLoader(Drawing(), batch_size=3, sampler=OwnOrder(), generator=torch.default_generator),
        lambda: DataLoader(Drawing(), batch_size=3, shuffle=True),
        lambda: DataLoader(Drawing(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        lambda: DataLoader(Samples(), batch_sampler=DrawnBatches()),
        lambda: DataLoader(Drawing(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
        lambda: DataLoader(Drawing(), batch_size=2, num_workers=1, generator=torch.Generator().manual_seed(5)),
    ],
    ids=[
        *("numpy's", "Python's", "Generator", "RandomState", "Random", "frozen", "sampler", "shuffle", "weighted"),
        *("batches", "workers", "generator of workers"),
    ],
)
def test_a_loader_that_draws_its_order_or_its_workers_seeds_from_generators(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    # Processes take longer to start than all else.
    stops = (6,) if isinstance(loader := make(), DataLoader) and loader.num_workers else (3, 6, 13)
    check_cut(tmp_path, stops, 15, lambda: hf.skip_to(make()))


class Changing:
    """A loader whose epochs change what it holds; ``before`` and ``after`` are called in each, and give an order."""

    def __init__(self, before: Callable[[Any], Any], after: Callable[[Any], Any] = lambda _: None) -> None:
        self.before, self.after = before, after
        self.epoch = 0
        self.order: Any = np.arange(6)
        self.base = self.order
        self.names = list("abcdef")
        self.key = jax.random.key(3)
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[str]:
        self.before(self)
        yield from [f"{self.epoch} {name}" for name in np.array(self.names)[self.order]]
        self.after(self)

    def __len__(self) -> int:
        return 6

    def at_start(self) -> dict[str, Any]:
        """Returns what the next epoch depends on, without a copy."""
        return {name: getattr(self, name) for name in ("epoch", "order", "names", "key")}

    def start_at(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def count(self) -> None:
        self.epoch += 1

    def split(self) -> None:
        self.key, key = jax.random.split(self.key)
        self.order = np.asarray(jax.random.permutation(key, 6))

    def shuffle(self) -> None:
        np.random.shuffle(self.order)

    def shuffle_names(self) -> None:
        self.rng.shuffle(self.names)

    def permute(self) -> None:
        self.order = torch.as_tensor(self.order)[np.random.permutation(6)]

    def draw(self) -> None:
        self.order = self.base[np.random.permutation(6)]


def nothing(_: Any) -> None:
    """A change that is none."""


class WithoutLength(Changing):
    __len__: Any = None


CHANGES: dict[str, Callable[[], Changing]] = {
    "a count": lambda: Changing(Changing.count),
    "a count at the end, without a length": lambda: WithoutLength(nothing, Changing.count),
    "a key of jax": lambda: Changing(Changing.split),
    "an array at the end": lambda: Changing(nothing, Changing.shuffle),
    "an array, without a length": lambda: WithoutLength(Changing.shuffle, Changing.shuffle),
    "a tensor": lambda: Changing(Changing.permute),
    "a list": lambda: Changing(Changing.shuffle_names),
    "an order that is its base at first": lambda: Changing(nothing, Changing.draw),
}


def handed_over(loader: Changing) -> Any:
    return hf.skip_to(loader, generators=[loader.rng], state=(loader.at_start, loader.start_at))


@pytest.mark.parametrize("change", CHANGES)
def test_an_order_that_depends_on_what_the_program_hands_over(change: str, tmp_path: Path) -> None:
    check_cut(tmp_path, (8, 12, 18), 20, lambda: handed_over(CHANGES[change]()))


@pytest.mark.parametrize("change", [Changing.count, Changing.shuffle])
def test_a_position_in_an_earlier_epoch_of_the_same_process(change: Any) -> None:
    np.random.seed(0)
    batches = handed_over(Changing(change))
    next(batches)
    state, drawn = batches.get_state(), np.random.get_state()
    whole = taken(batches, 12)
    for _ in range(2):  # What the loader changes is no part of the saved state.
        batches.set_state(state)
        np.random.set_state(drawn)
        assert taken(batches, 12) == whole


@pytest.mark.parametrize(
    ("loader", "arguments", "message"),
    [
        ([1], {"generators": 7}, "generators=7 must be a sequence of generators"),
        ([1], {"generators": "rng"}, "generators='rng' must be a sequence of generators"),
        ([1], {"generators": [random.Random(1), jax.random.key(1)]}, r"generators\[1\] is a .*, which is no generator"),
        ([1], {"generators": [random.SystemRandom()]}, "draws from the operating system and has no state"),
        ([1], {"state": 7}, r"state=7 must be a pair of functions, \(get, set\)"),
        ([1], {"state": (list, 3)}, "must be a pair of functions"),
        ([1], {"state": (list,)}, "must be a pair of functions"),
        ([1], {"generators": [random.Random(1)], "global_batch_size": 2}, "belong to one process"),
        ([1], {"state": (list, list), "global_batch_size": 2}, "belong to one process"),
        ([1], {"global_batch_size": 0}, "global_batch_size=0 must be a number of samples, from 1"),
        ([1], {"n": -1}, "number of batches"),
        (iter([1, 2]), {}, "not an iterator"),
        (3, {}, "needs a loader"),
        (DataLoader(DATA, shuffle=True), {"global_batch_size": 1}, r"from a random generator of each \(RandomSampler"),
    ],
    ids=plain_id,
)
def test_what_cannot_be_skipped_or_handed_over(loader: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        hf.skip_to(loader, **arguments)


@pytest.mark.parametrize(
    ("saved", "arguments", "named"),
    [
        ({"attributes": {"loader.epoch": 2}}, {}, "loader.epoch (saved)"),
        ({"generators": {"dataset.transform.rng": {}}}, {}, "dataset.transform.rng (saved)"),
        ({"generators": {"generators.0": {}}, "attributes": {"a.n": 1}}, {}, "generators.0 (saved), a.n (saved)"),
        ({"state": 3}, {}, "state (saved)"),
        ({}, {"generators": [random.Random(1)], "state": (int, int)}, "generators.0 (not saved), state (not saved)"),
    ],
)  # fmt: skip
def test_one_warning_names_what_was_saved_otherwise(
    saved: dict[str, Any], arguments: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions have saved attributes of loaders, and the generators that they had found in them."""
    batches = hf.skip_to(["a", "b", "c"], **arguments)
    batches.set_state({"position": 4, "taken": [1, 1], **saved})
    assert taken(batches, 3) == ["b", "c", "a"]
    (warning,) = [one.getMessage() for one in caplog.records]
    assert f"saved with other parts than skip_to is given now: {named}. They stay" in warning


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["batch"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    "batch",
    [{None: torch.ones(2)}, [torch.ones(2).to(torch.float8_e4m3fn)], HOLDS_ITSELF, [*range(100_000)]],
    ids=["a key of any type", "a dtype that torch cannot index", "a dictionary that holds itself", "long"],
)
def test_a_batch_may_be_anything(batch: Any) -> None:
    assert next(hf.skip_to([batch])) is batch


@pytest.mark.parametrize(
    ("options", "position", "global_batch_size", "warns"),
    [
        ({"num_workers": 1}, 4, 2, True),  # One state of all processes has no generator of one of them.
        ({"num_workers": 1}, 6, 2, False),
        ({"num_workers": 0}, 4, 2, False),
        ({"num_workers": 1, "persistent_workers": True}, 4, None, False),
        ({"num_workers": 1, "persistent_workers": True}, 8, None, True),
    ],
)
def test_a_warning_tells_where_workers_draw_other_numbers(
    options: dict[str, Any], position: int, global_batch_size: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def batches() -> Any:
        context = "fork" if options["num_workers"] else None
        loader: Any = DataLoader(Drawing(), batch_size=2, multiprocessing_context=context, **options)
        return hf.skip_to(loader, global_batch_size=global_batch_size)

    _, again = following(batches, position)
    next(again)
    assert ("continues with new worker processes" in caplog.text) is warns


class Jitter:
    """A transform that draws from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, sample: Any) -> float:
        return float(sample) + self.rng.random()


class Transformed(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.samples = [(index,) for index in range(1000)]
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("skip_to", {}),
        ("skip_to", {"num_workers": 1, "multiprocessing_context": "fork"}),
        ("StatefulDataLoader", {}),
    ],
    ids=["skip_to", "skip_to, a worker", "StatefulDataLoader"],
)
def test_generators_of_a_transform_are_handed_over(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """As ``generators=`` of skip_to, or as extras beside a loader with a state; workers have copies of them."""
    own: list[Any] = []

    def make() -> Any:
        own[:] = [Jitter(1), Jitter(2)]
        one, other = own
        dataset: Any = Transformed(lambda sample: other(one(sample)))
        if kind == "skip_to":
            return hf.skip_to(DataLoader(dataset, batch_size=2, **options), generators=[one.rng, other.rng])
        return stateful_loader(lambda: dataset)

    extras = {} if kind == "skip_to" else {"one": lambda: own[0].rng, "other": lambda: own[1].rng}
    check_cut(tmp_path, (4,), 9, make, **extras)


class Hardest(torch.utils.data.Sampler[int]):
    """Begins with the samples of the highest scores, which training changes."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        yield from np.argsort(-self.scores, kind="stable").tolist()


@pytest.mark.parametrize(
    ("loader", "changes", "warns"),
    [
        (lambda scores: DataLoader(Transformed(int), batch_size=2, sampler=Hardest(scores)), True, True),
        (lambda scores: DataLoader(Transformed(int), batch_size=2, sampler=Hardest(scores)), False, False),
        (lambda scores: [{"names": ["a"], "values": scores + step} for step in range(3)], True, True),
        (lambda _: DataLoader(Drawing(), batch_size=2), True, False),  # The model draws from the same generator.
    ],
    ids=["sampler", "unchanged", "values", "augmented"],
)
def test_a_batch_that_is_another_one_when_it_is_drawn_again_is_told(
    loader: Callable[[Any], Any], changes: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scores = np.zeros(6)
    first, again = hf.skip_to(loader(scores)), hf.skip_to(loader(scores + np.arange(6) * changes))
    for _ in range(2):
        next(first)
        torch.rand(1)
    again.set_state(first.get_state())
    next(again)
    assert ("differs from before the stop" in caplog.text) is warns


def test_whole_epochs_are_skipped_at_once() -> None:
    loader = Epochs()
    next(hf.skip_to(loader, 4001))
    assert (loader.epoch, loader.drawn) == (1000, 2)


def test_a_loader_of_fabric_and_one_without_a_batch() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    with pytest.raises(hf.errors.OptionError, match="Pass the DataLoader that Fabric was given"):
        hf.skip_to(fabric.setup_dataloaders(shuffled()))
    assert list(hf.skip_to([])) == []


class DatasetIterator:
    """As CLU's iterator over tf.data: writes a checkpoint of TensorFlow at a path, an index and data, and reads it."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def save(self, filename: str) -> None:
        Path(f"{filename}.index").write_text("an index")
        Path(f"{filename}.data-00000-of-00001").write_bytes(self.position.to_bytes(4, "big"))

    def restore(self, filename: str) -> None:
        assert Path(f"{filename}.index").read_text() == "an index"
        self.position = int.from_bytes(Path(f"{filename}.data-00000-of-00001").read_bytes(), "big")


class Silent(DatasetIterator):
    def save(self, filename: str) -> None:
        pass


def test_iterators_that_write_files(tmp_path: Path) -> None:
    check_cut(tmp_path, (1, 5), 8, DatasetIterator)
    data, again = DatasetIterator(), DatasetIterator()
    next(data)
    path = graph.Checkpoint(data=data).save(f"{tmp_path}/graph/ckpt")
    graph.Checkpoint(data=again).restore(path).assert_consumed()
    assert next(again) == 2
    with pytest.raises(hf.errors.StateError, match=r"Silent.save\(path\) wrote no file"):
        graph.Checkpoint(data=Silent()).write(tmp_path / "silent")


def test_a_checkpoint_that_names_files_elsewhere(tmp_path: Path) -> None:
    """What is restored is not trusted: files go into a folder of their own, and nowhere else."""
    for number, name in enumerate(("iterator/../../evil", "elsewhere", "/etc/x")):

        class Forged(DatasetIterator):
            def get_state(self) -> dict[str, Any]:
                return {"files": {name: np.zeros(1, np.uint8)}}  # noqa: B023

            def set_state(self, state: Any) -> None: ...

        path = graph.Checkpoint(data=Forged()).write(tmp_path / str(number))
        with pytest.raises(hf.DamagedCheckpointError):
            graph.Checkpoint(data=DatasetIterator()).restore(path)


# ---- torchdata's StatefulDataLoader


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


class Ten(Samples):
    def __len__(self) -> int:
        return 10


class Drawing(Samples):
    """Draws in the dataset, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)) + torch.rand(())


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor(float(index)) for index in range(12)])


class StreamWithState(Stream):
    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 12:
            self.place += 1
            yield torch.tensor(float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class OwnOrder(torch.utils.data.Sampler[int]):
    """A sampler of the program's own."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())


class DrawsAgain(OwnOrder):
    """Its state is that of its generator before the epoch, from which it draws its order again, and its place.

    A resume leaves the generator alone that such a sampler has set.
    """

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.before: Any = self.generator.bit_generator.state
        self.place = self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.before, self.place, self.start = self.generator.bit_generator.state, self.start, 0
        for index in self.generator.permutation(12)[self.place :]:
            self.place += 1
            yield int(index)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state, self.start = state["before"], state["place"]


class OwnBatches(OwnOrder):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(12).reshape(4, 3).tolist())


class DrawnBatches(OwnBatches):
    """Draws its order from a generator of its own, as samplers do that put samples of one length together."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(12, generator=self.generator).reshape(4, 3).tolist())


class EpochOrder(OwnOrder):
    """Its order depends on the epoch that the program sets, as that of torch's DistributedSampler."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class EpochOrderWithState(EpochOrder):
    """Counts the indices, and begins behind them once, as samplers of language models do."""

    given = start = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.start = self.start, 0
        for index in list(super().__iter__())[self.given :]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class EpochBatches(EpochOrder):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor(list(super().__iter__())).reshape(4, 3).tolist())


class EpochStream(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).float())


def of_one_process() -> Any:
    return torch.utils.data.DistributedSampler(Samples(), num_replicas=1, rank=0)


def stateful_loader(dataset: Any = Samples, **options: Any) -> Any:
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    if options.pop("of_a_rank", False):
        kind = of_a_rank(kind)
    if callable(batches := options.get("batch_sampler")):
        return kind(dataset(), batch_sampler=batches())
    if options.pop("of_several_processes", False):
        samplers = importlib.import_module("torchdata.stateful_dataloader.sampler")
        options["sampler"] = samplers.StatefulDistributedSampler(Samples(), num_replicas=1, rank=0)
    if callable(sampler := options.get("sampler")):
        options["sampler"] = sampler()
    if options.get("generator"):
        options["generator"] = torch.Generator().manual_seed(5)
    return kind(dataset(), batch_size=3, **options)


def loop_over_epochs(directory: Path, stop: int = 0, *, first: int | None = None, **options: Any) -> list[Any]:
    """Three epochs of four steps, as most loops of torch are written; the batches of this process.

    Loops over streams go by steps: where a stream had ended, the first loop over it yields nothing. A run that stops
    saves that step alone, but for step 3 and 6, and others all steps: neither may change what follows. With ``first``,
    the number of the epoch is an extra, which the loop counts up with the last batch.
    """
    torch.manual_seed(0)
    loader, taken = stateful_loader(**options), []
    with CheckpointCallback(directory, save_interval_steps=1 if stop in (0, 3, 6) else stop) as checkpoint:
        counter: dict[str, Any] = {} if first is None else {"epoch": first}
        state, step = checkpoint.restore_or_initialize({"w": 0}, data=loader, **counter)
        is_stream = issubclass(options.get("dataset", Samples), Stream)
        begin, end = step // 4, 4 if is_stream else 3
        for epoch in range(begin, end) if first is None else range(checkpoint.extras["epoch"], first + end):
            for part in (loader.dataset, loader.sampler, loader.batch_sampler):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            for batch in loader:
                taken.append((batch + torch.rand(())).tolist())
                step += 1
                counter = dict.fromkeys(counter, epoch + (step % 4 == 0))
                checkpoint.on_step(step, state, data=loader, **counter)
                if step in (stop, 12):
                    return taken
    return taken


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "generator": True},
        {"of_several_processes": True},
        {"dataset": Drawing, "shuffle": True},
        {"dataset": Stream},
        {"dataset": StreamWithState},
        {"dataset": StreamWithState, "of_a_rank": True},
        {"shuffle": True, "num_workers": 1, "of_a_rank": True},
        {"dataset": EpochStream},
        {"sampler": of_one_process},
        {"sampler": of_one_process, "num_workers": 1},
        {"sampler": EpochOrder},
        {"sampler": EpochOrderWithState},
        {"sampler": DrawsAgain},
        {"shuffle": True, "first": 0},
        {"shuffle": True, "first": 1},
        {"batch_sampler": EpochBatches},
        {"shuffle": True, "num_workers": 1},
        {"shuffle": True, "num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=plain_id,
)
def test_a_loop_over_epochs_is_stopped_at_the_end_of_one_and_elsewhere(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    whole = loop_over_epochs(tmp_path / "whole", **options)
    assert len(whole) == 12
    # A stream that had ended gives nothing at first, and by then the program has set the next epoch.
    stops = (4, 6) if "num_workers" in options else (4, 6, 8)
    for stop in (6, 9) if options.get("dataset") is EpochStream else stops:
        begun = loop_over_epochs(tmp_path / f"{stop}", stop, **options)
        assert begun + loop_over_epochs(tmp_path / f"{stop}", **options) == whole, stop
    told = "data= had come to the end of an epoch: the next loop over it begins a new one"
    if "dataset" in options and issubclass(options["dataset"], Stream):
        told = "data= reads an iterable dataset: if it had given its last batch, the next loop over it yields nothing"
    assert told in caplog.text
    assert "StreamWithState" not in str(options) or "as saved, except" not in caplog.text


class CountsEpochs(OwnOrder):
    """Has a state that tells the epoch, and not the place in it."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


class CountsIndices(CountsEpochs):
    """Continues after the index that it gave last."""

    def __iter__(self) -> Iterator[int]:
        for index in list(OwnOrder.__iter__(self))[self.epoch :]:
            self.epoch += 1
            yield index
        self.epoch = 0


@pytest.mark.parametrize(
    ("options", "warning", "is_lost"),
    [
        ({"dataset": Drawing, "num_workers": 1}, "draws random numbers in the workers", True),
        ({"sampler": OwnOrder}, "the OwnOrder of a StatefulDataLoader has no state_dict and load_state_dict", True),
        ({"sampler": CountsEpochs}, "the CountsEpochs of a", False),
        ({"sampler": CountsIndices}, "the CountsIndices of a", False),
        ({"batch_sampler": OwnBatches}, "the OwnBatches of a StatefulDataLoader has no state_dict", True),
    ],
    ids=plain_id,
)
def test_what_a_stateful_loader_does_not_keep_is_said(
    options: dict[str, Any], warning: str, is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for stop, warned in ((4, False), (6, is_lost)):
        loop_over_epochs(tmp_path / f"{stop}", stop, **options)
        caplog.clear()
        loop_over_epochs(tmp_path / f"{stop}", **options)
        assert (warning in caplog.text) is warned


def of_nodes(sampler: Any) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.Batcher(nodes.MapStyleWrapper(Samples(), sampler), 3))


def test_a_sampler_of_nodes_without_a_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of torch whose order is known are not."""
    nodes = pytest.importorskip("torchdata.nodes")
    in_order = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Samples()), 3, drop_last=False)
    check_cut(tmp_path, (1,), 3, lambda: nodes.Loader(nodes.SamplerWrapper(in_order)))
    warning = "the OwnOrder of a Loader has no state_dict and load_state_dict"
    for step in (1, 2):
        assert warning not in caplog.text
        run_to(tmp_path / "named", step, lambda: of_nodes(OwnOrder()))
    assert warning in caplog.text


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: torch.utils.data.RandomSampler(Samples()),
        lambda: torch.utils.data.WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator()),
        lambda: torch.utils.data.SubsetRandomSampler(range(12)),
    ],
)
def test_a_sampler_that_draws_without_a_state_is_refused(sampler: Callable[[], Any], tmp_path: Path) -> None:
    batches = torch.utils.data.BatchSampler(sampler(), 3, False)
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    of_loaders = [stateful_loader(sampler=sampler), kind(Samples(), batch_sampler=batches)]
    with CheckpointCallback(tmp_path) as checkpoint:
        for loader in of_loaders:
            with pytest.raises(hf.errors.OptionError, match="which has no state"):
                checkpoint.restore_or_initialize({"w": 0}, data=loader)
        for one in (sampler(), batches, samplers.RandomSampler(Samples())):
            with pytest.raises(hf.errors.OptionError, match=r"data= is a Loader whose order is drawn by a .*Sampler,"):
                checkpoint.restore_or_initialize({"w": 0}, data=of_nodes(one))


class Pack:
    """Puts records together until they weigh enough, and holds those of the next pack meanwhile."""

    def __call__(self, records: Any) -> Any:
        held: list[Any] = []
        for record in records:
            if sum(held) + record.data > 20:
                yield type(record)(record.metadata.remove_record_key(), held)
                held = []
            held.append(record.data)


@pytest.mark.parametrize("operations", [[Pack()], []], ids=["packing", "nothing"])
def test_operations_of_grain_that_hold_records_are_named(
    operations: list[Any], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    grain = pytest.importorskip("grain")

    def batches() -> Any:
        sampler = grain.samplers.SequentialSampler(40, grain.sharding.NoSharding())
        source = grain.sources.RangeDataSource(0, 40, 1)
        return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=operations))

    data = batches()
    with caplog.at_level(logging.WARNING, "holdfast"), CheckpointCallback(place) as checkpoint:
        checkpoint.restore_or_initialize({"w": 0}, data=data)
        next(data)
        checkpoint.on_step(1, {"w": 1}, data=data)
    again = batches()
    with CheckpointCallback(place) as checkpoint:
        checkpoint.restore_or_initialize({"w": 0}, data=again)
    assert (next(again) == next(data)) is not bool(operations)  # what is warned of is lost indeed
    said = {record.getMessage().partition(". ")[0] for record in caplog.records}
    assert said == ({"data= applies operations of the program to whole iterators: Pack"} if operations else set())


def test_a_grain_loader_that_would_refuse_its_resume_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Grain compares the repr of the source, and the repr of Python's objects is another in each process."""
    grain = pytest.importorskip("grain")

    def batches(source_repr: str | None) -> Any:
        members = {"__len__": lambda _: 8, "__getitem__": lambda _, index: index}
        members |= {} if source_repr is None else {"__repr__": lambda _: source_repr}
        source = type("Table", (), {"__module__": "train", **members})()
        sampler = grain.samplers.SequentialSampler(8, grain.sharding.NoSharding())
        return iter(grain.DataLoader(data_source=source, sampler=sampler))

    def run(source_repr: str | None) -> Any:
        with hf.CheckpointCallback(tmp_path) as checkpoint:
            checkpoint.restore_or_initialize({"w": 0}, data=(data := batches(source_repr)))
            value = next(data)
            checkpoint.on_step(1 if value == 0 else 2, {"w": 1}, data=data)
        return value

    with pytest.raises(hf.errors.OptionError, match=r"data= .* <train\.Table object at 0x.* Give Table a __repr__"):
        run(None)
    address = "<train.Table object at 0x7f0000000000>"  # such as a checkpoint of an earlier version has
    with pytest.raises(hf.errors.OptionError, match="Give Table"):
        run(address)
    assert (run("Table()"), run("Table()")) == (0, 1)
    with pytest.raises(ValueError, match="DataSource in checkpoint does not match") as error:
        run("Table(2)")
    assert error.value.__notes__ == [f"raised when data= was restored from step 2 in {tmp_path}"]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_loader_of_accelerate_is_refused_before_the_first_step(is_stateful: bool, tmp_path: Path) -> None:
    """It has the methods of a state, with which no resume is exact; skip_to needs one that has not begun its epoch."""
    methods = {"state_dict": lambda _: {}, "load_state_dict": lambda _, state: None, "__iter__": lambda _: iter(DATA)}
    base = type("DataLoaderAdapter", (), {"__module__": "accelerate.data_loader", **methods})
    loader: Any = type("DataLoaderShard", (base,), {"use_stateful_dataloader": is_stateful})()
    with (
        hf.CheckpointCallback(str(tmp_path)) as checkpoint,
        pytest.raises(hf.errors.OptionError, match=r"data= is a DataLoaderShard .* Leave use_stateful_dataloader out"),
    ):
        checkpoint.restore_or_initialize({"w": np.zeros(1)}, data=loader)
    if is_stateful:
        with pytest.raises(hf.errors.OptionError, match="begins its first epoch before the first batch is requested"):
            hf.skip_to(loader)
    else:
        assert next(hf.skip_to(loader)) == DATA[0]


def test_nothing_holds_a_loader_that_the_program_has_left(tmp_path: Path) -> None:
    """The workers of one that waits for a collection of garbage would end seconds late."""

    made: list[weakref.ref[Any]] = []

    def batches() -> Any:
        found = hf.skip_to(DataLoader(Drawing(), batch_size=2))
        made.append(weakref.ref(found))
        return found

    gc.collect()
    gc.disable()
    try:
        for until in (3, 6):  # The second one is resumed.
            run_to(tmp_path, until, batches)
            assert made[-1]() is None, until
    finally:
        gc.enable()
