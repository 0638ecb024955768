"""The pages of How do I: each snippet runs alone, in an empty folder."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tests.documents.examples import ALONE, ROOT, blocks_of

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

SNIPPETS = [(page, block.name) for page in ALONE for block in blocks_of(page) if block.language == "python"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("page", "name"), SNIPPETS)
def test_a_snippet_runs_alone(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in blocks_of(page) if block.name == name]
    try:
        exec(compile("\n" * block.line + block.text, page, "exec", dont_inherit=True), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"status {end.code}") from end


def test_the_arguments_in_the_table_are_there() -> None:
    text = (ROOT / "docs" / "migrate" / "model_checkpoint.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`(\w+)=", "".join(rows)))

    assert named >= {"best_fn", "save_on_best"}
    assert named <= set(inspect.signature(CheckpointCallback).parameters)


def test_a_renamed_step_is_reported(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(300, {"x": 1})
    (tmp_path / "300").rename(tmp_path / "400")

    (found,) = hf.list_checkpoints(tmp_path)

    assert "written for step 300" in (found.damage or "")
    with pytest.raises(hf.DamagedCheckpointError, match=r"for step 300, .* step 400; give the step its name back"):
        hf.load(tmp_path)
    assert hf.load(tmp_path / "400") == {"x": 1}
