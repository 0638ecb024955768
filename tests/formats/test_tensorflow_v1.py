"""Checkpoints of TensorFlow before 0.12 are told apart and refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.formats.tensorflow_writer import FLOAT, message, shape, table

import holdfast as hf
from holdfast.cli.main import main

EXTENT = message((1, message((1, b""))))
"""A slice of one axis that is all of it."""


def v1(path: Path) -> Path:
    """Writes the variable ``w`` as ``TensorSliceWriter`` does."""
    of_tensor = message((1, b"w"), (2, shape(2)), (3, FLOAT), (4, EXTENT))
    meta = message((1, message((1, of_tensor), (2, message((1, 1))))))
    data = message((2, message((1, b"w"), (2, EXTENT), (3, message((1, FLOAT), (5, np.ones(2, "<f4").tobytes()))))))
    path.write_bytes(table([(b"", meta), (b"\0\1w\0\1\1", data)]))
    return path


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        (("model.ckpt-100",), "model.ckpt-100"),
        (("model.ckpt-100-00000-of-00002", "model.ckpt-100-00001-of-00002"), "model.ckpt-100"),
        (("model.ckpt-100-00000-of-00002",), "model.ckpt-100-00000-of-00002"),
        (("model.ckpt-100", "model.ckpt-90"), "."),
        (("model.ckpt-100-00000-of-00001",), "."),
    ],
    ids=["file", "prefix of shards", "shard", "directory", "directory of shards"],
)
def test_it_is_refused_by_name(
    tmp_path: Path, files: tuple[str, ...], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        v1(tmp_path / name)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/old/model.ckpt-100"\n')

    with pytest.raises(hf.errors.FormatVersionError, match=rf"{files[0]} is a TensorFlow checkpoint .*V1.*Saver"):
        hf.load(tmp_path / asked)

    assert main(["ls", str(tmp_path / asked)]) == 1
    assert "before TensorFlow 0.12" in capsys.readouterr().err


def test_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    """An index file without its ending, a table's end on other bytes, and notes that name nothing."""
    guide = Path(__file__).parent / "tensorflow" / "guide"
    (tmp_path / "renamed").write_bytes((guide / "ckpt-5.index").read_bytes())
    (tmp_path / "ended").write_bytes(b"\1" * 100 + v1(tmp_path / "v1").read_bytes()[-8:])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "checkpoint").write_text('model_checkpoint_path: "../v1"\n')

    for name in ("renamed", "ended", "empty", "notes", "v2"):
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(tmp_path / name)
