"""``holdfast diff``, and ``show`` with ``--stats``, ``--select`` and ``--tree``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from tests.cli.commands import Cli, flip_bits

import holdfast as hf
from holdfast.engine.sources import comparison, leaf_statistics, open_checkpoint
from holdfast.engine.storage import as_location

TREE: dict[str, Any] = {
    "a": {"w": np.arange(12.0).reshape(3, 4), "k": np.array([1, np.nan, np.inf], np.float32)},
    "n": 3,
    "s": "x",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Makes a run with the steps 1 and 2, in which one element and one number differ."""
    with hf.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TREE)
        weights = TREE["a"]["w"].copy()
        weights[1, 1] += 1e-9
        manager.save(2, {**TREE, "a": {**TREE["a"], "w": weights}, "n": 4})
    return tmp_path / "run"


def test_differences(cli: Cli, run: Path, tmp_path: Path) -> None:
    lines = cli.output("diff", run, run, "--step", 1, "--other-step", 2, status=1).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["state/a/w", "state/n"]
    assert "1 of 12 elements differ, by at most 1e-09; the first at [1, 1]" in lines[1]
    assert lines[-1] == f"2 leaves differ between {run}/1 and {run}/2"
    for steps in ([run, run, 1, 2], [run, 1, run, 2], [run, 1, run, "--other-step", 2]):
        assert cli.output("diff", *steps, status=1).splitlines() == lines

    found = cli.json("diff", run / "1", run / "2", "--rtol", "1e-6", status=1)
    assert [(one["path"], one["kind"], one["first"]) for one in found["differences"]] == [("n", "values", [])]
    cli.output("diff", run / "1", run / "2", "--rtol", "0.5", status=0)
    said = cli.output("diff", run, run / "2")
    assert said == f"{run}/2 and {run}/2 are the same, bit for bit\n"
    np.savez(tmp_path / "w.npz", w=TREE["a"]["w"])  # a checkpoint of another library
    hf.save(tmp_path / "w", {"w": TREE["a"]["w"]})
    assert "are the same" in cli.output("diff", tmp_path / "w.npz", tmp_path / "w")


def test_what_cannot_be_compared_is_no_difference(cli: Cli, run: Path) -> None:
    assert "no such directory" in cli.error("diff", run, run / "nowhere", status=2)
    assert "'x' is not a valid integer" in cli.error("diff", run, "x", run, "2", status=2)
    flip_bits(run / "2")
    assert "damaged" in cli.error("diff", run / "1", run / "2", status=2)


def test_statistics_of_leaves(cli: Cli, run: Path) -> None:
    shown = cli.json("show", run, 1, "--stats")["leaves"]
    found = {leaf["path"]: leaf["statistics"] for leaf in shown}
    assert (found["n"]["minimum"], found["s"]) == (3.0, None)
    assert (found["a/k"]["size"], found["a/k"]["maximum"], found["a/k"]["nan"], found["a/k"]["inf"]) == (3, 1.0, 1, 1)
    assert math.isclose(found["a/w"]["norm"], np.linalg.norm(TREE["a"]["w"]))
    table = cli.output("show", run, 1, "--stats", "--select", "a/*").splitlines()
    assert table[0].split()[-6:] == ["MIN", "MAX", "MEAN", "NORM", "NAN", "INF"]
    assert len(table) == 5
    assert "matches no leaf" in cli.error("show", run, "--select", "b/**", status=2)


def test_the_tree(cli: Cli, run: Path) -> None:
    assert cli.output("show", run, 1, "--tree").splitlines()[1:] == [
        "  state/  116 B",
        "    a/  108 B",
        "      w  96 B  float64[3, 4]",
        "      k  12 B  float32[3]",
        "    n  8 B  int64[]",
        "    s  0 B  str 'x'",
    ]
    lines = cli.output("show", run, 1, "--tree", "--stats").splitlines()
    assert lines[4].split("  ")[-1] == "float32[3], min 1, max 1, mean 1, norm 1, nan 1, inf 1"
    assert lines[6].split("  ")[-1] == "str 'x'"


def test_statistics_of_leaves_that_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of any size, and with leaves among them that hold no numbers, the same as one by one."""
    sizes = [3, 0, 40, 1, 200, 5, 5, 5, 90]
    tree: dict[str, Any] = {f"w{n}": np.arange(size, dtype=np.float32) - n for n, size in enumerate(sizes)}
    hf.save(tmp_path / "x", {**tree, "text": "x", "times": np.zeros(2, "M8[s]"), "yes": np.array([True])})
    opened = open_checkpoint(as_location(tmp_path / "x"))
    alone = [found for name in [*tree, "yes"] for found in leaf_statistics(opened, name)]
    assert [found.size for found in alone] == [*sizes, 1]
    for most, least in ((100, 1), (400, 200), (1, 1), (1 << 20, 1)):
        monkeypatch.setattr(comparison, "_BATCH", most)
        monkeypatch.setattr(comparison, "_LEAST", least)
        assert list(leaf_statistics(opened)) == alone


@given(
    values=st_numpy.arrays(
        st.sampled_from([np.float32, np.float64, np.int16, np.bool_, np.complex64]),
        st_numpy.array_shapes(max_dims=3, max_side=7),
        elements=None,
    ),
    part=st.sampled_from([8, 64, 1 << 20]),
)
def test_statistics_are_those_of_the_whole_array(
    tmp_path_factory: pytest.TempPathFactory, values: np.ndarray[Any, Any], part: int
) -> None:
    place = tmp_path_factory.mktemp("statistics") / "x"
    hf.save(place, {"x": values})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_PART", part)
        (found,) = leaf_statistics(open_checkpoint(as_location(place)))

    is_complex = values.dtype.kind == "c"
    numbers = np.abs(values.astype(np.complex128)) if is_complex else values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    assert (found.size, found.nan) == (values.size, int(np.isnan(numbers).sum()))
    assert found.inf == values.size - finite.size - found.nan
    if not finite.size:
        assert found.mean is None
        return
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    scale = max(1e-300, float(np.abs(finite).max()))
    assert found.mean is not None
    assert found.deviation is not None
    assert abs(found.mean / scale - (finite / scale).mean()) < 1e-9
    if 1e-100 < scale < 1e150:  # elsewhere squares leave the range of float64
        assert abs(found.deviation / scale - (finite / scale).std()) < 1e-6
