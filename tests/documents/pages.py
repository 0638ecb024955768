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
from tests.starts import backend_of, run

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
    if re.search(r"[;&<>]|(?<!\|)\|(?!\|)", command) or not command.startswith(("holdfast ", "python ")):
        return _shown(_in_a_shell(command, shims), folder)
    command, _, otherwise = command.partition(" || ")
    name, *arguments = shlex.split(command, comments=True)
    if name == "holdfast":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = main(arguments)
        text = printed.getvalue()
    else:
        backend = backend_of(Path(arguments[0]).read_text(encoding="utf-8"))
        done = run("-W", "ignore", *arguments, backend=backend, merged=True)
        status, text = done.returncode, done.stdout
    if status and otherwise:
        text += _in_a_shell(f"(exit {status if status > 0 else 128 - status}) || {otherwise}", shims)
    return _shown(text, folder)


def _in_a_shell(command: str, shims: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return "".join(line for line in done.stdout.splitlines(True) if not line.startswith("bash: "))


def _shown(text: str, folder: Path) -> str:
    return text.replace(str(folder.resolve()), HOME)


def _matches(printed: str, expected: str) -> bool:
    lines = [" ".join(_VARIES.sub("~", line).split()) for line in expected.splitlines()]
    said = "".join(f"{' '.join(_VARIES.sub('~', line).split())}\n" for line in printed.splitlines() if line.strip())
    patterns = [
        "(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in lines if line
    ]
    return re.fullmatch("".join(patterns), said) is not None
