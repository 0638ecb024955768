"""The versions that pyproject.toml declares are those that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = sorted({one for name in EXTRAS if name != "dev" for one in EXTRAS[name]} | set(PROJECT["dependencies"]))


def pins(file: str) -> dict[str, str]:
    """Returns the versions that a file of constraints pins."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def parsed(requirement: str) -> tuple[str, str]:
    """Returns the name of a requirement and its lower bound."""
    match = re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    assert match, f"{requirement} needs a lower bound"
    return match[1], match[2]


@pytest.mark.parametrize("requirement", [one for one in REQUIREMENTS if not one.startswith("holdfast")])
def test_the_lower_bound_is_tested(requirement: str) -> None:
    name, lowest = parsed(requirement)
    if name != "torch":  # minimum.txt says why
        assert re.fullmatch(rf"{re.escape(lowest)}(\.0)*", pins("minimum.txt")[name])
    assert name in pins("constraints.txt")


def test_releases_with_malware_are_excluded() -> None:
    """See https://github.com/Lightning-AI/pytorch-lightning/issues/21691."""
    for requirement in (*EXTRAS["lightning"], *EXTRAS["dev"]):
        if "lightning" in requirement:
            assert requirement.endswith(",!=2.6.2,!=2.6.3")
