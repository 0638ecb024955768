"""Runs a page of the documentation: its programs, its files and its commands, from top to bottom, in one folder.

- ``python`` blocks run one after the other with the same names; with ``title="train.py"``, they are written to that
  file, as blocks of other languages with a title are.
- ``console`` blocks have commands after ``$``. What a command prints is below it, and has to be that, up to spaces,
  ages, times and sizes. ``...`` stands for any text, and on a line of its own for any lines.
- ``sh`` blocks are not run: they are for the reader's machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.documents.examples import LANGUAGES, blocks_of

from holdfast.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
HOME = "/home/ada/project"  # the folder in which the pages' commands run
_VARIES = re.compile(r"\d[\d.,]* (?:[kMG]?B(?:/s)?|s|ms|min|h)\b")


def run_page(name: str, folder: Path) -> dict[str, Any]:
    """Runs a page in an empty folder, which is the working directory; returns the names that its programs have."""
    shims = make_shims(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(f"docs/{name}"):
        place = f"{name}:{block.line}"
        if block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            try:
                exec(compile("\n" * block.line + block.text, str(DOCS / name), "exec", dont_inherit=True), names)
            except SystemExit as end:
                if end.code:
                    raise AssertionError(f"{place}: status {end.code}") from end
        elif block.language == "console":
            run_commands(block.text, folder, shims, place)
        else:
            assert block.language not in LANGUAGES, f"{place}: give this a title, the file that it belongs in"
    return names


def run_commands(body: str, folder: Path, shims: Path, place: str = "") -> None:
    """Run the commands of a block, each of which has to print what stands below it."""
    for command, expected in _commands(body):
        printed = _run(command, folder, shims)
        assert _matches(printed, expected), f"{place}: $ {command}\n{printed}\nexpected:\n{expected}"


def _commands(body: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    return [(command, expected) for command, _, expected in (part.partition("\n") for part in parts[1:])]


def make_shims(folder: Path) -> Path:
    """Makes ``python`` and ``holdfast`` those of this environment."""
    shims = folder.parent / f"{folder.name}-bin"
    shims.mkdir()
    for name, command in (("python", ""), ("holdfast", " -m holdfast")):
        (shims / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -W ignore{command} "$@"\n')
        (shims / name).chmod(stat.S_IRWXU)
    return shims


def _run(command: str, folder: Path, shims: Path) -> str:
    if command.startswith("holdfast ") and not re.search(r"[|;&<>]", command):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(shlex.split(command, comments=True)[1:])
        text = printed.getvalue()
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        text = "".join(line for line in done.stdout.splitlines(True) if not line.startswith("bash: "))
    return text.replace(str(folder.resolve()), HOME)


def _matches(printed: str, expected: str) -> bool:
    lines = [" ".join(_VARIES.sub("~", line).split()) for line in expected.splitlines()]
    said = "".join(f"{' '.join(_VARIES.sub('~', line).split())}\n" for line in printed.splitlines() if line.strip())
    patterns = [
        "(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in lines if line
    ]
    return re.fullmatch("".join(patterns), said) is not None
