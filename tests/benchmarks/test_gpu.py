"""The run on a machine with a GPU: it brings what is missing along, and every part of it ends in time."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from benchmarks import gpu


def test_what_is_brought_along_and_which_tests_run() -> None:
    """All that holdfast needs, but nothing that would replace what torch and jax were built with."""
    names = {gpu._name(each) for each in gpu.requirements()}
    assert {"tensorstore", "xxhash", "google-crc32c", "pytest", "hypothesis"} <= names
    assert not names & {"numpy", "ml_dtypes", "torch", "jax"}
    files = {"tests/checkpoint/test_accelerators.py", "tests/checkpoint/test_pinned_arrays.py"}
    assert {*files, "gpu"} <= set(gpu.tests("cuda"))
    assert "not gpu and not sweep" in gpu.tests("cpu")


def wheel(folder: Path, name: str) -> None:
    """Writes a package with one empty module."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in {
            f"{name}.py": "",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }.items():
            file.writestr(path, text)


def test_only_what_is_missing_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is neither installed nor in the folder is named, and does not keep the others away."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel(wheels, "a_missing_package")
    monkeypatch.setattr(gpu, "requirements", lambda: ["numpy>=1.26", "a_missing_package>=1", "another_missing_package"])
    gpu.main(["--wheels", str(wheels), "unpack", "--site", str(site)])
    assert sorted(path.name for path in site.glob("*.py")) == ["a_missing_package.py"]
    assert not (site / "numpy").exists()
    assert "another_missing_package: neither installed nor in" in capsys.readouterr().out


def test_parts_that_take_too_long(tmp_path: Path) -> None:
    """Each of them is stopped, and the file of results says so."""
    out = tmp_path / "out"
    options = ["--device", "cpu", "--seconds", "0.1", "--out", str(out), "--directory", str(tmp_path / "runs")]
    assert gpu.main(["--wheels", str(tmp_path), "run", *options]) == 1
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [one["part"] for one in found if "part" in one] == ["packages", "tests", "measurements"]
    with (out / "output.txt").open("ab") as output:
        waits = [sys.executable, "-c", "import signal; signal.pause()"]
        assert gpu._run(waits, os.environ, 0.1, output) is None
