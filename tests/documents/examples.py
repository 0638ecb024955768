"""The examples in the documentation, by page and name, and the tests that run them.

A block of Python, of commands or of a configuration is an example; its name is its language and its number on the page,
such as ``python 2``. A test declares the examples that it runs with ``@pytest.mark.examples(page, *names)``, all of the
page without names, and gets them from the fixture ``examples``, which sees to it that each of them is used. An example
that no test declares fails a test (``test_pages.py``).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "console", "yaml", "toml", "bash", "ini")
"""Of examples. Blocks of ``text`` show what is printed; commands in ``sh`` blocks are for the reader's machine."""

ALONE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "how_to").glob("*.md"))
"""Pages whose every program runs alone, whatever else is on the page."""

_BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    name: str
    language: str
    title: str | None  # the file that it is to be saved as
    line: int  # the number of lines before its text
    text: str


def pages() -> list[str]:
    """The pages, by their paths in the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page that name a language."""
    content = (ROOT / page).read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _BLOCK.finditer(content):
        indent, language, options, text = match.groups()
        title = re.search(r'title="([^"]+)"', options)
        number = sum(block.language == language for block in found) + 1
        text = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
        line = content.count("\n", 0, match.start(4))
        found.append(Block(f"{language} {number}", language, title[1] if title else None, line, text))
    return found


class Examples:
    """The examples of a page that a test runs."""

    def __init__(self, page: str, *names: str) -> None:
        self.page = page
        found = {block.name: block for block in blocks_of(page) if block.language in LANGUAGES}
        self._blocks = {name: found[name] for name in names} if names else found
        self.unused = set(self._blocks)

    def __getitem__(self, name: str) -> str:
        self.unused.discard(name)
        return self._blocks[name].text

    def items(self) -> list[tuple[str, str]]:
        """The names and texts of all examples, in the order of the page."""
        return [(name, self[name]) for name in self._blocks]

    def commands(self) -> list[str]:
        """The commands of all examples, without what they print and without comments."""
        texts = [self[name] for name, block in self._blocks.items() if block.language == "console"]
        lines = (line for text in texts for line in text.splitlines())
        return [re.split(r"  +#", line.removeprefix("$ "))[0].strip() for line in lines if line.startswith("$ ")]

    def run(self, names: dict[str, Any]) -> dict[str, Any]:
        """Run all programs with the same names, which are returned; errors name lines of the page."""
        for name, block in self._blocks.items():
            if block.language == "python":
                exec(compile("\n" * block.line + self[name], self.page, "exec", dont_inherit=True), names)
        return names


def declared() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Generate what tests declare: the test, the page, and the names of the examples."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        content = path.read_text(encoding="utf-8")
        if "mark.examples(" not in content:
            continue
        for node in ast.walk(ast.parse(content)):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.examples":
                    page, *names = map(ast.literal_eval, mark.args)
                    yield f"{path.name}::{node.name}", page, tuple(names)  # type: ignore[attr-defined]


def missing(done: dict[str, set[str]]) -> list[str]:
    """Return the examples that are on a page, and not among those done; and those that are done and not there."""
    found = []
    for page in sorted({*pages(), *done}):
        there = {block.name: block for block in blocks_of(page) if block.language in LANGUAGES}
        for name, block in there.items():
            if name not in done.get(page, set()):
                start = textwrap.shorten(block.text, 60)
                found.append(f"{page}:{block.line}: no test runs {name}: {start}")
        found += [f"{page} has no example {name}" for name in sorted(done.get(page, set()) - there.keys())]
    return found
