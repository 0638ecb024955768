"""Makes the checkpoints of this folder with the real TensorFlow; run once, by hand, never by the tests.

    python -m venv venv && venv/bin/pip install tensorflow-cpu==2.21.0
    venv/bin/python tests/formats/tensorflow/make_fixtures.py  # works in /tmp/tensorflow_checkpoints

Beside the checkpoints it writes ``seen.json``: what TensorFlow itself reads in them. Bytes stand there as hexadecimal
digits, arrays as their little-endian elements in C order.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2 as graph_proto
from tensorflow.python.checkpoint.sharding import sharding_policies

HERE = Path(__file__).parent
WORK = Path("/tmp/tensorflow_checkpoints")
"""Where they are made: some note their absolute path, which nothing that reads them may need."""
GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
tf1 = tf.compat.v1


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Returns numbers that look like nothing in particular."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def guide(folder: Path) -> None:
    """The training loop of TensorFlow's guide: 50 steps, a manager that keeps the last three checkpoints."""

    class Net(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = tf.keras.layers.Dense(5)

        def call(self, x: Any) -> Any:
            return self.l1(x)

    tf.keras.utils.set_random_seed(7)
    inputs = tf.range(10.0)[:, None]
    labels = inputs * 5.0 + tf.range(5.0)[None, :]
    dataset = tf.data.Dataset.from_tensor_slices({"x": inputs, "y": labels}).repeat().batch(2)
    net, optimizer, iterator = Net(), tf.keras.optimizers.Adam(0.1), iter(dataset)
    checkpoint = tf.train.Checkpoint(step=tf.Variable(1), optimizer=optimizer, net=net, iterator=iterator)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3)
    for _ in range(50):
        example = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(net(example["x"]) - example["y"]))
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        checkpoint.step.assign_add(1)
        if int(checkpoint.step) % 10 == 1:
            manager.save()


def slots(folder: Path) -> None:
    """Optimizers that keep slots: Adam, and momentum for one of the variables; a variable that no one can reach."""

    class Layer(tf.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.kernel = tf.Variable(values(4, 3, seed=seed), name="kernel")
            self.bias = tf.Variable(values(3, seed=seed + 1), name="bias")

    net = tf.Module()
    net.l1, net.l2 = Layer(1), Layer(5)
    adam, momentum = tf1.train.AdamOptimizer(0.1), tf1.train.MomentumOptimizer(0.1, 0.9)
    hidden = tf.Variable(values(2))
    for seed in (10, 20):
        with tf.GradientTape() as tape:
            x = tf.constant(values(2, 4, seed=seed))
            loss = tf.reduce_mean((x @ net.l1.kernel + net.l1.bias) ** 2) + tf.reduce_sum(hidden**2)
        variables = [net.l1.kernel, net.l1.bias, hidden]
        gradients = tape.gradient(loss, variables)
        adam.apply_gradients(zip(gradients, variables, strict=True))
        momentum.apply_gradients([(tf.constant(values(4, 3, seed=seed)), net.l2.kernel)])
    tf.train.Checkpoint(net=net, optimizer=adam, momentum=momentum).write(str(folder / "model"))


def objects(folder: Path) -> None:
    """Lists, dictionaries, one variable under two names, a cycle, names that have to be escaped, state of Python."""

    class Counter(tf.train.experimental.PythonState):
        def serialize(self) -> str:
            return "seven\0"

        def deserialize(self, string: str) -> None:
            raise AssertionError(string)

    save = tf.train.Checkpoint()
    save.listed = [tf.Variable(1.0)]
    save.listed.append(tf.Variable(2.0))
    save.mapped = {"one": save.listed[0]}
    save.mapped["two"] = save.listed[1]
    first, second = tf.Module(), tf.Module()
    first.v, second.v = tf.Variable(3.0), tf.Variable(4.0)
    first.other, second.other = second, first
    save.first = first
    save.empty = tf.Module()
    save.odd = {
        "a/b": tf.Variable([1, 2]),
        "c.d": tf.Variable([3]),
        ".ATTRIBUTES": tf.Variable([4]),
        "ü": tf.Variable(5),
    }
    save.counter = Counter()
    save.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    save.table.insert(tf.constant(["a", "b\0"]), tf.constant([1, 2], tf.int64))
    save.save(str(folder / "objects"))


def dtypes(folder: Path) -> None:
    """One variable of every kind of element, scalars, empty tensors and text."""
    tensors = {
        name: tf.constant([[1, 0, 3]], getattr(tf, name))
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    }
    for name in ("bfloat16", "half", "float32", "float64", "complex64", "complex128"):
        tensors[name] = tf.cast(tf.constant([[1.5, -2.25], [float("inf"), 1e-3]]), getattr(tf, name))
    for name in ("float8_e5m2", "float8_e4m3fn"):
        tensors[name] = tf.cast(tf.constant([1.5, -2.25, 0.25]), getattr(tf.dtypes.experimental, name))
    for name in ("int4", "uint4"):
        tensors[name] = tf.cast(
            tf.constant([1, 7, 0, 5, 2 if name == "uint4" else -8], tf.int8), getattr(tf.dtypes.experimental, name)
        )
    tensors["qint8"] = tf.bitcast(tf.constant([-3, 4], tf.int8), tf.qint8)
    tensors["quint8"] = tf.bitcast(tf.constant([250, 4], tf.uint8), tf.quint8)
    tensors["qint32"] = tf.bitcast(tf.constant([-3, 4], tf.int32), tf.qint32)
    tensors |= {
        "bool": tf.constant([True, False, True]),
        "complex_values": tf.constant([1 + 2j, -3.5j], tf.complex64),
        "scalar": tf.constant(2.5),
        "empty": tf.zeros([0, 3]),
        "empty_text": tf.zeros([0], tf.string),
        "text": tf.constant("größe"),
        "texts": tf.constant([[b"a", b"bb", b""], [b"x" * 200, b"\x00\x01", b"\xff"]]),
        "texts_ending_in_zeros": tf.constant(["a\0", "\0", "b"]),
        "blank_texts": tf.constant(["", ""]),
    }
    names = sorted(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "dtypes"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tensors[name] for name in names],
    )


def shards(folder: Path) -> None:
    """Values divided among files of a few hundred bytes, so that one tensor lies in several."""
    checkpoint = tf.train.Checkpoint(
        kernel=tf.Variable(values(12, 10)),
        bias=tf.Variable(values(10, seed=1)),
        half=tf.Variable(tf.cast(values(7, 9, 2, seed=2), tf.bfloat16)),
        step=tf.Variable(3, dtype=tf.int64),
    )
    policy = sharding_policies.MaxShardSizePolicy(max_shard_size=200)
    checkpoint.save(str(folder / "sharded"), options=tf.train.CheckpointOptions(experimental_sharding_callback=policy))


def names(folder: Path) -> None:
    """A checkpoint of TensorFlow 1: names of variables and no objects, a variable in partitions, Adam's slots."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("dense"):
            kernel = tf1.get_variable("kernel", initializer=values(4, 3), use_resource=False)
            bias = tf1.get_variable("bias", initializer=values(3, seed=1), use_resource=False)
        embedding = tf1.get_variable(
            "embedding",
            shape=(7, 4),
            initializer=tf1.random_uniform_initializer(seed=2),
            partitioner=tf1.fixed_size_partitioner(3),
            use_resource=False,
        )
        step = tf1.train.get_or_create_global_step()
        loss = tf.reduce_sum((kernel * 2.0 + bias) ** 2) + tf.reduce_sum(tf1.nn.embedding_lookup(embedding, [0, 6]))
        train = tf1.train.AdamOptimizer(0.1).minimize(loss, step)
        saver = tf1.train.Saver(sharded=True)
        session.run(tf1.global_variables_initializer())
        for number in (1, 2):
            session.run(train)
            saver.save(session, str(folder / "model.ckpt"), global_step=number, write_meta_graph=False)


def many(folder: Path) -> None:
    """Thousands of tensors, so that the index has several blocks: each is what its name begins with."""
    found = sorted(hashlib.sha1(str(number).encode()).hexdigest() for number in range(5600))
    tf.raw_ops.SaveV2(
        prefix=str(folder / "many"),
        tensor_names=found,
        shape_and_slices=[""] * len(found),
        tensors=[tf.constant(int(name[:4], 16), tf.uint16) for name in found],
    )


def saved_model(folder: Path) -> None:
    """The variables of a model as they lie in a SavedModel."""
    module = tf.Module()
    module.scale = tf.Variable(values(3))
    tf.saved_model.save(module, str(folder))
    for name in ("fingerprint.pb", "assets"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "saved_model.pb").write_bytes(b"")


def seen(prefix: Path) -> dict[str, Any]:
    """Returns what TensorFlow reads in a checkpoint."""
    reader = tf.train.load_checkpoint(str(prefix))
    shapes, kinds = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    found: dict[str, Any] = {"variables": {}}
    for name in sorted(shapes):
        entry: dict[str, Any] = {"shape": shapes[name], "dtype": kinds[name].name}
        if kinds[name] == tf.variant:
            found["variables"][name] = entry
            continue
        if kinds[name] in (tf.qint8, tf.quint8, tf.qint32):
            (tensor,) = tf.raw_ops.RestoreV2(
                prefix=str(prefix), tensor_names=[name], shape_and_slices=[""], dtypes=[kinds[name]]
            )
            plain = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint32: tf.int32}[kinds[name]]
            array = tf.bitcast(tensor, plain).numpy()
        else:
            array = np.asarray(reader.get_tensor(name), object if kinds[name] == tf.string else None)
        if kinds[name] == tf.string:
            entry["bytes"] = [text.hex() for text in np.ravel(array).tolist()]
        else:
            entry["elements"] = array.tobytes().hex()
        found["variables"][name] = entry
    if GRAPH_KEY in shapes:
        graph = graph_proto.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(GRAPH_KEY))
        found["nodes"] = [
            {
                "children": {child.local_name: child.node_id for child in node.children},
                "attributes": [[a.name, a.full_name, a.checkpoint_key] for a in node.attributes],
                "slots": [
                    [s.original_variable_node_id, s.slot_name, s.slot_variable_node_id] for s in node.slot_variables
                ],
            }
            for node in graph.nodes
        ]
    return found


def main() -> None:
    """Makes all of them anew."""
    everything: dict[str, Any] = {}
    for make in (guide, slots, objects, dtypes, shards, names, many, saved_model):
        folder = WORK / make.__name__
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        shutil.rmtree(HERE / make.__name__, ignore_errors=True)
        shutil.copytree(folder, HERE / make.__name__)
        for index in sorted(folder.rglob("*.index")):
            prefix = index.with_suffix("")
            facts = seen(prefix)
            if make is many:  # as the tests expect, without a list of all of them
                for name, fact in facts["variables"].items():
                    assert fact["elements"] == name[2:4] + name[:2]
                continue
            everything[prefix.relative_to(WORK).as_posix()] = facts
    text = json.dumps(everything, separators=(",", ":"), sort_keys=True)
    (HERE / "seen.json").write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
