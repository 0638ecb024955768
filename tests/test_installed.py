"""Messages name the command for the way in which this copy was installed, never the name of a stranger alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.engine import installed
from holdfast.engine.installed import install_command

ROOT = Path(__file__).parents[1]

ORIGINS: list[tuple[dict[str, object] | None, str]] = [
    (None, "'holdfast-checkpoint[cli,flax]'"),  # from an index, which leaves no note
    ({"url": "file:///src/holdfast", "dir_info": {}}, "'/src/holdfast[cli,flax]'"),
    ({"url": "file:///src/holdfast", "dir_info": {"editable": True}}, "-e '/src/holdfast[cli,flax]'"),
    (
        {"url": "https://git.example/holdfast", "vcs_info": {"vcs": "git", "commit_id": "f" * 40}},
        "'holdfast-checkpoint[cli,flax] @ git+https://git.example/holdfast'",
    ),
    (
        {"url": "https://git.example/h", "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "f" * 40}},
        "'holdfast-checkpoint[cli,flax] @ git+https://git.example/h@v1'",
    ),
    (
        {"url": "file:///dist/holdfast_checkpoint-1-py3-none-any.whl", "archive_info": {}},
        "'holdfast-checkpoint[cli,flax] @ file:///dist/holdfast_checkpoint-1-py3-none-any.whl'",
    ),
]


def install(place: Path, name: str, origin: object = None, entry_points: str | None = None) -> None:
    """Install a distribution without files of its own, as pip notes one."""
    facts = place / f"{name.replace('-', '_')}-0.5.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.1\n")
    if origin is not None:
        (facts / "direct_url.json").write_text(json.dumps(origin))
    if entry_points is not None:
        (facts / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(("origin", "command"), ORIGINS)
def test_the_command_is_that_of_this_copy(
    origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "holdfast-checkpoint", origin)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "holdfast" / "engine" / "installed.py"))
    assert install_command("cli", "flax") == f"pip install {command}"


def test_a_checkout_needs_no_installation() -> None:
    assert install_command("cli") == f"pip install -e '{ROOT}[cli]'"


@pytest.mark.parametrize(
    ("name", "entry_points", "is_said"),
    [
        ("holdfast", None, True),
        ("holdfast", "[console_scripts]\nholdfast = holdfast.app:run\n", True),
        ("holdfast", "[console_scripts]\nholdfast = holdfast.cli.main:main\n", False),  # an earlier version of ours
        ("holdfast-checkpoint", None, False),
        ("holdfast-other", None, False),
    ],
)
def test_a_stranger_of_the_same_name_gets_one_line(
    name: str, entry_points: str | None, is_said: bool, tmp_path: Path
) -> None:
    install(tmp_path, name, entry_points=entry_points)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import holdfast"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert len(lines) == is_said, done.stderr
    assert all("another project's package `holdfast` is installed beside holdfast-checkpoint" in one for one in lines)


def test_no_text_names_the_stranger() -> None:
    folders = [ROOT / name for name in ("cli", "docs", "engine", "integrations", "recipes")]
    texts = [path for folder in folders for path in folder.rglob("*.[mp]*") if path.suffix in (".md", ".py")]
    others = {ROOT / "engine" / "storage" / "azure.py"}
    named = "install '" + "holdfast["
    assert [path for path in {ROOT / "README.md", *texts} - others if named in path.read_text(encoding="utf-8")] == []
