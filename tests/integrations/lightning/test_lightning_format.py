"""The version of what the callback adds to Lightning's own state: it is checked, and no change of it goes unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, load_checkpoint
from holdfast.integrations.lightning.trees import POSITION, VERSION, from_tree

WRITTEN = Path(__file__).with_name("written.txt")
DEPTH = 3  # keys of a path that are ours; below are names of the program and fields of Lightning


def outline(value: Any, keys: tuple[str, ...] = ()) -> list[str]:
    """Returns a line for each entry: its path and its type."""
    if isinstance(value, dict) and value and len(keys) < DEPTH:
        return [line for key, item in value.items() for line in outline(item, (*keys, str(key)))]
    return [f"{'/'.join(keys)}: {type(value).__name__}"]


def test_what_is_written_has_not_changed() -> None:
    directory = new_directory()
    callback = CheckpointCallback(directory, save_interval_steps=3)
    trainer = lightning.Trainer(callbacks=[callback], max_steps=3, **program.QUIET)
    trainer.fit(program.Model(), program.training_loader("shuffled"), program.validation_loader())
    tree = hf.load(directory)
    ours = {name: tree[name] for name in (POSITION, "state_dict_versions", "value_types", "tree_version")}

    written = "\n".join([f"version {tree['tree_version']}", *sorted(outline(ours)), ""])

    assert written == WRITTEN.read_text(), (
        f"the callback writes something else than version {VERSION}. Where the version of holdfast before could not "
        "read it, raise VERSION in integrations/lightning/trees.py; then write this test's file anew, with\n" + written
    )


@pytest.mark.parametrize("version", [VERSION + 1, "2", None])
def test_a_newer_version_is_refused(version: Any) -> None:
    with pytest.raises(
        hf.errors.FormatVersionError, match=rf"runs/x: .* has version {version!r}, .* up to {VERSION}; install"
    ):
        from_tree({"state_dict": {}, "tree_version": version}, "runs/x")


def test_a_run_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit() -> None:
        callback = CheckpointCallback(directory, save_interval_steps=3)
        trainer = lightning.Trainer(callbacks=[callback], max_steps=3, **program.QUIET)
        trainer.fit(program.Model(), program.training_loader("shuffled"), program.validation_loader())

    directory = new_directory()
    with monkeypatch.context() as newer:
        newer.setattr("holdfast.integrations.lightning.trees.VERSION", VERSION + 1)
        fit()
    with pytest.raises(hf.errors.FormatVersionError, match=f"has version {VERSION + 1}"):
        fit()
    with pytest.raises(hf.errors.FormatVersionError, match=f"has version {VERSION + 1}"):
        load_checkpoint(directory)
