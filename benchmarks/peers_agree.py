"""``python -m benchmarks.peers_agree``: what holdfast and the real Orbax, TensorFlow and RLlib do with the same inputs.

Each case follows from its seed: a tree, transformations, or a series of saves under rules of retention. A kind of case
whose library is not installed is skipped, and the table says so. TensorFlow may have an environment of its own:
``--tensorflow PYTHON``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import holdfast as hf
from holdfast import graph
from holdfast.components import Checkpointable, read_state

from .table import aligned

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint16", "bool", "complex64")
_SIDE = Path(__file__).with_name("peers") / "tensorflow_side.py"
_HOUR = 3600.0


class Differs(Exception):  # noqa: N818 - a result
    """Says what differs in a case."""


class Clock:
    """Shows the time that the case sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def array(rng: random.Random, *, empty: bool = True) -> Any:
    """Return an array of any shape; ``empty`` ones have no elements at times."""
    shape = [rng.choice([0, 1, 2, 3, 5] if empty else [1, 2, 3, 5]) for _ in range(rng.randrange(4))]
    name = rng.choice(_DTYPES)
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    values = np.random.default_rng(rng.getrandbits(32)).normal(size=shape) * 50
    return np.asarray(values > 0 if name == "bool" else values).astype(dtype)


def tree(rng: random.Random, depth: int = 3, **options: bool) -> Any:
    """Return a tree of containers with arrays, of which none is empty."""
    kind = rng.choice(["dict", "list", "tuple"]) if depth == 3 or (depth and rng.random() < 0.5) else "array"
    if kind == "array":
        return array(rng, **options)
    children = [tree(rng, depth - 1, **options) for _ in range(rng.randrange(1, 4))]
    if kind == "dict":
        return {f"{rng.choice('abcxyz')}{index}": child for index, child in enumerate(children)}
    return list(children) if kind == "list" else tuple(children)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Generate the arrays of a tree with their paths; tuples and lists are alike."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if pairs is None:
        yield path, np.asarray(value)
    else:
        for key, child in pairs:
            yield from leaves(child, f"{path}/{key}")


def compare(found: Any, expected: Any, what: str) -> None:
    """Raise Differs unless two trees have the same arrays, bit for bit."""
    one, other = dict(leaves(found)), dict(leaves(expected))
    if one.keys() != other.keys():
        raise Differs(f"{what}: names {sorted(one.keys() ^ other.keys())}")
    for path, value in one.items():
        like = other[path]
        if (value.dtype, value.shape, value.tobytes()) != (like.dtype, like.shape, like.tobytes()):
            raise Differs(f"{what}: {path}: {value.dtype}{value.shape} and {like.dtype}{like.shape}")


def same(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise Differs(f"{what}: {found} and {expected}")


# ---- Orbax


def orbax_reads(rng: random.Random, place: Path) -> None:
    """A tree that Orbax has saved."""
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]

    expected = tree(rng, empty=False)  # Orbax does not save empty ones.
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(place / "orbax", expected)
    checkpointer.wait_until_finished()
    compare(hf.load(place / "orbax"), expected, "without a template")
    compare(hf.load(place / "orbax", like=expected), expected, "with a template")


def orbax_exports(rng: random.Random, place: Path) -> None:
    """A tree that holdfast has saved and exported."""
    import orbax.checkpoint as ocp

    expected = tree(rng)
    hf.save(place / "ours", expected)
    hf.export_checkpoint(place / "ours", place / "orbax", "orbax")
    compare(ocp.StandardCheckpointer().restore(place / "orbax", target=expected), expected, "restored by Orbax")


def orbax_transforms(rng: random.Random, _: Path) -> None:
    """Transformations of a tree, and refusals."""
    import orbax.checkpoint as ocp

    def flat() -> dict[str, Any]:
        return {name: {f"w{index}": array(rng) for index in range(2)} for name in rng.sample("abcd", 3)}

    original, new = flat(), flat()
    names = [f"{group}/{name}" for group, entries in new.items() for name in entries]
    to_original = rng.random() < 0.5
    table: dict[str, dict[str, Any]] = {}
    for _round in range(rng.randrange(4)):
        key = rng.choice(["a/w0", "b/w1", "c/w0", r"d/(\w+)", r"(\w)/w1"])
        entry: dict[str, Any] = rng.choice(
            [
                {},
                {
                    "original_key": rng.choice(["a/w0", "b/w1", r"c/\1", "x/w0"])
                    if "(" in key
                    else rng.choice(["a/w0", "d/w1"])
                },
                {"use_fallback": True},
                {"value_fn": np.negative},
            ]
        )
        # Orbax ignores a transformation that matches no key of the new tree; here it is an error. Of several that match
        # a key, Orbax applies all in turn; here the most specific one counts.
        matched = {name for name in names if re.fullmatch(key, name)}
        others = (other for other in table if other != key)
        if matched and not any(re.fullmatch(other, name) for other in others for name in matched):
            table[key] = entry

    def result(transform: Any, apply: Any) -> Any:
        made = {key: transform(**arguments) for key, arguments in table.items()}
        try:
            return apply(original, made, new, default_to_original=to_original)
        except (ValueError, KeyError, TypeError, hf.errors.HoldfastError):
            return "refused"

    theirs = result(ocp.Transform, ocp.apply_transformations)
    ours = result(hf.Transform, hf.apply_transformations)
    if isinstance(ours, str) or isinstance(theirs, str):
        same(ours if isinstance(ours, str) else "made", theirs if isinstance(theirs, str) else "made", str(table))
    else:
        compare(ours, theirs, str(table))


def orbax_retention(rng: random.Random, place: Path) -> None:
    """Which steps are saved, kept and best; holdfast keeps the newest, whatever its metric is."""
    import orbax.checkpoint as ocp

    interval = rng.choice([1, 1, 2, 3])
    options: dict[str, Any] = {"save_interval_steps": interval, "max_to_keep": rng.choice([None, 1, 2, 3])}
    if options["max_to_keep"] is not None and rng.random() < 0.5:
        options["keep_period"] = interval * rng.choice([2, 3])
    ranks = options["max_to_keep"] is not None and rng.random() < 0.5
    if ranks:
        options |= {"best_mode": rng.choice(["min", "max"])}
    values = rng.sample(range(100), 12)
    ranking: Any = {"best_fn": lambda metrics: metrics["loss"]} if ranks else {}
    theirs = ocp.CheckpointManager(
        place / "orbax",
        options=ocp.CheckpointManagerOptions(**options, **ranking, enable_async_checkpointing=False),
    )
    ours = hf.CheckpointManager(place / "ours", options=hf.CheckpointManagerOptions(**options, **ranking))
    with ours, contextlib.closing(theirs):
        for step, value in enumerate(values):  # Orbax always saves the first step that it sees; here that is step 0.
            metrics, item = {"loss": float(value)} if ranks else None, {"w": np.full(2, step)}
            saved = theirs.save(step, args=ocp.args.StandardSave(item), metrics=metrics)
            same(ours.save(step, item, metrics=metrics), saved, f"{options}: whether step {step} is saved")
            ours.wait_until_finished()
            kept, expected = set(ours.all_steps()), set(theirs.all_steps())
            if ranks and ours.why_kept(max(kept)) == ("newest",):
                expected |= {max(kept)}
            same(sorted(kept), sorted(expected), f"{options}: kept after step {step}, metrics {values}")
            if ranks:
                same(ours.best_step(), theirs.best_step(), f"{options}: the best after step {step}")


# ---- RLlib: trees of components, which both save, restore, construct and filter


class Part(Checkpointable):
    """Arrays by name, and components below it; a spec holds both."""

    __untracked__ = ("parts", "spec")

    def __init__(self, spec: Any) -> None:
        self.spec, values = spec, spec["values"]
        vars(self).update({name: array.copy() for name, array in values.items()})
        self.parts = {name: type(self)(inner) for name, inner in spec["parts"].items()}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return list(self.parts.items())


@functools.cache
def rllib_part() -> Any:
    """Return the class of such a component for RLlib, with the state that its documentation asks for."""
    checkpoints: Any = importlib.import_module("ray.rllib.utils.checkpoints")

    class RLlibPart(checkpoints.Checkpointable):  # type: ignore[misc]  # its base is Any
        def __init__(self, spec: Any) -> None:
            self.spec = spec
            self.values = {name: array.copy() for name, array in spec["values"].items()}
            self.parts = {name: type(self)(inner) for name, inner in spec["parts"].items()}

        def get_state(self, components: Any = None, *, not_components: Any = None, **_: Any) -> Any:
            found = dict(self.values)
            for name, part in self.parts.items():
                if self._check_component(name, components, not_components):
                    chosen, left = (self._get_subcomponents(name, one) for one in (components, not_components))
                    found[name] = part.get_state(chosen, not_components=left)
            return found

        def set_state(self, state: Any) -> None:
            for name, value in state.items():
                if name in self.parts:
                    self.parts[name].set_state(value)
                else:
                    self.values[name] = value

        def get_ctor_args_and_kwargs(self) -> Any:
            return (self.spec,), {}

        def get_checkpointable_components(self) -> Any:
            return list(self.parts.items())

    return RLlibPart


def component_spec(rng: random.Random, names: Iterator[int], depth: int = 2) -> Any:
    """Return a tree of components, whose names are all different."""
    parts = {f"p{next(names)}": component_spec(rng, names, depth - 1) for _ in range(rng.randrange(3) if depth else 0)}
    values = {name: array(rng) for name in rng.sample("abc", rng.randrange(1, 3))}
    # RLlib pickles the class of bfloat16, which is not numpy's, and which holdfast does not read.
    known = {name: one.astype(np.float32) if one.dtype.kind == "V" else one for name, one in values.items()}
    return {"values": known, "parts": parts}


def others(spec: Any, rng: random.Random) -> Any:
    """Return the same tree with other values, and without some components."""
    kept = {name: inner for name, inner in spec["parts"].items() if rng.random() < 0.8}
    values = {name: np.zeros_like(one) for name, one in spec["values"].items()}
    return {"values": values, "parts": {name: others(inner, rng) for name, inner in kept.items()}}


def paths_of(spec: Any, above: str = "") -> list[str]:
    found = []
    for name, inner in spec["parts"].items():
        found += [f"{above}{name}", *paths_of(inner, f"{above}{name}/")]
    return found


def rllib_trees(rng: random.Random, place: Path) -> None:
    """Trees that both have saved, restored into a program with other components, and constructed."""
    spec = component_spec(rng, itertools.count())
    running = others(spec, rng)
    mine, theirs, kind = Part(running), rllib_part()(running), rllib_part()
    ours = Part(spec).save_to_path(place / "ours")
    path = kind(spec).save_to_path(place / "theirs")
    compare(read_state(path), read_state(ours), "read as data")
    theirs.restore_from_path(path)
    for origin in (ours, path):
        mine.restore_from_path(origin)
        compare(mine.get_state(), theirs.get_state(), "restored")
    made = Part.from_checkpoint(path, fallback=True, spec=spec)
    compare(made.get_state(), kind.from_checkpoint(path).get_state(), "constructed")


def rllib_parts(rng: random.Random, place: Path) -> None:
    """One component restored alone, and states of chosen components."""
    spec = component_spec(rng, itertools.count())
    running = others(spec, rng)
    mine, theirs, path = Part(running), rllib_part()(running), rllib_part()(spec).save_to_path(place / "theirs")
    for name in rng.sample(paths_of(running), min(2, len(paths_of(running)))):
        for one in (mine, theirs):
            one.restore_from_path(f"{path}/{name}", component=name)
        compare(mine.get_state(), theirs.get_state(), f"restored {name}")
        for option in ("components", "not_components"):
            found = [one.get_state(**{option: rng.choice([name, [name]])}) for one in (mine, theirs)]
            compare(found[0], found[1], f"{option}={name}")


# ---- TensorFlow, in its own process


class TensorFlow:
    """Answers questions by TensorFlow: one line of JSON each."""

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, str(_SIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.is_there = self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def tensorflow_retention(peer: TensorFlow, rng: random.Random, place: Path) -> None:
    """Which numbers are kept by managers that follow each other in a directory."""
    hours = rng.choice([None, 1, 2.5])
    now = 1e9
    managers: list[tuple[int | None, float, list[float]]] = []
    for _ in range(rng.randrange(1, 4)):
        number = rng.choice([None, 1, 2, 3])
        times = []
        made = now
        for _ in range(rng.randrange(1, 7)):
            now += rng.choice([1.0, 0.3 * _HOUR, 1.1 * _HOUR, 3 * _HOUR])
            times.append(now)
        managers.append((number, made, times))
    clock, checkpoint, found = Clock(), graph.Checkpoint(value=np.zeros(1)), []
    for most, clock.time, times in managers:
        with graph.CheckpointManager(checkpoint, place / "ours", most, hours, clock=clock) as manager:
            for clock.time in times:
                manager.save()
                numbers = [int(one.name.partition("-")[2]) for one in (place / "ours").glob("ckpt-*")]
                found.append([sorted(numbers), [int(one.rpartition("-")[2]) for one in manager.checkpoints]])
    expected = peer.ask(kind="retention", place=str(place / "tensorflow"), hours=hours, managers=managers)
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs, f"hours {hours}, managers {managers}: on the disk and listed")


def tensorflow_values(peer: TensorFlow, rng: random.Random, place: Path, *, keras: bool = False) -> None:
    """Names, shapes and values of a checkpoint that TensorFlow has written, read by both."""
    expected = peer.ask(kind="keras" if keras else "values", place=str(place / "saved"), seed=rng.getrandbits(32))
    reader = graph.load_checkpoint(str(place / "saved"))
    same(dict(reader.get_variable_to_shape_map()), {name: one["shape"] for name, one in expected.items()}, "shapes")
    for name, one in expected.items():
        if one["bytes"] is not None:
            same(np.asarray(reader.get_tensor(name)).tobytes().hex(), one["bytes"], name)


def cases(tensorflow: TensorFlow | None) -> dict[str, Callable[[random.Random, Path], None] | str]:
    """Return the kinds of cases, or why they are skipped."""
    missing = "orbax-checkpoint is not installed" if importlib.util.find_spec("orbax") is None else None
    absent = "TensorFlow is not installed: --tensorflow PYTHON"
    without = "RLlib is not installed" if importlib.util.find_spec("ray") is None else None

    def asked(kind: Any, **options: Any) -> Callable[[random.Random, Path], None] | str:
        if tensorflow is None or not tensorflow.is_there:
            return absent
        return lambda rng, place: kind(tensorflow, rng, place, **options)

    return {
        "Orbax: trees that it has saved": missing or orbax_reads,
        "Orbax: trees that are exported": missing or orbax_exports,
        "Orbax: transformations": missing or orbax_transforms,
        "Orbax: retention": missing or orbax_retention,
        "RLlib: trees of components": without or rllib_trees,
        "RLlib: parts and filters": without or rllib_parts,
        "TensorFlow: retention": asked(tensorflow_retention),
        "TensorFlow: values": asked(tensorflow_values),
        "TensorFlow: models of Keras": asked(tensorflow_values, keras=True),
    }


def run(kind: Callable[[random.Random, Path], None], name: str, seeds: range) -> list[str]:
    """Run the cases of some seeds, and return what differs."""
    differing = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as place:
            try:
                kind(random.Random(f"{name} {seed}"), Path(place))
            except Differs as difference:
                differing.append(f"seed {seed}: {difference}")
            except Exception as error:
                differing.append(f"seed {seed}: {type(error).__name__}: {error}")
    return differing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50, help="cases of each kind (50)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--tensorflow", metavar="PYTHON", default=sys.executable, help="the Python that has TensorFlow")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    is_wanted = "tensorflow" in options.only.lower() or not options.only
    peer = TensorFlow(options.tensorflow) if is_wanted else None
    lines, failures = [["", "cases", "differing"]], 0
    try:
        for name, kind in cases(peer).items():
            if options.only.lower() not in name.lower():
                continue
            if isinstance(kind, str):
                lines.append([name, "-", f"skipped: {kind}"])
                continue
            differing = run(kind, name, range(options.first, options.first + options.cases))
            failures += len(differing)
            lines.append([name, str(options.cases), str(len(differing))])
            for line in differing[:5]:
                print(f"{name}: {line}", file=sys.stderr)
    finally:
        logging.disable(logging.NOTSET)
        if peer is not None:
            peer.close()
    print(aligned(lines))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
