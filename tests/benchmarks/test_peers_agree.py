"""A few of the random comparisons with other libraries: ``python -m benchmarks.peers_agree`` runs more of them."""

from __future__ import annotations

import sys

import pytest
from benchmarks.peers_agree import cases, main, run

pytest.importorskip("orbax.checkpoint")
KINDS = {name: kind for name, kind in cases(None).items() if not isinstance(kind, str)}


@pytest.mark.parametrize("name", KINDS)
def test_a_few_cases_agree(name: str) -> None:
    assert run(KINDS[name], name, range(2)) == []


def test_what_is_not_installed_is_skipped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "TensorFlow", "--tensorflow", sys.executable]) == 0
    assert capsys.readouterr().out.count("skipped: TensorFlow is not installed: --tensorflow PYTHON") == 3
