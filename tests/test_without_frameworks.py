"""Reading a checkpoint needs neither the frameworks nor the devices it was saved with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf

READ = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "torch", "flax", "optax", "lightning", "pytorch_lightning"}:
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocked())
import numpy as np
import holdfast as hf

place = sys.argv[1]
tree = hf.load(place)
assert sorted(tree) == ["jax", "keys", "numpy", "torch"], sorted(tree)
assert tree["jax"]["bf16"].dtype.name == "bfloat16"
for leaf in (tree["jax"]["sharded"], tree["torch"]["w"], tree["numpy"]):
    assert type(leaf) is np.ndarray
    assert leaf.dtype == np.float32
    assert leaf.tolist() == np.arange(64.0).reshape(8, 8).tolist()
assert tree["keys"].dtype == np.uint32
assert tree["torch"]["half"].tolist() == [1 + 2j]
template = {"jax": {"sharded": np.zeros((8, 8), np.float32)}}
assert hf.load(place, like=template, select="jax/sharded")["jax"]["sharded"][7, 7] == 63
assert len(hf.describe(place)) == 6
assert hf.verify(place).ok
hf.save(place + ".again", tree)
assert hf.load(place + ".again")["numpy"][7, 7] == 63

from holdfast.engine.arrays.snapshot import KnownTree

snapshot, known = KnownTree.snapshot, []
KnownTree.snapshot = lambda self, tree: known.append(snapshot(self, tree)) or known[-1]
with hf.CheckpointManager(place + ".run") as manager:
    for step in range(3):
        manager.save(step, tree)
    assert [copies is not None for copies in known] == [True, False], known  # the first one is still held here
    assert manager.restore(1)["numpy"][7, 7] == 63
print("read")
"""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_program_that_has_none_of_them(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    torch: Any = pytest.importorskip("torch")
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "jax": {"sharded": jax.device_put(values, sharding), "bf16": jax.numpy.ones(3, "bfloat16")},
        "keys": jax.random.split(jax.random.key(0), 3),
        "torch": {
            "w": torch.nn.Parameter(torch.from_numpy(values.copy())),
            "half": torch.tensor([1 + 2j], dtype=torch.complex64).to(torch.complex32),
        },
        "numpy": values,
    }
    hf.save(tmp_path / "ckpt", tree)
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ, str(tmp_path / "ckpt")], capture_output=True, text=True, check=False
    )
    assert found.stdout == "read\n", found.stderr


HALF = """
import sys, types

# As another thread finds them in the middle of an import.
for name in ("torch", "jax", "flax", "flax.nnx", "flax.training.train_state"):
    sys.modules[name] = types.ModuleType(name)
import numpy as np
import holdfast as hf
import holdfast.components, holdfast.graph
from holdfast.integrations.loop import CheckpointCallback

class Counter:
    def __init__(self):
        self.seen = {"values": [1, 2], "rate": np.float32(0.5)}

    def get_state(self):
        return {**self.seen, "words": np.arange(3)}

    def set_state(self, state):
        self.seen = {"values": state["values"], "rate": state["rate"]}

class Part(hf.components.Checkpointable):
    def __init__(self, size, device="cpu"):
        self.weights, self.counter = np.zeros(size), Counter()

place = sys.argv[1]
hf.save(place + ".tree", {"a": np.ones(2)})
hf.graph.Checkpoint(counter=Counter(), net=hf.graph.Node(w=np.ones(2))).write(place + ".graph")
path = Part(3).save_to_path(place + ".component")
assert Part.from_checkpoint(path).weights.shape == (3,)
with CheckpointCallback(place + ".loop", save_interval_steps=1) as callback:
    callback.on_step(1, {"w": np.ones(2)})
print("saved")
"""


def test_a_framework_that_another_thread_is_importing_is_none_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HALF, str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
