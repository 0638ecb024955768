"""Answers ``benchmarks.peers_agree`` by TensorFlow, in the Python that has it: nothing of ours is imported."""

from __future__ import annotations

import glob
import importlib
import json
import random
import sys
import types
from typing import Any

import numpy as np

tf: Any = importlib.import_module("tensorflow")
checkpoint_management: Any = importlib.import_module("tensorflow.python.checkpoint.checkpoint_management")
_DTYPES = ("float32", "float64", "float16", "int8", "int32", "int64", "uint16", "bool", "complex64")


def retention(place: str, hours: float | None, managers: list[Any]) -> Any:
    """Return, after each save, the numbers on the disk and those that the manager lists."""
    clock = checkpoint_management.time = types.SimpleNamespace()
    checkpoint, found = tf.train.Checkpoint(value=tf.Variable([0.0])), []
    for most, made, times in managers:
        clock.time = lambda made=made: made
        manager = tf.train.CheckpointManager(checkpoint, place, most, hours)
        for now in times:
            clock.time = lambda now=now: now
            manager.save()
            files = glob.glob(f"{place}/ckpt-*.index")
            numbers = sorted(int(file.rpartition("-")[2].removesuffix(".index")) for file in files)
            found.append([numbers, [int(one.rpartition("-")[2]) for one in manager.checkpoints]])
    return found


def variable(rng: random.Random) -> Any:
    shape = [rng.choice([1, 2, 3, 5]) for _ in range(rng.randrange(4))]
    values = np.random.default_rng(rng.getrandbits(32)).normal(size=shape) * 50
    name = rng.choice(_DTYPES)
    return tf.Variable(np.asarray(values > 0 if name == "bool" else values).astype(name))


def module(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.choice(["module", "list", "dict"]) if depth == 3 or (depth and rng.random() < 0.5) else "variable"
    if kind == "variable":
        return variable(rng)
    children = {f"{rng.choice('abcxyz')}{index}": module(rng, depth - 1) for index in range(rng.randrange(1, 4))}
    holder = tf.Module()
    if kind == "module":
        for name, child in children.items():
            setattr(holder, name, child)
    else:
        holder.parts = list(children.values()) if kind == "list" else children
    return holder


def keras(rng: random.Random) -> Any:
    """Return a model after a step of its optimizer."""
    model = tf.keras.Sequential()
    for _ in range(rng.randrange(1, 4)):
        model.add(
            rng.choice(
                [
                    lambda: tf.keras.layers.Dense(rng.randrange(1, 5), use_bias=rng.random() < 0.5),
                    tf.keras.layers.BatchNormalization,
                    lambda: tf.keras.layers.Dropout(0.5),
                ]
            )()
        )
    model.add(tf.keras.layers.Dense(1))
    model.compile(optimizer=rng.choice(["adam", "sgd", "rmsprop"]), loss="mse")
    model.fit(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), verbose=0)
    return model


def written(place: str, value: Any) -> Any:
    """Write a checkpoint, and return what TensorFlow reads from it."""
    tf.train.Checkpoint(root=value).write(place)
    reader, found = tf.train.load_checkpoint(place), {}
    for name, shape in reader.get_variable_to_shape_map().items():
        tensor = reader.get_tensor(name)
        content = tensor.tobytes().hex() if isinstance(tensor, np.ndarray | np.generic) else None
        found[name] = {"shape": list(shape), "bytes": content}
    return found


def answer(question: dict[str, Any]) -> Any:
    kind, place = question.pop("kind"), question["place"]
    if kind == "retention":
        return retention(**question)
    rng = random.Random(question["seed"])
    return written(place, keras(rng) if kind == "keras" else module(rng))


if __name__ == "__main__":
    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
