"""The page of first questions: its examples run one after the other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tests.documents.examples import Examples

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

PAGE = Path(__file__).parents[2] / "docs" / "how_to.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.examples("docs/how_to.md")
def test_the_examples_run(examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = examples.run({"__name__": __name__})

    assert names["best"] == 4
    assert names["half"]["params"]["head"]["kernel"].dtype == "bfloat16"
    (hidden, fresh) = (names["filled"]["params"]["params"][name]["kernel"] for name in ("hidden_0", "hidden_1"))
    assert (hidden == names["params"]["params"]["hidden_0"]["kernel"]).all()
    assert fresh.shape == (8, 8)
    assert (names["first"]["params"]["params"]["first"]["kernel"] == hidden).all()
    with hf.CheckpointManager(
        "runs/net", options=hf.CheckpointManagerOptions(read_only=True, max_to_keep=1)
    ) as manager:
        assert manager.why_kept(names["best"]) == ("pinned",)


def test_the_arguments_in_the_table_are_there() -> None:
    rows = [line.split("|")[2] for line in TEXT.splitlines() if line.startswith("| ")]
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
