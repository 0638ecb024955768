"""The page for those who come from Orbax: its examples run, and the names in it are there."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from tests.documents.examples import Examples
from tests.starts import run

import holdfast as hf

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from_orbax.md").read_text(encoding="utf-8")


def as_program(name: str, text: str) -> str:
    """Makes a block part of one program, in which commands are calls."""
    if name.startswith("python"):
        return text
    commands = [shlex.split(line.removeprefix("$ holdfast")) for line in text.splitlines()]
    return "from holdfast.cli.main import main\n" + "".join(f"assert main({command}) == 0\n" for command in commands)


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/coming_from_orbax.md")
def test_the_examples_run_one_after_the_other(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text("\n".join(as_program(name, text) for name, text in examples.items()))
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"}
    done = run("-W", "ignore", "examples.py", backend="jax", cwd=tmp_path, env=os.environ | flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "[6, 8, 10]"


def test_the_names_of_the_page_are_there() -> None:
    names = set(re.findall(r"\bhf\.(\w+)", PAGE))
    assert names
    assert names <= set(hf.__all__)
    options = set(re.findall(r"`(\w+)=", PAGE)) & set(hf.CheckpointManagerOptions.__dataclass_fields__)
    assert options >= {"keep_time_interval", "save_interval_secs", "save_timeout_secs", "barrier_timeout_secs"}


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        page = (ROOT / "docs" / file).read_text(encoding="utf-8") if file else PAGE
        headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
        assert not anchor or anchor in headings
