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

from holdfast.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
HOME = "/home/ada/project"  # the folder in which the pages' commands run
_BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_VARIES = re.compile(r"\d[\d.,]* (?:[kMG]?B(?:/s)?|s|ms|min|h)\b")


def run_page(name: str, folder: Path) -> dict[str, Any]:
    """Runs a page in an empty folder, which is the working directory; returns the names that its programs have."""
    text = (DOCS / name).read_text(encoding="utf-8")
    shims = _shims(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for found in _BLOCK.finditer(text):
        indent, language, options, body = found.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        title = re.search(r'title="([^"]+)"', options)
        line = text.count("\n", 0, found.start(4))
        if title is not None:
            Path(title[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(title[1]).write_text(body, encoding="utf-8")
        elif language == "python":
            try:
                exec(compile("\n" * line + body, str(DOCS / name), "exec", dont_inherit=True), names)
            except SystemExit as end:
                if end.code:
                    raise AssertionError(f"{name}:{line}: status {end.code}") from end
        elif language == "console":
            for command, expected in _commands(body):
                printed = _run(command, folder, shims)
                assert _matches(printed, expected), f"{name}:{line}: $ {command}\n{printed}\nexpected:\n{expected}"
    return names


def _commands(body: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    return [(command, expected) for command, _, expected in (part.partition("\n") for part in parts[1:])]


def _shims(folder: Path) -> Path:
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
