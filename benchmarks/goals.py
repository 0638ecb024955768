"""The goals of holdfast, as ratios and limits within one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .results import Results

JAX, TORCH = "holdfast (jax)", "holdfast (torch)"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One number that must stay on the right side of a limit.

    Attributes:
        name: What is compared with what.
        value: What was measured; None when this run did not measure it.
        limit: What must be reached.
        at_least: Whether more is better.
        unit: Follows the numbers in print.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether it was measured and lies on the right side of the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def bound(self) -> str:
        """The limit, as text."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit}"

    @property
    def found(self) -> str:
        """The measured value, as text."""
        return "not measured" if self.value is None else f"{self.value:.3g}{self.unit}"

    @property
    def verdict(self) -> str:
        """The verdict, in one word."""
        return "met" if self.met else "MISSED"


def goals(results: Results) -> list[Goal]:
    """Return every goal, with the values of this run."""
    return [
        *_model(results),
        *_leaves(results),
        *_blocked(results),
        *_memory(results),
        *_startup(results),
        *_sharded(results),
    ]


def _model(results: Results) -> Iterator[Goal]:
    def ratio(metric: str, ours: str, theirs: str) -> float | None:
        return _divided(results.median("model", ours, metric), results.median("model", theirs, metric))

    for ours in (JAX, TORCH):
        yield Goal(name=f"1 GB, save, {ours} / raw disk", value=ratio("save_seconds", ours, "raw disk"), limit=1.3)
    yield Goal(name=f"1 GB, save, orbax / {JAX}", value=ratio("save_seconds", "orbax", JAX), limit=2.5, at_least=True)
    yield Goal(name=f"1 GB, save, {TORCH} / safetensors", value=ratio("save_seconds", TORCH, "safetensors"), limit=1.0)
    load = "load_numpy_seconds"
    for raw in ("raw disk", "raw disk, new memory"):
        yield Goal(name=f"1 GB, load, {JAX} / {raw}", value=ratio(load, JAX, raw), limit=1.3)
    yield Goal(name=f"1 GB, load, {JAX} / orbax", value=ratio(load, JAX, "orbax"), limit=1.0)
    yield Goal(name=f"1 GB, load, {TORCH} / safetensors", value=ratio(load, TORCH, "safetensors"), limit=1.0)
    load = "load_native_seconds"
    yield Goal(name=f"1 GB, load into jax, {JAX} / orbax", value=ratio(load, JAX, "orbax"), limit=1.0)
    yield Goal(name=f"1 GB, load into torch, {TORCH} / safetensors", value=ratio(load, TORCH, "safetensors"), limit=1.0)


def _leaves(results: Results) -> Iterator[Goal]:
    for what, metric, limit in (
        ("save", "save_seconds", 40),
        ("load into numpy", "load_numpy_seconds", 40),
        ("load into jax", "load_native_seconds", 15),
    ):
        orbax, ours = (results.median("leaves", name, metric) for name in ("orbax", JAX))
        yield Goal(
            name=f"10,000 leaves, {what}, orbax / {JAX}", value=_divided(orbax, ours), limit=limit, at_least=True
        )


def _blocked(results: Results) -> Iterator[Goal]:
    for what, workload, limit in (("1 GB", "model", 10.0), ("10,000 leaves", "leaves", 100.0)):
        seconds = results.median(workload, JAX, "blocked_seconds")
        value = None if seconds is None else seconds * 1000
        yield Goal(name=f"{what}, blocked, {JAX}", value=value, limit=limit, unit=" ms")
    copied = results.median("model", TORCH, "memcpy_seconds")
    blocked = results.median("model", TORCH, "blocked_seconds")
    yield Goal(name=f"1 GB, blocked, {TORCH} / memcpy into warm memory", value=_divided(blocked, copied), limit=1.5)


def _memory(results: Results) -> Iterator[Goal]:
    for what, metric in (("save", "save_memory"), ("async save", "async_memory")):
        extra = results.median("model", JAX, metric)
        value = None if extra is None else extra / MIB
        yield Goal(name=f"1 GB, {what}, extra peak memory, {JAX}", value=value, limit=128, unit=" MiB")
    measurements = results.workloads.get("model")
    for ours, kind in ((JAX, "numpy"), (JAX, "native"), (TORCH, "native")):
        extra = results.median("model", ours, f"load_{kind}_memory")
        value = None if extra is None or measurements is None else 1 + extra / measurements.nbytes
        into = "numpy" if kind == "numpy" else ours.partition("(")[2].rstrip(")")
        yield Goal(name=f"1 GB, load into {into}, peak memory / arrays", value=value, limit=1.1)


def _startup(results: Results) -> Iterator[Goal]:
    for what, metric, limit in (
        ("import holdfast", "import_seconds", 0.15),
        ("manager opened on 2,000 steps", "manager_seconds", 0.5),
    ):
        yield Goal(name=what, value=results.median("startup", "holdfast", metric), limit=limit, unit=" s")


def _sharded(results: Results) -> Iterator[Goal]:
    workload = "model, 2 processes"
    for what, metric in (("save", "save_seconds"), ("load", "load_native_seconds")):
        for ours in (JAX, TORCH):
            measured = results.median(workload, ours, metric)
            raw = "raw disk, new memory" if what == "load" else "raw disk"  # what is loaded is kept
            value = _divided(measured, results.median(workload, raw, metric))
            yield Goal(name=f"1 GB over 2 processes, {what}, {ours} / {raw}", value=value, limit=1.3)
            for theirs in ("orbax", "torch dcp"):  # twice as quick as a peer that the disk limits nothing can be
                value = _divided(results.median(workload, theirs, metric), measured)
                name = f"1 GB over 2 processes, {what}, {theirs} / {ours}"
                yield Goal(name=name, value=value, limit=1.0, at_least=True)


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator
