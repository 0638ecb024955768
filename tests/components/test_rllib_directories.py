"""Directories as RLlib writes them, made here without Ray: its files, its names, its two forms of states."""

from __future__ import annotations

import collections
import json
import logging
import pickle
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from tests.equality import assert_same

import holdfast as hf
from holdfast.components import Checkpointable, read_state
from holdfast.integrations.formats.rllib import decode_state

RAN: list[str] = []


def run(what: str) -> str:
    """The function that a hostile pickle would call."""
    RAN.append(what)
    return what


class Hostile:
    """Runs code when it is unpickled; with names, calls what that makes, as cloudpickle does with a script's own."""

    def __init__(self, *names: Any) -> None:
        self.names = names

    def __call__(self) -> None:
        """Never called."""

    def __reduce__(self) -> Any:
        return Hostile(*self.names[1:]) if self.names else run, ("hostile",)


def packed(value: Any) -> bytes:
    """Packs a state as msgpack with msgpack-numpy's arrays."""

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return {b"nd": True, b"type": item.dtype.str, b"kind": b"", b"shape": item.shape, b"data": item.tobytes()}
        assert isinstance(item, np.generic)
        return {b"nd": False, b"type": item.dtype.str, b"data": item.tobytes()}

    return bytes(msgpack.packb(value, default=default))


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


@pytest.fixture
def ray_class() -> Iterator[type]:
    """A class of a package that is not there when the checkpoint is read."""
    module = types.ModuleType("ray_stub")
    kind = type("Trainer", (), {"__module__": "ray_stub"})
    module.Trainer = kind  # type: ignore[attr-defined]  # a class of the module
    sys.modules["ray_stub"] = module
    yield kind
    sys.modules.pop("ray_stub", None)


WEIGHTS = {"net.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "net.0.bias": np.ones(2, np.float32)}


def write(path: Path, kind: type, form: str, name: str = "state") -> Path:
    path.parent.mkdir(exist_ok=True)
    pack = packed if form == "msgpack" else pickled
    counters: dict[Any, Any] = {"updates": 7, "rate": 0.5, "mean": np.zeros(3), 4: [1.5, "x", None, True]}
    for part, state, args in (
        ("", counters, ((3,), {"size": 3})),
        ("rl_module", {}, ((), {})),
        ("rl_module/p0", WEIGHTS, ((), {"size": 3})),
    ):
        place = path / part
        place.mkdir()
        state_name = name if not part else "module_state"
        (place / f"{state_name}.{form}").write_bytes(pack(state))
        (place / "class_and_ctor_args.pkl").write_bytes(pickled({"class": kind, "ctor_args_and_kwargs": args}))
        facts = {"class_and_ctor_args_file": "class_and_ctor_args.pkl", "state_file": state_name, "ray_version": "2.60"}
        (place / "metadata.json").write_text(json.dumps({**facts, "checkpoint_version": "2.1"}))
    return path


class Module(Checkpointable, torch.nn.Module):
    """The program's own module."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(size, 2))


def values_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


class Modules(Checkpointable, torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = torch.nn.ModuleDict({"p0": Module(), "p1": Module()})

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return list(self.members.items())


class Learner(Checkpointable):
    def __init__(self, modules: Any = None) -> None:
        self.rl_module: Any = Modules() if modules is None else modules
        self.updates, self.rate, self.mean = 0, 0.0, np.ones(3)


@pytest.mark.parametrize("form", ["msgpack", "pkl"])
def test_states_are_read_and_running_components_restored(tmp_path: Path, ray_class: type, form: str) -> None:
    path = write(tmp_path / "x", ray_class, form, name="algorithm_state")
    del sys.modules["ray_stub"]
    state = read_state(path)
    assert (state["updates"], state["rate"], state[4]) == (7, 0.5, [1.5, "x", None, True])
    assert_same(dict(state["rl_module"]["p0"]), WEIGHTS)

    learner = Learner()
    report = learner.restore_from_path(path)
    assert (learner.updates, learner.mean.tolist()) == (7, [0, 0, 0])
    assert np.array_equal(values_of(learner.rl_module.members["p0"])["net.0.weight"], WEIGHTS["net.0.weight"])
    assert report.missing == ("rl_module/p1",)
    assert report.unused_values == ("(root): 4/0", "(root): 4/1", "(root): 4/2", "(root): 4/3")
    learner.restore_from_path(path / "rl_module" / "p0", component="rl_module/p1")
    assert np.array_equal(values_of(learner.rl_module.members["p1"])["net.0.bias"], WEIGHTS["net.0.bias"])


def test_components_are_made_of_classes_that_the_caller_names(tmp_path: Path, ray_class: type) -> None:
    path = write(tmp_path / "x", ray_class, "pkl") / "rl_module" / "p0"
    with pytest.raises(hf.errors.NotAllowedError, match="ray_stub:Trainer, which is not allowed: nothing was imported"):
        Module.from_checkpoint(path)
    named = Module.from_checkpoint(path, renamed={"ray_stub:Trainer": Module})
    for made in (named, Module.from_checkpoint(path, fallback=True)):
        assert np.array_equal(values_of(made)["net.0.weight"], WEIGHTS["net.0.weight"])


def test_what_a_restore_does_not_need_is_no_damage(tmp_path: Path, ray_class: type) -> None:
    path = write(tmp_path / "x", ray_class, "pkl")
    arguments = ((), {"policy_mapping_fn": Hostile("lambda", "code")})
    mapping = {"class": Hostile("Script"), "ctor_args_and_kwargs": arguments}
    for content in (pickled(mapping), b"\x80\x05", b""):
        (path / "class_and_ctor_args.pkl").write_bytes(content)
        learner = Learner()
        learner.restore_from_path(path)
        assert learner.updates == 7
        with pytest.raises((hf.errors.NotAllowedError, hf.DamagedCheckpointError, hf.errors.OptionError)):
            Learner.from_checkpoint(path)
    (path / "state.pkl").write_bytes(pickled({"updates": 8, "policy_mapping_fn": Hostile("lambda")}))
    learner.restore_from_path(path)
    assert learner.updates == 8


class Filter(Checkpointable):
    """Normalizes observations by their statistics, which RLlib keeps by agent: None where there is one."""

    def __init__(self) -> None:
        self.statistics: dict[Any, Any] = {None: {"mean": np.ones(3), "count": 5}}

    def get_state(self, components: Any = None, *, not_components: Any = None, **options: Any) -> dict[str, Any]:
        return {"statistics": list(self.statistics.items())}

    def set_state(self, state: Any) -> None:
        self.statistics = dict(state.get("statistics", state))


class Plain(Checkpointable):
    def __init__(self) -> None:
        self.statistics: dict[str, Any] = {}


@pytest.mark.parametrize("form", ["msgpack", "pkl"])
@pytest.mark.parametrize("nested", [True, False])
def test_statistics_under_the_key_none_reach_the_filter(tmp_path: Path, form: str, nested: bool) -> None:
    statistics = {None: {"mean": np.zeros(3), "count": 900}}
    state: dict[Any, Any] = {"statistics": statistics} if nested else statistics
    path = tmp_path / f"state.{form}"
    path.write_bytes({"msgpack": packed, "pkl": pickled}[form](state))
    running = Filter()
    assert running.restore_from_path(tmp_path, strict=True).complete
    assert running.statistics[None]["count"] == 900
    lost = "(root): statistics (a dictionary with the key None)" if nested else "(root): an entry with the key None"
    plain = Plain()
    with pytest.raises(hf.TreeMismatchError, match="has values that cannot be restored") as caught:
        plain.restore_from_path(tmp_path, strict=True)
    assert lost in str(caught.value)
    report = plain.restore_from_path(tmp_path)
    assert (report.complete, report.unused_values) == (False, (lost,))


def test_a_dictionary_of_components_is_the_same_tree(tmp_path: Path, ray_class: type) -> None:
    path = write(tmp_path / "x", ray_class, "msgpack")
    learner = Learner({"p0": Module()})
    report = learner.restore_from_path(path)
    assert (report.missing, report.unused) == ((), ())
    assert np.array_equal(values_of(learner.rl_module["p0"])["net.0.weight"], WEIGHTS["net.0.weight"])

    learner, fresh = Learner({"p0": Module()}), Learner({"p0": Module()})
    state = read_state(path)
    learner.set_state(state)
    assert learner.updates == 7
    assert np.array_equal(values_of(learner.rl_module["p0"])["net.0.bias"], WEIGHTS["net.0.bias"])
    assert list(state["rl_module"]) == ["p0"]  # which is not changed
    learner.set_state(fresh.get_state())
    assert learner.updates == 0
    # A state to save may nest names as directories do.
    nested = {"updates": 3, "rl_module": {"p0": fresh.get_state()["rl_module/p0"]}}
    report = learner.restore_from_path(fresh.save_to_path(tmp_path / "nested", state=nested))
    assert (learner.updates, report.missing, report.unused_values) == (3, (), ())


def test_hostile_pickles_run_nothing(tmp_path: Path, ray_class: type, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "x", ray_class, "pkl")
    (path / "state.pkl").write_bytes(pickled({"updates": 3, "bad": Hostile(), "list": [1, Hostile()]}))
    (path / "class_and_ctor_args.pkl").write_bytes(pickled(Hostile()))
    with caplog.at_level(logging.WARNING, "holdfast"):
        state = read_state(path)
    assert state["updates"] == 3
    assert "bad" not in state
    assert "list" not in state
    assert "left out objects that are not data: bad" in caplog.text
    with pytest.raises((hf.errors.NotAllowedError, hf.DamagedCheckpointError)):
        Learner.from_checkpoint(path)
    (path / "state.pkl").write_bytes(pickled(Hostile()))
    with pytest.raises(hf.DamagedCheckpointError, match="not a dictionary of data"):
        read_state(path)
    assert RAN == []


ENDLESS: dict[str, Any] = {}
ENDLESS["self"] = ENDLESS
BOMB: Any = ["x"]
for _ in range(60):
    BOMB = [BOMB, BOMB]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.pkl", b"\x80\x05", ""),
        ("state.pkl", b"cos\nsystem\n(S'true'\ntR.", ""),
        ("state.pkl", pickled(ENDLESS), "nested too deeply"),
        ("state.pkl", pickled({"bomb": BOMB}), ""),
        ("metadata.json", b"{", ""),
        ("metadata.json", b"[" * 100_000, ""),
        ("state.msgpack", packed({}), ""),
        ("rl_module/module_state.pkl", b"", ""),
    ],
    ids=["cut off", "old opcodes", "endless", "bomb", "json", "deep json", "two states", "empty"],
)
def test_damaged_directories(tmp_path: Path, ray_class: type, file: str, content: bytes, message: str) -> None:
    path = write(tmp_path / "x", ray_class, "pkl")
    (path / file).write_bytes(content)
    learner = Learner()
    with pytest.raises(hf.DamagedCheckpointError) as error:
        learner.restore_from_path(path)
    assert message in str(error.value)
    assert learner.updates == 0


def test_numbers_of_msgpack() -> None:
    assert decode_state(packed({"complex": {b"complex": True, b"data": "(1-2j)"}})) == {"complex": 1 - 2j}
    assert decode_state(b"\xca" + struct.pack(">f", 0.1)) == np.float32(0.1)
    assert decode_state(packed({"scalar": np.float32(2)})) == {"scalar": 2}
    for wrong in (
        {b"nd": True, b"type": "<f4", b"shape": [1]},
        {b"nd": False, b"type": "<f4", b"data": b""},
        {b"complex": True, b"data": "x"},
    ):
        with pytest.raises(hf.DamagedCheckpointError):
            decode_state(packed(wrong))


def test_numpy_in_every_pickle_protocol(tmp_path: Path) -> None:
    state = {
        "array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(2),
        "ordered": collections.OrderedDict(x=1),
        "deque": collections.deque([1, 2]),
        "text": np.array(["ab"]),
        "tuple": (1, (2,)),
    }
    for protocol in (2, 4, 5):
        (tmp_path / "state.pkl").write_bytes(pickle.dumps(state, protocol=protocol))
        found = read_state(tmp_path)
        assert np.array_equal(found["array"], state["array"])  # type: ignore[arg-type]  # an array
        assert found["scalar"] == 2
        assert (found["deque"], found["tuple"], dict(found["ordered"])) == ([1, 2], (1, (2,)), {"x": 1})


@pytest.mark.parametrize("form", ["pkl", "msgpack"])
def test_every_front_knows_the_directories(
    tmp_path: Path, form: str, ray_class: type, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 12):
        write(tmp_path / "trial" / f"checkpoint_{step:06}", ray_class, form)
    path = tmp_path / "trial" / "checkpoint_000012"
    expected = read_state(path)
    found = hf.load(path)
    assert found["updates"] == hf.load(tmp_path / "trial")["updates"] == expected["updates"] == 7
    assert found[4] == expected[4] == [1.5, "x", None, True]
    assert found["rl_module"]["p0"].keys() == WEIGHTS.keys()
    like = {name: torch.from_numpy(np.zeros_like(value)) for name, value in WEIGHTS.items()}
    taken = hf.load(path, select="rl_module/p0/**", like={"rl_module": {"p0": like}})["rl_module"]["p0"]
    assert all(taken[name].numpy().tobytes() == value.tobytes() for name, value in WEIGHTS.items())
    assert [(one.step, one.reason) for one in hf.list_checkpoints(tmp_path / "trial")] == [
        (0, "written by RLlib"),
        (12, "written by RLlib"),
    ]
    assert {leaf.path for leaf in hf.describe(path)} >= {"updates", "4/1", "rl_module/p0/net.0.weight"}
    assert [done.step for done in hf.import_checkpoint(tmp_path / "trial", tmp_path / "ours")] == [0, 12]
    assert hf.load(tmp_path / "ours")["rl_module"]["p0"]["net.0.bias"].tolist() == [1, 1]
    with pytest.raises(hf.CheckpointExistsError, match="2 checkpoints of RLlib, the newest checkpoint_000012"):
        hf.CheckpointManager(tmp_path / "trial")
